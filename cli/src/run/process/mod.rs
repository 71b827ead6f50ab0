//! Processes and signals, where systems differ.

#[cfg(unix)]
mod unix;
#[cfg(unix)]
use unix as platform;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as platform;

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};

pub(super) use platform::{OUTPUT_PATIENCE, RankOutput};
pub(crate) use platform::{
    Signal, Tie, announce, become_independent, decode_status, describe, encode_status, exit, exit_code, ignore_signals,
    make_private_folder, prepare, send, spawn_reader, use_processors, was_killed, watch_signals,
};

/// What the launcher waits for.
pub(crate) enum Event {
    /// A rank has ended.
    Ended(usize, ExitStatus),
    /// A rank could not be started, for this reason.
    NotStarted(usize, String),
    /// The connection to a host has ended before the ranks there, for this reason.
    Lost(usize, String),
    Signalled(Signal),
}

/// The process of a rank whose end has not been reported.
pub(crate) struct Process {
    pid: u32,
    group: platform::Group,
}

impl Process {
    pub(crate) fn new(child: &Child) -> Process {
        Process { pid: child.id(), group: platform::Group::of(child) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.group.send(signal);
    }
}

/// The variable that names the folder for temporary files.
const TEMPORARY: &str = if cfg!(windows) { "TMP" } else { "TMPDIR" };

/// Returns the folder for temporary files. An empty `TMPDIR` counts as not set.
pub(crate) fn temporary() -> PathBuf {
    let given = std::env::temp_dir();
    if given.as_os_str().is_empty() { PathBuf::from("/tmp") } else { given }
}

/// Makes a folder for temporary files, which only its user can open.
pub(crate) fn make_temporary(path: &Path) -> Result<(), String> {
    make_private_folder(path).map_err(|error| {
        format!("the folder {} cannot be made: {error}; set {TEMPORARY} to a folder that can be written", path.display())
    })
}
