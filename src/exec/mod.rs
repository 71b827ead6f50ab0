//! The paths of a call on host memory.
//!
//! - [`dispatch`] chooses its path: shared memory ([`crate::shm`]), [`messages`] (the
//!   [`crate::engine`] executes a schedule), or [`hierarchical`] (both). [`compression`] says which
//!   messages have elements of 16 bits, and [`repeated`] what the last short calls were.
//! - [`core`] is what a communicator runs operations with. [`connect`] prepares it for the first
//!   operation, and [`allocate`] shares more memory.
//! - [`costs`] says in which order schedules visit hosts, and [`inquiry`] when ranks ask whether that is
//!   still the best one.

mod allocate;
pub(crate) mod compression;
mod connect;
pub(crate) mod core;
pub(crate) mod costs;
mod dispatch;
mod hierarchical;
mod inquiry;
pub(crate) mod messages;
pub(crate) mod repeated;
#[cfg(test)]
mod simulation_tests;

pub(crate) use connect::Agreed;
pub(crate) use core::Core;
