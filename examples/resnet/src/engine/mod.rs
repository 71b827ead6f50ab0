//! The part of a tensor library that the trainer needs.
//!
//! The models, the backward pass by segments and the optimiser are written once, over [`Engine`].

mod flex;
#[cfg(feature = "tch")]
mod torch;

use clap::ValueEnum;
use kolo::Communicator;
use kolo::ddp::{Parameter, Reducer, ReducerBuilder, Step, TensorMut};

use crate::loss::Outcome;
use crate::rule::Rule;

pub(crate) use flex::Flex;
#[cfg(feature = "tch")]
pub(crate) use torch::Torch;

/// The engines of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// burn's CPU backend, in Rust
    Flex,
    /// libtorch on the CPU
    #[cfg(feature = "tch")]
    Torch,
    /// libtorch on a GPU, which ranks may share
    #[cfg(feature = "tch")]
    TorchCuda,
}

/// Tensors of f32 with reverse-mode differentiation. Images are `[batch, channels, height, width]`.
pub(crate) trait Engine {
    /// A tensor with its history. Clones share their memory.
    type Tensor: Clone;
    /// The gradients that [`backward`](Engine::backward) computed.
    type Gradients;
    /// The sums of the outcomes of batches.
    type Outcomes;

    /// Returns the name of the engine and its device.
    fn name(&self) -> String;

    /// Makes a tensor of these values that has no gradient.
    fn constant(&self, values: Vec<f32>, shape: &[usize]) -> Self::Tensor;

    /// Makes a leaf of the same values, without a history, for which [`backward`](Engine::backward)
    /// computes the gradient.
    fn leaf(&self, tensor: Self::Tensor) -> Self::Tensor;

    /// Returns the same values without a history.
    fn detach(&self, tensor: Self::Tensor) -> Self::Tensor;

    /// Returns the number of values.
    fn count(&self, tensor: &Self::Tensor) -> usize;

    /// Copies a tensor that has no gradient to memory of its own.
    fn copy(&self, tensor: &Self::Tensor) -> Self::Tensor;

    /// Copies the values by rows to host memory.
    fn read(&self, tensor: &Self::Tensor, into: &mut [f32]);

    /// Convolves. `weight` is `[out, in, size, size]`; `padding` is the number of zeros on each
    /// side.
    fn conv2d(&self, x: Self::Tensor, weight: Self::Tensor, stride: usize, padding: usize) -> Self::Tensor;

    /// Normalises each channel by its mean and variance in this batch. Also returns the mean and
    /// the biased variance, `[channels]`.
    fn batch_norm(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor) -> [Self::Tensor; 3];

    /// Normalises each channel by this mean and variance.
    fn batch_norm_by(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor, by: [Self::Tensor; 2]) -> Self::Tensor;

    /// Replaces negative values by 0.
    fn relu(&self, x: Self::Tensor) -> Self::Tensor;

    /// Adds element by element.
    fn add(&self, x: Self::Tensor, y: Self::Tensor) -> Self::Tensor;

    /// Returns the largest values of 3 x 3 with stride 2 and padding 1.
    fn max_pool(&self, x: Self::Tensor) -> Self::Tensor;

    /// Returns the mean of each channel of each image: `[batch, channels]`.
    fn mean_pool(&self, x: Self::Tensor) -> Self::Tensor;

    /// Applies a linear layer. `x` is `[batch, in]`, `weight` is `[out, in]`, `bias` is `[out]`.
    fn linear(&self, x: Self::Tensor, weight: Self::Tensor, bias: Self::Tensor) -> Self::Tensor;

    /// Computes the gradients of the leaves that `of` was computed from, given the gradient with
    /// respect to `of`.
    fn backward(&self, of: Self::Tensor, gradient: Self::Tensor) -> Self::Gradients;

    /// Returns the gradient with respect to a leaf; `None` if `of` does not depend on it.
    fn gradient(&self, gradients: &mut Self::Gradients, leaf: &Self::Tensor) -> Option<Self::Tensor>;

    /// Moves a running statistic, which has no gradient, by a share of the way to `scale` times that
    /// of a batch.
    fn follow(&self, running: &mut Self::Tensor, batch: &Self::Tensor, scale: f32, share: f32);

    /// Returns the outcome of a batch, and the gradient of its mean loss with respect to the scores,
    /// `[images, classes]`.
    fn cross_entropy(&self, scores: &Self::Tensor, labels: &[usize]) -> (Self::Outcomes, Self::Tensor);

    /// Returns the sums of no batches.
    fn no_outcomes(&self) -> Self::Outcomes;

    fn add_outcomes(&self, sums: &mut Self::Outcomes, others: Self::Outcomes);

    /// Copies the sums to the host.
    fn outcome(&self, sums: &Self::Outcomes) -> Outcome;

    /// Adds up the sums of all ranks.
    fn all_reduce(&self, comm: &Communicator, sums: &mut Self::Outcomes) -> kolo::Result<()>;

    /// Tells a reducer where the tensors are.
    fn place(&self, builder: ReducerBuilder) -> ReducerBuilder {
        builder
    }

    /// As [`place`](Engine::place), for one parameter or buffer.
    fn place_one(&self, parameter: Parameter) -> Parameter {
        parameter
    }

    /// Lends the memory of tensors without gradients to a reducer. Their values may change.
    fn lend<R>(&self, tensors: &mut [Self::Tensor], call: impl FnOnce(&mut [TensorMut<'_>]) -> R) -> R;

    /// Gives the gradient of a parameter to a reducer.
    fn put(&self, step: &Step<'_>, number: usize, gradient: &Self::Tensor) -> kolo::Result<()>;

    /// Updates a parameter and its velocity by the average of its gradient.
    fn descend(
        &self,
        rule: &Rule,
        reducer: &Reducer,
        number: usize,
        values: &mut Self::Tensor,
        velocity: &mut Self::Tensor,
    ) -> kolo::Result<()>;
}

/// Is added to variances before the square root, as in PyTorch.
const EPSILON: f64 = 1e-5;
