//! Every interleaving that loom finds of three ranks in two groups, and in one: a rank that
//! learns that all have published sees what all wrote, gets their words, writes no slot that is
//! read, and does not sleep forever. Run with `RUSTFLAGS="--cfg kolo_loom" cargo test --lib
//! --release hierarchy`.

use loom::sync::Arc;

use super::{Memory, explore};
use crate::shm::flags::{Phases, SLOTS, WORDS};
use crate::shm::groups::Groups;
use crate::shm::hierarchy::{Arrival, Waiter, collect, release, result, wait_for_all};

struct Member {
    memory: Arc<Memory>,
    phases: Phases<Arc<Memory>>,
    ranks: usize,
    phase: u32,
}

impl Waiter for Member {
    type Lines = Arc<Memory>;
    type Error = std::convert::Infallible;

    fn phases(&self) -> &Phases<Arc<Memory>> {
        &self.phases
    }

    fn fingerprint(&self) -> u64 {
        u64::from(self.phase) + 7
    }

    fn wait_for_rank(&mut self, rank: usize, phase: u32) -> Result<(), Self::Error> {
        while !self.phases.has_reached(rank, phase) {
            self.phases.sleep(rank, phase, std::time::Duration::MAX);
        }
        Ok(())
    }

    fn wait_for_each(&mut self, phase: u32) -> Result<(), Self::Error> {
        (0..self.ranks).try_for_each(|rank| self.wait_for_rank(rank, phase))
    }

    /// A model that spins has no end, so a rank looks twice.
    fn wait_for_leader_line(&mut self, is_there: impl Fn(&Arc<Memory>) -> Option<bool>) -> bool {
        is_there(&self.memory).unwrap_or_else(|| {
            loom::thread::yield_now();
            is_there(&self.memory).unwrap_or(false)
        })
    }
}

/// Every rank writes its slot in every phase and reads the slots and words of all.
fn exchange(member: &mut Member, groups: &Groups, first: u32, count: u32) {
    let (rank, ranks) = (member.phases.rank(), member.ranks);
    for phase in (0..count).map(|i| first.wrapping_add(i)) {
        member.phase = phase;
        let slot = Phases::<Arc<Memory>>::slot(phase);
        if !member.phases.is_clear(phase) {
            for other in 0..ranks {
                if !member.phases.is_retired(other, phase) {
                    let Ok(()) = member.wait_for_rank(other, Phases::<Arc<Memory>>::retires(phase));
                }
            }
            member.phases.set_clear(phase);
        }
        let word = |rank: usize| u64::from(phase) * 10 + rank as u64;
        member.phases.announce(phase, member.fingerprint(), &[0; 4], &[word(rank); WORDS]);
        // SAFETY: loom checks that no other rank accesses the slot.
        member.memory.slots[rank][slot].with_mut(|to| unsafe { *to = phase });
        member.phases.publish();

        let Ok(arrival) = wait_for_all(member, groups, phase, 1);
        member.phases.all_have_reached(phase);
        let mut all = vec![[0; WORDS]; ranks];
        let sum = (0..ranks).map(word).sum::<u64>();
        if arrival == Arrival::Released {
            assert_eq!(result(&member.phases, groups, phase)[0], sum);
        } else {
            collect(&member.phases, groups, phase, member.fingerprint(), 1, &mut all);
            assert!((0..ranks).all(|rank| all[rank][0] == word(rank)));
        }
        if arrival == Arrival::Leads {
            release(&member.phases, groups, phase, member.fingerprint(), 1, [sum; WORDS]);
        }
        for other in 0..ranks {
            // SAFETY: loom checks that no rank writes the slot.
            let seen = member.memory.slots[other][slot].with(|word| unsafe { *word });
            assert_eq!(seen, phase);
        }
    }
}

fn model(members: &'static [&'static [usize]], first: u32, count: u32, preemptions: usize) {
    let groups = std::sync::Arc::new(Groups::of(members));
    let ranks = members.iter().map(|group| group.len()).sum();
    explore(ranks, first, preemptions, move |memory, phases| {
        let mut member = Member { memory, phases, ranks, phase: first };
        exchange(&mut member, &groups, first, count);
    });
}

#[test]
fn a_leader_with_a_member_and_another_leader() {
    model(&[&[0, 1], &[2]], 1, 1, 2);
}

#[test]
fn a_leader_with_two_members() {
    model(&[&[0, 1, 2]], 1, 1, 2);
}

#[test]
fn two_groups_of_one() {
    model(&[&[0], &[1]], 1, 2, 3);
}

#[test]
fn lines_are_reused_and_phases_wrap() {
    model(&[&[0, 1]], u32::MAX - 4, SLOTS as u32 + 2, 1);
}
