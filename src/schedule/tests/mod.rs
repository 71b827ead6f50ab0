//! Every generator against the simulator, and the simulator against broken schedules.

mod simulator;

use self::simulator::{Case, Fault};
use crate::schedule::algorithm::Algorithm;
use crate::schedule::compressed::compressed;
use crate::schedule::generate::steps;
use crate::schedule::model::{Choice, Layout};
use crate::schedule::price::price;
use crate::schedule::problem::{Problem, Racks};
use crate::schedule::step::{BufferRef, Span, Step};
use crate::sys::every_case;
use crate::types::{Op, mix};

/// Enough elements that no chunk of an ordinary world is empty, and that chunks differ in length.
fn case(algorithm: Algorithm, op: Op, world: usize, seed: u64) -> Case<'static> {
    let count = match op {
        Op::AllReduce | Op::Broadcast | Op::Reduce | Op::Send => 2 * world + 1,
        Op::Barrier => 0,
        _ => 3,
    };
    let capacity = [1, 2, 7, usize::MAX][seed as usize % 4];
    let root = mix(seed, 1) as usize % world;
    Case {
        algorithm,
        op,
        world,
        root,
        count,
        offsets: None,
        racks: Racks::ONE,
        segment: 2 + seed as usize % 5,
        in_place: seed % 2 == 1,
        capacity,
        seed,
    }
}

/// The operations with algorithms over messages, without those with a count for each rank. A receive is the
/// other end of a send.
fn whole() -> impl Iterator<Item = Op> {
    let is_whole = |op: &Op| !Algorithm::for_op(*op, 2).is_empty() && *op != Op::Recv && !op.has_counts();
    Op::ALL.iter().copied().filter(is_whole)
}

fn run(case: Case<'_>) {
    if let Err(fault) = case.run() {
        panic!("{fault:?} in {case:?}");
    }
}

#[test]
fn every_generator_for_every_world_size() {
    let mut runs = 0;
    let (seeds, worlds): (u64, Vec<usize>) =
        if every_case() { (4, (1..=130).collect()) } else { (1, (1..=33).chain([65]).collect()) };
    for world in worlds {
        for op in whole() {
            if op == Op::Send && world == 1 {
                continue;
            }
            for &algorithm in Algorithm::for_op(op, world) {
                for seed in 0..seeds {
                    run(case(algorithm, op, world, seed + 4 * world as u64));
                    runs += 1;
                }
            }
        }
    }
    println!("{runs} simulated collectives");
    assert!(runs > 500 * seeds, "{runs}");
}

#[test]
fn no_elements_few_elements_and_one_segment() {
    for world in 1..=if every_case() { 20 } else { 11 } {
        for op in whole().filter(|&op| op != Op::Barrier && (op != Op::Send || world > 1)) {
            for &algorithm in Algorithm::for_op(op, world) {
                for count in [0, 1, 2, world - 1, 3 * world] {
                    for segment in [1, 1000] {
                        run(Case { count, segment, ..case(algorithm, op, world, count as u64) });
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_of_differing_sizes() {
    for world in 1..=33 {
        for op in [Op::AllGatherV, Op::ReduceScatterV] {
            for &algorithm in Algorithm::for_op(op, world) {
                for seed in 0..4 {
                    let mut offsets = vec![0];
                    for rank in 0..world as u64 {
                        offsets.push(offsets[rank as usize] + mix(seed, rank) as usize % 5);
                    }
                    run(Case { offsets: Some(&offsets), ..case(algorithm, op, world, seed) });
                }
            }
        }
    }
}

#[test]
fn large_worlds() {
    let worlds = if every_case() { &[1024, 1000, 4096][..] } else { &[300] };
    for &world in worlds {
        for (op, algorithm, count) in [
            (Op::AllReduce, Algorithm::Ring, world + 3),
            (Op::AllReduce, Algorithm::HalvingDoubling, world + 3),
            (Op::AllReduce, Algorithm::Binomial, 300),
            (Op::AllReduce, Algorithm::DoubleTree, 300),
            (Op::Broadcast, Algorithm::Binomial, 300),
            (Op::Broadcast, Algorithm::DoubleTree, 300),
            (Op::Reduce, Algorithm::DoubleTree, 300),
            (Op::Gather, Algorithm::Binomial, 2),
            (Op::Barrier, Algorithm::Dissemination, 0),
        ] {
            run(Case { count, capacity: 2, segment: 8, ..case(algorithm, op, world, world as u64) });
        }
    }
}

/// Each with every length of segment and capacity of links that makes a difference, in place and not.
#[test]
fn compressed_reductions_in_every_world() {
    let sent =
        |steps: &[Step]| -> usize { steps.iter().map(|step| if let Step::Send { src, .. } = step { src.len } else { 0 }).sum() };
    for world in 2..=17 {
        // Large worlds take turns, unless every case is tried.
        let seeds = if every_case() {
            0..120
        } else if world < 10 {
            0..5
        } else {
            world as u64 % 5..world as u64 % 5 + 1
        };
        for seed in seeds {
            let uneven: Vec<usize> = (0..=world).map(|rank| rank * (rank + seed as usize % 3)).collect();
            for (op, offsets) in
                [(Op::AllReduce, None), (Op::Reduce, None), (Op::ReduceScatter, None), (Op::ReduceScatterV, Some(&uneven[..]))]
            {
                let count = [0, 1, 3, 2 * world + 1, 9 * world + 5][seed as usize % 5];
                let (segment, align) = (1 + seed as usize % 7, 1 + seed as usize % 3);
                let case = Case { count, offsets, segment, ..case(Algorithm::Direct, op, world, seed) };
                let steps = |rank| compressed(case.problem(rank), align);
                if let Err(fault) = case.run_steps((0..world).map(|rank| Box::new(steps(rank)) as _).collect()) {
                    panic!("{fault:?} in {case:?}");
                }
                for rank in 0..world {
                    let steps: Vec<Step> = steps(rank).collect();
                    let chunk = case.problem(rank).sends.longest(world).max(count.div_ceil(world)).min(segment);
                    let scratch = steps.iter().map(|step| step.scratch(world)).max().unwrap_or(0);
                    assert!(
                        scratch <= 2 * (2 * world - 1) * chunk.next_multiple_of(align),
                        "{scratch} elements of scratch in {case:?}"
                    );
                    if op != Op::Reduce {
                        assert_eq!(sent(&steps), sent(&case.schedules()[rank]), "{case:?}, rank {rank}");
                    }
                }
            }
        }
    }
}

const TWO_LEVEL: [Op; 7] =
    [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::AllGatherV, Op::ReduceScatter, Op::ReduceScatterV];

/// Returns the first rank of each rack, and the number of ranks: racks of one size, or of any.
fn racks(world: usize, count: usize, seed: u64) -> Vec<usize> {
    if seed.is_multiple_of(2) && world.is_multiple_of(count) {
        return (0..=count).map(|rack| rack * world / count).collect();
    }
    let mut starts: Vec<usize> = (1..world).collect();
    while starts.len() >= count {
        starts.remove(mix(seed, starts.len() as u64) as usize % starts.len());
    }
    [0].into_iter().chain(starts).chain([world]).collect()
}

#[test]
fn two_levels_in_racks_of_any_sizes() {
    let mut runs = 0;
    for world in 3..=if every_case() { 24 } else { 18 } {
        for count in 2..=world.min(7) {
            for seed in 0..if every_case() { 40 } else { 2 } {
                let starts = racks(world, count, seed);
                let is_even = starts.windows(2).all(|ends| ends[1] - ends[0] == starts[1]);
                let uneven: Vec<usize> = (0..=world).map(|rank| rank * (rank + seed as usize % 3)).collect();
                for op in TWO_LEVEL.into_iter().filter(|&op| Algorithm::has_two_levels(op, is_even)) {
                    let offsets = matches!(op, Op::AllGatherV | Op::ReduceScatterV).then_some(&uneven[..]);
                    let seed = mix(seed, world as u64);
                    let case = Case { racks: Racks::Listed(&starts), offsets, ..case(Algorithm::TwoLevel, op, world, seed) };
                    run(case);
                    run(Case { count: seed as usize % 4, segment: 1000, ..case });
                    run(Case { count: 40 + seed as usize % 4, segment: 1, ..case });
                    runs += 3;
                }
            }
        }
    }
    println!("{runs} simulated collectives");
}

/// Returns the most elements that cross the uplink of any rack one way.
fn crossing(case: &Case<'_>, racks: usize) -> usize {
    let rack_of = |rank| case.racks.of(case.world, rank);
    let mut crossed = vec![[0; 2]; racks];
    for (rank, steps) in case.schedules().into_iter().enumerate() {
        for step in steps {
            if let Step::Send { to, .. } | Step::RecvSend { to, .. } | Step::RecvReduceSend { to, .. } = step
                && rack_of(to) != rack_of(rank)
            {
                crossed[rack_of(rank)][0] += step.len();
                crossed[rack_of(to)][1] += step.len();
            }
        }
    }
    crossed.into_iter().flatten().max().unwrap_or(0)
}

#[test]
fn two_levels_cross_uplinks_with_few_bytes() {
    for (world, count) in [(4, 2), (8, 2), (9, 3), (12, 3), (12, 4), (24, 2)] {
        for seed in 0..6 {
            let starts = racks(world, count, seed);
            let sizes = || starts.windows(2).map(|ends| ends[1] - ends[0]);
            let is_even = sizes().max() == sizes().min();
            for op in TWO_LEVEL.into_iter().filter(|&op| Algorithm::has_two_levels(op, is_even)) {
                let block = 3 * 1001;
                let elements = if matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce) { world * block } else { block };
                let all = (world * block) as f64;
                let racks = Racks::Listed(&starts);
                let case = Case { count: elements, segment: 500, racks, ..case(Algorithm::TwoLevel, op, world, seed) };
                let least = match op {
                    Op::AllReduce => 2.0 * (count as f64 - 1.0) / count as f64 * all,
                    // A tree between racks: the uplink of the root's rack carries the data once for each
                    // level. A ring would carry it once.
                    Op::Broadcast | Op::Reduce => f64::from(count.next_power_of_two().ilog2()) * all,
                    _ => all - sizes().min().unwrap_or(0) as f64 * block as f64,
                };
                let found = crossing(&case, count) as f64;
                assert!((0.99..1.05).contains(&(found / least)), "{op}, {world} ranks in {starts:?}: {found} of {least}");
            }
        }
    }
}

/// The price has the bytes of the busiest uplink. Where a schedule follows the ranks and not the racks,
/// and in trees, the price has an upper bound.
#[test]
fn prices_have_the_bytes_of_uplinks() {
    let bytes = 48 * 1024;
    for (ranks, racks) in [(4, 2), (8, 2), (8, 4), (12, 2), (12, 3), (16, 4), (24, 4)] {
        let layout = Layout::even(ranks, ranks).in_racks(racks);
        for op in whole().filter(|op| !matches!(op, Op::Barrier | Op::Send)) {
            for algorithm in Algorithm::for_op(op, ranks).iter().copied().chain([Algorithm::TwoLevel]) {
                if algorithm == Algorithm::TwoLevel && !Algorithm::has_two_levels(op, true) {
                    continue;
                }
                let has_blocks = !matches!(op, Op::AllReduce | Op::Broadcast | Op::Reduce);
                let count = if has_blocks { bytes / ranks } else { bytes };
                let racks_of = Racks::Even(racks);
                let case = Case { count, root: 0, segment: 512, racks: racks_of, ..case(algorithm, op, ranks, 0) };
                let found = crossing(&case, racks) as f64;
                let priced = price(op, bytes as u64, layout, Choice { algorithm, between: None }).uplink_bytes;
                let ratio = priced / found;
                let is_exact = matches!(algorithm, Algorithm::Ring | Algorithm::Direct | Algorithm::TwoLevel);
                let bounds = if is_exact { 0.95..1.05 } else { 0.8..3.5 };
                assert!(bounds.contains(&ratio), "{op} {algorithm}, {ranks} ranks in {racks} racks: {priced} for {found}");
            }
        }
    }
}

/// Breaks one step of one rank in a way that cannot be harmless.
fn mutate(case: &Case<'_>, schedules: &mut [Vec<Step>], seed: u64) -> Option<String> {
    let random = |what: u64, below: usize| mix(mix(seed, what), 77) as usize % below;
    let rank = random(0, case.world);
    if schedules[rank].is_empty() {
        return None;
    }
    let at = random(1, schedules[rank].len());
    let step = schedules[rank][at];
    let is_message = !matches!(step, Step::Copy { .. } | Step::Convert { .. } | Step::Fold { .. });
    let other = |peer: usize| (peer + 1 + random(2, case.world - 1)) % case.world;
    let shifted = |span: Span| Span { at: if span.at > 0 { span.at - 1 } else { span.at + 1 }, ..span };
    let mut broken = step;
    match (random(3, 7), &mut broken) {
        (0, _) if is_message => drop(schedules[rank].remove(at)),
        (1, _) if is_message => schedules[rank].insert(at, step),
        (2, Step::Send { to, .. } | Step::RecvSend { to, .. } | Step::RecvReduceSend { to, .. }) => *to = other(*to),
        (3, Step::Recv { from, .. } | Step::RecvReduce { from, .. } | Step::RecvReduceSend { from, .. }) => *from = other(*from),
        (4, Step::Send { src, .. }) if src.len > 0 => *src = shifted(*src),
        (4, Step::RecvReduce { own, .. } | Step::RecvReduceSend { own, .. }) => *own = shifted(*own),
        (4, Step::Recv { dst, .. }) if dst.len > 0 && dst.place == BufferRef::Output => *dst = shifted(*dst),
        (5, Step::RecvReduce { finish, .. } | Step::RecvReduceSend { finish, .. }) => *finish = !*finish,
        (6, &mut Step::RecvReduce { from, dst, .. }) => broken = Step::Recv { from, dst },
        (6, &mut Step::RecvReduceSend { from, dst, to, .. }) => broken = Step::RecvSend { from, dst, to },
        (6, &mut Step::Recv { from, dst }) if dst.len > 0 => {
            broken = Step::RecvReduce { from, own: BufferRef::Input.span(0..dst.len), dst, finish: false }
        }
        _ => return None,
    }
    if broken != step {
        schedules[rank][at] = broken;
    }
    Some(format!("rank {rank}, step {at}: {step:?} became {broken:?}"))
}

#[test]
fn broken_schedules_are_caught() {
    let mut kinds = std::collections::BTreeMap::new();
    let mut mutants = 0;
    for seed in 0u64.. {
        if mutants == 2000 {
            break;
        }
        let world = 2 + mix(seed, 5) as usize % 12;
        let op = whole().nth(mix(seed, 6) as usize % whole().count()).unwrap();
        let algorithms = Algorithm::for_op(op, world);
        let racks = 2 + mix(seed, 8) as usize % 3;
        let has_two_levels = racks < world && Algorithm::has_two_levels(op, world.is_multiple_of(racks));
        let algorithm = match mix(seed, 7) as usize % (algorithms.len() + usize::from(has_two_levels)) {
            at if at == algorithms.len() => Algorithm::TwoLevel,
            at => algorithms[at],
        };
        let case = Case { in_place: false, racks: Racks::Even(racks), ..case(algorithm, op, world, seed) };
        let mut schedules = case.schedules();
        let Some(mutation) = mutate(&case, &mut schedules, seed) else { continue };
        mutants += 1;
        let fault = case.run_steps(schedules.into_iter().map(|steps| Box::new(steps.into_iter()) as _).collect());
        let kind = match fault {
            Ok(()) => panic!("the simulation misses the fault in {case:?}, {mutation}"),
            Err(Fault::Deadlock { .. }) => "deadlock",
            Err(Fault::Length { .. }) => "length",
            Err(Fault::Leftover { .. }) => "leftover",
            Err(Fault::Bounds { .. }) => "bounds",
            Err(Fault::Wrong { .. }) => "wrong",
        };
        *kinds.entry(kind).or_insert(0) += 1;
    }
    println!("{mutants} mutants, caught as {kinds:?}");
}

#[test]
fn scratch_stays_bounded() {
    for world in 2..40 {
        for (op, algorithm) in
            [(Op::Reduce, Algorithm::Ring), (Op::Reduce, Algorithm::Binomial), (Op::Reduce, Algorithm::DoubleTree)]
        {
            for rank in 0..world {
                let case = Case { count: 100_000, segment: 1000, ..case(algorithm, op, world, 0) };
                let scratch = steps(algorithm, Problem { rank, ..case.problem(rank) }).map(|step| step.scratch(world)).max();
                assert!(scratch.unwrap_or(0) <= 4000, "{algorithm} {op} of {world}: {scratch:?}");
            }
        }
    }
}
