//! Collectives that copy blocks without reducing them: from the root to its peers, to the root, or
//! to all.

use std::ops::Range;

use super::part::Part;
use super::pipeline::Collective;
use super::slots::{SLOT, Slots};
use crate::types::Op;

/// The root stages its whole buffer for all (broadcast), or a block for each rank (scatter).
pub(super) struct Spread<'a> {
    pub(super) part: Part<'a>,
    pub(super) blocks: bool,
}

impl Spread<'_> {
    /// Returns which elements of a segment are for a rank: their offset in the slot in elements,
    /// and where they are in the root's buffer.
    fn segment(&self, segment: usize, rank: usize) -> (usize, Range<usize>) {
        if self.blocks {
            let share = self.part.share();
            (rank * share, Part::segment(self.part.call.blocks().range(rank), share, segment))
        } else {
            (0, Part::segment(0..self.part.call.count, self.part.slot(), segment))
        }
    }
}

impl Collective for Spread<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.part.streams = streams;
    }

    fn stages(&self) -> bool {
        self.part.rank == self.part.call.root
    }

    fn segments(&self) -> usize {
        if self.blocks {
            self.part.call.blocks().longest(self.part.ranks).div_ceil(self.part.share())
        } else {
            self.part.call.count.div_ceil(self.part.slot())
        }
    }

    fn staged(&self) -> usize {
        if self.blocks { SLOT } else { SLOT.min(self.part.call.count * self.part.element) }
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let part = self.part;
        if !self.stages() {
            return;
        }
        for rank in 0..if self.blocks { part.ranks } else { 1 } {
            let (at, elements) = self.segment(segment, rank);
            let input = part.input(&elements);
            if self.blocks && rank == part.rank {
                let start = elements.start - part.call.blocks().range(rank).start;
                let output = part.output(&(start..start + elements.len()));
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { part.copy(input, output, elements.len()) };
            } else {
                // SAFETY: a segment fits its share of the slot, and the caller of `run` vouches for
                // the input.
                unsafe { part.copy_in(input, mine.add(at * part.element), elements.len()) };
            }
        }
        if !self.blocks {
            let (_, elements) = self.segment(segment, part.rank);
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { part.copy(part.input(&elements), part.output(&elements), elements.len()) };
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        let part = self.part;
        if part.rank == part.call.root {
            return;
        }
        let (at, elements) = self.segment(segment, part.rank);
        let start = if self.blocks { part.call.blocks().range(part.rank).start } else { 0 };
        let output = part.output(&(elements.start - start..elements.end - start));
        // SAFETY: the root has staged these elements there. The caller of `run` vouches for the
        // output.
        unsafe { part.copy_out(slots.of(part.call.root).add(at * part.element), output, elements.len()) };
    }
}

/// Every rank stages its block. The root (gather) or all ranks (all-gather) take the blocks of
/// their peers.
pub(super) struct Collect<'a> {
    pub(super) part: Part<'a>,
    pub(super) takes: bool,
}

impl Collect<'_> {
    /// A rank's elements of a segment, in the output.
    fn segment(&self, segment: usize, rank: usize) -> Range<usize> {
        Part::segment(self.part.call.blocks().range(rank), self.part.slot(), segment)
    }
}

impl Collective for Collect<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.part.streams = streams;
    }

    fn stages(&self) -> bool {
        self.part.call.op != Op::Gather || !self.takes
    }

    fn segments(&self) -> usize {
        self.part.call.blocks().longest(self.part.ranks).div_ceil(self.part.slot())
    }

    fn staged(&self) -> usize {
        SLOT.min(self.part.call.blocks().longest(self.part.ranks) * self.part.element)
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let part = self.part;
        let elements = self.segment(segment, part.rank);
        let start = part.call.blocks().range(part.rank).start;
        let input = part.input(&(elements.start - start..elements.end - start));
        if self.takes {
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { part.copy(input, part.output(&elements), elements.len()) };
        }
        if self.stages() {
            // SAFETY: a segment fits a slot, and the caller of `run` vouches for the input.
            unsafe { part.copy_in(input, mine, elements.len()) };
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        if !self.takes {
            return;
        }
        for rank in (0..self.part.ranks).filter(|&rank| rank != self.part.rank) {
            let elements = self.segment(segment, rank);
            // SAFETY: that rank has staged these elements. The caller of `run` vouches for the
            // output.
            unsafe { self.part.copy_out(slots.of(rank), self.part.output(&elements), elements.len()) };
        }
    }
}
