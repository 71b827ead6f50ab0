//! The last operations of a communicator: a ring buffer that the thread of the communicator's
//! operations writes, and that any thread may read.
//!
//! A small operation inside a host takes 0.1 us, and recording it may cost 1 % of that. So an
//! operation is recorded after it has signalled its peers, while it waits for them anyway. The end
//! of a short operation is not timed: it counts as ended when it began. Recording takes no lock and
//! no allocation, and one cache line for each operation.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use super::totals::Totals;
use crate::sys::{self, Timeline};
use crate::types::{Descriptor, Op};

/// The number of operations that are kept.
pub(crate) const KEPT: usize = 1024;

/// Operations of this many bytes take long enough that their end is timed even if they did not
/// wait.
const LARGE: u64 = 4 << 10;

/// The bit of an operation's end that marks a failure.
const FAILED: u64 = 1 << 63;

/// One operation, in one cache line.
///
/// `stamp` is odd while the entry is written, and else twice the number of the operation; 0 for
/// none. `end` is 0 while the operation runs.
#[repr(C, align(64))]
#[derive(Default)]
struct Entry {
    stamp: AtomicU64,
    /// The encoded descriptor, with the path in one of its unused bytes.
    words: [AtomicU64; Descriptor::WORDS],
    bytes: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

/// The last operations of one communicator.
pub(crate) struct OpLog {
    entries: Box<[Entry]>,
    /// The number of operations so far.
    begun: AtomicU64,
    pub(crate) totals: Totals,
}

/// The entry of an operation.
#[derive(Clone, Copy, Debug)]
#[must_use = "an operation that is begun has to end"]
pub(crate) struct EntryId(u64);

/// A copy of one operation's entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    /// For a send or a receive, the root is the peer.
    pub(crate) descriptor: Descriptor,
    /// The algorithm, as [`path`](super::path) encodes it.
    pub(crate) path: u8,
    pub(crate) bytes: u64,
    pub(crate) start: Duration,
    /// `None` while it runs.
    pub(crate) end: Option<Duration>,
    pub(crate) failed: bool,
}

/// Returns whether an operation moves enough bytes to make the cost of recording it at once negligible.
#[inline]
pub(crate) fn is_large(bytes: u64) -> bool {
    bytes >= LARGE
}

impl Default for OpLog {
    fn default() -> OpLog {
        OpLog {
            entries: std::iter::repeat_with(Entry::default).take(KEPT).collect(),
            begun: AtomicU64::new(0),
            totals: Totals::default(),
        }
    }
}

impl OpLog {
    /// Records that an operation has begun. Only the thread that runs the communicator's operations
    /// calls this, one at a time.
    #[inline]
    pub(crate) fn begin(&self, words: &[u64; Descriptor::WORDS], bytes: u64, path: u8) -> EntryId {
        let number = self.begun.load(Ordering::Relaxed) + 1;
        let entry = self.entry(number);
        entry.stamp.store(2 * number - 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (at, (to, &word)) in entry.words.iter().zip(words).enumerate() {
            let path = if at == 0 { u64::from(path) << 24 } else { 0 };
            to.store(word | path, Ordering::Relaxed);
        }
        entry.bytes.store(bytes, Ordering::Relaxed);
        entry.start.store(sys::ticks(), Ordering::Relaxed);
        entry.end.store(0, Ordering::Relaxed);
        entry.stamp.store(2 * number, Ordering::Release);
        self.begun.store(number, Ordering::Relaxed);
        self.totals.begin(words[0] as u8, bytes);
        EntryId(number)
    }

    /// Records that it has ended.
    #[inline(always)]
    pub(crate) fn end(&self, place: EntryId, succeeded: bool) {
        let ticks = sys::ticks();
        self.end_at(place, ticks, succeeded);
        let entry = self.entry(place.0);
        if entry.stamp.load(Ordering::Relaxed) == 2 * place.0 {
            let took = ticks.saturating_sub(entry.start.load(Ordering::Relaxed));
            self.totals.end(entry.words[0].load(Ordering::Relaxed) as u8, took, succeeded);
        }
    }

    #[inline]
    fn end_at(&self, place: EntryId, ticks: u64, succeeded: bool) {
        let entry = self.entry(place.0);
        // If many operations ran concurrently, the entry may have been overwritten.
        if entry.stamp.load(Ordering::Relaxed) == 2 * place.0 {
            let end = ticks & !FAILED;
            entry.end.store(if succeeded { end } else { end | FAILED }, Ordering::Release);
        }
    }

    #[inline]
    fn entry(&self, number: u64) -> &Entry {
        &self.entries[number as usize % KEPT]
    }

    /// Returns how many operations have begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns the last operations in order, without those that are being overwritten.
    pub(crate) fn operations(&self, timeline: &Timeline) -> Vec<Operation> {
        let begun = self.begun();
        let first = begun.saturating_sub(KEPT as u64) + 1;
        (first..=begun).filter_map(|number| self.read(number, timeline)).collect()
    }

    /// Returns the operations that run, of the last `most`, in order.
    pub(crate) fn running(&self, most: u64, timeline: &Timeline) -> Vec<Operation> {
        let begun = self.begun();
        let first = begun.saturating_sub(most.min(KEPT as u64)) + 1;
        let read = (first..=begun).filter_map(|number| self.read(number, timeline));
        read.filter(|operation| operation.end.is_none()).collect()
    }

    /// Returns the last operation that has begun.
    pub(crate) fn last(&self, timeline: &Timeline) -> Option<Operation> {
        Some(self.begun()).filter(|&begun| begun > 0).and_then(|begun| self.read(begun, timeline))
    }

    /// Returns the sequence number of the last collective that has begun; 0 if none.
    pub(crate) fn last_begun(&self) -> u64 {
        self.lately().next().map_or(0, |(call, _)| call.seq)
    }

    /// Returns the call of the collective with this sequence number, if it is still recorded.
    pub(crate) fn collective(&self, seq: u64) -> Option<Descriptor> {
        self.lately().map(|(call, _)| call).find(|call| call.seq == seq)
    }

    /// Returns how long ago the collective with this sequence number began, if it is still
    /// recorded.
    pub(crate) fn since(&self, seq: u64) -> Option<Duration> {
        let begun = self.begun();
        let numbers = (begun.saturating_sub(KEPT as u64)..begun).rev();
        let start = numbers.filter_map(|before| self.words(before + 1)).find_map(|(words, _, [_, start, _])| {
            let call = Descriptor::decode(words)?;
            (call.seq == seq && !call.op.is_point_to_point() && call.op != Op::Connect).then_some(start)
        })?;
        Some(age(start))
    }

    /// Returns the sequence number of the last completed collective; 0 if none.
    pub(crate) fn last_completed(&self) -> u64 {
        self.lately().find(|(_, end)| *end != 0 && end & FAILED == 0).map_or(0, |(call, _)| call.seq)
    }

    /// Returns the last collectives and their ends, the latest first.
    fn lately(&self) -> impl Iterator<Item = (Descriptor, u64)> {
        let begun = self.begun();
        (begun.saturating_sub(KEPT as u64)..begun).rev().filter_map(|before| {
            let (words, _, [_, _, end]) = self.words(before + 1)?;
            let call = Descriptor::decode(words)?;
            (!call.op.is_point_to_point() && call.op != Op::Connect).then_some((call, end))
        })
    }

    /// Returns an entry's descriptor and path; and its bytes, start and end.
    fn words(&self, number: u64) -> Option<([u64; Descriptor::WORDS], u8, [u64; 3])> {
        let entry = self.entry(number);
        if entry.stamp.load(Ordering::Acquire) != 2 * number {
            return None;
        }
        let mut words = entry.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        let numbers = [&entry.bytes, &entry.start, &entry.end].map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if entry.stamp.load(Ordering::Relaxed) != 2 * number {
            return None;
        }
        let path = (words[0] >> 24) as u8;
        words[0] &= !(0xff << 24);
        Some((words, path, numbers))
    }

    fn read(&self, number: u64, timeline: &Timeline) -> Option<Operation> {
        let (words, path, [bytes, start, end]) = self.words(number)?;
        Some(Operation {
            descriptor: Descriptor::decode(words)?,
            path,
            bytes,
            start: timeline.time(start),
            end: (end != 0).then(|| timeline.time(end & !FAILED)),
            failed: end & FAILED != 0,
        })
    }
}

/// Returns how long ago the counter had this value.
fn age(ticks: u64) -> Duration {
    let began = Timeline::up_to_now().time(ticks);
    sys::monotonic().saturating_sub(began)
}

/// An operation that is recorded once it waits or ends.
pub(crate) struct LogEntry<'a> {
    history: &'a OpLog,
    bytes: u64,
    path: u8,
    place: Cell<Option<EntryId>>,
    /// Whether it has waited so long that reading the clock costs nothing in comparison.
    waited: Cell<bool>,
}

impl<'a> LogEntry<'a> {
    #[inline]
    pub(crate) fn new(history: &'a OpLog, bytes: u64, path: u8) -> LogEntry<'a> {
        LogEntry { history, bytes, path, place: Cell::new(None), waited: Cell::new(false) }
    }

    /// Records the operation, if that has not been done. `words` are its descriptor.
    #[inline(always)]
    pub(crate) fn write(&self, words: &[u64; Descriptor::WORDS]) {
        let _ = self.place(words);
    }

    #[inline(always)]
    fn place(&self, words: &[u64; Descriptor::WORDS]) -> EntryId {
        match self.place.get() {
            Some(place) => place,
            None => {
                let place = self.history.begin(words, self.bytes, self.path);
                self.place.set(Some(place));
                place
            }
        }
    }

    /// Returns how long ago it was recorded, if it has been.
    pub(crate) fn age(&self) -> Option<Duration> {
        self.place.get().map(|place| age(self.history.entry(place.0).start.load(Ordering::Relaxed)))
    }

    /// Returns whether it moves enough bytes to make the cost of recording it at once negligible.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        is_large(self.bytes)
    }

    /// Notes that it waits for more than a moment.
    #[inline]
    pub(crate) fn waits(&self) {
        self.waited.set(true);
    }

    /// Records that it has ended.
    #[inline(always)]
    pub(crate) fn end(&self, words: &[u64; Descriptor::WORDS], succeeded: bool) {
        let place = self.place(words);
        if self.waited.get() || self.is_large() || !succeeded {
            self.history.end(place, succeeded);
        } else {
            let start = self.history.entry(place.0).start.load(Ordering::Relaxed);
            self.history.end_at(place, start, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, ReduceOp};

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

    fn begin(history: &OpLog, seq: u64) -> EntryId {
        history.begin(&descriptor(seq).encode(), seq, seq as u8)
    }

    fn read(history: &OpLog) -> Vec<Operation> {
        Timeline::begin();
        history.operations(&Timeline::up_to_now())
    }

    #[test]
    fn the_last_operations_are_kept_as_they_were() {
        Timeline::begin();
        let history = OpLog::default();
        let all = KEPT as u64 + 10;
        for seq in 1..=all {
            let place = begin(&history, seq);
            if seq < all {
                history.end(place, seq % 3 != 0);
            }
        }
        let kept = read(&history);
        assert_eq!(kept.len(), KEPT);
        for (operation, seq) in kept.iter().zip(11..) {
            assert_eq!((operation.descriptor, operation.bytes, operation.path), (descriptor(seq), seq, seq as u8));
            assert_eq!((operation.end.is_none(), operation.failed), (seq == all, seq % 3 == 0 && seq < all));
            assert!(operation.end.is_none_or(|end| end >= operation.start));
        }
        assert!(kept.is_sorted_by_key(|operation| operation.start));
        // The last one still runs, and one in three failed.
        assert_eq!(history.last_completed(), (1..all).rev().find(|seq| seq % 3 != 0).unwrap());
        assert_eq!(history.collective(all), Some(descriptor(all)));
        assert_eq!(history.collective(5), None);
    }

    /// An operation that ran beside more others than the log keeps, so that its entry was reused.
    #[test]
    fn an_end_that_comes_late_changes_no_other_entry() {
        let history = OpLog::default();
        let late = begin(&history, 1);
        for seq in 2..=KEPT as u64 + 1 {
            _ = begin(&history, seq);
        }
        history.end(late, false);
        assert!(read(&history).iter().all(|operation| operation.end.is_none()));
    }

    #[test]
    fn the_end_is_timed_of_what_was_not_quick() {
        Timeline::begin();
        let history = OpLog::default();
        for (seq, (bytes, waits, succeeded)) in
            [(8, false, true), (8, true, true), (LARGE, false, true), (8, false, false)].into_iter().enumerate()
        {
            let (note, words) = (LogEntry::new(&history, bytes, 0), descriptor(seq as u64).encode());
            note.write(&words);
            if waits {
                note.waits();
            }
            std::thread::sleep(Duration::from_millis(2));
            note.end(&words, succeeded);
        }
        // One that ends before it was recorded.
        LogEntry::new(&history, 0, 0).end(&descriptor(4).encode(), true);
        let timed: Vec<bool> = read(&history).iter().map(|operation| operation.end.unwrap() > operation.start).collect();
        assert_eq!(timed, [false, true, true, true, false]);
    }

    /// A concurrent reader sees complete entries or none.
    #[test]
    fn entries_are_read_whole() {
        let history = OpLog::default();
        let rounds = if cfg!(miri) { 50 } else { 200_000 };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (1..=rounds).for_each(|seq| history.end(begin(&history, seq), true)));
            while !writer.is_finished() {
                for operation in read(&history) {
                    assert_eq!(operation.descriptor, descriptor(operation.bytes));
                }
            }
        });
        assert_eq!(history.begun(), rounds);
    }
}
