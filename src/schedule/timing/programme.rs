//! What the ranks of a collective do.

use super::scenario::ELEMENT;
use crate::schedule::algorithm::Algorithm;
use crate::schedule::generate::steps;
use crate::schedule::model::{Choice, CostModel, Layout};
use crate::schedule::price::segment_bytes;
use crate::schedule::problem::{Blocks, Problem, Racks, chunk};
use crate::schedule::step::Step;
use crate::types::Op;

/// What the ranks of a collective do.
#[derive(Clone, Debug)]
pub(super) struct Programme {
    pub(super) op: Op,
    /// The algorithm of the messages.
    pub(super) algorithm: Algorithm,
    /// The elements of the buffer, or of all blocks.
    pub(super) count: u64,
    /// The ranks of one schedule: all ranks, or one of each host. The racks in which they are.
    pub(super) members: usize,
    pub(super) racks: Racks<'static>,
    /// The schedules at a time, each for its part of the elements.
    pub(super) columns: usize,
    /// The elements of a segment.
    pub(super) segment: usize,
    /// Seconds of the phases in shared memory before and after the messages.
    pub(super) windows: Option<[Option<f64>; 2]>,
}

impl Programme {
    /// Returns `None` if there are no messages, or if the phases in shared memory have no price.
    pub(super) fn new(op: Op, count: u64, choice: Choice, layout: Layout, model: &CostModel) -> Option<Programme> {
        let flat = |algorithm: Algorithm| Programme {
            op,
            algorithm,
            count,
            members: layout.ranks,
            racks: Racks::Even(layout.racks),
            columns: 1,
            segment: segment_bytes(algorithm) / ELEMENT as usize,
            windows: None,
        };
        match choice {
            Choice { algorithm: Algorithm::Window, .. } => None,
            Choice { between: Some(between), .. } => {
                let windows = windows(op, count * ELEMENT, layout.most_per_host() as f64, model)?;
                let columns = if op == Op::AllReduce { layout.fewest_per_host } else { 1 };
                Some(Programme { members: layout.hosts, columns, windows: Some(windows), ..flat(between) })
            }
            Choice { algorithm, .. } => Some(flat(algorithm)),
        }
    }

    /// Returns the programme with as few more elements as make all chunks equally long.
    pub(super) fn padded(mut self) -> Programme {
        self.count = self.count.next_multiple_of((self.columns * self.members) as u64);
        self
    }

    /// Returns whether no rank's chunk or block is empty.
    pub(super) fn has_elements_for_all(&self) -> bool {
        let has_blocks = self.op != Op::AllReduce;
        self.count >= if has_blocks { 1 } else { (self.members * self.columns) as u64 }
    }

    pub(super) fn steps(&self, column: usize, member: usize) -> Box<dyn Iterator<Item = Step>> {
        let count = chunk(self.count as usize, self.columns, column).len();
        let blocks = Blocks::Even(count.div_ceil(self.members));
        let Programme { op, algorithm, members: world, racks, segment, .. } = *self;
        steps(algorithm, Problem { op, rank: member, world, root: 0, count, sends: blocks, recvs: blocks, segment, racks })
    }
}

/// Returns the seconds of the phases in shared memory before and after the messages between hosts. The
/// bytes add up to those of the staged forms, as the prices have them.
fn windows(op: Op, bytes: u64, ranks: f64, model: &CostModel) -> Option<[Option<f64>; 2]> {
    let phase = |syncs: f64, traffic: f64| Some(syncs * model.window_sync + traffic * bytes as f64 * model.window_per_byte);
    match op {
        Op::AllReduce => Some([phase(1.0, 3.0), phase(1.0, 2.0 - 2.0 / ranks)]),
        Op::Reduce => Some([phase(2.0, 4.0), None]),
        Op::Broadcast => Some([None, phase(1.0, 4.0)]),
        Op::Barrier => Some([phase(1.0, 0.0), phase(1.0, 0.0)]),
        _ => None,
    }
}
