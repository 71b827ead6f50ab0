//! Stochastic gradient descent with momentum, and the learning rate.

use clap::ValueEnum;
use kolo::ddp::Reducer;

use crate::engine::Engine;
use crate::model::{Model, Name};
use crate::rule::Rule;

/// The optimiser of He et al., as PyTorch computes it: weight decay is part of the gradient, and
/// the learning rate is not part of the velocity.
pub(crate) struct Sgd<E: Engine> {
    pub(crate) momentum: f32,
    pub(crate) weight_decay: f32,
    /// The velocity of each parameter, by number.
    pub(crate) velocities: Vec<E::Tensor>,
}

impl<E: Engine> Sgd<E> {
    /// Makes the optimiser of a model, with velocities of 0.
    pub(crate) fn new(model: &Model<E>, momentum: f32, weight_decay: f32) -> Sgd<E> {
        let zeros = |name: &Name| model.engine().constant(vec![0.0; name.count()], &name.shape);
        Sgd { momentum, weight_decay, velocities: model.names().iter().map(zeros).collect() }
    }

    /// Updates all parameters by the averages of their gradients.
    pub(crate) fn step(&mut self, rate: f32, reducer: &Reducer, model: &mut Model<E>) -> kolo::Result<()> {
        let rule = Rule { rate, momentum: self.momentum, weight_decay: self.weight_decay };
        let each = self.velocities.iter_mut().enumerate();
        each.into_iter().try_for_each(|(number, velocity)| model.descend(&rule, reducer, number, velocity))
    }
}

/// How the learning rate falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Decay {
    /// It falls to a tenth every `--lr-step` epochs
    Step,
    /// It falls to 0 along half a cosine (Loshchilov and Hutter, 2016)
    Cosine,
    /// It stays the same
    None,
}

/// How the learning rate grows with the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scale {
    /// --lr is for 256 images; for k times as many images the rate is k times as large
    Linear,
    /// --lr is for 256 images; for k times as many images the rate is sqrt(k) times as large
    Sqrt,
    /// --lr is the rate for any batch
    None,
}

impl Scale {
    /// Returns the factor for a number of images in a step of all ranks.
    pub(crate) fn factor(self, batch: usize) -> f64 {
        let times = batch as f64 / 256.0;
        match self {
            Scale::Linear => times,
            Scale::Sqrt => times.sqrt(),
            Scale::None => 1.0,
        }
    }
}

/// The learning rate over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// The rate before scaling.
    pub(crate) base: f64,
    /// The scale for the batch.
    pub(crate) factor: f64,
    pub(crate) decay: Decay,
    pub(crate) step: usize,
    pub(crate) epochs: usize,
    /// The epochs in which the rate grows from `base`, or from 0 if it is not scaled, to the scaled
    /// rate (Goyal et al.: Accurate, Large Minibatch SGD, 2017).
    pub(crate) warmup: f64,
}

impl Rate {
    /// Returns the rate after a number of epochs, which may be a fraction.
    pub(crate) fn at(&self, epoch: f64) -> f64 {
        let full = self.base * self.factor;
        if epoch < self.warmup {
            let from = if self.factor > 1.0 { self.base } else { 0.0 };
            return from + (full - from) * epoch / self.warmup;
        }
        match self.decay {
            Decay::Step => full * 0.1f64.powi((epoch as usize / self.step) as i32),
            Decay::Cosine => {
                let passed = (epoch - self.warmup) / (self.epochs as f64 - self.warmup).max(1e-9);
                full * 0.5 * (1.0 + (std::f64::consts::PI * passed.min(1.0)).cos())
            }
            Decay::None => full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_warms_up_and_falls() {
        let rate = Rate { base: 0.1, factor: 4.0, decay: Decay::Step, step: 30, epochs: 90, warmup: 5.0 };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(rate.at(0.0), 0.1);
        close(rate.at(2.5), 0.25);
        close(rate.at(29.9), 0.4);
        close(rate.at(60.0), 0.004);
        let cosine = Rate { decay: Decay::Cosine, warmup: 0.0, factor: 1.0, epochs: 10, ..rate };
        close(cosine.at(0.0), 0.1);
        close(cosine.at(5.0), 0.05);
        close(cosine.at(10.0), 0.0);
        let short = Rate { factor: 1.0, warmup: 1.0, ..cosine };
        close(short.at(0.5), 0.05);
        assert_eq!([Scale::Linear, Scale::Sqrt, Scale::None].map(|scale| scale.factor(1024)), [4.0, 2.0, 1.0]);
    }
}
