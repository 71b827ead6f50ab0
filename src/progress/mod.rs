//! From a call to the thread that runs it, and to its end.
//!
//! - [`submit`] checks a call and chooses its thread: the caller's, or through the [`queue`] and its
//!   [`tasks`] the one that the [`runner`] is on. [`exclusive`] keeps several operations together, on
//!   their caller's thread (a [`handover`]). [`together`] checks the buffers of messages that run side by side.
//! - [`dispatch`] runs a call by [`crate::exec`], or by the communicator's devices if it concerns any.
//! - [`state`] is what the threads of a communicator share, and why it ended; [`unwinding`] ends it
//!   if a call panics. It knows devices by a trait, which `crate::device` implements.
//! - [`work`] is the caller's handle on a call in flight.

mod dispatch;
mod exclusive;
mod handover;
mod queue;
mod runner;
pub(crate) mod state;
mod submit;
mod tasks;
mod together;
mod unwinding;
pub(crate) mod work;

pub(crate) use state::CommState;
pub(crate) use submit::Executor;
