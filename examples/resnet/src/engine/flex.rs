//! burn's CPU backend, in plain Rust.
//!
//! It is used beneath burn's `Tensor`, where the ranks of tensors are not part of their types and
//! the strides of a gradient can be seen, so that it is gathered into its bucket in one pass.

use burn_autodiff::{Autodiff, grads::Gradients};
use burn_backend::backend::{AutodiffBackend, BackendTypes};
use burn_backend::ops::{ActivationOps, ConvOptions, FloatTensorOps, ModuleOps};
use burn_backend::{DType, Shape, TensorData, TensorMetadata};
use burn_flex::{Flex as Backend, FlexTensor};

use kolo::ddp::{Reducer, Step, TensorMut};
use kolo::{Communicator, ReduceOp};

use super::{EPSILON, Engine};
use crate::loss::{self, Outcome};
use crate::rule::Rule;

type B = Autodiff<Backend>;

/// Tensors on the CPU. Their work is spread over the threads of rayon's global pool.
pub(crate) struct Flex;

impl Engine for Flex {
    type Tensor = <B as BackendTypes>::FloatTensorPrimitive;
    type Gradients = Gradients;
    type Outcomes = Outcome;

    fn name(&self) -> String {
        format!("burn flex, {} threads", rayon::current_num_threads())
    }

    fn constant(&self, values: Vec<f32>, shape: &[usize]) -> Self::Tensor {
        B::from_inner(FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec()))))
    }

    fn leaf(&self, tensor: Self::Tensor) -> Self::Tensor {
        B::float_set_require_grad(self.detach(tensor), true)
    }

    fn detach(&self, tensor: Self::Tensor) -> Self::Tensor {
        B::from_inner(B::inner(tensor))
    }

    fn count(&self, tensor: &Self::Tensor) -> usize {
        tensor.shape().num_elements()
    }

    fn copy(&self, tensor: &Self::Tensor) -> Self::Tensor {
        // Memory that tensors share is copied when one of them changes.
        self.detach(tensor.clone())
    }

    fn read(&self, tensor: &Self::Tensor, into: &mut [f32]) {
        let tensor = B::inner(tensor.clone());
        let layout = tensor.layout();
        assert_eq!(layout.num_elements(), into.len(), "as many values as there is room for");
        gather(tensor.storage(), layout.start_offset(), &layout.shape().to_vec(), layout.strides(), into);
    }

    fn conv2d(&self, x: Self::Tensor, weight: Self::Tensor, stride: usize, padding: usize) -> Self::Tensor {
        B::conv2d(x, weight, None, ConvOptions::new([stride; 2], [padding; 2], [1; 2], 1))
    }

    fn batch_norm(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor) -> [Self::Tensor; 3] {
        let done = B::batch_norm_train(x, scale, shift, EPSILON);
        [done.output, done.mean, done.variance]
    }

    fn batch_norm_by(&self, x: Self::Tensor, scale: Self::Tensor, shift: Self::Tensor, by: [Self::Tensor; 2]) -> Self::Tensor {
        let [mean, variance] = by;
        B::batch_norm(x, scale, shift, mean, variance, EPSILON)
    }

    fn relu(&self, x: Self::Tensor) -> Self::Tensor {
        B::relu(x)
    }

    fn add(&self, x: Self::Tensor, y: Self::Tensor) -> Self::Tensor {
        B::float_add(x, y)
    }

    fn max_pool(&self, x: Self::Tensor) -> Self::Tensor {
        B::max_pool2d(x, [3; 2], [2; 2], [1; 2], [1; 2], false)
    }

    fn mean_pool(&self, x: Self::Tensor) -> Self::Tensor {
        let x = B::adaptive_avg_pool2d(x, [1; 2]);
        let shape = x.shape();
        B::float_reshape(x, Shape::new([shape[0], shape[1]]))
    }

    fn linear(&self, x: Self::Tensor, weight: Self::Tensor, bias: Self::Tensor) -> Self::Tensor {
        B::linear(x, B::float_transpose(weight), Some(bias))
    }

    fn backward(&self, of: Self::Tensor, gradient: Self::Tensor) -> Self::Gradients {
        // burn starts the backward pass at a scalar: use one whose gradient with respect to `of` is
        // the given gradient.
        B::backward(B::float_sum(B::float_mul(of, gradient)))
    }

    fn gradient(&self, gradients: &mut Self::Gradients, leaf: &Self::Tensor) -> Option<Self::Tensor> {
        B::grad_remove(leaf, gradients).map(B::from_inner)
    }

    fn follow(&self, running: &mut Self::Tensor, batch: &Self::Tensor, scale: f32, share: f32) {
        let mut values = vec![0.0; self.count(batch)];
        self.read(batch, &mut values);
        change(running, |running| {
            running.iter_mut().zip(values).for_each(|(running, batch)| *running += share * (scale * batch - *running));
        });
    }

    fn cross_entropy(&self, scores: &Self::Tensor, labels: &[usize]) -> (Outcome, Self::Tensor) {
        let mut values = vec![0.0; self.count(scores)];
        self.read(scores, &mut values);
        let (outcome, gradient) = loss::cross_entropy(&values, labels);
        let classes = gradient.len() / labels.len();
        (outcome, self.constant(gradient, &[labels.len(), classes]))
    }

    fn no_outcomes(&self) -> Outcome {
        Outcome::default()
    }

    fn add_outcomes(&self, sums: &mut Outcome, others: Outcome) {
        sums.add(others);
    }

    fn outcome(&self, sums: &Outcome) -> Outcome {
        *sums
    }

    fn all_reduce(&self, comm: &Communicator, sums: &mut Outcome) -> kolo::Result<()> {
        let mut numbers = sums.numbers();
        comm.all_reduce(&mut numbers, ReduceOp::Sum)?;
        *sums = Outcome::of(numbers);
        Ok(())
    }

    fn lend<R>(&self, tensors: &mut [Self::Tensor], call: impl FnOnce(&mut [TensorMut<'_>]) -> R) -> R {
        let mut taken: Vec<FlexTensor> = tensors.iter_mut().map(take).collect();
        let result = call(&mut taken.iter_mut().map(|values| TensorMut::from(values.storage_mut::<f32>())).collect::<Vec<_>>());
        tensors.iter_mut().zip(taken).for_each(|(tensor, values)| *tensor = B::from_inner(values));
        result
    }

    fn put(&self, step: &Step<'_>, number: usize, gradient: &Self::Tensor) -> kolo::Result<()> {
        let mut place = step.view::<f32>(number)?;
        self.read(gradient, &mut place);
        place.ready()
    }

    fn descend(
        &self,
        rule: &Rule,
        reducer: &Reducer,
        number: usize,
        values: &mut Self::Tensor,
        velocity: &mut Self::Tensor,
    ) -> kolo::Result<()> {
        let gradient = reducer.gradient::<f32>(number)?;
        change(values, |values| change(velocity, |velocity| rule.apply(values, velocity, gradient)));
        Ok(())
    }
}

/// Takes a tensor out, so that no other tensor shares its memory and it is changed in place.
fn take(tensor: &mut <B as BackendTypes>::FloatTensorPrimitive) -> FlexTensor {
    let values = B::inner(std::mem::replace(tensor, B::from_inner(FlexTensor::empty(Shape::new([0]), DType::F32))));
    debug_assert!(values.is_contiguous());
    values
}

/// Changes the values of a tensor that has no gradient, by rows.
fn change<R>(tensor: &mut <B as BackendTypes>::FloatTensorPrimitive, change: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut values = take(tensor);
    let result = change(values.storage_mut());
    *tensor = B::from_inner(values);
    result
}

/// Copies a strided tensor by rows. A contiguous run, such as the 3 x 3 of a convolution, is copied
/// at once.
fn gather(from: &[f32], at: usize, shape: &[usize], strides: &[isize], into: &mut [f32]) {
    let Some((&count, inner)) = shape.split_first() else {
        into[0] = from[at];
        return;
    };
    let rows = inner.iter().product::<usize>();
    let run = |run, (&len, &stride): (&usize, &isize)| (len == 1 || stride == run).then_some(run * len as isize);
    if shape.iter().zip(strides).rev().try_fold(1, run).is_some() {
        into.copy_from_slice(&from[at..at + into.len()]);
    } else if rows == 1 {
        for (i, to) in into.iter_mut().enumerate().take(count) {
            *to = from[at.wrapping_add_signed(i as isize * strides[0])];
        }
    } else {
        for (i, into) in into.chunks_exact_mut(rows).enumerate().take(count) {
            gather(from, at.wrapping_add_signed(i as isize * strides[0]), inner, &strides[1..], into);
        }
    }
}
