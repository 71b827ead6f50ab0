//! One call, without types: what its caller asked, which reaches the algorithm as it is.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::buffer::{RawSlice, RawSliceMut, Source, StreamId};
use crate::error::{ArgumentError, Error, Result};
use crate::reduce::Kernel;
use crate::schedule::{Blocks, Problem, Racks};
use crate::types::List::{Received, Sent};
use crate::types::Part::{self, All, AllAtRoot, AllOf, Nothing, One, OneAtRoot, OwnOf};
use crate::types::{DType, Descriptor, Element, Op, Rank, ReduceOp, Tag, operations, shape_of};

/// More than any process can address: a larger count is a mistake, and is refused before it causes
/// a fault.
const MOST_BYTES: u64 = 1 << 57;

/// An operation and its buffers.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) op: Op,
    /// The operation that the user called, if this is only a part of it.
    pub(crate) on_behalf_of: Option<Op>,
    pub(crate) dtype: DType,
    pub(crate) redop: Option<ReduceOp>,
    /// The tag of a message; 0 for one without.
    pub(crate) tag: Tag,
    /// The root, or the peer.
    pub(crate) root: Rank,
    /// Elements of the buffer, or of one rank's block.
    pub(crate) count: usize,
    pub(crate) send: RawSlice,
    pub(crate) recv: RawSliceMut,
    /// Counts for each rank of what is sent and of what is received, where the operation has them.
    pub(crate) send_counts: Option<Counts>,
    pub(crate) recv_counts: Option<Counts>,
    /// For a receive from any rank: where to put the rank that sent.
    pub(crate) source: Option<Source>,
    /// The deadline of this call, if it is not the communicator's.
    pub(crate) timeout: Option<Duration>,
    /// What peers compare with their own call, if it is not this call. The sequence number is this
    /// call's.
    pub(crate) described: Option<Descriptor>,
    /// Present if its buffers are on a device, or if it has a place in the order of a stream.
    pub(crate) on_device: Option<Arc<dyn OnDevice>>,
}

/// Where the lengths of the buffers of a call come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// The call has them, and its check compares them with its counts.
    Given,
    /// They follow from the counts (a call on pointers).
    Counted,
}

/// The part of a call that is on a device. `crate::device` has the only kind of it.
pub(crate) trait OnDevice: Any + fmt::Debug + Send + Sync {
    /// Whether what the call sends is in device memory.
    fn sends_from_device(&self) -> bool;

    /// Whether the call runs each time that a graph is replayed, and not when it is called.
    fn is_captured(&self) -> bool;

    /// Leaves the end of the call to its stream: its caller does not wait for it. Returns false if no
    /// stream waits for it.
    fn leave_to_stream(&self) -> bool;

    /// Whether only its stream waits for its end.
    fn is_unattended(&self) -> bool;

    /// A run of the call has ended.
    fn end(&self, result: &Result<()>);

    /// Has a stream wait for the end of the call. Returns false if it cannot.
    fn hold_stream(&self, stream: StreamId) -> Result<bool>;
}

/// The counts of all ranks, and where each rank's block starts.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    /// One more than there are ranks: block `i` is from entry `i` to entry `i + 1`. Up to 8 ranks
    /// need no allocation.
    offsets: SmallVec<[usize; 9]>,
    shape: u32,
}

impl Counts {
    /// Returns `None` if the sum overflows.
    pub(crate) fn new(counts: &[usize]) -> Option<Counts> {
        let mut offsets = SmallVec::with_capacity(counts.len() + 1);
        let mut sum = 0usize;
        offsets.push(0);
        for &count in counts {
            sum = sum.checked_add(count)?;
            offsets.push(sum);
        }
        Some(Counts { offsets, shape: shape_of(counts) })
    }

    /// As [`Counts::new`]. If the sum overflows, no buffer is long enough, and the check of the call
    /// says so.
    #[cold]
    pub(crate) fn of_raw(counts: &[usize]) -> Counts {
        let too_many =
            || Counts { offsets: (0..=counts.len()).map(|end| if end == 0 { 0 } else { usize::MAX }).collect(), shape: 0 };
        Counts::new(counts).unwrap_or_else(too_many)
    }

    /// Counts of ranks that do not compare them, from where each block starts, and where the last one
    /// ends.
    pub(crate) fn at(offsets: &[usize]) -> Counts {
        Counts { offsets: SmallVec::from_slice(offsets), shape: 0 }
    }

    fn ranks(&self) -> usize {
        self.offsets.len() - 1
    }

    fn total(&self) -> usize {
        self.offsets[self.ranks()]
    }

    pub(crate) fn range(&self, rank: Rank) -> std::ops::Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// One more than there are ranks.
    #[cfg(feature = "cuda")]
    pub(crate) fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    pub(crate) fn blocks(&self) -> Blocks<'_> {
        Blocks::Listed(&self.offsets)
    }
}

impl Call {
    pub(crate) fn new<T: Element>(op: Op) -> Call {
        Call::of(op, T::DTYPE)
    }

    pub(crate) const fn of(op: Op, dtype: DType) -> Call {
        Call {
            op,
            on_behalf_of: None,
            source: None,
            dtype,
            redop: None,
            tag: 0,
            root: 0,
            count: 0,
            send: RawSlice::EMPTY,
            recv: RawSliceMut::EMPTY,
            send_counts: None,
            recv_counts: None,
            timeout: None,
            described: None,
            on_device: None,
        }
    }

    /// A call on pointers: [`Call::check_raw`] finds the lengths of the buffers.
    pub(crate) const fn raw(op: Op, dtype: DType) -> Call {
        let mut call = Call::of(op, dtype);
        call.send = RawSlice::at(std::ptr::null());
        call.recv = RawSliceMut::at(std::ptr::null_mut());
        call
    }

    /// A call on a buffer that is not made of blocks.
    pub(crate) fn in_place(op: Op, dtype: DType, memory: RawSliceMut) -> Call {
        Call { count: memory.len / dtype.size(), send: memory.as_const(), recv: memory, ..Call::of(op, dtype) }
    }

    /// What a schedule of `world` ranks has to solve, from the view of `rank`. The call counts its
    /// root and its blocks as the schedule does its ranks.
    pub(crate) fn problem(&self, rank: Rank, world: usize) -> Problem<'_> {
        let Call { op, root, count, .. } = *self;
        let even = Blocks::Even(count);
        let sends = self.send_counts.as_ref().map_or(even, Counts::blocks);
        let recvs = self.recv_counts.as_ref().map_or(even, Counts::blocks);
        Problem { op, rank, world, root, count, sends, recvs, segment: 1, racks: Racks::ONE }
    }

    /// A call that some ranks run as a part of this one, on the same kind of elements.
    pub(crate) fn part(&self, op: Op, send: RawSlice, recv: RawSliceMut) -> Call {
        Call { redop: self.redop, send, recv, ..Call::of(op, self.dtype) }
    }

    /// As [`Call::part`], of ranks that do not have all parts of a reduction: others finish it.
    pub(crate) fn unfinished_part(&self, op: Op, send: RawSlice, recv: RawSliceMut) -> Call {
        let redop = self.redop.map(|redop| if redop == ReduceOp::Average { ReduceOp::Sum } else { redop });
        Call { redop, ..self.part(op, send, recv) }
    }

    /// Sets where the blocks of the ranks start in buffers that have one for each, and where the last
    /// one ends.
    pub(crate) fn divided_at(self, offsets: &[usize]) -> Call {
        let counts = Some(Counts::at(offsets));
        Call { send_counts: counts.clone(), recv_counts: counts, ..self }
    }

    /// The blocks of the buffer that has one for each rank.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> Blocks<'_> {
        let counts = self.recv_counts.as_ref().or(self.send_counts.as_ref());
        counts.map_or(Blocks::Even(self.count), Counts::blocks)
    }

    /// How the call reduces, if it does.
    #[inline]
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.redop.and_then(|redop| Kernel::new(self.dtype, redop))
    }

    /// What all ranks must agree on. `seq` counts from 1.
    #[inline(always)]
    pub(crate) fn descriptor(&self, seq: u64) -> Descriptor {
        if let Some(described) = self.described {
            return Descriptor { seq, ..described };
        }
        let counts = match self.op.common_counts() {
            Some(Received) => self.recv_counts.as_ref(),
            Some(Sent) => self.send_counts.as_ref(),
            // Each pair may have its own counts, which are compared when the message arrives.
            None => None,
        };
        Descriptor {
            op: self.on_behalf_of.unwrap_or(self.op).of_pair(),
            dtype: self.dtype,
            redop: self.redop,
            root: self.op.has_root().then_some(self.root as u32),
            count: counts.map_or(self.count, Counts::total) as u64,
            // Messages have no common counts.
            shape: counts.map_or(self.tag, |counts| counts.shape),
            seq,
        }
    }

    /// Bytes of the buffer, or of all ranks' blocks together.
    #[inline(always)]
    pub(crate) fn bytes(&self, world: usize) -> u64 {
        let counts = self.recv_counts.as_ref().or(self.send_counts.as_ref());
        let elements = match () {
            () if self.op.has_counts() => counts.map_or(0, Counts::total),
            () if self.op.has_blocks() => self.count * world,
            () => self.count,
        };
        (elements * self.dtype.size()) as u64
    }

    /// Returns whether the operation moves nothing on any rank. `bytes` are its [`Call::bytes`].
    #[inline]
    pub(crate) fn is_empty(&self, bytes: u64) -> bool {
        bytes == 0 && !matches!(self.op, Op::Barrier | Op::AllToAllV)
    }

    /// Elements that this rank needs in the send and the receive buffer; `None` for a buffer that
    /// is not used.
    #[inline(always)]
    fn needs(&self, rank: Rank, world: usize) -> Result<[Option<usize>; 2], ArgumentError> {
        let all = self.count.checked_mul(world).ok_or(ArgumentError::TooMany { count: self.count })?;
        // In each arm, the part is a constant.
        macro_rules! by_operation {
            ($($(#[$meta:meta])* $name:ident = $number:literal, $text:literal, $gives:expr => $gets:expr $(, $reduces:ident)?;)*) => {
                match self.op { $(Op::$name => [self.needed($gives, rank, all), self.needed($gets, rank, all)],)* }
            };
        }
        Ok(operations! { by_operation! {} })
    }

    #[inline(always)]
    fn needed(&self, part: Part, rank: Rank, all: usize) -> Option<usize> {
        let list = |list| if list == Sent { self.send_counts.as_ref() } else { self.recv_counts.as_ref() };
        match part {
            Nothing => None,
            One => Some(self.count),
            All => Some(all),
            OneAtRoot => (rank == self.root).then_some(self.count),
            AllAtRoot => (rank == self.root).then_some(all),
            OwnOf(counts) => list(counts).map(|counts| counts.range(rank).len()),
            AllOf(counts) => list(counts).map(Counts::total),
        }
    }

    /// Bytes that a rank needs in the send and the receive buffer.
    #[cfg(feature = "cuda")]
    pub(crate) fn lengths(&self, rank: Rank, world: usize) -> Result<[usize; 2], ArgumentError> {
        self.in_bytes(self.needs(rank, world)?)
    }

    #[inline(always)]
    fn in_bytes(&self, [send, recv]: [Option<usize>; 2]) -> Result<[usize; 2], ArgumentError> {
        let bytes = |needed: Option<usize>| {
            let count = needed.unwrap_or(0);
            count.checked_mul(self.dtype.size()).ok_or(ArgumentError::TooMany { count })
        };
        Ok([bytes(send)?, bytes(recv)?])
    }

    /// Checks everything that this rank can check without its peers, and drops the buffers that the
    /// operation does not use.
    pub(crate) fn check(mut self, rank: Rank, world: usize) -> Result<Call> {
        let op = self.op;
        match self.check_in_place(rank, world) {
            Ok(()) => Ok(self),
            Err(problem) => Err(Error::Argument { op, problem }),
        }
    }

    /// As [`Call::check`].
    #[inline]
    pub(crate) fn check_in_place(&mut self, rank: Rank, world: usize) -> Result<(), ArgumentError> {
        self.check_arguments(world)?;
        self.check_buffers(self.needs(rank, world)?, rank)
    }

    /// As [`Call::check_in_place`], for buffers without lengths: they have what this rank needs.
    #[inline(always)]
    pub(crate) fn check_raw(&mut self, rank: Rank, world: usize) -> Result<(), ArgumentError> {
        if self.source.is_some() {
            // It stands for a peer that is not known yet.
            self.root = rank;
        }
        self.check_arguments(world)?;
        let needed = self.needs(rank, world)?;
        [self.send.len, self.recv.len] = self.in_bytes(needed)?;
        self.check_buffers(needed, rank)
    }

    /// Checks all but the buffers.
    #[inline(always)]
    fn check_arguments(&self, world: usize) -> Result<(), ArgumentError> {
        let Call { op, dtype, root, .. } = *self;
        if op.is_point_to_point() {
            if root >= world {
                return Err(ArgumentError::Peer { peer: root, world_size: world });
            }
        } else if root >= world {
            return Err(ArgumentError::Root { root, world_size: world });
        }
        if let Some(redop) = self.redop.filter(|redop| !redop.applies_to(dtype)) {
            return Err(ArgumentError::ReduceOp { redop, dtype });
        }
        for counts in [&self.send_counts, &self.recv_counts].into_iter().flatten() {
            if counts.ranks() != world {
                return Err(ArgumentError::Counts { given: counts.ranks(), world_size: world });
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn check_buffers(&mut self, [send, recv]: [Option<usize>; 2], rank: Rank) -> Result<(), ArgumentError> {
        self.send = check_buffer("send", self.send, send, self.dtype)?;
        let recv = check_buffer("receive", self.recv.as_const(), recv, self.dtype)?;
        self.recv = RawSliceMut { ptr: recv.ptr.cast_mut(), len: recv.len };
        let (send, recv) = (self.send, self.recv);
        let overlap = send.len > 0
            && recv.len > 0
            && send.ptr.addr() < recv.ptr.addr() + recv.len
            && recv.ptr.addr() < send.ptr.addr() + send.len;
        if overlap && !self.is_in_place(rank) {
            return Err(ArgumentError::Overlap);
        }
        Ok(())
    }

    /// Whether the buffers overlap as NCCL's in-place operations define it.
    fn is_in_place(&self, rank: Rank) -> bool {
        let size = self.dtype.size();
        let start = |counts: &Option<Counts>| counts.as_ref().map_or(0, |counts| counts.range(rank).start * size);
        let (send, recv) = (self.send.ptr.addr(), self.recv.ptr.addr());
        match self.op.form() {
            [One, All | AllAtRoot] => send == recv + rank * self.count * size,
            [All | AllAtRoot, One] => recv == send + rank * self.count * size,
            [OwnOf(_), _] => send == recv + start(&self.recv_counts),
            [_, OwnOf(_)] => recv == send + start(&self.send_counts),
            // In place, each pair would need the same counts in both directions.
            [AllOf(_), AllOf(_)] => false,
            _ => send == recv,
        }
    }
}

/// Returns a buffer if it fits what the operation needs.
#[inline(always)]
fn check_buffer(buffer: &'static str, chunk: RawSlice, needed: Option<usize>, dtype: DType) -> Result<RawSlice, ArgumentError> {
    let Some(needed) = needed else { return Ok(RawSlice::EMPTY) };
    let size = dtype.size();
    let is_fit = chunk.len as u64 <= MOST_BYTES
        && chunk.len.is_multiple_of(size)
        && chunk.len / size == needed
        && !chunk.ptr.is_null()
        && chunk.ptr.addr().is_multiple_of(size);
    if is_fit && needed > 0 { Ok(chunk) } else { check_unfit_buffer(buffer, chunk, needed, dtype) }
}

/// The rest of [`check_buffer`]: an empty buffer fits wherever it points.
#[cold]
fn check_unfit_buffer(buffer: &'static str, chunk: RawSlice, needed: usize, dtype: DType) -> Result<RawSlice, ArgumentError> {
    let bytes = needed.checked_mul(dtype.size()).filter(|&bytes| bytes as u64 <= MOST_BYTES);
    let bytes = bytes.ok_or(ArgumentError::TooMany { count: needed })?;
    if chunk.len != bytes {
        return Err(ArgumentError::Length { buffer, expected: needed, given: chunk.len / dtype.size() });
    }
    if bytes == 0 {
        return Ok(RawSlice::EMPTY);
    }
    if chunk.ptr.is_null() {
        return Err(ArgumentError::Null { buffer });
    }
    if !chunk.ptr.addr().is_multiple_of(dtype.size()) {
        return Err(ArgumentError::Misaligned { buffer, address: chunk.ptr.addr(), align: dtype.size(), dtype });
    }
    Ok(chunk)
}
