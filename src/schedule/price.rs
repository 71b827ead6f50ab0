//! Prices every algorithm with a cost model.
//!
//! The model is the usual one of latency, time per byte and reduction time per byte (alpha, beta
//! and gamma; Thakur, Rabenseifner and Gropp 2005), with two additions: the processor time of a
//! message, which tells one round of N messages from N rounds, and that the ranks of one host share
//! its network interface. Where racks are known, what crosses their uplinks is priced as well.

use super::algorithm::Algorithm;
use super::direct::IN_FLIGHT;
use super::model::{Choice, CostModel, Layout};
use super::two_level::pieces;
use crate::types::Op;

/// Returns the bytes of a segment for algorithms that overlap segments: large enough to outweigh a
/// message's cost, small enough to fill the pipeline soon.
pub(crate) const fn segment_bytes(algorithm: Algorithm) -> usize {
    match algorithm {
        // Segments bound the scratch memory here; no pipeline has to fill.
        Algorithm::Direct => 1 << 20,
        Algorithm::Ring | Algorithm::Binomial | Algorithm::TwoLevel => 256 << 10,
        _ => 64 << 10,
    }
}

/// How much longer links take for long messages where a host has several senders at a time: their
/// queues fill, and segments are sent again. Reduce-scatters and all-reduces of 1 MiB among 4 hosts at
/// 1 Gb/s took 1.3 to 1.4 times as long as around a ring.
pub(super) const CONTENTION: f64 = 1.35;

/// Bytes that a TCP connection has in flight two round trips after it was idle: four times the
/// initial window.
const IDLE_WINDOW: f64 = 64.0 * 1024.0;

/// The cost of a collective's critical path. Bytes are fractions of rounds, so they are not whole.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Price {
    /// Rounds that wait for a message from another host, and those of them that may wait for another
    /// rack.
    pub(super) network_rounds: f64,
    pub(super) uplink_rounds: f64,
    /// Rounds that wait for a message inside the host.
    pub(super) local_rounds: f64,
    /// Messages that one rank handles beyond one for each round.
    pub(super) messages: f64,
    /// Bytes through one host's network interface, one way, and those of them that are
    /// sent while bytes cross an uplink.
    pub(super) network_bytes: f64,
    pub(super) crossing_bytes: f64,
    /// Bytes of all hosts of a rack through its uplink, one way, and the mean of one host.
    pub(super) uplink_bytes: f64,
    pub(super) mean_crossing_bytes: f64,
    /// Bytes through one rank's links inside its host, one way.
    pub(super) local_bytes: f64,
    /// Bytes that one rank reduces.
    pub(super) reduced: f64,
    /// Synchronisations of a host's ranks in shared memory.
    pub(super) syncs: f64,
    /// Bytes that one rank loads and stores in shared memory.
    pub(super) window_bytes: f64,
}

impl Price {
    pub(super) fn seconds(&self, model: &CostModel) -> f64 {
        let overhead = if self.network_rounds > 0.0 { model.network.overhead } else { model.local.overhead };
        let beyond = match model.uplink.per_byte {
            // Pairs of hosts do not show what uplinks carry. Each byte that crosses one counts twice.
            0.0 => self.mean_crossing_bytes * model.network.per_byte,
            per_byte => (self.uplink_bytes * per_byte - self.crossing_bytes * model.network.per_byte).max(0.0),
        };
        (self.network_rounds - self.uplink_rounds) * model.network.latency
            + self.uplink_rounds * model.uplink.latency
            + beyond
            + self.local_rounds * model.local.latency
            + self.messages * overhead
            + self.network_bytes * model.network.per_byte
            + self.local_bytes * model.local.per_byte
            + self.reduced * model.reduce
            + self.syncs * model.window_sync
            + self.window_bytes * model.window_per_byte
    }

    fn plus(self, other: Price) -> Price {
        Price {
            network_rounds: self.network_rounds + other.network_rounds,
            uplink_rounds: self.uplink_rounds + other.uplink_rounds,
            local_rounds: self.local_rounds + other.local_rounds,
            messages: self.messages + other.messages,
            network_bytes: self.network_bytes + other.network_bytes,
            crossing_bytes: self.crossing_bytes + other.crossing_bytes,
            uplink_bytes: self.uplink_bytes + other.uplink_bytes,
            mean_crossing_bytes: self.mean_crossing_bytes + other.mean_crossing_bytes,
            local_bytes: self.local_bytes + other.local_bytes,
            reduced: self.reduced + other.reduced,
            syncs: self.syncs + other.syncs,
            window_bytes: self.window_bytes + other.window_bytes,
        }
    }

    /// Adds bytes that are reduced.
    fn reducing(self, bytes: f64) -> Price {
        Price { reduced: self.reduced + bytes, ..self }
    }

    /// As [`Price::reducing`], if the operation reduces.
    fn reducing_if(self, op: Op, bytes: f64) -> Price {
        if op.reduces() { self.reducing(bytes) } else { self }
    }
}

pub(super) fn price(op: Op, bytes: u64, layout: Layout, choice: Choice) -> Price {
    match (choice.algorithm, choice.between) {
        (Algorithm::Window, _) => price_window(op, bytes as f64, layout.ranks as f64),
        (Algorithm::Hierarchical, Some(between)) => {
            let outside = price_messages(op, bytes_between(op, bytes, layout) as f64, layout.between(), between);
            // A host's columns send at the same time, through one network interface.
            let columns = if has_columns(op) { layout.fewest_per_host as f64 } else { 1.0 };
            let outside = Price {
                network_bytes: outside.network_bytes * columns,
                crossing_bytes: outside.crossing_bytes * columns,
                uplink_bytes: outside.uplink_bytes * columns,
                mean_crossing_bytes: outside.mean_crossing_bytes * columns,
                ..outside
            };
            price_inside(op, bytes as f64, layout).plus(outside)
        }
        (algorithm, _) => price_messages(op, bytes as f64, layout, algorithm),
    }
}

/// Whether every rank of a host exchanges a part with other hosts, and not only the leader.
const fn has_columns(op: Op) -> bool {
    !matches!(op, Op::Barrier | Op::Broadcast | Op::Reduce | Op::Gather | Op::Scatter)
}

/// Returns the bytes of the collective that one rank of each host executes with those of the other
/// hosts, in a hierarchical collective of `bytes`.
pub(super) fn bytes_between(op: Op, bytes: u64, layout: Layout) -> u64 {
    // Each rank has a buffer of its own for an all-to-all.
    if has_columns(op) && op != Op::AllToAll { bytes / layout.fewest_per_host as u64 } else { bytes }
}

/// The price inside the hosts of a hierarchical collective.
fn price_inside(op: Op, bytes: f64, layout: Layout) -> Price {
    let ranks = layout.most_per_host() as f64;
    // Blocks are copied into the order of the columns, or out of it.
    let copied = match op {
        Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV => 2.0 * bytes,
        Op::AllToAll => 4.0 * bytes,
        _ => 0.0,
    };
    let of_host = if matches!(op, Op::Gather | Op::Scatter) { bytes / layout.hosts as f64 } else { bytes };
    let window = if ranks > 1.0 { price_window(op, of_host, ranks) } else { Price::default() };
    Price { window_bytes: window.window_bytes + copied, ..window }
}

/// The price in shared memory: the bytes that a rank loads and stores in the staged forms. An
/// all-reduce moves (5 - 2/N) S.
fn price_window(op: Op, bytes: f64, ranks: f64) -> Price {
    let (syncs, traffic) = match op {
        Op::Barrier => (1.0, 0.0),
        Op::AllReduce => (2.0, 5.0 - 2.0 / ranks),
        Op::Reduce => (2.0, 4.0),
        Op::ReduceScatter | Op::ReduceScatterV => (1.0, 3.0),
        _ => (1.0, 4.0),
    };
    Price { syncs, window_bytes: traffic * bytes, ..Price::default() }
}

/// The costs at the head of the generators' files, divided by where the bytes go. With one rank per
/// host, or with one host, each equals the formula there.
fn price_messages(op: Op, bytes: f64, layout: Layout, algorithm: Algorithm) -> Price {
    let over = Messages::new(bytes, layout);
    let price = match algorithm {
        Algorithm::Ring => over.ring(op),
        Algorithm::Binomial => over.binomial(op),
        Algorithm::DoubleTree => over.double_tree(op),
        Algorithm::RecursiveDoubling => over.recursive_doubling(op),
        Algorithm::HalvingDoubling => over.halving_doubling(op),
        Algorithm::Direct => over.direct(op),
        Algorithm::Dissemination => over.levels(1.0, 0.0, 0.0),
        Algorithm::TwoLevel => return over.two_level(op),
        Algorithm::Window | Algorithm::Hierarchical => unreachable!("not made of messages"),
    };
    if layout.racks > 1 { over.across(op, algorithm, price) } else { price }
}

/// A collective over messages, in the terms of the cost formulas.
struct Messages {
    layout: Layout,
    /// Bytes of the buffer, or of all blocks.
    s: f64,
    /// Ranks.
    n: f64,
    hosts: f64,
    per_host: f64,
    /// Logarithmic rounds between hosts.
    net_log: f64,
    /// Logarithmic rounds inside a host.
    local_log: f64,
    /// (N-1)/N.
    most: f64,
}

impl Messages {
    fn new(s: f64, layout: Layout) -> Messages {
        let n = layout.ranks as f64;
        let log = |x: usize| x.next_power_of_two().ilog2() as f64;
        Messages {
            layout,
            s,
            n,
            hosts: layout.hosts as f64,
            per_host: layout.most_per_host() as f64,
            net_log: log(layout.hosts),
            local_log: log(layout.most_per_host()),
            most: (n - 1.0) / n,
        }
    }

    fn ring(&self, op: Op) -> Price {
        let Messages { s, most, .. } = *self;
        match op {
            Op::AllReduce => self.around(2.0, 2.0 * most * s).reducing(most * s),
            Op::Broadcast | Op::Reduce => self.around(1.0, s).reducing_if(op, s),
            _ => self.around(1.0, most * s).reducing_if(op, most * s),
        }
    }

    fn binomial(&self, op: Op) -> Price {
        let Messages { s, hosts, per_host, net_log, local_log, .. } = *self;
        let logs = net_log + local_log;
        match op {
            Op::AllReduce => self.levels(2.0, 2.0 * net_log * s, 2.0 * local_log * s).reducing(logs * s),
            Op::Broadcast | Op::Reduce => self.levels(1.0, net_log * s, local_log * s).reducing_if(op, logs * s),
            _ => self.levels(1.0, (hosts - 1.0) / hosts * s, (per_host - 1.0) / per_host * s / hosts),
        }
    }

    fn double_tree(&self, op: Op) -> Price {
        let s = self.s;
        let passes = if op == Op::AllReduce { 2.0 } else { 1.0 };
        let segment = (segment_bytes(Algorithm::DoubleTree) as f64).min(s / 2.0);
        let fill = passes * (self.net_log + self.local_log + 1.0) * segment;
        let depth = self.levels(passes, 0.0, 0.0);
        let stream = self.rounds(passes, passes * s + fill);
        // Of each pair of segments a rank receives two and sends two.
        let messages = if s > 0.0 { 4.0 * passes * s / 2.0 / segment } else { 0.0 };
        Price { messages, ..depth.plus(stream) }.reducing_if(op, s)
    }

    fn recursive_doubling(&self, op: Op) -> Price {
        let Messages { s, n, per_host, net_log, local_log, .. } = *self;
        match op {
            Op::AllReduce => {
                let levels = self.levels(1.0, per_host * net_log * s, local_log * s);
                levels.reducing((net_log + local_log) * s).plus(self.beyond())
            }
            _ => self.levels(1.0, per_host * (n - per_host) / n * s, (per_host - 1.0) / n * s),
        }
    }

    fn halving_doubling(&self, op: Op) -> Price {
        let Messages { s, hosts, per_host, net_log, most, .. } = *self;
        if op != Op::AllReduce {
            let (outside, inside) = (per_host * (1.0 - 1.0 / hosts) * s, (1.0 - 1.0 / per_host) * s / hosts);
            return self.levels(1.0, outside, inside).reducing(most * s);
        }
        // Every round has another partner, whose connection was idle. If its window is too small
        // for what is sent, it takes two round trips to grow. The ring keeps its connections busy.
        let grows = if hosts > 2.0 && s / hosts >= IDLE_WINDOW { 2.0 * net_log } else { 0.0 };
        let windows = Price { network_rounds: 4.0 * grows, ..Price::default() };
        let levels = self.levels(2.0, 2.0 * (1.0 - 1.0 / hosts) * s, 2.0 * (1.0 - 1.0 / per_host) * s);
        levels.reducing(most * s).plus(self.beyond()).plus(windows)
    }

    fn direct(&self, op: Op) -> Price {
        let Messages { s, n, per_host, most, .. } = *self;
        let block = s / n;
        match op {
            Op::AllReduce => {
                let half = self.pairwise(block, self.segments());
                half.plus(half).reducing(most * s)
            }
            Op::Reduce => Price { messages: n - 1.0, ..self.rounds(1.0, (n - per_host) * s) }.reducing((n - 1.0) * s),
            Op::Gather | Op::Scatter => Price { messages: n - 1.0, ..self.rounds(1.0, most * s) },
            Op::Send | Op::Recv => self.rounds(1.0, s),
            _ if op.reduces() => self.pairwise(block, self.segments()).reducing(most * s),
            _ => self.pairwise(block, 1.0),
        }
    }

    /// `count` rounds one after the other, each as slow as its slowest link.
    fn rounds(&self, count: f64, bytes: f64) -> Price {
        if self.layout.hosts > 1 {
            Price { network_rounds: count, network_bytes: bytes, ..Price::default() }
        } else {
            Price { local_rounds: count, local_bytes: bytes, ..Price::default() }
        }
    }

    /// Passes of `bytes` in all around a ring in the order of ranks. What a rank sends in a round has
    /// come from its neighbour in the round before, so it crosses each host's border once in a pass.
    fn around(&self, passes: f64, bytes: f64) -> Price {
        let hops = self.n - 1.0;
        let outside = if self.layout.hosts > 1 { hops.min(self.hosts) } else { 0.0 };
        Price { network_rounds: passes * outside, local_rounds: passes * (hops - outside), ..self.rounds(0.0, bytes) }
    }

    /// Logarithmic rounds, of which those at small distances stay inside the hosts.
    fn levels(&self, times: f64, network_bytes: f64, local_bytes: f64) -> Price {
        Price {
            network_rounds: times * self.net_log,
            local_rounds: times * self.local_log,
            network_bytes,
            local_bytes,
            ..Price::default()
        }
    }

    /// Every rank exchanges `block` bytes with every other, `times` times. As many messages as are in
    /// flight take one latency; the latency of long ones passes while others are sent.
    fn pairwise(&self, block: f64, times: f64) -> Price {
        let Messages { n, per_host, .. } = *self;
        let is_short = block <= (segment_bytes(Algorithm::Direct) / IN_FLIGHT) as f64;
        let rounds = if is_short { ((n - 1.0) / IN_FLIGHT as f64).ceil() } else { 1.0 };
        let contention = if is_short || self.layout.hosts < 3 { 1.0 } else { CONTENTION };
        Price {
            network_bytes: contention * per_host * (n - per_host) * block,
            local_bytes: (per_host - 1.0) * block,
            messages: times * (n - 1.0),
            ..self.rounds(times * rounds, 0.0)
        }
    }

    /// The price of two levels, which the head of `two_level` has.
    fn two_level(&self, op: Op) -> Price {
        let Messages { s, n, most, .. } = *self;
        let (racks, in_rack) = (self.layout.racks as f64, self.layout.most_per_rack() as f64);
        let log = |x: f64| (x as usize).next_power_of_two().ilog2() as f64;
        // Rounds and bytes of a host inside its rack, and between racks.
        let (inside, inside_bytes, between, between_bytes, uplink_bytes) = match op {
            Op::AllReduce => {
                let parts = self.layout.fewest_per_rack as f64;
                // In a larger rack some hosts pass on all parts.
                let share = if self.layout.has_even_racks() { (in_rack - 1.0) / in_rack } else { 1.0 };
                let rounds = if racks == 2.0 { 1.0 } else { 2.0 * (racks - 1.0) };
                let crossing = 2.0 * (racks - 1.0) / racks * s;
                (2.0 * (in_rack - 1.0), 2.0 * share * s, rounds, crossing / parts, crossing)
            }
            Op::Broadcast | Op::Reduce => (log(in_rack), log(in_rack) * s, log(racks), log(racks) * s, log(racks) * s),
            _ => {
                let crossing = (racks - 1.0) * s / n;
                (racks * (in_rack - 1.0), most * s - crossing, racks - 1.0, crossing, in_rack * crossing)
            }
        };
        let reduced = match op {
            Op::AllReduce => (inside_bytes + between_bytes) / 2.0,
            Op::Reduce => inside_bytes + between_bytes,
            _ => most * s,
        };
        // Of the bytes inside racks, this part is sent while others cross uplinks.
        let (pieces, hidden) = match op {
            Op::AllReduce => {
                let pieces = pieces(s as usize, segment_bytes(Algorithm::TwoLevel)) as f64;
                (pieces, (pieces - 1.0) / pieces)
            }
            Op::Broadcast | Op::Reduce => (1.0, 0.0),
            _ => (1.0, (racks - 1.0) / racks),
        };
        let price = Price {
            network_rounds: inside + between + pieces - 1.0,
            uplink_rounds: between,
            network_bytes: inside_bytes + between_bytes,
            crossing_bytes: between_bytes + hidden * inside_bytes,
            uplink_bytes,
            mean_crossing_bytes: uplink_bytes / in_rack,
            ..Price::default()
        };
        price.reducing_if(op, reduced)
    }

    /// Adds what crosses the uplinks of racks. Schedules visit one rack after the other; the bytes are
    /// those of the busiest uplink.
    fn across(&self, op: Op, algorithm: Algorithm, price: Price) -> Price {
        let Messages { s, n, hosts, per_host, net_log, most, .. } = *self;
        let racks = self.layout.racks as f64;
        // Ranks of a rack, and the part of all ranks that is in others.
        let in_rack = self.layout.most_per_rack() as f64 * per_host;
        let others = (n - in_rack) / n;
        let log_racks = self.layout.racks.next_power_of_two().ilog2() as f64;
        let is_aligned = self.layout.has_even_racks() && (in_rack as usize).is_power_of_two();
        // Exchanges at small distances cross borders between racks that are not aligned.
        let levels = if is_aligned { log_racks } else { (log_racks + 1.0).min(net_log) };
        let passes = if op == Op::AllReduce { 2.0 } else { 1.0 };
        let moves_blocks = !matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce);
        // Bytes of one host that cross, and of its rack.
        let (crossing, of_rack) = match (algorithm, op) {
            (Algorithm::Ring, _) => (price.network_bytes, price.network_bytes),
            (Algorithm::Binomial | Algorithm::Direct, Op::Gather | Op::Scatter) => (others * s, others * s),
            (Algorithm::Binomial, Op::AllReduce) => (2.0 * levels * s, 2.0 * levels * s),
            // The root may be anywhere in its rack.
            (Algorithm::Binomial, _) => ((log_racks + 1.0).min(net_log) * s, (log_racks + 1.0).min(net_log) * s),
            (Algorithm::DoubleTree, _) => (passes * s, passes * s * (1.0 + in_rack.log2())),
            (Algorithm::RecursiveDoubling, Op::AllReduce) => (per_host * levels * s, in_rack * levels * s),
            (Algorithm::HalvingDoubling, Op::AllReduce) if is_aligned => {
                let crossing = 2.0 * (racks - 1.0) / racks * s;
                (crossing * per_host / in_rack, crossing)
            }
            (Algorithm::HalvingDoubling, Op::AllReduce) => (2.0 * (1.0 - 1.0 / hosts) * s, 2.0 * s * (1.0 + in_rack.log2())),
            // Their rounds follow the ranks, wherever these are.
            (Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling, _) => (per_host * most * s, in_rack * most * s),
            (Algorithm::Direct, Op::Reduce) => ((n - in_rack) * s, (n - in_rack) * s),
            (Algorithm::Direct, Op::Send | Op::Recv) => (s, s),
            (Algorithm::Direct, _) => (passes * per_host * others * s, passes * in_rack * others * s),
            _ => (0.0, 0.0),
        };
        let uplink_rounds = match algorithm {
            Algorithm::Ring => passes * racks,
            Algorithm::Direct | Algorithm::Dissemination => price.network_rounds,
            _ if moves_blocks => price.network_rounds,
            _ => price.network_rounds * levels / net_log,
        };
        Price {
            uplink_rounds: uplink_rounds.min(price.network_rounds),
            crossing_bytes: crossing.min(price.network_bytes),
            uplink_bytes: of_rack,
            mean_crossing_bytes: of_rack / self.layout.most_per_rack() as f64,
            ..price
        }
    }

    /// The segments of a direct reduction, each of which waits for the last part of the one before.
    /// Between hosts the wire is idle meanwhile. Inside a host processors are the bottleneck, and
    /// they are busy.
    fn segments(&self) -> f64 {
        if self.layout.hosts > 1 { (self.s / self.n / segment_bytes(Algorithm::Direct) as f64).ceil().max(1.0) } else { 1.0 }
    }

    /// The cost of ranks beyond a power of two: each hands its part to a neighbour first, and gets
    /// the result last.
    fn beyond(&self) -> Price {
        if self.layout.ranks.is_power_of_two() {
            return Price::default();
        }
        self.rounds(2.0, 2.0 * self.s).reducing(self.s)
    }
}
