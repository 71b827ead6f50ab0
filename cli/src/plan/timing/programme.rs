//! What the ranks of a collective do.

use kolo::plan::{CostModel, Layout, Move, Moves, chunk};
use kolo::{Algorithm, Op};

use super::scenario::ELEMENT;

/// What the ranks of a collective do.
#[derive(Clone, Debug)]
pub(super) struct Programme {
    /// The schedules of all ranks, or of one rank of each host.
    pub(super) moves: Moves,
    /// The elements of the buffer, or of all blocks.
    pub(super) count: u64,
    /// The schedules at a time, each for its part of the elements.
    pub(super) columns: usize,
    /// Seconds of the phases in shared memory before and after the messages.
    pub(super) windows: Option<[Option<f64>; 2]>,
}

impl Programme {
    /// Returns `None` if there are no messages, or if the phases in shared memory have no price.
    pub(super) fn new(
        op: Op,
        count: u64,
        choice: (Algorithm, Option<Algorithm>),
        layout: Layout,
        model: &CostModel,
    ) -> Option<Programme> {
        let moves = |algorithm, world| Moves::new(op, algorithm, world, layout.racks, ELEMENT as usize);
        match choice {
            (Algorithm::Window, _) => None,
            (_, Some(between)) => {
                let windows = Some(windows(op, count * ELEMENT, layout.ranks.div_ceil(layout.hosts) as f64, model)?);
                let columns = if op == Op::AllReduce { layout.fewest_per_host } else { 1 };
                Some(Programme { moves: moves(between, layout.hosts), count, columns, windows })
            }
            (algorithm, None) => Some(Programme { moves: moves(algorithm, layout.ranks), count, columns: 1, windows: None }),
        }
    }

    /// Returns the programme with as few more elements as make all chunks equally long.
    pub(super) fn padded(mut self) -> Programme {
        self.count = self.count.next_multiple_of((self.columns * self.moves.world) as u64);
        self
    }

    /// Returns whether no rank's chunk or block is empty.
    pub(super) fn has_elements_for_all(&self) -> bool {
        let has_blocks = self.moves.op != Op::AllReduce;
        self.count >= if has_blocks { 1 } else { (self.moves.world * self.columns) as u64 }
    }

    pub(super) fn moves(&self, column: usize, member: usize) -> Box<dyn Iterator<Item = Move>> {
        self.moves.of(member, chunk(self.count as usize, self.columns, column).len())
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
