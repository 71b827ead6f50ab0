//! The flight recorder: the last operations of each communicator, to find out why a job stopped.
//!
//! - [`log`] is the ring buffer of one communicator's last operations.
//! - [`recorder`] holds the logs of one rank.
//! - [`statistics`] counts the paths on devices, `totals` the operations, `traffic` the bytes of links, and
//!   [`pace`] notices that one has become slow.
//! - [`dump`] writes them to files, which `kolo trace` reads.

mod dump;
mod log;
mod pace;
mod recorder;
mod statistics;
mod totals;
mod traffic;

pub(crate) use log::{EntryId, LogEntry, OpLog, Operation, is_large};
pub(crate) use recorder::{RankOfJob, Recorder, Recording, choice, path, prepare};
#[cfg(feature = "cuda")]
pub(crate) use statistics::PathTaken;
pub use statistics::{DeviceStats, Stats};
pub(crate) use totals::OpTotal;
pub(crate) use traffic::{LinkTable, LinkTotal, Traffic};
