//! The reducer, as its user sees it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::buckets::{Buckets, DeviceMemory};
use super::builder::{ReducerBuilder, Uneven};
use super::core::Core;
use super::exchange::{Exchange, check, exchange};
use super::intent::Intent;
use super::layout::Layout;
use super::on_device::OnDevice;
use super::parameter::{Parameter, TensorMut};
use super::statistics::StepStatistics;
use crate::cuda::device::Address;
use crate::error::{Error, ReducerProblem, Result};
use crate::types::{Element, Rank};

/// Averages gradients over all ranks, bucket by bucket; see [the module](super).
///
/// Every rank makes the same calls in the same order, except that gradients may become ready in any.
pub struct Reducer {
    pub(super) core: Arc<Core>,
    pub(super) buffers: Vec<Parameter>,
    /// Where buffers are exchanged.
    pub(super) staging: Buckets,
    /// The device, if anything is on one.
    pub(super) on: Option<Arc<OnDevice>>,
    pub(super) bucket_bytes: [usize; 2],
    /// Whether buckets are to be made anew.
    pub(super) rebuilds: bool,
    pub(super) thread: Option<JoinHandle<()>>,
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
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::Elements`], [`ReducerProblem::Place`] and [`ReducerProblem::Length`] if they are not the parameters that were
    /// described.
    pub fn broadcast_parameters(&mut self, values: &mut [TensorMut<'_>]) -> Result<()> {
        self.exchange_parameters(values, Exchange::Broadcast(0))
    }

    /// Gives all ranks the average of their values of all parameters, as [`LocalSgd`](super::LocalSgd) does now and then. It
    /// overwrites the gradients.
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
            let why = "gradients are being accumulated where parameters would pass through; finish a step first";
            return Err(ReducerProblem::Moment { call: intent.call(), why }.into());
        }
        self.exchange(intent, values)
    }

    /// Makes all ranks' buffers equal, as BatchNorm's running mean and variance: whenever the model wants it, before every step,
    /// before an evaluation, before a checkpoint.
    ///
    /// A collective call.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::Elements`], [`ReducerProblem::Place`] and [`ReducerProblem::Length`] if they are not the buffers that were
    /// described.
    pub fn sync_buffers(&mut self, values: &mut [TensorMut<'_>], how: BufferSync) -> Result<()> {
        self.accept("buffers", &self.buffers, values)?;
        let how = match how {
            BufferSync::Broadcast(root) => Exchange::Broadcast(root),
            BufferSync::Average => Exchange::Average,
        };
        drop(self.core.between("sync_buffers")?);
        self.exchange(Intent::Buffers(how), values)
    }

    /// Refuses tensors that are not those described, and has the reducer's stream come after those to which they belong.
    fn accept(&self, what: &str, described: &[Parameter], values: &[TensorMut<'_>]) -> Result<()> {
        check(what, described, values)?;
        let Some(on) = &self.on else { return Ok(()) };
        let on_device = described.iter().zip(values).filter(|(one, value)| one.on_device && value.count > 0);
        for (one, value) in on_device {
            on.expect_here(&self.core.comm, &one.name, value.memory.ptr.addr() as Address)?;
            #[cfg(feature = "cuda")]
            value.wait_for_its_stream(on)?;
        }
        Ok(())
    }

    fn exchange(&mut self, intent: Intent, values: &mut [TensorMut<'_>]) -> Result<()> {
        let active = match self.core.uneven {
            Uneven::No => vec![true; self.world_size()],
            // Ranks that have joined hear of it.
            _ => self.or_fail(self.core.announce(intent))?,
        };
        self.exchange_among(intent, Some(values), &active)
    }

    /// What all ranks do in an exchange, also those that have joined, which have no values.
    fn exchange_among(&mut self, intent: Intent, values: Option<&mut [TensorMut<'_>]>, active: &[bool]) -> Result<()> {
        let (how, buckets) = match intent {
            Intent::Parameters(how) => (how, &*self.core.between("exchange")?.buckets.clone()),
            Intent::Buffers(how) => (how, &self.staging),
            Intent::Joined | Intent::Step | Intent::Rebuild => return Ok(()),
        };
        if let Exchange::Broadcast(root) = how
            && active.get(root) != Some(&true)
        {
            // All see it alike, so nothing was sent.
            let why = "the rank whose values are wanted does not exist, or has joined";
            return Err(ReducerProblem::Moment { call: intent.call(), why }.into());
        }
        // SAFETY: between steps nothing is in flight, and views and gradients borrow the reducer, as does this.
        let result = unsafe { exchange(&self.core.comm, buckets, values, how, active) };
        self.or_fail(result.inspect_err(|_| buckets.abandon()))
    }

    /// As [`Reducer::begin`], without a guard.
    pub(crate) fn start(&mut self, syncs: bool) -> Result<()> {
        if syncs && self.rebuilds && self.core.between("begin")?.steps > 0 {
            if self.core.uneven != Uneven::No {
                // Ranks that have joined hear of it.
                self.or_fail(self.core.announce(Intent::Rebuild))?;
            }
            self.make_buckets_anew()?;
        }
        self.core.open(syncs, None)
    }

    /// This rank has no more input, and takes part in the steps of those that have, with zeros, until none has. After each,
    /// `after_step` is called, where the gradients' averages can be read: an optimiser that steps there, too, keeps all ranks'
    /// parameters equal. It makes no collective calls: that of [`LocalSgd`](super::LocalSgd) is one,
    /// and is left to those that have input. Of the other ranks' [`Reducer::sync_buffers`] and
    /// [`Reducer::average_parameters`] this rank has nothing.
    ///
    /// All ranks call it when they have no more input; it returns when all have. Needs [`ReducerBuilder::uneven`].
    pub fn join(&mut self, mut after_step: impl FnMut(&mut Reducer) -> Result<()>) -> Result<Joined> {
        let mut steps = 0;
        while self.join_step()? {
            steps += 1;
            after_step(self)?;
        }
        Ok(Joined { steps, last: self.last()? })
    }

    /// The rank that made the last step, the lowest of several.
    pub(crate) fn last(&self) -> Result<Rank> {
        Ok(self.core.between("join")?.active.iter().position(|&active| active).unwrap_or(0))
    }

    /// Takes part in one step of those that have input; false if none has any more.
    pub(crate) fn join_step(&mut self) -> Result<bool> {
        if self.core.uneven == Uneven::No {
            let why = "the reducer was built for ranks that make equally many steps; choose another Uneven";
            return Err(ReducerProblem::Moment { call: "join", why }.into());
        }
        loop {
            drop(self.core.between("join")?);
            let (intent, active) = self.or_fail(self.core.meet(Intent::Joined))?;
            match intent {
                Intent::Joined => return Ok(false),
                Intent::Rebuild => self.make_buckets_anew()?,
                Intent::Step => {
                    self.core.open(true, Some(active))?;
                    self.core.settle_nothing()?;
                    self.core.close()?;
                    return Ok(true);
                }
                // What fails for the others before it starts is no failure here.
                _ => match self.exchange_among(intent, None, &active) {
                    Err(Error::Reducer { .. }) => {}
                    result => result?,
                },
            }
        }
    }

    /// Makes the buckets anew when the second step begins, in the order in which gradients arrived on rank 0. Gradients that are
    /// being accumulated move with them; others cannot be read any more.
    fn make_buckets_anew(&mut self) -> Result<()> {
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
        // Those that did not arrive come last.
        let mut has_arrived = vec![false; parameters.len()];
        arrivals.iter().for_each(|&index| has_arrived[index] = true);
        let others = (0..parameters.len()).rev().filter(|&index| !has_arrived[index]);
        let mut order: Vec<u64> = arrivals.iter().copied().chain(others).map(|index| index as u64).collect();
        comm.broadcast(&mut order, 0)?;
        let order: Vec<usize> = order.into_iter().map(|index| index as usize).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..parameters.len()) {
            let why = "rank 0's order of gradients is none; is the same kolo installed everywhere?";
            return Err(ReducerProblem::Moment { call: "begin", why }.into());
        }
        let layout = Layout::new(parameters, order, self.bucket_bytes);
        if layout == old.layout {
            return Ok(None);
        }
        let device = DeviceMemory::allocate(self.on.as_ref(), &layout)?;
        let buckets = Buckets::allocate(comm, layout, device)?;
        if accumulated {
            // SAFETY: between steps nothing is in flight, and views and gradients borrow the reducer, as does this.
            unsafe { buckets.copy_from(old, parameters)? };
        }
        Ok(Some(buckets))
    }

    /// An operation that failed on this rank ends the reducer.
    fn or_fail<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.core.fail(error.clone()))
    }

    /// The average of a parameter's gradient, after a step.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::NoParameter`]; [`ReducerProblem::Elements`] if it has elements of another type; [`ReducerProblem::Place`] if
    /// it is on a device.
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
        let described = self.core.parameter(parameter)?;
        described.expect(T::DTYPE)?;
        described.expect_place(false)?;
        let state = self.core.between("gradient")?;
        let (address, len) = state.buckets.gradient(parameter);
        Ok((address.cast(), len / size_of::<T>()))
    }

    /// Whether a parameter got a gradient in the last step, on any rank (with [`Unused::Error`](super::Unused), on this one):
    /// optimisers leave the others alone, and their momentum. False if there is no such parameter.
    pub fn is_used(&self, parameter: usize) -> bool {
        self.core.is_used(parameter)
    }

    /// What the last step that was reduced cost.
    pub fn statistics(&self) -> StepStatistics {
        self.core.statistics()
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        if self.core.check_process().is_err() {
            // A forked child: the thread is the parent's, and so is what it works on.
            std::mem::forget((self.thread.take(), self.core.clone()));
            return;
        }
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
