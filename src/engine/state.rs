//! What an engine holds: its links, and the messages on their way through them.

use std::sync::Arc;
use std::time::Instant;

use super::frame::Inbox;
use super::in_flight::InFlight;
use super::job::{Active, Job};
use super::outgoing::{Outbox, Outgoing};
use super::receivers::Receivers;
use super::scratch::Scratch;
use super::unexpected::UnexpectedMessages;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::schedule::{BufferRef, Span};
use crate::sys::{Patience, Waker};
use crate::transport::{Mesh, NoLink};
use crate::types::Rank;

/// Messages that are sent to a peer before the others get their turn.
const MOST_MESSAGES: usize = 64;

/// A message could not be sent.
pub(super) struct NotSent {
    /// The job of the message.
    pub(super) job: u64,
    pub(super) peer: Rank,
    pub(super) why: NoLink,
}

/// What a rank needs to execute schedules: its links, and the messages on their way through them.
pub(crate) struct Engine {
    pub(super) mesh: Mesh,
    pub(super) patience: Arc<Patience>,
    pub(super) outbox: Outbox,
    pub(super) receivers: Receivers,
    /// Whether sends that begin leave it to the next one to send their messages, on links that send several
    /// at once.
    pub(super) holds: bool,
    /// Jobs whose last message was sent, and that may have ended.
    pub(super) drained: Vec<u64>,
    /// The number of messages sent so far.
    pub(super) messages: u64,
    pub(super) scratch: Scratch,
    /// The addresses of a fold's parts; kept for its allocation.
    pub(super) parts: Vec<*const u8>,
    /// For each peer, the message that comes in.
    pub(super) inboxes: Vec<Inbox>,
    pub(super) unexpected: UnexpectedMessages,
    /// For each peer, how many point-to-point messages have been received.
    pub(super) received: Vec<u64>,
    /// For each peer, whether any message has been received.
    pub(super) heard: Vec<bool>,
    /// For each peer that never sent a message, when its link was seen to be closed.
    pub(super) closed: Vec<Option<Instant>>,
    /// The ranks that will send no message to a receive from any rank, because they have left or their
    /// listener is gone, and why.
    pub(super) gone: Vec<(Rank, Cause)>,
    /// When the first deadline of a job behind others may pass. It may be that of a job that has ended.
    pub(super) soonest: Option<Instant>,
    /// The links to sleep on; kept for its allocation.
    pub(super) waits: Vec<(Rank, bool, bool)>,
    /// How often it has looked at a job, or at a message to be sent.
    #[cfg(test)]
    pub(super) looks: u64,
}

// SAFETY: the addresses in `outbox` and `parts` are used only while the job runs whose
// memory it is, on the one thread that drives the engine then.
unsafe impl Send for Engine {}

impl Engine {
    pub(crate) fn new(mesh: Mesh, world: usize, patience: Arc<Patience>) -> Engine {
        Engine {
            mesh,
            patience,
            outbox: Outbox::new(world),
            receivers: Receivers::new(world),
            holds: false,
            drained: Vec::new(),
            messages: 0,
            scratch: Scratch::default(),
            parts: Vec::new(),
            inboxes: (0..world).map(|_| Inbox::EMPTY).collect(),
            unexpected: UnexpectedMessages::new(world),
            received: vec![0; world],
            heard: vec![false; world],
            closed: vec![None; world],
            gone: Vec::new(),
            soonest: None,
            waits: Vec::new(),
            #[cfg(test)]
            looks: 0,
        }
    }

    /// Returns what ends a sleep from another thread.
    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.mesh.waker()
    }

    /// Returns how many point-to-point messages have been received from a peer.
    pub(crate) fn received_from(&self, peer: Rank) -> u64 {
        self.received[peer]
    }

    /// The number of ranks of the communicator.
    pub(super) fn world(&self) -> usize {
        self.inboxes.len()
    }

    #[cfg(test)]
    pub(crate) fn has_messages(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends what may be sent, to each peer in order. Returns whether anything was.
    pub(super) fn drain(&mut self) -> Result<bool, NotSent> {
        let mut moved = false;
        // A queue that becomes empty leaves the list.
        for at in (0..self.outbox.peers().len()).rev() {
            moved |= self.drain_to(self.outbox.peers()[at])?;
        }
        Ok(moved)
    }

    /// Returns whether the link to a peer sends several messages at once.
    pub(super) fn gathers(&mut self, peer: Rank) -> bool {
        self.mesh.link(peer).is_ok_and(|link| link.is_some_and(|link| link.most_parts() > 0))
    }

    /// As [`Engine::drain`], to one peer.
    pub(super) fn drain_to(&mut self, peer: Rank) -> Result<bool, NotSent> {
        let (mut moved, mut drained) = (false, 0);
        while drained < MOST_MESSAGES {
            #[cfg(test)]
            (self.looks += 1);
            let Some(out) = self.outbox.front(peer) else { break };
            let job = out.job;
            let fail = |why| NotSent { job, peer, why };
            let Some(link) = self.mesh.link(peer).map_err(fail)? else { break };
            let rest = out.rest();
            if rest.iter().all(|part| part.len == 0) {
                break;
            }
            let inbox = &mut self.inboxes[peer];
            let count = match link.most_parts() {
                // SAFETY: the message owns its header, and the payload is valid until its job ends.
                0 => unsafe { link.send(&rest) },
                // SAFETY: each of the messages owns its header, and its payload is valid until its job
                // ends.
                most => unsafe { link.send(&self.outbox.gather(peer, most)) },
            };
            let mut count = count.map_err(|cause| fail(NoLink::Peer(inbox.farewell(link).unwrap_or(cause))))?;
            moved |= count > 0;
            let is_full = loop {
                let Some(out) = self.outbox.front(peer) else { break false };
                let taken = count.min(out.len() - out.sent);
                (out.sent, count) = (out.sent + taken, count - taken);
                if out.sent < out.len() {
                    break true;
                }
                drained += 1;
                self.drained.extend(self.outbox.pop(peer));
                if count == 0 {
                    break false;
                }
            };
            if is_full {
                break;
            }
        }
        Ok(moved)
    }

    /// Discards what failed jobs were sending: their callers take the memory back now.
    pub(super) fn give_up(&mut self, active: &InFlight<Active<'_>>) {
        for active in active.iter() {
            active.job.context.give_up();
        }
        self.receivers.clear();
        self.drained.clear();
        // Nothing can follow a message that was cut off in the middle: the peer sees the link
        // close.
        for out in self.outbox.take() {
            if out.sent > 0 || self.mesh.has_begun(out.to) {
                self.mesh.close(out.to);
            }
        }
    }

    /// Discards all messages, because callers take their memory back. The links of these messages
    /// close, since it is unknown how much of each has been sent.
    pub(crate) fn forget_messages(&mut self) {
        for out in self.outbox.take() {
            self.mesh.close(out.to);
        }
    }

    /// Returns the memory of a span.
    ///
    /// # Panics
    ///
    /// If the span exceeds its buffer.
    #[inline]
    pub(super) fn memory(&mut self, job: &Job<'_>, span: Span) -> RawSlice {
        let (at, len) = (job.bytes(span.place, span.at), job.bytes(span.place, span.len));
        let whole = match span.place {
            BufferRef::Input => job.call.send,
            BufferRef::Output => job.call.recv.as_const(),
            BufferRef::Scratch => self.scratch.memory().as_const(),
        };
        assert!(at + len <= whole.len, "a step reaches beyond its buffer");
        whole.skip(at).take(len)
    }

    /// As [`Engine::memory`], for a span that is written.
    #[inline]
    pub(super) fn memory_mut(&mut self, job: &Job<'_>, span: Span) -> RawSliceMut {
        debug_assert_ne!(span.place, BufferRef::Input);
        let memory = self.memory(job, span);
        RawSliceMut { ptr: memory.ptr.cast_mut(), len: memory.len }
    }

    /// Returns how many bytes from the front of a destination no message has still to read, except
    /// the message `forward`, with which the step itself forwards.
    #[inline]
    pub(super) fn free(&self, dst: RawSliceMut, forward: Option<(Rank, u64)>) -> usize {
        let (start, end) = (dst.ptr.addr(), dst.ptr.addr() + dst.len);
        let others = self.outbox.iter().filter(|out| forward.is_none_or(|(_, message)| out.message != message));
        let unread = others.map(Outgoing::unread).filter(|part| part.len > 0);
        let overlapping = unread.filter(|part| part.ptr.addr() < end && start < part.ptr.addr() + part.len);
        overlapping.map(|part| part.ptr.addr().saturating_sub(start)).min().unwrap_or(dst.len)
    }
}

/// The error of an operation that has no link to a peer.
pub(super) fn no_link(context: &OpContext<'_>, peer: Rank, why: NoLink) -> Error {
    match why {
        NoLink::Peer(cause) => context.failed(peer, cause),
        NoLink::Own(error) => Error::os(format!("connecting to rank {peer}"))(error),
    }
}
