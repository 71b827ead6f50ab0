//! Selects the algorithm of a collective: prices every candidate, and takes the cheapest.

pub use super::model::{Choice, CostModel, Layout, LinkCost};
pub(crate) use super::price::segment_bytes;

use super::algorithm::Algorithm;
use super::generate::steps;
use super::price::{Price, bytes_between, price};
use super::problem::{Blocks, Problem, Racks};
use super::step::Step;
use crate::types::{Op, Rank};

/// The weight of the hierarchical form's price. Prices are not exact, and the hierarchical form has the
/// fewest messages between hosts: of two that cost about the same, it is the better one (64 MiB on 4
/// hosts of 2 ranks: 0.95 s, and 1.05 s by halving-doubling, whose price was 0.6 % less).
const HIERARCHICAL: f64 = 0.95;

/// Returns the time by which a choice is compared with others.
fn weighed(choice: Choice, seconds: f64) -> f64 {
    if choice.algorithm == Algorithm::Hierarchical { seconds * HIERARCHICAL } else { seconds }
}

/// Returns the choice for a collective of `bytes`: of the buffer, or of all blocks together.
/// `forced` is taken if it can execute the operation.
pub(crate) fn select(op: Op, bytes: u64, layout: Layout, model: &CostModel, forced: Option<Algorithm>) -> Choice {
    if let Some(choice) = forced.and_then(|forced| force(op, bytes, layout, model, forced)) {
        return choice;
    }
    let mut best = None;
    for_each_choice(op, bytes, layout, model, |choice| {
        let time = weighed(choice, price(op, bytes, layout, choice).seconds(&model.along(choice)));
        // The first choice counts also if the model prices it at infinity: it can execute `op`.
        if best.is_none_or(|(least, _)| time < least) {
            best = Some((time, choice));
        }
    });
    // A single rank executes nothing.
    best.map_or(Choice { algorithm: Algorithm::Direct, between: None }, |(_, choice)| choice)
}

fn force(op: Op, bytes: u64, layout: Layout, model: &CostModel, forced: Algorithm) -> Option<Choice> {
    if forced == Algorithm::Hierarchical {
        return hierarchical(op, bytes, layout, model);
    }
    let mut found = None;
    for_each_choice(op, bytes, layout, model, |choice| {
        if choice.algorithm == forced {
            found = Some(choice);
        }
    });
    found
}

/// Calls `each` with every choice that can execute `op` on this layout; with none for a single
/// rank.
fn for_each_choice(op: Op, bytes: u64, layout: Layout, model: &CostModel, mut each: impl FnMut(Choice)) {
    if layout.ranks < 2 {
        return;
    }
    if layout.windows && has_window(op) && layout.hosts == 1 {
        each(Choice { algorithm: Algorithm::Window, between: None });
    }
    if let Some(choice) = hierarchical(op, bytes, layout, model) {
        each(choice);
    }
    // Of two that cost the same, this one crosses the uplinks of racks with fewer bytes.
    let one_rank_each = layout.racks > 1 && layout.ranks == layout.hosts;
    if one_rank_each && Algorithm::has_two_levels(op, layout.has_even_racks()) {
        each(Choice { algorithm: Algorithm::TwoLevel, between: None });
    }
    for &algorithm in Algorithm::for_op(op, layout.ranks) {
        each(Choice { algorithm, between: None });
    }
}

/// Whether the ranks of one host can execute the operation in shared memory.
pub(crate) const fn has_window(op: Op) -> bool {
    matches!(
        op,
        Op::AllReduce
            | Op::Reduce
            | Op::Broadcast
            | Op::Barrier
            | Op::AllGather
            | Op::AllGatherV
            | Op::ReduceScatter
            | Op::ReduceScatterV
            | Op::AllToAll
            | Op::Gather
            | Op::Scatter
    )
}

/// Returns the choice that combines shared memory inside hosts with messages between them; `None` if
/// the operation cannot do so on this layout.
fn hierarchical(op: Op, bytes: u64, layout: Layout, model: &CostModel) -> Option<Choice> {
    let is_even = layout.fewest_per_host * layout.hosts == layout.ranks;
    let executes = has_window(op) && (op != Op::AllToAll || is_even);
    if !layout.windows || layout.hosts < 2 || !executes {
        return None;
    }
    let between = select(op, bytes_between(op, bytes, layout), layout.between(), model, None).algorithm;
    Some(Choice { algorithm: Algorithm::Hierarchical, between: Some(between) })
}

/// One way to execute a collective, with its price; `kolo plan` shows these.
#[derive(Clone, Debug, PartialEq)]
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
    /// The most bytes that any rank sends over links (to any rank), counted from the schedule.
    pub sent_per_rank: u64,
    /// The most messages that any rank sends.
    pub messages_per_rank: u64,
}

/// Returns every way to execute `op` with `bytes` (of the buffer, or of all blocks together), first
/// the one that kolo chooses. A layout with hosts that have no ranks counts as one whose hosts have one
/// each.
///
/// ```
/// use kolo::plan::{CostModel, Layout, candidates};
/// let plans = candidates(kolo::Op::AllReduce, 1 << 20, Layout::even(64, 8), &CostModel::default());
/// println!("{} in {:.0} us", plans[0].choice, plans[0].seconds * 1e6);
/// ```
pub fn candidates(op: Op, bytes: u64, layout: Layout, model: &CostModel) -> Vec<Candidate> {
    let layout = layout.possible();
    let mut found = Vec::new();
    for_each_choice(op, bytes, layout, model, |choice| {
        let (price, model) = (price(op, bytes, layout, choice), &model.along(choice));
        let (sent_per_rank, messages_per_rank) = sent(op, bytes, layout, choice);
        let without_bytes = Price {
            network_bytes: 0.0,
            uplink_bytes: 0.0,
            mean_crossing_bytes: 0.0,
            local_bytes: 0.0,
            window_bytes: 0.0,
            reduced: 0.0,
            ..price
        }
        .seconds(model);
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
    found.sort_by(|a, b| weighed(a.choice, a.seconds).total_cmp(&weighed(b.choice, b.seconds)));
    found
}

/// Returns the most bytes and messages that any rank sends, counted from the schedules. In worlds
/// of more than 256 ranks, counts 256 of them.
fn sent(op: Op, bytes: u64, layout: Layout, choice: Choice) -> (u64, u64) {
    let (algorithm, world, bytes) = match choice {
        Choice { algorithm: Algorithm::Window, .. } => return (0, 0),
        Choice { between: Some(between), .. } => (between, layout.hosts, bytes_between(op, bytes, layout)),
        Choice { algorithm, .. } => (algorithm, layout.ranks, bytes),
    };
    let racks = Racks::Even(layout.racks);
    let of_rank = |rank| sent_by(rank, op, algorithm, bytes, (world, racks), segment_bytes(algorithm));
    let per_rank = (0..world).step_by(world.div_ceil(256)).map(of_rank);
    per_rank.fold((0, 0), |most, one| (most.0.max(one.0), most.1.max(one.1)))
}

/// Returns the bytes and messages that one rank sends. Counts the segments of one round and of the
/// rest, so that the time does not grow with `bytes`.
pub(super) fn sent_by(
    rank: Rank,
    op: Op,
    algorithm: Algorithm,
    bytes: u64,
    world: (usize, Racks<'_>),
    segment: usize,
) -> (u64, u64) {
    let count = |bytes: u64| sent_in_steps(rank, op, algorithm, bytes, world, segment);
    let Some(round) = bytes_of_a_round(op, algorithm, world.0, segment) else { return count(bytes) };
    let (rounds, rest) = (bytes / round, count(bytes % round));
    let each = if rounds > 0 { count(round) } else { (0, 0) };
    let total = |each: u64, rest: u64| each.saturating_mul(rounds).saturating_add(rest);
    (total(each.0, rest.0), total(each.1, rest.1))
}

/// Returns the bytes after which the steps of a schedule repeat: every part of the buffer that the
/// algorithm divides into segments then has one full segment more. `None` if the number of steps
/// does not depend on the bytes.
pub(super) fn bytes_of_a_round(op: Op, algorithm: Algorithm, world: usize, segment: usize) -> Option<u64> {
    let parts = match (algorithm, op) {
        (Algorithm::Ring | Algorithm::Binomial | Algorithm::Direct | Algorithm::TwoLevel, Op::Reduce) => 1,
        (Algorithm::DoubleTree, _) => 2,
        (Algorithm::Direct, Op::AllReduce | Op::ReduceScatter | Op::ReduceScatterV) => world,
        _ => return None,
    };
    // With a large world, the product exceeds 32 bits.
    Some(parts as u64 * segment as u64)
}

/// Counts the bytes and messages that one rank sends, step by step.
fn sent_in_steps(
    rank: Rank,
    op: Op,
    algorithm: Algorithm,
    bytes: u64,
    (world, racks): (usize, Racks<'_>),
    segment: usize,
) -> (u64, u64) {
    let blocks = Blocks::Even(bytes as usize / world);
    let problem = Problem { op, rank, world, root: 0, count: bytes as usize, sends: blocks, recvs: blocks, segment, racks };
    let sends = steps(algorithm, problem).filter_map(|step| match step {
        Step::Send { src, .. } => Some(src.len),
        Step::RecvSend { dst, .. } | Step::RecvReduceSend { dst, .. } => Some(dst.len),
        _ => None,
    });
    sends.fold((0, 0), |(bytes, messages): (u64, u64), len| (bytes.saturating_add(len as u64), messages + 1))
}

#[cfg(test)]
mod tests {
    use super::super::price::CONTENTION;
    use super::*;

    fn chosen(op: Op, bytes: u64, ranks: usize, hosts: usize) -> Choice {
        select(op, bytes, Layout::even(ranks, hosts), &CostModel::default(), None)
    }

    #[test]
    fn small_is_logarithmic_and_large_is_bandwidth_optimal() {
        assert_eq!(chosen(Op::AllReduce, 8, 64, 64).algorithm, Algorithm::RecursiveDoubling);
        let large = chosen(Op::AllReduce, 1 << 30, 64, 64).algorithm;
        assert!(matches!(large, Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::DoubleTree), "{large}");
        // Direct reductions wait for each segment, and halving waits for idle connections.
        assert_eq!(chosen(Op::AllReduce, 64 << 20, 4, 4).algorithm, Algorithm::Ring);
        assert_eq!(chosen(Op::AllReduce, 1 << 20, 4, 1).algorithm, Algorithm::Window);
        assert_eq!(chosen(Op::AllReduce, 1 << 20, 64, 8).algorithm, Algorithm::Hierarchical);
        assert_eq!(chosen(Op::Barrier, 0, 64, 64).algorithm, Algorithm::Dissemination);
    }

    #[test]
    fn large_data_crosses_uplinks_with_the_fewest_bytes() {
        let (layout, model) = (Layout::even(16, 16).in_racks(4), CostModel::default());
        let chosen = |op, bytes, layout, model: &CostModel| select(op, bytes, layout, model, None).algorithm;
        for op in [Op::AllReduce, Op::AllGather, Op::ReduceScatter] {
            assert_eq!(chosen(op, 64 << 20, layout, &model), Algorithm::TwoLevel, "{op}");
        }
        assert_eq!(chosen(Op::AllReduce, 8, layout, &model), Algorithm::RecursiveDoubling);
        // Each rack gets all data once, and a ring streams it.
        assert_eq!(chosen(Op::Broadcast, 64 << 20, layout, &model), Algorithm::Ring);
        let hierarchical = Some(Algorithm::Hierarchical);
        let between = select(Op::AllReduce, 64 << 20, Layout::even(32, 16).in_racks(4), &model, hierarchical).between;
        assert_eq!(between, Some(Algorithm::TwoLevel));
        // In racks of different sizes, some hosts pass on more. That pays if uplinks are slow.
        let uneven = Layout { fewest_per_rack: 3, ..layout };
        assert_eq!(chosen(Op::AllGather, 64 << 20, uneven, &model), Algorithm::Ring);
        assert_eq!(chosen(Op::AllReduce, 64 << 20, uneven, &model), Algorithm::Ring);
        let slow = CostModel { uplink: LinkCost { per_byte: 16e-9, ..model.uplink }, ..model };
        assert_eq!(chosen(Op::AllReduce, 64 << 20, uneven, &slow), Algorithm::TwoLevel);
    }

    #[test]
    fn costs_beyond_all_numbers_still_select_what_can_execute() {
        for cost in [f64::MAX, f64::NAN] {
            let link = LinkCost::new(cost, cost, cost);
            let model = CostModel {
                network: link,
                uplink: link,
                ring: Some(link),
                local: link,
                reduce: cost,
                window_sync: cost,
                window_per_byte: cost,
            };
            for (op, layout) in
                [(Op::Barrier, Layout::even(4, 4)), (Op::AllReduce, Layout::even(8, 2)), (Op::Barrier, Layout::even(8, 2))]
            {
                let choice = select(op, 1 << 20, layout, &model, None);
                assert!(candidates(op, 1 << 20, layout, &model).iter().any(|one| one.choice == choice), "{op}: {choice}");
            }
        }
    }

    /// Only the ring avoids it; short messages do not wait for it.
    #[test]
    fn a_slow_link_is_avoided_where_bytes_count() {
        let even = CostModel::default();
        let network = LinkCost { per_byte: 10.0 * even.network.per_byte, ..even.network };
        let model = CostModel { network, ring: Some(even.network), ..even };
        for layout in [Layout::even(8, 8), Layout::even(32, 8)] {
            let chosen = |model, bytes| {
                let choice = select(Op::AllReduce, bytes, layout, model, None);
                choice.between.unwrap_or(choice.algorithm)
            };
            let least = |model| (3..26).find(|power| chosen(model, 1 << power) == Algorithm::Ring).unwrap();
            let (even, uneven) = (least(&even), least(&model));
            assert!(3 < uneven && uneven < even, "from 2^{uneven} B on, otherwise from 2^{even} B on");
            assert_eq!(chosen(&model, 64 << 20), Algorithm::Ring);
            let plans = candidates(Op::AllReduce, 1 << 20, layout, &model);
            assert_eq!(plans[0].choice, select(Op::AllReduce, 1 << 20, layout, &model, None));
        }
    }

    #[test]
    fn layouts_without_ranks_on_a_host_are_priced() {
        for (hosts, fewest_per_host) in [(0, 0), (2, 0), (2, 9), (9, 1)] {
            let layout = Layout { hosts, fewest_per_host, ..Layout::even(8, 2) };
            for &op in Op::ALL.iter().filter(|op| !Algorithm::for_op(**op, 8).is_empty()) {
                assert!(!candidates(op, 1 << 20, layout, &CostModel::default()).is_empty(), "{op} of {layout:?}");
            }
        }
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
                    // The price follows the critical path, which is longer than a tree's root
                    // sends.
                    let ratio = price / sent as f64;
                    assert!((0.8..=3.0).contains(&ratio), "{op} {algorithm} on {ranks}: {price} priced, {sent} sent");
                    if matches!(algorithm, Algorithm::Ring | Algorithm::Direct) {
                        // Long messages contend for links.
                        let is_contended = algorithm == Algorithm::Direct && ratio > 1.01;
                        let ratio = if is_contended { ratio / CONTENTION } else { ratio };
                        assert!((0.99..=1.01).contains(&ratio), "{op} {algorithm} on {ranks}: {price} priced, {sent} sent");
                    }
                }
            }
        }
    }

    #[test]
    fn segments_are_counted_as_the_schedules_have_them() {
        for world in 2..=9 {
            for (op, algorithm) in Op::ALL.iter().flat_map(|&op| Algorithm::for_op(op, world).iter().map(move |&one| (op, one))) {
                let Some(round) = bytes_of_a_round(op, algorithm, world, 5) else {
                    // Longer segments make no difference.
                    let steps = |segment| sent_in_steps(0, op, algorithm, 1000, (world, Racks::ONE), segment);
                    assert_eq!(steps(5), steps(500), "{op} {algorithm} on {world}");
                    continue;
                };
                for bytes in [0, 1, 4, 6, round - 1, round, round + 1, 3 * round, 7 * round + 3, 9 * round - 1] {
                    for rank in 0..world {
                        let counted = sent_by(rank, op, algorithm, bytes, (world, Racks::ONE), 5);
                        let walked = sent_in_steps(rank, op, algorithm, bytes, (world, Racks::ONE), 5);
                        assert_eq!(counted, walked, "{op} {algorithm} on {world}: {bytes} bytes, rank {rank}");
                    }
                }
            }
        }
    }

    /// The number may be larger than an address.
    #[test]
    fn rounds_of_large_worlds_are_counted_in_64_bits() {
        assert_eq!(bytes_of_a_round(Op::AllReduce, Algorithm::Direct, 1 << 20, 1 << 20), Some(1 << 40));
    }

    /// It would take hours to count the segments of the largest size one by one.
    #[test]
    fn any_size_is_planned_at_once() {
        for bytes in [8 << 30, 1 << 56, u64::MAX] {
            for op in [Op::AllReduce, Op::Reduce, Op::Broadcast, Op::ReduceScatter] {
                assert!(!candidates(op, bytes, Layout::even(16, 4), &CostModel::default()).is_empty(), "{op} of {bytes}");
            }
        }
    }

    #[test]
    fn candidates_are_sorted_and_their_parts_add_up() {
        let plans = candidates(Op::AllReduce, 1 << 20, Layout::even(64, 8), &CostModel::default());
        assert!(plans.is_sorted_by(|a, b| weighed(a.choice, a.seconds) <= weighed(b.choice, b.seconds)));
        assert_eq!(plans[0].choice, chosen(Op::AllReduce, 1 << 20, 64, 8));
        for plan in plans {
            assert!((plan.latency + plan.transfer + plan.reduction - plan.seconds).abs() < 1e-9 * plan.seconds, "{plan:?}");
        }
    }
}
