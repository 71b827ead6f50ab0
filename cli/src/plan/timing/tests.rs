//! Times against closed forms, and what must hold of all of them.

use kolo::plan::{CostModel, Layout, LinkCost, candidates};
use kolo::{Algorithm, Op};

use super::case::Case;
use super::placement::Placement;
use super::programme::Programme;
use super::scenario::{ELEMENT, Links, Method, Scenario, Simulated};
use super::simulate;
use super::world::World;

const LATENCY: f64 = 25e-6;
const PER_BYTE: f64 = 1e-9;
const REDUCE: f64 = 0.25e-9;

/// A model without processor time, so that times are sums of few terms.
fn model() -> CostModel {
    let mut model = CostModel::default();
    model.network = LinkCost::new(LATENCY, 0.0, PER_BYTE);
    model.local = LinkCost::new(1e-6, 0.0, 0.2e-9);
    model.reduce = REDUCE;
    model
}

fn flat(algorithm: Algorithm) -> (Algorithm, Option<Algorithm>) {
    (algorithm, None)
}

/// Returns the algorithms of an operation over messages.
fn algorithms(op: Op, ranks: usize) -> Vec<Algorithm> {
    let found = candidates(op, 1 << 20, Layout::even(ranks, ranks), &model());
    assert!(!found.is_empty(), "{op} of {ranks}");
    found.iter().map(|candidate| candidate.choice.algorithm).collect()
}

fn scenario(ranks: usize, hosts: usize) -> Scenario {
    Scenario::new(Layout::even(ranks, hosts), model())
}

fn run(algorithm: Algorithm, bytes: u64, scenario: &Scenario) -> Simulated {
    simulate(Op::AllReduce, bytes, flat(algorithm), scenario).unwrap()
}

/// Runs all ranks, or `period` of them, in pieces of the given size.
fn run_in_pieces(
    op: Op,
    bytes: u64,
    choice: (Algorithm, Option<Algorithm>),
    scenario: &Scenario,
    period: usize,
    piece: u64,
) -> Simulated {
    let programme = Programme::new(op, bytes / ELEMENT, choice, scenario.layout, &scenario.model).unwrap();
    let placement = Placement::new(scenario.layout, scenario.racks);
    World::new(&programme, scenario, &placement, period, piece, scenario.lateness()[..period].to_vec()).run(Method::Full)
}

fn assert_near(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance * expected, "{what}: {found:.3e} s, expected {expected:.3e} s");
}

/// With pieces as long as messages nothing is forwarded before all of it has come, and the times are
/// those at the head of the generators.
#[test]
fn whole_messages_take_the_closed_forms() {
    for n in [2usize, 4, 8, 16] {
        let bytes = 1u64 << 20;
        let (s, nf) = (bytes as f64, n as f64);
        let log = nf.log2();
        let scenario = scenario(n, n);
        let time = |algorithm| run_in_pieces(Op::AllReduce, bytes, flat(algorithm), &scenario, n, u64::MAX).seconds;
        let (a, b, g) = (LATENCY, PER_BYTE, REDUCE);
        let part = (nf - 1.0) / nf * s;
        assert_near(time(Algorithm::Ring), 2.0 * (nf - 1.0) * a + part * (2.0 * b + g), 1e-9, "ring");
        assert_near(time(Algorithm::RecursiveDoubling), log * (a + s * (b + g)), 1e-9, "recursive doubling");
        assert_near(time(Algorithm::HalvingDoubling), 2.0 * log * a + part * (2.0 * b + g), 1e-9, "halving-doubling");
        if n == 2 {
            assert_near(time(Algorithm::Binomial), 2.0 * (a + s * b) + s * g, 1e-9, "binomial tree");
        }
    }
}

/// A forwarding step overlaps the hops, so streamed rounds take the longer of latency and transfer.
#[test]
fn streams_take_between_the_transfer_and_the_closed_form() {
    for n in [4usize, 8] {
        let (bytes, nf) = (64u64 << 20, n as f64);
        let found = run(Algorithm::Ring, bytes, &scenario(n, n)).seconds;
        let transfer = 2.0 * (nf - 1.0) / nf * bytes as f64 * PER_BYTE;
        let closed = transfer + 2.0 * (nf - 1.0) * LATENCY + (nf - 1.0) / nf * bytes as f64 * REDUCE;
        assert!((transfer..closed).contains(&found), "{n} ranks: {transfer:.3e} <= {found:.3e} < {closed:.3e}");
        // The pipeline of the trees is filled once.
        let tree = run(Algorithm::DoubleTree, bytes, &scenario(n, n)).seconds;
        let segment = 64.0 * 1024.0 * PER_BYTE;
        let s = 2.0 * bytes as f64 * PER_BYTE;
        assert!((s * 0.5..s + 40.0 * (segment + LATENCY)).contains(&tree), "{n} ranks: {tree:.3e} beside {s:.3e}");
    }
}

#[test]
fn small_messages_cost_latency_in_rounds() {
    for n in [2usize, 16, 256, 1024] {
        let found = run(Algorithm::RecursiveDoubling, 8, &scenario(n, n)).seconds;
        assert_near(found, (n as f64).log2() * LATENCY, 0.01, "recursive doubling");
        let barrier = simulate(Op::Barrier, 0, flat(Algorithm::Dissemination), &scenario(n, n)).unwrap();
        assert_near(barrier.seconds, (n as f64).log2() * LATENCY, 0.01, "barrier");
    }
}

#[test]
fn every_host_sends_the_bytes_of_the_schedule() {
    for n in [2usize, 3, 4, 8] {
        let bytes = 840u64 << 10;
        let least = 2.0 * (n as f64 - 1.0) / n as f64 * bytes as f64;
        for algorithm in [Algorithm::Ring, Algorithm::Direct] {
            let found = run(algorithm, bytes, &scenario(n, n)).busiest_bytes;
            assert_near(found, least, 1e-3, &format!("bytes of {algorithm} on {n}"));
        }
    }
    // A host's two ranks each send their slice: together the bytes of one rank alone.
    let choice = (Algorithm::Hierarchical, Some(Algorithm::Ring));
    let found = simulate(Op::AllReduce, 8 << 20, choice, &scenario(8, 4)).unwrap();
    assert_near(found.busiest_bytes, 1.5 * (8 << 20) as f64, 1e-3, "bytes of the hierarchy");
}

#[test]
fn two_ranks_on_one_interface_take_twice_as_long() {
    // Ranks 0 and 1 of the first host send all to ranks of the other.
    let mut doubled = scenario(4, 2);
    doubled.layout.windows = false;
    let alone = run(Algorithm::RecursiveDoubling, 16 << 20, &scenario(2, 2)).seconds;
    let inside = run(Algorithm::RecursiveDoubling, 16 << 20, &scenario(2, 1)).seconds;
    let both = run(Algorithm::RecursiveDoubling, 16 << 20, &doubled).seconds;
    let transfer = (16u64 << 20) as f64 * PER_BYTE;
    assert_near(both - inside, alone + transfer, 0.01, "the round between hosts");
}

#[test]
fn an_oversubscribed_uplink_slows_what_crosses_it() {
    let across = |oversubscription: f64| {
        let scenario = Scenario { racks: 2, oversubscription, ..scenario(8, 8) };
        run_in_pieces(Op::AllReduce, 8 << 20, flat(Algorithm::RecursiveDoubling), &scenario, 8, 64 << 10).seconds
    };
    // One of three rounds crosses the uplinks, and takes as many times as long.
    let round = (8u64 << 20) as f64 * PER_BYTE;
    assert_near(across(4.0) - across(1.0), 3.0 * round, 0.05, "four times oversubscribed");
    // The ring crosses each uplink with one stream, which has room.
    let ring = |oversubscription| run(Algorithm::Ring, 8 << 20, &Scenario { racks: 2, oversubscription, ..scenario(8, 8) });
    assert_near(ring(4.0).seconds, ring(1.0).seconds, 0.01, "ring");
}

#[test]
fn the_time_grows_with_latency_bytes_and_calls() {
    for algorithm in algorithms(Op::AllReduce, 8) {
        let time = |latency: f64, bytes: u64| {
            let mut scenario = scenario(8, 8);
            scenario.model.network.latency = latency;
            run(algorithm, bytes, &scenario).seconds
        };
        for bytes in [8, 64 << 10, 4 << 20] {
            assert!(time(1e-5, bytes) < time(1e-4, bytes), "{algorithm}, {bytes} bytes: latency");
            assert!(time(1e-5, bytes) < time(1e-5, 4 * bytes) + 1e-12, "{algorithm}, {bytes} bytes: size");
        }
        let calls = |calls| run(algorithm, 1 << 20, &Scenario { calls, ..scenario(8, 8) }).seconds;
        assert!(calls(4) <= calls(1) * 1.001, "{algorithm}: calls that follow each other overlap");
    }
}

#[test]
fn a_late_rank_delays_all_and_is_named() {
    for algorithm in algorithms(Op::AllReduce, 16) {
        for rank in [0, 5, 15] {
            let late = Scenario { late: vec![(rank, 1.0)], ..scenario(16, 16) };
            let found = run(algorithm, 64 << 10, &late);
            let punctual = run(algorithm, 64 << 10, &scenario(16, 16));
            // Messages that the late rank has caught up on share its interface.
            assert!(found.seconds > 1.0 && found.seconds <= 1.0 + 2.0 * punctual.seconds, "{algorithm}: {found:?}");
            assert_eq!(found.critical, rank, "{algorithm}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_delays() {
    let time = |seed| run(Algorithm::DoubleTree, 64 << 10, &Scenario { jitter: 1e-3, seed, ..scenario(64, 64) });
    assert_eq!(time(1), time(1));
    assert_ne!(time(1).seconds, time(2).seconds);
    // The latest of 64 ranks is late by about ln 64 means.
    assert!((2e-3..12e-3).contains(&time(1).seconds), "{:?}", time(1));
}

#[test]
fn symmetry_finds_what_all_ranks_do() {
    for (op, algorithm) in [
        (Op::AllReduce, Algorithm::Ring),
        (Op::AllReduce, Algorithm::Direct),
        (Op::AllGather, Algorithm::Ring),
        (Op::ReduceScatter, Algorithm::Direct),
        (Op::Barrier, Algorithm::Dissemination),
    ] {
        for (ranks, hosts, racks) in [(16, 16, 1), (16, 4, 1), (16, 8, 4)] {
            let scenario = Scenario { racks, oversubscription: 2.0, rack_latency: 1e-5, ..scenario(ranks, hosts) };
            let bytes = if op == Op::Barrier { 0 } else { 1 << 20 };
            let period = Placement::new(scenario.layout, racks).period().unwrap();
            let [part, all] =
                [period, ranks].map(|period| run_in_pieces(op, bytes, flat(algorithm), &scenario, period, 64 << 10));
            let what = format!("{op} {algorithm} of {ranks} on {hosts} in {racks}");
            assert_near(part.seconds, all.seconds, 0.01, &what);
            assert_near(part.busiest_bytes.max(1.0), all.busiest_bytes.max(1.0), 1e-9, &what);
            let chosen = simulate(op, bytes, flat(algorithm), &scenario).unwrap();
            assert_eq!(chosen.method, Method::Symmetry, "{what}");
            assert!(part.messages < all.messages, "{what}");
        }
    }
}

#[test]
fn a_continued_line_finds_what_all_messages_take() {
    let scenario = scenario(16, 16);
    let layout = scenario.layout;
    for bytes in [64u64 << 20, 100 << 20] {
        let programme =
            Programme::new(Op::AllReduce, bytes / ELEMENT, flat(Algorithm::DoubleTree), layout, &scenario.model).unwrap();
        let case = Case { programme, scenario: &scenario, placement: Placement::new(layout, 1) };
        let all = case.by_best_method().unwrap();
        assert_eq!(all.method, Method::Full);
        let line = case.extrapolated(1 << 20).unwrap();
        assert_eq!(line.method, Method::Extrapolated);
        assert!(line.messages < all.messages / 2, "{} of {} messages", line.messages, all.messages);
        assert_near(line.seconds, all.seconds, 0.02, "double tree");
        assert_near(line.busiest_bytes, all.busiest_bytes, 0.02, "double tree");
    }
}

#[test]
fn a_hierarchy_adds_the_phases_in_shared_memory() {
    let scenario = scenario(8, 4);
    let choice = (Algorithm::Hierarchical, Some(Algorithm::Ring));
    let bytes = 16u64 << 20;
    let found = simulate(Op::AllReduce, bytes, choice, &scenario).unwrap();
    let CostModel { window_sync, window_per_byte, .. } = scenario.model;
    let windows = 2.0 * window_sync + 4.0 * bytes as f64 * window_per_byte;
    let transfer = 1.5 * bytes as f64 * PER_BYTE;
    assert!(found.seconds > windows + transfer, "{:.3e}, {windows:.3e} and {transfer:.3e}", found.seconds);
    assert_near(found.seconds, windows + transfer, 0.05, "hierarchy");
    // A late rank delays its host, and the host all others.
    let late = Scenario { late: vec![(3, 1.0)], ..scenario };
    let delayed = simulate(Op::AllReduce, bytes, choice, &late).unwrap();
    assert!(delayed.seconds > 1.0 + windows + transfer, "{delayed:?}");
    assert_eq!(delayed.critical, 3);
}

/// The burst passes at once, and the processors take turns.
#[test]
fn a_bucket_hides_small_messages_and_shared_processors_serialise() {
    let single = Scenario { burst: 131_072.0, ..scenario(2, 2) };
    assert_near(run(Algorithm::RecursiveDoubling, 4096, &single).seconds, LATENCY + 4096.0 * REDUCE, 1e-6, "one call");
    let loops = Scenario { calls: 400, ..single };
    let found = run(Algorithm::RecursiveDoubling, 64 << 10, &loops).seconds;
    assert_near(found, 65536.0 * PER_BYTE, 0.02, "many calls");

    let mut busy = scenario(8, 8);
    busy.model.network.overhead = 5e-6;
    let own = run(Algorithm::RecursiveDoubling, 8, &busy).seconds;
    let one = run(Algorithm::RecursiveDoubling, 8, &Scenario { processors: Some(1), ..busy }).seconds;
    // 24 messages are sent and received by one processor.
    assert!(one >= 48.0 * 5e-6 && own < one, "{own:.3e} and {one:.3e}");
}

#[test]
fn every_algorithm_of_every_operation_ends() {
    for ranks in [2, 3, 8, 12] {
        for op in
            [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter]
        {
            for algorithm in algorithms(op, ranks) {
                for bytes in [8, 1 << 16, 3 << 20] {
                    for hosts in [1, 2, ranks] {
                        let found = simulate(op, bytes, flat(algorithm), &scenario(ranks, hosts));
                        let found = found.unwrap_or_else(|| panic!("{op} {algorithm} of {ranks}"));
                        assert!(found.seconds > 0.0 && found.seconds.is_finite(), "{op} {algorithm}: {found:?}");
                    }
                }
            }
        }
    }
}

/// Sixteen thousand ranks take seconds, not hours.
#[test]
fn large_worlds_are_simulated() {
    let scenario = scenario(4096, 4096);
    assert_eq!(run(Algorithm::Ring, 1 << 20, &scenario).method, Method::Symmetry);
    assert_eq!(run(Algorithm::RecursiveDoubling, 8, &scenario).method, Method::Full);
    // All ranks of a ring would send thirty million messages.
    let late = Scenario { late: vec![(7, 1.0)], ..scenario };
    let bound = run(Algorithm::Ring, 1 << 20, &late);
    assert_eq!((bound.method, bound.critical), (Method::Bound, 7));
}

#[test]
fn schedules_go_around_a_slow_link_in_the_order_that_was_measured() {
    let scenario = scenario(4, 4);
    let good = scenario.model.network;
    let slow = LinkCost::new(LATENCY, 0.0, 10.0 * PER_BYTE);
    let cost = |a: usize, b: usize| if a.min(b) == 1 && a.max(b) == 2 { slow } else { good };
    let costs: Vec<Vec<LinkCost>> = (0..4).map(|a| (0..4).map(|b| cost(a, b)).collect()).collect();
    let time = |algorithm, links| run(algorithm, 16 << 20, &Scenario { links, ..scenario.clone() }).seconds;
    let in_order = |order: [usize; 4]| Some(Links { order: order.to_vec(), costs: costs.clone() });
    let even = time(Algorithm::Ring, None);
    let [ranks, around] = [[0, 1, 2, 3], [0, 1, 3, 2]].map(|order| time(Algorithm::Ring, in_order(order)));
    assert!((9.0..11.0).contains(&(ranks / even)), "{ranks} {even}");
    assert!((0.99..1.01).contains(&(around / even)), "{around} {even}");
    // A direct schedule keeps the order of ranks, and uses all links.
    let [ranks, around] = [[0, 1, 2, 3], [0, 1, 3, 2]].map(|order| time(Algorithm::Direct, in_order(order)));
    assert_eq!(ranks, around);
    // Without a slow link the links cost what all have in common.
    let alike = Links { order: vec![0, 1, 2, 3], costs: vec![vec![good; 4]; 4] };
    for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Direct] {
        let ratio = time(algorithm, Some(alike.clone())) / time(algorithm, None);
        assert!((0.99..1.01).contains(&ratio), "{algorithm}: {ratio}");
    }
}
