//! The flight recorder: what each communicator did last, for when somebody has to find out why it stopped.
//!
//! It is always on. A communicator keeps its last [`KEPT`] operations in a ring of one cache line each, which whoever carries
//! operations out writes without a lock; anybody may read it meanwhile. [`super::report`] makes a file of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::attempt::Member;
use crate::error::{Error, Result};
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::sys::{self, Timeline};
use crate::types::{Descriptor, Op, Rank};

/// Operations that a communicator keeps.
pub(crate) const KEPT: usize = 1024;

/// In the end of an operation: it failed.
const FAILED: u64 = 1 << 63;

/// One operation, in one cache line.
///
/// `stamp` is odd while the entry is being written, else twice the number of the operation; 0 for none. `end` is 0 as long as
/// the operation is under way.
#[repr(C, align(64))]
#[derive(Default)]
struct Entry {
    stamp: AtomicU64,
    /// The encoded descriptor, with the algorithm where it has nothing.
    words: [AtomicU64; Descriptor::WORDS],
    bytes: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

/// Where an operation is recorded.
#[derive(Clone, Copy, Debug)]
#[must_use = "an operation that is begun has to end"]
pub(crate) struct Ticket(u64);

/// The operations of one communicator, seen from one rank.
pub(crate) struct Recording {
    /// Tells the communicators of a job apart; the same on all its ranks.
    pub(super) channel: u64,
    /// This rank in the communicator, and the communicator's ranks as ranks of the job.
    pub(super) rank: Rank,
    pub(super) members: Arc<[Rank]>,
    entries: Box<[Entry]>,
    /// Operations begun so far.
    begun: AtomicU64,
    /// What ended the communicator, and the rank that it names.
    pub(super) failure: OnceLock<(String, Option<Rank>)>,
    recorder: Arc<Recorder>,
}

/// One operation as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    /// With the peer as the root, of a send or a receive.
    pub(super) descriptor: Descriptor,
    pub(super) choice: Option<Choice>,
    pub(super) bytes: u64,
    pub(super) start: Duration,
    /// `None` while it is under way.
    pub(super) end: Option<Duration>,
    pub(super) failed: bool,
}

impl Recording {
    /// An operation begins. Only whoever carries the communicator's operations out calls this, one at a time.
    #[inline]
    pub(crate) fn begin(&self, what: &Descriptor, bytes: u64, choice: Option<Choice>) -> Ticket {
        let number = self.begun.load(Ordering::Relaxed) + 1;
        let entry = self.entry(number);
        entry.stamp.store(2 * number - 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let mut words = what.encode();
        words[0] |= path(choice) << 24;
        for (to, word) in entry.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        entry.bytes.store(bytes, Ordering::Relaxed);
        entry.start.store(sys::ticks(), Ordering::Relaxed);
        entry.end.store(0, Ordering::Relaxed);
        entry.stamp.store(2 * number, Ordering::Release);
        self.begun.store(number, Ordering::Relaxed);
        Ticket(number)
    }

    /// It has ended.
    #[inline]
    pub(crate) fn end(&self, ticket: Ticket, succeeded: bool) {
        let entry = self.entry(ticket.0);
        // One of many that went on side by side may have been overwritten.
        if entry.stamp.load(Ordering::Relaxed) == 2 * ticket.0 {
            let end = sys::ticks() & !FAILED;
            entry.end.store(if succeeded { end } else { end | FAILED }, Ordering::Release);
        }
    }

    #[inline]
    fn entry(&self, number: u64) -> &Entry {
        &self.entries[number as usize % KEPT]
    }

    /// How many operations have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// The last operations, in their order; without those that are being overwritten at this moment.
    pub(super) fn operations(&self, timeline: &Timeline) -> Vec<Operation> {
        let begun = self.begun();
        let first = begun.saturating_sub(KEPT as u64) + 1;
        (first..=begun).filter_map(|number| self.read(number, timeline)).collect()
    }

    /// What was called as the collective of this number, if that is not long ago.
    pub(crate) fn collective(&self, seq: u64) -> Option<Descriptor> {
        self.lately().map(|(call, _)| call).find(|call| call.seq == seq)
    }

    /// The last collective that was completed; 0 if none.
    pub(crate) fn last_completed(&self) -> u64 {
        self.lately().find(|(_, end)| *end != 0 && end & FAILED == 0).map_or(0, |(call, _)| call.seq)
    }

    /// The last collectives and their ends, the last one first.
    fn lately(&self) -> impl Iterator<Item = (Descriptor, u64)> {
        let begun = self.begun();
        (begun.saturating_sub(KEPT as u64)..begun).rev().filter_map(|before| {
            let [words @ .., _, _, end] = self.words(before + 1)?;
            let call = Descriptor::decode(words)?;
            (!call.op.is_point_to_point() && call.op != Op::Connect).then_some((call, end))
        })
    }

    /// The words of an entry: the descriptor, the bytes, the start and the end.
    fn words(&self, number: u64) -> Option<[u64; Descriptor::WORDS + 3]> {
        let entry = self.entry(number);
        if entry.stamp.load(Ordering::Acquire) != 2 * number {
            return None;
        }
        let Entry { words: [a, b, c, d], bytes, start, end, .. } = entry;
        let mut words = [a, b, c, d, bytes, start, end].map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if entry.stamp.load(Ordering::Relaxed) != 2 * number {
            return None;
        }
        words[0] &= !(0xff << 24);
        Some(words)
    }

    fn read(&self, number: u64, timeline: &Timeline) -> Option<Operation> {
        // The choice is written with the rest, and does not change without it.
        let choice = choice((self.entry(number).words[0].load(Ordering::Relaxed) >> 24) as u8);
        let [words @ .., bytes, start, end] = self.words(number)?;
        Some(Operation {
            descriptor: Descriptor::decode(words)?,
            choice,
            bytes,
            start: timeline.time(start),
            end: (end != 0).then(|| timeline.time(end & !FAILED)),
            failed: end & FAILED != 0,
        })
    }

    /// The communicator has ended because of an error. Leaves a file, if that is wanted.
    #[cold]
    pub(crate) fn failed(&self, error: &Error) {
        let culprit = match error {
            Error::Peer { rank, .. } => Some(*rank),
            Error::Mismatch { peer, .. } | Error::Counts { peer, .. } => Some(*peer),
            _ => None,
        };
        if self.failure.set((error.to_string(), culprit)).is_ok() {
            self.recorder.leave("error");
        }
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }
}

/// An algorithm, and the one between hosts, in one byte.
fn path(choice: Option<Choice>) -> u64 {
    let nibble = |algorithm: Option<Algorithm>| algorithm.map_or(0, |algorithm| algorithm as u64 + 1);
    choice.map_or(0, |choice| nibble(Some(choice.algorithm)) | nibble(choice.between) << 4)
}

fn choice(path: u8) -> Option<Choice> {
    let algorithm = |nibble: u8| Algorithm::from_number(nibble.checked_sub(1)?);
    Some(Choice { algorithm: algorithm(path & 15)?, between: algorithm(path >> 4) })
}

/// Which rank of which job it is that records.
#[derive(Clone, Debug)]
pub(crate) struct Who {
    pub(crate) job: String,
    /// The same on all ranks, and another for every start.
    pub(crate) run: u64,
    pub(crate) rank: Rank,
    /// All ranks of the job.
    pub(crate) members: Vec<Member>,
}

/// The recordings of one rank: of its first communicator and of all that came of it.
pub(crate) struct Recorder {
    pub(super) who: Who,
    /// Where files are left when an operation has failed, or at a signal.
    pub(super) folder: Option<PathBuf>,
    recordings: Mutex<Vec<Weak<Recording>>>,
    /// Held while a file is written.
    pub(super) writing: Mutex<()>,
}

/// Those that answer a signal.
static RECORDERS: Mutex<Vec<Weak<Recorder>>> = Mutex::new(Vec::new());

impl Recorder {
    pub(crate) fn new(who: Who, folder: Option<PathBuf>) -> Arc<Recorder> {
        Timeline::begin();
        let recorder = Arc::new(Recorder { who, folder, recordings: Mutex::default(), writing: Mutex::default() });
        let mut recorders = RECORDERS.lock();
        recorders.retain(|other| other.strong_count() > 0);
        recorders.push(Arc::downgrade(&recorder));
        recorder
    }

    /// The recording of one communicator.
    pub(crate) fn open(self: &Arc<Self>, channel: u64, rank: Rank, members: Arc<[Rank]>) -> Arc<Recording> {
        let entries = std::iter::repeat_with(Entry::default).take(KEPT).collect();
        let (begun, failure) = (AtomicU64::new(0), OnceLock::new());
        let recording = Arc::new(Recording { channel, rank, members, entries, begun, failure, recorder: self.clone() });
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
pub(crate) fn prepare(folder: Option<&PathBuf>, on_signal: bool) -> Result<()> {
    if let Some(folder) = folder {
        let refuse =
            |error| Error::setting("KOLO_TRACE_DIR", folder.display().to_string(), format!("a folder to write to: {error}"));
        std::fs::create_dir_all(folder).map_err(refuse)?;
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
    use crate::types::{DType, ReduceOp};

    fn recorder() -> Arc<Recorder> {
        let who = Who { job: "a \"job\"".to_owned(), run: 7, rank: 1, members: vec![Member { host: "h".into(), pid: 9 }; 2] };
        Recorder::new(who, None)
    }

    fn descriptor(seq: u64) -> Descriptor {
        Descriptor {
            op: Op::AllReduce,
            dtype: DType::F16,
            redop: Some(ReduceOp::Max),
            seq,
            count: seq * 3,
            ..Descriptor::nothing()
        }
    }

    #[test]
    fn the_last_operations_are_kept_as_they_were() {
        let recording = recorder().open(5, 1, [0, 1].into());
        let choice = Choice { algorithm: Algorithm::Hierarchical, between: Some(Algorithm::Ring) };
        let all = KEPT as u64 + 10;
        for seq in 1..=all {
            let ticket = recording.begin(&descriptor(seq), seq, (seq % 2 == 0).then_some(choice));
            if seq < all {
                recording.end(ticket, seq % 3 != 0);
            }
        }
        let kept = recording.operations(&Timeline::up_to_now());
        assert_eq!(kept.len(), KEPT);
        for (operation, seq) in kept.iter().zip(11..) {
            assert_eq!((operation.descriptor, operation.bytes), (descriptor(seq), seq));
            assert_eq!(operation.choice, (seq % 2 == 0).then_some(choice));
            assert_eq!((operation.end.is_none(), operation.failed), (seq == all, seq % 3 == 0 && seq < all));
            assert!(operation.end.is_none_or(|end| end >= operation.start));
        }
        assert!(kept.is_sorted_by_key(|operation| operation.start));
    }

    /// An operation that went on beside so many others that its entry is another's by now.
    #[test]
    fn who_ends_late_changes_nothing_of_others() {
        let recording = recorder().open(5, 1, [0, 1].into());
        let late = recording.begin(&descriptor(1), 0, None);
        for seq in 2..=KEPT as u64 + 1 {
            _ = recording.begin(&descriptor(seq), 0, None);
        }
        recording.end(late, false);
        assert!(recording.operations(&Timeline::up_to_now()).iter().all(|operation| operation.end.is_none()));
    }

    /// A reader beside the writer sees whole entries or none.
    #[test]
    fn entries_are_read_whole() {
        let recording = recorder().open(5, 1, [0, 1].into());
        let rounds = if cfg!(miri) { 50 } else { 200_000 };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for seq in 1..=rounds {
                    let ticket = recording.begin(&descriptor(seq), seq, None);
                    recording.end(ticket, true);
                }
            });
            while !writer.is_finished() {
                for operation in recording.operations(&Timeline::up_to_now()) {
                    assert_eq!(operation.descriptor, descriptor(operation.bytes));
                }
            }
        });
        assert_eq!(recording.begun(), rounds);
    }
}
