//! Local SGD: ranks train on their own, and average their parameters from time to time.

use super::float::Float;
use super::hook::{Bucket, Hook, with_float};
use super::parameter::TensorMut;
use super::reducer::Reducer;
use crate::communicator::Communicator;
use crate::error::{ReducerError, Result};
use crate::types::DType;

/// Local SGD: after a warm-up every rank steps with its own gradients, and parameters are averaged
/// every few steps (Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et
/// al.: "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020).
///
/// Pass [`LocalSgd::hook`] to [`ReducerBuilder::hook`](super::ReducerBuilder::hook), call
/// [`LocalSgd::start`] before the first step, and [`LocalSgd::after_step`] after every step of the
/// optimiser.
///
/// ```
/// use kolo::DType;
/// use kolo::ddp::{LocalSgd, Parameter, Reducer, TensorMut};
///
/// # fn main() -> kolo::Result<()> {
/// let comm = kolo::Communicator::from_env()?;
/// // The first 10 steps average gradients. Then every 4th step averages parameters.
/// let mut local = LocalSgd::new(4).warm_up(10);
/// let mut weight = vec![0.5f32; 6];
/// let parameters = [Parameter::new("weight", [2, 3], DType::F32)];
/// let mut reducer = Reducer::builder().parameters(parameters).hook(local.hook()).build(&comm)?;
/// local.start(&mut reducer, &mut [TensorMut::from(&mut weight)])?;
/// for at in 1..=20 {
///     let step = reducer.begin()?;
///     step.put(0, &[1.0f32; 6])?;
///     step.finish()?;
///     for (value, gradient) in weight.iter_mut().zip(reducer.gradient::<f32>(0)?) {
///         *value -= 0.1 * gradient;
///     }
///     let averaged = local.after_step(&mut reducer, &mut [TensorMut::from(&mut weight)])?;
///     assert_eq!(averaged, at == 14 || at == 18);
/// }
/// # Ok(())
/// # }
/// ```
///
/// With [`LocalSgd::outer`] it is DiLoCo: the average of how far the ranks have come is the gradient of
/// a second optimiser, so that few averages do (Douillard et al.: "DiLoCo: Distributed Low-Communication
/// Training of Language Models", 2023). With [`Builder::wire_dtype`](crate::Builder::wire_dtype), what is
/// averaged then may have 8 bits for each element.
#[derive(Debug)]
pub struct LocalSgd {
    every: u64,
    warm_up: u64,
    outer: Option<Outer>,
}

/// The outer optimiser of DiLoCo: SGD with Nesterov momentum, as PyTorch's.
#[derive(Debug)]
struct Outer {
    learning_rate: f32,
    momentum: f32,
    /// For each parameter.
    kept: Vec<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The parameter after the last outer step, in which all ranks have the same bits.
    last: Vec<f32>,
    velocity: Vec<f32>,
}

impl LocalSgd {
    /// Averages parameters every `every` steps. 0 counts as 1.
    pub fn new(every: u64) -> LocalSgd {
        LocalSgd { every: every.max(1), warm_up: 0, outer: None }
    }

    /// Averages gradients for this many steps first. Default: 0.
    pub fn warm_up(mut self, steps: u64) -> LocalSgd {
        self.warm_up = steps;
        self
    }

    /// Gives the averaged difference since the last average to an outer optimiser with Nesterov momentum;
    /// 0.7 and 0.9 are usual. A learning rate of 1 without momentum is the plain average.
    ///
    /// Supports parameters of `f32`, `f16` and `bf16` in host memory, and keeps two `f32` for each
    /// element.
    pub fn outer(mut self, learning_rate: f32, momentum: f32) -> LocalSgd {
        self.outer = Some(Outer { learning_rate, momentum, kept: Vec::new() });
        self
    }

    /// Returns the hook, which leaves gradients as they are after the warm-up.
    pub fn hook(&self) -> impl Hook + use<> {
        let outer = self.outer.as_ref().map(|outer| (outer.learning_rate, outer.momentum));
        KeepLocal { every: self.every, warm_up: self.warm_up, outer }
    }

    /// Gives all ranks rank 0's parameters and what its outer optimiser keeps. Call it before the first
    /// step, with a new reducer after ranks have left or come, and after [`Reducer::join`].
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::broadcast_parameters`]; with an outer optimiser, [`ReducerError::Elements`] for a
    /// parameter of `f64`, and [`ReducerError::Place`] for one on a device.
    pub fn start(&mut self, reducer: &mut Reducer, parameters: &mut [TensorMut<'_>]) -> Result<()> {
        let Some(outer) = &mut self.outer else { return reducer.broadcast_parameters(parameters) };
        for described in reducer.parameters() {
            if described.dtype == DType::F64 {
                described.expect(DType::F32)?;
            }
            described.expect_place(false)?;
        }
        reducer.broadcast_parameters(parameters)?;
        outer.kept.resize_with(parameters.len(), Kept::default);
        for (kept, tensor) in outer.kept.iter_mut().zip(parameters) {
            kept.last.clear();
            each(tensor, |value| {
                kept.last.push(value);
                value
            });
            // A newcomer has none.
            kept.velocity.resize(kept.last.len(), 0.0);
            reducer.core.comm.broadcast(&mut kept.velocity, 0)?;
        }
        Ok(())
    }

    /// Averages the parameters if that is due after the last step, and makes the outer step. Returns
    /// whether it was.
    ///
    /// A collective call. Ranks that have [joined](Reducer::join) do not make it and get no
    /// average: they keep their parameters until all ranks have input again and the next average is
    /// due.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::average_parameters`]; with an outer optimiser, [`ReducerError::Moment`] before
    /// [`LocalSgd::start`]. If the average fails then, the parameters are those of the last outer step.
    pub fn after_step(&mut self, reducer: &mut Reducer, parameters: &mut [TensorMut<'_>]) -> Result<bool> {
        let steps = reducer.core.between("after_step")?.steps;
        let is_time = steps > self.warm_up && (steps - self.warm_up).is_multiple_of(self.every);
        let Some(outer) = &mut self.outer else {
            if is_time {
                reducer.average_parameters(parameters)?;
            }
            return Ok(is_time);
        };
        if outer.kept.len() != parameters.len() {
            let why = "the outer optimiser has no parameters yet; call start first";
            return Err(ReducerError::Moment { call: "after_step", why }.into());
        }
        if steps == self.warm_up {
            // Until here all ranks had the same gradients.
            outer.take(parameters);
        }
        if is_time {
            outer.step(reducer, parameters)?;
        }
        Ok(is_time)
    }
}

impl Outer {
    /// Takes the parameters, which are those of all ranks.
    fn take(&mut self, parameters: &mut [TensorMut<'_>]) {
        for (kept, tensor) in self.kept.iter_mut().zip(parameters) {
            let mut last = kept.last.iter_mut();
            each(tensor, |value| {
                last.next().into_iter().for_each(|last| *last = value);
                value
            });
        }
    }

    fn step(&mut self, reducer: &mut Reducer, parameters: &mut [TensorMut<'_>]) -> Result<()> {
        for (kept, tensor) in self.kept.iter().zip(parameters.iter_mut()) {
            let mut last = kept.last.iter();
            each(tensor, |value| last.next().map_or(value, |last| last - value));
        }
        let averaged = reducer.average_parameters(parameters);
        let (rate, momentum) = (self.learning_rate, self.momentum);
        for (Kept { last, velocity }, tensor) in self.kept.iter_mut().zip(parameters) {
            let mut elements = last.iter_mut().zip(velocity);
            each(tensor, |gradient| {
                let Some((last, velocity)) = elements.next() else { return gradient };
                if averaged.is_ok() {
                    *velocity = momentum * *velocity + gradient;
                    *last -= rate * (gradient + momentum * *velocity);
                }
                *last
            });
        }
        averaged
    }
}

/// Replaces each element of a tensor in host memory.
fn each(tensor: &mut TensorMut<'_>, mut with: impl FnMut(f32) -> f32) {
    with_float!(tensor.dtype, T => {
        // SAFETY: the tensor borrows its elements mutably, they have this type, and `start` has refused
        // those on a device.
        let values = unsafe { std::slice::from_raw_parts_mut(tensor.memory.ptr.cast::<T>(), tensor.count) };
        values.iter_mut().for_each(|value| *value = T::of_single(with(value.to_single())));
    });
}

struct KeepLocal {
    every: u64,
    warm_up: u64,
    /// The learning rate and momentum of the outer optimiser.
    outer: Option<(f32, f32)>,
}

impl Hook for KeepLocal {
    fn name(&self) -> String {
        let name = format!("local SGD, averaging every {} steps after {}", self.every, self.warm_up);
        match self.outer {
            Some((rate, momentum)) => format!("{name}, with outer steps of {rate} and momentum {momentum}"),
            None => name,
        }
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        if self.averages(bucket.step()) { bucket.average(comm) } else { Ok(()) }
    }

    fn averages(&self, step: u64) -> bool {
        step < self.warm_up
    }
}
