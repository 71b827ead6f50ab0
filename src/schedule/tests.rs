//! Every generator against the simulator, and the simulator against broken schedules.

use super::algorithm::Algorithm;
use super::compressed::compressed;
use super::generate::steps;
use super::problem::Problem;
use super::simulate::{Case, Fault};
use super::step::{BufferRef, Step};
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
        segment: 2 + seed as usize % 5,
        in_place: seed % 2 == 1,
        capacity,
        seed,
    }
}

const WHOLE: [Op; 10] = [
    Op::AllReduce,
    Op::Broadcast,
    Op::Barrier,
    Op::Reduce,
    Op::AllGather,
    Op::ReduceScatter,
    Op::AllToAll,
    Op::Gather,
    Op::Scatter,
    Op::Send,
];

fn run(case: Case<'_>) {
    if let Err(fault) = case.run() {
        panic!("{fault:?} in {case:?}");
    }
}

/// Whether every case is tried, as in the tests of the whole library.
fn all() -> bool {
    std::env::var_os("KOLO_TEST_ALL").is_some()
}

#[test]
fn every_generator_for_every_world_size_to_130() {
    let mut runs = 0;
    let seeds = if all() { 4 } else { 1 };
    for world in 1..=130 {
        for op in WHOLE {
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
    assert!(runs > 2000 * seeds);
}

#[test]
fn no_elements_few_elements_and_one_segment() {
    for world in 1..=20 {
        for op in WHOLE.into_iter().filter(|&op| op != Op::Barrier && (op != Op::Send || world > 1)) {
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
    let worlds = if all() { &[1024, 1000, 4096][..] } else { &[1000] };
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
        for seed in 0..if all() { 120 } else { 24 } {
            let uneven: Vec<usize> = (0..=world).map(|rank| rank * (rank + seed as usize % 3)).collect();
            for (op, offsets) in
                [(Op::AllReduce, None), (Op::Reduce, None), (Op::ReduceScatter, None), (Op::ReduceScatterV, Some(&uneven[..]))]
            {
                let count = [0, 1, 3, 2 * world + 1, 9 * world + 5][seed as usize % 5];
                let segment = 1 + seed as usize % 7;
                let case = Case { count, offsets, segment, ..case(Algorithm::Direct, op, world, seed) };
                let steps = |rank| compressed(case.problem(rank));
                if let Err(fault) = case.run_steps((0..world).map(|rank| Box::new(steps(rank)) as _).collect()) {
                    panic!("{fault:?} in {case:?}");
                }
                for rank in 0..world {
                    let steps: Vec<Step> = steps(rank).collect();
                    let chunk = case.problem(rank).sends.longest(world).max(count.div_ceil(world)).min(segment);
                    let scratch = steps.iter().map(|step| step.scratch(world)).max().unwrap_or(0);
                    assert!(scratch <= 2 * (2 * world - 1) * chunk, "{scratch} elements of scratch in {case:?}");
                    if op != Op::Reduce {
                        assert_eq!(sent(&steps), sent(&case.schedules()[rank]), "{case:?}, rank {rank}");
                    }
                }
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
    let shifted = |span: super::Span| super::Span { at: if span.at > 0 { span.at - 1 } else { span.at + 1 }, ..span };
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
        let op = WHOLE[mix(seed, 6) as usize % WHOLE.len()];
        let algorithms = Algorithm::for_op(op, world);
        let algorithm = algorithms[mix(seed, 7) as usize % algorithms.len()];
        let case = Case { in_place: false, ..case(algorithm, op, world, seed) };
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
