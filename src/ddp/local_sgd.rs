//! Local SGD: ranks train on their own, and average their parameters from time to time.

use super::hook::{Bucket, Hook};
use super::parameter::TensorMut;
use super::reducer::Reducer;
use crate::communicator::Communicator;
use crate::error::Result;

/// Local SGD: after a warm-up every rank steps with its own gradients, and parameters are averaged
/// every few steps (Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et
/// al.: "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020).
///
/// Pass [`LocalSgd::hook`] to [`ReducerBuilder::hook`](super::ReducerBuilder::hook), and call
/// [`LocalSgd::after_step`] after every step of the optimiser.
///
/// ```
/// use kolo::DType;
/// use kolo::ddp::{LocalSgd, Parameter, Reducer, TensorMut};
///
/// # fn main() -> kolo::Result<()> {
/// let comm = kolo::Communicator::from_env()?;
/// // The first 10 steps average gradients. Then every 4th step averages parameters.
/// let local = LocalSgd::new(4).warm_up(10);
/// let mut weight = vec![0.5f32; 6];
/// let parameters = [Parameter::new("weight", [2, 3], DType::F32)];
/// let mut reducer = Reducer::builder().parameters(parameters).hook(local.hook()).build(&comm)?;
/// reducer.broadcast_parameters(&mut [TensorMut::from(&mut weight)])?;
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
#[derive(Clone, Debug)]
pub struct LocalSgd {
    every: u64,
    warm_up: u64,
}

impl LocalSgd {
    /// Averages parameters every `every` steps. 0 counts as 1.
    pub fn new(every: u64) -> LocalSgd {
        LocalSgd { every: every.max(1), warm_up: 0 }
    }

    /// Averages gradients for this many steps first. Default: 0.
    pub fn warm_up(mut self, steps: u64) -> LocalSgd {
        self.warm_up = steps;
        self
    }

    /// Returns the hook, which leaves gradients as they are after the warm-up.
    pub fn hook(&self) -> impl Hook + 'static {
        KeepLocal { every: self.every, warm_up: self.warm_up }
    }

    /// Averages the parameters if that is due after the last step. Returns whether it was.
    ///
    /// A collective call. Ranks that have [joined](Reducer::join) do not make it and get no
    /// average: they keep their parameters until all ranks have input again and the next average is
    /// due.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::average_parameters`].
    pub fn after_step(&self, reducer: &mut Reducer, parameters: &mut [TensorMut<'_>]) -> Result<bool> {
        let steps = reducer.core.between("after_step")?.steps;
        let is_time = steps > self.warm_up && (steps - self.warm_up).is_multiple_of(self.every);
        if is_time {
            reducer.average_parameters(parameters)?;
        }
        Ok(is_time)
    }
}

struct KeepLocal {
    every: u64,
    warm_up: u64,
}

impl Hook for KeepLocal {
    fn name(&self) -> String {
        format!("local SGD, averaging every {} steps after {}", self.every, self.warm_up)
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        if self.averages(bucket.step()) { bucket.average(comm) } else { Ok(()) }
    }

    fn averages(&self, step: u64) -> bool {
        step < self.warm_up
    }
}
