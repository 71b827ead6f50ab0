//! Random operations on every transport, compared with a plain sequential reference.

use crate::common;
use crate::common::{Case, check, random, run};
use kolo::{Algorithm, Communicator, DType, ReduceOp, Transport};
use proptest::prelude::*;

/// Runs random operations on one communicator.
fn rounds(comm: &Communicator, seed: u64, rounds: u64, most: usize) {
    for round in 0..rounds {
        let case = Case::random(random(seed, round), comm.world_size(), most);
        check(comm, case).unwrap_or_else(|error| panic!("{error} in {case:?}"));
    }
}

fn config() -> ProptestConfig {
    let cases = if common::all() { 24 } else { 10 };
    ProptestConfig { cases, max_shrink_iters: 0, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn inside_one_process(seed: u64, world in 1usize..=9) {
        std::thread::scope(|scope| {
            for comm in Communicator::in_process(world).unwrap() {
                scope.spawn(move || rounds(&comm, seed, 12, 40_000));
            }
        });
    }

    #[test]
    fn in_windows_of_shared_memory(seed: u64, world in 1usize..=9) {
        run(world, |_, builder| builder, |comm| rounds(&comm, seed, 12, 40_000));
    }

    #[test]
    fn over_links_of_shared_memory(seed: u64, world in 2usize..=9) {
        // The forced algorithm makes operations exchange messages. Operations without it choose
        // another one.
        let algorithm = Algorithm::ALL[random(seed, 0) as usize % 6];
        run(world, |_, builder| builder.algorithm(algorithm), |comm| rounds(&comm, seed, 10, 20_000));
    }

    #[test]
    fn over_tcp(seed: u64, world in 2usize..=9, sockets in 1usize..=3) {
        let algorithm = Algorithm::ALL[random(seed, 0) as usize % 6];
        let forced = random(seed, 1).is_multiple_of(2);
        let options = |_, builder: kolo::Builder| {
            let builder = builder.transport(Transport::Tcp).sockets(sockets);
            if forced { builder.algorithm(algorithm) } else { builder }
        };
        run(world, options, |comm| rounds(&comm, seed, 10, 20_000));
    }

    #[test]
    fn across_several_hosts(seed: u64, world in 2usize..=9, hosts in 1usize..=4) {
        // Hosts of different sizes, with random ranks on each.
        let options = |rank, builder: kolo::Builder| builder.host(format!("host{}", random(seed, 100 + rank as u64) as usize % hosts));
        let forced = random(seed, 1).is_multiple_of(2);
        let options = |rank, builder| {
            let builder = options(rank, builder);
            if forced { builder.algorithm(Algorithm::Hierarchical) } else { builder }
        };
        run(world, options, |comm| rounds(&comm, seed, 10, 20_000));
    }
}

/// Puts each rank on a host of its own, or two ranks on each, and deals the hosts to racks in turns.
fn in_racks(racks: usize, per_host: usize) -> impl Fn(usize, kolo::Builder) -> kolo::Builder + Sync {
    move |rank, builder| {
        let host = rank / per_host;
        builder
            .host(format!("host{host}"))
            .topology(format!("pod/rack{}", host % racks))
            .cost_model(kolo::plan::CostModel::default())
    }
}

/// These counts and a large one: each operation has the large one in every third layout or world, unless
/// every case is tried.
fn counts<const N: usize>(others: [usize; N], turn: usize) -> impl Iterator<Item = usize> {
    others.into_iter().chain((common::all() || turn.is_multiple_of(3)).then_some(70_001))
}

/// Out of place and in place; the largest counts in turns, unless every case is tried.
fn forms(round: usize, count: usize) -> impl Iterator<Item = bool> {
    let in_turns = count > 10_000 && !common::all();
    [false, true].into_iter().filter(move |&in_place| !in_turns || in_place == round.is_multiple_of(2))
}

/// Every operation between hosts whose neighbours in the order of ranks are in different racks, by the
/// algorithm of two levels where it exists, and by others.
#[test]
fn every_operation_across_racks() {
    let layouts = [(4, 1, 2), (5, 1, 2), (8, 2, 2), (6, 1, 3), (8, 1, 3), (7, 2, 2)];
    let others = [None, Some(Algorithm::Ring), Some(Algorithm::RecursiveDoubling)];
    for (layout, (world, per_host, racks)) in layouts.into_iter().enumerate() {
        let others = if common::all() { &others[..] } else { std::slice::from_ref(&others[layout % others.len()]) };
        for algorithm in [Some(Algorithm::TwoLevel)].into_iter().chain(others.iter().copied()) {
            let place = in_racks(racks, per_host);
            let options = |rank: usize, builder: kolo::Builder| {
                let builder = place(rank, builder);
                algorithm.into_iter().fold(builder, kolo::Builder::algorithm)
            };
            run(world, options, |comm| {
                for (round, op) in common::ops().into_iter().enumerate() {
                    for count in counts([0, 1, 1000], round + layout) {
                        for in_place in forms(round, count) {
                            let seed = random(round as u64, count as u64);
                            let root = seed as usize % world;
                            let case = Case { op, dtype: DType::F32, redop: ReduceOp::Average, count, root, in_place, seed };
                            let what =
                                format!("{case:?} on {world} ranks, {per_host} a host, in {racks} racks, by {algorithm:?}");
                            check(&comm, case).unwrap_or_else(|error| panic!("{error} in {what}"));
                        }
                    }
                }
            });
        }
    }
}

/// Ranks of a split have the racks of their hosts, and hosts without a path keep the order of ranks.
#[test]
fn two_levels_are_chosen_where_racks_are_known() {
    let chosen = |comm: &Communicator| comm.algorithm(kolo::Op::AllReduce, 64 << 20);
    run(8, in_racks(2, 2), |comm| {
        assert_eq!(chosen(&comm).between, Some(Algorithm::TwoLevel));
        // One rank of each host: racks of two hosts.
        let rail = comm.split(comm.rank() % 2, comm.rank()).unwrap();
        assert_eq!(chosen(&rail).algorithm, Algorithm::TwoLevel);
        rounds(&rail, 7, 10, 20_000);
        // The hosts of one rack.
        let rack = comm.split(comm.rank() / 2 % 2, comm.rank()).unwrap();
        assert_ne!(chosen(&rack).between, Some(Algorithm::TwoLevel));
        rounds(&rack, 8, 10, 20_000);
    });
    let some = |rank: usize, builder: kolo::Builder| {
        let builder = builder.host(format!("host{rank}"));
        if rank == 3 { builder } else { builder.topology(format!("rack{}", rank % 2)) }
    };
    run(4, some, |comm| assert_ne!(chosen(&comm).algorithm, Algorithm::TwoLevel));
}

/// Every algorithm over messages, for every operation that has it, in worlds of several sizes.
#[test]
fn every_algorithm_of_every_operation() {
    for world in if common::all() { vec![2, 3, 4, 5, 6, 7, 8, 9] } else { vec![2, 4, 7] } {
        for algorithm in Algorithm::ALL {
            run(
                world,
                |_, builder| builder.algorithm(*algorithm),
                |comm| {
                    for (round, op) in common::ops().into_iter().enumerate() {
                        for count in counts([0, 1, world - 1, 1000], round + world) {
                            let seed = random(round as u64, count as u64);
                            let (root, in_place) = (seed as usize % world, seed.is_multiple_of(3));
                            let case = Case { op, dtype: DType::F32, redop: ReduceOp::Average, count, root, in_place, seed };
                            check(&comm, case).unwrap_or_else(|error| panic!("{error} in {case:?}"));
                        }
                    }
                },
            );
        }
    }
}

/// Every operation between hosts with equal and with different numbers of ranks, whose ranks follow
/// each other or do not.
#[test]
fn every_operation_across_hosts() {
    let layouts = [&[0usize, 0, 1, 1][..], &[0, 1, 0, 1, 0, 1], &[0, 0, 0, 1, 1, 1], &[1, 0, 0, 0, 2, 2], &[0, 1, 1, 1, 1]];
    for (layout, hosts) in layouts.into_iter().enumerate() {
        let options =
            |rank: usize, builder: kolo::Builder| builder.host(format!("host{}", hosts[rank])).algorithm(Algorithm::Hierarchical);
        let world = hosts.len();
        run(world, options, |comm| {
            for (round, op) in common::ops().into_iter().enumerate() {
                for count in counts([0, 1, 5, 1000], round + layout) {
                    for in_place in forms(round, count) {
                        let seed = random(round as u64, count as u64);
                        let root = seed as usize % world;
                        let case = Case { op, dtype: DType::F32, redop: ReduceOp::Average, count, root, in_place, seed };
                        check(&comm, case).unwrap_or_else(|error| panic!("{error} in {case:?} on {hosts:?}"));
                    }
                }
            }
        });
    }
}

/// The bits do not depend on the transport, the layout or the algorithm.
#[test]
fn reproducible_reductions_have_the_same_bits_everywhere() {
    let world = 6;
    let bits = |options: &(dyn Fn(usize, kolo::Builder) -> kolo::Builder + Sync)| {
        let results = std::sync::Mutex::new(Vec::new());
        run(
            world,
            |rank, builder| options(rank, builder).reproducible(true),
            |comm| {
                let mut mine = Vec::new();
                for (round, count) in [1usize, 33, 1000, 50_000].into_iter().enumerate() {
                    let word = |i: usize| random(random(round as u64, comm.rank() as u64), i as u64);
                    let mut floats: Vec<f32> = (0..count).map(|i| (word(i) % 1_000_000) as f32 * 1e-3 - 333.3).collect();
                    let mut halves: Vec<kolo::f16> = floats.iter().map(|&x| kolo::f16::from_f32(x)).collect();
                    comm.all_reduce(&mut floats, ReduceOp::Sum).unwrap();
                    comm.all_reduce(&mut halves, ReduceOp::Average).unwrap();
                    mine.extend(floats.iter().map(|x| x.to_bits()).chain(halves.iter().map(|x| x.to_bits().into())));
                    let mut floats: Vec<f32> = (0..count * world).map(|i| (word(i) % 1_000_000) as f32 * 1e-3 - 333.3).collect();
                    comm.reduce(&mut floats, ReduceOp::Sum, 2).unwrap();
                    let mut part = vec![0f32; count];
                    comm.reduce_scatter(&floats, &mut part, ReduceOp::Sum).unwrap();
                    if comm.rank() == 2 {
                        mine.extend(floats.iter().chain(&part).map(|x| x.to_bits()));
                    }
                }
                if comm.rank() == 2 {
                    results.lock().unwrap().push(mine);
                }
            },
        );
        results.into_inner().unwrap().remove(0)
    };
    let windows = bits(&|_, builder| builder);
    assert!(windows.len() > 100_000);
    assert!(windows == bits(&|_, builder| builder.transport(Transport::Tcp)), "TCP");
    assert!(windows == bits(&|rank, builder| builder.host(format!("host{}", rank % 2))), "two hosts");
    assert!(windows == bits(&|_, builder| builder.algorithm(Algorithm::Ring)), "a forced algorithm");
    assert!(windows == bits(&in_racks(2, 1)), "two racks");
}

#[test]
fn nan_and_infinity_spread_as_documented() {
    run(
        3,
        |_, builder| builder,
        |comm| {
            let me = comm.rank();
            for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
                let mut buf = [1.0, if me == 1 { f32::NAN } else { 2.0 }, if me == 2 { f32::INFINITY } else { 0.0 }];
                comm.all_reduce(&mut buf, op).unwrap();
                assert!(buf[1].is_nan() && !buf[0].is_nan(), "{op}: {buf:?}");
                assert_eq!(buf[2], if op == ReduceOp::Min { 0.0 } else { f32::INFINITY }, "{op}");
            }
        },
    );
}

#[test]
fn a_zero_length_operation_takes_a_sequence_number() {
    run(
        2,
        |_, builder| builder,
        |comm| {
            comm.all_reduce::<f32>(&mut [], ReduceOp::Sum).unwrap();
            let mut word = [1u64];
            comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
            assert_eq!(word, [2]);
            // Only one rank makes this call. The next call shows that the other rank's call with its
            // sequence number is another one.
            if comm.rank() == 0 {
                comm.broadcast::<u8>(&mut [], 0).unwrap();
            }
            match comm.all_reduce(&mut word, ReduceOp::Sum) {
                Err(kolo::Error::Mismatch { mine, theirs, .. }) => {
                    assert_eq!(mine.seq(), theirs.seq());
                    assert_ne!(mine.op(), theirs.op());
                }
                Err(kolo::Error::Peer { cause: kolo::Cause::Revoked, .. }) => {}
                other => panic!("{other:?}"),
            }
            assert_eq!(word, [2]);
        },
    );
}
