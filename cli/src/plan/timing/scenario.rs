//! What is simulated, and what a simulation finds.

use kolo::plan::{CostModel, Layout, LinkCost, mix};
use kolo::{Algorithm, Op, Rank};

/// The bytes of an element. Sizes are rounded up to whole elements.
pub(super) const ELEMENT: u64 = 4;

/// The network and the ranks of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::plan) struct Scenario {
    /// The placement of the ranks. Hosts have equal numbers of ranks, or numbers that differ by one.
    pub(in crate::plan) layout: Layout,
    /// The costs of messages and shared memory.
    pub(in crate::plan) model: CostModel,
    /// The number of racks (or pods) over which the hosts are spread; 1 if all hosts have one switch.
    pub(in crate::plan) racks: usize,
    /// How many times the bandwidth of a rack's uplink the interfaces of its hosts have together.
    pub(in crate::plan) oversubscription: f64,
    /// Seconds that a message between racks takes longer.
    pub(in crate::plan) rack_latency: f64,
    /// Ranks that make the call later than the others, and by how many seconds.
    pub(in crate::plan) late: Vec<(Rank, f64)>,
    /// The mean of an exponential distribution by which every rank is late, in seconds.
    pub(in crate::plan) jitter: f64,
    /// The seed of that distribution.
    pub(in crate::plan) seed: u64,
    /// Bytes that an interface sends at once after it was idle: the bucket of a token bucket filter.
    pub(in crate::plan) burst: f64,
    /// The processors that all ranks share, as in a test bed on one machine; `None` if every rank has
    /// one of its own.
    pub(in crate::plan) processors: Option<usize>,
    /// How many calls follow each other. Times are of one call, the mean.
    pub(in crate::plan) calls: usize,
    /// What messages between each two hosts cost; `None` if all links are alike. Not with racks.
    pub(in crate::plan) links: Option<Links>,
}

/// The links between each two hosts.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::plan) struct Links {
    /// The order in which schedules visit the hosts.
    pub(in crate::plan) order: Vec<usize>,
    /// By both hosts, in the order of their ranks.
    pub(in crate::plan) costs: Vec<Vec<LinkCost>>,
}

impl Links {
    /// Returns the costs by the places that the hosts have in a schedule.
    pub(super) fn placed(&self, op: Op, algorithm: Algorithm) -> Vec<Vec<LinkCost>> {
        if !algorithm.follows_hosts(op) {
            return self.costs.clone();
        }
        let row = |&a: &usize| self.order.iter().map(|&b| self.costs[a][b]).collect();
        self.order.iter().map(row).collect()
    }
}

impl Scenario {
    /// Returns one call on one switch, without late ranks.
    pub(in crate::plan) fn new(layout: Layout, model: CostModel) -> Scenario {
        Scenario {
            layout,
            model,
            racks: 1,
            oversubscription: 1.0,
            rack_latency: 0.0,
            late: Vec::new(),
            jitter: 0.0,
            seed: 0,
            burst: 0.0,
            processors: None,
            calls: 1,
            links: None,
        }
    }

    /// Returns the seconds by which each rank is late.
    pub(super) fn lateness(&self) -> Vec<f64> {
        let exponential = |rank: usize| {
            // A number above 0 and at most 1.
            let uniform = ((mix(mix(self.seed, 0x1a7e), rank as u64) >> 11) + 1) as f64 / (1u64 << 53) as f64;
            -self.jitter * uniform.ln()
        };
        let mut late: Vec<f64> = (0..self.layout.ranks).map(exponential).collect();
        for &(rank, seconds) in &self.late {
            if let Some(late) = late.get_mut(rank) {
                *late += seconds;
            }
        }
        late
    }

    pub(super) fn has_stragglers(&self) -> bool {
        !self.late.is_empty() || self.jitter > 0.0
    }
}

/// How a simulation found its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) enum Method {
    /// It simulated every message of every rank.
    Full,
    /// It simulated the ranks of one host or rack: all others do the same.
    Symmetry,
    /// It simulated two smaller sizes, and continued the line through both times.
    Extrapolated,
    /// It simulated the call without late ranks, and added the longest delay. In a ring no rank takes
    /// longer.
    Bound,
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Method::Full => "all messages",
            Method::Symmetry => "by symmetry",
            Method::Extrapolated => "extrapolated",
            Method::Bound => "delay added",
        })
    }
}

/// What a simulation finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) struct Simulated {
    /// Seconds until the last rank has finished, counted from when ranks that are not late call.
    pub(in crate::plan) seconds: f64,
    /// Bytes through the busiest interface or uplink, one way, in one call.
    pub(in crate::plan) busiest_bytes: f64,
    /// The rank where the critical path begins: the one for which the last rank waited longest. If
    /// no rank is late, all begin at once, and it is any rank on the path.
    pub(in crate::plan) critical: Rank,
    /// The messages that were simulated.
    pub(in crate::plan) messages: u64,
    /// How the result was found.
    pub(in crate::plan) method: Method,
}
