//! Collectives of which some buffers, or all, are in the memory of GPUs.
//!
//! The caller enqueues all work of a call on a stream ([`super::on_stream`]). The stream and the host
//! then run the call together by words in pinned memory ([`crate::cuda::words`]), and the operation
//! needs no driver call ([`operation`]). So nothing that the driver waits for can keep an operation
//! from ending, and the host can always let the stream continue.
//!
//! Short calls pass through pinned host memory as a whole. For longer ones the ranks find out in the
//! first call ([`prepare`]) whether kernels can reach the memory of all of them:
//!
//! - If they can, the call is direct: one kernel on each GPU reads and writes the buffers of all
//!   ranks where they are, or a round after the other in areas if a buffer cannot be reached. A short
//!   all-reduce may be one-shot.
//! - Otherwise it is staged: it passes in rounds through pinned host memory. While one segment is
//!   reduced there, the next one comes from the device.
//!
//! Ranks wait for each other on the host, because a stream that waits for a process which has died
//! never continues. Where each rank has a GPU of its own, kernels may wait for each other
//! ([`crate::cuda::barrier`]): for a limited time, and until the host cancels it.

mod agree;
#[cfg(test)]
mod barrier_tests;
mod direct;
#[cfg(test)]
mod driver_tests;
#[cfg(test)]
mod graph_tests;
#[cfg(test)]
mod memory_tests;
mod message;
mod operation;
mod prepare;
mod staged;
#[cfg(test)]
mod tests;
mod watchdog;

pub(super) use message::MessageOnDevice;
pub(super) use operation::{OnDevices, SHORT};
