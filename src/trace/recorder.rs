//! The operation logs of one rank, and when they are written to a file.
//!
//! The recorder is always on: every communicator has an [`OpLog`]. [`super::dump`] writes the
//! files.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::log::OpLog;
use super::pace::{self, Change, LinkReading, OpKind, Slow};
use super::statistics::Counters;
use super::traffic::LinkTable;
use crate::error::{Error, Result};
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::sys::{self, Flow, NotOpened, Timeline};
use crate::timeouts::FILE_SYSTEM;
use crate::types::{Member, Rank};

/// The most links of a process at which one look asks the system: it takes a microsecond for each.
const MOST_LOOKS: usize = 64;

/// The operations of one communicator on one rank.
pub(crate) struct Recording {
    /// The comm id: unique in the job, and the same on all ranks.
    pub(super) comm_id: u64,
    /// This rank in the communicator.
    pub(super) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    pub(super) members: Arc<[Rank]>,
    pub(crate) history: OpLog,
    pub(crate) counters: Counters,
    pub(crate) links: Arc<LinkTable>,
    /// The error that ended the communicator, and the rank that it names.
    pub(super) failure: OnceLock<(String, Option<Rank>)>,
    /// Whether a link has become slow or has recovered since the communicator asked.
    has_changed: AtomicBool,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// Notes the error that ended the communicator. Writes a file, if there is a folder for it.
    #[cold]
    pub(crate) fn failed(&self, error: &Error) {
        if self.failure.set((error.to_string(), error.culprit())).is_ok() {
            self.recorder.leave("error");
            // The abort of a communicator, which names no rank, may follow the failure of another.
            if let Some(&culprit) = error.culprit().and_then(|culprit| self.members.get(culprit)) {
                self.recorder.tell_launcher(Some(culprit).filter(|&culprit| culprit != self.recorder.who.rank));
            }
        }
    }

    /// Looks at what the links of a process carry, and logs which ones have become slow and which have recovered.
    pub(crate) fn look_at_links<'a>(recordings: impl Iterator<Item = &'a Recording>) {
        let used = recordings.flat_map(|recording| recording.links.used().into_iter().map(move |link| (recording, link)));
        let used: Vec<_> = used.collect();
        // With more links, it is not known whether a full one is alone.
        if used.len() > MOST_LOOKS {
            used.iter().for_each(|(_, (_, traffic))| _ = traffic.look(LinkReading::default(), None));
            return;
        }
        let flows = used.into_iter().filter_map(|(recording, (peer, traffic))| Some((recording, peer, traffic.flow()?, traffic)));
        let flows: Vec<_> = flows.collect();
        // Several links share the interface, and then what each carries depends on the others.
        let is_alone = flows.iter().filter(|(_, _, flow, _)| flow.is_full).count() == 1;
        let of_host = is_alone.then(sys::sent_by_host).flatten();
        for (recording, peer, flow, traffic) in flows {
            let is_full = flow.is_full && is_alone;
            let kind = if is_full { recording.kind() } else { None };
            if let Some(change) = traffic.look(LinkReading { flow: Flow { is_full, ..flow }, of_host }, kind) {
                recording.log_change(peer, change);
                recording.has_changed.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Notes that all links carry what they did, also those that nothing uses.
    pub(crate) fn links_recovered(&self) {
        self.links.recover().into_iter().for_each(|peer| self.log_change(peer, Change::Recovered));
    }

    /// Returns whether a link has become slow or has recovered since the last time.
    pub(crate) fn take_change(&self) -> bool {
        self.has_changed.swap(false, Ordering::Relaxed)
    }

    /// Returns the kind of the last operation, if it was a long one.
    fn kind(&self) -> Option<OpKind> {
        let last = self.history.last(&Timeline::up_to_now())?;
        let algorithm = choice(last.path).map(|choice| choice.between.unwrap_or(choice.algorithm));
        pace::kind(last.descriptor.op, algorithm, last.bytes)
    }

    /// Logs that a link has become slow or has recovered.
    fn log_change(&self, peer: Rank, change: Change) {
        let host = self.members.get(peer).map_or("", |&rank| &*self.recorder.who.members[rank].host);
        let shown = |rate: f64| format!("{:.3} Gb/s", 8e-9 * rate);
        match change {
            Change::Slow(Slow { rate, before, op }) => crate::log::warn!(
                peer,
                host,
                rate = shown(rate),
                before = shown(before),
                during = %op,
                "a link carries much less than before: check its cable and its switch port, and what else uses it"
            ),
            Change::Recovered => crate::log::info!(peer, host, "a link carries again what it did"),
        }
    }

    /// Returns the error that ended the communicator, and the rank that it names.
    pub(crate) fn failure(&self) -> Option<&(String, Option<Rank>)> {
        self.failure.get()
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }
}

/// Encodes an algorithm, and the one between hosts, in one byte.
#[inline]
pub(crate) fn path(choice: Option<Choice>) -> u8 {
    let nibble = |algorithm: Option<Algorithm>| algorithm.map_or(0, |algorithm| algorithm as u8 + 1);
    choice.map_or(0, |choice| nibble(Some(choice.algorithm)) | nibble(choice.between) << 4)
}

pub(crate) fn choice(path: u8) -> Option<Choice> {
    let algorithm = |nibble: u8| Algorithm::from_number(nibble.checked_sub(1)?);
    Some(Choice { algorithm: algorithm(path & 15)?, between: algorithm(path >> 4) })
}

/// The rank and the job that record.
#[derive(Clone, Debug)]
pub(crate) struct RankOfJob {
    pub(crate) job: String,
    /// A number that is the same on all ranks, and differs for every start.
    pub(crate) run: u64,
    pub(crate) rank: Rank,
    /// The members of the job, by rank.
    pub(crate) members: Vec<Member>,
}

/// What the launcher knows of a rank: the other rank that its last failure names, if any.
type Told = Option<Rank>;

/// The recordings of one rank: those of its first communicator and of all that were made from it.
pub(crate) struct Recorder {
    pub(super) who: RankOfJob,
    /// The folder for files that are written when an operation fails, or at a signal.
    pub(super) folder: Option<PathBuf>,
    /// The launcher's file for this process, and what the recorder has added to it last.
    failures: Option<(PathBuf, Mutex<Option<Told>>)>,
    recordings: Mutex<Vec<Weak<Recording>>>,
}

/// The recorders that write files at a signal.
static RECORDERS: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());

impl Recorder {
    pub(crate) fn new(who: RankOfJob, folder: Option<PathBuf>, failures: Option<PathBuf>) -> Arc<Recorder> {
        Timeline::begin();
        let failures = failures.map(|file| (file, Mutex::default()));
        let recorder = Arc::new(Recorder { who, folder, failures, recordings: Mutex::default() });
        let mut recorders = RECORDERS.lock();
        recorders.retain(|other| other.strong_count() > 0);
        recorders.push(Arc::downgrade(&recorder));
        recorder
    }

    /// Starts the recording of one communicator. A rank that opens one has recovered from its last
    /// failure.
    pub(crate) fn open(self: &Arc<Self>, comm_id: u64, rank: Rank, members: Arc<[Rank]>) -> Arc<Recording> {
        let (history, failure) = (OpLog::default(), OnceLock::new());
        let (counters, links) = (Counters::default(), Arc::default());
        let (has_changed, recorder) = (AtomicBool::new(false), self.clone());
        let recording = Recording { comm_id, rank, members, history, counters, links, failure, has_changed, recorder };
        let recording = Arc::new(recording);
        let mut recordings = self.recordings.lock();
        recordings.retain(|other| other.strong_count() > 0);
        recordings.push(Arc::downgrade(&recording));
        drop(recordings);
        self.tell_launcher(None);
        recording
    }

    /// Returns the recordings of communicators that have not been dropped.
    pub(super) fn recordings(&self) -> Vec<Arc<Recording>> {
        self.recordings.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Adds a line to the launcher's file, if there is one and it does not end with that line: the
    /// run, this rank and the number of ranks, and the rank that a failure names. By the run and the ranks, the launcher
    /// knows which of its own ranks they are.
    fn tell_launcher(&self, culprit: Told) {
        let Some((file, told)) = &self.failures else { return };
        let mut told = told.lock();
        if *told == Some(culprit) {
            return;
        }
        *told = Some(culprit);
        let RankOfJob { run, rank, members, .. } = &self.who;
        let size = members.len();
        let named = culprit.map_or_else(String::new, |culprit| format!(" {culprit}"));
        let line = format!("{run:x} {rank}/{size}{named}\n");
        let path = file.clone();
        let append = move || {
            let mut opened = sys::open_own(OpenOptions::new().append(true).create(true), &path).map_err(NotOpened::into_error)?;
            // One call for the line, because other processes may write to the file.
            opened.write_all(line.as_bytes())
        };
        if let Err(error) = write_by(Instant::now() + FILE_SYSTEM, file, append) {
            crate::log::info!(%error, path = %file.display(), "cannot tell the launcher which rank the failure names");
        }
    }

    /// Writes the records to a file, or to the device or pipe that is at the path.
    pub(crate) fn write(&self, path: &Path, reason: &str, deadline: Instant) -> io::Result<()> {
        let (to, report) = (path.to_owned(), self.report(reason));
        write_by(deadline, path, move || sys::write_file_or_device(&to, report.as_bytes()))
    }

    /// Writes a file to the folder, if there is one.
    fn leave(&self, reason: &str) {
        let Some(folder) = &self.folder else { return };
        let path = folder.join(self.file_name());
        let (to, report) = (path.clone(), self.report(reason));
        match write_by(Instant::now() + FILE_SYSTEM, &path, move || sys::write_file(&to, report.as_bytes())) {
            Ok(()) => crate::log::info!(path = %path.display(), "wrote the last operations of this rank"),
            Err(error) => crate::log::warn!(%error, path = %path.display(), "cannot write the last operations of this rank"),
        }
    }
}

/// Writes to a path. Fails with `TimedOut` if its file system has not answered by the deadline.
fn write_by(deadline: Instant, path: &Path, write: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path).display();
    sys::by_deadline(format!("write to {folder}"), deadline, sys::SILENT_FILE, write, |error| error)
}

/// Makes sure that files can be written to a folder, and has them written at SIGUSR1 if `on_signal`
/// is true.
pub(crate) fn prepare(folder: Option<&PathBuf>, on_signal: bool, deadline: Instant) -> Result<()> {
    if let Some(folder) = folder {
        let refuse =
            |error| Error::setting("KOLO_TRACE_DIR", folder.display().to_string(), format!("a folder to write to: {error}"));
        let (kind, path) = (format!("create {}", folder.display()), folder.clone());
        let create = move || sys::make_folder(&path);
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

    /// Another user of the machine can write to the folder, and has put something in place of the
    /// file that a failure leaves.
    #[cfg(all(unix, not(miri)))]
    #[test]
    fn what_another_user_has_planted_neither_stops_a_failure_nor_leads_it_elsewhere() {
        let folder = std::env::temp_dir().join(format!("kolo-planted-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let victim = folder.join("victim");
        std::fs::write(&victim, "theirs").unwrap();
        let member = |rank: u32| Member { host: "here".into(), pid: rank };
        let who = RankOfJob { job: "job".to_owned(), run: 7, rank: 1, members: vec![member(0), member(1)] };
        let recorder = Recorder::new(who, Some(folder.clone()), None);
        let (sender, failed) = std::sync::mpsc::channel();
        let path = folder.join(recorder.file_name());
        let link = |beside: String| std::os::unix::fs::symlink(&victim, format!("{}{beside}", path.display())).unwrap();
        link(format!(".{}.part", std::process::id()));
        let pipe = || {
            let text = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: the text ends with a zero.
            assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o666) }, 0);
        };
        for plant in [&pipe as &dyn Fn(), &|| link(String::new())] {
            plant();
            let (recorder, sender) = (recorder.clone(), sender.clone());
            std::thread::spawn(move || {
                let recording = recorder.open(1, 1, [0, 1].into());
                recording.failed(&Error::Aborted { op: crate::types::Op::Barrier, seq: 1 });
                sender.send(()).unwrap();
            });
            failed.recv_timeout(std::time::Duration::from_secs(60)).expect("the failure waits for what was planted");
            assert!(path.symlink_metadata().unwrap().is_file());
            assert!(std::fs::read_to_string(&path).unwrap().contains("\"reason\": \"error\""));
            assert_eq!(std::fs::read(&victim).unwrap(), b"theirs");
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

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
