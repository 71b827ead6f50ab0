//! The hooks of the reducer on ranks that are threads: compression, its errors and their bounds,
//! and local SGD.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::common::gradients::{floats, on_ranks, typed};
use crate::common::random;
use kolo::ddp::{Bucket, Compress, Hook, LocalSgd, Parameter, PowerSgd, Reducer, ReducerBuilder, TensorMut, Uneven};
use kolo::{Communicator, DType, bf16, f16};

/// Runs steps of a reducer with a hook on the gradients of `gradient`. Returns the result of each
/// step, which is the same on all ranks.
fn reduced(
    world: usize,
    parameters: &[Parameter],
    hook: fn(ReducerBuilder) -> ReducerBuilder,
    steps: usize,
    gradient: impl Fn(usize, usize, usize, usize) -> f32 + Sync,
) -> Vec<Vec<f32>> {
    let results = on_ranks(world, |comm| {
        let builder = Reducer::builder().parameters(parameters.to_vec()).first_bucket_bytes(100).bucket_bytes(1000);
        let mut reducer = hook(builder).build(comm).unwrap();
        let step_of = |at: usize| {
            let step = reducer.begin().unwrap();
            for (index, parameter) in parameters.iter().enumerate() {
                let values = (0..parameter.count()).map(|element| gradient(comm.rank(), at, index, element));
                typed!(parameter.dtype, T => {
                    let values: Vec<T> = values.map(<T as Narrow>::narrow).collect();
                    step.put(index, &values).unwrap();
                });
            }
            step.finish().unwrap();
            let mut all = Vec::new();
            for (index, parameter) in parameters.iter().enumerate() {
                typed!(parameter.dtype, T => all.extend(reducer.gradient::<T>(index).unwrap().iter().map(|&value| value.widen())));
            }
            all
        };
        (0..steps).map(step_of).collect::<Vec<_>>()
    });
    let bits = |result: &Vec<Vec<f32>>| result.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(results.iter().all(|other| bits(other) == bits(&results[0])), "bits differ between ranks");
    results.into_iter().next().unwrap()
}

/// A hook that says when it runs, and then waits for the end of the test.
struct Blocks(Sender<()>, Receiver<()>);

impl Hook for Blocks {
    fn name(&self) -> String {
        "blocks".to_owned()
    }

    fn reduce(&mut self, _: &mut Bucket<'_>, _: &Communicator) -> kolo::Result<()> {
        self.0.send(()).unwrap();
        _ = self.1.recv();
        Ok(())
    }
}

/// The memory that the hook uses stays.
#[test]
fn a_reducer_whose_hook_does_not_return_can_be_dropped() {
    on_ranks(2, |comm| {
        let ((says, runs), (ends, end)) = (channel(), channel());
        let builder = Reducer::builder().parameters(floats(&[100])).hook(Blocks(says, end));
        let mut reducer = builder.build(comm).unwrap();
        let step = reducer.begin().unwrap();
        step.put(0, &[1.0f32; 100]).unwrap();
        runs.recv().unwrap();
        drop(step);
        drop(reducer);
        drop(ends);
    });
}

trait Narrow: Sized {
    fn narrow(value: f32) -> Self;
    fn widen(self) -> f32;
}

macro_rules! narrow {
    ($($type:ty, |$x:ident| $narrow:expr, $widen:expr;)*) => {$(
        impl Narrow for $type {
            fn narrow($x: f32) -> Self { $narrow }
            fn widen(self) -> f32 { let $x = self; $widen }
        }
    )*};
}

narrow! {
    f32, |x| x, x;
    f64, |x| x.into(), x as f32;
    f16, |x| f16::from_f32(x), x.to_f32();
    bf16, |x| bf16::from_f32(x), x.to_f32();
}

/// Returns a number in -1..1 for a place.
fn noise(rank: usize, step: usize, parameter: usize, element: usize) -> f32 {
    let place = ((rank * 1000 + step) * 100 + parameter) * 100_000 + element;
    (random(5, place as u64) % 20_001) as f32 / 10_000.0 - 1.0
}

fn model() -> Vec<Parameter> {
    vec![
        Parameter::new("conv", [8, 4, 3, 3], DType::F32),
        Parameter::new("norm", [8], DType::F32),
        Parameter::new("half", [20, 16], DType::BF16),
        Parameter::new("double", [12, 20], DType::F64),
        Parameter::new("linear", [40, 30], DType::F32),
        Parameter::new("bias", [40], DType::F32),
    ]
}

#[test]
fn compressed_gradients_are_close() {
    let model = model();
    let plain = reduced(3, &model, |builder| builder, 2, noise);
    let near = |hook: fn(ReducerBuilder) -> ReducerBuilder, tolerance: f32| {
        let compressed = reduced(3, &model, hook, 2, noise);
        for (got, expected) in compressed.iter().flatten().zip(plain.iter().flatten()) {
            assert!((got - expected).abs() <= tolerance, "{got} for {expected}");
        }
        assert_ne!(compressed, plain, "nothing was compressed");
    };
    // Each of the three terms, which are below 1/3, is rounded once, and so is their sum.
    near(|builder| builder.hook(Compress::f16()), 4.0 * f16::EPSILON.to_f32());
    near(|builder| builder.hook(Compress::bf16()), 4.0 * bf16::EPSILON.to_f32());
}

#[test]
fn sums_of_compressed_gradients_stay_in_range() {
    let large = reduced(4, &floats(&[100]), |builder| builder.hook(Compress::f16()), 1, |_, _, _, _| 60_000.0);
    assert!(large[0].iter().all(|&value| value == 60_000.0), "{large:?}");
}

#[test]
fn power_sgd_sends_gradients_of_its_rank_whole() {
    // Each gradient is a product of two vectors, the same on all ranks up to a factor.
    let model: Vec<Parameter> = model().into_iter().filter(|parameter| parameter.dtype != DType::BF16).collect();
    let gradient = |rank: usize, step: usize, parameter: usize, element: usize| {
        let columns: usize = model[parameter].shape[1..].iter().product();
        let of = |what: usize, at: usize| noise(7, step, what, at);
        (rank + 1) as f32 * of(parameter, element / columns) * of(10 + parameter, element % columns)
    };
    let plain = reduced(2, &model, |builder| builder, 3, gradient);
    let power = reduced(2, &model, |builder| builder.hook(PowerSgd::new(1)), 3, gradient);
    for (got, expected) in power.iter().flatten().zip(plain.iter().flatten()) {
        assert!((got - expected).abs() <= 1e-4, "{got} for {expected}");
    }
}

#[test]
fn power_sgd_sends_later_what_it_does_not_send_now() {
    let model = model();
    for hook in [
        (|builder| builder.hook(PowerSgd::new(1))) as fn(ReducerBuilder) -> ReducerBuilder,
        |builder| builder.hook(PowerSgd::new(2)),
        |builder| builder.hook(PowerSgd::new(4)),
        |builder| builder.hook(PowerSgd::new(2).start_after(2)),
    ] {
        // After some steps with gradients, steps with zeros must deliver the rest.
        let given = |rank, step, parameter, element| if step < 5 { noise(rank, step, parameter, element) } else { 0.0 };
        let plain = reduced(3, &model, |builder| builder, 5, given);
        let power = reduced(3, &model, hook, 400, given);
        let sum = |steps: &[Vec<f32>], element: usize| steps.iter().map(|step| f64::from(step[element])).sum::<f64>();
        let distance = |until: usize| {
            let missing = |element| sum(&plain, element) - sum(&power[..until], element);
            (0..plain[0].len()).map(|element| missing(element).abs()).fold(0.0, f64::max)
        };
        assert!(distance(5) > 0.1, "nothing was compressed: all was sent at once");
        // bf16 rounds what it receives, and the rounding error is fed back too.
        assert!(distance(400) < 0.01, "{} is missing", distance(400));
    }
}

#[test]
fn power_sgd_survives_gradients_that_are_not_finite() {
    let given = |_: usize, step: usize, _: usize, element: usize| match step {
        1 if element == 3 => f32::INFINITY,
        _ => (element % 7) as f32 - 3.0,
    };
    let parameters = [Parameter::new("linear", [40, 30], DType::F32)];
    let power = reduced(2, &parameters, |builder| builder.hook(PowerSgd::new(2)), 4, given);
    assert!(power[1].iter().any(|value| !value.is_finite()));
    assert!(power[2..].iter().flatten().all(|value| value.is_finite()));
    assert!(power[2..].iter().all(|step| step.iter().any(|&value| value != 0.0)), "the hook sends only zeros");
}

#[test]
fn power_sgd_trains_to_the_same_optimum_as_averaging() {
    // Least squares: each rank has the gradient of its own target, and the optimum is the average
    // of the targets.
    let (rows, columns) = (12, 18);
    let ends = on_ranks(2, |comm| {
        let parameters = [Parameter::new("w", [rows, columns], DType::F32)];
        let mut reducer = Reducer::builder().parameters(parameters).hook(PowerSgd::new(2)).build(comm).unwrap();
        let mut weight = vec![0.0f32; rows * columns];
        for _ in 0..400 {
            let gradient: Vec<f32> = weight.iter().enumerate().map(|(i, w)| w - noise(comm.rank(), 0, 0, i)).collect();
            let step = reducer.begin().unwrap();
            step.put(0, &gradient).unwrap();
            step.finish().unwrap();
            for (w, g) in weight.iter_mut().zip(reducer.gradient::<f32>(0).unwrap()) {
                *w -= 0.1 * g;
            }
        }
        weight
    });
    for (i, w) in ends[0].iter().enumerate() {
        let best = (noise(0, 0, 0, i) + noise(1, 0, 0, i)) / 2.0;
        assert!((w - best).abs() < 0.02, "{w} for {best}");
    }
    assert_eq!(ends[0], ends[1]);
}

#[test]
fn a_hook_in_a_box_is_that_hook() {
    let local = LocalSgd::new(3).warm_up(2);
    let hook: Box<dyn Hook> = Box::new(local.hook());
    assert_eq!(hook.name(), local.hook().name());
    assert!(hook.averages(1) && !hook.averages(2));
    on_ranks(2, |comm| {
        let chosen: [Box<dyn Hook>; 2] = [Box::new(Compress::bf16()), Box::new(local.hook())];
        for hook in chosen {
            let mut reducer =
                Reducer::builder().parameters([Parameter::new("w", [4], DType::F32)]).hook(hook).build(comm).unwrap();
            let mut weights = [comm.rank() as f32; 4];
            reducer.broadcast_parameters(&mut [TensorMut::from(&mut weights)]).unwrap();
            assert_eq!(weights, [0.0; 4]);
            let step = reducer.begin().unwrap();
            step.put(0, &[2.0 * comm.rank() as f32; 4]).unwrap();
            step.finish().unwrap();
            assert_eq!(*reducer.gradient::<f32>(0).unwrap(), [1.0; 4]);
        }
    });
}

#[test]
fn local_sgd_averages_parameters_now_and_then() {
    on_ranks(2, |comm| {
        let mut averager = LocalSgd::new(3).warm_up(2);
        let mut reducer = Reducer::builder().parameters(floats(&[4])).hook(averager.hook()).build(comm).unwrap();
        let mut weight = vec![0.0f32; 4];
        let mut averaged = Vec::new();
        for _ in 0..8 {
            let step = reducer.begin().unwrap();
            step.put(0, &[comm.rank() as f32; 4]).unwrap();
            step.finish().unwrap();
            weight[0] += reducer.gradient::<f32>(0).unwrap()[0];
            averaged.push(averager.after_step(&mut reducer, &mut [TensorMut::from(&mut weight)]).unwrap());
        }
        assert_eq!(averaged, [false, false, false, false, true, false, false, true]);
        // Two averaged steps, and local steps that sum up to the same on each rank.
        assert_eq!(weight[0], 4.0);
    });
}

/// Outer steps are those of PyTorch's SGD with Nesterov momentum on the averaged difference. A newcomer
/// that has none of it gets what rank 0 keeps.
#[test]
fn the_outer_optimiser_of_local_sgd_steps_by_the_averaged_difference() {
    let bits = Mutex::new(Vec::new());
    on_ranks(3, |comm| {
        let (rate, momentum) = (0.7f32, 0.9f32);
        let mut local = LocalSgd::new(2).warm_up(1).outer(rate, momentum);
        let mut reducer = Reducer::builder().parameters(floats(&[300, 2])).hook(local.hook()).build(comm).unwrap();
        let mut weights = [vec![comm.rank() as f32; 300], vec![7.0; 2]];
        let early = local.after_step(&mut reducer, &mut weights.each_mut().map(TensorMut::from)).unwrap_err();
        assert!(early.to_string().contains("call start first"), "{early}");
        local.start(&mut reducer, &mut weights.each_mut().map(TensorMut::from)).unwrap();
        assert_eq!(weights[0], vec![0.0; 300]);
        let (mut last, mut velocity) = ([0.0f32, 7.0], [0f32; 2]);
        for at in 1..=9 {
            if at == 6 {
                // Of another run, as a newcomer's, with the steps of the reducer.
                let fresh = LocalSgd::new(2).warm_up(1).outer(rate, momentum);
                if comm.rank() == 2 {
                    local = fresh;
                }
                local.start(&mut reducer, &mut weights.each_mut().map(TensorMut::from)).unwrap();
            }
            let step = reducer.begin().unwrap();
            let own = (comm.rank() + at) as f32;
            step.put(0, &[own; 300]).unwrap();
            step.put(1, &[-own; 2]).unwrap();
            step.finish().unwrap();
            for (index, weight) in weights.iter_mut().enumerate() {
                weight.iter_mut().zip(reducer.gradient::<f32>(index).unwrap()).for_each(|(value, gradient)| *value += gradient);
            }
            let is_time = local.after_step(&mut reducer, &mut weights.each_mut().map(TensorMut::from)).unwrap();
            assert_eq!(is_time, at > 1 && at % 2 == 1);
            if at == 1 {
                // The averaged gradient, 2 and -2.
                last = [2.0, 5.0];
            }
            if is_time {
                // Both steps since then: (at - 1 + at) and twice the rank, which is 1 on average.
                let moved = (2 * at + 1) as f32;
                for (index, sign) in [(0, 1.0f32), (1, -1.0)] {
                    let gradient = -sign * moved;
                    velocity[index] = momentum * velocity[index] + gradient;
                    last[index] -= rate * (gradient + momentum * velocity[index]);
                    for got in &weights[index] {
                        assert!((got - last[index]).abs() < 1e-3, "{got} and not {} after {at}", last[index]);
                    }
                }
            }
        }
        bits.lock().unwrap().push(weights.map(|weight| weight.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()));
    });
    let bits = bits.into_inner().unwrap();
    assert!(bits.iter().all(|other| *other == bits[0]));
    // Of a type or in memory that it does not support.
    on_ranks(1, |comm| {
        let mut local = LocalSgd::new(2).outer(1.0, 0.0);
        let mut reducer = Reducer::builder().parameters([Parameter::new("w", [4], DType::F64)]).build(comm).unwrap();
        let refused = local.start(&mut reducer, &mut [TensorMut::from(&mut [0f64; 4])]).unwrap_err();
        assert!(refused.to_string().contains("f64"), "{refused}");
    });
}

/// Gradients that are not averaged are not divided either, and ranks that have joined count the
/// steps.
#[test]
fn local_sgd_leaves_gradients_alone_when_ranks_have_joined() {
    on_ranks(4, |comm| {
        let mut averager = LocalSgd::new(2).warm_up(1);
        let builder = Reducer::builder().parameters(floats(&[4])).hook(averager.hook());
        let mut reducer = builder.uneven(Uneven::ByRanksWithInput).build(comm).unwrap();
        let own = 8.0 + comm.rank() as f32;
        let mut weight = vec![own; 4];
        let steps = if comm.rank() == 3 { 0 } else { 3 };
        for at in 0..steps {
            let step = reducer.begin().unwrap();
            step.put(0, &[own; 4]).unwrap();
            step.finish().unwrap();
            let expected = if at == 0 { 9.0 } else { own };
            assert_eq!(reducer.gradient::<f32>(0).unwrap(), [expected; 4], "step {at}");
            let is_time = averager.after_step(&mut reducer, &mut [TensorMut::from(&mut weight)]).unwrap();
            assert_eq!(is_time, at == 2);
        }
        assert_eq!(weight[0], if steps > 0 { 9.0 } else { own });
        reducer.join(|_| Ok(())).unwrap();
        // In the next epoch, all ranks average after the second step.
        for at in 0..2 {
            let step = reducer.begin().unwrap();
            step.put(0, &[own; 4]).unwrap();
            step.finish().unwrap();
            let is_time = averager.after_step(&mut reducer, &mut [TensorMut::from(&mut weight)]).unwrap();
            assert_eq!(is_time, at == 1);
        }
        assert_eq!(weight[0], (9.0 * 3.0 + 11.0) / 4.0);
    });
}
