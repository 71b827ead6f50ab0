//! Collectives of which some buffers, or all, are in the memory of GPUs.
//!
//! Short ones pass through host memory as a whole. For longer ones the ranks first tell each other
//! where their buffers are:
//!
//! - If every rank can reach every buffer, each rank does its part where the buffers are
//!   ("direct").
//! - If they cannot, because memory belongs to one of CUDA's pools, an all-reduce passes through
//!   areas on the devices that all ranks can reach.
//! - Otherwise the operation is cut into segments that pass through pinned host memory. While one
//!   segment is reduced there, the next one comes from the device and the previous one returns to
//!   it.
//!
//! The host waits for devices, and ranks wait for each other on the host. No stream waits for
//! another process, because a stream that waits for a process which has died never continues. The
//! caller's stream waits at a gate, which opens when the operation has ended or failed.

mod agree;
mod areas;
mod direct;
mod message;
mod operation;
mod staged;
#[cfg(test)]
mod tests;

pub(super) use message::Staged;
pub(super) use operation::{OnDevices, SHORT};
