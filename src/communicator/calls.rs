//! Calls from typed buffers: what the blocking, the scoped and the asynchronous methods have in common.

use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::error::{Argument, Error, Result};
use crate::exec::call::{Call, Counts};
use crate::types::{Element, Op, Rank, ReduceOp};

fn refuse(op: Op, problem: Argument) -> Error {
    Error::Argument { op, problem }
}

/// A buffer's elements per rank.
fn block(op: Op, buffer: &'static str, given: usize, world_size: usize) -> Result<usize> {
    if given.is_multiple_of(world_size) {
        Ok(given / world_size)
    } else {
        Err(refuse(op, Argument::Blocks { buffer, given, world_size }))
    }
}

fn counts(op: Op, counts: &[usize], world_size: usize) -> Result<Option<Counts>> {
    if counts.len() != world_size {
        return Err(refuse(op, Argument::Counts { given: counts.len(), world_size }));
    }
    Counts::new(counts).map(Some).ok_or_else(|| refuse(op, Argument::TooMany { count: usize::MAX }))
}

/// A rank's block of a whole buffer.
fn own<T: Element>(buf: RawSliceMut, range: std::ops::Range<usize>) -> RawSliceMut {
    let size = size_of::<T>();
    buf.skip((range.start * size).min(buf.len)).take(range.len() * size)
}

pub(super) fn all_reduce<T: Element>(buf: &mut [T], redop: ReduceOp) -> Call {
    let recv = RawSliceMut::of(buf);
    Call { redop: Some(redop), count: buf.len(), send: recv.as_const(), recv, ..Call::new::<T>(Op::AllReduce) }
}

pub(super) fn all_reduce_into<T: Element>(send: &[T], recv: &mut [T], redop: ReduceOp) -> Call {
    let (count, send) = (send.len(), RawSlice::of(send));
    Call { redop: Some(redop), count, send, recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::AllReduce) }
}

pub(super) fn broadcast<T: Element>(buf: &mut [T], root: Rank) -> Call {
    let recv = RawSliceMut::of(buf);
    Call { root, count: buf.len(), send: recv.as_const(), recv, ..Call::new::<T>(Op::Broadcast) }
}

pub(super) fn broadcast_into<T: Element>(send: Option<&[T]>, recv: &mut [T], root: Rank, rank: Rank) -> Result<Call> {
    let count = recv.len();
    let send = needed_by_root(Op::Broadcast, "send", send.map(RawSlice::of), root, rank)?.unwrap_or(RawSlice::EMPTY);
    Ok(Call { root, count, send, recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::Broadcast) })
}

pub(super) fn reduce<T: Element>(buf: &mut [T], redop: ReduceOp, root: Rank) -> Call {
    let recv = RawSliceMut::of(buf);
    Call { redop: Some(redop), root, count: buf.len(), send: recv.as_const(), recv, ..Call::new::<T>(Op::Reduce) }
}

pub(super) fn reduce_into<T: Element>(
    send: &[T],
    recv: Option<&mut [T]>,
    redop: ReduceOp,
    root: Rank,
    rank: Rank,
) -> Result<Call> {
    let recv = needed_by_root(Op::Reduce, "receive", recv.map(RawSliceMut::of), root, rank)?.unwrap_or(RawSliceMut::EMPTY);
    Ok(Call { redop: Some(redop), root, count: send.len(), send: RawSlice::of(send), recv, ..Call::new::<T>(Op::Reduce) })
}

/// A buffer that only the root has to give.
fn needed_by_root<B>(op: Op, buffer: &'static str, given: Option<B>, root: Rank, rank: Rank) -> Result<Option<B>> {
    if given.is_none() && rank == root { Err(refuse(op, Argument::RootBuffer { buffer })) } else { Ok(given) }
}

pub(super) fn barrier() -> Call {
    Call::new::<u8>(Op::Barrier)
}

pub(super) fn all_gather<T: Element>(send: &[T], recv: &mut [T]) -> Call {
    Call { count: send.len(), send: RawSlice::of(send), recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::AllGather) }
}

pub(super) fn all_gather_in_place<T: Element>(buf: &mut [T], rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::AllGather, "receive", buf.len(), world)?;
    let recv = RawSliceMut::of(buf);
    let send = own::<T>(recv, rank * count..(rank + 1) * count).as_const();
    Ok(Call { count, send, recv, ..Call::new::<T>(Op::AllGather) })
}

pub(super) fn all_gather_v<T: Element>(send: &[T], recv: &mut [T], per_rank: &[usize], world: usize) -> Result<Call> {
    let recv_counts = counts(Op::AllGatherV, per_rank, world)?;
    Ok(Call { send: RawSlice::of(send), recv: RawSliceMut::of(recv), recv_counts, ..Call::new::<T>(Op::AllGatherV) })
}

pub(super) fn all_gather_v_in_place<T: Element>(buf: &mut [T], per_rank: &[usize], rank: Rank, world: usize) -> Result<Call> {
    let recv_counts = counts(Op::AllGatherV, per_rank, world)?;
    let recv = RawSliceMut::of(buf);
    let send = recv_counts.as_ref().map_or(RawSlice::EMPTY, |counts| own::<T>(recv, counts.range(rank)).as_const());
    Ok(Call { send, recv, recv_counts, ..Call::new::<T>(Op::AllGatherV) })
}

pub(super) fn reduce_scatter<T: Element>(send: &[T], recv: &mut [T], redop: ReduceOp) -> Call {
    let (count, send) = (recv.len(), RawSlice::of(send));
    Call { redop: Some(redop), count, send, recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::ReduceScatter) }
}

pub(super) fn reduce_scatter_in_place<T: Element>(buf: &mut [T], redop: ReduceOp, rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::ReduceScatter, "send", buf.len(), world)?;
    let whole = RawSliceMut::of(buf);
    let recv = own::<T>(whole, rank * count..(rank + 1) * count);
    Ok(Call { redop: Some(redop), count, send: whole.as_const(), recv, ..Call::new::<T>(Op::ReduceScatter) })
}

pub(super) fn reduce_scatter_v<T: Element>(
    send: &[T],
    recv: &mut [T],
    per_rank: &[usize],
    redop: ReduceOp,
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::ReduceScatterV, per_rank, world)?;
    let (send, recv) = (RawSlice::of(send), RawSliceMut::of(recv));
    Ok(Call { redop: Some(redop), send, recv, send_counts, ..Call::new::<T>(Op::ReduceScatterV) })
}

pub(super) fn reduce_scatter_v_in_place<T: Element>(
    buf: &mut [T],
    per_rank: &[usize],
    redop: ReduceOp,
    rank: Rank,
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::ReduceScatterV, per_rank, world)?;
    let whole = RawSliceMut::of(buf);
    let recv = send_counts.as_ref().map_or(RawSliceMut::EMPTY, |counts| own::<T>(whole, counts.range(rank)));
    Ok(Call { redop: Some(redop), send: whole.as_const(), recv, send_counts, ..Call::new::<T>(Op::ReduceScatterV) })
}

pub(super) fn all_to_all<T: Element>(send: &[T], recv: &mut [T], world: usize) -> Result<Call> {
    let count = block(Op::AllToAll, "send", send.len(), world)?;
    Ok(Call { count, send: RawSlice::of(send), recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::AllToAll) })
}

pub(super) fn all_to_all_in_place<T: Element>(buf: &mut [T], world: usize) -> Result<Call> {
    let count = block(Op::AllToAll, "send", buf.len(), world)?;
    let recv = RawSliceMut::of(buf);
    Ok(Call { count, send: recv.as_const(), recv, ..Call::new::<T>(Op::AllToAll) })
}

pub(super) fn all_to_all_v<T: Element>(
    send: &[T],
    send_per_rank: &[usize],
    recv: &mut [T],
    recv_per_rank: &[usize],
    world: usize,
) -> Result<Call> {
    let send_counts = counts(Op::AllToAllV, send_per_rank, world)?;
    let recv_counts = counts(Op::AllToAllV, recv_per_rank, world)?;
    let (send, recv) = (RawSlice::of(send), RawSliceMut::of(recv));
    Ok(Call { send, recv, send_counts, recv_counts, ..Call::new::<T>(Op::AllToAllV) })
}

pub(super) fn gather<T: Element>(send: &[T], recv: Option<&mut [T]>, root: Rank, rank: Rank) -> Result<Call> {
    let recv = needed_by_root(Op::Gather, "receive", recv.map(RawSliceMut::of), root, rank)?.unwrap_or(RawSliceMut::EMPTY);
    Ok(Call { root, count: send.len(), send: RawSlice::of(send), recv, ..Call::new::<T>(Op::Gather) })
}

pub(super) fn gather_in_place<T: Element>(buf: &mut [T], root: Rank, rank: Rank, world: usize) -> Result<Call> {
    let call = all_gather_in_place(buf, rank, world)?;
    Ok(Call { op: Op::Gather, root, ..call })
}

pub(super) fn scatter<T: Element>(send: Option<&[T]>, recv: &mut [T], root: Rank, rank: Rank) -> Result<Call> {
    let count = recv.len();
    let send = needed_by_root(Op::Scatter, "send", send.map(RawSlice::of), root, rank)?.unwrap_or(RawSlice::EMPTY);
    Ok(Call { root, count, send, recv: RawSliceMut::of(recv), ..Call::new::<T>(Op::Scatter) })
}

pub(super) fn scatter_in_place<T: Element>(buf: &mut [T], root: Rank, rank: Rank, world: usize) -> Result<Call> {
    let count = block(Op::Scatter, "send", buf.len(), world)?;
    let whole = RawSliceMut::of(buf);
    let recv = own::<T>(whole, rank * count..(rank + 1) * count);
    Ok(Call { root, count, send: whole.as_const(), recv, ..Call::new::<T>(Op::Scatter) })
}

pub(super) fn send<T: Element>(buf: &[T], to: Rank) -> Call {
    Call { root: to, count: buf.len(), send: RawSlice::of(buf), ..Call::new::<T>(Op::Send) }
}

pub(super) fn recv<T: Element>(buf: &mut [T], from: Rank) -> Call {
    Call { root: from, count: buf.len(), recv: RawSliceMut::of(buf), ..Call::new::<T>(Op::Recv) }
}

/// From whoever sends first, which is put into `source`. This rank stands for the peer that is not known yet.
pub(super) fn recv_any<T: Element>(buf: &mut [T], source: &mut Rank, rank: Rank) -> Call {
    Call { source: Some(Source::Rank(source)), ..recv(buf, rank) }
}
