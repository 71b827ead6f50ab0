//! Schedules without buffers, for the simulator of `kolo plan`: whom a rank sends how many elements.

use super::algorithm::Algorithm;
use super::generate::steps;
use super::price::segment_bytes;
use super::problem::{Blocks, Problem, Racks};
use super::select::{bytes_of_a_round, sent_by};
use super::step::Step;
use crate::types::{Op, Rank};

/// One step of a rank that takes time.
#[derive(Clone, Copy, Debug)]
pub enum Move {
    /// Sends elements.
    Send {
        /// The receiver.
        to: Rank,
        /// The elements.
        len: usize,
    },
    /// Waits for elements.
    Receive {
        /// The sender.
        from: Rank,
        /// Where the elements go on to while they arrive.
        to: Option<Rank>,
        /// The elements.
        len: usize,
        /// Whether they are reduced with this rank's.
        reduces: bool,
    },
    /// Reduces the parts of all ranks at once.
    Fold {
        /// The elements of a part.
        len: usize,
    },
}

/// The schedules of one algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Moves {
    /// The operation.
    pub op: Op,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The number of ranks.
    pub world: usize,
    /// The number of racks over which the ranks are spread.
    pub racks: usize,
    /// The elements of a segment.
    pub segment: usize,
}

impl Moves {
    /// Returns those of an algorithm with elements of `element` bytes.
    pub fn new(op: Op, algorithm: Algorithm, world: usize, racks: usize, element: usize) -> Moves {
        Moves { op, algorithm, world, racks, segment: segment_bytes(algorithm) / element }
    }

    /// Returns what a rank does with a buffer, or blocks, of `count` elements.
    pub fn of(self, rank: Rank, count: usize) -> Box<dyn Iterator<Item = Move>> {
        let Moves { op, algorithm, world, racks, segment } = self;
        let (blocks, racks) = (Blocks::Even(count.div_ceil(world)), Racks::Even(racks));
        let problem = Problem { op, rank, world, root: 0, count, sends: blocks, recvs: blocks, segment, racks };
        Box::new(steps(algorithm, problem).filter_map(|step| {
            let len = step.len();
            Some(match step {
                Step::Send { to, .. } => Move::Send { to, len },
                Step::Recv { from, .. } => Move::Receive { from, to: None, len, reduces: false },
                Step::RecvSend { from, to, .. } => Move::Receive { from, to: Some(to), len, reduces: false },
                Step::RecvReduce { from, .. } => Move::Receive { from, to: None, len, reduces: true },
                Step::RecvReduceSend { from, to, .. } => Move::Receive { from, to: Some(to), len, reduces: true },
                Step::Fold { own, .. } => Move::Fold { len: own.len },
                Step::Copy { .. } | Step::Convert { .. } => return None,
            })
        }))
    }

    /// Returns the elements and messages that a rank sends.
    pub fn sent(&self, rank: Rank, count: u64) -> (u64, u64) {
        sent_by(rank, self.op, self.algorithm, count, (self.world, Racks::Even(self.racks)), self.segment)
    }

    /// Returns the elements after which the steps repeat, if they do.
    pub fn round(&self) -> Option<u64> {
        bytes_of_a_round(self.op, self.algorithm, self.world, self.segment)
    }
}
