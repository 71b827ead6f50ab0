//! A step of training, in which gradients become ready and are averaged.

use super::reducer::Reducer;
use super::state::Gradient;
use super::view::View;
use crate::error::{ReducerError, Result};
use crate::types::Element;

impl Reducer {
    /// Begins a step, at the end of which all ranks have the average of their gradients. The
    /// gradients of the step before can no longer be read.
    ///
    /// The second call is collective if it [rebuilds](super::ReducerBuilder::rebuild) the buckets.
    ///
    /// # Errors
    ///
    /// The failure that ended the reducer, such as a step that was dropped. The second call also
    /// returns those of a collective.
    pub fn begin(&mut self) -> Result<Step<'_>> {
        self.open(true)
    }

    /// Begins a step that is not reduced ("no_sync"). Its gradients are kept, and those of the next
    /// steps are added to them. The next step from [`Reducer::begin`] averages the sum. Not a
    /// collective call.
    ///
    /// # Errors
    ///
    /// The failure that ended the reducer.
    pub fn accumulate(&mut self) -> Result<Step<'_>> {
        self.open(false)
    }

    fn open(&mut self, syncs: bool) -> Result<Step<'_>> {
        self.start(syncs)?;
        Ok(Step { reducer: self })
    }
}

/// A step, from [`Reducer::begin`] or [`Reducer::accumulate`] to [`Step::finish`]. Threads may
/// share it.
///
/// Each parameter's gradient is written and made ready once, by one of [`Step::view`],
/// [`Step::put`] and [`Step::put_strided`] (or, with the feature `cuda`, `view_on_device` and
/// `put_on_device`). Dropping a step without finishing it ends the reducer: this rank's next
/// `begin()` fails, and so do the other ranks' steps.
#[must_use = "a step that is dropped without finish() ends the reducer"]
#[derive(Debug)]
pub struct Step<'r> {
    pub(super) reducer: &'r mut Reducer,
}

impl Step<'_> {
    /// Opens a view of the memory of a parameter's gradient, to be written without a copy. [`View::ready`]
    /// makes the gradient ready.
    ///
    /// # Errors
    ///
    /// [`ReducerError::NoParameter`] if there is no such parameter, [`ReducerError::Elements`]
    /// if it has another element type, [`ReducerError::Place`] if it is on a device,
    /// [`ReducerError::InView`] if there is a view of its gradient, [`ReducerError::Twice`] if
    /// its gradient is ready.
    pub fn view<T: Element>(&self, parameter: usize) -> Result<View<'_, T>> {
        self.reducer.core.view(parameter)
    }

    /// Copies a gradient to its memory and makes it ready. After steps that were not reduced, adds
    /// it to what is there.
    ///
    /// # Errors
    ///
    /// Those of [`Step::view`]; [`ReducerError::Length`] if `gradient` has another number of
    /// elements.
    pub fn put<T: Element>(&self, parameter: usize, gradient: &[T]) -> Result<()> {
        self.reducer.core.put(parameter, gradient)
    }

    /// As [`Step::put`], for a gradient with strides, such as a permuted view: the element at index
    /// `[i, j, ...]` is `memory[i * strides[0] + j * strides[1] + ...]`. Gathers and copies in one
    /// pass.
    ///
    /// # Errors
    ///
    /// Those of [`Step::view`]; [`ReducerError::Length`] if `strides` has not one entry for each
    /// dimension, or the last element lies beyond `memory`.
    pub fn put_strided<T: Element>(&self, parameter: usize, memory: &[T], strides: &[usize]) -> Result<()> {
        self.reducer.core.put_strided(parameter, memory, strides)
    }

    /// Makes a gradient ready that was written through a view, or through its pointer in C. May be
    /// called from any thread. If the gradient completes the next bucket, its reduction starts at
    /// once.
    ///
    /// # Errors
    ///
    /// [`ReducerError::NoParameter`] if there is no such parameter, [`ReducerError::InView`] if there
    /// is a view of its gradient, [`ReducerError::Twice`] if its gradient is ready, and the failure
    /// that ended the reducer.
    pub fn ready(&self, parameter: usize) -> Result<()> {
        self.reducer.core.mark(parameter, Gradient::Ready, false)
    }

    /// Declares that this step has no gradient for a parameter: it counts as zeros.
    ///
    /// # Errors
    ///
    /// Those of [`Step::ready`].
    pub fn unused(&self, parameter: usize) -> Result<()> {
        self.reducer.core.mark(parameter, Gradient::Unused, false)
    }

    /// Returns whether gradients hold the sums of steps that were not reduced, so that new ones
    /// must be added.
    pub fn accumulates(&self) -> bool {
        self.reducer.core.accumulates()
    }

    /// Ends the step: starts the remaining buckets, and waits until all are reduced. Then
    /// [`Reducer::gradient`] returns the averages. After [`Reducer::accumulate`] nothing is
    /// reduced.
    ///
    /// # Errors
    ///
    /// [`ReducerError::NotReady`] if a gradient is missing that must not be; the other ranks'
    /// steps fail as well. [`crate::Error::Peer`] if a collective failed.
    pub fn finish(self) -> Result<()> {
        self.reducer.core.close()
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.reducer.core.is_open() {
            self.reducer.core.fail(ReducerError::Moment { call: "step", why: "it was dropped without finish()" }.into());
        }
    }
}
