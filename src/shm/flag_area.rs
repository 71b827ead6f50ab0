//! What each rank keeps in its part of a communicator's area: its state, its progress and its flag
//! lines.

use std::sync::atomic::AtomicPtr;
use std::time::Duration;

use super::flags::{FlagLine, FlagLines, SLOTS};
use super::hierarchy::{GroupLines, LeaderLines};
use crate::failure::Written;
use crate::host_group::area::{Parts, USABLE};
use crate::sync::{self, AtomicU32, AtomicU64, Ordering};
use crate::sys::{Domains, Processors};

const _: () = assert!(LEADER_LINES + SLOTS * size_of::<LeaderLines>() <= USABLE, "a rank's flags fit its part of an area");

/// Where a rank's flag lines begin in its part of the area: after the state and the progress.
const LINES: usize = size_of::<RankState>() + size_of::<Progress>();

/// Where the lines begin that a rank writes for its group, after the flag lines.
const LEADER_LINES: usize = LINES + SLOTS * size_of::<FlagLine>();

/// What a rank tells its peers about itself.
#[repr(C, align(128))]
pub(super) struct RankState {
    /// [`ABSENT`], [`PRESENT`], [`LEFT`] or [`REVOKED`].
    pub(super) state: AtomicU32,
    pub(super) pid: AtomicU32,
    /// When the process was created; see [`crate::sys::Process`].
    pub(super) created: AtomicU64,
    /// The namespace of `pid`; 0 if unknown.
    pub(super) namespace: AtomicU64,
    /// The sequence number of the last operation of a rank that has left.
    pub(super) last_seq: AtomicU64,
    /// 1 while the rank uses registered buffers of its peers.
    pub(super) borrows: AtomicU32,
    /// The number of the stage in which the rank stages data; 0 for none. It does not change while
    /// a peer may read there.
    pub(super) stage: AtomicU32,
    /// The input and the output that the rank lends, for threads of its process: see
    /// [`super::Window::lent_by`].
    pub(super) lent: [AtomicPtr<u8>; 2],
    /// Where the rank may run, as [`Domains`] and [`Processors`] have it. They do not change.
    affinity: [AtomicU32; 5],
}

/// How far a rank has read. It is apart from the state, which all ranks read in every operation.
#[repr(C, align(128))]
struct Progress {
    /// The last phase of the last operation in which the rank read slots of its peers. It no longer
    /// reads those of earlier phases.
    finished: AtomicU32,
    /// The processor on which the rank yielded last, and the phase then, as the lower half.
    place: AtomicU64,
}

/// The rank has not written its state yet.
pub(super) const ABSENT: u32 = 0;
/// The rank takes part.
pub(super) const PRESENT: u32 = 1;
/// The rank has dropped its communicator.
pub(super) const LEFT: u32 = 2;
/// An operation failed on the rank.
pub(super) const REVOKED: u32 = 3;

/// The states and flag lines of all ranks, in shared memory.
pub(super) struct FlagArea {
    pub(super) parts: Parts,
}

impl RankState {
    /// Returns what the rank has written about itself, if it has.
    pub(super) fn written(&self) -> Option<Written> {
        match self.state.load(Ordering::SeqCst) {
            ABSENT => None,
            LEFT => Some(Written::Left { last_seq: self.last_seq.load(Ordering::Relaxed) }),
            REVOKED => Some(Written::Revoked),
            _ => Some(Written::TakesPart),
        }
    }

    pub(super) fn set_affinity(&self, (processors, domains): (Processors, Domains)) {
        let Processors { count, first, last } = processors;
        let Domains { cache, node } = domains;
        for (word, value) in self.affinity.iter().zip([count, first, last, cache, node]) {
            word.store(value, Ordering::Relaxed);
        }
    }

    pub(super) fn affinity(&self) -> (Processors, Domains) {
        let [count, first, last, cache, node] = std::array::from_fn(|i| self.affinity[i].load(Ordering::Relaxed));
        (Processors { count, first, last }, Domains { cache, node })
    }
}

impl FlagArea {
    #[inline]
    pub(super) fn rank_state(&self, rank: usize) -> &RankState {
        // SAFETY: an area has a part for every rank, aligned to more than a state. The memory
        // started zeroed, which is a valid state, and is accessed only through its atomics.
        unsafe { &*self.parts.at(rank).cast::<RankState>() }
    }
}

impl FlagArea {
    /// Where a rank yielded last.
    pub(super) fn place(&self, rank: usize) -> &AtomicU64 {
        &self.progress(rank).place
    }

    #[inline]
    fn progress(&self, rank: usize) -> &Progress {
        // SAFETY: as for `rank_state`, which the progress follows.
        unsafe { &*self.parts.at(rank).add(size_of::<RankState>()).cast::<Progress>() }
    }
}

impl GroupLines for FlagArea {
    #[inline]
    fn leader_lines(&self, leader: usize, slot: usize) -> &LeaderLines {
        debug_assert!(slot < SLOTS);
        // SAFETY: as for `rank_state`; these lines follow the flag lines, which have the same
        // alignment.
        unsafe { &*self.parts.at(leader).add(LEADER_LINES + slot * size_of::<LeaderLines>()).cast::<LeaderLines>() }
    }
}

impl FlagLines for FlagArea {
    #[inline]
    fn line(&self, rank: usize, slot: usize) -> &FlagLine {
        debug_assert!(slot < SLOTS);
        // SAFETY: as for `rank_state`; the lines follow the state and the progress, which have the
        // same alignment.
        unsafe { &*self.parts.at(rank).add(LINES + slot * size_of::<FlagLine>()).cast::<FlagLine>() }
    }

    #[inline]
    fn finished(&self, rank: usize) -> &AtomicU32 {
        &self.progress(rank).finished
    }

    fn sleep(&self, word: &AtomicU32, value: u32, nap: Duration) {
        sync::sleep_on(word, value, nap);
    }

    fn wake(&self, word: &AtomicU32) {
        sync::wake_all(word);
    }
}
