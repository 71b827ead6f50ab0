//! What the threads of a communicator share: whether it has ended, and the peers for which its
//! operations wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::error::Cause;
use crate::timeouts::{COMPLETED_GRACE, WAIT_SIGN};
use crate::types::{Descriptor, Op, Rank};

/// Cancels the operations of a communicator: those in progress stop, and no other begins.
///
/// A rank may learn of a failure while it runs an earlier collective that the failed rank has
/// completed. That collective gets a grace period.
#[derive(Default)]
pub(crate) struct CancelToken {
    cancelled: AtomicBool,
    /// When the grace period began, and the last collective that has one.
    spared: Mutex<Option<(Instant, u64)>>,
    /// 0 if no failure is being diagnosed, 1 if one is, and while rank n is asked about it 2 + 2n, or
    /// 3 + 2n if the link with it has closed.
    diagnosing: AtomicUsize,
    /// Each wakes a thread that may wait for peers.
    wakers: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// The tokens of communicators of some of the ranks that are being made: a rank that failed
    /// here does not join those.
    parts: Mutex<Vec<Arc<CancelToken>>>,
    /// The operations that wait for a peer, while or shortly before they sleep.
    waits: Mutex<SmallVec<[Wait; 2]>>,
    any_waits: AtomicBool,
    /// The ranks that turned out to be gone while a receive from any rank waited for them.
    missed: Mutex<Vec<(Rank, Cause)>>,
    /// The ranks that have closed their links without a goodbye while operations waited for others.
    closed: Mutex<SmallVec<[Rank; 1]>>,
}

/// A rank has seen a failure, and is diagnosing it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Diagnosing {
    /// The rank that it asks about the failure.
    pub(crate) about: Option<Rank>,
    /// Whether it does so because its link with that rank has closed, and not because it has waited
    /// until its deadline.
    pub(crate) is_cut_off: bool,
}

/// The peer whose message an operation waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    One {
        peer: Rank,
        moved: Moved,
    },
    /// Any rank's message. `present` is alive, and `missed` is gone.
    Any {
        present: Rank,
        moved: Moved,
        missed: Option<Rank>,
    },
}

/// A number that changes whenever something has come from a peer or gone to it; `None` if nothing that it
/// has sent can be on its way, because no link with it is open for example.
pub(crate) type Moved = Option<u64>;

/// An operation that waits for a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) peer: Rank,
    pub(crate) moved: Moved,
    /// The operation's descriptor, as its caller named it.
    pub(crate) words: [u64; Descriptor::WORDS],
    /// Since when nothing has moved.
    pub(crate) since: Instant,
    /// Whether another rank's message would do: then the operation does not fail because this peer
    /// is gone.
    pub(crate) is_for_any: bool,
    /// A rank that is gone and may have been the sender. It keeps this rank waiting rather than
    /// `peer`, which is alive.
    pub(super) missed: Option<Rank>,
    /// When the operation last said that it waits: it had looked, and nothing had come.
    pub(super) seen: Instant,
}

impl Wait {
    /// Returns the rank that peers are told when they ask what this rank waits for.
    pub(crate) fn named(&self) -> Rank {
        self.missed.unwrap_or(self.peer)
    }
}

/// The operation of ranks that connect. It is that of the first barrier, too.
const CONNECTING: Descriptor = Descriptor { op: Op::Connect, ..Descriptor::nothing() };

impl CancelToken {
    pub(crate) fn cancel(&self) {
        self.cancel_after(None);
    }

    /// Cancels all operations, those up to the collective `completed` after a grace period.
    pub(crate) fn cancel_after(&self, completed: Option<u64>) {
        {
            let mut spared = self.spared.lock();
            let (since, before) = spared.unwrap_or((Instant::now(), u64::MAX));
            *spared =
                completed.map(|completed| (since, completed.min(before))).filter(|_| !self.is_cancelled() || spared.is_some());
        }
        self.cancelled.store(true, Ordering::Release);
        self.wake();
        let parts = self.parts.lock().clone();
        parts.iter().for_each(|part| part.cancel());
    }

    /// Cancels `part` together with this token, until the link is dropped.
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
            Some(Diagnosing { about: None, .. }) => 1,
            Some(Diagnosing { about: Some(rank), is_cut_off }) => 2 + 2 * rank + usize::from(is_cut_off),
        };
        self.diagnosing.store(number, Ordering::Release);
    }

    pub(crate) fn diagnosing(&self) -> Option<Diagnosing> {
        let number = self.diagnosing.load(Ordering::Acquire);
        let about = number.checked_sub(2).map(|number| number / 2);
        (number > 0).then(|| Diagnosing { about, is_cut_off: about.is_some() && number % 2 == 1 })
    }

    /// Whether an operation has to stop. `collective` is its sequence number if it is a collective.
    #[inline]
    pub(crate) fn stops(&self, collective: Option<u64>) -> bool {
        self.is_cancelled() && !self.spares(collective)
    }

    #[cold]
    fn spares(&self, collective: Option<u64>) -> bool {
        match (*self.spared.lock(), collective) {
            (Some((since, completed)), Some(seq)) => seq <= completed && since.elapsed() < COMPLETED_GRACE,
            _ => false,
        }
    }

    /// Has `wake` called when the token is cancelled, and when operations that sleep have to look again.
    pub(crate) fn attach(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.wakers.lock().push(Box::new(wake));
    }

    /// Wakes the operations that sleep: each looks again for what it waits for.
    pub(super) fn wake(&self) {
        self.wakers.lock().iter().for_each(|wake| wake());
    }

    /// Notes that an operation is about to sleep until a peer acts.
    ///
    /// With `is_for_one`, the operation waits for no other peer: receives of the same kind from
    /// several peers have the same words.
    pub(super) fn wait_for(&self, awaited: Awaited, words: [u64; Descriptor::WORDS], is_for_one: bool) {
        let (peer, moved, is_for_any, missed) = match awaited {
            Awaited::One { peer, moved } => (peer, moved, false, None),
            Awaited::Any { present, moved, missed } => (present, moved, true, missed),
        };
        let now = Instant::now();
        let wait = Wait { peer, moved, words, since: now, is_for_any, missed, seen: now };
        let mut waits = self.waits.lock();
        let is_same =
            |wait: &&mut Wait| wait.words == words && wait.is_for_any == is_for_any && (wait.peer == peer || !is_for_one);
        match waits.iter_mut().find(is_same) {
            Some(known) if (known.peer, known.moved) == (peer, moved) => (known.seen, known.missed) = (now, missed),
            Some(known) => *known = wait,
            None => waits.push(wait),
        }
        self.any_waits.store(true, Ordering::Relaxed);
    }

    /// Whether any operation has noted that it waits.
    #[inline]
    pub(super) fn has_waits(&self) -> bool {
        self.any_waits.load(Ordering::Relaxed)
    }

    /// Notes that an operation waits no longer.
    pub(super) fn rest(&self, words: [u64; Descriptor::WORDS]) {
        if self.has_waits() {
            let mut waits = self.waits.lock();
            waits.retain(|wait| wait.words != words);
            self.any_waits.store(!waits.is_empty(), Ordering::Relaxed);
        }
    }

    /// Notes that this rank waits for `peer` to connect.
    pub(crate) fn note_connecting(&self, peer: Rank) {
        self.wait_for(Awaited::One { peer, moved: None }, CONNECTING.encode(), false);
    }

    /// Notes that this rank waits for no peer to connect any longer. If that has failed, peers learn
    /// that the failure is being diagnosed.
    pub(crate) fn end_connecting(&self, has_failed: bool) {
        if has_failed {
            self.set_diagnosing(Some(Diagnosing::default()));
        }
        self.rest(CONNECTING.encode());
    }

    /// Notes that a rank is gone for which a receive from any rank waited.
    pub(crate) fn miss(&self, peer: Rank, cause: Cause) {
        let mut missed = self.missed.lock();
        if missed.iter().all(|(known, _)| *known != peer) {
            missed.push((peer, cause));
        }
    }

    /// Notes that a rank has closed its link without a goodbye, while no operation waited for it.
    pub(crate) fn note_closed(&self, peer: Rank) {
        let mut closed = self.closed.lock();
        if !closed.contains(&peer) {
            closed.push(peer);
        }
    }

    /// Returns the ranks that have closed their links without a goodbye, as far as is known.
    pub(crate) fn closed(&self) -> SmallVec<[Rank; 1]> {
        self.closed.lock().clone()
    }

    /// Returns the ranks for which a receive from any rank does not wait.
    pub(crate) fn missed(&self) -> Vec<(Rank, Cause)> {
        self.missed.lock().clone()
    }

    /// As [`CancelToken::waits`], or none if another thread holds the lock.
    pub(super) fn try_waits(&self) -> Vec<Wait> {
        let Some(waits) = self.waits.try_lock() else { return Vec::new() };
        waits.iter().filter(|wait| wait.seen.elapsed() < WAIT_SIGN).copied().collect()
    }

    /// Returns the operations that wait now.
    pub(crate) fn waits(&self) -> Vec<Wait> {
        self.waits.lock().iter().filter(|wait| wait.seen.elapsed() < WAIT_SIGN).copied().collect()
    }
}

/// While this exists, cancelling one token cancels another.
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
