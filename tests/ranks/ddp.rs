//! The reducer on ranks that are threads: its results for all kinds of parameters, orders and
//! uneven inputs.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::common::gradients::{floats, on_ranks, typed};
use crate::common::{PATIENCE, Value, random, run};
use kolo::ddp::{Bucket, BufferSync, Compress, Hook, Parameter, Reducer, ReducerBuilder, TensorMut, Uneven, Unused};
use kolo::{Cause, Communicator, DType, Error, ReduceOp, ReducerError, Transport, f16};

fn problem(error: impl Debug + Into<Option<Error>>) -> ReducerError {
    match error.into() {
        Some(Error::Reducer { problem }) => *problem,
        other => panic!("{other:?}"),
    }
}

/// A random training run of several steps. The parameters are the same on all ranks, the gradients
/// differ.
struct Drawn {
    seed: u64,
    parameters: Vec<Parameter>,
    /// For each step, the number of micro-batches before the last one, which are only accumulated.
    accumulated: Vec<usize>,
}

impl Drawn {
    fn new(seed: u64) -> Drawn {
        let draw = |what: u64, below: u64| random(seed, what) % below;
        let dtypes = [DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
        let parameters = (0..1 + draw(1, 20)).map(|i| {
            let shape: Vec<usize> = (0..draw(100 + i, 4)).map(|d| 1 + draw(200 + 10 * i + d, 9) as usize).collect();
            // Some parameters have no elements.
            let shape = if draw(300 + i, 15) == 0 { vec![0, 3] } else { shape };
            Parameter::new(format!("layer{i}.weight"), shape, dtypes[draw(400 + i, 5) as usize])
        });
        let parameters = parameters.collect();
        Drawn { seed, parameters, accumulated: (0..4).map(|step| draw(500 + step, 3) as usize).collect() }
    }

    fn builder(&self) -> ReducerBuilder {
        let draw = |what: u64, below: u64| random(self.seed, what) % below;
        Reducer::builder()
            .parameters(self.parameters.clone())
            .bucket_bytes(draw(600, 2000) as usize)
            .first_bucket_bytes(draw(601, 500) as usize)
            .overlap(draw(602, 4) != 0)
            .rebuild(draw(603, 4) != 0)
            .unused(Unused::Find)
    }

    /// Whether a rank uses a parameter in a micro-batch.
    fn uses(&self, rank: usize, step: usize, micro: usize, parameter: usize) -> bool {
        let place = 1000 + rank * 7919 + step * 104_729 + micro * 1_299_709 + parameter * 31;
        !random(self.seed, place as u64).is_multiple_of(5)
    }

    fn element<T: Value>(&self, rank: usize, step: usize, micro: usize, parameter: usize, element: usize) -> T {
        let place = ((rank * 5 + step) * 4 + micro) * 64 + parameter;
        T::random(random(self.seed ^ 0xabcd, (place * 4096 + element) as u64))
    }

    /// Returns the order in which a rank's gradients become ready.
    fn order(&self, rank: usize, step: usize, micro: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.parameters.len()).collect();
        let place = (2000 + rank * 17 + step * 131 + micro * 1009) as u64;
        order.sort_by_key(|&parameter| random(self.seed, place * 64 + parameter as u64));
        order
    }
}

/// Hands one gradient over by one of three methods, which the seed chooses.
fn hand_over<T: Value + std::ops::Add<Output = T>>(drawn: &Drawn, step: &kolo::ddp::Step<'_>, place: [usize; 4]) {
    let [rank, at, micro, parameter] = place;
    let described = &drawn.parameters[parameter];
    let values: Vec<T> = (0..described.count()).map(|element| drawn.element(rank, at, micro, parameter, element)).collect();
    match random(drawn.seed, (3000 + parameter * 7 + rank * 1000 + at * 50 + micro) as u64) % 3 {
        0 => step.put(parameter, &values).unwrap(),
        1 => {
            let mut view = step.view::<T>(parameter).unwrap();
            let accumulates = step.accumulates();
            for (place, &value) in view.iter_mut().zip(&values) {
                *place = if accumulates { *place + value } else { value };
            }
            if parameter.is_multiple_of(2) {
                view.ready().unwrap();
            } else {
                drop(view);
                step.ready(parameter).unwrap();
            }
        }
        _ => {
            // A strided view, with the dimensions in reverse order and every second element used.
            let mut strides = vec![0; described.shape.len()];
            let mut stride = 2;
            for (dimension, &extent) in described.shape.iter().enumerate() {
                strides[dimension] = stride;
                stride *= extent;
            }
            let mut memory = vec![T::random(1); stride.max(1)];
            for (element, &value) in values.iter().enumerate() {
                let (mut rest, mut at) = (element, 0);
                for dimension in (0..strides.len()).rev() {
                    at += rest % described.shape[dimension] * strides[dimension];
                    rest /= described.shape[dimension];
                }
                memory[at] = value;
            }
            step.put_strided(parameter, &memory, &strides).unwrap();
        }
    }
}

fn check<T: Value>(drawn: &Drawn, reducer: &Reducer, world: usize, at: usize, parameter: usize) -> Vec<u64> {
    let micros = drawn.accumulated[at] + 1;
    let got = reducer.gradient::<T>(parameter).unwrap();
    for (element, &got) in got.iter().enumerate() {
        let of_rank = |rank| {
            let used = (0..micros).filter(|&micro| drawn.uses(rank, at, micro, parameter));
            let values: Vec<T> = used.map(|micro| drawn.element(rank, at, micro, parameter, element)).collect();
            // The zero of any type: the sum of two zeros.
            let zero = T::reduce(&[T::random(2000), T::random(2000)], ReduceOp::Sum);
            if values.is_empty() { zero } else { T::reduce(&values, ReduceOp::Sum) }
        };
        let expected = T::reduce(&(0..world).map(of_rank).collect::<Vec<T>>(), ReduceOp::Average);
        assert!(got.is_close(expected, world * micros), "seed {}: {got:?} for {expected:?}", drawn.seed);
    }
    got.iter().map(|value| value.bits()).collect()
}

fn train(drawn: &Drawn, comm: &Communicator) -> Vec<u64> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let mut reducer = drawn.builder().build(comm).unwrap();
    let mut bits = Vec::new();
    for at in 0..drawn.accumulated.len() {
        for micro in 0..=drawn.accumulated[at] {
            let is_last = micro == drawn.accumulated[at];
            let step = if is_last { reducer.begin() } else { reducer.accumulate() }.unwrap();
            assert_eq!(step.accumulates(), micro > 0);
            let order = drawn.order(rank, at, micro);
            // Two threads hand over gradients.
            std::thread::scope(|scope| {
                for half in order.chunks(order.len().div_ceil(2)) {
                    let step = &step;
                    scope.spawn(move || {
                        for &parameter in half {
                            let place = [rank, at, micro, parameter];
                            if drawn.uses(rank, at, micro, parameter) {
                                typed!(drawn.parameters[parameter].dtype, T => hand_over::<T>(drawn, step, place));
                            } else if parameter.is_multiple_of(3) {
                                step.unused(parameter).unwrap();
                            }
                        }
                    });
                }
            });
            step.finish().unwrap();
        }
        for (parameter, described) in drawn.parameters.iter().enumerate() {
            bits.extend(typed!(described.dtype, T => check::<T>(drawn, &reducer, world, at, parameter)));
            let micros = 0..=drawn.accumulated[at];
            let used = (0..world).any(|rank| micros.clone().any(|micro| drawn.uses(rank, at, micro, parameter)));
            assert_eq!(reducer.is_used(parameter), used, "seed {}, step {at}, parameter {parameter}", drawn.seed);
        }
        let bytes: usize = drawn.parameters.iter().map(|parameter| parameter.count() * parameter.dtype.size()).sum();
        assert_eq!(reducer.statistics().bytes(), bytes);
    }
    bits
}

#[test]
fn gradients_are_averages_in_random_runs() {
    for seed in 0..60 {
        let drawn = Drawn::new(seed);
        let world = 1 + random(seed, 9) as usize % 4;
        let bits = on_ranks(world, |comm| train(&drawn, comm));
        assert!(bits.iter().all(|other| *other == bits[0]), "seed {seed}: bits differ between ranks");
    }
}

#[test]
fn gradients_are_averages_over_messages() {
    for seed in 60..72 {
        let drawn = Drawn::new(seed);
        let world = 2 + random(seed, 9) as usize % 3;
        let bits = Mutex::new(Vec::new());
        let keep = |comm: Communicator| {
            let mine = train(&drawn, &comm);
            bits.lock().unwrap().push(mine);
        };
        match seed % 2 {
            0 => run(world, |_, builder| builder.transport(Transport::Tcp), keep),
            _ => run(world, |rank, builder| builder.host(format!("host{}", rank % 2)), keep),
        }
        let bits = bits.into_inner().unwrap();
        assert!(bits.iter().all(|other| *other == bits[0]), "seed {seed}: bits differ between ranks");
    }
}

#[test]
fn the_first_difference_between_ranks_is_named_on_every_rank() {
    let common = || vec![Parameter::new("a", [2, 3], DType::F32), Parameter::new("b", [3], DType::F32)];
    let with = |change: fn(&mut Vec<Parameter>)| {
        let mut parameters = common();
        change(&mut parameters);
        Reducer::builder().parameters(parameters)
    };
    type Make<'a> = &'a (dyn Fn() -> ReducerBuilder + Sync);
    let cases: [(Make<'_>, [&str; 3]); 9] = [
        (&|| with(|p| p[1].name = "c".into()), ["parameter 1", "`b f32 [3]`", "`c f32 [3]`"]),
        (&|| with(|p| p[0].shape = vec![3, 2]), ["parameter 0", "`a f32 [2, 3]`", "`a f32 [3, 2]`"]),
        (&|| with(|p| p[1].dtype = DType::F16), ["parameter 1", "`b f32 [3]`", "`b f16 [3]`"]),
        (&|| with(|p| _ = p.pop()), ["parameter 1", "`b f32 [3]`", "nothing"]),
        (&|| with(|p| p.push(Parameter::new("c", [], DType::F64))), ["parameter 2", "nothing", "`c f64 []`"]),
        (&|| with(|p| p.swap(0, 1)), ["parameter 0", "`a f32 [2, 3]`", "`b f32 [3]`"]),
        (&|| with(|_| {}).buffers([Parameter::new("mean", [3], DType::F32)]), ["buffer 0", "nothing", "`mean f32 [3]`"]),
        (&|| with(|_| {}).bucket_bytes(77), ["the options", "26214400", " 77 bytes"]),
        (&|| with(|_| {}).hook(Compress::bf16()), ["the options", "average", "compress to bf16"]),
    ];
    for (other, [what, first, theirs]) in cases {
        let problems = on_ranks(3, |comm| {
            let builder = if comm.rank() == 1 { other() } else { with(|_| {}) };
            let refused = builder.build(comm).unwrap_err();
            assert!(refused.leaves_communicator_usable());
            comm.barrier().unwrap();
            problem(refused)
        });
        for refused in &problems {
            assert_eq!(*refused, problems[0]);
            let ReducerError::Mismatch { what: at, first: has, rank, other } = refused else { panic!("{refused:?}") };
            assert!(at == what && has.contains(first) && other.contains(theirs) && *rank == 1, "{refused}");
        }
    }
}

#[test]
fn impossible_settings_are_rejected() {
    on_ranks(2, |comm| {
        for parameters in [
            vec![],
            vec![Parameter::new("steps", [1], DType::I64)],
            vec![Parameter::new("endless", [usize::MAX, usize::MAX], DType::F32)],
        ] {
            let refused = Reducer::builder().parameters(parameters).build(comm).unwrap_err();
            assert!(matches!(refused, Error::Setting { .. }), "{refused}");
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_missing_gradient_is_an_error_on_all_ranks() {
    on_ranks(3, |comm| {
        let mut reducer =
            Reducer::builder().parameters(floats(&[4, 5, 6])).first_bucket_bytes(1).bucket_bytes(1).build(comm).unwrap();
        let step = reducer.begin().unwrap();
        for parameter in 0..3 {
            if comm.rank() != 1 || parameter != 1 {
                step.put(parameter, &vec![1.0f32; 4 + parameter]).unwrap();
            }
        }
        let error = step.finish().unwrap_err();
        if comm.rank() == 1 {
            assert_eq!(problem(error), ReducerError::NotReady { name: "p1".into(), others: 0 });
        } else {
            // Only the error of rank 1 says what was wrong.
            assert!(matches!(error, Error::Peer { rank: 1, cause: Cause::Aborted, .. }), "{error}");
        }
        // The reducer has ended, but the communicator is usable.
        assert!(matches!(reducer.begin().unwrap_err(), Error::Revoked { .. }));
        assert!(matches!(reducer.gradient::<f32>(0).unwrap_err(), Error::Revoked { .. }));
        comm.barrier().unwrap();
    });
}

#[test]
fn an_abandoned_step_is_an_error_on_all_ranks() {
    on_ranks(2, |comm| {
        let mut reducer = Reducer::builder().parameters(floats(&[4])).build(comm).unwrap();
        let step = reducer.begin().unwrap();
        if comm.rank() == 0 {
            drop(step);
            assert!(reducer.begin().unwrap_err().to_string().contains("dropped without finish()"));
        } else {
            step.put(0, &[1.0f32; 4]).unwrap();
            assert!(matches!(step.finish().unwrap_err(), Error::Peer { rank: 0, .. }));
        }
        comm.barrier().unwrap();
    });
    on_ranks(2, |comm| {
        let mut reducer = Reducer::builder().parameters(floats(&[4])).build(comm).unwrap();
        if comm.rank() == 0 {
            // Rank 0 leaves.
            return;
        }
        let step = reducer.begin().unwrap();
        step.put(0, &[1.0f32; 4]).unwrap();
        let error = step.finish().unwrap_err();
        assert!(matches!(error, Error::Peer { rank: 0, cause: Cause::Left { .. }, .. }), "{error}");
    });
}

#[test]
fn wrong_calls_are_rejected_and_change_nothing() {
    on_ranks(2, |comm| {
        let mut reducer = Reducer::builder().parameters(floats(&[4, 6])).build(comm).unwrap();
        let refused = reducer.join(|_| Ok(())).unwrap_err();
        assert!(matches!(problem(refused), ReducerError::Moment { call: "join", .. }));
        let step = reducer.begin().unwrap();
        assert_eq!(problem(step.ready(2).unwrap_err()), ReducerError::NoParameter { index: 2, count: 2 });
        let elements = ReducerError::Elements { name: "p0".into(), dtype: DType::F32, given: DType::F64 };
        assert_eq!(problem(step.put(0, &[1.0f64; 4]).unwrap_err()), elements);
        let length = |name: &str, expected, given| ReducerError::Length { name: name.into(), expected, given };
        assert_eq!(problem(step.put(0, &[1.0f32; 5]).unwrap_err()), length("p0", 4, 5));
        assert_eq!(problem(step.put_strided(0, &[1.0f32; 9], &[3]).unwrap_err()), length("the memory of p0", 10, 9));
        assert_eq!(problem(step.put_strided(0, &[1.0f32; 9], &[3, 1]).unwrap_err()), length("the strides of p0", 1, 2));
        assert!(step.put_strided(0, &[1.0f32; 9], &[usize::MAX]).is_err());
        let view = step.view::<f32>(0).unwrap();
        assert_eq!(problem(step.view::<f32>(0).unwrap_err()), ReducerError::InView { name: "p0".into() });
        assert_eq!(problem(step.ready(0).unwrap_err()), ReducerError::InView { name: "p0".into() });
        drop(view);
        step.put(0, &[1.0f32; 4]).unwrap();
        assert_eq!(problem(step.put(0, &[1.0f32; 4]).unwrap_err()), ReducerError::Twice { name: "p0".into() });
        assert_eq!(problem(step.unused(0).unwrap_err()), ReducerError::Twice { name: "p0".into() });
        step.put(1, &[2.0f32; 6]).unwrap();
        step.finish().unwrap();
        assert_eq!(reducer.gradient::<f32>(1).unwrap(), [2.0; 6]);
        assert!(reducer.gradient::<f64>(1).is_err());
        // A forgotten step does not end.
        std::mem::forget(reducer.begin().unwrap());
        assert!(matches!(problem(reducer.begin().unwrap_err()), ReducerError::Moment { call: "begin", .. }));
        assert!(matches!(problem(reducer.gradient::<f32>(0).unwrap_err()), ReducerError::Moment { call: "gradient", .. }));
        comm.barrier().unwrap();
    });
}

#[test]
fn buckets_are_rebuilt_in_the_order_in_which_gradients_arrived_on_rank_0() {
    let sizes = [1, 2, 4, 8, 16, 32];
    // Each parameter has its own bucket, which its bytes identify.
    let statistics = on_ranks(3, |comm| {
        let mut reducer =
            Reducer::builder().parameters(floats(&sizes)).first_bucket_bytes(1).bucket_bytes(1).build(comm).unwrap();
        let mut launched = Vec::new();
        for _ in 0..3 {
            let step = reducer.begin().unwrap();
            let order = if comm.rank() == 0 { [2, 0, 5, 4, 1, 3] } else { [3, 1, 4, 5, 0, 2] };
            for parameter in order {
                step.put(parameter, &vec![1.0f32; sizes[parameter]]).unwrap();
            }
            step.finish().unwrap();
            for (parameter, &size) in sizes.iter().enumerate() {
                assert_eq!(reducer.gradient::<f32>(parameter).unwrap(), vec![1.0; size]);
            }
            launched.push(reducer.statistics().buckets.iter().map(|bucket| bucket.bytes / 4).collect::<Vec<_>>());
        }
        launched
    });
    for launched in statistics {
        assert_eq!(launched, [[32, 16, 8, 4, 2, 1], [4, 1, 32, 16, 2, 8], [4, 1, 32, 16, 2, 8]]);
    }
}

#[test]
fn accumulated_gradients_move_when_buckets_are_rebuilt() {
    on_ranks(2, |comm| {
        let mut reducer =
            Reducer::builder().parameters(floats(&[3, 5])).first_bucket_bytes(1).bucket_bytes(1).build(comm).unwrap();
        for round in 0..2 {
            let step = reducer.begin().unwrap();
            step.put(0, &[1.0f32; 3]).unwrap();
            step.put(1, &[2.0f32; 5]).unwrap();
            step.finish().unwrap();
            // The second time the buckets are not rebuilt.
            let step = reducer.accumulate().unwrap();
            step.put(0, &[10.0f32; 3]).unwrap();
            step.put(1, &[20.0f32; 5]).unwrap();
            step.finish().unwrap();
            assert_eq!(reducer.gradient::<f32>(1).unwrap(), [20.0; 5], "{round}");
            let step = reducer.begin().unwrap();
            step.put(0, &[100.0f32; 3]).unwrap();
            step.put(1, &[200.0f32; 5]).unwrap();
            step.finish().unwrap();
            assert_eq!(reducer.gradient::<f32>(0).unwrap(), [110.0; 3]);
            assert_eq!(reducer.gradient::<f32>(1).unwrap(), [220.0; 5]);
        }
    });
}

#[test]
fn a_static_graph_does_not_wait_for_unused_gradients() {
    on_ranks(2, |comm| {
        let mut reducer = Reducer::builder().parameters(floats(&[3, 5, 7])).unused(Unused::Static).build(comm).unwrap();
        for _ in 0..3 {
            let step = reducer.begin().unwrap();
            step.put(0, &[1.0f32; 3]).unwrap();
            if comm.rank() == 0 {
                step.put(1, &[1.0f32; 5]).unwrap();
            }
            step.finish().unwrap();
            assert_eq!([0, 1, 2].map(|parameter| reducer.is_used(parameter)), [true, true, false]);
            assert_eq!(reducer.gradient::<f32>(1).unwrap(), [0.5; 5]);
            assert_eq!(reducer.gradient::<f32>(2).unwrap(), [0.0; 7]);
        }
        let step = reducer.begin().unwrap();
        assert_eq!(problem(step.put(2, &[1.0f32; 7]).unwrap_err()), ReducerError::NotStatic { name: "p2".into() });
        if comm.rank() == 0 {
            // A parameter that was used in the first step must get its gradient.
            step.put(0, &[1.0f32; 3]).unwrap();
            assert_eq!(problem(step.finish().unwrap_err()), ReducerError::NotReady { name: "p1".into(), others: 0 });
        } else {
            step.put(0, &[1.0f32; 3]).unwrap();
            assert!(matches!(step.finish().unwrap_err(), Error::Peer { rank: 0, .. }));
        }
    });
}

/// A hook that reports the step and the number of each bucket that it reduces.
struct Report(mpsc::Sender<(u64, usize)>);

impl Hook for Report {
    fn name(&self) -> String {
        "tell".into()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> kolo::Result<()> {
        bucket.average(comm)?;
        self.0.send((bucket.step(), bucket.index())).unwrap();
        Ok(())
    }
}

#[test]
fn full_buckets_are_reduced_while_others_are_being_written() {
    on_ranks(2, |comm| {
        let (sender, reports) = mpsc::channel();
        let builder = Reducer::builder().parameters(floats(&[3, 5])).first_bucket_bytes(1).bucket_bytes(1);
        let mut reducer = builder.hook(Report(sender)).build(comm).unwrap();
        for at in 0..2 {
            let step = reducer.begin().unwrap();
            let mut view = step.view::<f32>(0).unwrap();
            step.put(1, &[comm.rank() as f32; 5]).unwrap();
            // The first bucket is reduced while the second is still being written.
            assert_eq!(reports.recv_timeout(PATIENCE).unwrap(), (at, 0));
            view.fill(3.0);
            view.ready().unwrap();
            assert_eq!(reports.recv_timeout(PATIENCE).unwrap(), (at, 1));
            step.finish().unwrap();
            assert_eq!(reducer.gradient::<f32>(0).unwrap(), [3.0; 3]);
            assert_eq!(reducer.gradient::<f32>(1).unwrap(), [0.5; 5]);
            let statistics = reducer.statistics();
            let [first, second] = &statistics.buckets[..] else { panic!("{statistics:?}") };
            assert!(first.started <= second.ready && second.started <= statistics.computed, "{statistics:?}");
            assert!(statistics.overlapped() >= first.took() && statistics.overlap() > 0.0, "{statistics:?}");
            assert!(statistics.buckets.iter().all(|bucket| bucket.ready <= bucket.started && bucket.started <= bucket.ended));
        }
    });
}

#[test]
fn without_overlap_buckets_are_reduced_in_finish() {
    on_ranks(2, |comm| {
        let (sender, reports) = mpsc::channel();
        let builder = Reducer::builder().parameters(floats(&[3, 5])).first_bucket_bytes(1).bucket_bytes(1);
        // The setting may differ between ranks.
        let mut reducer = builder.hook(Report(sender)).overlap(comm.rank() == 1).build(comm).unwrap();
        let step = reducer.begin().unwrap();
        step.put(1, &[1.0f32; 5]).unwrap();
        step.put(0, &[1.0f32; 3]).unwrap();
        if comm.rank() == 0 {
            assert!(reports.recv_timeout(Duration::from_millis(30)).is_err());
        }
        step.finish().unwrap();
        assert_eq!(reports.try_iter().collect::<Vec<_>>(), [(0, 0), (0, 1)]);
        if comm.rank() == 0 {
            assert_eq!(reducer.statistics().overlapped(), Duration::ZERO);
        }
    });
}

#[test]
fn a_hook_that_fails_or_panics_ends_the_step_on_all_ranks() {
    struct Fails(bool);
    impl Hook for Fails {
        fn name(&self) -> String {
            "fails".into()
        }
        fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> kolo::Result<()> {
            if comm.rank() == 1 {
                assert!(!self.0, "the panic of a test");
                bucket.elements::<f64>()?;
            }
            bucket.average(comm)
        }
    }
    for panics in [false, true] {
        on_ranks(2, |comm| {
            let mut reducer = Reducer::builder().parameters(floats(&[3])).hook(Fails(panics)).build(comm).unwrap();
            let step = reducer.begin().unwrap();
            step.put(0, &[1.0f32; 3]).unwrap();
            let error = step.finish().unwrap_err();
            match (comm.rank(), panics) {
                (0, _) => assert!(matches!(error, Error::Peer { rank: 1, .. }), "{error}"),
                (_, false) => assert!(matches!(problem(error), ReducerError::Elements { .. })),
                (_, true) => assert!(error.to_string().contains("panicked"), "{error}"),
            }
        });
    }
}

#[test]
fn buffers_become_those_of_rank_0_or_their_average() {
    on_ranks(3, |comm| {
        let me = comm.rank();
        let parameters = [Parameter::new("w", [2, 2], DType::F32), Parameter::new("h", [3], DType::F16)];
        let buffers = [
            Parameter::new("mean", [2], DType::F64),
            Parameter::new("batches", [], DType::I64),
            Parameter::new("seen", [2], DType::Bool),
            Parameter::new("none", [0], DType::F32),
        ];
        let mut reducer = Reducer::builder().parameters(parameters).buffers(buffers).build(comm).unwrap();
        let (mut w, mut h) = (vec![me as f32; 4], vec![f16::from_f32(me as f32); 3]);
        reducer.broadcast_parameters(&mut [TensorMut::from(&mut w), TensorMut::from(&mut h)]).unwrap();
        assert_eq!((w, h), (vec![0.0; 4], vec![f16::ZERO; 3]));
        let (mut w, mut h) = (vec![me as f32; 4], vec![f16::from_f32(me as f32); 3]);
        reducer.average_parameters(&mut [TensorMut::from(&mut w), TensorMut::from(&mut h)]).unwrap();
        assert_eq!((w.clone(), h), (vec![1.0; 4], vec![f16::ONE; 3]));
        let refused = reducer.broadcast_parameters(&mut [TensorMut::from(&mut w)]).unwrap_err();
        assert!(matches!(problem(refused), ReducerError::Length { expected: 2, given: 1, .. }));

        for (how, mean, root) in [(BufferSync::Broadcast(2), 2.0, 2), (BufferSync::Average, 1.0, 0)] {
            let (mut means, mut batches, mut seen, mut none) = ([me as f64; 2], [me as i64 + 5], [me == 2; 2], [0.0f32; 0]);
            let mut values = [
                TensorMut::from(&mut means[..]),
                TensorMut::from(&mut batches[..]),
                TensorMut::from(&mut seen[..]),
                TensorMut::from(&mut none[..]),
            ];
            reducer.sync_buffers(&mut values, how).unwrap();
            assert_eq!((means, batches, seen), ([mean; 2], [root as i64 + 5], [root == 2; 2]));
        }
        let none = reducer.sync_buffers(&mut [], BufferSync::Average).unwrap_err();
        assert!(matches!(problem(none), ReducerError::Length { expected: 4, given: 0, .. }));
    });
}

#[test]
fn ranks_without_input_join_the_steps_of_the_others() {
    for (uneven, divides_by_world) in [(Uneven::ByWorldSize, true), (Uneven::ByRanksWithInput, false)] {
        for steps in [[3, 1, 5, 0], [0, 2, 2, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 4, 0, 0]] {
            let most = *steps.iter().max().unwrap();
            let ends = on_ranks(4, |comm| {
                let buffers = [Parameter::new("mean", [1], DType::F32)];
                let builder = Reducer::builder().parameters(floats(&[3, 5])).buffers(buffers).unused(Unused::Static);
                let mut reducer = builder.uneven(uneven).first_bucket_bytes(1).bucket_bytes(1).build(comm).unwrap();
                let mut weight = 1.0f32;
                let mut mean = vec![0.0f32];
                for at in 0..steps[comm.rank()] {
                    let active = steps.iter().filter(|&&steps| steps > at).count();
                    let step = reducer.begin().unwrap();
                    // Gradients arrive in another order than the parameters were described.
                    step.put(0, &[12.0f32; 3]).unwrap();
                    step.put(1, &[12.0f32; 5]).unwrap();
                    step.finish().unwrap();
                    let expected = if divides_by_world { 3.0 * active as f32 } else { 12.0 };
                    assert_eq!(reducer.gradient::<f32>(0).unwrap(), [expected; 3]);
                    weight -= 0.01 * reducer.gradient::<f32>(1).unwrap()[0];
                    // The average of the buffers of ranks that have not joined.
                    mean[0] = comm.rank() as f32;
                    reducer.sync_buffers(&mut [TensorMut::from(&mut mean)], BufferSync::Average).unwrap();
                    let there = (0..4).filter(|&rank| steps[rank] > at);
                    assert_eq!(mean[0], there.clone().sum::<usize>() as f32 / there.count() as f32);
                    // A root that has joined is rejected, and nothing changes.
                    let gone = (0..4).find(|&rank| steps[rank] <= at);
                    if let Some(gone) = gone {
                        let how = BufferSync::Broadcast(gone);
                        assert!(reducer.sync_buffers(&mut [TensorMut::from(&mut mean)], how).is_err());
                    }
                }
                let joined = reducer
                    .join(|reducer| {
                        weight -= 0.01 * reducer.gradient::<f32>(1)?[0];
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(joined.steps, (most - steps[comm.rank()]) as u64);
                if most > 0 {
                    assert_eq!(joined.last, steps.iter().position(|&steps| steps == most).unwrap());
                }
                // In the next epoch all ranks have input again.
                reducer.sync_buffers(&mut [TensorMut::from(&mut mean)], BufferSync::Broadcast(joined.last)).unwrap();
                let step = reducer.begin().unwrap();
                step.put(0, &[1.0f32; 3]).unwrap();
                step.put(1, &[1.0f32; 5]).unwrap();
                step.finish().unwrap();
                assert_eq!(reducer.gradient::<f32>(0).unwrap(), [1.0; 3]);
                reducer.join(|_| Ok(())).unwrap();
                (weight.to_bits(), mean[0].to_bits())
            });
            assert!(ends.iter().all(|end| *end == ends[0]), "{steps:?}: {ends:?}");
        }
    }
}

/// Buckets are rebuilt after the first step, but only when the next step begins.
#[test]
fn gradients_stay_until_the_next_step() {
    for uneven in [Uneven::No, Uneven::ByWorldSize, Uneven::ByRanksWithInput] {
        on_ranks(3, |comm| {
            let buffers = [Parameter::new("mean", [1], DType::F32)];
            let builder = Reducer::builder().parameters(floats(&[3, 5, 2])).buffers(buffers);
            let mut reducer = builder.uneven(uneven).first_bucket_bytes(1).bucket_bytes(1).build(comm).unwrap();
            // If ranks may have different numbers of steps, rank 1 has only the first one.
            let steps = if uneven != Uneven::No && comm.rank() == 1 { 1 } else { 4 };
            for at in 0..steps {
                let step = reducer.begin().unwrap();
                // In the order of the parameters, which is the reverse of the first buckets.
                for (parameter, count) in [3, 5, 2].into_iter().enumerate() {
                    step.put(parameter, &vec![(parameter + 1) as f32; count]).unwrap();
                }
                step.finish().unwrap();
                let first = reducer.gradient::<f32>(0).unwrap().as_ptr().addr();
                let mut mean = vec![comm.rank() as f32];
                reducer.sync_buffers(&mut [TensorMut::from(&mut mean)], BufferSync::Average).unwrap();
                let expected = if uneven == Uneven::ByWorldSize && at > 0 { 2.0 / 3.0 } else { 1.0 };
                for (parameter, count) in [3, 5, 2].into_iter().enumerate() {
                    let gradient = reducer.gradient::<f32>(parameter).unwrap();
                    assert!(
                        gradient.iter().all(|value| (value - (parameter + 1) as f32 * expected).abs() < 1e-6),
                        "{gradient:?}"
                    );
                    assert_eq!(gradient.len(), count);
                }
                // The gradients do not move: an address that was handed to C stays valid.
                assert_eq!(reducer.gradient::<f32>(0).unwrap().as_ptr().addr(), first);
            }
            if uneven != Uneven::No {
                reducer.join(|_| Ok(())).unwrap();
            }
            // Now the buckets are rebuilt.
            assert_eq!(reducer.statistics().buckets.iter().map(|bucket| bucket.bytes).collect::<Vec<_>>(), [12, 20, 8]);
        });
    }
}

#[test]
fn ranks_that_make_different_calls_get_an_error() {
    on_ranks(2, |comm| {
        let buffers = [Parameter::new("mean", [1], DType::F32)];
        let builder = Reducer::builder().parameters(floats(&[3])).buffers(buffers).uneven(Uneven::ByWorldSize);
        let mut reducer = builder.build(comm).unwrap();
        let error = if comm.rank() == 0 {
            reducer.sync_buffers(&mut [TensorMut::from(&mut vec![1.0f32])], BufferSync::Average).unwrap_err()
        } else {
            let step = reducer.begin().unwrap();
            // The call may come before or after this rank learns of the failure.
            let put = step.put(0, &[1.0f32; 3]);
            put.and_then(|()| step.finish()).unwrap_err()
        };
        assert!(
            error.to_string().contains("another rank calls something else") || matches!(error, Error::Peer { .. }),
            "{error}"
        );
    });
}

#[test]
fn a_reducer_may_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Reducer>();
    shared::<kolo::ddp::Step<'_>>();
    shared::<kolo::ddp::View<'_, f32>>();
}

#[test]
fn two_reducers_of_one_communicator_do_not_disturb_each_other() {
    let done = AtomicBool::new(false);
    on_ranks(2, |comm| {
        let mut reducers: Vec<Reducer> =
            (0..2).map(|i| Reducer::builder().parameters(floats(&[3 + i])).build(comm).unwrap()).collect();
        let (first, second) = reducers.split_at_mut(1);
        let (one, two) = (first[0].begin().unwrap(), second[0].begin().unwrap());
        // In a different order on each rank, with calls of the communicator between them.
        let value = [comm.rank() as f32; 4];
        if comm.rank() == 0 {
            one.put(0, &value[..3]).unwrap();
            two.put(0, &value).unwrap();
        } else {
            two.put(0, &value).unwrap();
            one.put(0, &value[..3]).unwrap();
        }
        comm.barrier().unwrap();
        two.finish().unwrap();
        one.finish().unwrap();
        assert_eq!(reducers[1].gradient::<f32>(0).unwrap(), [0.5; 4]);
        done.store(true, Ordering::Relaxed);
    });
    assert!(done.into_inner());
}
