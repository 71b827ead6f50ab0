//! A rank's part in a call of the ranks that share memory: the buffers by element, and what moves
//! between which ranks.

use std::ops::Range;

use super::slots::SLOT;
use super::wait::Sources;
use crate::call::Call;
use crate::reduce::{self, copy_streaming};
use crate::types::Op;

/// From this many bytes of output on, copies to the output go past the caches, which could not keep
/// it. Measured on two cores with 2 MiB of second-level cache each: out of place, 64 MiB take 0.8
/// of the time.
const STREAM: usize = 32 << 20;

/// A call, and the part in it of one of the ranks that share memory. The call counts ranks within the
/// host.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) call: &'a Call,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Bytes of an element.
    pub(super) element: usize,
    /// Whether slots are written by non-temporal copies ([`crate::config::CopyMode::Streamed`]).
    pub(super) streams: bool,
}

impl<'a> Part<'a> {
    #[inline(always)]
    pub(super) fn new(call: &'a Call, rank: usize, ranks: usize) -> Part<'a> {
        Part { call, rank, ranks, element: call.dtype.size(), streams: false }
    }
}

impl Part<'_> {
    pub(super) fn input(&self, elements: &Range<usize>) -> *const u8 {
        let bytes = elements.len() * self.element;
        self.call.send.skip(elements.start * self.element).take(bytes).ptr
    }

    pub(super) fn output(&self, elements: &Range<usize>) -> *mut u8 {
        let bytes = elements.len() * self.element;
        let chunk = self.call.recv.skip(elements.start * self.element);
        assert!(bytes <= chunk.len, "a segment extends beyond the output");
        chunk.ptr
    }

    /// Copies elements between a buffer and a slot, or within the buffers.
    ///
    /// # Safety
    ///
    /// Both are valid for `elements` elements.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, elements: usize) {
        if from != to {
            // SAFETY: both are valid, as the caller promises. Buffers and slots do not overlap.
            // Within the buffers only whole blocks are copied, which are the same or do not
            // overlap.
            unsafe { reduce::copy(from, to, elements * self.element) }
        }
    }

    /// Whether this rank's output replaces input that its peers read in the same operation.
    pub(super) fn overwrites_what_peers_read(&self) -> bool {
        let (input, output) = (self.call.send, self.call.recv);
        let (from, to) = (input.ptr.addr(), output.ptr.addr());
        self.call.op == Op::AllToAll && from < to + output.len && to < from + input.len
    }

    /// Whether an address in the output is best written past the caches. In place it was just read,
    /// so the caches hold it.
    pub(super) fn streams_to(&self, to: *const u8) -> bool {
        let input = self.call.send;
        self.call.recv.len >= STREAM && !(input.ptr.addr()..input.ptr.addr() + input.len).contains(&to.addr())
    }

    /// Copies elements to this rank's slot.
    ///
    /// # Safety
    ///
    /// As for [`Part::copy`].
    pub(super) unsafe fn copy_in(&self, from: *const u8, slot: *mut u8, elements: usize) {
        if self.streams {
            // SAFETY: the caller keeps the same contract.
            unsafe { copy_streaming(from, slot, elements * self.element) }
        } else {
            // SAFETY: the caller keeps the same contract.
            unsafe { self.copy(from, slot, elements) }
        }
    }

    /// Copies elements from a slot to the output.
    ///
    /// # Safety
    ///
    /// As for [`Part::copy`].
    pub(super) unsafe fn copy_out(&self, from: *const u8, to: *mut u8, elements: usize) {
        if self.streams_to(to) {
            // SAFETY: the caller keeps the same contract.
            unsafe { copy_streaming(from, to, elements * self.element) }
        } else {
            // SAFETY: the caller keeps the same contract.
            unsafe { self.copy(from, to, elements) }
        }
    }

    /// Reduces the parts of all ranks, in the order of ranks.
    ///
    /// # Safety
    ///
    /// All parts and the destination are valid for `elements` elements. The destination is one of
    /// the parts or overlaps none.
    pub(super) unsafe fn fold(&self, parts: &[*const u8], to: *mut u8, elements: usize) {
        let kernel = self.call.kernel().expect("an operation that reduces has a kernel");
        // SAFETY: the caller keeps the same contract.
        unsafe { kernel.fold(parts, to, elements, Some(self.ranks)) }
    }

    /// The elements of its input that this rank gives to its peers.
    pub(super) fn given(&self) -> Range<usize> {
        let Part { call, rank, ranks, .. } = *self;
        match call.op {
            Op::Broadcast | Op::Scatter if rank != call.root => 0..0,
            Op::AllReduce | Op::Reduce | Op::Broadcast => 0..call.count,
            Op::AllGather | Op::AllGatherV | Op::Gather => 0..call.blocks().range(rank).len(),
            _ => 0..call.blocks().range(ranks - 1).end,
        }
    }

    /// What this rank takes of a rank's input, and where its output has it, in elements.
    pub(super) fn taken(&self, peer: usize) -> (Range<usize>, Range<usize>) {
        let call = self.call;
        let (own, theirs) = (|| call.blocks().range(self.rank), || call.blocks().range(peer));
        match call.op {
            Op::AllReduce | Op::Reduce | Op::Broadcast => (0..call.count, 0..call.count),
            Op::Scatter | Op::ReduceScatter | Op::ReduceScatterV => (own(), 0..own().len()),
            Op::AllToAll => (own(), theirs()),
            _ => (0..theirs().len(), theirs()),
        }
    }

    /// The ranks whose inputs this rank's output needs.
    pub(super) fn inputs(&self) -> Range<usize> {
        let Part { call, rank, ranks, .. } = *self;
        match call.op {
            Op::Broadcast | Op::Scatter => call.root..call.root + 1,
            Op::Reduce | Op::Gather if rank != call.root => 0..0,
            _ => 0..ranks,
        }
    }

    /// The peers whose phases this rank waits for before it writes its output.
    pub(super) fn sources(&self) -> Sources {
        let inputs = self.inputs();
        match inputs.len() {
            0 => Sources::None,
            1 if inputs.start == self.rank => Sources::None,
            1 => Sources::One(inputs.start),
            // The other ranks wait for none.
            _ if matches!(self.call.op, Op::Reduce | Op::Gather) => Sources::Each,
            _ => Sources::All,
        }
    }

    /// The number of elements that fit a slot.
    pub(super) fn slot(&self) -> usize {
        SLOT / self.element
    }

    /// The number of elements in each rank's share of a slot that has a share for every rank. A
    /// share is a multiple of the cache line.
    pub(super) fn share(&self) -> usize {
        let bytes = SLOT / self.ranks / 64 * 64;
        assert!(bytes > 0, "slots have no share for each of {} ranks", self.ranks);
        bytes / self.element
    }

    /// The `segment`-th segment of a range; empty beyond its end.
    pub(super) fn segment(range: Range<usize>, size: usize, segment: usize) -> Range<usize> {
        let at = (range.start + segment * size).min(range.end);
        at..(at + size).min(range.end)
    }
}
