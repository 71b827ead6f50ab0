//! Every interleaving that loom finds of two or three ranks: no slot is written while it is
//! read, and no rank sleeps forever. Run with `RUSTFLAGS="--cfg kolo_loom" cargo test --lib
//! --release flags`.

use loom::sync::Arc;

use super::{Memory, explore};
use crate::shm::flags::{LAG, Phases, SLOTS, WORDS, has_finished};

/// One rank of a model.
struct Member {
    memory: Arc<Memory>,
    phases: Phases<Arc<Memory>>,
    rank: usize,
    ranks: usize,
}

/// The same operation in each phase: a slot holds its descriptor from its first use on.
fn described(phase: u32) -> [u64; 4] {
    [1, 2, 3, phase.into()]
}

impl Member {
    fn wait(&mut self, rank: usize, phase: u32) {
        while !self.phases.has_reached(rank, phase) {
            self.phases.sleep(rank, phase, std::time::Duration::MAX);
        }
    }

    /// Writes this rank's slot and publishes the phase.
    fn write(&mut self, phase: u32) {
        for other in 0..self.ranks {
            if !self.phases.is_retired(other, phase) {
                self.wait(other, Phases::<Arc<Memory>>::retires(phase));
            }
        }
        self.phases.announce(phase, phase.into(), &described(phase), &[self.rank as u64; WORDS]);
        let (slot, word) = (Phases::<Arc<Memory>>::slot(phase), phase.wrapping_mul(10) + self.rank as u32);
        // SAFETY: loom checks that no other rank accesses the slot.
        self.memory.slots[self.rank][slot].with_mut(|to| unsafe { *to = word });
        self.phases.publish();
    }

    /// Waits for a rank's phase and reads its slot.
    fn read(&mut self, rank: usize, phase: u32) {
        self.wait(rank, phase);
        assert_eq!(self.phases.line(rank, phase).fingerprint(), phase.into());
        assert_eq!(self.phases.line(rank, phase).words()[0], rank as u64);
        assert_eq!(self.phases.line(rank, phase).descriptor(phase), described(phase));
        // SAFETY: loom checks that no rank writes the slot.
        let word = self.memory.slots[rank][Phases::<Arc<Memory>>::slot(phase)].with(|word| unsafe { *word });
        assert_eq!(word, phase.wrapping_mul(10) + rank as u32);
    }
}

/// Every rank writes its slot in every phase and reads the slots of all.
fn exchange(member: &mut Member, first: u32, count: u32) {
    for phase in (0..count).map(|i| first.wrapping_add(i)) {
        member.write(phase);
        for other in 0..member.ranks {
            member.read(other, phase);
        }
    }
}

/// Rank 0 writes and runs as far ahead as it can. The other ranks read as late as they may.
fn run_ahead(member: &mut Member, first: u32, count: u32) {
    for i in 0..count {
        member.write(first.wrapping_add(i));
        if member.rank > 0 && i + 1 >= LAG {
            member.read(0, first.wrapping_add(i + 1 - LAG));
        }
    }
}

/// Rank 0 writes and runs as far ahead as it can. The other ranks finish each phase before the
/// next.
fn run_ahead_of_finished(member: &mut Member, first: u32, count: u32) {
    for phase in (0..count).map(|i| first.wrapping_add(i)) {
        member.write(phase);
        if member.rank > 0 {
            member.read(0, phase);
        }
        member.phases.finish();
    }
}

/// Rank 0 stages something, and gives its slots to another communicator when the other ranks
/// have finished.
fn give_up(member: &mut Member, first: u32, _: u32) {
    if member.rank > 0 {
        member.read(0, first);
        member.phases.finish();
        return;
    }
    member.write(first);
    if (1..member.ranks).all(|other| has_finished(&member.memory, other, first.into(), member.phases.last())) {
        let slot = Phases::<Arc<Memory>>::slot(first);
        // SAFETY: loom checks that no rank reads the slot.
        member.memory.slots[0][slot].with_mut(|to| unsafe { *to = 0 });
    }
}

fn model(ranks: usize, first: u32, count: u32, preemptions: usize, steps: fn(&mut Member, u32, u32)) {
    explore(ranks, first, preemptions, move |memory, phases| {
        let rank = phases.rank();
        steps(&mut Member { memory, phases, rank, ranks }, first, count);
    });
}

#[test]
fn two_ranks_sleep_and_wake() {
    model(2, 1, 2, 3, exchange);
}

#[test]
fn a_stage_that_is_given_up_is_not_read() {
    model(2, 1, 1, 3, give_up);
    model(3, 1, 1, 2, give_up);
}

#[test]
fn three_ranks() {
    model(3, 1, 1, 2, exchange);
}

#[test]
fn slots_are_reused_and_phases_wrap() {
    model(2, u32::MAX - 4, SLOTS as u32 + 2, 1, exchange);
}

#[test]
fn a_rank_that_runs_ahead_does_not_overwrite_what_peers_read() {
    model(2, 1, SLOTS as u32 + 3, 1, run_ahead);
    model(2, u32::MAX - 4, SLOTS as u32 + 3, 1, run_ahead_of_finished);
}
