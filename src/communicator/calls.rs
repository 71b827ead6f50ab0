//! From the arguments of an operation to its [`Call`], the same for every form.
//!
//! Buffers are raw slices of whole elements of `T`, on the host or on a device. `rank` and `world`
//! are those of the communicator. [`Call::check`] checks the lengths; an error here means that
//! there is no call to check.

use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::call::{Call, Counts};
use crate::error::{ArgumentError, Error, Result};
use crate::types::{Element, Op, Part, Rank, ReduceOp, Tag};

fn refuse(op: Op, problem: ArgumentError) -> Error {
    Error::Argument { op, problem }
}

/// Returns the number of elements of a buffer, from its bytes.
#[inline]
fn elements<T>(bytes: usize) -> usize {
    bytes / size_of::<T>()
}

/// The elements of one rank's block, where `given` are those of all.
fn block(op: Op, buffer: &'static str, given: usize, world_size: usize) -> Result<usize> {
    if given.is_multiple_of(world_size) {
        Ok(given / world_size)
    } else {
        Err(refuse(op, ArgumentError::Blocks { buffer, given, world_size }))
    }
}

fn counts(op: Op, counts: &[usize], world_size: usize) -> Result<Option<Counts>> {
    if counts.len() != world_size {
        return Err(refuse(op, ArgumentError::Counts { given: counts.len(), world_size }));
    }
    Counts::new(counts).map(Some).ok_or_else(|| refuse(op, ArgumentError::TooMany { count: usize::MAX }))
}

/// A rank's block of a whole buffer.
fn own<T: Element>(buf: RawSliceMut, range: std::ops::Range<usize>) -> RawSliceMut {
    let size = size_of::<T>();
    buf.skip((range.start * size).min(buf.len)).take(range.len() * size)
}

/// Returns the call of an operation without a root and without a count for each rank: its
/// count is that of what a rank sends.
pub(super) fn of<T: Element>(op: Op, send: RawSlice, recv: RawSliceMut, world: usize) -> Result<Call> {
    let count = match op.form() {
        [Part::All, _] => block(op, "send", elements::<T>(send.len), world)?,
        _ => elements::<T>(send.len),
    };
    Ok(Call { count, send, recv, ..Call::new::<T>(op) })
}

pub(super) fn all_reduce<T: Element>(buf: RawSliceMut, redop: ReduceOp) -> Call {
    Call { redop: Some(redop), count: elements::<T>(buf.len), send: buf.as_const(), recv: buf, ..Call::new::<T>(Op::AllReduce) }
}

pub(super) fn all_reduce_into<T: Element>(send: RawSlice, recv: RawSliceMut, redop: ReduceOp) -> Call {
    Call { redop: Some(redop), count: elements::<T>(send.len), send, recv, ..Call::new::<T>(Op::AllReduce) }
}

pub(super) fn broadcast<T: Element>(buf: RawSliceMut, root: Rank) -> Call {
    Call { root, count: elements::<T>(buf.len), send: buf.as_const(), recv: buf, ..Call::new::<T>(Op::Broadcast) }
}

pub(super) fn broadcast_into<T: Element>(send: Option<RawSlice>, recv: RawSliceMut, root: Rank, rank: Rank) -> Result<Call> {
    let count = elements::<T>(recv.len);
    let send = needed_by_root(Op::Broadcast, "send", send, root, rank)?.unwrap_or(RawSlice::EMPTY);
    Ok(Call { root, count, send, recv, ..Call::new::<T>(Op::Broadcast) })
}

pub(super) fn reduce<T: Element>(buf: RawSliceMut, redop: ReduceOp, root: Rank) -> Call {
    Call {
        redop: Some(redop),
        root,
        count: elements::<T>(buf.len),
        send: buf.as_const(),
        recv: buf,
        ..Call::new::<T>(Op::Reduce)
    }
}

pub(super) fn reduce_into<T: Element>(
    send: RawSlice,
    recv: Option<RawSliceMut>,
    redop: ReduceOp,
    root: Rank,
    rank: Rank,
) -> Result<Call> {
    let recv = needed_by_root(Op::Reduce, "receive", recv, root, rank)?.unwrap_or(RawSliceMut::EMPTY);
    Ok(Call { redop: Some(redop), root, count: elements::<T>(send.len), send, recv, ..Call::new::<T>(Op::Reduce) })
}

/// The buffer that only the root has to give, if it was given.
fn needed_by_root<B>(op: Op, buffer: &'static str, given: Option<B>, root: Rank, rank: Rank) -> Result<Option<B>> {
    if given.is_none() && rank == root { Err(refuse(op, ArgumentError::RootBuffer { buffer })) } else { Ok(given) }
}

pub(super) fn barrier() -> Call {
    Call::new::<u8>(Op::Barrier)
}

pub(super) fn all_gather<T: Element>(send: RawSlice, recv: RawSliceMut) -> Call {
    Call { count: elements::<T>(send.len), send, recv, ..Call::new::<T>(Op::AllGather) }
}

pub(super) fn all_gather_in_place<T: Element>(buf: RawSliceMut, rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::AllGather, "receive", elements::<T>(buf.len), world)?;
    let send = own::<T>(buf, rank * count..(rank + 1) * count).as_const();
    Ok(Call { count, send, recv: buf, ..Call::new::<T>(Op::AllGather) })
}

pub(super) fn all_gather_v<T: Element>(send: RawSlice, recv: RawSliceMut, per_rank: &[usize], world: usize) -> Result<Call> {
    let recv_counts = counts(Op::AllGatherV, per_rank, world)?;
    Ok(Call { send, recv, recv_counts, ..Call::new::<T>(Op::AllGatherV) })
}

pub(super) fn all_gather_v_in_place<T: Element>(buf: RawSliceMut, per_rank: &[usize], rank: Rank, world: usize) -> Result<Call> {
    let recv_counts = counts(Op::AllGatherV, per_rank, world)?;
    let send = recv_counts.as_ref().map_or(RawSlice::EMPTY, |counts| own::<T>(buf, counts.range(rank)).as_const());
    Ok(Call { send, recv: buf, recv_counts, ..Call::new::<T>(Op::AllGatherV) })
}

pub(super) fn reduce_scatter<T: Element>(send: RawSlice, recv: RawSliceMut, redop: ReduceOp) -> Call {
    Call { redop: Some(redop), count: elements::<T>(recv.len), send, recv, ..Call::new::<T>(Op::ReduceScatter) }
}

pub(super) fn reduce_scatter_in_place<T: Element>(buf: RawSliceMut, redop: ReduceOp, rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::ReduceScatter, "send", elements::<T>(buf.len), world)?;
    let recv = own::<T>(buf, rank * count..(rank + 1) * count);
    Ok(Call { redop: Some(redop), count, send: buf.as_const(), recv, ..Call::new::<T>(Op::ReduceScatter) })
}

pub(super) fn reduce_scatter_v<T: Element>(
    send: RawSlice,
    recv: RawSliceMut,
    per_rank: &[usize],
    redop: ReduceOp,
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::ReduceScatterV, per_rank, world)?;
    Ok(Call { redop: Some(redop), send, recv, send_counts, ..Call::new::<T>(Op::ReduceScatterV) })
}

pub(super) fn reduce_scatter_v_in_place<T: Element>(
    buf: RawSliceMut,
    per_rank: &[usize],
    redop: ReduceOp,
    rank: Rank,
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::ReduceScatterV, per_rank, world)?;
    let recv = send_counts.as_ref().map_or(RawSliceMut::EMPTY, |counts| own::<T>(buf, counts.range(rank)));
    Ok(Call { redop: Some(redop), send: buf.as_const(), recv, send_counts, ..Call::new::<T>(Op::ReduceScatterV) })
}

pub(super) fn all_to_all_v<T: Element>(
    send: RawSlice,
    send_per_rank: &[usize],
    recv: RawSliceMut,
    recv_per_rank: &[usize],
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::AllToAllV, send_per_rank, world)?;
    let recv_counts = counts(Op::AllToAllV, recv_per_rank, world)?;
    Ok(Call { send, recv, send_counts, recv_counts, ..Call::new::<T>(Op::AllToAllV) })
}

pub(super) fn gather<T: Element>(send: RawSlice, recv: Option<RawSliceMut>, root: Rank, rank: Rank) -> Result<Call> {
    let recv = needed_by_root(Op::Gather, "receive", recv, root, rank)?.unwrap_or(RawSliceMut::EMPTY);
    Ok(Call { root, count: elements::<T>(send.len), send, recv, ..Call::new::<T>(Op::Gather) })
}

pub(super) fn gather_in_place<T: Element>(buf: RawSliceMut, root: Rank, rank: Rank, world: usize) -> Result<Call> {
    let call = all_gather_in_place::<T>(buf, rank, world)?;
    Ok(Call { op: Op::Gather, root, ..call })
}

pub(super) fn scatter<T: Element>(send: Option<RawSlice>, recv: RawSliceMut, root: Rank, rank: Rank) -> Result<Call> {
    let count = elements::<T>(recv.len);
    let send = needed_by_root(Op::Scatter, "send", send, root, rank)?.unwrap_or(RawSlice::EMPTY);
    Ok(Call { root, count, send, recv, ..Call::new::<T>(Op::Scatter) })
}

pub(super) fn scatter_in_place<T: Element>(buf: RawSliceMut, root: Rank, rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::Scatter, "send", elements::<T>(buf.len), world)?;
    let recv = own::<T>(buf, rank * count..(rank + 1) * count);
    Ok(Call { root, count, send: buf.as_const(), recv, ..Call::new::<T>(Op::Scatter) })
}

pub(super) fn send<T: Element>(buf: RawSlice, to: Rank) -> Call {
    Call { root: to, count: elements::<T>(buf.len), send: buf, ..Call::new::<T>(Op::Send) }
}

pub(super) fn recv<T: Element>(buf: RawSliceMut, from: Rank) -> Call {
    Call { root: from, count: elements::<T>(buf.len), recv: buf, ..Call::new::<T>(Op::Recv) }
}

/// Gives a send or a receive a tag.
pub(super) fn tagged(call: Call, tag: Tag) -> Call {
    Call { tag, ..call }
}

/// Receives from any rank, which is written to `source`. The call's peer is this rank, which stands
/// for one not known yet.
pub(super) fn recv_any<T: Element>(buf: RawSliceMut, source: &mut Rank, rank: Rank) -> Call {
    Call { source: Some(Source::Rank(source)), ..recv::<T>(buf, rank) }
}
