//! What every collective should compute, in the plainest way: sequentially, from everybody's inputs.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::process::Command;
use std::time::Duration;

use kolo::{Communicator, DType, Element, Op, ReduceOp, Result, Transport, bf16, f16};

/// Only a defect takes so long, however busy the machine is. Shorter than the deadline that operations have by default.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// How long ranks may take to connect: programs under valgrind on a busy machine take minutes.
const START: Duration = Duration::from_secs(900);

/// A deadline that a test waits for. Operations that should succeed before are long done by then, on a busy machine, too.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Gives the ranks that a command starts as long to connect as a busy machine may need.
pub(crate) fn patient(command: &mut Command) -> &mut Command {
    command.env("KOLO_START_TIMEOUT", START.as_secs().to_string())
}

/// Whether every case of a matrix is tried, and not only one of each kind: `KOLO_TEST_ALL=1`. `.ci/run` and `.ci/long` do.
pub(crate) fn all() -> bool {
    std::env::var_os("KOLO_TEST_ALL").is_some()
}

/// SplitMix64: the tests' random numbers.
pub(crate) fn random(seed: u64, what: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ what.wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Elements as the reference sees them.
pub(crate) trait Value: Element + PartialEq + std::fmt::Debug {
    /// A random value of a size with which sums and products of a few stay exact in floating point, where they can.
    fn random(seed: u64) -> Self;
    /// The reduction of all ranks' values, in their order.
    fn reduce(values: &[Self], op: ReduceOp) -> Self;
    /// Whether a result is right, given the order of the operands is not the reference's.
    fn is_close(self, expected: Self, ranks: usize) -> bool;
    /// The bits, to compare ranks with each other.
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn random(seed: u64) -> Self { seed as $type }
            fn reduce(values: &[Self], op: ReduceOp) -> Self {
                values.iter().copied().reduce(|a, b| match op {
                    ReduceOp::Sum => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                    _ => unreachable!("refused"),
                }).unwrap()
            }
            fn is_close(self, expected: Self, _: usize) -> bool { self == expected }
            fn bits(self) -> u64 { self as u64 }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty, $epsilon:expr, $widen:expr, $narrow:expr;)*) => {$(
        impl Value for $type {
            fn random(seed: u64) -> Self { $narrow(((seed % 4001) as f64 - 2000.0) / 1000.0) }
            fn reduce(values: &[Self], op: ReduceOp) -> Self {
                let wide = values.iter().map(|&value| -> f64 { $widen(value) });
                let all = values.len() as f64;
                $narrow(match op {
                    ReduceOp::Sum => wide.sum(),
                    ReduceOp::Average => wide.sum::<f64>() / all,
                    ReduceOp::Product => wide.product(),
                    ReduceOp::Max => wide.reduce(f64::max).unwrap(),
                    ReduceOp::Min => wide.reduce(f64::min).unwrap(),
                    _ => unreachable!("refused"),
                })
            }
            // Each of the operations, in any order, rounds once; partial results are at most 2 in 2^ranks, or 2 ranks.
            fn is_close(self, expected: Self, ranks: usize) -> bool {
                let (got, expected): (f64, f64) = ($widen(self), $widen(expected));
                (got - expected).abs() <= $epsilon * ranks as f64 * (2.0 * ranks as f64 + expected.abs())
            }
            fn bits(self) -> u64 { self.to_bits() as u64 }
        }
    )*};
}

floats! {
    f32, f32::EPSILON as f64, |x: f32| x as f64, |x: f64| x as f32;
    f64, f64::EPSILON, |x: f64| x, |x: f64| x;
    f16, f16::EPSILON.to_f64(), f16::to_f64, f16::from_f64;
    bf16, bf16::EPSILON.to_f64(), bf16::to_f64, bf16::from_f64;
}

impl Value for bool {
    fn random(seed: u64) -> Self {
        seed % 2 == 1
    }

    fn reduce(values: &[Self], op: ReduceOp) -> Self {
        match op {
            ReduceOp::Max | ReduceOp::BitOr => values.iter().any(|&value| value),
            ReduceOp::Min | ReduceOp::BitAnd => values.iter().all(|&value| value),
            ReduceOp::BitXor => values.iter().fold(false, |a, &b| a ^ b),
            _ => unreachable!("refused"),
        }
    }

    fn is_close(self, expected: Self, _: usize) -> bool {
        self == expected
    }

    fn bits(self) -> u64 {
        self.into()
    }
}

/// Says loudly what cannot run here: what passing tests print is not shown, but this is.
pub(crate) fn not_run(why: &str) {
    use std::io::Write;
    std::io::stderr().write_all(format!("NOT RUN: {why}\n").as_bytes()).unwrap();
}

/// One collective to be checked: the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub op: Op,
    pub dtype: DType,
    pub redop: ReduceOp,
    /// Elements of the buffer, or of one block; blocks of the forms with counts differ around it.
    pub count: usize,
    pub root: usize,
    pub in_place: bool,
    pub seed: u64,
}

pub(crate) const OPS: [Op; 14] = [
    Op::AllReduce,
    Op::Broadcast,
    Op::Barrier,
    Op::Reduce,
    Op::AllGather,
    Op::AllGatherV,
    Op::ReduceScatter,
    Op::ReduceScatterV,
    Op::AllToAll,
    Op::AllToAllV,
    Op::Gather,
    Op::Scatter,
    Op::Send,
    Op::Recv,
];

impl Case {
    /// The n-th case of a seed.
    pub(crate) fn random(seed: u64, world: usize, most: usize) -> Case {
        let pick = |what: u64, below: usize| random(seed, what) as usize % below;
        let dtype = DType::ALL[pick(2, DType::ALL.len())];
        let redops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|redop| redop.applies_to(dtype)).collect();
        let scale = [1, 10, 1000, most.max(1)][pick(5, 4)];
        Case {
            op: OPS[pick(1, OPS.len())],
            dtype,
            redop: redops[pick(3, redops.len())],
            count: pick(4, scale.min(most) + 1),
            root: pick(6, world),
            in_place: pick(7, 2) == 1,
            seed,
        }
    }
}

/// Carries out a case on one rank, checks the result with the reference, and that all ranks have the same bits.
pub(crate) fn check(comm: &Communicator, case: Case) -> Result<()> {
    match case.dtype {
        DType::I8 => check_typed::<i8>(comm, case),
        DType::U8 => check_typed::<u8>(comm, case),
        DType::I16 => check_typed::<i16>(comm, case),
        DType::U16 => check_typed::<u16>(comm, case),
        DType::I32 => check_typed::<i32>(comm, case),
        DType::U32 => check_typed::<u32>(comm, case),
        DType::I64 => check_typed::<i64>(comm, case),
        DType::U64 => check_typed::<u64>(comm, case),
        DType::F16 => check_typed::<f16>(comm, case),
        DType::BF16 => check_typed::<bf16>(comm, case),
        DType::F32 => check_typed::<f32>(comm, case),
        DType::F64 => check_typed::<f64>(comm, case),
        DType::Bool => check_typed::<bool>(comm, case),
        other => unreachable!("{other} is not checked"),
    }
}

fn check_typed<T: Value>(comm: &Communicator, case: Case) -> Result<()> {
    let (me, world) = (comm.rank(), comm.world_size());
    let Case { op, redop, count, root, in_place, seed, .. } = case;
    let value = |rank: usize, i: usize| T::random(random(random(seed, rank as u64), i as u64));
    let values = |rank: usize, len: usize| -> Vec<T> { (0..len).map(|i| value(rank, i)).collect() };
    let reduced = |i: usize| T::reduce(&(0..world).map(|rank| value(rank, i)).collect::<Vec<_>>(), redop);
    // Blocks of differing sizes, the same on all ranks; and for every pair.
    let block = |rank: usize| if count == 0 { 0 } else { (count + rank * 7) % (2 * count) };
    let counts: Vec<usize> = (0..world).map(block).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let pair = |from: usize, to: usize| block(from * 3 + to);
    let garbage = |len: usize| -> Vec<T> { (0..len).map(|i| value(me + 100, i)).collect() };
    let is_root = me == root;

    // What this rank must have in the end, where it says.
    let mut got: Vec<T> = Vec::new();
    let mut expected: Vec<Option<T>> = Vec::new();
    let mut exact = true;
    match op {
        Op::AllReduce => {
            got = values(me, count);
            if in_place {
                comm.all_reduce(&mut got, redop)?;
            } else {
                let send = std::mem::replace(&mut got, garbage(count));
                comm.all_reduce_into(&send, &mut got, redop)?;
                assert_eq!(send, values(me, count), "the send buffer has changed");
            }
            expected = (0..count).map(|i| Some(reduced(i))).collect();
            exact = false;
        }
        Op::Reduce => {
            got = values(me, count);
            if in_place {
                comm.reduce(&mut got, redop, root)?;
            } else {
                let send = std::mem::replace(&mut got, garbage(if is_root { count } else { 0 }));
                comm.reduce_into(&send, is_root.then_some(&mut got[..]), redop, root)?;
                assert_eq!(send, values(me, count), "the send buffer has changed");
            }
            expected =
                if is_root { (0..count).map(|i| Some(reduced(i))).collect() } else { got.iter().copied().map(Some).collect() };
            exact = !is_root;
        }
        Op::Broadcast => {
            got = if is_root { values(me, count) } else { garbage(count) };
            if in_place {
                comm.broadcast(&mut got, root)?;
            } else {
                let send = std::mem::replace(&mut got, garbage(count));
                comm.broadcast_into(is_root.then_some(&send[..]), &mut got, root)?;
            }
            expected = values(root, count).into_iter().map(Some).collect();
        }
        Op::Barrier => comm.barrier()?,
        Op::AllGather | Op::Gather => {
            let all = world * count;
            let takes = op == Op::AllGather || is_root;
            if in_place {
                got = garbage(all);
                got[me * count..(me + 1) * count].copy_from_slice(&values(me, count));
                if op == Op::AllGather { comm.all_gather_in_place(&mut got)? } else { comm.gather_in_place(&mut got, root)? }
            } else {
                got = garbage(if takes { all } else { 0 });
                if op == Op::AllGather {
                    comm.all_gather(&values(me, count), &mut got)?;
                } else {
                    comm.gather(&values(me, count), is_root.then_some(&mut got[..]), root)?;
                }
            }
            if takes {
                expected = (0..all).map(|i| Some(value(i / count, i % count))).collect();
            } else {
                got.clear();
            }
        }
        Op::AllGatherV => {
            got = garbage(counts.iter().sum());
            let mine = values(me, counts[me]);
            if in_place {
                got[start(me)..start(me) + counts[me]].copy_from_slice(&mine);
                comm.all_gather_v_in_place(&mut got, &counts)?;
            } else {
                comm.all_gather_v(&mine, &mut got, &counts)?;
            }
            expected = (0..world).flat_map(|rank| values(rank, counts[rank])).map(Some).collect();
        }
        Op::ReduceScatter | Op::ReduceScatterV => {
            let has_counts = op == Op::ReduceScatterV;
            let (at, len, all) =
                if has_counts { (start(me), counts[me], start(world)) } else { (me * count, count, world * count) };
            let mut send = values(me, all);
            if in_place {
                match has_counts {
                    true => comm.reduce_scatter_v_in_place(&mut send, &counts, redop)?,
                    false => comm.reduce_scatter_in_place(&mut send, redop)?,
                }
                got = send[at..at + len].to_vec();
            } else {
                got = garbage(len);
                match has_counts {
                    true => comm.reduce_scatter_v(&send, &mut got, &counts, redop)?,
                    false => comm.reduce_scatter(&send, &mut got, redop)?,
                }
                assert_eq!(send, values(me, all), "the send buffer has changed");
            }
            expected = (at..at + len).map(|i| Some(reduced(i))).collect();
            exact = false;
        }
        Op::AllToAll => {
            got = values(me, world * count);
            if in_place {
                comm.all_to_all_in_place(&mut got)?;
            } else {
                let send = std::mem::replace(&mut got, garbage(world * count));
                comm.all_to_all(&send, &mut got)?;
            }
            expected = (0..world * count).map(|i| Some(value(i / count, me * count + i % count))).collect();
        }
        Op::AllToAllV => {
            let sends: Vec<usize> = (0..world).map(|to| pair(me, to)).collect();
            let recvs: Vec<usize> = (0..world).map(|from| pair(from, me)).collect();
            got = garbage(recvs.iter().sum());
            comm.all_to_all_v(&values(me, sends.iter().sum()), &sends, &mut got, &recvs)?;
            for from in 0..world {
                let before: usize = (0..me).map(|to| pair(from, to)).sum();
                expected.extend((before..before + pair(from, me)).map(|i| Some(value(from, i))));
            }
        }
        Op::Scatter => {
            let all = values(root, world * count);
            if in_place {
                let mut buf = if is_root { all } else { garbage(world * count) };
                comm.scatter_in_place(&mut buf, root)?;
                got = buf[me * count..(me + 1) * count].to_vec();
            } else {
                got = garbage(count);
                comm.scatter(is_root.then_some(&all[..]), &mut got, root)?;
            }
            expected = (0..count).map(|i| Some(value(root, me * count + i))).collect();
        }
        Op::Send | Op::Recv if world > 1 => {
            // Everybody sends to the one `shift` ahead, at once.
            let shift = 1 + root % (world - 1);
            let (to, from) = ((me + shift) % world, (me + world - shift) % world);
            got = garbage(count);
            let mine = values(me, count);
            if in_place {
                comm.scope(|s| {
                    s.send(&mine, to)?;
                    s.recv(&mut got, from)
                })?;
            } else {
                comm.send_recv(&mine, to, &mut got, from)?;
            }
            expected = values(from, count).into_iter().map(Some).collect();
        }
        _ => {}
    }

    assert_eq!(got.len(), expected.len(), "{case:?}");
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let is_right = expected.is_none_or(|expected| if exact { *got == expected } else { got.is_close(expected, world) });
        assert!(is_right, "rank {me} of {world}: {got:?} instead of {expected:?} at {i} in {case:?}");
    }
    if op == Op::AllReduce {
        // The same bits on all ranks.
        let bits: Vec<u64> = got.iter().map(|value| value.bits()).collect();
        let (mut least, mut most) = (bits.clone(), bits);
        comm.all_reduce(&mut least, ReduceOp::Min)?;
        comm.all_reduce(&mut most, ReduceOp::Max)?;
        assert_eq!(least, most, "bits differ between ranks in {case:?}");
    }
    Ok(())
}

/// Connects `world` ranks, each on a thread of its own, through a store of its own, and runs `body` on each.
pub(crate) fn run(
    world: usize,
    options: impl Fn(usize, kolo::Builder) -> kolo::Builder + Sync,
    body: impl Fn(Communicator) + Sync,
) {
    static STORES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = STORES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (options, body) = (&options, &body);
            scope.spawn(move || {
                let builder = Communicator::builder().rank(rank).world_size(world).store(format!("hash://test-{number}"));
                let builder = builder.start_timeout(START);
                body(options(rank, builder).connect().unwrap());
            });
        }
    });
}

/// Runs `body` on every rank, once over each transport that threads of one process can use.
pub(crate) fn on_every_transport(world: usize, body: impl Fn(Communicator) + Sync) {
    run(world, |_, builder| builder, &body);
    run(world, |_, builder| builder.transport(Transport::Tcp), &body);
    run(world, |rank, builder| builder.host(format!("host{}", rank % 2)), &body);
    std::thread::scope(|scope| {
        for comm in Communicator::in_process(world).unwrap() {
            scope.spawn(|| body(comm));
        }
    });
}
