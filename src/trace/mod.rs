//! The flight recorder: the last operations of each communicator, to find out why a job stopped.
//!
//! - [`log`] is the ring buffer of one communicator's last operations.
//! - [`recorder`] holds the logs of one rank.
//! - [`statistics`] counts the paths on devices.
//! - [`dump`] writes them to files, which `kolo trace` reads.

mod dump;
mod log;
mod recorder;
mod statistics;

pub(crate) use log::{EntryId, LogEntry, OpLog};
pub(crate) use recorder::{RankOfJob, Recorder, Recording, path, prepare};
pub(crate) use statistics::PathTaken;
pub use statistics::{DeviceStats, Stats};
