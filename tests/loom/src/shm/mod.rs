//! A model of shared memory for loom, and the tests of [`flags`] and [`hierarchy`] upon it.

mod flag_models;
#[path = "../../../../src/shm/flags.rs"]
mod flags;
#[path = "../../../../src/shm/groups.rs"]
mod groups;
#[path = "../../../../src/shm/hierarchy.rs"]
mod hierarchy;
mod hierarchy_models;

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};

use crate::sync::{AtomicU32, Ordering};
use flags::{FlagLine, FlagLines, Phases, SLOTS};
use hierarchy::{GroupLines, LeaderLines};

/// A slot is a cell in which loom detects races. A futex is a lock and a condition.
pub(super) struct Memory {
    lines: Vec<[FlagLine; SLOTS]>,
    leader_lines: Vec<[LeaderLines; SLOTS]>,
    pub(super) slots: Vec<[UnsafeCell<u32>; SLOTS]>,
    finished: Vec<AtomicU32>,
    futex: Mutex<()>,
    woken: Condvar,
}

// SAFETY: the tests are about the accesses to the slots: loom reports each one that is not
// synchronised.
unsafe impl Sync for Memory {}
// SAFETY: the tests are about the accesses to the slots: loom reports each one that is not
// synchronised.
unsafe impl Send for Memory {}

impl FlagLines for Arc<Memory> {
    fn line(&self, rank: usize, slot: usize) -> &FlagLine {
        &self.lines[rank][slot]
    }

    fn finished(&self, rank: usize) -> &AtomicU32 {
        &self.finished[rank]
    }

    fn sleep(&self, word: &AtomicU32, value: u32, _: Duration) {
        let guard = self.futex.lock().unwrap();
        // Without a timeout: a lost wake shows as a deadlock.
        if word.load(Ordering::Acquire) == value {
            drop(self.woken.wait(guard).unwrap());
        }
    }

    fn wake(&self, _: &AtomicU32) {
        let _guard = self.futex.lock().unwrap();
        self.woken.notify_all();
    }
}

impl GroupLines for Arc<Memory> {
    fn leader_lines(&self, leader: usize, slot: usize) -> &LeaderLines {
        &self.leader_lines[leader][slot]
    }
}

/// Runs `steps` on each rank, in every order that loom finds with at most `preemptions`
/// preemptions. All ranks have published and finished the phases before `first`.
pub(super) fn explore(
    ranks: usize,
    first: u32,
    preemptions: usize,
    steps: impl Fn(Arc<Memory>, Phases<Arc<Memory>>) + Clone + Send + Sync + 'static,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(move || {
        let before = first.wrapping_sub(1);
        let memory = Arc::new(Memory {
            lines: (0..ranks).map(|_| std::array::from_fn(|_| FlagLine::new())).collect(),
            leader_lines: (0..ranks).map(|_| std::array::from_fn(|_| LeaderLines::new())).collect(),
            slots: (0..ranks).map(|_| std::array::from_fn(|_| UnsafeCell::new(0))).collect(),
            finished: (0..ranks).map(|_| AtomicU32::new(before)).collect(),
            futex: Mutex::new(()),
            woken: Condvar::new(),
        });
        memory.lines.iter().flatten().for_each(|line| line.phase.store(before, Ordering::Relaxed));
        let run = |rank| {
            let (memory, steps) = (memory.clone(), steps.clone());
            let phases = Phases::starting(memory.clone(), rank, ranks, before);
            move || steps(memory, phases)
        };
        let others: Vec<_> = (1..ranks).map(|rank| loom::thread::spawn(run(rank))).collect();
        run(0)();
        for other in others {
            other.join().unwrap();
        }
    });
}
