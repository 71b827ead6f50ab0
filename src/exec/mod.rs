//! From a call to its result: `submit` -> `dispatch` -> one of the paths.
//!
//! - [`call`] is a call without types, and [`raw`] one with the pointers of C.
//! - [`submit`] checks it and chooses its thread: the caller's, or through the [`queue`] and its
//!   [`tasks`] the one that the [`runner`] is on. [`exclusive`] keeps several operations together, on
//!   their caller's thread (a [`handover`]).
//! - [`together`] checks the buffers of messages that run side by side.
//! - [`dispatch`] chooses its path: shared memory ([`crate::shm`]), [`messages`] (the
//!   [`crate::engine`] executes a schedule), [`hierarchical`] (both), or [`device`]. [`compression`]
//!   says which messages have elements of 16 bits.
//! - [`core`] is what a communicator runs operations with, and [`device_state`] what it keeps for
//!   devices. [`connect`] prepares it for the first operation, and [`allocate`] shares more memory.
//! - [`state`] is what the threads of a communicator share, and why it ended; [`unwinding`] ends it
//!   if a call panics.
//! - A call on a device is [`lent`]: [`lend`] finds its device, and [`on_stream`] enqueues its work on
//!   a CUDA stream. [`host_area`] is memory that it may pass through. [`graphs`] has the calls that
//!   run when a CUDA graph is replayed.
//! - [`work`] is the caller's handle on a call in flight.

mod allocate;
pub(crate) mod call;
mod compression;
mod connect;
mod core;
pub(crate) mod costs;
mod device;
mod device_state;
mod dispatch;
mod exclusive;
mod graphs;
mod handover;
mod hierarchical;
mod host_area;
mod lend;
mod lent;
mod messages;
mod on_stream;
mod queue;
mod raw;
mod runner;
#[cfg(test)]
mod simulation;
mod state;
mod submit;
mod tasks;
mod together;
mod unwinding;
pub(crate) mod work;

pub(crate) use call::Call;
pub(crate) use connect::Agreed;
pub(crate) use core::Core;
pub(crate) use device_state::drain;
pub(crate) use lent::Lent;
pub(crate) use raw::Raw;
pub(crate) use state::CommState;
pub(crate) use submit::Executor;
