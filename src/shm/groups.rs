//! Which ranks of a host form groups for their flags, and whether groups pay: a count of the cache
//! lines that a rank waits for, one after the other.
//!
//! Two levels are a known design: Mellor-Crummey and Scott, "Algorithms for scalable
//! synchronization on shared-memory multiprocessors", 1991, for barriers; Graham and Shipman, "MPI
//! support for multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008,
//! and Katevenis, Ploumidis and Marazakis, "A framework for hierarchical single-copy MPI
//! collectives on multicore nodes" (XHC), CLUSTER 2022, for groups by shared caches and NUMA nodes.

use super::flags::WORDS;
use crate::config::FlagLayout;
use crate::sys::Domains;

/// The most members of a group.
const MOST_MEMBERS: usize = 16;

/// Words of members that a leader can give to the other leaders.
pub(super) const GROUP_WORDS: usize = 22;

/// Those of them that lie in the first cache line, with the phase. Each further line has eight.
const FIRST_WORDS: usize = 6;

/// With `auto` and fewer ranks, every rank reads the flags of all.
const FEWEST: usize = 9;

/// What it costs to fetch a line from another processor: of the same cache, of the same node, of
/// another node. David, Guerraoui and Trigonakis, "Everything you always wanted to know about
/// synchronization but were afraid to ask", SOSP 2013, measure about these ratios.
const IN_CACHE: usize = 1;
const IN_NODE: usize = 2;
const ACROSS: usize = 4;

/// What it costs that the next line is written only after this one has been read. The lines of a
/// flat layout are written at the same time, so their loads overlap. In groups, the waiting rank
/// holds a copy of the line, which the writer must take back first.
const STEP_COST: usize = 4;

/// The steps of a hierarchy that a flat layout does not have: to the other leaders, and back to the
/// members.
const FURTHER_STEPS: usize = 2;

/// The groups of the ranks of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// The ranks of each group, in order. The first one leads.
    members: Vec<Vec<usize>>,
    /// The group of each rank.
    group: Vec<usize>,
    /// How many words of each rank the leaders give each other, if that pays.
    most_words: usize,
}

/// The groups for each kind of phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PhaseGroups {
    /// For phases that carry no words.
    pub(super) empty: Groups,
    /// For phases in which leaders give each other words. Fewer members and more leaders may cost
    /// less there.
    pub(super) carrying: Groups,
}

impl PhaseGroups {
    /// The same groups for both kinds.
    #[cfg(any(fuzzing, test))]
    pub(super) fn same(groups: Groups) -> PhaseGroups {
        PhaseGroups { empty: groups.clone(), carrying: groups }
    }

    /// Returns the groups for a phase in which leaders give each other this many words of each
    /// rank.
    pub(super) fn for_words(&self, words: usize) -> &Groups {
        if words == 0 { &self.empty } else { &self.carrying }
    }

    /// Returns the groups of ranks that may run in `domains`, or `None` if every rank is to read
    /// the flags of all. The same on all ranks that pass the same.
    pub(super) fn choose(domains: &[Domains], is_crowded: bool, layout: FlagLayout) -> Option<PhaseGroups> {
        let ranks = domains.len();
        let is_forced = layout == FlagLayout::Hierarchy;
        // With more ranks than processors, each step would wait for the scheduler.
        let may_pay = ranks >= FEWEST && !is_crowded;
        if layout == FlagLayout::Flat || ranks < 2 || !(is_forced || may_pay) {
            return None;
        }
        let domains = known_of_all(domains);
        let by_cache = |rank: &usize| (domains[*rank].node, domains[*rank].cache);
        let by_node = |rank: &usize| (domains[*rank].node, 0);
        let mut bases = vec![vec![(0..ranks).collect()], together(ranks, by_node), together(ranks, by_cache)];
        bases.dedup();
        let candidates = bases.iter().flat_map(|base| (2..=MOST_MEMBERS).map(|most| Groups::new(split(base, most))));
        let candidates: Vec<Groups> = candidates.collect();
        let cheapest = |words: usize| {
            let cost = |groups: &&Groups| (groups.cost(&domains, words), groups.members.len());
            candidates.iter().min_by_key(cost).cloned()
        };
        let flat = flat_cost(&domains);
        let pays = |groups: &Groups, words: usize| is_forced || groups.cost(&domains, words) < flat;
        let (empty, mut carrying) = (cheapest(0)?, cheapest(1)?);
        if !pays(&empty, 0) {
            return None;
        }
        let fits = |words: &usize| carrying.has_room(*words) && pays(&carrying, *words);
        carrying.most_words = (1..=WORDS).rev().find(fits).unwrap_or(0);
        Some(PhaseGroups { empty, carrying })
    }
}

impl Groups {
    /// Makes groups of all ranks. `members` has the ranks of each group in order.
    fn new(members: Vec<Vec<usize>>) -> Groups {
        let mut group = vec![0; members.iter().map(Vec::len).sum()];
        for (number, ranks) in members.iter().enumerate() {
            ranks.iter().for_each(|&rank| group[rank] = number);
        }
        Groups { members, group, most_words: 0 }
    }

    /// Makes groups, and lets leaders give each other as many words as fit.
    #[cfg(any(fuzzing, test))]
    pub(super) fn of(members: &[&[usize]]) -> Groups {
        let groups = Groups::new(members.iter().map(|ranks| ranks.to_vec()).collect());
        let most_words = (1..=WORDS).rev().find(|&words| groups.has_room(words)).unwrap_or(0);
        Groups { most_words, ..groups }
    }

    pub(super) fn count(&self) -> usize {
        self.members.len()
    }

    /// Returns the group of a rank.
    pub(super) fn of_rank(&self, rank: usize) -> usize {
        self.group[rank]
    }

    /// Returns the ranks of a group in order. The first one leads.
    pub(super) fn members(&self, group: usize) -> &[usize] {
        &self.members[group]
    }

    /// Returns whether leaders give each other this many words of each rank.
    pub(super) fn carries(&self, words: usize) -> bool {
        words <= self.most_words
    }

    fn has_room(&self, words: usize) -> bool {
        self.members.iter().all(|ranks| ranks.len() * words <= GROUP_WORDS)
    }

    /// Returns the cost of the lines between the first publication and the last rank that knows of
    /// all: a leader reads its members' lines, then those of the other leaders, and a member reads
    /// its leader's.
    fn cost(&self, domains: &[Domains], words: usize) -> usize {
        let members = |group: usize| {
            let (leader, members) = (self.members[group][0], &self.members[group][1..]);
            members.iter().map(move |&rank| distance(domains[leader], domains[rank]))
        };
        let up = (0..self.count()).map(|group| members(group).sum::<usize>()).max().unwrap_or(0);
        let down = (0..self.count()).flat_map(members).max().unwrap_or(0);
        let across = |own: &Vec<usize>| {
            let others = self.members.iter().filter(|ranks| ranks[0] != own[0]);
            others.map(|ranks| distance(domains[own[0]], domains[ranks[0]]) * lines(ranks.len() * words)).sum::<usize>()
        };
        up + self.members.iter().map(across).max().unwrap_or(0) + down + FURTHER_STEPS * STEP_COST
    }
}

/// Returns the cache lines of a group that gives this many words.
pub(super) fn lines(words: usize) -> usize {
    1 + words.saturating_sub(FIRST_WORDS).div_ceil(8)
}

/// Returns the cost of the lines of all peers, for the rank for which it is highest.
fn flat_cost(domains: &[Domains]) -> usize {
    let of = |&from: &Domains| domains.iter().map(|&to| distance(from, to)).sum::<usize>() - IN_CACHE;
    domains.iter().map(of).max().unwrap_or(0)
}

fn distance(a: Domains, b: Domains) -> usize {
    if a.node != b.node {
        ACROSS
    } else if a.cache != b.cache {
        IN_NODE
    } else {
        IN_CACHE
    }
}

/// Forgets what is not known of all ranks: ranks that the system may move anywhere share nothing
/// that lasts.
fn known_of_all(domains: &[Domains]) -> Vec<Domains> {
    let knows = |of: fn(&Domains) -> u32| domains.iter().all(|domains| of(domains) != 0);
    let (cache, node) = (knows(|domains| domains.cache), knows(|domains| domains.node));
    domains.iter().map(|of| Domains { cache: if cache { of.cache } else { 0 }, node: if node { of.node } else { 0 } }).collect()
}

/// Puts ranks with the same key together, in the order of the lowest of them.
fn together<K: PartialEq>(ranks: usize, key: impl Fn(&usize) -> K) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    for rank in 0..ranks {
        match all.iter_mut().find(|group| key(&group[0]) == key(&rank)) {
            Some(group) => group.push(rank),
            None => all.push(vec![rank]),
        }
    }
    all
}

/// Splits each set of ranks into as few groups of up to `most` as possible, which differ by one
/// rank at most.
fn split(sets: &[Vec<usize>], most: usize) -> Vec<Vec<usize>> {
    let groups = sets.iter().flat_map(|ranks| {
        let count = ranks.len().div_ceil(most);
        (0..count).map(move |at| ranks[at * ranks.len() / count..(at + 1) * ranks.len() / count].to_vec())
    });
    groups.collect()
}

// Arithmetic on hundreds of ranks, which takes Miri hours.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn unknown(ranks: usize) -> Vec<Domains> {
        vec![Domains::default(); ranks]
    }

    /// Ranks on nodes of `caches` caches of `processors` processors each, one rank on each.
    fn machine(ranks: usize, caches: usize, processors: usize) -> Vec<Domains> {
        let of = |rank: usize| Domains {
            cache: 1 + (rank / processors * processors) as u32,
            node: 1 + (rank / processors / caches) as u32,
        };
        (0..ranks).map(of).collect()
    }

    fn choose(domains: &[Domains]) -> Option<PhaseGroups> {
        PhaseGroups::choose(domains, false, FlagLayout::Auto)
    }

    /// Whether no group has ranks of several kinds.
    fn are_apart(groups: &Groups, kind: impl Fn(usize) -> usize) -> bool {
        groups.members.iter().all(|members| members.iter().all(|&rank| kind(rank) == kind(members[0])))
    }

    #[test]
    fn every_rank_is_in_one_group_and_the_lowest_leads() {
        for ranks in 2..=260 {
            for domains in [unknown(ranks), machine(ranks, 2, 8), machine(ranks, 1, 24)] {
                let PhaseGroups { empty, carrying } = PhaseGroups::choose(&domains, true, FlagLayout::Hierarchy).unwrap();
                for groups in [empty, carrying] {
                    let mut all: Vec<usize> = groups.members.concat();
                    all.sort_unstable();
                    assert!(all.into_iter().eq(0..ranks));
                    for (number, members) in groups.members.iter().enumerate() {
                        assert!(members.is_sorted() && members.len() <= MOST_MEMBERS);
                        assert!(members.iter().all(|&rank| groups.of_rank(rank) == number));
                        assert!(members.len() * groups.most_words <= GROUP_WORDS);
                    }
                }
            }
        }
    }

    #[test]
    fn few_ranks_and_ranks_that_share_processors_stay_flat() {
        for ranks in 2..FEWEST {
            assert_eq!(choose(&machine(ranks, 1, 4)), None);
        }
        assert_eq!(PhaseGroups::choose(&unknown(64), true, FlagLayout::Auto), None);
        assert_eq!(PhaseGroups::choose(&unknown(64), false, FlagLayout::Flat), None);
        // Where nothing is known of the caches, the fewest ranks for which groups pay.
        assert_eq!((2..64).find(|&ranks| choose(&unknown(ranks)).is_some()), Some(18));
        assert!((18..300).all(|ranks| choose(&unknown(ranks)).is_some_and(|groups| groups.carrying.carries(1))));
    }

    #[test]
    fn groups_are_about_as_large_as_they_are_many() {
        for (ranks, empty, carrying) in [(32, 4, 6), (64, 8, 11), (128, 10, 22), (256, 16, 43)] {
            let groups = choose(&unknown(ranks)).unwrap();
            assert_eq!((groups.empty.count(), groups.carrying.count()), (empty, carrying), "{ranks} ranks");
        }
    }

    #[test]
    fn groups_follow_caches_and_nodes() {
        // Two sockets with a cache each: groups pay for 16 ranks already.
        let PhaseGroups { empty, carrying } = choose(&machine(16, 1, 8)).unwrap();
        assert!(are_apart(&empty, |rank| rank / 8) && are_apart(&carrying, |rank| rank / 8));
        // Two nodes of two caches.
        let PhaseGroups { empty, carrying } = choose(&machine(32, 2, 8)).unwrap();
        assert!(empty.members.iter().map(Vec::len).eq([8; 4]) && are_apart(&empty, |rank| rank / 8));
        assert!(are_apart(&carrying, |rank| rank / 16));
        // Ranks are distributed over two sockets in turn.
        let turns: Vec<Domains> = (0..32).map(|rank| Domains { cache: 1 + rank % 2, node: 1 + rank % 2 }).collect();
        let PhaseGroups { empty, carrying } = choose(&turns).unwrap();
        assert!(are_apart(&empty, |rank| rank % 2) && are_apart(&carrying, |rank| rank % 2));
    }

    /// The cache of one rank is not known: it may run anywhere, so the others' do not count either.
    #[test]
    fn what_one_rank_does_not_know_counts_for_none() {
        let mut domains = machine(64, 2, 8);
        domains[5] = Domains::default();
        assert_eq!(choose(&domains), choose(&unknown(64)));
    }
}
