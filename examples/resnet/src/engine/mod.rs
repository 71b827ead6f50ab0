//! What the trainer needs of a tensor library, and no more.
//!
//! The models, the backward pass by segments, the optimiser and all that is around them are written once, over [`Engine`].

mod flex;
#[cfg(feature = "tch")]
mod torch;

use clap::ValueEnum;

pub(crate) use flex::Flex;
#[cfg(feature = "tch")]
pub(crate) use torch::Torch;

/// The engines that there are.
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
    /// A tensor, and how it was computed. Clones share their memory.
    type Tensor: Clone;
    /// What [`backward`](Engine::backward) found.
    type Gradients;

    /// Its name, and what it computes on.
    fn name(&self) -> String;

    /// A tensor of these values, which is not differentiated by.
    fn constant(&self, values: Vec<f32>, shape: &[usize]) -> Self::Tensor;

    /// The same values without their past, which [`backward`](Engine::backward) differentiates by.
    fn leaf(&self, tensor: Self::Tensor) -> Self::Tensor;

    /// The same values without their past.
    fn detach(&self, tensor: Self::Tensor) -> Self::Tensor;

    /// How many values it has.
    fn count(&self, tensor: &Self::Tensor) -> usize;

    /// Changes the values of a tensor that is not differentiated by, in order of rows.
    fn change<R>(&self, tensor: &mut Self::Tensor, change: impl FnOnce(&mut [f32]) -> R) -> R;

    /// Copies the values in order of rows.
    fn read(&self, tensor: &Self::Tensor, into: &mut [f32]);

    /// `weight` is `[out, in, size, size]`; `padding` is zeros on each side.
    fn conv2d(&self, x: Self::Tensor, weight: Self::Tensor, stride: usize, padding: usize) -> Self::Tensor;

    /// Normalises each channel by its mean and variance in this batch, and returns these: mean and biased variance, `[channels]`.
    fn batch_norm(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor) -> [Self::Tensor; 3];

    /// Normalises each channel by this mean and variance.
    fn batch_norm_by(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor, by: [Self::Tensor; 2]) -> Self::Tensor;

    /// What is negative becomes 0.
    fn relu(&self, x: Self::Tensor) -> Self::Tensor;

    /// Element by element.
    fn add(&self, x: Self::Tensor, y: Self::Tensor) -> Self::Tensor;

    /// The largest of 3 x 3 with stride 2 and padding 1.
    fn max_pool(&self, x: Self::Tensor) -> Self::Tensor;

    /// The mean of each channel of each image: `[batch, channels]`.
    fn mean_pool(&self, x: Self::Tensor) -> Self::Tensor;

    /// `x` is `[batch, in]`, `weight` is `[out, in]`, `bias` is `[out]`.
    fn linear(&self, x: Self::Tensor, weight: Self::Tensor, bias: Self::Tensor) -> Self::Tensor;

    /// Goes back from `of` to the leaves it was computed from, given the gradient with respect to it.
    fn backward(&self, of: Self::Tensor, gradient: Self::Tensor) -> Self::Gradients;

    /// The gradient with respect to a leaf; `None` if nothing depended on it.
    fn gradient(&self, gradients: &mut Self::Gradients, leaf: &Self::Tensor) -> Option<Self::Tensor>;
}

/// Added to variances before the root, as in PyTorch.
const EPSILON: f64 = 1e-5;
