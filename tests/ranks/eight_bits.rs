//! Messages of 8 bits between hosts: what results are by the definition, how far they are from the
//! exact ones in every form, and that all ranks have the same bits.

use std::sync::Mutex;

use crate::common::{all, random, run};
use kolo::ddp::{ErrorFeedback, Parameter, Reducer};
use kolo::{Builder, Communicator, DType, ReduceOp, WireDType, bf16, f8e4m3, f16};

const BYTES: [WireDType; 2] = [WireDType::Int8, WireDType::F8E4M3];

/// Elements of a block.
const BLOCK: usize = 128;

/// Runs `body` on ranks on these hosts.
fn on_hosts(hosts: &[usize], options: impl Fn(Builder) -> Builder + Sync, body: impl Fn(Communicator) + Sync) {
    run(hosts.len(), |rank, builder| options(builder.host(format!("host{}", hosts[rank]))), body);
}

/// Rounds blocks, from the first element on.
fn round(wire: WireDType, elements: &[f32]) -> Vec<f32> {
    let most = if wire == WireDType::Int8 { 127.0 } else { 448.0 };
    let code = |x: f32| if wire == WireDType::Int8 { x.round_ties_even() } else { f8e4m3::from_f32(x).to_f32() };
    let block = |elements: &[f32]| -> Vec<f32> {
        let largest = elements.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        elements.iter().map(|&x| if largest == 0.0 { 0.0 } else { code(x * (most / largest)) * (largest / most) }).collect()
    };
    elements.chunks(BLOCK).flat_map(block).collect()
}

/// Numbers of both signs and several magnitudes.
fn numbers(seed: u64, rank: usize, count: usize) -> Vec<f32> {
    let number = |i| {
        let word = random(random(seed, rank as u64), i as u64);
        ((word & 0xffff) as f32 / 32768.0 - 1.0) * 2f32.powi((word >> 40) as i32 % 6 - 3)
    };
    (0..count).map(number).collect()
}

fn sums(ranks: usize, of_rank: impl Fn(usize) -> Vec<f32>) -> Vec<f64> {
    let mut sums = vec![0.0; of_rank(0).len()];
    for rank in 0..ranks {
        sums.iter_mut().zip(of_rank(rank)).for_each(|(sum, x)| *sum += f64::from(x));
    }
    sums
}

/// Each rank's part of `count` elements.
fn parts(count: usize, world: usize) -> Vec<std::ops::Range<usize>> {
    let (base, longer) = (count / world, count % world);
    let start = |rank: usize| rank * base + rank.min(longer);
    (0..world).map(|rank| start(rank)..start(rank + 1)).collect()
}

#[test]
fn an_all_reduce_rounds_each_part_once_and_the_result_once() {
    // Several segments, of which the last is not full.
    let large: &[usize] = if all() { &[2_500_003] } else { &[] };
    for (hosts, counts) in [(vec![0, 1], [&[4096, 70_001, 1_100_003], large].concat()), (vec![0, 1, 2, 3, 4], vec![5003])] {
        let world = hosts.len();
        for wire in BYTES {
            on_hosts(
                &hosts,
                |builder| builder.wire_dtype(wire),
                |comm| {
                    for (seed, &count) in counts.iter().enumerate() {
                        let mut got = numbers(seed as u64, comm.rank(), count);
                        comm.all_reduce(&mut got, ReduceOp::Average).unwrap();
                        for part in parts(count, world) {
                            let rounded = (0..world).map(|rank| round(wire, &numbers(seed as u64, rank, count)[part.clone()]));
                            let add = |mut sum: Vec<f32>, part: Vec<f32>| {
                                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                                sum
                            };
                            let mean: Vec<f32> = rounded.reduce(add).unwrap().iter().map(|sum| sum / world as f32).collect();
                            assert!(got[part.clone()] == round(wire, &mean), "{wire}, {world} hosts, {count} elements, {part:?}");
                        }
                    }
                },
            );
        }
    }
}

/// Asserts that each element is as close as the roundings allow: one for each host and one of the
/// result, in steps of the largest of all blocks, or relative to the element.
fn assert_close(got: &[f32], exact: &[f64], largest: f64, wire: WireDType, what: &str) {
    for (i, (&got, &exact)) in got.iter().zip(exact).enumerate() {
        // Half a step of 1/127 of the largest, or half of the last of four bits of the largest: hosts'
        // parts can be larger than their sum.
        let most = if wire == WireDType::Int8 { largest / 127.0 } else { largest / 8.0 };
        assert!((f64::from(got) - exact).abs() <= most, "{what}: {got} at {i}, not {exact}");
    }
}

#[test]
fn every_form_is_close_on_every_layout() {
    for hosts in [&[0usize, 1, 2][..], &[0, 0, 1, 1], &[0, 1, 0, 1, 1], &[1, 0, 0, 2]] {
        for wire in BYTES {
            let bits = Mutex::new(Vec::new());
            on_hosts(
                hosts,
                |builder| builder.wire_dtype(wire),
                |comm| {
                    let (me, world, count) = (comm.rank(), comm.world_size(), 6007);
                    // The sum of the largest of all ranks, for any sum and its parts.
                    let largest = 8.0 * world as f64;
                    let what = |form: &str| format!("{form} as {wire} on {hosts:?}");
                    let exact = sums(world, |rank| numbers(1, rank, count * world));
                    let mine = || numbers(1, me, count * world);

                    let mut buf = mine();
                    comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                    assert_close(&buf, &exact, largest, wire, &what("all_reduce"));
                    bits.lock().unwrap().push(buf.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());

                    let mut recv = vec![f32::NAN; count];
                    comm.reduce_scatter(&mine(), &mut recv, ReduceOp::Sum).unwrap();
                    assert_close(&recv, &exact[me * count..(me + 1) * count], largest, wire, &what("reduce_scatter"));

                    let counts: Vec<usize> = (0..world).map(|rank| [count, 0, count + 77][rank % 3]).collect();
                    let start: usize = counts[..me].iter().sum();
                    let exact = sums(world, |rank| numbers(2, rank, counts.iter().sum()));
                    let mut recv = vec![f32::NAN; counts[me]];
                    comm.reduce_scatter_v(&numbers(2, me, exact.len()), &mut recv, &counts, ReduceOp::Sum).unwrap();
                    assert_close(&recv, &exact[start..start + counts[me]], largest, wire, &what("reduce_scatter_v"));

                    let mut buf = numbers(3, me, count);
                    comm.reduce(&mut buf, ReduceOp::Average, 1).unwrap();
                    if me == 1 {
                        let exact: Vec<f64> =
                            sums(world, |rank| numbers(3, rank, count)).iter().map(|sum| sum / world as f64).collect();
                        assert_close(&buf, &exact, 2.0 * largest / world as f64, wire, &what("reduce"));
                    }
                },
            );
            let bits = bits.into_inner().unwrap();
            assert!(bits.len() == hosts.len() && bits.iter().all(|other| *other == bits[0]), "{wire} on {hosts:?}");
        }
    }
}

/// Buffers of 16 bits are packed in bytes, and not in other types of 16 bits.
#[test]
fn halves_travel_as_bytes() {
    let exact = |comm: &Communicator| -> Vec<f32> {
        sums(comm.world_size(), |rank| numbers(5, rank, 9001).iter().map(|&x| bf16::from_f32(x).to_f32()).collect())
            .iter()
            .map(|&sum| sum as f32)
            .collect()
    };
    for wire in [WireDType::Int8, WireDType::F8E4M3, WireDType::F16, WireDType::BF16] {
        on_hosts(
            &[0, 1],
            |builder| builder.wire_dtype(wire),
            |comm| {
                let mine = numbers(5, comm.rank(), 9001);
                let mut halves: Vec<bf16> = mine.iter().map(|&x| bf16::from_f32(x)).collect();
                comm.all_reduce(&mut halves, ReduceOp::Sum).unwrap();
                let rounded: Vec<bf16> = exact(&comm).into_iter().map(bf16::from_f32).collect();
                // A sum of two is rounded once if it is exact in messages.
                assert_eq!(halves == rounded, !BYTES.contains(&wire), "{wire}");
                let wide: Vec<f32> = halves.iter().map(|half| half.to_f32()).collect();
                let exact: Vec<f64> = exact(&comm).into_iter().map(f64::from).collect();
                assert_close(&wide, &exact, 17.0, if BYTES.contains(&wire) { wire } else { WireDType::Int8 }, "bf16");

                let mut halves: Vec<f16> = mine.iter().map(|&x| f16::from_f32(x)).collect();
                comm.all_reduce(&mut halves, ReduceOp::Max).unwrap();
                let most = |i: usize| (0..2).map(|rank| numbers(5, rank, 9001)[i]).fold(f32::MIN, f32::max);
                assert!([0, 4000, 9000].iter().all(|&i| halves[i] == f16::from_f32(most(i))), "a maximum is exact");
            },
        );
    }
}

#[test]
fn a_block_that_is_not_finite_is_nan_and_no_other() {
    for wire in BYTES {
        on_hosts(
            &[0, 1],
            |builder| builder.wire_dtype(wire),
            |comm| {
                let mut buf = vec![1.0f32; 16 * BLOCK * 4];
                // In the part of each rank.
                let places = [3 * BLOCK, 20 * BLOCK + 5, 40 * BLOCK + 127, 63 * BLOCK];
                for (place, special) in places.into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX]) {
                    // The sum of the two largest numbers is infinite.
                    if comm.rank() == 1 || special == f32::MAX {
                        buf[place] = special;
                    }
                }
                comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                for (block, elements) in buf.chunks(BLOCK).enumerate() {
                    let is_special = places.iter().any(|place| place / BLOCK == block);
                    let is_right = |x: &f32| if is_special { x.is_nan() } else { *x == 2.0 };
                    assert!(elements.iter().all(is_right), "{wire}: block {block} is {elements:?}");
                }
            },
        );
    }
}

/// With a seed, each call rounds otherwise, every rank has the same bits, and the average of many calls is
/// closer to the sum than one call.
#[test]
fn a_seed_rounds_at_random() {
    let calls = if all() { 400 } else { 100 };
    for wire in BYTES {
        let found = Mutex::new(Vec::new());
        for seed in [0, 1, 1, 2] {
            on_hosts(
                &[0, 1],
                |builder| builder.wire_dtype(wire).wire_seed(seed),
                |comm| {
                    let exact = sums(2, |rank| numbers(9, rank, 4096));
                    let mut mean = vec![0f64; 4096];
                    let mut first = Vec::new();
                    let error = |got: &[f64]| -> f64 { got.iter().zip(&exact).map(|(got, sum)| (got - sum).powi(2)).sum() };
                    let mut of_first = 0.0;
                    for call in 0..calls {
                        let mut buf = numbers(9, comm.rank(), 4096);
                        comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                        mean.iter_mut().zip(&buf).for_each(|(mean, &x)| *mean += f64::from(x) / f64::from(calls));
                        if call == 0 {
                            of_first = error(&buf.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
                            first = buf;
                        } else {
                            assert_eq!(first == buf, seed == 0, "{wire}: call {call} with seed {seed}");
                        }
                    }
                    if seed > 0 {
                        assert!(error(&mean) < of_first / f64::from(calls) * 2.0, "{wire}: {} of {of_first}", error(&mean));
                    }
                    found.lock().unwrap().push((seed, first.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()));
                },
            );
        }
        let found = found.into_inner().unwrap();
        for (seed, bits) in &found {
            for (other, others) in &found {
                assert_eq!(bits == others, seed == other, "{wire}: seeds {seed} and {other}");
            }
        }
    }
}

/// The gradients of a reducer are averaged by messages of 8 bits, with no hook.
#[test]
fn the_reducer_sends_bytes_between_hosts() {
    let gradients = |rank| numbers(4, rank, 30_000);
    on_hosts(
        &[0, 1, 1, 0],
        |builder| builder.wire_dtype(WireDType::Int8),
        |comm| {
            let mut reducer = Reducer::builder().parameters(crate::common::gradients::floats(&[30_000])).build(&comm).unwrap();
            let step = reducer.begin().unwrap();
            step.put(0, &gradients(comm.rank())).unwrap();
            step.finish().unwrap();
            let exact: Vec<f64> = sums(4, gradients).iter().map(|sum| sum / 4.0).collect();
            let got = reducer.gradient::<f32>(0).unwrap();
            assert_close(got, &exact, 16.0, WireDType::Int8, "a gradient");
            assert!(got.iter().zip(&exact).any(|(&got, &exact)| (f64::from(got) - exact).abs() > 1e-4), "it is rounded");
        },
    );
}

/// Elements of each measurement of errors.
const MEASURED: usize = 1 << 15;

/// What is summed for the table of errors, by a name: numbers of the standard normal distribution (Box and
/// Muller), those of Student's with two degrees of freedom, and the first with one large number.
fn measured(kind: &str, rank: usize) -> Vec<f32> {
    let uniform = |i: u64, what: u64| ((random(random(2027 + rank as u64, i), what) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let normal = |i| (-2.0 * uniform(i, 1).ln()).sqrt() * (std::f64::consts::TAU * uniform(i, 2)).cos();
    let number = |i: u64| match kind {
        "heavy tails" => (normal(i) / (-uniform(i, 3).ln()).sqrt()) as f32,
        "one outlier" if i == 777 => 1e4,
        _ => normal(i) as f32,
    };
    (0..MEASURED as u64).map(number).collect()
}

/// The root mean square and the largest of errors, in medians of the exact sums' magnitudes.
fn errors(got: &[f32], exact: &[f64]) -> (f64, f64) {
    let mut magnitudes: Vec<f64> = exact.iter().map(|x| x.abs()).collect();
    magnitudes.sort_by(f64::total_cmp);
    let unit = magnitudes[MEASURED / 2];
    let errors = || got.iter().zip(exact).map(|(&got, exact)| (f64::from(got) - exact).abs() / unit);
    ((errors().map(|error| error * error).sum::<f64>() / MEASURED as f64).sqrt(), errors().fold(0.0, f64::max))
}

/// As PyTorch's `quantization_pertensor_hook`: each rank's numbers are rounded to 256 levels between its
/// least and its largest, and not the sum.
fn one_scale(numbers: &[f32]) -> Vec<f32> {
    let least = numbers.iter().copied().fold(0.0, f32::min);
    let scale = (numbers.iter().copied().fold(0.0, f32::max) - least) / 255.0;
    numbers.iter().map(|x| ((x - least) / scale).round() * scale + least).collect()
}

/// `cargo test --test ranks eight_bits::errors_are -- --nocapture` prints the table of
/// docs/collectives.md: the largest errors on 2 to 16 hosts.
#[test]
fn errors_are_those_of_the_documentation() {
    let documented = include_str!("../../docs/collectives.md");
    let mut missing = Vec::new();
    println!("| numbers | int8 | f8e4m3 | bf16 | one scale | f32 |\n|---|---|---|---|---|---|");
    for kind in ["normal", "heavy tails", "one outlier"] {
        let mut worst = [(0f64, 0f64); 5];
        let of_all: Vec<Vec<f32>> = (0..16).map(|rank| measured(kind, rank)).collect();
        for world in [2, 4, 8, 16] {
            let parts = &of_all[..world];
            let exact = sums(world, |rank| parts[rank].clone());
            let mut found = Vec::new();
            for wire in [WireDType::Int8, WireDType::F8E4M3, WireDType::BF16, WireDType::F32] {
                let results = Mutex::new(Vec::new());
                let hosts: Vec<usize> = (0..world).collect();
                on_hosts(
                    &hosts,
                    // Measured costs decide the order of a sum in f32.
                    |builder| builder.wire_dtype(wire).cost_model(kolo::plan::CostModel::default()),
                    |comm| {
                        let mut buf = parts[comm.rank()].clone();
                        comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                        if comm.rank() == 0 {
                            results.lock().unwrap().push(errors(&buf, &exact));
                        }
                    },
                );
                found.push(results.into_inner().unwrap()[0]);
            }
            let rounded: Vec<Vec<f32>> = parts.iter().map(|part| one_scale(part)).collect();
            let sum: Vec<f32> = sums(world, |rank| rounded[rank].clone()).into_iter().map(|sum| sum as f32).collect();
            found.insert(3, errors(&sum, &exact));
            for (worst, of) in worst.iter_mut().zip(found) {
                *worst = (worst.0.max(of.0), worst.1.max(of.1));
            }
        }
        let [int8, f8, bf16, one, f32] = worst.map(|(rms, most)| format!("{rms:.1e}, {most:.1e}"));
        let row = format!("| {kind} | {int8} | {f8} | {bf16} | {one} | {f32} |");
        println!("{row}");
        if !documented.contains(&row) {
            missing.push(row);
        }
    }
    assert!(missing.is_empty(), "docs/collectives.md lacks these rows:\n{}", missing.join("\n"));
}

/// With error feedback, what many steps have delivered is off by less than what one step loses.
#[test]
fn error_feedback_sends_later_what_a_step_leaves_out() {
    let sizes = [20_000, 3, 9_001];
    let layouts = [&[0usize, 1][..], &[0, 0, 1, 1], &[0, 1, 0, 2, 2]];
    for (layout, hosts) in layouts.into_iter().enumerate() {
        // In turns, unless every case is tried.
        let wires = [WireDType::Int8, WireDType::F8E4M3, WireDType::BF16];
        for &wire in if all() { &wires[..] } else { &wires[layout..=layout] } {
            let found = Mutex::new(Vec::new());
            for feeds_back in [false, true] {
                on_hosts(
                    hosts,
                    |builder| builder.wire_dtype(wire),
                    |comm| {
                        let (world, steps) = (comm.world_size(), 40);
                        let builder = Reducer::builder().parameters(crate::common::gradients::floats(&sizes));
                        let builder = if feeds_back { builder.hook(ErrorFeedback::new()) } else { builder };
                        let mut reducer = builder.build(&comm).unwrap();
                        let gradient = |rank: usize, index: usize| numbers(index as u64, rank, sizes[index]);
                        let mine = [0, 1, 2].map(|index| gradient(comm.rank(), index));
                        let mut delivered: Vec<Vec<f64>> = sizes.iter().map(|&size| vec![0.0; size]).collect();
                        for _ in 0..steps {
                            let step = reducer.begin().unwrap();
                            for index in (0..sizes.len()).rev() {
                                step.put(index, &mine[index]).unwrap();
                            }
                            step.finish().unwrap();
                            for (index, delivered) in delivered.iter_mut().enumerate() {
                                let got = reducer.gradient::<f32>(index).unwrap();
                                delivered.iter_mut().zip(got).for_each(|(sum, &x)| *sum += f64::from(x));
                            }
                        }
                        let mut missing = 0f64;
                        for (index, delivered) in delivered.iter().enumerate() {
                            for (sum, got) in sums(world, |rank| gradient(rank, index)).iter().zip(delivered) {
                                missing = missing.max((sum / world as f64 * f64::from(steps) - got).abs());
                            }
                        }
                        let bits: Vec<u64> = delivered.concat().iter().map(|x| x.to_bits()).collect();
                        found.lock().unwrap().push((feeds_back, missing, bits));
                    },
                );
            }
            let found = found.into_inner().unwrap();
            let most = |of: bool| found.iter().filter(|found| found.0 == of).map(|found| found.1).fold(0.0, f64::max);
            assert!(most(true) * 4.0 < most(false), "{wire} on {hosts:?}: {} with, {} without", most(true), most(false));
            for of in [false, true] {
                let mut bits = found.iter().filter(|found| found.0 == of).map(|found| &found.2);
                let first = bits.next().unwrap();
                assert!(bits.all(|other| other == first), "{wire} on {hosts:?}");
            }
        }
    }
}

/// A gradient that is not finite spoils its step and no later one; gradients of 16 bits are fed back,
/// those of f64 are averaged.
#[test]
fn error_feedback_survives_what_it_cannot_send() {
    on_hosts(
        &[0, 1],
        |builder| builder.wire_dtype(WireDType::Int8),
        |comm| {
            let parameters = [Parameter::new("half", [9000], DType::BF16), Parameter::new("wide", [3000], DType::F64)];
            let mut reducer = Reducer::builder().parameters(parameters).hook(ErrorFeedback::new()).build(&comm).unwrap();
            let mut sum = 0.0;
            for at in 0..20 {
                let step = reducer.begin().unwrap();
                let mut half = vec![bf16::from_f32(0.3); 9000];
                half[0] = bf16::ONE;
                if at == 3 && comm.rank() == 1 {
                    half[7] = bf16::INFINITY;
                }
                step.put(1, &vec![comm.rank() as f64; 3000]).unwrap();
                step.put(0, &half).unwrap();
                step.finish().unwrap();
                let half = reducer.gradient::<bf16>(0).unwrap();
                assert_eq!(half[7].is_nan(), at == 3, "step {at}");
                assert!(reducer.gradient::<f64>(1).unwrap().iter().all(|&x| x == 0.5));
                sum += if at == 3 { 0.3 } else { half[100].to_f32() };
            }
            assert!((sum - 20.0 * bf16::from_f32(0.3).to_f32()).abs() < 0.02, "{sum}");
        },
    );
}
