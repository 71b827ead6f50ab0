//! How a collective on device memory is cut into rounds. In a round, a part of each block moves. A
//! rank whose buffers its peers cannot reach copies that part to other memory first, a segment, and
//! from there afterwards.
//!
//! Every direct collective but an all-to-all can run in place, so a segment needs room only for the larger
//! of its two buffers.

use std::ops::Range;

use crate::types::{Op, Rank};

/// A collective whose buffers are cut into rounds.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) op: Op,
    pub(crate) world: usize,
    pub(crate) root: Rank,
    /// Bytes of an element.
    pub(crate) size: usize,
    /// Where each block starts, in elements, and where the last one ends. There is one block, or one
    /// for each rank.
    pub(crate) offsets: Vec<usize>,
    pub(crate) rounds: usize,
    /// Whether a segment has the two buffers apart.
    pub(crate) is_apart: bool,
}

/// Which blocks a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    None,
    /// Only this one.
    One(usize),
    All,
}

/// One of the two buffers of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Buffer {
    Send = 0,
    Recv = 1,
}

/// Bytes with an offset in a user's buffer and an offset in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) of_buffer: usize,
    pub(crate) of_segment: usize,
    pub(crate) len: usize,
}

/// Parts of blocks begin at a multiple of this many bytes, so that each is read in whole vectors.
pub(super) const GRAIN: usize = 256;

impl Cut {
    /// A collective of blocks of `count` elements each.
    pub(crate) fn even(op: Op, world: usize, root: Rank, count: usize, size: usize) -> Cut {
        let blocks = if matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce) { 1 } else { world };
        Cut::of(op, world, root, (0..=blocks).map(|block| block * count).collect(), size)
    }

    /// A collective of blocks that start at these elements.
    pub(crate) fn of(op: Op, world: usize, root: Rank, offsets: Vec<usize>, size: usize) -> Cut {
        Cut { op, world, root, size, offsets, rounds: 1, is_apart: false }
    }

    /// Cuts it so that a segment has about `most` bytes: at most [`Cut::slack`] more.
    pub(crate) fn into_rounds_of(mut self, most: usize) -> Cut {
        self.rounds = self.segment_bytes().div_ceil(most).max(1);
        self
    }

    /// Bytes of the segments of all rounds.
    pub(crate) fn segment_bytes(&self) -> usize {
        self.elements() * self.size * if self.is_apart { 2 } else { 1 }
    }

    /// Bytes that a segment may have beyond its share, because parts begin at whole vectors.
    pub(crate) fn slack(blocks: usize) -> usize {
        2 * blocks * GRAIN
    }

    fn blocks(&self) -> usize {
        self.offsets.len() - 1
    }

    fn elements(&self) -> usize {
        self.offsets[self.blocks()]
    }

    /// The blocks of a rank's buffers.
    pub(crate) fn buffers(&self, rank: Rank) -> [Blocks; 2] {
        let at_root = |blocks| if rank == self.root { blocks } else { Blocks::None };
        let (first, own) = (Blocks::One(0), Blocks::One(rank));
        match self.op {
            Op::AllReduce => [first, first],
            Op::Broadcast => [at_root(first), first],
            Op::Reduce => [first, at_root(first)],
            Op::AllGather | Op::AllGatherV => [own, Blocks::All],
            Op::ReduceScatter | Op::ReduceScatterV => [Blocks::All, own],
            Op::AllToAll => [Blocks::All, Blocks::All],
            Op::Gather => [own, at_root(Blocks::All)],
            Op::Scatter => [at_root(Blocks::All), own],
            op => unreachable!("{op} is not cut into rounds"),
        }
    }

    /// The elements of a block that move in a round, or in all rounds together.
    pub(crate) fn part(&self, block: usize, round: Option<usize>) -> Range<usize> {
        let count = self.offsets[block + 1] - self.offsets[block];
        let grain = (GRAIN / self.size).max(1);
        let edge = |round: usize| match round == self.rounds {
            true => count,
            // No product of large numbers.
            false => (count / self.rounds * round + count % self.rounds * round / self.rounds).next_multiple_of(grain).min(count),
        };
        round.map_or(0..count, |round| edge(round)..edge(round + 1))
    }

    /// Where the part of a block is in a rank's buffer, in bytes.
    pub(crate) fn in_buffer(&self, blocks: Blocks, block: usize, round: Option<usize>) -> usize {
        let start = if blocks == Blocks::All { self.offsets[block] } else { 0 };
        (start + self.part(block, round).start) * self.size
    }

    /// Where the part of a block is in a segment, in bytes.
    pub(crate) fn in_segment(&self, buffer: Buffer, block: usize, round: usize) -> usize {
        let before = |block| (0..block).map(|block| self.part(block, Some(round)).len()).sum::<usize>();
        let apart = if self.is_apart && buffer == Buffer::Recv { before(self.blocks()) } else { 0 };
        (apart + before(block)) * self.size
    }

    /// The rows of a rank's buffer in the segment of a round.
    pub(crate) fn rows(&self, rank: Rank, buffer: Buffer, round: usize) -> impl Iterator<Item = Row> {
        let blocks = self.buffers(rank)[buffer as usize];
        let range = match blocks {
            Blocks::None => 0..0,
            Blocks::One(block) => block..block + 1,
            Blocks::All => 0..self.blocks(),
        };
        let row = move |block| Row {
            of_buffer: self.in_buffer(blocks, block, Some(round)),
            of_segment: self.in_segment(buffer, block, round),
            len: self.part(block, Some(round)).len() * self.size,
        };
        range.map(row).filter(|row| row.len > 0)
    }

    /// The elements of each block in a round.
    pub(crate) fn counts(&self, round: usize) -> Vec<usize> {
        (0..self.blocks()).map(|block| self.part(block, Some(round)).len()).collect()
    }

    /// The bytes of a segment that a rank's buffer has.
    pub(crate) fn span(&self, rank: Rank, buffer: Buffer, round: usize) -> Range<usize> {
        let end = |block: usize| self.in_segment(buffer, block, round) + self.part(block, Some(round)).len() * self.size;
        match self.buffers(rank)[buffer as usize] {
            Blocks::None => 0..0,
            Blocks::One(block) => self.in_segment(buffer, block, round)..end(block),
            Blocks::All => self.in_segment(buffer, 0, round)..end(self.blocks() - 1),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) const OPS: [Op; 8] =
        [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter];

    /// Every byte of the buffers is in one row of one round, and the rows of a round do not overlap
    /// in its segment.
    #[test]
    fn rounds_cover_the_buffers_once() {
        for (op, world, root, counts) in all_cuts() {
            let mut offsets = vec![0];
            counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
            for (rank, is_apart) in (0..world).flat_map(|rank| [(rank, false), (rank, true)]) {
                let mut cut = Cut::of(op, world, root, offsets.clone(), 4);
                cut.is_apart = is_apart;
                let cut = cut.into_rounds_of(700);
                let room = 700 + Cut::slack(counts.len());
                for buffer in [Buffer::Send, Buffer::Recv] {
                    let len = match cut.buffers(rank)[buffer as usize] {
                        Blocks::None => 0,
                        Blocks::One(block) => counts[block] * 4,
                        Blocks::All => counts.iter().sum::<usize>() * 4,
                    };
                    let mut seen = vec![0; len];
                    for round in 0..cut.rounds {
                        let mut of_segment = vec![0; room];
                        let mut bytes = 0;
                        for row in cut.rows(rank, buffer, round) {
                            seen[row.of_buffer..][..row.len].iter_mut().for_each(|times| *times += 1);
                            of_segment[row.of_segment..][..row.len].iter_mut().for_each(|times| *times += 1);
                            bytes += row.len;
                        }
                        assert!(of_segment.iter().all(|&times| times <= 1), "{op} {world} {rank} {root}");
                        assert_eq!(cut.span(rank, buffer, round).len(), bytes);
                    }
                    assert!(seen.iter().all(|&times| times == 1), "{op} {world} {rank} {root}: {seen:?}");
                }
            }
        }
    }

    /// Collectives of one block or several, even and uneven.
    fn all_cuts() -> impl Iterator<Item = (Op, usize, Rank, Vec<usize>)> {
        let worlds = (1..=4usize).flat_map(|world| (0..world).map(move |root| (world, root)));
        worlds.flat_map(|(world, root)| {
            let even = OPS.into_iter().map(move |op| {
                let blocks = Cut::even(op, world, root, 1000, 4).blocks();
                (op, world, root, vec![1000; blocks])
            });
            let uneven = (0..world).map(|rank| 700 * rank + 1).collect::<Vec<_>>();
            even.chain([Op::AllGatherV, Op::ReduceScatterV].into_iter().map(move |op| (op, world, root, uneven.clone())))
        })
    }
}
