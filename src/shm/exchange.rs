//! Collectives in which every pair of ranks exchanges a block.

use std::ops::Range;

use super::part::Part;
use super::pipeline::Collective;
use super::slots::{ForPeers, Slots};

/// Each rank stages a block for each peer, takes the blocks that are for it, and reduces them
/// (reduce-scatter) or stores them side by side (all-to-all).
pub(super) struct Exchange<'a> {
    pub(super) part: Part<'a>,
    pub(super) reduces: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl Exchange<'_> {
    fn segment(&self, segment: usize, rank: usize) -> Range<usize> {
        Part::segment(self.part.call.blocks().range(rank), self.part.share(), segment)
    }

    fn blocks(&self) -> ForPeers {
        let longest = self.part.call.blocks().longest(self.part.ranks).min(self.part.share());
        // Whole cache lines, which no other peer reads.
        ForPeers { longest: (longest * self.part.element).next_multiple_of(64) }
    }
}

impl Collective for Exchange<'_> {
    const COMBINES: bool = false;

    fn set_streams(&mut self, streams: bool) {
        self.part.streams = streams;
    }

    fn segments(&self) -> usize {
        self.part.call.blocks().longest(self.part.ranks).div_ceil(self.part.share())
    }

    fn staged(&self) -> usize {
        self.blocks().bytes(self.part.ranks)
    }

    fn stage(&mut self, segment: usize, mine: *mut u8) {
        let (part, blocks) = (self.part, self.blocks());
        for rank in 0..part.ranks {
            let elements = self.segment(segment, rank);
            let input = part.input(&elements);
            if rank != part.rank {
                // SAFETY: the blocks for all peers fit a slot, and the caller of `run` vouches for
                // the input.
                unsafe { part.copy_in(input, mine.add(blocks.at(part.rank, rank)), elements.len()) };
            } else if !self.reduces {
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { part.copy(input, part.output(&elements), elements.len()) };
            }
        }
    }

    fn take(&mut self, segment: usize, slots: &Slots<'_>) {
        let (part, blocks) = (self.part, self.blocks());
        let for_me = |rank: usize| slots.of(rank).wrapping_add(blocks.at(rank, part.rank)).cast_const();
        if self.reduces {
            let elements = self.segment(segment, part.rank);
            let start = part.call.blocks().range(part.rank).start;
            let own = part.input(&elements);
            self.parts.clear();
            self.parts.extend((0..part.ranks).map(|rank| if rank == part.rank { own } else { for_me(rank) }));
            let output = part.output(&(elements.start - start..elements.end - start));
            // SAFETY: every peer has staged these elements for this rank. The caller of `run`
            // vouches for both buffers.
            unsafe { part.fold(self.parts, output, elements.len()) };
        } else {
            for rank in (0..part.ranks).filter(|&rank| rank != part.rank) {
                let elements = self.segment(segment, rank);
                // SAFETY: that rank has staged these elements for this one. The caller of `run`
                // vouches for the output.
                unsafe { part.copy_out(for_me(rank), part.output(&elements), elements.len()) };
            }
        }
    }
}
