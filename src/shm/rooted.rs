//! Collectives that copy blocks without reducing them: from the root to its peers, to the root, or
//! to all.

use std::ops::Range;

use super::call::Memory;
use super::pipeline::Collective;
use super::slots::Slots;
use crate::types::Op;

/// The root stages its whole buffer for all (broadcast), or a block for each rank (scatter).
pub(super) struct Spread<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) blocks: bool,
}

impl Spread<'_> {
    /// Returns which elements of a segment are for a rank: their offset in the slot in elements,
    /// and where they are in the root's buffer.
    fn segment(&self, segment: usize, rank: usize) -> (usize, Range<usize>) {
        if self.blocks {
            let share = self.memory.share();
            (rank * share, Memory::segment(self.memory.call.blocks.range(rank), share, segment))
        } else {
            (0, Memory::segment(0..self.memory.call.count, self.memory.slot(), segment))
        }
    }
}

impl Collective for Spread<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.memory.streams = streams;
    }

    fn stages(&self) -> bool {
        self.memory.rank == self.memory.call.root
    }

    fn segments(&self) -> usize {
        if self.blocks {
            self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.share())
        } else {
            self.memory.call.count.div_ceil(self.memory.slot())
        }
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let memory = self.memory;
        if !self.stages() {
            return;
        }
        for rank in 0..if self.blocks { memory.ranks } else { 1 } {
            let (at, elements) = self.segment(segment, rank);
            let input = memory.input(&elements);
            if self.blocks && rank == memory.rank {
                let start = elements.start - memory.call.blocks.range(rank).start;
                let output = memory.output(&(start..start + elements.len()));
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { memory.copy(input, output, elements.len()) };
            } else {
                // SAFETY: a segment fits its share of the slot, and the caller of `run` vouches for
                // the input.
                unsafe { memory.copy_in(input, mine.add(at * memory.call.element), elements.len()) };
            }
        }
        if !self.blocks {
            let (_, elements) = self.segment(segment, memory.rank);
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { memory.copy(memory.input(&elements), memory.output(&elements), elements.len()) };
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        if memory.rank == memory.call.root {
            return;
        }
        let (at, elements) = self.segment(segment, memory.rank);
        let start = if self.blocks { memory.call.blocks.range(memory.rank).start } else { 0 };
        let output = memory.output(&(elements.start - start..elements.end - start));
        // SAFETY: the root has staged these elements there. The caller of `run` vouches for the
        // output.
        unsafe { memory.copy_out(slots.of(memory.call.root).add(at * memory.call.element), output, elements.len()) };
    }
}

/// Every rank stages its block. The root (gather) or all ranks (all-gather) take the blocks of
/// their peers.
pub(super) struct Collect<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) takes: bool,
}

impl Collect<'_> {
    /// A rank's elements of a segment, in the output.
    fn segment(&self, segment: usize, rank: usize) -> Range<usize> {
        Memory::segment(self.memory.call.blocks.range(rank), self.memory.slot(), segment)
    }
}

impl Collective for Collect<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.memory.streams = streams;
    }

    fn stages(&self) -> bool {
        self.memory.call.op != Op::Gather || !self.takes
    }

    fn segments(&self) -> usize {
        self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.slot())
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let memory = self.memory;
        let elements = self.segment(segment, memory.rank);
        let start = memory.call.blocks.range(memory.rank).start;
        let input = memory.input(&(elements.start - start..elements.end - start));
        if self.takes {
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { memory.copy(input, memory.output(&elements), elements.len()) };
        }
        if self.stages() {
            // SAFETY: a segment fits a slot, and the caller of `run` vouches for the input.
            unsafe { memory.copy_in(input, mine, elements.len()) };
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        if !self.takes {
            return;
        }
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let elements = self.segment(segment, rank);
            // SAFETY: that rank has staged these elements. The caller of `run` vouches for the
            // output.
            unsafe { self.memory.copy_out(slots.of(rank), self.memory.output(&elements), elements.len()) };
        }
    }
}
