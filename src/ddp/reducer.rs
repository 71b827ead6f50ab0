//! The reducer's public interface.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::buckets::Buckets;
use super::builder::{ReducerBuilder, Uneven};
use super::core::Core;
use super::exchange::{Exchange, check, exchange};
use super::intent::Intent;
use super::layout::Layout;
use super::on_device::{BucketDevice, DeviceMemory};
use super::parameter::{Parameter, TensorMut};
use super::statistics::StepStatistics;
use crate::buffer::Address;
use crate::error::{Error, ReducerError, Result};
use crate::types::{Element, Rank};

/// Averages gradients over all ranks, bucket by bucket; see [the module](super).
///
/// Every rank makes the same calls in the same order, but gradients may become ready in any order.
pub struct Reducer {
    pub(super) core: Arc<Core>,
    pub(super) buffers: Vec<Parameter>,
    /// The memory in which buffers are exchanged.
    pub(super) staging: Buckets,
    /// The device, if anything is on one.
    pub(super) on: Option<Arc<BucketDevice>>,
    pub(super) bucket_bytes: [usize; 2],
    /// Whether the buckets are still to be rebuilt.
    pub(super) rebuilds: bool,
    pub(super) thread: Option<JoinHandle<()>>,
}

/// How [`Reducer::sync_buffers`] makes buffers equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferSync {
    /// All ranks get this rank's values.
    Broadcast(Rank),
    /// All ranks get the average of floating-point buffers. Other buffers come from rank 0, or from
    /// the lowest rank that has not joined (see [`Reducer::join`]).
    Average,
}

/// What happened while a rank was in [`Reducer::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Joined {
    /// The steps that other ranks made.
    pub steps: u64,
    /// The lowest rank that made the last step: its buffers are the latest.
    pub last: Rank,
}

impl Reducer {
    /// Returns a builder with default options.
    pub fn builder() -> ReducerBuilder {
        ReducerBuilder::default()
    }

    /// Returns this rank.
    pub fn rank(&self) -> Rank {
        self.core.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.core.comm.world_size()
    }

    /// Returns the parameters, in forward order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.core.parameters
    }

    /// Returns the buffers.
    pub fn buffers(&self) -> &[Parameter] {
        &self.buffers
    }

    /// Copies rank 0's values of all parameters to all ranks, as training starts. `values` has all
    /// parameters, in their order. Overwrites the gradients.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// [`ReducerError::Elements`], [`ReducerError::Place`] or [`ReducerError::Length`] if
    /// `values` are not the parameters that were described.
    pub fn broadcast_parameters(&mut self, values: &mut [TensorMut<'_>]) -> Result<()> {
        self.exchange_parameters(values, Exchange::Broadcast(0))
    }

    /// Replaces all parameters by their averages over the ranks, as [`LocalSgd`](super::LocalSgd)
    /// does from time to time. Overwrites the gradients.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::broadcast_parameters`].
    pub fn average_parameters(&mut self, values: &mut [TensorMut<'_>]) -> Result<()> {
        self.exchange_parameters(values, Exchange::Average)
    }

    fn exchange_parameters(&mut self, values: &mut [TensorMut<'_>], how: Exchange) -> Result<()> {
        let intent = Intent::Parameters(how);
        self.accept("parameters", &self.core.parameters, values)?;
        if self.core.between(intent.call())?.accumulated {
            let why = "gradients are being accumulated in the memory that exchanges parameters; finish a reduced step first";
            return Err(ReducerError::Moment { call: intent.call(), why }.into());
        }
        self.exchange(intent, values)
    }

    /// Makes all ranks' buffers equal, such as the running mean and variance of BatchNorm. Call it
    /// as often as the model needs: before every step, before an evaluation, or before a
    /// checkpoint.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// [`ReducerError::Elements`], [`ReducerError::Place`] or [`ReducerError::Length`] if
    /// `values` are not the buffers that were described.
    pub fn sync_buffers(&mut self, values: &mut [TensorMut<'_>], how: BufferSync) -> Result<()> {
        self.accept("buffers", &self.buffers, values)?;
        let how = match how {
            BufferSync::Broadcast(root) => Exchange::Broadcast(root),
            BufferSync::Average => Exchange::Average,
        };
        drop(self.core.between("sync_buffers")?);
        self.exchange(Intent::Buffers(how), values)
    }

    /// Refuses tensors that are not those described, and makes the reducer's stream wait for those
    /// to which they belong.
    fn accept(&self, what: &str, described: &[Parameter], values: &[TensorMut<'_>]) -> Result<()> {
        check(what, described, values)?;
        let Some(on) = &self.on else { return Ok(()) };
        let on_device = described.iter().zip(values).filter(|(one, value)| one.on_device && value.count > 0);
        for (one, value) in on_device {
            on.expect_here(&self.core.comm, &one.name, value.memory.ptr.addr() as Address)?;
            #[cfg(feature = "cuda")]
            on.wait_for(value.stream())?;
        }
        Ok(())
    }

    fn exchange(&mut self, intent: Intent, values: &mut [TensorMut<'_>]) -> Result<()> {
        let active = match self.core.uneven {
            Uneven::No => vec![true; self.world_size()],
            // Ranks that have joined take part.
            _ => self.or_fail(self.core.announce(intent))?,
        };
        self.exchange_among(intent, Some(values), &active)
    }

    /// Exchanges values between all ranks. Ranks that have joined have no values.
    fn exchange_among(&mut self, intent: Intent, values: Option<&mut [TensorMut<'_>]>, active: &[bool]) -> Result<()> {
        let (how, buckets) = match intent {
            Intent::Parameters(how) => (how, &*self.core.between("exchange")?.buckets.clone()),
            Intent::Buffers(how) => (how, &self.staging),
            Intent::Joined | Intent::Step | Intent::Rebuild => return Ok(()),
        };
        if let Exchange::Broadcast(root) = how
            && active.get(root) != Some(&true)
        {
            // All ranks come to the same result, so none has sent anything.
            let why = "the root does not exist, or has joined";
            return Err(ReducerError::Moment { call: intent.call(), why }.into());
        }
        // SAFETY: between steps nothing is in flight. Views and gradients borrow the reducer, and
        // so does this call.
        let result = unsafe { exchange(&self.core.comm, buckets, values, how, active) };
        self.or_fail(result.inspect_err(|_| buckets.abandon()))
    }

    /// As [`Reducer::begin`] or [`Reducer::accumulate`], without a guard.
    pub(crate) fn start(&mut self, syncs: bool) -> Result<()> {
        if syncs && self.rebuilds && self.core.between("begin")?.steps > 0 {
            if self.core.uneven != Uneven::No {
                // Ranks that have joined take part.
                self.or_fail(self.core.announce(Intent::Rebuild))?;
            }
            self.rebuild_buckets()?;
        }
        self.core.open(syncs, None)
    }

    /// Takes part in the other ranks' steps when this rank has no more input, with zeros as
    /// gradients, until no rank has input. Calls `after_step` after each step, where the averages
    /// can be read. An optimiser that steps there keeps all ranks' parameters equal. `after_step`
    /// must make no collective calls; [`LocalSgd`](super::LocalSgd) makes one, and is left to the
    /// ranks with input. This rank gets nothing from the other ranks' [`Reducer::sync_buffers`] and
    /// [`Reducer::average_parameters`].
    ///
    /// Every rank calls this when its input ends, and it returns when all ranks have called it.
    /// Needs [`ReducerBuilder::uneven`].
    ///
    /// ```
    /// use kolo::ddp::{Parameter, Reducer, Uneven};
    /// use kolo::{Communicator, DType};
    ///
    /// fn train(comm: &Communicator, batches: usize) -> kolo::Result<()> {
    ///     let weight = Parameter::new("weight", [1], DType::F32);
    ///     let builder = Reducer::builder().parameters([weight]).uneven(Uneven::ByRanksWithInput);
    ///     let mut reducer = builder.build(comm)?;
    ///     for _ in 0..batches {
    ///         let step = reducer.begin()?;
    ///         step.put(0, &[1.0f32])?;
    ///         step.finish()?;
    ///     }
    ///     // The optimiser steps here, too, so that this rank's parameters stay equal.
    ///     let joined = reducer.join(|reducer| {
    ///         assert!(reducer.is_used(0));
    ///         assert_eq!(reducer.gradient::<f32>(0)?, [1.0]);
    ///         Ok(())
    ///     })?;
    ///     assert_eq!(joined.steps, 3 - batches as u64);
    ///     Ok(())
    /// }
    ///
    /// # fn main() -> kolo::Result<()> {
    /// // Rank 0 has two batches, rank 1 has three.
    /// std::thread::scope(|scope| {
    ///     for comm in Communicator::in_process(2)? {
    ///         scope.spawn(move || train(&comm, 2 + comm.rank()).unwrap());
    ///     }
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ReducerError::Moment`] within a step, or if the reducer was built with [`Uneven::No`]; the
    /// error of `after_step`; otherwise those of [`Step::finish`](super::Step::finish).
    pub fn join(&mut self, mut after_step: impl FnMut(&mut Reducer) -> Result<()>) -> Result<Joined> {
        let mut steps = 0;
        while self.join_step()? {
            steps += 1;
            after_step(self)?;
        }
        Ok(Joined { steps, last: self.last()? })
    }

    /// Returns the lowest rank that made the last step.
    pub(crate) fn last(&self) -> Result<Rank> {
        Ok(self.core.between("join")?.active.iter().position(|&active| active).unwrap_or(0))
    }

    /// Takes part in one step of the ranks with input. Returns false if no rank has input.
    pub(crate) fn join_step(&mut self) -> Result<bool> {
        if self.core.uneven == Uneven::No {
            let why = "the reducer was built with Uneven::No; choose another Uneven";
            return Err(ReducerError::Moment { call: "join", why }.into());
        }
        loop {
            drop(self.core.between("join")?);
            let (intent, active) = self.or_fail(self.core.exchange_intents(Intent::Joined))?;
            match intent {
                Intent::Joined => return Ok(false),
                Intent::Rebuild => self.rebuild_buckets()?,
                Intent::Step => {
                    self.core.open(true, Some(active))?;
                    self.core.mark_all_unused()?;
                    self.core.close()?;
                    return Ok(true);
                }
                // A call that fails on the other ranks before it sends anything is no failure here.
                _ => match self.exchange_among(intent, None, &active) {
                    Err(Error::Reducer { .. }) => {}
                    result => result?,
                },
            }
        }
    }

    /// Rebuilds the buckets when the second step begins, in the order in which gradients became
    /// ready on rank 0. Gradients that are being accumulated move with them; others can no longer
    /// be read.
    fn rebuild_buckets(&mut self) -> Result<()> {
        let (arrivals, old, accumulated) = {
            let state = self.core.between("begin")?;
            (state.arrivals.clone(), state.buckets.clone(), state.accumulated)
        };
        self.rebuilds = false;
        let rebuilt = self.rebuild(arrivals, &old, accumulated);
        match self.or_fail(rebuilt)? {
            None => Ok(()),
            Some(buckets) => {
                self.core.between("begin")?.buckets = Arc::new(buckets);
                Ok(())
            }
        }
    }

    fn rebuild(&self, arrivals: Vec<usize>, old: &Buckets, accumulated: bool) -> Result<Option<Buckets>> {
        let Core { comm, parameters, .. } = &*self.core;
        // Parameters without a gradient come last.
        let mut has_arrived = vec![false; parameters.len()];
        arrivals.iter().for_each(|&index| has_arrived[index] = true);
        let others = (0..parameters.len()).rev().filter(|&index| !has_arrived[index]);
        let mut order: Vec<u64> = arrivals.iter().copied().chain(others).map(|index| index as u64).collect();
        comm.broadcast(&mut order, 0)?;
        let order: Vec<usize> = order.into_iter().map(|index| index as usize).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..parameters.len()) {
            let why = "rank 0 sent an invalid order of gradients; check that all ranks run the same version of kolo";
            return Err(ReducerError::Moment { call: "begin", why }.into());
        }
        let layout = Layout::new(parameters, order, self.bucket_bytes);
        if layout == old.layout {
            return Ok(None);
        }
        let device = DeviceMemory::allocate(self.on.as_ref(), &layout)?;
        let buckets = Buckets::allocate(comm, layout, device)?;
        if accumulated {
            // SAFETY: between steps nothing is in flight. Views and gradients borrow the reducer,
            // and so does this call.
            unsafe { buckets.copy_from(old, parameters)? };
        }
        Ok(Some(buckets))
    }

    /// Ends the reducer if an operation failed on this rank.
    fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.core.fail(error.clone()))
    }

    /// Returns the average of a parameter's gradient, after a step.
    ///
    /// # Errors
    ///
    /// [`ReducerError::NoParameter`] if there is no such parameter; [`ReducerError::Elements`]
    /// if it has another element type; [`ReducerError::Place`] if it is on a device.
    pub fn gradient<T: Element>(&self, parameter: usize) -> Result<&[T]> {
        let (address, count) = self.reach::<T>(parameter)?;
        // SAFETY: between steps nothing is in flight and no view exists. A step would change that,
        // but it borrows the reducer mutably, as does rebuilding the buckets, which frees the
        // memory.
        Ok(unsafe { std::slice::from_raw_parts(address, count) })
    }

    /// As [`Reducer::gradient`], to be changed, as by clipping.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::gradient`].
    pub fn gradient_mut<T: Element>(&mut self, parameter: usize) -> Result<&mut [T]> {
        let (address, count) = self.reach::<T>(parameter)?;
        // SAFETY: as in `gradient`, and the reducer is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, count) })
    }

    fn reach<T: Element>(&self, parameter: usize) -> Result<(*mut T, usize)> {
        let described = self.core.parameter(parameter)?;
        described.expect(T::DTYPE)?;
        described.expect_place(false)?;
        let state = self.core.between("gradient")?;
        let (address, len) = state.buckets.gradient(parameter);
        Ok((address.cast(), len / size_of::<T>()))
    }

    /// Returns whether a parameter got a gradient in the last step on any rank, or on this one with
    /// [`Unused::Error`](super::Unused). Optimisers skip parameters without one, and their
    /// momentum. In [`Reducer::join`] with `Unused::Error`, all parameters got one. Returns false if
    /// there is no such parameter.
    pub fn is_used(&self, parameter: usize) -> bool {
        self.core.is_used(parameter)
    }

    /// Returns the timings of the last step that was reduced.
    pub fn statistics(&self) -> StepStatistics {
        self.core.statistics()
    }
}

impl Reducer {
    /// Ends the reducer, and waits for its hook for as long as that takes: a hook of another language uses
    /// memory that the caller frees next.
    pub(crate) fn end(&mut self) {
        // In a forked child, the thread belongs to the parent.
        if self.core.check_process().is_ok() {
            self.core.shut();
            // A panic there has been printed, and needs no cleanup.
            self.thread.take().into_iter().for_each(|thread| _ = thread.join());
        }
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        if self.core.check_process().is_err() {
            // In a forked child, the thread and its data belong to the parent.
            std::mem::forget((self.thread.take(), self.core.clone()));
            return;
        }
        self.core.shut();
        if let Some(thread) = self.thread.take() {
            // Its collectives end at once. A hook may not: then it keeps what it uses.
            crate::sys::join(thread);
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
