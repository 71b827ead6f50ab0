//! Direct collectives on device memory: kernels read and write the buffers of all ranks in place. A
//! [`Plan`] has the moves of one rank's kernel.
//!
//! One rank of those that share a GPU launches the kernel for all of them, its leader: kernels of
//! several processes would take turns on the GPU.
//!
//! An all-reduce is two-shot in one step: each leader reduces its chunk of all buffers and writes
//! the result to all buffers. So every byte of a buffer is read once and written once, and no two
//! kernels access the same byte, also in place. A short one on several GPUs is one-shot: each rank
//! copies what it sends to a slot, and reduces the slots of all ranks for itself.

use super::device::Address;
use super::moves::Move;
use super::rounds::{Blocks, Buffer, Cut, GRAIN};
use crate::types::{Op, Rank};

/// A collective on memory that all leaders can reach.
pub(crate) struct Plan<'a> {
    pub(crate) cut: &'a Cut,
    /// The leader of each rank.
    pub(crate) leaders: &'a [Rank],
    /// The round whose parts move; all at once if `None`.
    pub(crate) round: Option<usize>,
    /// Whether a copy changes elements, so that it is made also where source and target are the same.
    pub(crate) changes: bool,
}

/// Where a rank's buffers are, as a leader reaches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The user's buffers, by [`Buffer`].
    Buffers([Address; 2]),
    /// The segment of the round.
    Segment(Address),
}

impl Plan<'_> {
    /// The address of a block in a rank's buffer.
    fn at(&self, places: &[Place], rank: Rank, buffer: Buffer, block: usize) -> Address {
        match places[rank] {
            Place::Buffers(buffers) => {
                let blocks = self.cut.buffers(rank)[buffer as usize];
                buffers[buffer as usize] + self.cut.in_buffer(blocks, block, self.round) as u64
            }
            Place::Segment(segment) => {
                let round = self.round.expect("a segment belongs to a round");
                segment + self.cut.in_segment(buffer, block, round) as u64
            }
        }
    }

    /// Returns the moves of this leader's kernel.
    pub(crate) fn moves(&self, leader: Rank, places: &[Place]) -> Vec<Move> {
        let Cut { op, world, root, size, .. } = *self.cut;
        let ranks = || (0..world).filter(|&rank| self.leaders[rank] == leader);
        let len = |block| self.cut.part(block, self.round).len();
        let at = |rank, buffer, block| self.at(places, rank, buffer, block);
        let copy = |from, to, block| Move::new(&[from], &[to], len(block), 1);
        let all = |buffer, block: usize, start: usize| -> Vec<Address> {
            (0..world).map(|rank| at(rank, buffer, block) + (start * size) as u64).collect()
        };
        // The kernels of several GPUs begin with the memory of different ranks.
        let is_only = self.leaders.iter().all(|&other| other == leader);
        let reduction = |one: Move| if is_only { one } else { one.beginning_with(leader) };
        let mut moves: Vec<Move> = match op {
            Op::AllReduce | Op::Reduce => {
                // Each leader has a chunk.
                let every: Vec<Rank> = (0..world).filter(|&rank| self.leaders[rank] == rank).collect();
                let index = every.iter().position(|&one| one == leader).expect("it is a leader");
                let (start, count) = slice(len(0), size, every.len(), index);
                let targets = all(Buffer::Recv, 0, start);
                let targets = if op == Op::Reduce { &targets[root..root + 1] } else { &targets };
                vec![reduction(Move::new(&all(Buffer::Send, 0, start), targets, count, world as u32))]
            }
            Op::ReduceScatter | Op::ReduceScatterV => {
                let reduce =
                    |rank| Move::new(&all(Buffer::Send, rank, 0), &[at(rank, Buffer::Recv, rank)], len(rank), world as u32);
                ranks().map(reduce).map(reduction).collect()
            }
            Op::Broadcast => ranks().map(|rank| copy(at(root, Buffer::Send, 0), at(rank, Buffer::Recv, 0), 0)).collect(),
            Op::Scatter => ranks().map(|rank| copy(at(root, Buffer::Send, rank), at(rank, Buffer::Recv, rank), rank)).collect(),
            Op::Gather | Op::AllGather | Op::AllGatherV => {
                let receives = |&rank: &Rank| self.cut.buffers(rank)[Buffer::Recv as usize] == Blocks::All;
                let gather = |rank| in_turn(rank, world).map(move |from| (from, rank));
                let pairs = ranks().filter(receives).flat_map(gather);
                pairs.map(|(from, to)| copy(at(from, Buffer::Send, from), at(to, Buffer::Recv, from), from)).collect()
            }
            Op::AllToAll => {
                let pairs = ranks().flat_map(|rank| in_turn(rank, world).map(move |from| (from, rank)));
                pairs.map(|(from, to)| copy(at(from, Buffer::Send, to), at(to, Buffer::Recv, from), to)).collect()
            }
            op => unreachable!("{op} has no direct form"),
        };
        let is_nothing = |one: &Move| one.count == 0 || (!op.reduces() && !self.changes && one.sources() == one.targets());
        moves.retain(|one| !is_nothing(one));
        moves
    }

    /// The most moves of a kernel that is not one-shot.
    pub(crate) fn most_moves(world: usize, leaders: &[Rank], leader: Rank) -> usize {
        world * leaders.iter().filter(|&&of| of == leader).count()
    }
}

/// Returns the moves of a one-shot all-reduce of one rank: what it sends to its slot, and then the
/// reduction of all slots. `slots` has where they are, as this rank reaches them. The kernels of all ranks
/// wait for each other after the first move.
pub(crate) fn one_shot(rank: Rank, slots: &[Address], (send, recv): (Address, Address), count: usize) -> [Move; 2] {
    let reduction = Move::new(slots, &[recv], count, slots.len() as u32);
    [Move::new(&[send], &[slots[rank]], count, 1), reduction.beginning_with(rank)]
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
    use crate::cuda::rounds::tests::OPS;

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

    /// The memory of a rank, apart from that of others.
    const OF_RANK: u64 = 1 << 32;

    /// The places of ranks that call in place, as NCCL defines it, or have their data in segments.
    fn places(cut: &Cut, segments: impl Fn(Rank) -> bool) -> Vec<Place> {
        let place = |rank: Rank| {
            let base = (rank as u64 + 1) * OF_RANK;
            if segments(rank) {
                return Place::Segment(base);
            }
            let own = |blocks| match (blocks, cut.buffers(rank)) {
                (Blocks::One(block), [Blocks::All, _] | [_, Blocks::All]) => base + (cut.offsets[block] * cut.size) as u64,
                _ => base,
            };
            Place::Buffers(cut.buffers(rank).map(own))
        };
        (0..cut.world).map(place).collect()
    }

    /// In place, no kernel accesses an element that another one writes, and no move one that another
    /// move writes.
    #[test]
    fn no_move_accesses_what_another_writes() {
        for op in OPS {
            for (world, gpus, some) in (1..=5).flat_map(|world| [(world, 1, 0), (world, 2, 1), (world, world, 2), (world, 1, 3)])
            {
                let mut cut = Cut::even(op, world, world - 1, 300, 4);
                cut.is_apart = op == Op::AllToAll;
                if op == Op::AllToAll && some != 3 {
                    // Out of place only.
                    continue;
                }
                let leaders: Vec<Rank> = (0..world).map(|rank| rank % gpus).collect();
                let round = (some > 0).then_some(0);
                let places = places(&cut, |rank| some == 3 || (some > 0 && rank % 2 == 0));
                let mut written: HashMap<u64, (Rank, usize)> = HashMap::new();
                let mut read: Vec<(u64, (Rank, usize))> = Vec::new();
                for leader in (0..world).filter(|&rank| leaders[rank] == rank) {
                    let plan = Plan { cut: &cut, leaders: &leaders, round, changes: false };
                    for (number, one) in plan.moves(leader, &places).iter().enumerate() {
                        for i in 0..one.count {
                            for target in one.targets() {
                                let before = written.insert(target + 4 * i, (leader, number));
                                assert!(before.is_none(), "{op} {world}: written by {before:?} and {leader}");
                            }
                            read.extend(one.sources().iter().map(|source| (source + 4 * i, (leader, number))));
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
