//! One operation under way: what it is, until when it may last, and what to say when it fails.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cancel::{Awaited, CancelToken, Diagnosing};
use crate::error::{Cause, Error, Result};
use crate::trace::LogEntry;
use crate::types::{Descriptor, Member, Rank};

/// What all operations of a communicator have in common.
#[derive(Clone, Debug)]
pub(crate) struct CommInfo {
    /// This rank.
    pub(crate) rank: Rank,
    /// All ranks.
    pub(crate) members: Vec<Member>,
    /// How long one operation may take that does not say otherwise.
    pub(crate) timeout: Duration,
    /// How long ranks wait for each other when they make a communicator of some of them.
    pub(crate) start_timeout: Duration,
    /// Rung when operations under way shall give up.
    pub(crate) cancel: Arc<CancelToken>,
}

impl CommInfo {
    /// The same for some of the ranks.
    pub(crate) fn of(&self, rank: Rank, members: Vec<Member>, cancel: Arc<CancelToken>) -> CommInfo {
        let CommInfo { timeout, start_timeout, .. } = *self;
        CommInfo { rank, members, timeout, start_timeout, cancel }
    }
}

#[cfg(test)]
thread_local! {
    /// Has an operation of this thread panic when it waits for a peer.
    pub(crate) static PANICS: Cell<bool> = const { Cell::new(false) };
}

/// One operation under way. Its parts share one deadline, which a clone keeps from its first wait on.
#[derive(Clone)]
pub(crate) struct OpContext<'a> {
    pub(crate) descriptor: Descriptor,
    /// The descriptor as it is sent, and its fingerprint.
    pub(crate) words: [u64; Descriptor::WORDS],
    pub(crate) fingerprint: u64,
    pub(crate) info: &'a CommInfo,
    /// How long it may take.
    timeout: Duration,
    /// When it was first seen to take time. Reading the clock costs as much as a small operation, so it is not read before
    /// the first wait that does not end at once.
    started: Cell<Option<Instant>>,
    /// Where it is written down.
    note: Option<&'a LogEntry<'a>>,
}

impl<'a> OpContext<'a> {
    #[inline]
    pub(crate) fn new(descriptor: Descriptor, info: &'a CommInfo) -> OpContext<'a> {
        let words = descriptor.encode();
        let fingerprint = Descriptor::fingerprint(words);
        OpContext { descriptor, words, fingerprint, info, timeout: info.timeout, started: Cell::new(None), note: None }
    }

    /// With a time of its own, if there is one, and to be written down. At once, for small operations would notice another copy.
    #[inline]
    pub(crate) fn noted(
        descriptor: Descriptor,
        info: &'a CommInfo,
        timeout: Option<Duration>,
        note: &'a LogEntry<'a>,
    ) -> OpContext<'a> {
        let words = descriptor.encode();
        let (fingerprint, timeout) = (Descriptor::fingerprint(words), timeout.unwrap_or(info.timeout));
        OpContext { descriptor, words, fingerprint, info, timeout, started: Cell::new(None), note: Some(note) }
    }

    /// With a time of its own, if there is one.
    #[inline]
    pub(crate) fn within(self, timeout: Option<Duration>) -> OpContext<'a> {
        OpContext { timeout: timeout.unwrap_or(self.timeout), ..self }
    }

    /// It turns out to be the operation of that number: messages get theirs when they come.
    pub(crate) fn number(&mut self, seq: u64) {
        // A receive says so at each try; since when it waits must not begin anew.
        if self.descriptor.seq == seq {
            return;
        }
        self.rest();
        self.descriptor.seq = seq;
        self.words = self.descriptor.encode();
        self.fingerprint = Descriptor::fingerprint(self.words);
    }

    /// Writes it down, if that has not been done: to be called when others know of it already, and before it waits.
    #[inline]
    pub(crate) fn note(&self) {
        if let Some(note) = self.note {
            note.write(&self.words);
        }
    }

    /// It waits, and not shortly.
    #[inline]
    pub(crate) fn waits(&self) {
        if let Some(note) = self.note {
            note.waits();
        }
    }

    /// Starts the clock, so that what clones do counts as well.
    pub(crate) fn begin(&self) {
        self.started();
    }

    fn started(&self) -> Instant {
        self.waits();
        let started = self.started.get().unwrap_or_else(Instant::now);
        self.started.set(Some(started));
        started
    }

    /// How long it has been under way, as far as that is known.
    fn age(&self) -> Duration {
        // The clock may not have been read before; when it was written down is known.
        let noted = self.note.and_then(LogEntry::age).unwrap_or_default();
        self.started().elapsed().max(noted)
    }

    /// How much time it has left.
    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.started().elapsed())
    }

    /// An error if the communicator has been revoked meanwhile.
    pub(crate) fn check(&self) -> Result<()> {
        let Descriptor { op, seq, .. } = self.descriptor;
        match self.info.cancel.stops((!op.is_point_to_point()).then_some(seq)) {
            true => Err(Error::Aborted { op, seq }),
            false => Ok(()),
        }
    }

    /// How long to wait for `peer` before asking again: an error if the deadline has passed or the communicator is dropped.
    pub(crate) fn patience_with(&self, peer: Rank) -> Result<Duration> {
        self.patience(Awaited::One(peer))
    }

    /// The same if the message of any rank would do, of which `present` is there and `missed` is gone.
    pub(crate) fn patience_with_any(&self, present: Rank, missed: Option<Rank>) -> Result<Duration> {
        self.patience(Awaited::Any { present, missed })
    }

    fn patience(&self, awaited: Awaited) -> Result<Duration> {
        let (Awaited::One(peer) | Awaited::Any { present: peer, .. }) = awaited;
        #[cfg(test)]
        assert!(!PANICS.take(), "a panic that a test asked for");
        let is_collective = !self.descriptor.op.is_point_to_point();
        if self.info.cancel.stops(is_collective.then_some(self.descriptor.seq)) {
            return Err(Error::Aborted { op: self.descriptor.op, seq: self.descriptor.seq });
        }
        match self.timeout.checked_sub(self.started().elapsed()) {
            Some(left) if !left.is_zero() => {
                let is_for_one = !is_collective && matches!(awaited, Awaited::One(_));
                self.info.cancel.wait_for(awaited, self.words, is_for_one);
                // While it is spared, it looks often.
                Ok(if self.info.cancel.is_cancelled() { left.min(Duration::from_millis(5)) } else { left })
            }
            _ => Err(self.failed(peer, Cause::Silent { deadline: self.timeout })),
        }
    }

    /// It waits for nobody any more.
    #[inline]
    pub(crate) fn rest(&self) {
        self.info.cancel.rest(self.words);
    }

    /// It has failed, and why is about to be found out. Call this before peers can see that it has.
    pub(crate) fn give_up(&self) {
        self.info.cancel.set_diagnosing(Some(Diagnosing { about: None }));
        self.rest();
    }

    /// The operation has failed because of `peer`.
    pub(crate) fn failed(&self, peer: Rank, cause: Cause) -> Error {
        let Descriptor { op, seq, dtype, count, .. } = self.descriptor;
        let Member { host, pid } = self.info.members[peer].clone();
        Error::Peer { rank: peer, host, pid, op, seq, dtype, count, after: self.age(), cause }
    }

    /// This rank called one thing and `peer` another, now or a little earlier.
    pub(crate) fn mismatch(&self, peer: Rank, mine: Descriptor, theirs: Descriptor) -> Error {
        Error::Mismatch {
            rank: self.info.rank,
            peer,
            host: self.info.members[peer].host.clone(),
            mine: Box::new(mine),
            theirs: Box::new(theirs),
        }
    }

    /// `peer` sent another number of bytes than was expected.
    pub(crate) fn counts_differ(&self, peer: Rank, sent: u64, expected: u64) -> Error {
        let Descriptor { op, seq, .. } = self.descriptor;
        Error::Counts { rank: self.info.rank, peer, host: self.info.members[peer].host.clone(), op, seq, sent, expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receive gets its number at each try. How long it waits is counted from the first.
    #[test]
    fn an_operation_that_gets_its_number_again_waits_since_before() {
        let member = Member { host: "here".into(), pid: 1 };
        let timeout = Duration::from_secs(60);
        let info =
            CommInfo { rank: 0, members: vec![member.clone(), member], timeout, start_timeout: timeout, cancel: Arc::default() };
        let mut context = OpContext::new(Descriptor { op: crate::types::Op::Send, ..Descriptor::nothing() }, &info);
        context.number(3);
        context.patience_with(1).unwrap();
        let since = info.cancel.waits()[0].since;
        context.number(3);
        context.patience_with(1).unwrap();
        assert_eq!(info.cancel.waits()[0].since, since);
        context.number(4);
        assert!(info.cancel.waits().is_empty());
    }
}
