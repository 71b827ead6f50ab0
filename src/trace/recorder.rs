//! The flight recorder: what each communicator did last, for when somebody has to find out why it stopped.
//!
//! It is always on: every communicator has a [`OpLog`]. [`super::dump`] makes files of those of one rank.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::log::OpLog;
use crate::error::{Error, Result};
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::sys::{self, Timeline};
use crate::types::{Member, Rank};

/// The operations of one communicator, seen from one rank.
pub(crate) struct Recording {
    /// Tells the communicators of a job apart; the same on all its ranks.
    pub(super) comm_id: u64,
    /// This rank in the communicator, and the communicator's ranks as ranks of the job.
    pub(super) rank: Rank,
    pub(super) members: Arc<[Rank]>,
    pub(crate) history: OpLog,
    /// What ended the communicator, and the rank that it names.
    pub(super) failure: OnceLock<(String, Option<Rank>)>,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// The communicator has ended because of an error. Leaves a file, if that is wanted.
    #[cold]
    pub(crate) fn failed(&self, error: &Error) {
        if self.failure.set((error.to_string(), error.culprit())).is_ok() {
            self.recorder.leave("error");
        }
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }
}

/// An algorithm, and the one between hosts, in one byte.
#[inline]
pub(crate) fn path(choice: Option<Choice>) -> u8 {
    let nibble = |algorithm: Option<Algorithm>| algorithm.map_or(0, |algorithm| algorithm as u8 + 1);
    choice.map_or(0, |choice| nibble(Some(choice.algorithm)) | nibble(choice.between) << 4)
}

pub(super) fn choice(path: u8) -> Option<Choice> {
    let algorithm = |nibble: u8| Algorithm::from_number(nibble.checked_sub(1)?);
    Some(Choice { algorithm: algorithm(path & 15)?, between: algorithm(path >> 4) })
}

/// Which rank of which job it is that records.
#[derive(Clone, Debug)]
pub(crate) struct RankOfJob {
    pub(crate) job: String,
    /// The same on all ranks, and another for every start.
    pub(crate) run: u64,
    pub(crate) rank: Rank,
    /// All ranks of the job.
    pub(crate) members: Vec<Member>,
}

/// The recordings of one rank: of its first communicator and of all that came of it.
pub(crate) struct Recorder {
    pub(super) who: RankOfJob,
    /// Where files are left when an operation has failed, or at a signal.
    pub(super) folder: Option<PathBuf>,
    recordings: Mutex<Vec<Weak<Recording>>>,
    /// Held while a file is written.
    pub(super) writing: Mutex<()>,
}

/// Those that answer a signal.
static RECORDERS: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());

impl Recorder {
    pub(crate) fn new(who: RankOfJob, folder: Option<PathBuf>) -> Arc<Recorder> {
        Timeline::begin();
        let recorder = Arc::new(Recorder { who, folder, recordings: Mutex::default(), writing: Mutex::default() });
        let mut recorders = RECORDERS.lock();
        recorders.retain(|other| other.strong_count() > 0);
        recorders.push(Arc::downgrade(&recorder));
        recorder
    }

    /// The recording of one communicator.
    pub(crate) fn open(self: &Arc<Self>, comm_id: u64, rank: Rank, members: Arc<[Rank]>) -> Arc<Recording> {
        let (history, failure) = (OpLog::default(), OnceLock::new());
        let recording = Arc::new(Recording { comm_id, rank, members, history, failure, recorder: self.clone() });
        let mut recordings = self.recordings.lock();
        recordings.retain(|other| other.strong_count() > 0);
        recordings.push(Arc::downgrade(&recording));
        recording
    }

    /// The recordings of communicators that have not been dropped.
    pub(super) fn recordings(&self) -> Vec<Arc<Recording>> {
        self.recordings.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Leaves a file in the folder, if there is one.
    fn leave(&self, reason: &str) {
        let Some(folder) = &self.folder else { return };
        let path = folder.join(self.file_name());
        match self.write(&path, reason) {
            Ok(()) => tracing::info!(path = %path.display(), "the last operations of this rank are written"),
            Err(error) => tracing::warn!(%error, path = %path.display(), "the last operations of this rank cannot be written"),
        }
    }
}

/// Makes sure that files can be left in a folder, and has them left at SIGUSR1 if that is wanted.
pub(crate) fn prepare(folder: Option<&PathBuf>, on_signal: bool, deadline: Instant) -> Result<()> {
    if let Some(folder) = folder {
        let refuse =
            |error| Error::setting("KOLO_TRACE_DIR", folder.display().to_string(), format!("a folder to write to: {error}"));
        let (kind, path) = (format!("create {}", folder.display()), folder.clone());
        let create = move || std::fs::create_dir_all(path);
        sys::by_deadline(kind, deadline, sys::SILENT_FILE, create, |error| error).map_err(refuse)?;
    }
    if !on_signal {
        return Ok(());
    }
    let refuse = |why: String| Error::setting("KOLO_TRACE_SIGNAL", "1", why);
    if folder.is_none() {
        return Err(refuse("it needs KOLO_TRACE_DIR, a folder for the files".to_owned()));
    }
    static LISTENING: Mutex<bool> = Mutex::new(false);
    let mut listening = LISTENING.lock();
    if !*listening {
        sys::on_user_signal(leave_all).map_err(|error| refuse(format!("SIGUSR1 cannot be handled: {error}")))?;
        *listening = true;
    }
    Ok(())
}

fn leave_all() {
    let recorders: Vec<_> = RECORDERS.lock().iter().filter_map(Weak::upgrade).collect();
    recorders.iter().for_each(|recorder| recorder.leave("signal"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_back() {
        for algorithm in [Algorithm::Ring, Algorithm::Window, Algorithm::Hierarchical] {
            for between in [None, Some(Algorithm::Ring), Some(Algorithm::Dissemination)] {
                let chosen = Some(Choice { algorithm, between });
                assert_eq!(choice(path(chosen)), chosen);
            }
        }
        assert_eq!(choice(path(None)), None);
        assert!(Algorithm::ALL.len() < 15, "algorithms no longer fit into half a byte");
    }
}
