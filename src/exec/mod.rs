//! From a checked call to its result.
//!
//! - [`call`] is a call without types, and [`raw`] one with the pointers of C.
//! - [`submit`] gives it to the thread that carries it out: the caller's, or that of the [`queue`].
//! - [`core`] carries it out, one call at a time; [`device`] those on the memory of GPUs.
//! - [`state`] is why a communicator ended, and [`unwinding`] what happens if a call panics.
//! - [`work`] is what a caller holds of a call that is in flight.

pub(crate) mod call;
mod core;
pub(crate) mod device;
mod queue;
mod raw;
#[cfg(test)]
mod simulation;
mod state;
mod submit;
mod unwinding;
pub(crate) mod work;

pub(crate) use call::Call;
pub(crate) use core::{Agreed, Core};
pub(crate) use device::{Lent, drain};
pub(crate) use raw::Raw;
pub(crate) use submit::Executor;
