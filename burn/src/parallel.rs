//! The average of gradients, and equal parameters on all ranks.

use burn_core::module::Module;
use burn_core::tensor::{Tensor, TensorData};
use burn_optim::GradientsParams;
use kolo::ddp::{BufferSync, Joined, Reducer, ReducerBuilder, TensorMut};
use kolo::{Communicator, ReducerError};

use crate::error::{Error, Result};
use crate::exchange::{borrow, unreadable, with_dimensions, with_float};
use crate::walk::{Found, Replace, Tensors, Values, read_as};

/// Keeps the model of all ranks equal: gives them the parameters of rank 0, and the average of
/// their gradients. See [the crate](crate).
///
/// Every rank makes the same calls in the same order.
#[derive(Debug)]
pub struct DataParallel {
    reducer: Reducer,
    tensors: Tensors,
}

impl DataParallel {
    /// Makes the reducer of a model's gradients, with default options, and returns it with the
    /// model, which has rank 0's parameters and buffers on all ranks.
    ///
    /// A collective call. The communicator stays free for other calls.
    ///
    /// # Errors
    ///
    /// [`Error::NoGradients`] if no parameter requires a gradient; [`Error::Elements`] if a tensor
    /// is quantized; [`Error::Kolo`] with [`kolo::ReducerError::Mismatch`] if the ranks' models
    /// differ, and if a rank failed.
    pub fn new<M: Module>(comm: &Communicator, model: M) -> Result<(DataParallel, M)> {
        DataParallel::with(Reducer::builder(), comm, model)
    }

    /// As [`DataParallel::new`], with options. The parameters and buffers of `options` are replaced
    /// by those of the model.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::Device;
    /// # use kolo_burn::DataParallel;
    /// use kolo::ddp::{Compress, Reducer, Unused};
    ///
    /// # fn main() -> Result<(), kolo_burn::Error> {
    /// # let comm = kolo::Communicator::from_env()?;
    /// # let model = LinearConfig::new(4, 1).init(&Device::flex().autodiff());
    /// // Some samples use only a part of the model, and gradients travel as bf16.
    /// let options = Reducer::builder().unused(Unused::Find).hook(Compress::bf16());
    /// let (parallel, model) = DataParallel::with(options, &comm, model)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`DataParallel::new`].
    pub fn with<M: Module>(options: ReducerBuilder, comm: &Communicator, model: M) -> Result<(DataParallel, M)> {
        let tensors = Tensors::of(&model)?;
        if tensors.parameters.is_empty() {
            return Err(Error::NoGradients);
        }
        let described = |list: &[Found]| list.iter().map(|one| one.described.clone()).collect::<Vec<_>>();
        let options = options.parameters(described(&tensors.parameters)).buffers(described(&tensors.buffers));
        let mut parallel = DataParallel { reducer: options.build(comm)?, tensors };
        let model = parallel.broadcast(model)?;
        Ok((parallel, model))
    }

    /// Returns the model with the parameters and buffers of rank 0, as [`DataParallel::new`] does.
    /// Call it after the model was changed on one rank alone, such as by loading a checkpoint.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if the model's parameters differ from those in `new`; [`Error::Kolo`] if a rank
    /// failed.
    pub fn broadcast<M: Module>(&mut self, model: M) -> Result<M> {
        settle(&model);
        let mut values = Values::of(&model);
        let mut parameters = values.take("parameters", &self.tensors.parameters)?;
        let mut buffers = values.take("buffers", &self.tensors.buffers)?;
        self.reducer.broadcast_parameters(&mut borrow_all(&self.tensors.parameters, &mut parameters)?)?;
        self.reducer.sync_buffers(&mut borrow_all(&self.tensors.buffers, &mut buffers)?, BufferSync::Broadcast(0))?;
        Ok(replace(model, [(&self.tensors.parameters, parameters), (&self.tensors.buffers, buffers)]))
    }

    /// Returns the model with equal buffers on all ranks: the tensors that require no gradient, such
    /// as the running mean and variance of batch normalisation, which each rank computes from its
    /// own samples. Call it before an evaluation or a checkpoint.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// Those of [`DataParallel::broadcast`].
    pub fn sync_buffers<M: Module>(&mut self, model: M, how: BufferSync) -> Result<M> {
        settle(&model);
        let mut buffers = Values::of(&model).take("buffers", &self.tensors.buffers)?;
        self.reducer.sync_buffers(&mut borrow_all(&self.tensors.buffers, &mut buffers)?, how)?;
        Ok(replace(model, [(&self.tensors.buffers, buffers)]))
    }

    /// Returns the averages of all ranks' gradients. Parameters that no rank used have none, so
    /// that the optimizer skips them on all ranks.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// [`Error::Kolo`] with [`kolo::ReducerError::NotReady`] if a parameter has no gradient and
    /// [`Unused::Error`](kolo::ddp::Unused) is set, which is the default, and if a rank failed;
    /// [`Error::Unknown`] if `gradients` has more than those of the parameters.
    pub fn average(&mut self, gradients: GradientsParams) -> Result<GradientsParams> {
        self.step(|step| step.put(gradients))
    }

    /// As [`DataParallel::average`], for gradients that become available one part after the other:
    /// `backward` gives them to [`Step::put`], those of the last layers first. A bucket is reduced
    /// as soon as it is full, while `backward` computes the next part.
    ///
    /// To run a backward pass in segments, cut the graph between two layers with `detach`, and
    /// continue at the cut with the gradient that the later segment has for it:
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::GradientsParams;
    /// # use burn::tensor::{Device, Tensor};
    /// # use kolo_burn::DataParallel;
    /// #[derive(Module, Debug)]
    /// struct Model {
    ///     first: Linear,
    ///     second: Linear,
    /// }
    ///
    /// # fn main() -> Result<(), kolo_burn::Error> {
    /// # let comm = kolo::Communicator::from_env()?;
    /// # let device = Device::flex().autodiff();
    /// # let model = Model {
    /// #     first: LinearConfig::new(4, 8).init(&device),
    /// #     second: LinearConfig::new(8, 1).init(&device),
    /// # };
    /// let (mut parallel, model) = DataParallel::new(&comm, model)?;
    /// let hidden = model.first.forward(Tensor::<2>::ones([8, 4], &device));
    /// let cut = hidden.clone().detach().require_grad();
    /// let loss = model.second.forward(cut.clone()).powi_scalar(2).mean();
    ///
    /// let gradients = parallel.step(|step| {
    ///     let mut gradients = loss.backward();
    ///     step.put(GradientsParams::from_module(&mut gradients, &model.second))?;
    ///     if let Some(gradient) = cut.grad_remove(&mut gradients) {
    ///         // Its gradient for `hidden` is the given one.
    ///         let rest = (hidden * Tensor::from_inner(gradient)).sum();
    ///         step.put(GradientsParams::from_grads(rest.backward(), &model.first))?;
    ///     }
    ///     Ok(())
    /// })?;
    /// assert_eq!(gradients.len(), 4);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`DataParallel::average`], and that of `backward`, which ends the reducer: the
    /// other ranks' steps fail with an error that names this rank.
    pub fn step(&mut self, backward: impl FnOnce(&Step<'_>) -> Result<()>) -> Result<GradientsParams> {
        {
            let step = Step { step: self.reducer.begin()?, parameters: &self.tensors.parameters };
            backward(&step)?;
            step.step.finish()?;
        }
        averages(&self.reducer, &self.tensors.parameters)
    }

    /// Takes part in the steps of ranks that have more samples than this one, until no rank has any.
    /// `after_step` gets the averages of each such step, and makes the optimizer's step with them,
    /// so that the parameters stay equal. Needs [`ReducerBuilder::uneven`]; see [`Reducer::join`].
    ///
    /// # Errors
    ///
    /// That of `after_step`, and those of [`Reducer::join`].
    pub fn join(&mut self, mut after_step: impl FnMut(GradientsParams) -> Result<()>) -> Result<Joined> {
        let parameters = &self.tensors.parameters;
        let mut failed = None;
        let joined = self.reducer.join(|reducer| {
            averages(reducer, parameters).and_then(&mut after_step).map_err(|error| match error {
                Error::Kolo(error) => error,
                other => {
                    failed = Some(other);
                    ReducerError::Moment { call: "join", why: "after_step failed" }.into()
                }
            })
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(joined?),
        }
    }

    /// Returns the reducer: its parameters, and the timings of the last step.
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }
}

/// A step, which [`DataParallel::step`] passes.
#[derive(Debug)]
pub struct Step<'a> {
    step: kolo::ddp::Step<'a>,
    parameters: &'a [Found],
}

impl Step<'_> {
    /// Copies gradients to their buckets. A bucket that is full is reduced while the caller
    /// continues.
    ///
    /// # Errors
    ///
    /// [`Error::Kolo`] with [`kolo::ReducerError::Twice`] if a parameter got its gradient in this
    /// step already: a parameter that several segments use gets the sum, in the last of them.
    /// [`Error::Unknown`] if `gradients` has more than those of the parameters.
    pub fn put(&self, mut gradients: GradientsParams) -> Result<()> {
        // The buckets are filled from the last parameter to the first.
        for (index, found) in self.parameters.iter().enumerate().rev() {
            with_dimensions!(found, D => match gradients.remove::<D>(found.id) {
                Some(gradient) => self.copy(index, found, gradient),
                None => Ok(()),
            })?;
        }
        match gradients.len() {
            0 => Ok(()),
            count => Err(Error::Unknown { count }),
        }
    }

    fn copy<const D: usize>(&self, index: usize, found: &Found, gradient: Tensor<D>) -> Result<()> {
        let values = gradient.try_into_data_dtype(read_as(found.dtype)).map_err(|error| unreadable(found, &error))?;
        with_float!(found, T => {
            let values = values.as_slice::<T>().map_err(|error| unreadable(found, &error))?;
            Ok(self.step.put(index, values)?)
        })
    }
}

/// Returns the gradients of the last step as tensors.
fn averages(reducer: &Reducer, parameters: &[Found]) -> Result<GradientsParams> {
    let mut gradients = GradientsParams::new();
    for (index, found) in parameters.iter().enumerate().filter(|(index, _)| reducer.is_used(*index)) {
        let values = with_float!(found, T => {
            Ok(TensorData::new(reducer.gradient::<T>(index)?.to_vec(), found.described.shape.clone()))
        })?;
        with_dimensions!(found, D => {
            gradients.register(found.id, Tensor::<D>::from_data(values, (&found.device, found.dtype)));
            Ok(())
        })?;
    }
    Ok(gradients)
}

/// Applies the pending updates of running statistics, so that their values are the latest.
fn settle<M: Module>(model: &M) {
    // The statistics are shared between a module and the copy for validation.
    drop(model.valid());
}

fn borrow_all<'a>(tensors: &[Found], values: &'a mut [TensorData]) -> Result<Vec<TensorMut<'a>>> {
    tensors.iter().zip(values).map(|(found, values)| borrow(found, values)).collect()
}

fn replace<'a, M: Module>(model: M, values: impl IntoIterator<Item = (&'a Vec<Found>, Vec<TensorData>)>) -> M {
    let by_id = |(tensors, values): (&'a Vec<Found>, Vec<TensorData>)| tensors.iter().map(|found| found.id).zip(values);
    model.map(&mut Replace { values: values.into_iter().flat_map(by_id).collect() })
}
