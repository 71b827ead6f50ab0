//! The reducer, as its user sees it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::buckets::Buckets;
use super::builder::{ReducerBuilder, Uneven};
use super::core::Core;
use super::layout::Layout;
use super::parameter::{Parameter, TensorMut};
use super::statistics::StepStatistics;
use super::step::Step;
use super::tensors::{Exchange, check, exchange};
use super::worker::Worker;
use crate::comm::Communicator;
use crate::error::{Error, ReducerProblem, Result};
use crate::types::{Element, Rank};

/// Averages gradients over all ranks, bucket by bucket; see [the module](super).
///
/// Every rank makes the same calls in the same order, except that gradients may become ready in any.
pub struct Reducer {
    pub(super) core: Arc<Core>,
    buffers: Vec<Parameter>,
    /// Where buffers are exchanged.
    staging: Buckets,
    bucket_bytes: [usize; 2],
    /// Whether buckets are to be made anew.
    rebuilds: bool,
    thread: Option<JoinHandle<()>>,
}

/// How buffers are made equal, by [`Reducer::sync_buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferSync {
    /// All get this rank's.
    Broadcast(Rank),
    /// All get the average of those of floating-point numbers, and rank 0's (in [`Reducer::join`], the lowest rank's that has
    /// not joined) of the others.
    Average,
}

/// What happened while a rank was in [`Reducer::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Steps that the others made.
    pub steps: u64,
    /// The rank that made the last step, the lowest of several: its buffers are the latest.
    pub last: Rank,
}

impl Reducer {
    /// Options for making one.
    pub fn builder() -> ReducerBuilder {
        ReducerBuilder::default()
    }

    pub(super) fn build(builder: ReducerBuilder, comm: &Communicator) -> Result<Reducer> {
        let ReducerBuilder { parameters, buffers, bucket_bytes, first_bucket_bytes, unused, uneven, overlap, rebuild, hook } =
            builder;
        let refuse = |name: &str, value: String, expected: &str| Err(Error::setting(name, value, expected));
        if parameters.is_empty() {
            return refuse("parameters", "none".to_owned(), "at least one");
        }
        if let Some(whole) = parameters.iter().find(|parameter| !parameter.dtype.is_float()) {
            return refuse(&whole.name, whole.dtype.to_string(), "gradients are of f16, bf16, f32 or f64");
        }
        if bucket_bytes == 0 || first_bucket_bytes == 0 {
            return refuse("bucket_bytes", "0".to_owned(), "at least 1");
        }
        let comm = comm.split(0, comm.rank())?;
        let layout = Layout::new(&parameters, (0..parameters.len()).rev(), first_bucket_bytes, bucket_bytes);
        let buckets = Buckets::allocate(&comm, layout)?;
        let staging = Buckets::allocate(&comm, Layout::new(&buffers, 0..buffers.len(), usize::MAX, usize::MAX))?;
        let core = Arc::new(Core::new(comm, parameters, (unused, uneven, overlap), buckets));
        let worker = Worker::new(core.clone(), hook);
        let thread = std::thread::Builder::new().name("kolo-reducer".to_owned()).spawn(move || worker.work());
        let thread = Some(thread.map_err(Error::os("starting the reducer's thread"))?);
        let bucket_bytes = [first_bucket_bytes, bucket_bytes];
        Ok(Reducer { core, buffers, staging, bucket_bytes, rebuilds: rebuild, thread })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.core.comm.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.core.comm.world_size()
    }

    /// The parameters, in forward order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.core.parameters
    }

    /// The buffers.
    pub fn buffers(&self) -> &[Parameter] {
        &self.buffers
    }

    /// Gives all ranks rank 0's values of all parameters, in their order: what training starts with. It overwrites the gradients.
    ///
    /// A collective call.
    pub fn broadcast_parameters(&mut self, values: &mut [TensorMut<'_>]) -> Result<()> {
        self.exchange_parameters("broadcast_parameters", values, |_| Exchange::Broadcast(0))
    }

    /// Gives all ranks the average of their values of all parameters, as [`LocalSgd`](super::LocalSgd) does now and then. It
    /// overwrites the gradients.
    ///
    /// A collective call.
    pub fn average_parameters(&mut self, values: &mut [TensorMut<'_>]) -> Result<()> {
        self.exchange_parameters("average_parameters", values, average)
    }

    fn exchange_parameters(
        &mut self,
        call: &'static str,
        values: &mut [TensorMut<'_>],
        how: impl FnOnce(&[bool]) -> Exchange,
    ) -> Result<()> {
        check("parameters", &self.core.parameters, values)?;
        let buckets = {
            let state = self.core.between(call)?;
            if state.accumulated {
                return Err(ReducerProblem::Moment { call, why: "gradients are being accumulated; finish a step first" }.into());
            }
            state.buckets.clone()
        };
        let how = how(&self.meet(Core::PARAMETERS)?);
        // SAFETY: between steps nothing is in flight, and views and gradients borrow the reducer.
        let result = unsafe { exchange(&self.core.comm, &self.core.parameters, &buckets, Some(values), how) };
        result.inspect_err(|error| self.core.fail(error.clone()))
    }

    /// Tells ranks that have joined what comes. Returns which ranks have not.
    fn meet(&mut self, what: u64) -> Result<Vec<bool>> {
        match self.core.uneven {
            Uneven::No => Ok(vec![true; self.world_size()]),
            _ => self.core.announce(what).inspect_err(|error| self.core.fail(error.clone())),
        }
    }

    /// Makes all ranks' buffers equal, as BatchNorm's running mean and variance: whenever the model wants it, before every step,
    /// before an evaluation, before a checkpoint.
    ///
    /// A collective call.
    pub fn sync_buffers(&mut self, values: &mut [TensorMut<'_>], how: BufferSync) -> Result<()> {
        check("buffers", &self.buffers, values)?;
        drop(self.core.between("sync_buffers")?);
        let active = self.meet(Core::BUFFERS)?;
        let how = match how {
            BufferSync::Broadcast(root) => Exchange::Broadcast(root),
            BufferSync::Average => average(&active),
        };
        // SAFETY: nobody but this method, which borrows the reducer mutably, uses this memory.
        let result = unsafe { exchange(&self.core.comm, &self.buffers, &self.staging, Some(values), how) };
        result.inspect_err(|error| self.core.fail(error.clone()))
    }

    /// Begins a step, at whose end all ranks have the average of their gradients. Gradients of the step before can no longer be
    /// read.
    ///
    /// The second time, buckets are made anew: a collective call then, as all steps are.
    pub fn begin(&mut self) -> Result<Step<'_>> {
        self.core.open(true, self.core.uneven != Uneven::No)?;
        Ok(Step { reducer: self })
    }

    /// Begins a step that is not reduced ("no_sync"): its gradients are kept, and the next steps' added to them, until one that
    /// [`Reducer::begin`] began has been finished, which averages the sum. Not a collective call.
    pub fn accumulate(&mut self) -> Result<Step<'_>> {
        self.core.open(false, false)?;
        Ok(Step { reducer: self })
    }

    /// This rank has no more input, and takes part in the steps of those that have, with zeros, until none has. After each,
    /// `after_step` is called, where the gradient's averages can be read: an optimiser that steps there, too, keeps all ranks'
    /// parameters equal.
    ///
    /// All ranks call it when they have no more input; it returns when all have. Needs [`ReducerBuilder::uneven`].
    pub fn join(&mut self, mut after_step: impl FnMut(&mut Reducer) -> Result<()>) -> Result<Joined> {
        let _ = &mut after_step;
        Err(Error::Unsupported { what: "join", why: "it is not there yet".to_owned() })
    }

    /// The average of a parameter's gradient, after a step.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::NoParameter`]; [`ReducerProblem::Elements`] if it has elements of another type.
    pub fn gradient<T: Element>(&self, parameter: usize) -> Result<&[T]> {
        let (address, count) = self.reach::<T>(parameter)?;
        // SAFETY: between steps nothing is in flight and nobody has a view; a step, which would change that, borrows the reducer
        // mutably. The memory stays until buckets are made anew, which does, too.
        Ok(unsafe { std::slice::from_raw_parts(address, count) })
    }

    /// The same, to be changed, as by clipping.
    pub fn gradient_mut<T: Element>(&mut self, parameter: usize) -> Result<&mut [T]> {
        let (address, count) = self.reach::<T>(parameter)?;
        // SAFETY: as above, and the reducer is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, count) })
    }

    fn reach<T: Element>(&self, parameter: usize) -> Result<(*mut T, usize)> {
        self.core.parameter(parameter)?.expect(T::DTYPE)?;
        let state = self.core.between("gradient")?;
        let (address, len) = state.buckets.gradient(parameter);
        Ok((address.cast(), len / size_of::<T>()))
    }

    /// Whether a parameter got a gradient in the last step, on any rank (with [`Unused::Error`](super::Unused), on this one):
    /// optimisers leave the others alone, and their momentum.
    pub fn is_used(&self, parameter: usize) -> bool {
        self.core.is_used(parameter)
    }

    /// What the last step that was reduced cost.
    pub fn statistics(&self) -> StepStatistics {
        self.core.statistics()
    }
}

/// The average of the ranks that have input.
fn average(active: &[bool]) -> Exchange {
    let lowest = active.iter().position(|&active| active).unwrap_or(0);
    Exchange::Average(active.iter().filter(|&&active| active).count(), lowest)
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.core.shut();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("rank", &self.rank())
            .field("parameters", &self.parameters().len())
            .finish_non_exhaustive()
    }
}
