//! An operation in progress: its descriptor, its deadline, and the errors that it fails with.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cancel::{Awaited, CancelToken, Diagnosing, Moved};
use super::wait_check;
use crate::error::{Cause, Error, Result};
use crate::timeouts::WAIT_CHECK;
use crate::trace::LogEntry;
use crate::types::{Descriptor, Member, Op, Rank};

/// What all operations of a communicator have in common.
#[derive(Clone, Debug)]
pub(crate) struct CommInfo {
    /// This rank.
    pub(crate) rank: Rank,
    /// All ranks.
    pub(crate) members: Vec<Member>,
    /// The timeout of operations that have none of their own.
    pub(crate) timeout: Duration,
    /// How long ranks wait for each other when they make a communicator of some of them.
    pub(crate) start_timeout: Duration,
    /// Cancelled when operations in progress have to stop.
    pub(crate) cancel: Arc<CancelToken>,
}

impl CommInfo {
    /// Returns the same settings for a communicator of some of the ranks.
    pub(crate) fn of(&self, rank: Rank, members: Vec<Member>, cancel: Arc<CancelToken>) -> CommInfo {
        let CommInfo { timeout, start_timeout, .. } = *self;
        CommInfo { rank, members, timeout, start_timeout, cancel }
    }
}

#[cfg(test)]
thread_local! {
    /// Makes an operation of this thread panic when it waits for a peer.
    pub(crate) static PANICS: Cell<bool> = const { Cell::new(false) };
}

/// An operation in progress. Its parts share one deadline; a clone keeps it once the first wait has
/// begun.
#[derive(Clone)]
pub(crate) struct OpContext<'a> {
    pub(crate) descriptor: Descriptor,
    /// The operation that the caller named: a receive, where the descriptor is that of the message.
    called: Op,
    /// The descriptor as it is sent, and its fingerprint.
    pub(crate) words: [u64; Descriptor::WORDS],
    pub(crate) fingerprint: u64,
    pub(crate) info: &'a CommInfo,
    /// The timeout.
    timeout: Duration,
    /// When the operation first had to wait. Reading the clock takes as long as a small operation,
    /// so it is read only at a wait that does not end at once.
    started: Cell<Option<Instant>>,
    /// Its entry in the flight recorder.
    note: Option<&'a LogEntry<'a>>,
}

impl<'a> OpContext<'a> {
    #[inline]
    pub(crate) fn new(descriptor: Descriptor, info: &'a CommInfo) -> OpContext<'a> {
        let words = descriptor.encode();
        let fingerprint = Descriptor::fingerprint(words);
        OpContext {
            descriptor,
            called: descriptor.op,
            words,
            fingerprint,
            info,
            timeout: info.timeout,
            started: Cell::new(None),
            note: None,
        }
    }

    /// Makes the context of an operation that is recorded, with its own timeout if it has one. `words` are the
    /// descriptor, encoded. This does not build on [`OpContext::new`]: a small operation would notice the copy.
    #[inline]
    pub(crate) fn noted(
        descriptor: Descriptor,
        words: [u64; Descriptor::WORDS],
        info: &'a CommInfo,
        timeout: Option<Duration>,
        note: &'a LogEntry<'a>,
    ) -> OpContext<'a> {
        let (fingerprint, timeout) = (Descriptor::fingerprint(words), timeout.unwrap_or(info.timeout));
        OpContext {
            descriptor,
            called: descriptor.op,
            words,
            fingerprint,
            info,
            timeout,
            started: Cell::new(None),
            note: Some(note),
        }
    }

    /// Sets the operation's own timeout, if it has one.
    #[inline]
    pub(crate) fn within(self, timeout: Option<Duration>) -> OpContext<'a> {
        OpContext { timeout: timeout.unwrap_or(self.timeout), ..self }
    }

    /// Sets the operation that the caller named.
    #[inline]
    pub(crate) fn called(self, called: Op) -> OpContext<'a> {
        OpContext { called, ..self }
    }

    /// The call as its caller made it.
    pub(crate) fn call(&self) -> Descriptor {
        Descriptor { op: self.called, ..self.descriptor }
    }

    /// Sets the sequence number. A point-to-point message gets its number when it arrives.
    pub(crate) fn number(&mut self, seq: u64) {
        // A receive calls this at each try, and must not restart its wait.
        if self.descriptor.seq == seq {
            return;
        }
        self.rest();
        self.descriptor.seq = seq;
        self.words = self.descriptor.encode();
        self.fingerprint = Descriptor::fingerprint(self.words);
    }

    /// When the operation first had to wait, if it has.
    pub(crate) fn started_at(&self) -> Option<Instant> {
        self.started.get()
    }

    /// Continues an operation that had this number and that clock in another context.
    pub(crate) fn resume(&mut self, seq: u64, started: Option<Instant>) {
        self.number(seq);
        self.started.set(started);
    }

    /// Records the operation, if that has not been done. Called before it waits, and after its
    /// peers know of it.
    #[inline]
    pub(crate) fn note(&self) {
        if let Some(note) = self.note {
            note.write(&self.words);
        }
    }

    /// Notes that the operation waits for more than a moment.
    #[inline]
    pub(crate) fn waits(&self) {
        if let Some(note) = self.note {
            note.waits();
        }
    }

    /// Starts the clock, so that clones share it.
    pub(crate) fn begin(&self) {
        self.started();
    }

    fn started(&self) -> Instant {
        self.waits();
        let started = self.started.get().unwrap_or_else(Instant::now);
        self.started.set(Some(started));
        started
    }

    /// Returns how long the operation has been running, as far as that is known.
    fn age(&self) -> Duration {
        // The clock may not have been read before; the record has a time of its own.
        let noted = self.note.and_then(LogEntry::age).unwrap_or_default();
        self.started().elapsed().max(noted)
    }

    /// Returns the time left until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started().elapsed())
    }

    /// Fails if the communicator has been cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        let Descriptor { op, seq, .. } = self.call();
        match self.info.cancel.stops((!op.is_point_to_point()).then_some(seq)) {
            true => Err(Error::Aborted { op, seq }),
            false => Ok(()),
        }
    }

    /// Returns how long to wait for `peer` before this is called again. Fails if the deadline has
    /// passed or the communicator is cancelled.
    pub(crate) fn patience_with(&self, peer: Rank, moved: Moved) -> Result<Duration> {
        self.patience(Awaited::One { peer, moved })
    }

    /// As [`OpContext::patience_with`], for a message of any rank, where `present` is alive and
    /// `missed` is gone.
    pub(crate) fn patience_with_any(&self, present: Rank, moved: Moved, missed: Option<Rank>) -> Result<Duration> {
        self.patience(Awaited::Any { present, moved, missed })
    }

    fn patience(&self, awaited: Awaited) -> Result<Duration> {
        let (Awaited::One { peer, .. } | Awaited::Any { present: peer, .. }) = awaited;
        #[cfg(test)]
        assert!(!PANICS.take(), "a panic for a test");
        let is_collective = !self.descriptor.op.is_point_to_point();
        // Most waits are short, and ask nothing.
        let asks = wait_check::has_wait_check() && self.started().elapsed() >= WAIT_CHECK;
        if asks && wait_check::go_on().is_err() || self.info.cancel.stops(is_collective.then_some(self.descriptor.seq)) {
            return Err(Error::Aborted { op: self.called, seq: self.descriptor.seq });
        }
        match self.timeout.checked_sub(self.started().elapsed()) {
            Some(left) if !left.is_zero() => {
                let is_for_one = !is_collective && matches!(awaited, Awaited::One { .. });
                // A rank asks no other about itself.
                if peer != self.info.rank {
                    self.info.cancel.wait_for(awaited, self.call().encode(), is_for_one);
                }
                let left = left.min(wait_check::longest_nap());
                // During the grace period it checks often.
                Ok(if self.info.cancel.is_cancelled() { left.min(Duration::from_millis(5)) } else { left })
            }
            _ => Err(self.failed(peer, Cause::Silent { deadline: self.timeout })),
        }
    }

    /// Notes that the operation waits for no peer any longer.
    #[inline]
    pub(crate) fn rest(&self) {
        if self.info.cancel.has_waits() {
            self.info.cancel.rest(self.call().encode());
        }
    }

    /// Notes that the operation has failed and is being diagnosed. Call this before peers can see
    /// the failure.
    pub(crate) fn give_up(&self) {
        self.info.cancel.set_diagnosing(Some(Diagnosing::default()));
        self.rest();
    }

    /// Returns the error of this operation if it fails because of `peer`.
    pub(crate) fn failed(&self, peer: Rank, cause: Cause) -> Error {
        let Descriptor { op, seq, dtype, count, .. } = self.call();
        let Member { host, pid } = self.info.members[peer].clone();
        Error::Peer { rank: peer, host, pid, op, seq, dtype, count, after: self.age(), cause }
    }

    /// Returns the error of a call mismatch: this rank called `mine` and `peer` called `theirs`. The
    /// diagnosis replaces the culprit.
    pub(crate) fn mismatch(&self, peer: Rank, mine: Descriptor, theirs: Descriptor) -> Error {
        Error::Mismatch {
            culprit: peer,
            rank: self.info.rank,
            peer,
            host: self.info.members[peer].host.clone(),
            mine: Box::new(mine),
            theirs: Box::new(theirs),
            is_tie: false,
        }
    }

    /// Returns the error for a message of `peer` with another number of bytes than expected.
    pub(crate) fn counts_differ(&self, peer: Rank, sent: u64, expected: u64) -> Error {
        let Descriptor { op, seq, .. } = self.call();
        Error::Counts { rank: self.info.rank, peer, host: self.info.members[peer].host.clone(), op, seq, sent, expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receive gets its number at each try. The age of its wait counts from the first try.
    #[test]
    fn getting_the_same_number_again_does_not_restart_the_wait() {
        let member = Member { host: "here".into(), pid: 1 };
        let timeout = Duration::from_secs(60);
        let info =
            CommInfo { rank: 0, members: vec![member.clone(), member], timeout, start_timeout: timeout, cancel: Arc::default() };
        let mut context = OpContext::new(Descriptor { op: crate::types::Op::Send, ..Descriptor::nothing() }, &info);
        context.number(3);
        context.patience_with(1, None).unwrap();
        let since = info.cancel.waits()[0].since;
        context.number(3);
        context.patience_with(1, None).unwrap();
        assert_eq!(info.cancel.waits()[0].since, since);
        context.number(4);
        assert!(info.cancel.waits().is_empty());
    }

    /// The failure detector asks about no peer, and warns of none, while a slow transfer moves.
    #[test]
    fn bytes_that_move_restart_the_wait() {
        let member = Member { host: "here".into(), pid: 1 };
        let timeout = Duration::from_secs(60);
        let info =
            CommInfo { rank: 0, members: vec![member.clone(), member], timeout, start_timeout: timeout, cancel: Arc::default() };
        let context = OpContext::new(Descriptor::nothing(), &info);
        let since = |moved| {
            context.patience_with(1, moved).unwrap();
            let [wait] = info.cancel.waits()[..] else { panic!("one peer is awaited") };
            wait.since
        };
        let first = since(Some(0));
        assert_eq!(since(Some(0)), first);
        let second = since(Some(1));
        assert!(second > first);
        assert_eq!(since(Some(1)), second);
    }
}
