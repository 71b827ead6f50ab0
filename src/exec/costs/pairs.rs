//! Measures what messages between each two hosts cost, and has schedules visit the hosts in the best order.
//!
//! In each round of a tournament, every host exchanges messages with one other, so all pairs are measured
//! in about as many rounds as there are hosts. Pairs that seem slow meet once more, because other work may
//! have disturbed them. Rank 0 keeps the costs on its machine's disk, and tells all ranks what it has found
//! there; if that is not all, the hosts measure.

use std::time::{Duration, Instant};

use super::cache::{self, Pair, PairClass};
use super::{FEWEST, MOST, Probe, REPEATING, SHORT, SIZES, coarse_link, connecting};
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::Result;
use crate::exec::core::Core;
use crate::failure::{CommInfo, OpContext};
use crate::schedule::Algorithm;
use crate::schedule::order::{ORDERED, PairCost, PairCosts, opponent, rounds};
use crate::schedule::select::LinkCost;
use crate::types::{DType, Op, Rank, ReduceOp};

/// How long the hosts meet, but for one more round: all ranks wait meanwhile, so it is also at most this part
/// of the timeout. Hosts that are too far apart for that keep the order of ranks.
pub(super) const ALL_ROUNDS: Duration = Duration::from_secs(2);
const PART_OF_TIMEOUT: u32 = 4;

/// A message that takes longer than a short one by this tells how fast a link is.
const LONG: f64 = 8e-3;

/// So does one that takes this many round trips longer.
const WINDOWS: f64 = 4.0;

/// Of a link, as ranks tell each other: its latency and its time per byte.
const WORDS: usize = 2;

/// What the pairs of hosts have found.
pub(crate) struct Measured {
    /// The latency of each pair as measured, in nanoseconds, and its time per byte in picoseconds, unless that is
    /// not certain.
    pub(crate) exact: Vec<(u64, Option<u64>)>,
    /// By which schedules order the hosts.
    pub(crate) costs: PairCosts,
    /// How many pairs seemed slow, but did not meet again.
    pub(crate) unconfirmed: usize,
}

/// What another measurement of all pairs has found.
pub(crate) struct Again {
    /// The hosts.
    pub(crate) names: Vec<String>,
    pub(crate) measured: Measured,
    /// Whether the schedules follow it.
    pub(crate) is_followed: bool,
    /// Whether a link carries clearly less than at the start.
    pub(crate) is_slower: bool,
}

/// Which of the pairs that should have met.
#[derive(PartialEq)]
enum Met {
    Some,
    /// All, but the last ones may have had too little time.
    Late,
    InTime,
}

impl Core {
    /// Measures each pair of hosts, and visits the hosts in the best order from now on. All ranks call this
    /// together. Does nothing with a topology, which says the order, and if ranks of one machine are
    /// on several hosts.
    pub(super) fn measure_pairs(&mut self, info: &CommInfo) -> Result<()> {
        let first = self.first_on_host.clone();
        let decides = self.racks.is_empty() && ORDERED.contains(&first.len());
        let Some(names) = self.names_of(&first).filter(|_| decides) else { return Ok(()) };
        let context = connecting(info);
        let mut words = vec![0u64; WORDS * PairCosts::pairs(names.len()).count()];
        let mut is_late = false;
        if info.rank == 0 {
            let found = cache::look_up(self.cached_pairs(&first, &names));
            is_late = found.is_none();
            for (words, known) in words.chunks_exact_mut(WORDS).zip(found.into_iter().flatten()) {
                let PairCost { latency, per_byte } = known.map_or(PairCost::default(), |known| PairCost::of(known.network));
                words.copy_from_slice(&[latency, per_byte]);
            }
        }
        let call = Call::in_place(Op::Broadcast, DType::U64, RawSliceMut::of(&mut words));
        // SAFETY: `words` is borrowed for the call.
        unsafe { self.run_in_order_of_ranks(context.clone(), &call, Algorithm::Binomial, None)? };
        let costs = if words.iter().all(|&word| word > 0) {
            let costs = costs_of(&words, names.len());
            if info.rank == 0 {
                log(&costs, &names, true, 0);
            }
            costs
        } else {
            let most = most_time(ALL_ROUNDS, info.timeout);
            let Some(measured) = self.meet_all(&context, &first, &names, most, !is_late)? else { return Ok(()) };
            measured.costs
        };
        self.fabric.keep_costs(&first, self.settings.cost_model.model, costs);
        self.follow_measured();
        Ok(())
    }

    /// Measures each pair of hosts again, and visits the hosts in the order that is best now, if their order
    /// follows what was measured. The hosts meet for about `most`. All ranks call this together. `do_keep` as of
    /// [`Core::meet_all`]. Returns `None` if the hosts cannot be measured.
    #[cold]
    pub(super) fn measure_pairs_again(
        &mut self,
        context: &OpContext<'_>,
        most: Duration,
        do_keep: bool,
    ) -> Result<Option<Again>> {
        let mut first = self.first_on_host.to_vec();
        first.sort_unstable();
        let Some(names) = self.names_of(&first) else { return Ok(None) };
        let Some(measured) = self.meet_all(context, &first, &names, most, do_keep)? else { return Ok(None) };
        let is_followed = self.inquiry.is_some();
        let is_slower = is_followed && self.follow(first, measured.costs.clone());
        Ok(Some(Again { names, measured, is_followed, is_slower }))
    }

    /// Returns the names of the hosts, of which these are the first ranks; `None` if not all pairs of them are
    /// measured.
    fn names_of(&self, first: &[Rank]) -> Option<Vec<String>> {
        let names: Vec<String> = first.iter().map(|&rank| self.fabric.address_on_network(rank)).collect::<Option<_>>()?;
        // Those with one address are on one machine, whatever their names are, and have no links.
        let addresses: Vec<&str> = names.iter().filter_map(|name| name.rsplit(' ').next()).collect();
        let are_apart = (1..addresses.len()).all(|at| !addresses[..at].contains(&addresses[at]));
        (are_apart && (2..=*ORDERED.end()).contains(&names.len())).then_some(names)
    }

    /// Returns the pairs of hosts as the file of costs names them.
    fn cached_pairs(&self, first: &[Rank], names: &[String]) -> Vec<Pair> {
        let pair = |(a, b): (usize, usize)| Pair::new(&names[a], &names[b], self.fabric.kind_of_links(first[b]), PairClass::Pair);
        PairCosts::pairs(names.len()).map(pair).collect()
    }

    /// Has all pairs of hosts meet, and those that seem slow once more, for about `most`. Returns `None` if the
    /// hosts are too far apart for that. Rank 0 logs what was found, and keeps it if `do_keep` and it is certain.
    fn meet_all(
        &mut self,
        context: &OpContext<'_>,
        first: &[Rank],
        names: &[String],
        most: Duration,
        do_keep: bool,
    ) -> Result<Option<Measured>> {
        let (hosts, until) = (first.len(), Instant::now() + most);
        let mut words = vec![u64::MAX; WORDS * PairCosts::pairs(hosts).count()];
        if let Met::Some = self.meet(context, first, &mut words, until, |_, _| true)? {
            if context.info.rank == 0 {
                crate::log::info!(hosts, "the hosts are too far apart to measure each pair of them");
            }
            return Ok(None);
        }
        let seen = costs_of(&words, hosts);
        let unusual: Vec<_> = PairCosts::pairs(hosts).filter(|&(a, b)| seen.is_unusual(a, b)).collect();
        let do_meet = |a: usize, b: usize| unusual.contains(&(a.min(b), a.max(b)));
        let met = self.meet(context, first, &mut words, until, do_meet)?;
        // Other work may have disturbed the only meeting of these pairs. Their time per byte counts as
        // unknown, so that no schedule avoids them and the log does not name them.
        let mut unconfirmed = 0;
        if met != Met::InTime {
            for ((a, b), words) in PairCosts::pairs(hosts).zip(words.chunks_exact_mut(WORDS)) {
                if do_meet(a, b) {
                    words[1] = u64::MAX;
                }
            }
            unconfirmed = unusual.len();
        }
        let costs = costs_of(&words, hosts);
        if context.info.rank == 0 {
            // If some are unconfirmed, the next job measures again.
            if do_keep && unconfirmed == 0 {
                let measured = self.cached_pairs(first, names).into_iter().zip(PairCosts::pairs(hosts));
                cache::keep(measured.map(|(pair, (a, b))| (pair, costs.of(a, b).link(), 0.0)).collect());
            }
            log(&costs, names, false, unconfirmed);
        }
        let exact = words.chunks_exact(WORDS).map(|words| (words[0], Some(words[1]).filter(|&per_byte| per_byte < u64::MAX)));
        Ok(Some(Measured { exact: exact.collect(), costs, unconfirmed }))
    }

    /// Has pairs of hosts meet, and takes what each finds if it is less than what is known. No round but the
    /// first begins after `until`.
    fn meet(
        &mut self,
        context: &OpContext<'_>,
        first: &[Rank],
        words: &mut Vec<u64>,
        until: Instant,
        do_meet: impl Fn(usize, usize) -> bool,
    ) -> Result<Met> {
        let (hosts, own) = (first.len(), first.iter().position(|&rank| rank == context.info.rank));
        let meets = |round: usize, host: usize| opponent(hosts, round, host).filter(|&other| do_meet(host, other));
        let is_used = |round: &usize| (0..hosts).any(|host| meets(*round, host).is_some());
        let mut left = (0..rounds(hosts)).filter(is_used).count() as u32;
        for round in (0..rounds(hosts)).filter(is_used) {
            // The pairs that seem slow meet once more in the time that is left.
            let most = until.saturating_duration_since(Instant::now()) / (left + 1);
            left -= 1;
            if let Some((own, other)) = own.and_then(|own| Some((own, meets(round, own)?))) {
                self.meet_other(context, first, [own, other], words, most)?;
            }
            // All ranks stop together, if one of them has no time left.
            words.push(u64::from(Instant::now() < until));
            let call = Call { redop: Some(ReduceOp::Min), ..Call::in_place(Op::AllReduce, DType::U64, RawSliceMut::of(words)) };
            // SAFETY: `words` is borrowed for the call.
            unsafe { self.run_in_order_of_ranks(context.clone(), &call, Algorithm::RecursiveDoubling, None)? };
            if words.pop() == Some(0) {
                return Ok(if left > 0 { Met::Some } else { Met::Late });
            }
        }
        Ok(Met::InTime)
    }

    /// Measures the link to another host, or answers that host, which measures.
    fn meet_other(
        &mut self,
        context: &OpContext<'_>,
        first: &[Rank],
        [own, other]: [usize; 2],
        words: &mut [u64],
        most: Duration,
    ) -> Result<()> {
        let pair = [own.min(other), own.max(other)];
        let ranks = pair.map(|host| first[host]);
        let mut probe = Probe { pair: ranks, class: PairClass::Pair, context: context.clone(), memory: Vec::new() };
        if own > other {
            return self.answer(&mut probe);
        }
        let PairCost { latency, per_byte } = PairCost::of(self.time_pair(&mut probe, most)?);
        self.say(&mut probe, 0, [0, 0])?;
        let at = PairCosts::pairs(first.len()).position(|(a, b)| [a, b] == pair).expect("each pair is one of all");
        let known = &mut words[WORDS * at..][..WORDS];
        known.copy_from_slice(&[latency.min(known[0]), per_byte.min(known[1])]);
        Ok(())
    }

    /// Measures a link from its first rank, in both directions: the slower one counts. The time per byte is
    /// infinite if `most` has not been enough to learn it.
    fn time_pair(&mut self, probe: &mut Probe<'_>, most: Duration) -> Result<LinkCost> {
        // The first message opens the link. The other rank may be busy with the pair before.
        self.time(probe, SHORT, 1)?;
        let (began, mut round_trip) = (Instant::now(), f64::INFINITY);
        for i in 0..MOST {
            if i > 0 && began.elapsed() >= REPEATING.min(most / 3) {
                break;
            }
            round_trip = round_trip.min(self.time(probe, SHORT, 1)?);
        }
        let mut slower = None;
        for (is_back, until) in [(false, began + most * 2 / 3), (true, began + most)] {
            for bytes in SIZES {
                // The first one fills the window of the connection.
                let mut time = f64::INFINITY;
                for i in 0..FEWEST {
                    if i > 0 && Instant::now() >= until {
                        break;
                    }
                    let once = if is_back { self.time_back(probe, bytes)? } else { self.time(probe, bytes, 1)? };
                    time = time.min(once);
                }
                let transfer = (time - round_trip).max(0.0);
                // Of a shorter one, disturbances and the growing window of the connection decide the time.
                if transfer >= LONG.max(WINDOWS * round_trip) || bytes == SIZES[SIZES.len() - 1] {
                    // Not the difference to the size before, which a disturbance there makes too small.
                    let per_byte = transfer / bytes as f64;
                    slower = Some(slower.map_or(per_byte, |other: f64| other.max(per_byte)));
                    break;
                }
                if Instant::now() >= until {
                    break;
                }
            }
        }
        let per_byte = slower.unwrap_or(f64::INFINITY);
        Ok(LinkCost { latency: round_trip / 2.0, overhead: 0.0, per_byte })
    }
}

/// Returns the costs of the pairs, so coarse that the next time finds the same. A time per byte that is not known
/// is like most others.
fn costs_of(words: &[u64], hosts: usize) -> PairCosts {
    let is_known = |per_byte: &u64| *per_byte < u64::MAX;
    let mut known: Vec<u64> = words.iter().skip(1).step_by(WORDS).copied().filter(is_known).collect();
    known.sort_unstable();
    let usual = known.get(known.len() / 2).copied().unwrap_or(1);
    let mut costs = PairCosts::new(hosts);
    for ((a, b), words) in PairCosts::pairs(hosts).zip(words.chunks_exact(WORDS)) {
        let cost = PairCost { latency: words[0], per_byte: if is_known(&words[1]) { words[1] } else { usual } };
        costs.set(a, b, PairCost::of(coarse_link(cost.link())));
    }
    costs
}

/// Returns for how long hosts meet, of `most`, in a call with this timeout.
pub(super) fn most_time(most: Duration, timeout: Duration) -> Duration {
    most.min(timeout / PART_OF_TIMEOUT)
}

/// Returns the names of hosts without their addresses, if they differ.
pub(crate) fn short_names(names: &[String]) -> Vec<&str> {
    let short: Vec<&str> = names.iter().map(|name| name.split(' ').next().unwrap_or_default()).collect();
    let are_clear = (1..short.len()).all(|at| !short[..at].contains(&short[at]));
    if are_clear { short } else { names.iter().map(String::as_str).collect() }
}

/// Says in which order schedules visit the hosts, which links are slow, and of how many that is not certain.
fn log(costs: &PairCosts, names: &[String], is_cached: bool, unconfirmed: usize) {
    let shown = short_names(names);
    let name = |host: usize| shown[host];
    let order = costs.order().map(|order| order.into_iter().map(name).collect::<Vec<_>>().join(", "));
    let order = order.unwrap_or_else(|| "that of ranks".to_owned());
    crate::log::info!(hosts = names.len(), order, is_cached, unconfirmed, "measured each pair of hosts");
    let rate = |per_byte: u64| format!("{:.3} Gb/s", 8e3 / per_byte as f64);
    for slow in costs.slow() {
        let hosts = slow.hosts.iter().map(|&host| name(host)).collect::<Vec<_>>().join(" and ");
        crate::log::warn!(
            hosts,
            rate = rate(slow.per_byte),
            others = rate(slow.usual),
            "a link is slower than those of the other hosts: check its cable, and the speed and duplex mode of its switch port"
        );
    }
}
