//! What an operation is, and what it does between the phases: it stages a piece, combines, takes.

use std::ops::Range;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::reduce::{self, Kernel, copy_streaming};
use crate::schedule::Blocks;
use crate::types::Op;

/// Bytes of one slot. Larger data goes through in pieces.
pub(super) const SLOT: usize = 128 << 10;

/// From so many bytes of output on, what is copied there goes past the caches, which could not keep it anyhow. Measured on
/// two cores with 2 MiB of second-level cache each: out of place, 64 MiB then take 0.8 of the time.
const STREAM: usize = 32 << 20;

/// Where a rank's slots are.
#[derive(Clone, Copy)]
pub(super) struct StageAt {
    pub(super) stage: u32,
    pub(super) base: *mut u8,
}

/// Whose phases a rank waits for.
#[derive(Clone, Copy)]
pub(crate) enum Sources {
    Everybody,
    One(usize),
    Nobody,
}

/// What an operation does between the phases; see [`collectives`].
pub(crate) trait Collective {
    /// Whether pieces are combined between being staged and being taken.
    const COMBINES: bool;

    /// How many pieces there are.
    fn pieces(&self) -> usize;

    /// Whether this rank stages any.
    fn stages(&self) -> bool {
        true
    }

    /// Writes a piece of this rank's input to its slot.
    fn stage(&mut self, piece: usize, mine: *mut u8);

    /// Fetches the lines of the next phase's slot that will probably be written, while this rank waits for the others.
    fn prefetch(&self, _next: *mut u8) {}

    /// Reduces this rank's share of a piece that everybody has staged, into its slot or its output.
    fn combine(&mut self, _piece: usize, _slots: &Slots<'_>) {}

    /// Reads a piece from the slots of those that staged or combined it to the output.
    fn take(&mut self, piece: usize, slots: &Slots<'_>);
}

/// Everybody's slots of one phase.
pub(crate) struct Slots<'a> {
    pub(super) places: &'a [StageAt],
    pub(super) offset: usize,
}

impl Slots<'_> {
    pub(crate) fn of(&self, rank: usize) -> *mut u8 {
        self.places[rank].base.wrapping_add(self.offset)
    }
}

/// An operation as the windows see it: ranks count within the host.
pub(crate) struct WindowCall<'a> {
    pub(crate) op: Op,
    pub(crate) input: RawSlice,
    pub(crate) output: RawSliceMut,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// Elements of the buffer, where it is not made of blocks.
    pub(crate) count: usize,
    /// The blocks of the buffer that has one for each rank.
    pub(crate) blocks: Blocks<'a>,
    pub(crate) root: usize,
    pub(crate) kernel: Option<Kernel>,
    /// How many ranks' parts are in the result, if it is finished here.
    pub(crate) finish: Option<usize>,
}

impl WindowCall<'_> {
    /// An operation on these buffers, of no elements, blocks, root or kernel yet.
    pub(crate) fn new(op: Op, input: RawSlice, output: RawSliceMut, element: usize) -> Self {
        WindowCall { op, input, output, element, count: 0, blocks: Blocks::Even(0), root: 0, kernel: None, finish: None }
    }
}

/// The call's buffers, by element.
#[derive(Clone, Copy)]
pub(super) struct Memory<'a> {
    pub(super) call: &'a WindowCall<'a>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Memory<'_> {
    pub(super) fn input(&self, elements: &Range<usize>) -> *const u8 {
        let bytes = elements.len() * self.call.element;
        self.call.input.skip(elements.start * self.call.element).take(bytes).ptr
    }

    pub(super) fn output(&self, elements: &Range<usize>) -> *mut u8 {
        let bytes = elements.len() * self.call.element;
        let chunk = self.call.output.skip(elements.start * self.call.element);
        assert!(bytes <= chunk.len, "a piece reaches beyond the output");
        chunk.ptr
    }

    /// Copies elements between a buffer and a slot, or within the buffers.
    ///
    /// # Safety
    ///
    /// Both are valid for so many elements.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, elements: usize) {
        if from != to {
            // SAFETY: the caller vouches for both; buffers and slots are apart, and within the buffers only whole blocks are
            // copied, which are the same or apart.
            unsafe { reduce::copy(from, to, elements * self.call.element) }
        }
    }

    /// Whether a place in the output is best written past the caches. In place it has just been read, and is in them.
    pub(super) fn streams(&self, to: *const u8) -> bool {
        let input = self.call.input;
        self.call.output.len >= STREAM && !(input.ptr.addr()..input.ptr.addr() + input.len).contains(&to.addr())
    }

    /// Copies elements from a slot to the output.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy`].
    pub(super) unsafe fn copy_out(&self, from: *const u8, to: *mut u8, elements: usize) {
        if self.streams(to) {
            // SAFETY: passed on.
            unsafe { copy_streaming(from, to, elements * self.call.element) }
        } else {
            // SAFETY: passed on.
            unsafe { self.copy(from, to, elements) }
        }
    }

    /// Reduces everybody's parts, in the order of ranks.
    ///
    /// # Safety
    ///
    /// All parts and the destination are valid for so many elements, and the destination is one of them or apart.
    pub(super) unsafe fn fold(&self, parts: &[*const u8], to: *mut u8, elements: usize) {
        let kernel = self.call.kernel.expect("an operation that reduces has a kernel");
        // SAFETY: passed on.
        unsafe { kernel.fold(parts, to, elements, self.call.finish) }
    }

    /// Elements that fit a slot.
    pub(super) fn slot(&self) -> usize {
        SLOT / self.call.element
    }

    /// Elements of each rank's share of a slot that has one for every rank. A multiple of the cache line.
    pub(super) fn share(&self) -> usize {
        let bytes = SLOT / self.ranks / 64 * 64;
        assert!(bytes > 0, "a host of {} ranks needs larger slots", self.ranks);
        bytes / self.call.element
    }

    /// The `piece`-th piece of a range; empty beyond its end.
    pub(super) fn piece(range: Range<usize>, size: usize, piece: usize) -> Range<usize> {
        let at = (range.start + piece * size).min(range.end);
        at..(at + size).min(range.end)
    }
}
