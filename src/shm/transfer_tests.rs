//! How many cache lines pass from processor to processor in a phase, counted in a model of caches
//! in which the protocols run, with one rank on each processor.
//!
//! A line is in the caches of some processors. A load by another one is a transfer. A store is a
//! transfer unless only the writer's cache has the line. A rank's time is the number of transfers
//! that it has waited for; a transfer of a line that another rank wrote begins at that rank's time
//! of the store, at the earliest. So the highest time at the end of a phase is the number of
//! transfers on the critical path. A prefetch is a transfer for which no rank waits. Loads before a
//! line is written are not counted.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use super::flag_area::FlagArea;
use super::flags::{Phases, SLOTS, WORDS};
use super::groups::{Groups, PhaseGroups};
use super::hierarchy::{self, Arrival, Waiter};
use crate::config::FlagLayout;
use crate::host_group::area::{AREA, Area};
use crate::sync::watched::{self, Access};
use crate::sys::every_case;
use crate::sys::{Domains, Region};

#[derive(Default)]
struct Line {
    holders: BTreeSet<usize>,
    /// The writer's time of the last store.
    written: usize,
}

#[derive(Default)]
struct Caches {
    lines: HashMap<usize, Line>,
    /// The rank that runs.
    rank: usize,
    times: Vec<usize>,
    transfers: usize,
}

impl Caches {
    fn access(&mut self, address: usize, access: Access) {
        let Caches { lines, rank, times, transfers } = self;
        let line = lines.entry(address / 64).or_default();
        let has_it = line.holders.contains(rank) && (access == Access::Load || line.holders.len() == 1);
        if !has_it {
            *transfers += 1;
            if access != Access::Prefetch {
                times[*rank] = times[*rank].max(line.written) + 1;
            }
        }
        if access != Access::Load {
            line.holders.clear();
        }
        line.holders.insert(*rank);
        if access == Access::Store {
            line.written = times[*rank];
        }
    }

    /// Begins to count.
    fn start(&mut self) {
        self.transfers = 0;
        self.times.fill(0);
        self.lines.values_mut().for_each(|line| line.written = 0);
    }
}

/// The ranks of a host in a phase.
struct Model {
    caches: Rc<RefCell<Caches>>,
    /// `None` while the rank waits for all.
    ranks: Vec<RefCell<Option<Phases<FlagArea>>>>,
    has_arrived: RefCell<Vec<bool>>,
    groups: Option<Groups>,
    words: usize,
    phase: u32,
}

struct Rank<'a> {
    model: &'a Model,
    phases: Phases<FlagArea>,
}

impl Waiter for Rank<'_> {
    type Lines = FlagArea;
    type Error = std::convert::Infallible;

    fn phases(&self) -> &Phases<FlagArea> {
        &self.phases
    }

    fn fingerprint(&self) -> u64 {
        self.model.phase.into()
    }

    fn wait_for_rank(&mut self, rank: usize, phase: u32) -> Result<(), Self::Error> {
        assert!(self.phases.has_reached(rank, phase));
        assert_eq!(self.phases.line(rank, phase).fingerprint(), self.fingerprint());
        Ok(())
    }

    fn wait_for_each(&mut self, phase: u32) -> Result<(), Self::Error> {
        let (rank, ranks) = (self.phases.rank(), self.model.ranks.len());
        (0..ranks).filter(|&peer| peer != rank).try_for_each(|peer| self.wait_for_rank(peer, phase))
    }

    /// Runs leaders that have not run yet, this rank's own one first, until the line is there.
    fn wait_for_leader_line(&mut self, is_there: impl Fn(&FlagArea) -> Option<bool>) -> bool {
        let (rank, groups) = (self.phases.rank(), self.model.groups.as_ref().expect("ranks form groups"));
        let leader = |group: usize| groups.members(group)[0];
        for leader in std::iter::once(groups.of_rank(rank)).chain(0..groups.count()).map(leader) {
            if watched::unwatched(|| is_there(&self.phases.lines)).is_some() {
                break;
            }
            self.model.arrive(leader);
            self.model.caches.borrow_mut().rank = rank;
        }
        is_there(&self.phases.lines).expect("the leader has published")
    }
}

impl Model {
    fn new(ranks: usize, groups: Option<Groups>, words: usize) -> Model {
        let region = Arc::new(Region::heap(ranks * AREA));
        let phases = |rank| {
            let area = Area::new(region.clone(), AREA, rank, ranks);
            RefCell::new(Some(Phases::new(FlagArea { parts: area.parts().clone() }, rank, ranks)))
        };
        let caches = Caches { times: vec![0; ranks], ..Caches::default() };
        Model {
            caches: Rc::new(RefCell::new(caches)),
            ranks: (0..ranks).map(phases).collect(),
            has_arrived: RefCell::new(vec![false; ranks]),
            groups,
            words,
            phase: 0,
        }
    }

    /// Lets every rank publish a phase and wait for all.
    fn run_phase(&mut self) {
        self.phase += 1;
        let caches = self.caches.clone();
        watched::watch(Some(Box::new(move |address, access| caches.borrow_mut().access(address, access))));
        self.has_arrived.borrow_mut().fill(false);
        for rank in 0..self.ranks.len() {
            self.caches.borrow_mut().rank = rank;
            let mut phases = self.ranks[rank].borrow_mut();
            let phases = phases.as_mut().unwrap();
            assert!(phases.next() == self.phase && (self.phase < SLOTS as u32 || phases.is_clear(self.phase)));
            phases.announce(self.phase, self.phase.into(), &[0; 4], &[rank as u64 + 1; WORDS]);
            phases.publish();
        }
        (0..self.ranks.len()).for_each(|rank| self.arrive(rank));
        watched::watch(None);
    }

    /// Lets a rank wait for all, unless it has.
    fn arrive(&self, rank: usize) {
        if std::mem::replace(&mut self.has_arrived.borrow_mut()[rank], true) {
            return;
        }
        self.caches.borrow_mut().rank = rank;
        let phases = self.ranks[rank].borrow_mut().take().expect("no leader waits for a rank that waits for it");
        let mut waiting = Rank { model: self, phases };
        let (ranks, fingerprint) = (self.ranks.len(), waiting.fingerprint());
        let mut all = vec![[0; WORDS]; ranks];
        let sum = |all: &[[u64; WORDS]]| all.iter().map(|words| words[0]).sum::<u64>();
        let reduced = match &self.groups {
            None => {
                let Ok(()) = waiting.wait_for_each(self.phase);
                (0..ranks).for_each(|peer| all[peer][0] = waiting.phases.line(peer, self.phase).word(0));
                sum(&all)
            }
            Some(groups) => {
                let Ok(arrival) = hierarchy::wait_for_all(&mut waiting, groups, self.phase, self.words);
                if arrival == Arrival::Released {
                    hierarchy::result(&waiting.phases, groups, self.phase)[0]
                } else {
                    hierarchy::collect(&waiting.phases, groups, self.phase, fingerprint, self.words, &mut all);
                    let reduced = sum(&all);
                    hierarchy::release(&waiting.phases, groups, self.phase, fingerprint, self.words, [reduced; WORDS]);
                    reduced
                }
            }
        };
        assert!(self.words == 0 || reduced == (1..=ranks as u64).sum::<u64>());
        waiting.phases.all_have_reached(self.phase);
        waiting.phases.finish();
        *self.ranks[rank].borrow_mut() = Some(waiting.phases);
    }
}

/// Returns how many lines one phase moves, and how many of them one after the other, in the steady
/// state.
fn count(ranks: usize, groups: Option<Groups>, words: usize) -> (usize, usize) {
    let mut model = Model::new(ranks, groups, words);
    let mut counts = Vec::new();
    for phase in 0..4 * SLOTS {
        model.caches.borrow_mut().start();
        model.run_phase();
        let caches = model.caches.borrow();
        if phase >= 2 * SLOTS {
            counts.push((caches.transfers, caches.times.iter().copied().max().unwrap()));
        }
    }
    assert!(counts.iter().all(|&count| count == counts[0]), "phases differ: {counts:?}");
    counts[0]
}

/// Transfers of cache lines in a phase: ranks; for a flat layout, a barrier in groups and an
/// all-reduce of 8 bytes in groups: the groups, all transfers, and those on the critical path.
#[test]
#[cfg_attr(miri, ignore = "one thread, and takes hours")]
fn transfers_are_counted() {
    let expected = [
        (8, (64, 7), (2, (24, 5)), (2, (24, 5))),
        (16, (256, 15), (4, (56, 7)), (4, (56, 7))),
        (32, (1024, 31), (4, (104, 11)), (6, (120, 11))),
        (64, (4096, 63), (8, (240, 15)), (11, (291, 16))),
        (128, (16384, 127), (10, (464, 22)), (22, (824, 27))),
        (256, (65536, 255), (16, (992, 31)), (43, (2531, 48))),
    ];
    for (ranks, flat, barrier, reduced) in expected.into_iter().filter(|(ranks, ..)| *ranks <= 64 || every_case()) {
        let domains = vec![Domains::default(); ranks];
        let PhaseGroups { empty, carrying } = PhaseGroups::choose(&domains, false, FlagLayout::Hierarchy).unwrap();
        let counts = [count(ranks, None, 0), count(ranks, None, 1)];
        assert_eq!(counts, [flat; 2], "{ranks} ranks; words lie in the line that ranks read anyway");
        let in_groups = |groups: Groups, words| (groups.count(), count(ranks, Some(groups), words));
        assert_eq!([in_groups(empty, 0), in_groups(carrying, 1)], [barrier, reduced], "{ranks} ranks");
    }
}
