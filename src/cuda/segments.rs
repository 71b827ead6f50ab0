//! How a collective on device memory is cut into segments that pass through host memory (staged). A
//! segment has rows of the buffers, their places in the segment's host memory, and the call of the
//! collective on that memory.
//!
//! Every collective but an all-to-all with counts can run in place, so a segment needs room only
//! for the larger of its two buffers. A buffer with a block for each rank is cut across all blocks:
//! a segment has one row of each block.

use std::ops::Range;

use crate::types::{Op, Rank};

/// A collective whose buffers are cut into segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) op: Op,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) root: Rank,
    /// Elements of the buffer, or of one block.
    pub(crate) count: usize,
    /// Bytes of an element.
    pub(crate) size: usize,
}

/// Bytes with an offset in a user's buffer and an offset in the memory of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) of_buffer: usize,
    pub(crate) of_segment: usize,
    pub(crate) len: usize,
}

/// One segment of a collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Elements of the buffer, or of one block.
    pub(crate) count: usize,
    /// The rows that are copied from the user's send buffer before the collective, and to the
    /// user's receive buffer after it.
    pub(crate) out: Vec<Row>,
    pub(crate) back: Vec<Row>,
    /// The ranges of the segment's memory from which the collective sends and to which it receives;
    /// empty if this rank does not.
    pub(crate) send: Range<usize>,
    pub(crate) recv: Range<usize>,
}

impl Cut {
    /// Returns the numbers of blocks in this rank's send and receive buffer: none, one, or one for
    /// each rank.
    fn blocks(&self) -> [usize; 2] {
        let is_root = self.rank == self.root;
        let at_root = |blocks| if is_root { blocks } else { 0 };
        match self.op {
            Op::AllReduce => [1, 1],
            Op::Broadcast => [at_root(1), 1],
            Op::Reduce => [1, at_root(1)],
            Op::AllGather => [1, self.world],
            Op::ReduceScatter => [self.world, 1],
            Op::AllToAll => [self.world, self.world],
            Op::Gather => [1, at_root(self.world)],
            Op::Scatter => [at_root(self.world), 1],
            op => unreachable!("{op} is not cut into segments"),
        }
    }

    /// Returns the bytes that one element of the count takes in the memory of a segment, the same
    /// on all ranks.
    pub(crate) fn width(&self) -> usize {
        match self.op {
            Op::AllReduce | Op::Broadcast | Op::Reduce => self.size,
            _ => self.world * self.size,
        }
    }

    /// Returns the segment with these elements of the buffer, or of each block.
    pub(crate) fn segment(&self, elements: Range<usize>) -> Segment {
        let [sends, recvs] = self.blocks();
        let len = elements.len() * self.size;
        let row = |blocks: usize, block: usize| Row {
            of_buffer: (block * self.count + elements.start) * self.size,
            // In place, a single block lies at this rank's place among the blocks of all ranks.
            of_segment: if blocks == 1 && sends.max(recvs) == self.world { self.rank * len } else { block * len },
            len,
        };
        let rows = |blocks: usize| (0..blocks).map(|block| row(blocks, block)).collect::<Vec<_>>();
        let span = |rows: &[Row]| rows.first().map_or(0..0, |first| first.of_segment..first.of_segment + rows.len() * len);
        let (out, back) = (rows(sends), rows(recvs));
        Segment { count: elements.len(), send: span(&out), recv: span(&back), out, back }
    }

    /// Returns the segments, each with at most `most` bytes of memory, but at least one element.
    pub(crate) fn segments(self, most: usize) -> impl ExactSizeIterator<Item = Segment> {
        let elements = (most / self.width()).max(1);
        (0..self.count.div_ceil(elements)).map(move |i| self.segment(i * elements..((i + 1) * elements).min(self.count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [Op; 8] =
        [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter];

    /// Every byte of the buffers is in one row of one segment, and the rows of a segment do not
    /// overlap in its memory.
    #[test]
    fn segments_cover_the_buffers_once() {
        for op in OPS {
            for world in 1..=4 {
                for (rank, root) in (0..world).flat_map(|rank| (0..world).map(move |root| (rank, root))) {
                    let cut = Cut { op, rank, world, root, count: 10, size: 4 };
                    let [sends, recvs] = cut.blocks();
                    let mut seen = [vec![0; sends * 40], vec![0; recvs * 40]];
                    for segment in cut.segments(3 * cut.width()) {
                        for (rows, seen) in [&segment.out, &segment.back].into_iter().zip(&mut seen) {
                            let mut of_segment = vec![0; 3 * cut.width()];
                            for row in rows {
                                seen[row.of_buffer..][..row.len].iter_mut().for_each(|times| *times += 1);
                                of_segment[row.of_segment..][..row.len].iter_mut().for_each(|times| *times += 1);
                            }
                            assert!(of_segment.iter().all(|&times| times <= 1), "{op} {world} {rank} {root}");
                        }
                    }
                    assert!(seen.iter().flatten().all(|&times| times == 1), "{op} {world} {rank} {root}: {seen:?}");
                }
            }
        }
    }

    #[test]
    fn the_collective_is_in_place() {
        let cut = Cut { op: Op::AllGather, rank: 2, world: 4, root: 0, count: 10, size: 4 };
        let segment = cut.segment(2..5);
        assert_eq!((segment.send, segment.recv), (24..36, 0..48));
        assert_eq!(segment.out, [Row { of_buffer: 8, of_segment: 24, len: 12 }]);
        assert_eq!(segment.back[3], Row { of_buffer: 128, of_segment: 36, len: 12 });
        let reduce = Cut { op: Op::Reduce, ..cut }.segment(0..10);
        assert_eq!((reduce.send, reduce.recv), (0..40, 0..0));
    }
}
