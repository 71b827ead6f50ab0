//! A reducer without guards, for [`crate::raw`].

use std::fmt;
use std::sync::Arc;

use super::core::Core;
use super::reducer::Reducer;
use super::state::Gradient;
use crate::buffer::Address;
use crate::error::{Error, Result};
use crate::types::{Element, Op};

/// A step is not a guard here, and gradients are addresses.
impl Reducer {
    /// Marks a gradient of the step as ready, or as one that there will not be.
    pub(crate) fn mark(&self, parameter: usize, is_used: bool) -> Result<()> {
        self.core.mark(parameter, if is_used { Gradient::Ready } else { Gradient::Unused }, false)
    }

    /// As [`super::Step::put`].
    pub(crate) fn put<T: Element>(&self, parameter: usize, gradient: &[T]) -> Result<()> {
        self.core.put(parameter, gradient)
    }

    /// As [`super::Step::put_strided`].
    pub(crate) fn put_strided<T: Element>(&self, parameter: usize, memory: &[T], strides: &[usize]) -> Result<()> {
        self.core.put_strided(parameter, memory, strides)
    }

    /// As [`super::Step::put`], for a gradient on the reducer's device, in the order of its stream.
    ///
    /// # Safety
    ///
    /// The parameter's elements are at `from` until the stream has passed the copy.
    pub(crate) unsafe fn put_on_device(&self, parameter: usize, from: Address) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.core.put_on_device(parameter, from) }
    }

    pub(crate) fn accumulates(&self) -> bool {
        self.core.accumulates()
    }

    /// As [`super::Step::finish`].
    pub(crate) fn finish(&self) -> Result<()> {
        self.core.close()
    }

    /// Returns the address of a gradient, which is valid until buckets are rebuilt.
    pub(crate) fn address(&self, parameter: usize) -> Result<*mut u8> {
        self.core.parameter(parameter)?;
        Ok(self.core.address(parameter))
    }

    /// As [`Reducer::is_used`].
    pub(crate) fn was_used(&self, parameter: usize) -> Result<bool> {
        self.core.parameter(parameter)?;
        Ok(self.core.is_used(parameter))
    }

    /// Returns a handle that ends the reducer from any thread.
    pub(crate) fn stopper(&self) -> Stopper {
        Stopper(self.core.clone())
    }
}

/// Ends a reducer, even while another thread uses it.
#[derive(Clone)]
pub struct Stopper(Arc<Core>);

impl fmt::Debug for Stopper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopper").finish_non_exhaustive()
    }
}

impl Stopper {
    /// Checks that this process is not a child forked from the one that made the reducer.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in such a child.
    pub fn check_process(&self) -> Result<()> {
        self.0.check_process()
    }

    /// Ends the reducer: calls under way on it, and later ones, fail on all ranks.
    pub fn stop(&self) {
        self.0.fail(Error::Aborted { op: Op::AllReduce, seq: 0 });
    }
}
