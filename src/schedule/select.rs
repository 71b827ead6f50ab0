//! Which algorithm: a cost model, one function that prices every algorithm with it, and the cheapest wins.
//!
//! The model is the usual one (alpha, beta, gamma: latency, time per byte, reduction time per byte; Thakur, Rabenseifner and
//! Gropp 2005), with two additions: the processor time of a message, which separates one round of N messages from N rounds,
//! and that the ranks of one host share its network interface.

use super::{Algorithm, Blocks, Problem, Step, steps};
use crate::types::Op;

/// What a link between two ranks costs.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinkCost {
    /// Seconds from a send to its arrival, for a message without bytes.
    pub latency: f64,
    /// Seconds of processor time for each message, at either end.
    pub overhead: f64,
    /// Seconds per byte. Between hosts this is a host's network interface, which its ranks share.
    pub per_byte: f64,
}

impl LinkCost {
    /// A link with these costs, in seconds, seconds and seconds per byte.
    pub const fn new(latency: f64, overhead: f64, per_byte: f64) -> LinkCost {
        LinkCost { latency, overhead, per_byte }
    }
}

/// The prices with which algorithms are compared. All ranks use those of rank 0.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostModel {
    /// A link between hosts.
    pub network: LinkCost,
    /// A link inside a host.
    pub local: LinkCost,
    /// Seconds to reduce one byte.
    pub reduce: f64,
    /// Seconds for the ranks of one host to wait for each other in a window.
    pub window_sync: f64,
    /// Seconds to move one byte through a window, on each of the host's ranks.
    pub window_per_byte: f64,
}

impl Default for CostModel {
    /// Ten gigabit Ethernet between hosts, and the medians that were measured on two-core virtual machines inside one.
    fn default() -> Self {
        CostModel {
            network: LinkCost { latency: 25e-6, overhead: 3e-6, per_byte: 1.0 / 1.25e9 },
            local: LinkCost { latency: 1e-6, overhead: 0.2e-6, per_byte: 1.0 / 4e9 },
            reduce: 1.0 / 8e9,
            window_sync: 0.3e-6,
            window_per_byte: 1.0 / 12e9,
        }
    }
}

/// How the ranks of a communicator are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// All ranks.
    pub ranks: usize,
    /// Hosts. Without shared memory every rank counts as one.
    pub hosts: usize,
    /// The fewest ranks that one host has.
    pub fewest_per_host: usize,
    /// Whether all ranks of every host share windows.
    pub windows: bool,
}

impl Layout {
    /// `ranks` spread evenly over `hosts`, with windows where a host has several.
    pub fn even(ranks: usize, hosts: usize) -> Layout {
        let hosts = hosts.clamp(1, ranks.max(1));
        Layout { ranks, hosts, fewest_per_host: ranks / hosts, windows: ranks > hosts }
    }

    fn most_per_host(&self) -> usize {
        self.ranks.div_ceil(self.hosts)
    }

    /// One rank on every host: those that exchange one slice of a hierarchical collective.
    fn between(&self) -> Layout {
        Layout { ranks: self.hosts, hosts: self.hosts, fewest_per_host: 1, windows: false }
    }
}

/// How one collective will be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Bytes of a piece for algorithms that overlap pieces: large enough to pay for its messages, small enough to fill the
/// pipeline soon.
pub(crate) const fn piece_bytes(algorithm: Algorithm) -> usize {
    match algorithm {
        // Pieces bound the scratch memory here; there is no pipeline to fill.
        Algorithm::Direct => 1 << 20,
        Algorithm::Ring | Algorithm::Binomial => 256 << 10,
        _ => 64 << 10,
    }
}

/// The choice for a collective of `bytes`: of the buffer, or of all blocks together. `forced` is taken wherever it can carry
/// out the operation.
pub(crate) fn select(op: Op, bytes: u64, layout: Layout, model: &CostModel, forced: Option<Algorithm>) -> Choice {
    if let Some(choice) = forced.and_then(|forced| force(op, bytes, layout, model, forced)) {
        return choice;
    }
    let mut best = (f64::INFINITY, Choice { algorithm: Algorithm::Direct, between: None });
    for_each_choice(op, bytes, layout, model, |choice| {
        let time = price(op, bytes, layout, choice).seconds(model);
        if time < best.0 {
            best = (time, choice);
        }
    });
    best.1
}

fn force(op: Op, bytes: u64, layout: Layout, model: &CostModel, forced: Algorithm) -> Option<Choice> {
    let mut found = None;
    for_each_choice(op, bytes, layout, model, |choice| {
        if choice.algorithm == forced {
            found = Some(choice);
        }
    });
    found
}

/// Everything that could carry out `op` on this layout. A rank alone needs nothing.
fn for_each_choice(op: Op, bytes: u64, layout: Layout, model: &CostModel, mut each: impl FnMut(Choice)) {
    if layout.ranks < 2 {
        return;
    }
    if layout.windows && has_window(op) && layout.hosts == 1 {
        each(Choice { algorithm: Algorithm::Window, between: None });
    }
    if layout.windows && is_hierarchical(op) && layout.hosts > 1 {
        let slice = if op == Op::AllReduce { bytes / layout.fewest_per_host as u64 } else { bytes };
        let between = select(op, slice, layout.between(), model, None).algorithm;
        each(Choice { algorithm: Algorithm::Hierarchical, between: Some(between) });
    }
    for &algorithm in Algorithm::for_op(op, layout.ranks) {
        each(Choice { algorithm, between: None });
    }
}

/// Operations that ranks of one host carry out on windows.
pub(crate) const fn has_window(op: Op) -> bool {
    !matches!(op, Op::AllToAllV | Op::Send | Op::Recv | Op::Split | Op::Alloc | Op::Connect)
}

/// Operations that are composed of windows inside hosts and messages between them.
pub(crate) const fn is_hierarchical(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce | Op::Barrier)
}

/// Bytes that a TCP connection has on the way two round trips after it was idle: four times the initial window.
const IDLE_WINDOW: f64 = 64.0 * 1024.0;

/// What the critical path of a collective consists of. Bytes are fractions of rounds, hence not whole.
#[derive(Clone, Copy, Debug, Default)]
struct Price {
    /// Rounds that wait for a message from another host.
    network_rounds: f64,
    /// Rounds that wait for a message inside the host.
    local_rounds: f64,
    /// Messages that one rank handles beyond one for each round.
    messages: f64,
    /// Bytes through one host's network interface, one way.
    network_bytes: f64,
    /// Bytes through one rank's links inside its host, one way.
    local_bytes: f64,
    /// Bytes that one rank reduces.
    reduced: f64,
    /// Times that the ranks of a host wait for each other in a window.
    syncs: f64,
    /// Bytes that one rank loads and stores in windows.
    window_bytes: f64,
}

impl Price {
    fn seconds(&self, model: &CostModel) -> f64 {
        let overhead = if self.network_rounds > 0.0 { model.network.overhead } else { model.local.overhead };
        self.network_rounds * model.network.latency
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
            local_rounds: self.local_rounds + other.local_rounds,
            messages: self.messages + other.messages,
            network_bytes: self.network_bytes + other.network_bytes,
            local_bytes: self.local_bytes + other.local_bytes,
            reduced: self.reduced + other.reduced,
            syncs: self.syncs + other.syncs,
            window_bytes: self.window_bytes + other.window_bytes,
        }
    }
}

fn price(op: Op, bytes: u64, layout: Layout, choice: Choice) -> Price {
    match (choice.algorithm, choice.between) {
        (Algorithm::Window, _) => price_window(op, bytes as f64, layout.ranks as f64),
        (Algorithm::Hierarchical, Some(between)) => {
            let per_host = layout.fewest_per_host as u64;
            let slice = if op == Op::AllReduce { bytes / per_host } else { bytes };
            // The slices of a host share its interface, and leave it at the same time.
            let outside = price_messages(op, slice as f64, layout.between(), between);
            let outside = if op == Op::AllReduce {
                Price { network_bytes: outside.network_bytes * per_host as f64, ..outside }
            } else {
                outside
            };
            price_window(op, bytes as f64, layout.most_per_host() as f64).plus(outside)
        }
        (algorithm, _) => price_messages(op, bytes as f64, layout, algorithm),
    }
}

/// Bytes loaded and stored per rank by the staged forms, of which an all-reduce moves (5 - 2/N) S.
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

/// The costs that head the generators' files, told apart by where the bytes go. With one rank per host (or one host) each
/// reduces to the formula there.
fn price_messages(op: Op, s: f64, layout: Layout, algorithm: Algorithm) -> Price {
    let n = layout.ranks as f64;
    let hosts = layout.hosts as f64;
    let per_host = layout.most_per_host() as f64;
    let log = |x: usize| x.next_power_of_two().ilog2() as f64;
    let (net_log, local_log) = (log(layout.hosts), log(layout.most_per_host()));
    let most = (n - 1.0) / n;
    // `count` rounds one after the other, all as slow as the slowest of their links.
    let rounds = |count: f64, bytes: f64| {
        if layout.hosts > 1 {
            Price { network_rounds: count, network_bytes: bytes, ..Price::default() }
        } else {
            Price { local_rounds: count, local_bytes: bytes, ..Price::default() }
        }
    };
    // Logarithmic rounds, of which the small distances stay inside the hosts.
    let levels = |times: f64, network_bytes: f64, local_bytes: f64| Price {
        network_rounds: times * net_log,
        local_rounds: times * local_log,
        network_bytes,
        local_bytes,
        ..Price::default()
    };
    // Everybody exchanges `block` bytes with everybody, in so many rounds.
    let pairwise = |block: f64, times: f64| Price {
        network_bytes: per_host * (n - per_host) * block,
        local_bytes: (per_host - 1.0) * block,
        messages: times * (n - 1.0),
        ..rounds(times, 0.0)
    };
    // What is reduced directly goes piece by piece, and each waits for the last part of the one before. Between hosts the wire
    // is idle meanwhile; inside one, processors are what is short, and they are busy.
    let pieces = if layout.hosts > 1 { (s / n / piece_bytes(Algorithm::Direct) as f64).ceil().max(1.0) } else { 1.0 };
    // Ranks beyond a power of two hand their part to a neighbour first and get the result last.
    let beyond = if layout.ranks.is_power_of_two() { Price::default() } else { Price { reduced: s, ..rounds(2.0, 2.0 * s) } };
    let reduced = |bytes: f64, price: Price| Price { reduced: price.reduced + bytes, ..price };
    let reduces = if op.reduces() { 1.0 } else { 0.0 };

    match (algorithm, op) {
        (Algorithm::Ring, Op::AllReduce) => reduced(most * s, rounds(2.0 * (n - 1.0), 2.0 * most * s)),
        (Algorithm::Ring, Op::Broadcast | Op::Reduce) => reduced(reduces * s, rounds(n - 1.0, s)),
        (Algorithm::Ring, _) => reduced(reduces * most * s, rounds(n - 1.0, most * s)),
        (Algorithm::Binomial, Op::AllReduce) => {
            let logs = net_log + local_log;
            reduced(logs * s, levels(2.0, 2.0 * net_log * s, 2.0 * local_log * s))
        }
        (Algorithm::Binomial, Op::Broadcast | Op::Reduce) => {
            reduced(reduces * (net_log + local_log) * s, levels(1.0, net_log * s, local_log * s))
        }
        (Algorithm::Binomial, _) => levels(1.0, (hosts - 1.0) / hosts * s, (per_host - 1.0) / per_host * s / hosts),
        (Algorithm::DoubleTree, _) => {
            let passes = if op == Op::AllReduce { 2.0 } else { 1.0 };
            let piece = (piece_bytes(algorithm) as f64).min(s / 2.0);
            let fill = passes * (net_log + local_log + 1.0) * piece;
            let depth = levels(passes, 0.0, 0.0);
            let stream = rounds(passes, passes * s + fill);
            // Of each pair of pieces a rank receives two and sends two.
            let messages = if s > 0.0 { 4.0 * passes * s / 2.0 / piece } else { 0.0 };
            reduced(reduces * s, Price { messages, ..depth.plus(stream) })
        }
        (Algorithm::RecursiveDoubling, Op::AllReduce) => {
            let logs = net_log + local_log;
            reduced(logs * s, levels(1.0, per_host * net_log * s, local_log * s)).plus(beyond)
        }
        (Algorithm::RecursiveDoubling, _) => levels(1.0, per_host * (n - per_host) / n * s, (per_host - 1.0) / n * s),
        (Algorithm::HalvingDoubling, Op::AllReduce) => {
            let inside = 2.0 * (1.0 - 1.0 / per_host) * s;
            // Every round has another partner, whose connection was idle: where its window is too small for what is sent, it
            // takes two round trips to grow. The ring keeps its connections busy.
            let grows = if hosts > 2.0 && s / hosts >= IDLE_WINDOW { 2.0 * net_log } else { 0.0 };
            let windows = Price { network_rounds: 4.0 * grows, ..Price::default() };
            reduced(most * s, levels(2.0, 2.0 * (1.0 - 1.0 / hosts) * s, inside)).plus(beyond).plus(windows)
        }
        (Algorithm::HalvingDoubling, _) => {
            reduced(most * s, levels(1.0, per_host * (1.0 - 1.0 / hosts) * s, (1.0 - 1.0 / per_host) * s / hosts))
        }
        (Algorithm::Direct, Op::AllReduce) => reduced(most * s, pairwise(s / n, pieces).plus(pairwise(s / n, pieces))),
        (Algorithm::Direct, Op::Reduce) => reduced((n - 1.0) * s, Price { messages: n - 1.0, ..rounds(1.0, (n - per_host) * s) }),
        (Algorithm::Direct, Op::Gather | Op::Scatter) => Price { messages: n - 1.0, ..rounds(1.0, most * s) },
        (Algorithm::Direct, Op::Send | Op::Recv) => rounds(1.0, s),
        (Algorithm::Direct, _) if op.reduces() => reduced(most * s, pairwise(s / n, pieces)),
        (Algorithm::Direct, _) => pairwise(s / n, 1.0),
        (Algorithm::Dissemination, _) => levels(1.0, 0.0, 0.0),
        (Algorithm::Window | Algorithm::Hierarchical, _) => unreachable!("not made of messages"),
    }
}

/// One way to carry out a collective, with its price; what `kolo plan` shows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// The algorithm.
    pub choice: Choice,
    /// Predicted seconds.
    pub seconds: f64,
    /// Seconds of it spent on latency and message handling.
    pub latency: f64,
    /// Seconds of it spent on moving bytes.
    pub transfer: f64,
    /// Seconds of it spent on reducing.
    pub reduction: f64,
    /// The most bytes that any one rank sends over links (to any rank), counted from the schedule.
    pub sent_per_rank: u64,
    /// The most messages that any one rank sends.
    pub messages_per_rank: u64,
}

/// Everything that could carry out `op` with `bytes` (of the buffer, or of all blocks together), cheapest first.
///
/// ```
/// use kolo::plan::{CostModel, Layout, candidates};
/// let plans = candidates(kolo::Op::AllReduce, 1 << 20, Layout::even(64, 8), &CostModel::default());
/// println!("{} in {:.0} us", plans[0].choice, plans[0].seconds * 1e6);
/// ```
pub fn candidates(op: Op, bytes: u64, layout: Layout, model: &CostModel) -> Vec<Candidate> {
    let mut found = Vec::new();
    for_each_choice(op, bytes, layout, model, |choice| {
        let price = price(op, bytes, layout, choice);
        let (sent_per_rank, messages_per_rank) = sent(op, bytes, layout, choice);
        let without_bytes =
            Price { network_bytes: 0.0, local_bytes: 0.0, window_bytes: 0.0, reduced: 0.0, ..price }.seconds(model);
        let reduction = price.reduced * model.reduce;
        let seconds = price.seconds(model);
        found.push(Candidate {
            choice,
            seconds,
            latency: without_bytes,
            transfer: seconds - without_bytes - reduction,
            reduction,
            sent_per_rank,
            messages_per_rank,
        });
    });
    found.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    found
}

/// The most bytes and messages that any one rank sends, counted by generating the schedules. In worlds of more than 256
/// ranks, of 256 of them.
fn sent(op: Op, bytes: u64, layout: Layout, choice: Choice) -> (u64, u64) {
    let (algorithm, world, bytes) = match choice {
        Choice { algorithm: Algorithm::Window, .. } => return (0, 0),
        Choice { between: Some(between), .. } if op == Op::AllReduce => {
            (between, layout.hosts, bytes / layout.fewest_per_host as u64)
        }
        Choice { between: Some(between), .. } => (between, layout.hosts, bytes),
        Choice { algorithm, .. } => (algorithm, layout.ranks, bytes),
    };
    let blocks = Blocks::Even(bytes as usize / world);
    let piece = piece_bytes(algorithm);
    let problem = Problem { op, rank: 0, world, root: 0, count: bytes as usize, sends: blocks, recvs: blocks, piece };
    let ranks = (0..world).step_by(world.div_ceil(256));
    let per_rank = ranks.map(|rank| {
        let sends = steps(algorithm, Problem { rank, root: problem.root, ..problem }).filter_map(|step| match step {
            Step::Send { src, .. } => Some(src.len),
            Step::RecvSend { dst, .. } | Step::RecvReduceSend { dst, .. } => Some(dst.len),
            _ => None,
        });
        sends.fold((0, 0), |(bytes, messages), len| (bytes + len as u64, messages + 1))
    });
    per_rank.fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(op: Op, bytes: u64, ranks: usize, hosts: usize) -> Choice {
        select(op, bytes, Layout::even(ranks, hosts), &CostModel::default(), None)
    }

    #[test]
    fn small_is_logarithmic_and_large_is_bandwidth_optimal() {
        assert_eq!(chosen(Op::AllReduce, 8, 64, 64).algorithm, Algorithm::RecursiveDoubling);
        let large = chosen(Op::AllReduce, 1 << 30, 64, 64).algorithm;
        assert!(matches!(large, Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::DoubleTree), "{large}");
        // Direct reductions wait for each piece, and halving for connections that were idle.
        assert_eq!(chosen(Op::AllReduce, 64 << 20, 4, 4).algorithm, Algorithm::Ring);
        assert_eq!(chosen(Op::AllReduce, 1 << 20, 4, 1).algorithm, Algorithm::Window);
        assert_eq!(chosen(Op::AllReduce, 1 << 20, 64, 8).algorithm, Algorithm::Hierarchical);
        assert_eq!(chosen(Op::Barrier, 0, 64, 64).algorithm, Algorithm::Dissemination);
    }

    #[test]
    fn a_forced_algorithm_is_taken_where_it_exists() {
        let layout = Layout::even(8, 8);
        let forced = |op| select(op, 1 << 20, layout, &CostModel::default(), Some(Algorithm::Ring)).algorithm;
        assert_eq!(forced(Op::AllReduce), Algorithm::Ring);
        assert_eq!(forced(Op::Barrier), Algorithm::Dissemination);
    }

    #[test]
    fn prices_agree_with_the_bytes_of_the_schedules() {
        let bytes = 840 * 1024;
        for ranks in [2, 3, 4, 7, 8] {
            for op in [Op::AllReduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll] {
                for &algorithm in Algorithm::for_op(op, ranks) {
                    let choice = Choice { algorithm, between: None };
                    let layout = Layout::even(ranks, ranks);
                    let price = price(op, bytes, layout, choice).network_bytes;
                    let (sent, _) = sent(op, bytes, layout, choice);
                    // The price follows the critical path, which a tree's inner node lengthens and its root does not.
                    let ratio = price / sent as f64;
                    assert!((0.8..=3.0).contains(&ratio), "{op} {algorithm} on {ranks}: {price} priced, {sent} sent");
                    if matches!(algorithm, Algorithm::Ring | Algorithm::Direct) {
                        assert!((0.99..=1.01).contains(&ratio), "{op} {algorithm} on {ranks}: {price} priced, {sent} sent");
                    }
                }
            }
        }
    }

    #[test]
    fn candidates_are_sorted_and_their_parts_add_up() {
        let plans = candidates(Op::AllReduce, 1 << 20, Layout::even(64, 8), &CostModel::default());
        assert!(plans.is_sorted_by(|a, b| a.seconds <= b.seconds));
        for plan in plans {
            assert!((plan.latency + plan.transfer + plan.reduction - plan.seconds).abs() < 1e-9 * plan.seconds, "{plan:?}");
        }
    }
}
