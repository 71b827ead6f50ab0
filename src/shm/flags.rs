//! How ranks that share memory tell each other which phase they have reached.
//!
//! All ranks count the same phases. In a phase a rank writes its slot of shared memory, publishes
//! the phase, and then reads the slots that its peers have published. Each rank has [`SLOTS`]
//! slots, used in rotation, each with a [`FlagLine`] beside it.
//!
//! - *Published*: `line.phase` holds the phase. It is stored with release and loaded with acquire.
//!   So a rank that sees the phase also sees everything that the publisher wrote before, such as
//!   its slot, and the publisher's earlier reads are over.
//! - *Retired*: no rank reads the slots of a phase any more. A rank that publishes phase t promises
//!   that it has finished reading phases up to t - [`LAG`]. So a rank that has seen all ranks
//!   publish phase t + `LAG` may overwrite the slot of phase t in phase t + `SLOTS`.
//! - *Finished*: at the end of every operation a rank says up to which phase it will read no slot
//!   and no line any more. Phases that all ranks have finished are retired, too: so a rank that
//!   waits for no peer, such as the root of broadcasts, may be `SLOTS` phases ahead. When all
//!   readers have finished, the memory of a rank's slots may be given to another communicator.
//! - *Sleeping*: a rank that has waited long adds itself to `line.sleepers`, loads `line.phase`
//!   once more, and sleeps on it. The publisher stores `line.phase` and then loads `line.sleepers`.
//!   All four accesses are sequentially consistent, so the sleeper sees the phase or the publisher
//!   sees the sleeper: no wake is lost.
//!
//! In shared memory phases have 32 bits and wrap; they are compared by difference. What a rank
//! knows of its peers may be older than half of that range, so it keeps that in 64 bits. A peer
//! that publishes wrong phases can make this rank read wrong data, but cannot make it read or write
//! outside the shared memory.

use crate::sync::{self, AtomicU32, AtomicU64, Ordering, announce, announce_add, look};
use crate::types::Descriptor;

/// Slots of each rank.
pub(crate) const SLOTS: usize = 8;

/// How many phases a rank may still read after it has published.
pub(crate) const LAG: u32 = 3;

/// The number of words that a rank sends its peers with a phase, in the same cache line.
pub(crate) const WORDS: usize = 6;
pub(crate) type Words = [u64; WORDS];

/// The flags of one slot, in two cache lines. Peers read only the first one as long as their calls
/// match.
#[repr(C, align(128))]
pub(crate) struct FlagLine {
    /// The last phase that was published in this slot.
    pub(crate) phase: AtomicU32,
    /// How many ranks sleep on `phase`.
    sleepers: AtomicU32,
    /// The fingerprint of the chain of calls up to the operation that the phase belongs to.
    fingerprint: AtomicU64,
    words: [AtomicU64; WORDS],
    /// The operation itself, which is read only if the fingerprint is not the expected one. Its word
    /// [`Descriptor::SEQ`] is the sequence number minus the phase: equal calls of one phase each store
    /// the same words.
    descriptor: [AtomicU64; Descriptor::WORDS],
}

impl FlagLine {
    #[cfg(kolo_loom)]
    pub(crate) fn new() -> FlagLine {
        FlagLine {
            phase: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            fingerprint: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            descriptor: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn has_reached(&self, phase: u32) -> Option<u32> {
        let now = self.phase.load(Ordering::Acquire);
        is_reached(now, phase).then_some(now)
    }

    /// Sets the fingerprint as a peer that makes the same calls does.
    #[cfg(any(fuzzing, test))]
    pub(crate) fn agree(&self, fingerprint: u64) {
        self.fingerprint.store(fingerprint, Ordering::Relaxed);
    }

    /// Whether the line holds the flags of exactly this phase.
    pub(crate) fn holds(&self, phase: u32) -> bool {
        self.phase.load(Ordering::Acquire) == phase
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint.load(Ordering::Relaxed)
    }

    /// Returns one of the words.
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Relaxed)
    }

    pub(crate) fn words(&self) -> Words {
        std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed))
    }

    /// Returns the encoded operation that `phase`, the phase of this line, belongs to.
    pub(crate) fn descriptor(&self, phase: u32) -> [u64; Descriptor::WORDS] {
        let mut words: [u64; Descriptor::WORDS] = std::array::from_fn(|i| self.descriptor[i].load(Ordering::Relaxed));
        words[Descriptor::SEQ] = words[Descriptor::SEQ].wrapping_add(phase.into());
        words
    }
}

/// Whether a rank at phase `now` has published `phase`.
pub(super) fn is_reached(now: u32, phase: u32) -> bool {
    now.wrapping_sub(phase) as i32 >= 0
}

/// Where flag lines live and how ranks sleep there: shared memory, or a model of it.
pub(crate) trait FlagLines {
    /// The line of a rank's slot.
    fn line(&self, rank: usize, slot: usize) -> &FlagLine;

    /// The last phase up to which a rank has finished reading.
    fn finished(&self, rank: usize) -> &AtomicU32;

    /// Sleeps while `word` holds `value`, for `nap` at most. May return early.
    fn sleep(&self, word: &AtomicU32, value: u32, nap: std::time::Duration);

    /// Wakes all ranks that sleep on `word`.
    fn wake(&self, word: &AtomicU32);
}

/// Returns which phase since the start has this number: the one that is nearest to `last`.
#[inline]
fn widened(phase: u32, last: i64) -> i64 {
    last + i64::from(phase.wrapping_sub(last as u32) as i32)
}

/// Whether a rank no longer reads the slots of phases up to `phase`, which may be long ago. `last` is
/// the last phase that the calling rank has published. Both are counted since the start: more phases
/// may lie between them than 32 bits can tell.
pub(crate) fn has_finished(lines: &impl FlagLines, rank: usize, phase: i64, last: i64) -> bool {
    // Acquire: the reads of that rank are over.
    widened(lines.finished(rank).load(Ordering::Acquire), last) >= phase
}

/// One rank's view of the phases of all ranks.
pub(crate) struct Phases<L> {
    pub(crate) lines: L,
    rank: usize,
    /// For each rank, the last phase that this rank has seen, counted since the start, in 64 bits.
    /// Its own is the last that it published.
    seen: Vec<i64>,
    /// For each rank, the last phase that this rank knows it to have finished, counted since the
    /// start, in 64 bits.
    read: Vec<i64>,
    /// The last phase whose slot this rank may write without looking at its peers, counted since
    /// the start, in 64 bits.
    clear: i64,
    /// The descriptors in this rank's slots, as they are there; zeros before the first use.
    described: [[u64; Descriptor::WORDS]; SLOTS],
    /// Whether the last announcement has changed the descriptor of its slot.
    describes: bool,
}

impl<L: FlagLines> Phases<L> {
    pub(crate) fn new(lines: L, rank: usize, ranks: usize) -> Phases<L> {
        let described = [[0; Descriptor::WORDS]; SLOTS];
        Phases { lines, rank, seen: vec![0; ranks], read: vec![0; ranks], clear: 0, described, describes: false }
    }

    /// As [`Phases::new`] of ranks that have published and finished all phases up to `before`.
    #[cfg(kolo_loom)]
    pub(crate) fn starting(lines: L, rank: usize, ranks: usize, before: u32) -> Phases<L> {
        let before = i64::from(before);
        Phases { seen: vec![before; ranks], read: vec![before; ranks], clear: before, ..Phases::new(lines, rank, ranks) }
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns which phase since the beginning has this number: the one that is nearest to the last
    /// that this rank has published.
    #[inline]
    fn widen(&self, phase: u32) -> i64 {
        widened(phase, self.seen[self.rank])
    }

    /// Counts phases as published and finished by this rank, as if it had run them.
    #[cfg(test)]
    pub(crate) fn pass(&mut self, phases: u32) {
        self.seen[self.rank] += i64::from(phases);
        for slot in 0..SLOTS as u32 {
            let phase = (self.seen[self.rank] as u32).wrapping_sub(slot);
            self.line(self.rank, phase).phase.store(phase, Ordering::Relaxed);
        }
        self.finish();
    }

    /// The last phase that this rank has published, counted since the start.
    pub(crate) fn last(&self) -> i64 {
        self.seen[self.rank]
    }

    /// The phase that this rank publishes next.
    pub(crate) fn next(&self) -> u32 {
        (self.seen[self.rank] + 1) as u32
    }

    pub(crate) fn slot(phase: u32) -> usize {
        phase as usize % SLOTS
    }

    /// A rank's line in a phase.
    pub(crate) fn line(&self, rank: usize, phase: u32) -> &FlagLine {
        self.lines.line(rank, Self::slot(phase))
    }

    /// Returns whether this rank may write its slot for a phase without looking at its peers.
    #[inline]
    pub(crate) fn is_clear(&self, phase: u32) -> bool {
        self.clear >= self.widen(phase)
    }

    /// Notes that every peer has retired the phase that used this slot before.
    #[inline]
    pub(crate) fn set_clear(&mut self, phase: u32) {
        self.clear = self.widen(phase);
    }

    /// Notes that all ranks have published a phase, and that this rank has acquired what they wrote
    /// before. So phases up to `phase` - `LAG` are retired, and this rank may write slots up to
    /// `phase` - `LAG` + `SLOTS`.
    #[inline]
    pub(crate) fn all_have_reached(&mut self, phase: u32) {
        self.clear = self.widen(phase) + (SLOTS as u32 - LAG) as i64;
    }

    /// Writes to the flag line, before a phase is published, to which operation the phase belongs,
    /// and `words`.
    ///
    /// If the slot holds the same descriptor since [`SLOTS`] phases ago, its second cache line is not
    /// written: a peer's cache may have it.
    ///
    /// May be called for a phase only when the phase that used its slot before is retired.
    #[inline]
    pub(crate) fn announce(&mut self, phase: u32, fingerprint: u64, descriptor: &[u64; Descriptor::WORDS], words: &Words) {
        // Word by word: a wider load of words that were just stored singly waits for the stores.
        let kept = &mut self.described[Self::slot(phase)];
        let mut differs = 0;
        for at in 0..Descriptor::WORDS {
            let first = if at == Descriptor::SEQ { u64::from(phase) } else { 0 };
            let word = descriptor[at].wrapping_sub(first);
            differs |= std::mem::replace(&mut kept[at], word) ^ word;
        }
        self.describes = differs != 0;
        let line = self.lines.line(self.rank, Self::slot(phase));
        line.fingerprint.store(fingerprint, Ordering::Relaxed);
        if self.describes {
            for (to, word) in line.descriptor.iter().zip(&self.described[Self::slot(phase)]) {
                to.store(*word, Ordering::Relaxed);
            }
        }
        for (to, word) in line.words.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
    }

    /// Publishes the next phase.
    #[inline]
    pub(crate) fn publish(&mut self) {
        let phase = self.next();
        let line = self.line(self.rank, phase);
        // Release: the slot and the line.
        announce(&line.phase, phase);
        if look(&line.sleepers) != 0 {
            self.lines.wake(&line.phase);
        }
        self.seen[self.rank] += 1;
        // This rank is about to wait for its peers, so it fetches its next line now. The peers'
        // caches have both cache lines of it from its last use: they read the first, and processors
        // fetch lines in pairs. If the second has changed now, it probably changes again.
        let next = self.line(self.rank, self.next());
        sync::prefetch_to_write(next);
        if self.describes {
            sync::prefetch_to_write(&next.descriptor);
        }
    }

    /// Declares that this rank no longer reads the slots of the phases so far. Returns the last of
    /// them, counted since the start.
    #[inline]
    pub(crate) fn finish(&self) -> i64 {
        let phase = self.seen[self.rank];
        // Release: the slots, to the rank that writes them next.
        self.lines.finished(self.rank).store(phase as u32, Ordering::Release);
        phase
    }

    /// Whether a rank has published a phase. If so, acquires what it wrote before.
    pub(crate) fn has_reached(&mut self, rank: usize, phase: u32) -> bool {
        if self.seen[rank] >= self.widen(phase) {
            return true;
        }
        match self.line(rank, phase).has_reached(phase) {
            Some(now) => {
                self.seen[rank] = self.widen(now);
                true
            }
            None => false,
        }
    }

    /// Sleeps until a rank has published a phase, or `nap` is over. May return early.
    pub(crate) fn sleep(&self, rank: usize, phase: u32, nap: std::time::Duration) {
        let line = self.line(rank, phase);
        announce_add(&line.sleepers, 1);
        let now = look(&line.phase);
        if !is_reached(now, phase) {
            self.lines.sleep(&line.phase, now, nap);
        }
        line.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a rank no longer reads the slot in which this rank writes `phase` next.
    ///
    /// Where ranks wait for each other, this rank has seen the phase that says so. A rank that runs
    /// ahead has not, and looks at what the peer has finished. It does so once per [`SLOTS`] phases
    /// if the peer keeps up, because that may be far more than it needs.
    #[inline]
    pub(crate) fn is_retired(&mut self, rank: usize, phase: u32) -> bool {
        let before = self.widen(phase) - SLOTS as i64;
        if self.seen[rank] >= self.widen(Self::retires(phase)) || self.read[rank] >= before {
            return true;
        }
        // Acquire: the reads of that rank are over.
        self.read[rank] = self.widen(self.lines.finished(rank).load(Ordering::Acquire));
        self.read[rank] >= before
    }

    /// The phase that all ranks must have published before this rank may write its slot for
    /// `phase`, unless [`Phases::is_retired`].
    pub(crate) fn retires(phase: u32) -> u32 {
        phase.wrapping_sub(SLOTS as u32).wrapping_add(LAG)
    }

    /// Wakes all ranks that sleep on any flag line of this rank.
    pub(crate) fn wake_all(&self) {
        for slot in 0..SLOTS {
            self.lines.wake(&self.lines.line(self.rank, slot).phase);
        }
    }
}
