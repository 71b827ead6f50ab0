//! Messages of 16 bits between hosts: the bits of every result, which operations they apply to, and
//! their errors beside those of other ways to send 16 bits.

use std::sync::Mutex;

use crate::common;
use crate::common::{Case, all, check, random, run};
use kolo::ddp::Reducer;
use kolo::{Algorithm, Builder, Communicator, DType, Op, ReduceOp, Transport, WireDType, bf16, f16};

const HALVES: [WireDType; 2] = [WireDType::BF16, WireDType::F16];

/// Rounds to the type of messages.
fn round(wire: WireDType, x: f32) -> f32 {
    match wire {
        WireDType::F16 => f16::from_f32(x).to_f32(),
        WireDType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// A number of either sign between 2^-8 and 2^8, whose sums depend on the order.
fn number(seed: u64, rank: usize, i: usize) -> f32 {
    let word = random(random(seed, rank as u64), i as u64);
    let sign = if word & 1 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + (word >> 8 & 0xff_ffff) as f32 / (1 << 24) as f32) * 2f32.powi((word >> 40) as i32 % 16 - 8)
}

/// What element `i` of a compressed reduction is: each host's sum in f32, rounded; their sum in f32 in the
/// order of hosts, divided for an average; rounded.
fn expected(hosts: &[usize], wire: WireDType, redop: ReduceOp, number: impl Fn(usize) -> f32) -> f32 {
    let is_first = |&rank: &usize| !hosts[..rank].contains(&hosts[rank]);
    let of_host = |host: usize| {
        let ranks = (0..hosts.len()).filter(|&rank| hosts[rank] == host);
        round(wire, ranks.map(&number).reduce(|sum, part| sum + part).unwrap())
    };
    let sum = (0..hosts.len()).filter(is_first).map(|rank| of_host(hosts[rank])).reduce(|sum, part| sum + part).unwrap();
    round(wire, if redop == ReduceOp::Average { sum / hosts.len() as f32 } else { sum })
}

/// Runs `body` on ranks on these hosts.
fn on_hosts(hosts: &[usize], options: impl Fn(usize, Builder) -> Builder + Sync, body: impl Fn(Communicator) + Sync) {
    run(hosts.len(), |rank, builder| options(rank, builder.host(format!("host{}", hosts[rank]))), body);
}

fn assert_bits(got: &[f32], expected: impl Fn(usize) -> f32, what: &str) {
    for (i, got) in got.iter().enumerate() {
        let expected = expected(i);
        assert_eq!(got.to_bits(), expected.to_bits(), "{got:e} instead of {expected:e} at {i} of {what}");
    }
}

/// As [`assert_bits`], without a look at each element.
fn assert_same_bits(got: &[f32], expected: &[f32], what: &str) {
    let bytes = |numbers: &[f32]| {
        // SAFETY: the bytes are those of the slice, and live as long.
        unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) }
    };
    assert_eq!(got.len(), expected.len(), "{what}");
    if bytes(got) != bytes(expected) {
        assert_bits(got, |i| expected[i], what);
    }
}

/// The numbers repeat after this many: a prime number.
const PERIOD: usize = 1021;

/// Returns numbers that repeat, from one of them on.
fn repeated(period: &[f32], from: usize, len: usize) -> Vec<f32> {
    let from = from % period.len();
    let mut numbers = period.repeat((from + len).div_ceil(period.len()));
    numbers.truncate(from + len);
    numbers.split_off(from)
}

/// Every form of the reductions, on one communicator.
fn check_reductions(comm: &Communicator, hosts: &[usize], wire: WireDType, counts: &[usize]) {
    let (me, world) = (comm.rank(), comm.world_size());
    for (seed, &count) in counts.iter().enumerate() {
        let redop = if seed % 2 == 0 { ReduceOp::Sum } else { ReduceOp::Average };
        let seed = seed as u64;
        let number = |rank: usize, i: usize| number(seed, rank, i);
        let period: Vec<f32> = (0..PERIOD).map(|i| expected(hosts, wire, redop, |rank| number(rank, i))).collect();
        let right = |from: usize, len: usize| repeated(&period, from, len);
        let mine: Vec<f32> = (0..PERIOD).map(|i| number(me, i)).collect();
        let mine = |len: usize| repeated(&mine, 0, len);
        let what = |form: &str| format!("{form} {redop} of {count} as {wire} on {hosts:?}");

        let mut buf = mine(count);
        comm.all_reduce(&mut buf, redop).unwrap();
        assert_same_bits(&buf, &right(0, count), &what("all_reduce in place"));
        let (send, mut recv) = (mine(count), vec![f32::NAN; count]);
        comm.all_reduce_into(&send, &mut recv, redop).unwrap();
        assert_same_bits(&recv, &right(0, recv.len()), &what("all_reduce"));
        assert_same_bits(&send, &mine(count), "the send buffer of all_reduce");

        let root = count % world;
        let mut buf = mine(count);
        comm.reduce(&mut buf, redop, root).unwrap();
        if me == root {
            assert_same_bits(&buf, &right(0, count), &what("reduce in place"));
        }
        let mut recv = vec![f32::NAN; if me == root { count } else { 0 }];
        comm.reduce_into(&send, (me == root).then_some(&mut recv[..]), redop, root).unwrap();
        assert_same_bits(&recv, &right(0, recv.len()), &what("reduce"));
        assert_same_bits(&send, &mine(count), "the send buffer of reduce");

        let mut send = mine(count * world);
        let mut recv = vec![f32::NAN; count];
        comm.reduce_scatter(&send, &mut recv, redop).unwrap();
        assert_same_bits(&recv, &right(me * count, count), &what("reduce_scatter"));
        comm.reduce_scatter_in_place(&mut send, redop).unwrap();
        assert_same_bits(&send[me * count..(me + 1) * count], &right(me * count, count), &what("reduce_scatter in place"));

        // One rank has nothing, and the others have blocks of different lengths.
        let counts: Vec<usize> = (0..world).map(|rank| if rank == 1 { 0 } else { count + 7 * rank }).collect();
        let start: usize = counts[..me].iter().sum();
        let mut send = mine(counts.iter().sum());
        let mut recv = vec![f32::NAN; counts[me]];
        comm.reduce_scatter_v(&send, &mut recv, &counts, redop).unwrap();
        assert_same_bits(&recv, &right(start, recv.len()), &what("reduce_scatter_v"));
        comm.reduce_scatter_v_in_place(&mut send, &counts, redop).unwrap();
        assert_same_bits(&send[start..start + counts[me]], &right(start, counts[me]), &what("reduce_scatter_v in place"));
    }
}

#[test]
fn every_result_is_rounded_once_and_alike_on_flat_layouts() {
    for world in if all() { vec![2, 3, 4, 5, 6, 7, 8, 9] } else { vec![2, 3, 6, 8] } {
        let hosts: Vec<usize> = (0..world).collect();
        for wire in HALVES {
            let options = |_, builder: Builder| builder.wire_dtype(wire);
            on_hosts(&hosts, options, |comm| check_reductions(&comm, &hosts, wire, &[4096, 5003]));
        }
    }
    // Several segments, of which the last is not full.
    let (hosts, wire) = ([0, 1], WireDType::BF16);
    on_hosts(&hosts, |_, builder| builder.wire_dtype(wire), |comm| check_reductions(&comm, &hosts, wire, &[3_000_001]));
}

#[test]
fn ranks_of_a_host_are_summed_exactly_first() {
    let layouts = [&[0usize, 0, 1, 1][..], &[0, 1, 0, 1, 0, 1], &[0, 0, 0, 1, 1, 1], &[1, 0, 0, 0, 2, 2], &[0, 1, 1, 1, 1]];
    let some = if all() { &layouts[..] } else { &layouts[1..4] };
    for (number, &hosts) in some.iter().enumerate() {
        let wire = HALVES[number % 2];
        // What a user forces makes no difference.
        let options = |_, builder: Builder| match number {
            0 => builder.wire_dtype(wire).algorithm(Algorithm::Ring),
            _ => builder.wire_dtype(wire),
        };
        on_hosts(hosts, options, |comm| check_reductions(&comm, hosts, wire, &[4096, 70_001]));
    }
}

/// Where the ranks of a host share no memory, each counts as a host.
#[test]
fn ranks_that_share_no_memory_exchange_16_bits_as_well() {
    let (hosts, wire) = ([0, 0, 1], WireDType::BF16);
    let options = |_, builder: Builder| builder.wire_dtype(wire).transport(Transport::Tcp);
    on_hosts(&hosts, options, |comm| {
        // Over TCP, the layout has as many hosts as there are names.
        assert_eq!(comm.host_count(), 2);
        check_reductions(&comm, &[0, 1, 2], wire, &[5003]);
    });
}

/// Everything but large sums and averages of f32 between hosts.
#[test]
fn all_else_is_exact() {
    let is_exact = |comm: &Communicator, what: &str, redop: ReduceOp, count: usize| {
        let hosts: Vec<usize> = (0..comm.world_size()).collect();
        // Sums of whole numbers of 20 bits are exact in f32 in any order, and in bf16 in none.
        let whole = |rank: usize, i: usize| (1_000_000 + random(rank as u64, i as u64) % 9) as f32;
        let mut buf: Vec<f32> = (0..count).map(|i| whole(comm.rank(), i)).collect();
        comm.all_reduce(&mut buf, redop).unwrap();
        let exact = |i: usize| match redop {
            ReduceOp::Max => hosts.iter().map(|&rank| whole(rank, i)).reduce(f32::max).unwrap(),
            ReduceOp::Min => hosts.iter().map(|&rank| whole(rank, i)).reduce(f32::min).unwrap(),
            _ => hosts.iter().map(|&rank| whole(rank, i)).sum(),
        };
        assert_bits(&buf, exact, what);
    };
    let apart = [0, 1, 2];
    on_hosts(
        &apart,
        |_, builder| builder.wire_dtype(WireDType::BF16),
        |comm| {
            for redop in [ReduceOp::Max, ReduceOp::Min] {
                is_exact(&comm, "extremes", redop, 9000);
            }
            is_exact(&comm, "less than 16 KiB", ReduceOp::Sum, 4095);
            for (round, dtype) in DType::ALL.iter().enumerate() {
                for op in common::ops() {
                    let is_compressed = *dtype == DType::F32 && op.reduces();
                    let redop = if is_compressed { ReduceOp::Max } else { ReduceOp::Sum };
                    if redop.applies_to(*dtype) {
                        let case =
                            Case { op, dtype: *dtype, redop, count: 5000, root: 1, in_place: round % 2 == 0, seed: round as u64 };
                        check(&comm, case).unwrap_or_else(|error| panic!("{error} in {case:?}"));
                    }
                }
            }
            assert_eq!(comm.wire_dtype(), WireDType::BF16);
            let (direct, plain) = (
                comm.algorithm_for(Op::AllReduce, DType::F32, Some(ReduceOp::Sum), 1 << 20),
                comm.algorithm(Op::AllReduce, 1 << 20),
            );
            assert_eq!(direct.algorithm, Algorithm::Direct);
            assert_eq!(comm.algorithm_for(Op::AllReduce, DType::F32, Some(ReduceOp::Max), 1 << 20), plain);
        },
    );
    let together = |_, builder: Builder| builder.wire_dtype(WireDType::BF16).host("one".to_owned());
    run(3, together, |comm| is_exact(&comm, "inside a host", ReduceOp::Sum, 9000));
    let reproducible = |_, builder: Builder| builder.wire_dtype(WireDType::F16).reproducible(true);
    on_hosts(&apart, reproducible, |comm| {
        assert_eq!(comm.wire_dtype(), WireDType::F32);
        is_exact(&comm, "reproducible", ReduceOp::Sum, 9000);
    });
}

/// As with every setting that ranks share, rank 0's applies: ranks cannot exchange elements of different
/// types.
#[test]
fn the_setting_of_rank_0_applies_to_all() {
    let hosts = [0, 1, 2];
    for wire in [WireDType::F32, WireDType::BF16] {
        let options = |rank, builder: Builder| builder.wire_dtype([wire, WireDType::F16, WireDType::F32][rank]);
        on_hosts(&hosts, options, |comm| {
            assert_eq!(comm.wire_dtype(), wire);
            let mut buf: Vec<f32> = (0..5003).map(|i| (1 + i % 200) as f32 + 1.0 / 512.0).collect();
            comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            assert_bits(&buf, |i| expected(&hosts, wire, ReduceOp::Sum, |_| (1 + i % 200) as f32 + 1.0 / 512.0), "rank 0's");
            // A communicator of some of the ranks has the same setting.
            let half = comm.split(comm.rank() / 2, comm.rank()).unwrap();
            assert_eq!(half.wire_dtype(), wire);
        });
    }
}

#[test]
fn nan_stays_nan_and_f16_overflows_to_infinity() {
    let hosts = [0, 1];
    for wire in HALVES {
        on_hosts(
            &hosts,
            |_, builder| builder.wire_dtype(wire),
            |comm| {
                let mut buf = vec![1.0f32; 8192];
                let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_520.0, -1e30, 40_000.0, 1e-30];
                // In the part of each rank.
                for start in [0, 5000] {
                    buf[start..start + special.len()].copy_from_slice(&special);
                    if comm.rank() == 1 {
                        buf[start + 1] = 0.5;
                        buf[start + 2] = f32::INFINITY;
                    }
                }
                comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                for start in [0, 5000] {
                    let got = &buf[start..start + special.len()];
                    assert!(got[0].is_nan() && got[1] == f32::INFINITY && got[2].is_nan(), "{got:?}");
                    match wire {
                        WireDType::F16 => {
                            assert_eq!(got[3..], [f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY, 0.0]);
                        }
                        _ => assert!(
                            got[3..]
                                .iter()
                                .zip([131_040.0f32, -2e30, 80_000.0, 2e-30])
                                .all(|(got, exact)| (got / exact - 1.0).abs() < 0.01)
                        ),
                    }
                }
                assert!(buf[100..5000].iter().all(|&x| x == 2.0));
            },
        );
    }
}

/// The gradients of a reducer are averaged by compressed collectives, with no hook.
#[test]
fn the_reducer_sends_16_bits_between_hosts() {
    let hosts = [0, 1, 1, 0];
    let (sizes, wire) = ([30_000, 17, 9000], WireDType::BF16);
    let bits = Mutex::new(Vec::new());
    on_hosts(
        &hosts,
        |_, builder| builder.wire_dtype(wire),
        |comm| {
            let mut reducer = Reducer::builder().parameters(common::gradients::floats(&sizes)).build(&comm).unwrap();
            let step = reducer.begin().unwrap();
            for (index, size) in sizes.into_iter().enumerate().rev() {
                let values: Vec<f32> = (0..size).map(|i| number(index as u64, comm.rank(), i)).collect();
                step.put(index, &values).unwrap();
            }
            step.finish().unwrap();
            let mut mine = Vec::new();
            for (index, _) in sizes.into_iter().enumerate() {
                let got = reducer.gradient::<f32>(index).unwrap();
                let average = |i: usize| expected(&hosts, wire, ReduceOp::Average, |rank| number(index as u64, rank, i));
                assert_bits(got, average, "a gradient");
                mine.extend(got.iter().map(|x| x.to_bits()));
            }
            bits.lock().unwrap().push(mine);
        },
    );
    let bits = bits.into_inner().unwrap();
    assert!(bits.len() == 4 && bits.iter().all(|other| *other == bits[0]));
}

/// The root mean square of errors, relative to that of the exact sums.
fn error_of(got: &[f32], exact: &[f64]) -> f64 {
    let errors = got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).powi(2)).sum::<f64>();
    (errors / exact.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

/// Numbers of the standard normal distribution (Box and Muller), which are a rank's.
fn normal(rank: usize) -> Vec<f32> {
    let uniform = |i: u64, what: u64| ((random(random(2027 + rank as u64, i), what) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let number = |i| ((-2.0 * uniform(i, 1).ln()).sqrt() * (std::f64::consts::TAU * uniform(i, 2)).cos()) as f32;
    (0..MEASURED as u64).map(number).collect()
}

/// Elements of each measurement of errors.
const MEASURED: usize = 1 << 17;

/// Returns the error of sums of these numbers, over hosts of one rank each, by `reduce`.
fn deviation(
    numbers: &[Vec<f32>],
    exact: &[f64],
    options: impl Fn(Builder) -> Builder + Sync,
    reduce: impl Fn(&Communicator, Vec<f32>) -> Vec<f32> + Sync,
) -> f64 {
    let found = Mutex::new(Vec::new());
    let hosts: Vec<usize> = (0..numbers.len()).collect();
    on_hosts(
        &hosts,
        |_, builder| options(builder),
        |comm| {
            let got = reduce(&comm, numbers[comm.rank()].clone());
            if comm.rank() == 0 {
                found.lock().unwrap().push(error_of(&got, exact));
            }
        },
    );
    found.into_inner().unwrap().remove(0)
}

/// The gradients of a reducer, times the number of ranks.
fn by_the_reducer(comm: &Communicator, values: Vec<f32>) -> Vec<f32> {
    let mut reducer = Reducer::builder().parameters(common::gradients::floats(&[MEASURED])).build(comm).unwrap();
    let step = reducer.begin().unwrap();
    step.put(0, &values).unwrap();
    step.finish().unwrap();
    reducer.gradient::<f32>(0).unwrap().iter().map(|average| average * comm.world_size() as f32).collect()
}

fn sum(comm: &Communicator, mut values: Vec<f32>) -> Vec<f32> {
    comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
    values
}

/// The whole buffer is converted and summed by a ring, which rounds at each hop.
fn by_a_ring(wire: WireDType) -> impl Fn(&Communicator, Vec<f32>) -> Vec<f32> + Sync {
    move |comm, values| match wire {
        WireDType::F16 => {
            let mut halves: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
            comm.all_reduce(&mut halves, ReduceOp::Sum).unwrap();
            halves.into_iter().map(f16::to_f32).collect()
        }
        _ => {
            let mut halves: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            comm.all_reduce(&mut halves, ReduceOp::Sum).unwrap();
            halves.into_iter().map(bf16::to_f32).collect()
        }
    }
}

/// Fewer roundings than by a ring of 16 bits, and more than in f32.
#[test]
fn errors_are_smaller_than_those_of_other_ways_to_send_16_bits() {
    let numbers: Vec<Vec<f32>> = (0..16).map(normal).collect();
    let worlds = [2, 4, 8, 16].map(|world| {
        let numbers = &numbers[..world];
        let sums: Vec<f64> = (0..MEASURED).map(|i| numbers.iter().map(|its| f64::from(its[i])).sum()).collect();
        let exact = deviation(numbers, &sums, |builder| builder.algorithm(Algorithm::Ring), sum);
        (world, numbers, sums, exact)
    });
    for wire in HALVES {
        // Each way in two worlds, unless every case is tried.
        let turn = usize::from(wire == HALVES[0]);
        for (_, &(world, numbers, ref sums, exact)) in worlds.iter().enumerate().filter(|&(i, _)| all() || i % 2 == turn) {
            let compressed = deviation(numbers, sums, |builder| builder.wire_dtype(wire), sum);
            let reducer = deviation(numbers, sums, |builder| builder.wire_dtype(wire), by_the_reducer);
            // The unit of rounding.
            let unit = if wire == WireDType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
            assert!(compressed < unit && reducer < unit, "{wire} on {world}: {compressed:?}, {reducer:?}");
            assert!(exact < 1e-6 && compressed > 1e-5, "{wire} on {world}: {exact:?}, {compressed:?}");
            if world > 2 {
                let ring = deviation(numbers, sums, |builder| builder.algorithm(Algorithm::Ring), by_a_ring(wire));
                assert!(compressed < ring, "{wire} on {world}: {compressed:?}, {ring:?}");
            }
        }
    }
}
