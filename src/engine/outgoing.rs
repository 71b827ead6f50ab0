//! The messages that are being sent.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::frame::HEADER;
use super::in_flight::InFlight;
use crate::buffer::RawSlice;
use crate::sys::MOST_PARTS;
use crate::transport::ALIGN;
use crate::types::Rank;

/// A message that has not drained.
pub(super) struct Outgoing {
    pub(super) message: u64,
    /// The number of the job that sends it.
    pub(super) job: u64,
    pub(super) to: Rank,
    pub(super) header: [u8; HEADER],
    pub(super) payload: RawSlice,
    /// Bytes of the payload that may be sent: not all of them while the step that forwards them
    /// still receives.
    pub(super) ready: usize,
    /// Bytes sent so far, of header, payload and padding.
    pub(super) sent: usize,
}

impl Outgoing {
    #[inline]
    pub(super) fn len(&self) -> usize {
        HEADER + self.payload.len.next_multiple_of(ALIGN)
    }

    /// Returns what may be sent now.
    #[inline]
    pub(super) fn rest(&self) -> [RawSlice; 3] {
        static ZEROS: [u8; ALIGN] = [0; ALIGN];
        let of_header = self.sent.min(HEADER);
        let of_payload = (self.sent - of_header).min(self.payload.len);
        let of_padding = self.sent - of_header - of_payload;
        let padding =
            if self.ready == self.payload.len { self.payload.len.next_multiple_of(ALIGN) - self.payload.len } else { 0 };
        [
            RawSlice::of(&self.header[of_header..]),
            self.payload.take(self.ready).skip(of_payload.min(self.ready)),
            RawSlice::of(&ZEROS[..padding - of_padding.min(padding)]),
        ]
    }

    /// Returns the part of the payload that is still to be read.
    #[inline]
    pub(super) fn unread(&self) -> RawSlice {
        self.payload.skip(self.sent.saturating_sub(HEADER).min(self.payload.len))
    }
}

/// The messages that have not drained, in order for each peer.
pub(super) struct Outbox {
    queues: Vec<VecDeque<Outgoing>>,
    /// The peers whose queue is not empty.
    peers: Vec<Rank>,
    /// The jobs that have not ended, by their numbers.
    jobs: InFlight<Unsent>,
}

/// What is left to send of a job.
#[derive(Clone, Copy)]
struct Unsent {
    messages: u32,
    /// The key of the job among those in flight.
    key: u64,
}

impl Outbox {
    pub(super) fn new(world: usize) -> Outbox {
        Outbox { queues: (0..world).map(|_| VecDeque::new()).collect(), peers: Vec::new(), jobs: InFlight::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Begins a job, and returns its number.
    pub(super) fn begin(&mut self, key: u64) -> u64 {
        self.jobs.push(Unsent { messages: 0, key })
    }

    fn job(&mut self, number: u64) -> &mut Unsent {
        self.jobs.get_mut(number).expect("the job has not ended")
    }

    /// Gives a job that was paused the key under which it goes on.
    pub(super) fn resume(&mut self, number: u64, key: u64) {
        self.job(number).key = key;
    }

    /// Whether a job has no message left to send.
    pub(super) fn has_sent(&mut self, number: u64) -> bool {
        self.job(number).messages == 0
    }

    /// Returns the key of a job; `None` if it has ended.
    pub(super) fn key_of(&self, number: u64) -> Option<u64> {
        Some(self.jobs.get(number)?.key)
    }

    /// Ends a job that has sent all.
    pub(super) fn end(&mut self, number: u64) {
        self.jobs.remove(number);
    }

    pub(super) fn push(&mut self, out: Outgoing) {
        self.job(out.job).messages += 1;
        let queue = &mut self.queues[out.to];
        if queue.is_empty() {
            self.peers.push(out.to);
        }
        queue.push_back(out);
    }

    /// Returns the next message to a peer.
    pub(super) fn front(&mut self, peer: Rank) -> Option<&mut Outgoing> {
        self.queues[peer].front_mut()
    }

    /// Returns what may be sent of the next messages to a peer, in at most `most` parts: the first one, and
    /// those behind it that are short and whole. A link that waits has room for as many at once.
    pub(super) fn gather(&self, peer: Rank, most: usize) -> SmallVec<[RawSlice; MOST_PARTS]> {
        /// Bytes of a message that is short.
        const SHORT: usize = 8 << 10;
        let mut parts = SmallVec::new();
        for (at, out) in self.queues[peer].iter().enumerate() {
            let is_next = at == 0 || out.payload.len <= SHORT && out.ready == out.payload.len;
            if !is_next || parts.len() + 3 > most.max(3) {
                break;
            }
            parts.extend(out.rest().into_iter().filter(|part| part.len > 0));
            // What comes behind a message that is not whole cannot be sent.
            if out.ready < out.payload.len {
                break;
            }
        }
        parts
    }

    /// Removes the next message to a peer, which has drained. Returns its job if that has sent all.
    pub(super) fn pop(&mut self, peer: Rank) -> Option<u64> {
        let out = self.queues[peer].pop_front()?;
        if self.queues[peer].is_empty() {
            self.peers.retain(|&busy| busy != peer);
        }
        let job = self.job(out.job);
        job.messages -= 1;
        (job.messages == 0).then_some(out.job)
    }

    /// Returns the peers to which there are messages.
    pub(super) fn peers(&self) -> &[Rank] {
        &self.peers
    }

    /// Returns the next message to each peer.
    pub(super) fn fronts(&self) -> impl Iterator<Item = &Outgoing> {
        self.peers.iter().filter_map(|&peer| self.queues[peer].front())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Outgoing> {
        self.peers.iter().flat_map(|&peer| &self.queues[peer])
    }

    /// Returns the message with a number, which goes to `peer`.
    pub(super) fn find(&mut self, peer: Rank, message: u64) -> Option<&mut Outgoing> {
        self.queues[peer].iter_mut().find(|out| out.message == message)
    }

    /// Takes all messages, and forgets the jobs.
    pub(super) fn take(&mut self) -> Vec<Outgoing> {
        drop(self.jobs.take());
        let peers = std::mem::take(&mut self.peers);
        peers.into_iter().flat_map(|peer| std::mem::take(&mut self.queues[peer])).collect()
    }
}
