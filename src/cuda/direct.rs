//! Collectives that read and write other ranks' device memory where it is: what each rank does, once all know where the others'
//! buffers are and that they are ready.
//!
//! An all-reduce is "two-shot" in one step: each rank reduces its slice of everybody's buffer, and writes the result into everybody's.
//! So every byte of a buffer is read once and written once, and no byte is touched by two ranks, in place as well.

use crate::types::{DType, Op, Rank};

/// A collective on buffers that all ranks can reach.
#[derive(Clone, Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) op: Op,
    pub(crate) dtype: DType,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) root: Rank,
    /// Elements of the buffer, or of one block.
    pub(crate) count: usize,
    /// Where each rank's block starts, in elements, and where the last ends, of an operation with counts.
    pub(crate) offsets: Option<&'a [usize]>,
}

/// Which of a rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Buffer {
    Send = 0,
    Recv = 1,
}

/// Elements of a buffer, from an offset in bytes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) rank: Rank,
    pub(crate) buffer: Buffer,
    pub(crate) offset: u64,
}

/// What a rank reduces, or copies if there is one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) sources: Vec<Part>,
    pub(crate) targets: Vec<Part>,
    /// Elements.
    pub(crate) count: usize,
}

/// Slices begin at a multiple of so many bytes, so that all of them are read in whole vectors.
const GRAIN: usize = 256;

impl Plan<'_> {
    /// Whether the operation can be carried out so. An all-to-all with counts cannot: no rank knows where others' blocks are. Nor
    /// can one in place: it would overwrite what others have still to read.
    pub(crate) fn is_possible(op: Op, is_in_place: bool) -> bool {
        match op {
            Op::AllReduce | Op::Broadcast | Op::Reduce | Op::AllGather | Op::AllGatherV => true,
            Op::ReduceScatter | Op::ReduceScatterV | Op::Gather | Op::Scatter => true,
            Op::AllToAll => !is_in_place,
            _ => false,
        }
    }

    /// What this rank does.
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
            op => unreachable!("{op} is not carried out so"),
        };
        moves.retain(|one| one.count > 0);
        moves
    }
}

/// All ranks, from one's own on: so that not all read from the same at once.
fn in_turn(rank: Rank, world: usize) -> impl Iterator<Item = Rank> {
    (0..world).map(move |i| (rank + i) % world)
}

/// The slice of a rank, in elements: where it starts and how many elements it has.
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
    fn slices_cover_all_once() {
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

    /// In place as others have it, no element that one rank writes is touched by another.
    #[test]
    fn no_two_ranks_touch_what_one_writes() {
        let ops = [Op::AllReduce, Op::Reduce, Op::Broadcast, Op::AllGather, Op::ReduceScatter, Op::Gather, Op::Scatter];
        for op in ops {
            for world in 1..=5 {
                let (count, root) = (300, world - 1);
                // By memory, the rank that writes it and those that read it. In place, where the one block is in the buffer of many.
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
                        // A copy of what is there already is none.
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
