//! What the threads of a communicator share about its end, and about whom its operations wait for.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::error::Cause;
use crate::types::{Descriptor, Rank};

/// When it is cancelled, operations under way give up, and no other begins.
///
/// A rank may hear of a failure while it is still busy with a collective that came before, and that is complete on who failed. It
/// has a little time to complete it.
#[derive(Default)]
pub(crate) struct CancelToken {
    cancelled: AtomicBool,
    /// Since when, and up to which collective operations are spared for a while.
    spared: Mutex<Option<(Instant, u64)>>,
    /// 1 if a failure was seen, and what it was is about to be found out; more by 1 + n if rank n is asked about it; else 0.
    diagnosing: AtomicUsize,
    /// Each ends the sleep of a thread that may wait for peers.
    wakers: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// Of communicators of some of the ranks that are being made: who has failed here does not come there.
    parts: Mutex<Vec<Arc<CancelToken>>>,
    /// The operations that wait for a peer, while or shortly before they sleep; and whether there are any.
    waits: Mutex<SmallVec<[Wait; 2]>>,
    any_waits: AtomicBool,
    /// The ranks that were found to be gone while a receive from any rank waited for them.
    missed: Mutex<Vec<(Rank, Cause)>>,
}

/// A rank has seen a failure, and is about to find out what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Diagnosing {
    /// Whom it asks about it.
    pub(crate) about: Option<Rank>,
}

/// Whose message an operation waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    One(Rank),
    /// Any rank's: `present` is there, and `missed` is gone.
    Any {
        present: Rank,
        missed: Option<Rank>,
    },
}

/// An operation that waits for a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) peer: Rank,
    /// The operation's descriptor.
    pub(crate) words: [u64; Descriptor::WORDS],
    pub(crate) since: Instant,
    /// A message of another rank would do as well: the operation does not fail because this one is gone.
    pub(crate) is_for_any: bool,
    /// A rank that is gone, and for whose message it may have waited: it keeps this one waiting rather than `peer`, which is there.
    missed: Option<Rank>,
    /// When it was last seen to wait.
    seen: Instant,
}

impl Wait {
    /// The rank that this operation names to those who ask for whom it waits.
    pub(crate) fn named(&self) -> Rank {
        self.missed.unwrap_or(self.peer)
    }
}

/// How long operations are spared that who failed has completed.
const SPARE: Duration = Duration::from_millis(250);

/// Whoever waits says so again at least as often, see the naps of engine and window; twice that, for slow machines.
const FRESH: Duration = Duration::from_millis(1000);

impl CancelToken {
    pub(crate) fn cancel(&self) {
        self.cancel_after(None);
    }

    /// Cancels all operations but those up to this collective.
    pub(crate) fn cancel_after(&self, completed: Option<u64>) {
        {
            let mut spared = self.spared.lock();
            let (since, before) = spared.unwrap_or((Instant::now(), u64::MAX));
            *spared =
                completed.map(|completed| (since, completed.min(before))).filter(|_| !self.is_cancelled() || spared.is_some());
        }
        self.cancelled.store(true, Ordering::Release);
        self.wakers.lock().iter().for_each(|wake| wake());
        let parts = self.parts.lock().clone();
        parts.iter().for_each(|part| part.cancel());
    }

    /// Cancels another token as well, until what this returns is dropped.
    pub(crate) fn link(&self, part: &Arc<CancelToken>) -> CancelLink<'_> {
        self.parts.lock().push(part.clone());
        if self.is_cancelled() {
            part.cancel();
        }
        CancelLink { whole: self, part: part.clone() }
    }

    #[inline]
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    pub(crate) fn set_diagnosing(&self, diagnosing: Option<Diagnosing>) {
        let number = match diagnosing {
            None => 0,
            Some(Diagnosing { about: None }) => 1,
            Some(Diagnosing { about: Some(rank) }) => 2 + rank,
        };
        self.diagnosing.store(number, Ordering::Release);
    }

    pub(crate) fn diagnosing(&self) -> Option<Diagnosing> {
        let number = self.diagnosing.load(Ordering::Acquire);
        (number > 0).then(|| Diagnosing { about: number.checked_sub(2) })
    }

    /// Whether an operation has to give up; `collective` is its number if it is one.
    #[inline]
    pub(crate) fn stops(&self, collective: Option<u64>) -> bool {
        self.is_cancelled() && !self.spares(collective)
    }

    #[cold]
    fn spares(&self, collective: Option<u64>) -> bool {
        match (*self.spared.lock(), collective) {
            (Some((since, completed)), Some(seq)) => seq <= completed && since.elapsed() < SPARE,
            _ => false,
        }
    }

    /// Has `wake` called when it rings.
    pub(crate) fn attach(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.wakers.lock().push(Box::new(wake));
    }

    /// An operation is about to sleep until a peer does something.
    ///
    /// One that is `is_for_one` waits for no other peer: receives of the same kind from several peers have the same words.
    pub(super) fn wait_for(&self, awaited: Awaited, words: [u64; Descriptor::WORDS], is_for_one: bool) {
        let (peer, is_for_any, missed) = match awaited {
            Awaited::One(peer) => (peer, false, None),
            Awaited::Any { present, missed } => (present, true, missed),
        };
        let now = Instant::now();
        let mut waits = self.waits.lock();
        let is_same =
            |wait: &&mut Wait| wait.words == words && wait.is_for_any == is_for_any && (wait.peer == peer || !is_for_one);
        match waits.iter_mut().find(is_same) {
            Some(wait) if wait.peer == peer => (wait.seen, wait.missed) = (now, missed),
            Some(wait) => *wait = Wait { peer, words, since: now, is_for_any, missed, seen: now },
            None => waits.push(Wait { peer, words, since: now, is_for_any, missed, seen: now }),
        }
        self.any_waits.store(true, Ordering::Relaxed);
    }

    /// The operation has ended.
    pub(super) fn rest(&self, words: [u64; Descriptor::WORDS]) {
        if self.any_waits.load(Ordering::Relaxed) {
            let mut waits = self.waits.lock();
            waits.retain(|wait| wait.words != words);
            self.any_waits.store(!waits.is_empty(), Ordering::Relaxed);
        }
    }

    /// A rank for which a receive from any rank waited is gone.
    pub(crate) fn miss(&self, peer: Rank, cause: Cause) {
        let mut missed = self.missed.lock();
        if missed.iter().all(|(known, _)| *known != peer) {
            missed.push((peer, cause));
        }
    }

    /// The ranks that a receive from any rank does not wait for.
    pub(crate) fn missed(&self) -> Vec<(Rank, Cause)> {
        self.missed.lock().clone()
    }

    /// The operations that wait now.
    pub(crate) fn waits(&self) -> Vec<Wait> {
        self.waits.lock().iter().filter(|wait| wait.seen.elapsed() < FRESH).copied().collect()
    }
}

/// As long as this is there, cancelling one token cancels another.
pub(crate) struct CancelLink<'a> {
    whole: &'a CancelToken,
    part: Arc<CancelToken>,
}

impl Drop for CancelLink<'_> {
    fn drop(&mut self) {
        self.whole.parts.lock().retain(|part| !Arc::ptr_eq(part, &self.part));
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("cancelled", &self.is_cancelled()).finish_non_exhaustive()
    }
}
