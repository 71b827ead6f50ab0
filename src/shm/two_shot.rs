//! Reductions in two phases: each rank reduces its chunk of every segment, and then takes the
//! results of its peers.

use std::ops::Range;

use super::part::Part;
use super::pipeline::Collective;
use super::slots::Slots;
use crate::schedule::chunk;

/// Each rank reduces its chunk of every segment. The slot mirrors the segment: the peers' chunks
/// hold this rank's input for them, its own chunk holds the result.
pub(super) struct TwoShot<'a> {
    pub(super) part: Part<'a>,
    /// The rank that takes the result; all ranks if `None`.
    pub(super) root: Option<usize>,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl TwoShot<'_> {
    fn segment(&self, segment: usize) -> Range<usize> {
        Part::segment(0..self.part.call.count, self.part.slot(), segment)
    }

    /// Returns a rank's chunk of a segment: its offset in the slot in bytes, and its elements in
    /// the buffers.
    fn chunk(&self, segment: &Range<usize>, rank: usize) -> (usize, Range<usize>) {
        let chunk = chunk(segment.len(), self.part.ranks, rank);
        (chunk.start * self.part.element, segment.start + chunk.start..segment.start + chunk.end)
    }

    fn takes(&self) -> bool {
        self.root.is_none_or(|root| root == self.part.rank)
    }
}

impl Collective for TwoShot<'_> {
    const COMBINES: bool = true;

    fn set_streams(&mut self, streams: bool) {
        self.part.streams = streams;
    }

    fn segments(&self) -> usize {
        self.part.call.count.div_ceil(self.part.slot())
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let segment = self.segment(segment);
        for rank in (0..self.part.ranks).filter(|&rank| rank != self.part.rank) {
            let (at, chunk) = self.chunk(&segment, rank);
            // SAFETY: a segment fits a slot, and the caller of `run` vouches for the input.
            unsafe { self.part.copy_in(self.part.input(&chunk), mine.add(at), chunk.len()) };
        }
    }

    fn combine(&mut self, segment: usize, slots: &Slots<'_>) {
        let part = self.part;
        let segment = self.segment(segment);
        let (at, chunk) = self.chunk(&segment, part.rank);
        let own = part.input(&chunk);
        self.parts.clear();
        let of = |rank| if rank == part.rank { own } else { slots.of(rank).wrapping_add(at).cast_const() };
        self.parts.extend((0..part.ranks).map(of));
        let shared = slots.of(part.rank).wrapping_add(at);
        if self.takes() {
            let output = part.output(&chunk);
            let (first, second) = if part.streams_to(output) { (shared, output) } else { (output, shared) };
            // The fold writes `first`, which is then in the cache when it is copied.
            // SAFETY: every peer has staged this rank's chunk, and the caller of `run` vouches for
            // both buffers. No peer accesses this rank's chunk of its own slot until the next
            // phase.
            unsafe {
                part.fold(self.parts, first, chunk.len());
                if second == output {
                    part.copy_out(first, output, chunk.len());
                } else if self.root.is_none() {
                    part.copy_in(output, shared, chunk.len());
                }
            }
        } else {
            // SAFETY: as above, and the result goes to this rank's own slot.
            unsafe { part.fold(self.parts, shared, chunk.len()) };
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        if !self.takes() {
            return;
        }
        let segment = self.segment(segment);
        for rank in (0..self.part.ranks).filter(|&rank| rank != self.part.rank) {
            let (at, chunk) = self.chunk(&segment, rank);
            // SAFETY: that rank has stored its chunk of the result there. The caller of `run`
            // vouches for the output.
            unsafe { self.part.copy_out(slots.of(rank).add(at), self.part.output(&chunk), chunk.len()) };
        }
    }
}
