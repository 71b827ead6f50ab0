//! One step: gradients are written and made ready.

use super::reducer::Reducer;
use super::state::Gradient;
use super::view::View;
use crate::error::{ReducerProblem, Result};
use crate::types::Element;

impl Reducer {
    /// Begins a step, at whose end all ranks have the average of their gradients. Gradients of the step before can no longer be
    /// read.
    ///
    /// A collective call the second time, when buckets are made anew.
    pub fn begin(&mut self) -> Result<Step<'_>> {
        self.open(true)
    }

    /// Begins a step that is not reduced ("no_sync"): its gradients are kept, and the next steps' added to them, until one that
    /// [`Reducer::begin`] began has been finished, which averages the sum. Not a collective call.
    pub fn accumulate(&mut self) -> Result<Step<'_>> {
        self.open(false)
    }

    fn open(&mut self, syncs: bool) -> Result<Step<'_>> {
        self.start(syncs)?;
        Ok(Step { reducer: self })
    }
}

/// A step between [`Reducer::begin`] (or [`Reducer::accumulate`]) and [`Step::finish`]. Threads may share it.
///
/// Every parameter's gradient is written, by one of [`Step::view`], [`Step::put`] and [`Step::put_strided`] (or, with the feature
/// `cuda`, `view_on_device` and `put_on_device`), and made ready, once.
/// Dropping a step without finishing it ends the reducer: this rank's next `begin()` fails, and the other ranks' steps.
#[must_use = "a step that is dropped without finish() ends the reducer"]
#[derive(Debug)]
pub struct Step<'r> {
    pub(super) reducer: &'r mut Reducer,
}

impl Step<'_> {
    /// The place of a parameter's gradient, to be written there: no copy. [`View::ready`] says that it is there.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::NoParameter`], [`ReducerProblem::Elements`] if it has elements of another type,
    /// [`ReducerProblem::Place`] if it is on a device, [`ReducerProblem::Lent`] if there is a view of it, [`ReducerProblem::Twice`] if it is ready.
    pub fn view<T: Element>(&self, parameter: usize) -> Result<View<'_, T>> {
        self.reducer.core.view(parameter)
    }

    /// Copies a gradient that lies elsewhere to its place, and makes it ready. Adds it to what is there after steps that were not
    /// synchronised.
    ///
    /// # Errors
    ///
    /// Those of [`Step::view`]; [`ReducerProblem::Length`] if there are not as many elements.
    pub fn put<T: Element>(&self, parameter: usize, gradient: &[T]) -> Result<()> {
        self.reducer.core.put(parameter, gradient)
    }

    /// As [`Step::put`], for a gradient whose elements lie otherwise in memory, as those of a permuted view: that of the
    /// parameter's index `[i, j, ...]` is `memory[i * strides[0] + j * strides[1] + ...]`. The one pass that gathers them is all.
    ///
    /// # Errors
    ///
    /// Those of [`Step::view`]; [`ReducerProblem::Length`] if there is not one stride for each dimension, or the last element is
    /// beyond the memory.
    pub fn put_strided<T: Element>(&self, parameter: usize, memory: &[T], strides: &[usize]) -> Result<()> {
        self.reducer.core.put_strided(parameter, memory, strides)
    }

    /// Says that a gradient is where its view was, or its pointer in C. From any thread; if that fills the bucket whose turn it is,
    /// it is reduced at once.
    pub fn ready(&self, parameter: usize) -> Result<()> {
        self.reducer.core.settle(parameter, Gradient::Ready, false)
    }

    /// Says that this step gives a parameter no gradient: it counts as zeros.
    pub fn unused(&self, parameter: usize) -> Result<()> {
        self.reducer.core.settle(parameter, Gradient::Unused, false)
    }

    /// Whether gradients hold what steps that were not synchronised left there, so that one has to add to them.
    pub fn accumulates(&self) -> bool {
        self.reducer.core.accumulates()
    }

    /// Ends the step: starts the buckets that have not been, and waits until all are reduced. Now the averages can be read, by
    /// [`Reducer::gradient`]. After [`Reducer::accumulate`] nothing is reduced.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::NotReady`] if a gradient is missing that may not; the other ranks' steps fail, too. What a collective
    /// met, as [`crate::Error::Peer`].
    pub fn finish(self) -> Result<()> {
        self.reducer.core.close()
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.reducer.core.is_open() {
            self.reducer.core.fail(ReducerProblem::Moment { call: "step", why: "it was dropped without finish()" }.into());
        }
    }
}
