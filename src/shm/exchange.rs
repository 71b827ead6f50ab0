//! Collectives in which every pair of ranks exchanges a block.

use std::ops::Range;

use super::call::Memory;
use super::pipeline::Collective;
use super::slots::Slots;

/// Each rank stages a block for each peer, takes the blocks that are for it, and reduces them
/// (reduce-scatter) or stores them side by side (all-to-all).
pub(super) struct Exchange<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) reduces: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl Exchange<'_> {
    fn segment(&self, segment: usize, rank: usize) -> Range<usize> {
        Memory::segment(self.memory.call.blocks.range(rank), self.memory.share(), segment)
    }
}

impl Collective for Exchange<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.memory.streams = streams;
    }

    fn segments(&self) -> usize {
        self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.share())
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let memory = self.memory;
        let share = memory.share() * memory.call.element;
        for rank in 0..memory.ranks {
            let elements = self.segment(segment, rank);
            let input = memory.input(&elements);
            if rank != memory.rank {
                // SAFETY: a segment fits its share of the slot, and the caller of `run` vouches for
                // the input.
                unsafe { memory.copy_in(input, mine.add(rank * share), elements.len()) };
            } else if !self.reduces {
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { memory.copy(input, memory.output(&elements), elements.len()) };
            }
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        let share = memory.share() * memory.call.element;
        let for_me = |rank: usize| slots.of(rank).wrapping_add(memory.rank * share).cast_const();
        if self.reduces {
            let elements = self.segment(segment, memory.rank);
            let start = memory.call.blocks.range(memory.rank).start;
            let own = memory.input(&elements);
            self.parts.clear();
            self.parts.extend((0..memory.ranks).map(|rank| if rank == memory.rank { own } else { for_me(rank) }));
            let output = memory.output(&(elements.start - start..elements.end - start));
            // SAFETY: every peer has staged these elements for this rank. The caller of `run`
            // vouches for both buffers.
            unsafe { memory.fold(self.parts, output, elements.len()) };
        } else {
            for rank in (0..memory.ranks).filter(|&rank| rank != memory.rank) {
                let elements = self.segment(segment, rank);
                // SAFETY: that rank has staged these elements for this one. The caller of `run`
                // vouches for the output.
                unsafe { memory.copy_out(for_me(rank), memory.output(&elements), elements.len()) };
            }
        }
    }
}
