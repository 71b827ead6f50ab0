//! The flight recorder: what each communicator did last, for when somebody has to find out why it stopped.
//!
//! - [`log`] is the ring of one communicator's last operations.
//! - [`recorder`] has the logs of one rank.
//! - [`dump`] makes files of them, which `kolo trace` reads.

mod dump;
mod log;
mod recorder;

pub(crate) use log::{EntryId, LogEntry, OpLog};
pub(crate) use recorder::{RankOfJob, Recorder, Recording, path, prepare};
