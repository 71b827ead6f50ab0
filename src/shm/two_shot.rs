//! Reductions in two phases: each rank reduces its chunk of every piece, and then all take the results.

use std::ops::Range;

use super::pipeline::{Collective, Memory, Slots};
use crate::reduce::copy_streaming;
use crate::schedule::chunk;

/// Each rank reduces its slice of every piece. The slot mirrors the piece: the others' slices hold this rank's input for them,
/// its own slice holds the result.
pub(super) struct TwoShot<'a> {
    pub(super) memory: Memory<'a>,
    /// Who takes the result; everybody if `None`.
    pub(super) root: Option<usize>,
    /// Whether slots are written past the caches.
    pub(super) streams: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl TwoShot<'_> {
    fn piece(&self, piece: usize) -> Range<usize> {
        Memory::piece(0..self.memory.call.count, self.memory.slot(), piece)
    }

    /// A rank's slice of a piece: in the slot, and in the buffers.
    fn slice(&self, piece: &Range<usize>, rank: usize) -> (usize, Range<usize>) {
        let slice = chunk(piece.len(), self.memory.ranks, rank);
        (slice.start * self.memory.call.element, piece.start + slice.start..piece.start + slice.end)
    }

    fn takes(&self) -> bool {
        self.root.is_none_or(|root| root == self.memory.rank)
    }

    /// Copies elements to this rank's slot.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy`].
    unsafe fn share(&self, from: *const u8, slot: *mut u8, elements: usize) {
        if self.streams {
            // SAFETY: passed on.
            unsafe { copy_streaming(from, slot, elements * self.memory.call.element) }
        } else {
            // SAFETY: passed on.
            unsafe { self.memory.copy(from, slot, elements) }
        }
    }
}

impl Collective for TwoShot<'_> {
    const COMBINES: bool = true;

    fn pieces(&self) -> usize {
        self.memory.call.count.div_ceil(self.memory.slot())
    }

    fn stage(&mut self, piece: usize, mine: *mut u8) {
        let piece = self.piece(piece);
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let (at, slice) = self.slice(&piece, rank);
            // SAFETY: a piece fits a slot, and the caller of `run` vouches for the input.
            unsafe { self.share(self.memory.input(&slice), mine.add(at), slice.len()) };
        }
    }

    fn combine(&mut self, piece: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        let piece = self.piece(piece);
        let (at, slice) = self.slice(&piece, memory.rank);
        let own = memory.input(&slice);
        self.parts.clear();
        let part = |rank| if rank == memory.rank { own } else { slots.of(rank).wrapping_add(at).cast_const() };
        self.parts.extend((0..memory.ranks).map(part));
        let shared = slots.of(memory.rank).wrapping_add(at);
        if self.takes() {
            let output = memory.output(&slice);
            let (first, second) = if memory.streams(output) { (shared, output) } else { (output, shared) };
            // SAFETY: everybody has staged this rank's slice; the caller of `run` vouches for both buffers, and this rank's slice
            // of its own slot is its own until the next phase. What comes first is in the cache when it is copied.
            unsafe {
                memory.fold(self.parts, first, slice.len());
                if second == output {
                    memory.copy_out(first, output, slice.len());
                } else if self.root.is_none() {
                    self.share(output, shared, slice.len());
                }
            }
        } else {
            // SAFETY: as above.
            unsafe { memory.fold(self.parts, shared, slice.len()) };
        }
    }

    fn take(&mut self, piece: usize, slots: &Slots<'_>) {
        if !self.takes() {
            return;
        }
        let piece = self.piece(piece);
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let (at, slice) = self.slice(&piece, rank);
            // SAFETY: that rank has put its slice of the result there; the caller of `run` vouches for the output.
            unsafe { self.memory.copy_out(slots.of(rank).add(at), self.memory.output(&slice), slice.len()) };
        }
    }
}
