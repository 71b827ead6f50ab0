//! Reductions in two phases: each rank reduces its chunk of every segment, and then takes the
//! results of its peers.

use std::ops::Range;

use super::part::Part;
use super::pipeline::Collective;
use super::slots::{ForPeers, Slots};
use crate::schedule::chunk;

/// Each rank reduces its chunk of every segment. A slot holds this rank's input for its peers, side by side,
/// and after it the result of the segment before.
pub(super) struct TwoShot<'a> {
    pub(super) part: Part<'a>,
    /// The rank that takes the result; all ranks if `None`.
    pub(super) root: Option<usize>,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl TwoShot<'_> {
    /// The elements of a segment. Of several, the chunks are equally long, so that they fill a slot.
    fn size(&self) -> usize {
        let (count, slot) = (self.part.call.count, self.part.slot());
        if count <= slot { count.max(1) } else { slot / self.part.ranks * self.part.ranks }
    }

    fn segment(&self, segment: usize) -> Range<usize> {
        Part::segment(0..self.part.call.count, self.size(), segment)
    }

    /// Returns a rank's chunk of a segment, in the buffers.
    fn chunk(&self, segment: &Range<usize>, rank: usize) -> Range<usize> {
        let chunk = chunk(segment.len(), self.part.ranks, rank);
        segment.start + chunk.start..segment.start + chunk.end
    }

    fn chunks(&self) -> ForPeers {
        ForPeers { longest: self.size().div_ceil(self.part.ranks) * self.part.element }
    }

    /// Where the result is in a slot: the beginning, unless there is another segment in front of it.
    fn result_at(&self) -> usize {
        if self.segments() > 1 { self.chunks().bytes(self.part.ranks) } else { 0 }
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
        self.part.call.count.div_ceil(self.size())
    }

    fn staged(&self) -> usize {
        let (ranks, chunks) = (self.part.ranks, self.chunks());
        // With the result of the segment before.
        if self.segments() > 1 { ranks * chunks.longest } else { chunks.bytes(ranks) }
    }

    fn combined(&self) -> usize {
        if self.segments() > 1 { self.staged() } else { self.chunks().longest }
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let (segment, chunks) = (self.segment(segment), self.chunks());
        for rank in (0..self.part.ranks).filter(|&rank| rank != self.part.rank) {
            let chunk = self.chunk(&segment, rank);
            let to = mine.wrapping_add(chunks.at(self.part.rank, rank));
            // SAFETY: the chunks for all peers fit a slot, and the caller of `run` vouches for the input.
            unsafe { self.part.copy_in(self.part.input(&chunk), to, chunk.len()) };
        }
    }

    fn combine(&mut self, segment: usize, slots: &Slots<'_>, mine: *mut u8) {
        let part = self.part;
        let (segment, chunks) = (self.segment(segment), self.chunks());
        let chunk = self.chunk(&segment, part.rank);
        let own = part.input(&chunk);
        let staged = |rank| slots.of(rank).wrapping_add(chunks.at(rank, part.rank)).cast_const();
        self.parts.clear();
        self.parts.extend((0..part.ranks).map(|rank| if rank == part.rank { own } else { staged(rank) }));
        let shared = mine.wrapping_add(self.result_at());
        if self.takes() {
            let output = part.output(&chunk);
            let (first, second) = if part.streams_to(output) { (shared, output) } else { (output, shared) };
            // The fold writes `first`, which is then in the cache when it is copied.
            // SAFETY: every peer has staged this rank's chunk, and the caller of `run` vouches for
            // both buffers. No peer reads the result before the next phase, and nothing else is
            // staged there.
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
            let chunk = self.chunk(&segment, rank);
            let from = slots.of(rank).wrapping_add(self.result_at());
            // SAFETY: that rank has stored its chunk of the result there. The caller of `run`
            // vouches for the output.
            unsafe { self.part.copy_out(from, self.part.output(&chunk), chunk.len()) };
        }
    }
}
