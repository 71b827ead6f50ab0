//! Direct collectives on device memory: each rank reads and writes its peers' buffers in place. A
//! [`Plan`] has the moves of one rank, once all ranks know where the buffers are and that they are
//! ready.
//!
//! An all-reduce is two-shot in one step: each rank reduces its chunk of all buffers and writes the
//! result to all buffers. So every byte of a buffer is read once and written once, and no two ranks
//! access the same byte, also in place.

use crate::types::{DType, Op, Rank};

/// A collective on buffers that all ranks can reach, as one rank runs it.
#[derive(Clone, Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) op: Op,
    pub(crate) dtype: DType,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) root: Rank,
    /// Elements of the buffer, or of one block.
    pub(crate) count: usize,
    /// For an operation with counts: where each rank's block starts, in elements, and where the
    /// last one ends.
    pub(crate) offsets: Option<&'a [usize]>,
}

/// One of the two buffers of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Buffer {
    Send = 0,
    Recv = 1,
}

/// A place in a rank's buffer, with its offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) rank: Rank,
    pub(crate) buffer: Buffer,
    pub(crate) offset: u64,
}

/// One reduction of a rank, which is a copy if there is one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) sources: Vec<Part>,
    pub(crate) targets: Vec<Part>,
    /// Elements.
    pub(crate) count: usize,
}

/// Chunks begin at a multiple of this many bytes, so that each is read in whole vectors.
const GRAIN: usize = 256;

impl Plan<'_> {
    /// Whether the operation has a direct form. An all-to-all with counts has none, because no rank
    /// knows where its peers' blocks are. An all-to-all in place has none, because it would
    /// overwrite what peers have not read yet.
    pub(crate) fn is_possible(op: Op, is_in_place: bool) -> bool {
        match op {
            Op::AllReduce | Op::Broadcast | Op::Reduce | Op::AllGather | Op::AllGatherV => true,
            Op::ReduceScatter | Op::ReduceScatterV | Op::Gather | Op::Scatter => true,
            Op::AllToAll => !is_in_place,
            _ => false,
        }
    }

    /// Returns the moves of this rank.
    pub(crate) fn moves(&self) -> Vec<Move> {
        let Plan { op, rank, world, root, count, .. } = *self;
        let size = self.dtype.size();
        let part = |rank, buffer, element: usize| Part { rank, buffer, offset: (element * size) as u64 };
        let block = |block: usize| match self.offsets {
            Some(offsets) => (offsets[block], offsets[block + 1] - offsets[block]),
            None => (block * count, count),
        };
        let copy = |from: Part, to: Part, count| Move { sources: vec![from], targets: vec![to], count };
        let mut moves = match op {
            Op::AllReduce | Op::Reduce => {
                let (start, count) = slice(count, size, world, rank);
                let sources = (0..world).map(|peer| part(peer, Buffer::Send, start)).collect();
                let targets = if op == Op::Reduce { root..root + 1 } else { 0..world };
                let targets = targets.map(|peer| part(peer, Buffer::Recv, start)).collect();
                vec![Move { sources, targets, count }]
            }
            Op::ReduceScatter | Op::ReduceScatterV => {
                let (start, count) = block(rank);
                let sources = (0..world).map(|peer| part(peer, Buffer::Send, start)).collect();
                vec![Move { sources, targets: vec![part(rank, Buffer::Recv, 0)], count }]
            }
            Op::Broadcast => vec![copy(part(root, Buffer::Send, 0), part(rank, Buffer::Recv, 0), count)],
            Op::Scatter => vec![copy(part(root, Buffer::Send, rank * count), part(rank, Buffer::Recv, 0), count)],
            Op::Gather if rank != root => Vec::new(),
            Op::Gather | Op::AllGather | Op::AllGatherV => {
                let from = |peer| {
                    let (start, count) = block(peer);
                    copy(part(peer, Buffer::Send, 0), part(rank, Buffer::Recv, start), count)
                };
                in_turn(rank, world).map(from).collect()
            }
            Op::AllToAll => in_turn(rank, world)
                .map(|peer| copy(part(peer, Buffer::Send, rank * count), part(rank, Buffer::Recv, peer * count), count))
                .collect(),
            op => unreachable!("{op} has no direct form"),
        };
        moves.retain(|one| one.count > 0);
        moves
    }
}

/// Returns all ranks, beginning with this one, so that not all read from the same rank at once.
fn in_turn(rank: Rank, world: usize) -> impl Iterator<Item = Rank> {
    (0..world).map(move |i| (rank + i) % world)
}

/// Returns where a rank's chunk starts and how many elements it has.
pub(crate) fn slice(count: usize, size: usize, world: usize, rank: Rank) -> (usize, usize) {
    let grain = GRAIN / size;
    let each = count.div_ceil(world).next_multiple_of(grain);
    let start = (rank * each).min(count);
    (start, each.min(count - start))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn chunks_cover_all_elements_once() {
        for count in [0, 1, 63, 64, 65, 127, 1000, 4096, 100_003] {
            for world in 1..=9 {
                let mut next = 0;
                for rank in 0..world {
                    let (start, len) = slice(count, 4, world, rank);
                    assert!(start == next && (len == 0 || start.is_multiple_of(GRAIN / 4)));
                    next += len;
                }
                assert_eq!(next, count);
            }
        }
    }

    /// In place, no rank accesses an element that another rank writes.
    #[test]
    fn no_rank_accesses_what_another_writes() {
        let ops = [Op::AllReduce, Op::Reduce, Op::Broadcast, Op::AllGather, Op::ReduceScatter, Op::Gather, Op::Scatter];
        for op in ops {
            for world in 1..=5 {
                let (count, root) = (300, world - 1);
                // The ranks that write and read each element. In place, the single block lies in
                // the buffer of all blocks.
                let mut written: HashMap<(Rank, usize), Rank> = HashMap::new();
                let mut read: Vec<((Rank, usize), Rank)> = Vec::new();
                let place = |part: &Part| {
                    let shift = match (op, part.buffer) {
                        (Op::AllGather | Op::Gather, Buffer::Send) => part.rank * count,
                        (Op::ReduceScatter | Op::Scatter, Buffer::Recv) => part.rank * count,
                        _ => 0,
                    };
                    shift + part.offset as usize / 4
                };
                for rank in 0..world {
                    for one in (Plan { op, dtype: DType::F32, rank, world, root, count, offsets: None }).moves() {
                        // A copy from a place to itself is not made.
                        let is_nothing = one.sources.len() == 1
                            && (one.sources[0].rank, place(&one.sources[0])) == (one.targets[0].rank, place(&one.targets[0]));
                        for i in 0..if is_nothing { 0 } else { one.count } {
                            for target in &one.targets {
                                let before = written.insert((target.rank, place(target) + i), rank);
                                assert!(before.is_none(), "{op} {world}: written by {before:?} and {rank}");
                            }
                            read.extend(one.sources.iter().map(|source| ((source.rank, place(source) + i), rank)));
                        }
                    }
                }
                for (at, reader) in read {
                    let writer = written.get(&at).copied().unwrap_or(reader);
                    assert_eq!(writer, reader, "{op} {world}: {at:?}");
                }
            }
        }
    }
}
