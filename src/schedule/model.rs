//! Cost models, the placement of ranks, and the choice for a collective.

use super::algorithm::Algorithm;

/// The cost of a link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinkCost {
    /// Seconds from a send to its arrival, for an empty message.
    pub latency: f64,
    /// Seconds of processor time for each message, at either end.
    pub overhead: f64,
    /// Seconds per byte. Between hosts this is a host's network interface, which the host's ranks
    /// share.
    pub per_byte: f64,
}

impl LinkCost {
    /// Returns a link with these costs: seconds, seconds and seconds per byte.
    pub const fn new(latency: f64, overhead: f64, per_byte: f64) -> LinkCost {
        LinkCost { latency, overhead, per_byte }
    }
}

/// The costs by which algorithms are compared. All ranks use the model of rank 0. Each cost is
/// finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostModel {
    /// A link between hosts; with a topology, of one rack.
    pub network: LinkCost,
    /// A link between racks. Its time per byte is that of a rack's uplink, which the rack's hosts
    /// share; 0 if it is not known. Then a byte that crosses an uplink costs a host as much as two.
    pub uplink: LinkCost,
    /// The links of a ring of hosts, whose mean latency and most time per byte count; `None` if they cost
    /// what `network` says, which is then the most that links between two hosts cost.
    pub ring: Option<LinkCost>,
    /// A link inside a host.
    pub local: LinkCost,
    /// Seconds to reduce one byte.
    pub reduce: f64,
    /// Seconds of one synchronisation of a host's ranks in shared memory.
    pub window_sync: f64,
    /// Seconds to move one byte through shared memory, on each of the host's ranks.
    pub window_per_byte: f64,
}

/// How much longer a byte takes between racks, at least, if uplinks are slower. Measured costs are
/// rounded to powers of the square root of two, so one step may be chance.
const SLOWER: f64 = 1.7;

impl CostModel {
    /// Returns the model in which messages between two racks cost this. If their bytes are as fast as
    /// those inside a rack, the uplink is no bottleneck.
    pub fn with_uplink(self, between_racks: LinkCost) -> CostModel {
        let is_slower = between_racks.per_byte > SLOWER * self.network.per_byte;
        let per_byte = if is_slower { between_racks.per_byte } else { 0.0 };
        CostModel { uplink: LinkCost { per_byte, ..between_racks }, ..self }
    }

    /// Returns the model for a choice, which uses only the links of a ring or all links.
    pub(super) fn along(&self, choice: Choice) -> CostModel {
        let is_ring = choice.algorithm == Algorithm::Ring || choice.between == Some(Algorithm::Ring);
        CostModel { network: self.ring.filter(|_| is_ring).unwrap_or(self.network), ..*self }
    }

    /// Returns the name and value of a cost that is negative or not finite, with which no choice
    /// could be compared.
    pub(crate) fn invalid(&self) -> Option<(&'static str, f64)> {
        let CostModel { network, uplink, ring, local, reduce, window_sync, window_per_byte } = *self;
        let ring = ring.unwrap_or(network);
        let costs = [
            ("network.latency", network.latency),
            ("network.overhead", network.overhead),
            ("network.per_byte", network.per_byte),
            ("uplink.latency", uplink.latency),
            ("uplink.overhead", uplink.overhead),
            ("uplink.per_byte", uplink.per_byte),
            ("ring.latency", ring.latency),
            ("ring.overhead", ring.overhead),
            ("ring.per_byte", ring.per_byte),
            ("local.latency", local.latency),
            ("local.overhead", local.overhead),
            ("local.per_byte", local.per_byte),
            ("reduce", reduce),
            ("window_sync", window_sync),
            ("window_per_byte", window_per_byte),
        ];
        costs.into_iter().find(|(_, cost)| !(cost.is_finite() && *cost >= 0.0))
    }
}

impl Default for CostModel {
    /// Ten gigabit Ethernet between hosts, and medians measured on two-core virtual machines inside
    /// a host.
    fn default() -> Self {
        CostModel {
            network: LinkCost { latency: 25e-6, overhead: 3e-6, per_byte: 1.0 / 1.25e9 },
            uplink: LinkCost { latency: 25e-6, overhead: 3e-6, per_byte: 0.0 },
            ring: None,
            local: LinkCost { latency: 1e-6, overhead: 0.2e-6, per_byte: 1.0 / 4e9 },
            reduce: 1.0 / 8e9,
            window_sync: 0.3e-6,
            window_per_byte: 1.0 / 12e9,
        }
    }
}

/// How the ranks of a communicator are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Layout {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of hosts. Without shared memory every rank counts as a host.
    pub hosts: usize,
    /// The fewest ranks that one host has, at least 1.
    pub fewest_per_host: usize,
    /// The number of racks in which the hosts are; 1 if the topology is not known.
    pub racks: usize,
    /// The fewest hosts that one rack has, at least 1.
    pub fewest_per_rack: usize,
    /// Whether all ranks of every host share memory.
    pub windows: bool,
}

impl Layout {
    /// Spreads `ranks` evenly over `hosts`, with shared memory if a host has several.
    pub fn even(ranks: usize, hosts: usize) -> Layout {
        let hosts = hosts.clamp(1, ranks.max(1));
        Layout { ranks, hosts, fewest_per_host: ranks / hosts, racks: 1, fewest_per_rack: hosts, windows: ranks > hosts }
    }

    /// Spreads the hosts evenly over this many racks.
    pub fn in_racks(self, racks: usize) -> Layout {
        let racks = racks.clamp(1, self.hosts.max(1));
        Layout { racks, fewest_per_rack: self.hosts / racks, ..self }
    }

    /// Returns the layout with hosts that have at least one rank each. A program may write any
    /// number into the fields.
    pub(super) fn possible(self) -> Layout {
        let hosts = self.hosts.clamp(1, self.ranks.max(1));
        let fewest_per_host = self.fewest_per_host.clamp(1, (self.ranks / hosts).max(1));
        let racks = self.racks.clamp(1, hosts);
        let fewest_per_rack = self.fewest_per_rack.clamp(1, hosts / racks);
        Layout { hosts, fewest_per_host, racks, fewest_per_rack, ..self }
    }

    pub(super) fn most_per_host(&self) -> usize {
        self.ranks.div_ceil(self.hosts)
    }

    pub(super) fn most_per_rack(&self) -> usize {
        self.hosts.div_ceil(self.racks)
    }

    /// Returns whether racks are known, and all of one size.
    pub(super) fn has_even_racks(&self) -> bool {
        self.racks > 1 && self.fewest_per_rack * self.racks == self.hosts
    }

    /// Returns the layout of one rank on every host: those that exchange one chunk of a
    /// hierarchical collective.
    pub(super) fn between(self) -> Layout {
        Layout { ranks: self.hosts, fewest_per_host: 1, windows: false, ..self }
    }
}

/// The choice for one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// For [`Algorithm::Hierarchical`], the algorithm between hosts.
    pub between: Option<Algorithm>,
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.between {
            Some(between) => f.pad(&format!("{} ({between})", self.algorithm)),
            None => self.algorithm.fmt(f),
        }
    }
}
