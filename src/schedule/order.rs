//! The order in which schedules visit hosts whose links differ.
//!
//! A ring is as fast as its slowest link, and short messages wait for the sum of its latencies. So of
//! all rings the best is one with the least time per byte of its slowest link, and among those one with
//! the least sum of latencies: first the bottleneck, then the shortest travelling salesman's tour of the
//! links that are not slower. Both are found exactly, by dynamic programming over sets of hosts (Held
//! and Karp, "A dynamic programming approach to sequencing problems", J. SIAM 10, 1962).
//!
//! Costs are whole numbers, so all ranks find the same order.

use std::ops::RangeInclusive;

use super::model::{CostModel, LinkCost};

/// How many hosts can be ordered: with two, every order is the same ring, and the time and memory
/// of the search double with each more.
pub(crate) const ORDERED: RangeInclusive<usize> = 3..=16;

/// What messages between two hosts cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PairCost {
    /// In nanoseconds.
    pub(crate) latency: u64,
    /// In picoseconds.
    pub(crate) per_byte: u64,
}

impl PairCost {
    /// Returns the cost of a link in whole numbers. At least 1, so that 0 is a cost which is not known.
    pub(crate) fn of(link: LinkCost) -> PairCost {
        let whole = |cost: f64, of_second: f64| ((cost * of_second).round() as u64).max(1);
        PairCost { latency: whole(link.latency, 1e9), per_byte: whole(link.per_byte, 1e12) }
    }

    /// Returns the cost in seconds.
    pub(crate) fn link(self) -> LinkCost {
        LinkCost { latency: self.latency as f64 * 1e-9, overhead: 0.0, per_byte: self.per_byte as f64 * 1e-12 }
    }
}

/// What messages between each two of some hosts cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PairCosts {
    hosts: usize,
    /// Row by row; the same in both directions.
    costs: Vec<PairCost>,
}

/// A latency of 18 minutes, or a second for a byte. Sums of it do not overflow.
const MOST: u64 = 1 << 40;

/// Costs differ if one is more than the other by this factor. Measured ones are rounded to powers of the
/// square root of two, so one step may be chance.
const MORE: (u64, u64) = (17, 10);

/// Latencies that differ by less are alike, in nanoseconds: inside a site the processors decide them, more
/// than the links.
const ALIKE: u64 = 250_000;

/// A link of which people are told takes this many times as long for a byte as usual.
const SLOW: u64 = 3;

/// Between sites a message takes longer than the shortest one of the job by more than this factor.
const FAR: u64 = 10;

fn is_more(cost: u64, than: u64) -> bool {
    cost.saturating_mul(MORE.1) > than.saturating_mul(MORE.0)
}

fn is_later(latency: u64, than: u64) -> bool {
    is_more(latency, than) && latency - than > ALIKE
}

/// What the links of a ring cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingCost {
    /// Of the slowest link.
    per_byte: u64,
    /// Of all links together.
    latency: u64,
}

impl RingCost {
    /// Returns whether another order of `hosts` hosts costs clearly less.
    fn is_clearly_more(self, than: RingCost, hosts: usize) -> bool {
        let mean = |ring: RingCost| ring.latency / hosts as u64;
        is_more(self.per_byte, than.per_byte) || is_later(mean(self), mean(than))
    }
}

/// Hosts whose links are slow, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlowLink {
    /// The two hosts of the link, or one host all links of which are slow.
    pub(crate) hosts: Vec<usize>,
    /// Its picoseconds per byte, and those of most hosts' fastest links.
    pub(crate) per_byte: u64,
    pub(crate) usual: u64,
}

impl PairCosts {
    /// Costs of `hosts` hosts; all of them 0.
    pub(crate) fn new(hosts: usize) -> PairCosts {
        PairCosts { hosts, costs: vec![PairCost::default(); hosts * hosts] }
    }

    pub(crate) fn of(&self, a: usize, b: usize) -> PairCost {
        self.costs[a * self.hosts + b]
    }

    /// Sets the cost of a pair, at most [`MOST`]: a file or a peer may say anything.
    pub(crate) fn set(&mut self, a: usize, b: usize, cost: PairCost) {
        let cost = PairCost { latency: cost.latency.min(MOST), per_byte: cost.per_byte.min(MOST) };
        self.costs[a * self.hosts + b] = cost;
        self.costs[b * self.hosts + a] = cost;
    }

    /// The pairs of hosts, in a fixed order.
    pub(crate) fn pairs(hosts: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..hosts).flat_map(move |a| (a + 1..hosts).map(move |b| (a, b)))
    }

    fn all(&self) -> impl Iterator<Item = PairCost> {
        PairCosts::pairs(self.hosts).map(|(a, b)| self.of(a, b))
    }

    /// The costs of some of the hosts.
    pub(crate) fn among(&self, hosts: &[usize]) -> PairCosts {
        let mut some = PairCosts::new(hosts.len());
        PairCosts::pairs(hosts.len()).for_each(|(a, b)| some.set(a, b, self.of(hosts[a], hosts[b])));
        some
    }

    /// Returns whether a link carries clearly less than it does by other costs of these hosts.
    pub(crate) fn is_slower_than(&self, other: &PairCosts) -> bool {
        self.all().zip(other.all()).any(|(link, before)| is_more(link.per_byte, before.per_byte))
    }

    fn ring(&self, order: &[usize]) -> RingCost {
        let links = (0..order.len()).map(|at| self.of(order[at], order[(at + 1) % order.len()]));
        let add = |ring: RingCost, link: PairCost| RingCost {
            per_byte: ring.per_byte.max(link.per_byte),
            latency: ring.latency + link.latency,
        };
        links.fold(RingCost { per_byte: 0, latency: 0 }, add)
    }

    /// Returns what a link of a ring that visits the hosts in this order costs: the mean latency, and the time
    /// per byte of the slowest.
    pub(crate) fn link_of_ring(&self, order: &[usize]) -> PairCost {
        let RingCost { per_byte, latency } = self.ring(order);
        PairCost { latency: latency / self.hosts as u64, per_byte }
    }

    /// Returns the best order of the hosts, or `None` if it gains nothing over the order in which they are.
    pub(crate) fn order(&self) -> Option<Vec<usize>> {
        // The search takes time and memory.
        let ends = |cost: fn(PairCost) -> u64| (self.all().map(cost).max().unwrap_or(0), self.all().map(cost).min().unwrap_or(0));
        let (latency, per_byte) = (ends(|link| link.latency), ends(|link| link.per_byte));
        if !ORDERED.contains(&self.hosts) || !is_later(latency.0, latency.1) && !is_more(per_byte.0, per_byte.1) {
            return None;
        }
        let given: Vec<usize> = (0..self.hosts).collect();
        let slowest = self.tour(|link| Some(link.per_byte), u64::max);
        let slowest = self.ring(&slowest?).per_byte;
        let best = self.tour(|link| (link.per_byte <= slowest).then_some(link.latency), |a, b| a + b)?;
        let (before, after) = (self.ring(&given), self.ring(&best));
        before.is_clearly_more(after, self.hosts).then_some(best)
    }

    /// Returns a ring through all hosts with the least cost: that of each link, joined. Links without a cost
    /// are not used.
    fn tour(&self, cost: impl Fn(PairCost) -> Option<u64>, join: impl Fn(u64, u64) -> u64) -> Option<Vec<usize>> {
        // The first host begins the ring, so the sets are of the others.
        let others = self.hosts - 1;
        let link = |a: usize, b: usize| cost(self.of(a, b));
        let at = |set: usize, last: usize| set * others + last;
        // The least cost of a path from the first host through a set to its last host, and the host before
        // that one. `u64::MAX` if there is none.
        let mut least = vec![(u64::MAX, 0u8); (1 << others) * others];
        for last in 0..others {
            least[at(1 << last, last)] = (link(0, last + 1).unwrap_or(u64::MAX), 0);
        }
        let joined = |path: u64, link: Option<u64>| link.filter(|_| path < u64::MAX).map(|link| join(path, link));
        for set in 1usize..1 << others {
            for last in (0..others).filter(|last| set >> last & 1 == 1) {
                let rest = set & !(1 << last);
                for before in (0..others).filter(|before| rest >> before & 1 == 1) {
                    let path = joined(least[at(rest, before)].0, link(before + 1, last + 1));
                    if let Some(path) = path.filter(|path| *path < least[at(set, last)].0) {
                        least[at(set, last)] = (path, before as u8);
                    }
                }
            }
        }
        let mut set = (1 << others) - 1;
        let ends = (0..others).filter_map(|last| Some((joined(least[at(set, last)].0, link(last + 1, 0))?, last)));
        let (_, mut last) = ends.min()?;
        let mut order = vec![0];
        while set > 0 {
            order.push(last + 1);
            let before = least[at(set, last)].1 as usize;
            set &= !(1 << last);
            last = before;
        }
        Some(order)
    }

    /// Returns a model in which algorithms cost what these links do, visited in this order. `model` is that
    /// of a job whose links all cost `usual`.
    pub(crate) fn model(&self, model: CostModel, usual: PairCost, order: &[usize]) -> CostModel {
        let scaled = |cost: f64, is_more: fn(u64, u64) -> bool, measured: u64, usual: u64| {
            let differs = is_more(measured, usual) || is_more(usual, measured);
            if differs { cost * measured as f64 / usual.max(1) as f64 } else { cost }
        };
        let of = |latency: u64, per_byte: u64| LinkCost {
            latency: scaled(model.network.latency, is_later, latency, usual.latency),
            per_byte: scaled(model.network.per_byte, is_more, per_byte, usual.per_byte),
            ..model.network
        };
        let worst = |cost: fn(&PairCost) -> u64| self.all().map(|link| cost(&link)).max().unwrap_or(0);
        let network = of(worst(|link| link.latency), worst(|link| link.per_byte));
        let ring = self.link_of_ring(order);
        let ring = of(ring.latency, ring.per_byte);
        CostModel { network, ring: Some(ring).filter(|ring| *ring != network), ..model }.with_uplink(network)
    }

    /// Returns whether the link between two hosts differs from most.
    pub(crate) fn is_unusual(&self, a: usize, b: usize) -> bool {
        let median = |cost: fn(PairCost) -> u64| {
            let mut costs: Vec<u64> = self.all().map(cost).collect();
            costs.sort_unstable();
            costs[costs.len() / 2]
        };
        let (latency, per_byte) = (median(|link| link.latency), median(|link| link.per_byte));
        is_later(self.of(a, b).latency, latency) || is_more(self.of(a, b).per_byte, per_byte)
    }

    /// Returns the hosts whose links are all much slower than those of most hosts, and the links of the other
    /// hosts that are, unless most are. None if hosts are in several sites: there, slow may be usual.
    pub(crate) fn slow(&self) -> Vec<SlowLink> {
        let least = self.all().map(|link| link.latency).min().unwrap_or(0);
        let is_far = |a, b| a != b && self.of(a, b).latency > (FAR * least).max(least + ALIKE);
        // Where a third host is near both, other work has delayed their messages.
        let are_apart = |a, b| is_far(a, b) && !(0..self.hosts).any(|third| !is_far(a, third) && !is_far(third, b));
        if PairCosts::pairs(self.hosts).any(|(a, b)| are_apart(a, b)) {
            return Vec::new();
        }
        let of_host = |host: usize| (0..self.hosts).filter(move |&other| other != host).map(move |other| self.of(host, other));
        let fastest = |host: usize| of_host(host).map(|link| link.per_byte).min();
        let mut rates: Vec<u64> = (0..self.hosts).filter_map(fastest).collect();
        rates.sort_unstable();
        let Some(&usual) = rates.get(rates.len().saturating_sub(1) / 2) else { return Vec::new() };
        let slow = |hosts: Vec<usize>, per_byte| (per_byte / SLOW >= usual).then_some(SlowLink { hosts, per_byte, usual });
        let hosts: Vec<_> = (0..self.hosts).filter_map(|host| slow(vec![host], fastest(host)?)).collect();
        let is_of_slow = |host: usize| hosts.iter().any(|slow| slow.hosts == [host]);
        let others = || PairCosts::pairs(self.hosts).filter(|&(a, b)| !is_of_slow(a) && !is_of_slow(b));
        let links: Vec<_> = others().filter_map(|(a, b)| slow(vec![a, b], self.of(a, b).per_byte)).collect();
        let are_few = 2 * links.len() < others().count();
        let links = links.into_iter().filter(|_| are_few);
        hosts.iter().cloned().chain(links).collect()
    }
}

/// Returns the host with which a host is paired in a round, so that in `rounds(hosts)` rounds each two meet
/// once: the circle method of tournaments (Kirkman 1850). `None` if the host rests.
pub(crate) fn opponent(hosts: usize, round: usize, host: usize) -> Option<usize> {
    let last = rounds(hosts);
    let other = match host {
        host if host == last => (0..last).find(|other| 2 * other % last == round)?,
        host if 2 * host % last == round => last,
        host => (round + last - host) % last,
    };
    Some(other).filter(|&other| other < hosts)
}

/// Returns in how many rounds all hosts meet each other.
pub(crate) fn rounds(hosts: usize) -> usize {
    hosts.next_multiple_of(2) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: PairCost = PairCost { latency: 50_000, per_byte: 8_000 };

    /// Returns costs by pair.
    fn costs(hosts: usize, cost: impl Fn(usize, usize) -> PairCost) -> PairCosts {
        let mut costs = PairCosts::new(hosts);
        PairCosts::pairs(hosts).for_each(|(a, b)| costs.set(a, b, cost(a, b)));
        costs
    }

    /// All rings that begin with host 0.
    fn rings(hosts: usize) -> Vec<Vec<usize>> {
        let mut rings = vec![vec![0]];
        for _ in 1..hosts {
            let longer = |ring: Vec<usize>| {
                let rest = (0..hosts).filter(|host| !ring.contains(host)).collect::<Vec<_>>();
                rest.into_iter().map(move |host| [&ring[..], &[host]].concat())
            };
            rings = rings.into_iter().flat_map(longer).collect();
        }
        rings
    }

    #[test]
    fn the_order_is_the_best_of_all() {
        let mut random = 7u64;
        let mut next = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            1 + (random >> 33) % most
        };
        let mut found = 0;
        for case in 0..200 {
            let hosts = 3 + case % 5;
            let mut costs = PairCosts::new(hosts);
            for (a, b) in PairCosts::pairs(hosts) {
                costs.set(a, b, PairCost { latency: 1_000_000 * next(100), per_byte: next(4) });
            }
            let key = |ring: &RingCost| (ring.per_byte, ring.latency);
            let best = rings(hosts).iter().map(|ring| costs.ring(ring)).min_by_key(key).unwrap();
            let given = costs.ring(&(0..hosts).collect::<Vec<_>>());
            let gains = given.is_clearly_more(best, hosts);
            assert_eq!(costs.order().map(|order| costs.ring(&order)), gains.then_some(best), "{costs:?}");
            found += usize::from(gains);
        }
        assert!(found > 20, "an order gains something in {found} cases");
    }

    #[test]
    fn a_ring_goes_around_a_slow_link_and_crosses_between_sites_twice() {
        for hosts in [4, 8, 15, 16] {
            let slow = PairCost { per_byte: 80_000, ..GOOD };
            let one = costs(hosts, |a, b| if (a, b) == (1, 2) { slow } else { GOOD });
            let order = one.order().unwrap();
            assert_eq!(one.ring(&order).per_byte, GOOD.per_byte);
            let unusual: Vec<_> = PairCosts::pairs(hosts).filter(|&(a, b)| one.is_unusual(a, b)).collect();
            assert_eq!(unusual, [(1, 2)]);
            assert_eq!(one.slow(), [SlowLink { hosts: vec![1, 2], per_byte: 80_000, usual: 8_000 }]);

            let delayed = PairCost { latency: 20_000_000, ..GOOD };
            let busy = costs(hosts, |a, b| match (a, b) {
                (1, 2) => slow,
                (0, 3) => delayed,
                _ => GOOD,
            });
            assert_eq!(busy.slow(), one.slow());

            let far = PairCost { latency: 20_000_000, ..GOOD };
            let sites = costs(hosts, |a, b| if a % 2 == b % 2 { GOOD } else { far });
            let order = sites.order().unwrap();
            let crossings = (0..hosts).filter(|&at| order[at] % 2 != order[(at + 1) % hosts] % 2).count();
            assert_eq!(crossings, 2, "{order:?}");
            assert!(sites.slow().is_empty());
            // Neither is slow for its kind, however many of the hosts are in a site.
            let thin = PairCost { per_byte: 80_000, ..far };
            for site in 1..hosts {
                assert_eq!(costs(hosts, |a, b| if (a < site) == (b < site) { GOOD } else { thin }).slow(), []);
            }
            let uplink = PairCost { per_byte: 80_000, ..GOOD };
            assert_eq!(costs(hosts, |a, b| if a % 2 == b % 2 { GOOD } else { uplink }).slow(), []);
        }
    }

    /// No order helps there, and noise decides nothing.
    #[test]
    fn hosts_stay_in_order_where_that_costs_nothing() {
        let slow = PairCost { per_byte: 160_000, ..GOOD };
        for hosts in [3, 4, 5] {
            let one = costs(hosts, |a, b| if a == 2 || b == 2 { slow } else { GOOD });
            assert_eq!(one.order(), None);
            assert_eq!(one.slow(), [SlowLink { hosts: vec![2], per_byte: 160_000, usual: 8_000 }]);
        }
        let noisy = costs(5, |a, b| PairCost { per_byte: if (a + b) % 3 == 0 { 11_314 } else { 8_000 }, ..GOOD });
        assert_eq!((noisy.order(), noisy.slow()), (None, vec![]));
        let busy = costs(5, |a, b| PairCost { latency: if (a + b) % 3 == 0 { 290_000 } else { 50_000 }, ..GOOD });
        assert_eq!((busy.order(), busy.slow(), busy.is_unusual(1, 2)), (None, vec![], false));
        for hosts in [0, 1, 2, 17] {
            let uneven = costs(hosts, |a, b| PairCost { latency: (1_000_000 * a + b) as u64, ..GOOD });
            assert_eq!(uneven.order(), None);
        }
    }

    #[test]
    fn some_hosts_have_the_order_that_they_need() {
        let slow = PairCost { per_byte: 80_000, ..GOOD };
        let all = costs(6, |a, b| if (a, b) == (1, 5) { slow } else { GOOD });
        let some = all.among(&[0, 1, 5, 3]);
        assert_eq!((some.hosts, some.of(1, 2), some.of(2, 1), some.of(0, 3)), (4, slow, slow, GOOD));
        assert!(some.order().is_some());
        assert_eq!(all.among(&[0, 2, 3, 4]).order(), None);
    }

    #[test]
    fn no_cost_is_too_large() {
        let endless = PairCost { latency: u64::MAX, per_byte: u64::MAX };
        assert_eq!(PairCost::of(LinkCost { latency: f64::INFINITY, overhead: 0.0, per_byte: f64::MAX }), endless);
        for hosts in 3..=16 {
            let all = costs(hosts, |_, _| endless);
            assert_eq!((all.order(), all.slow(), all.is_unusual(0, 1)), (None, vec![], false));
            let one = costs(hosts, |a, b| if (a, b) == (1, 2) { endless } else { GOOD });
            assert_eq!(one.order().is_some(), hosts > 3);
            assert!(one.is_unusual(1, 2) && one.model(CostModel::default(), GOOD, &[0, 1, 2]).invalid().is_none());
        }
    }

    #[test]
    fn the_model_is_that_of_the_links() {
        let model = CostModel::default();
        let one = costs(4, |a, b| if (a, b) == (1, 2) { PairCost { per_byte: 80_000, ..GOOD } } else { GOOD });
        let even = costs(4, |_, _| GOOD);
        assert_eq!(even.model(model, GOOD, &[0, 1, 2, 3]), model.with_uplink(model.network));
        let around = one.model(model, GOOD, &one.order().unwrap());
        assert!((around.network.per_byte / model.network.per_byte - 10.0).abs() < 1e-9);
        assert_eq!(around.ring, Some(model.network));
        let across = one.model(model, GOOD, &[0, 1, 2, 3]);
        assert_eq!((across.network, across.ring), (around.network, None));
        // The usual link was the slow one.
        let slow = one.of(1, 2);
        let around = one.model(model, slow, &one.order().unwrap());
        assert_eq!(around.network, model.network);
        assert!((around.ring.unwrap().per_byte / model.network.per_byte - 0.1).abs() < 1e-9);
    }

    #[test]
    fn all_hosts_meet_once() {
        for hosts in 2..=17 {
            let mut met = vec![0; hosts * hosts];
            for round in 0..rounds(hosts) {
                for host in 0..hosts {
                    if let Some(other) = opponent(hosts, round, host) {
                        assert_eq!(opponent(hosts, round, other), Some(host), "{hosts} hosts, round {round}");
                        met[host * hosts + other] += 1;
                    }
                }
            }
            let expected = |at: usize| usize::from(at / hosts != at % hosts);
            assert!(met.iter().enumerate().all(|(at, &count)| count == expected(at)), "{hosts} hosts: {met:?}");
        }
    }
}
