//! Unexpected messages: those that have arrived while no receive waits for their tags.

use super::by_tag::ByTag;
use crate::transport::MOST_WAITING;
use crate::types::{Descriptor, Rank, Tag};

/// What a message counts beside its payload.
const OVERHEAD: usize = 128;

/// A message for which no receive waits yet.
pub(super) struct Unexpected {
    pub(super) descriptor: Descriptor,
    /// Its bytes, as far as they have arrived.
    pub(super) payload: Vec<u8>,
    /// How many there are in all, and how many with the padding.
    pub(super) len: usize,
    /// Bytes of the padding received so far.
    pub(super) padding: usize,
}

impl Unexpected {
    fn weight(len: usize) -> usize {
        len.saturating_add(OVERHEAD)
    }
}

/// The unexpected messages of one peer.
#[derive(Default)]
pub(super) struct Queue {
    messages: ByTag<Unexpected>,
    pub(super) count: usize,
    bytes: usize,
    /// The one that comes in.
    pub(super) coming: Option<Unexpected>,
    /// Whether the next message has to wait until others were received.
    pub(super) is_full: bool,
}

impl Queue {
    pub(super) fn tags(&self) -> impl Iterator<Item = Tag> {
        self.messages.tags()
    }
}

/// The unexpected messages of all peers.
pub(super) struct UnexpectedMessages {
    /// Most peers have none.
    of_peer: Vec<Option<Box<Queue>>>,
    /// The peers with messages that have arrived.
    peers: Vec<Rank>,
}

impl UnexpectedMessages {
    pub(super) fn new(world: usize) -> UnexpectedMessages {
        UnexpectedMessages { of_peer: (0..world).map(|_| None).collect(), peers: Vec::new() }
    }

    pub(super) fn of(&self, peer: Rank) -> Option<&Queue> {
        self.of_peer[peer].as_deref()
    }

    /// Whether a peer's next message waits until others were received.
    pub(super) fn is_full(&self, peer: Rank) -> bool {
        self.of(peer).is_some_and(|queue| queue.is_full)
    }

    pub(super) fn coming(&mut self, peer: Rank) -> Option<&mut Unexpected> {
        self.of_peer[peer].as_mut()?.coming.as_mut()
    }

    /// Begins to keep a message of a peer, if there is room.
    pub(super) fn begin(
        &mut self,
        peer: Rank,
        descriptor: Descriptor,
        len: u64,
    ) -> Result<bool, std::collections::TryReserveError> {
        let queue = self.of_peer[peer].get_or_insert_default();
        let fits = usize::try_from(len).ok().filter(|&len| queue.bytes.saturating_add(Unexpected::weight(len)) <= MOST_WAITING);
        queue.is_full = fits.is_none();
        let Some(len) = fits else { return Ok(false) };
        let mut payload = Vec::new();
        payload.try_reserve_exact(len)?;
        queue.coming = Some(Unexpected { descriptor, payload, len, padding: 0 });
        Ok(true)
    }

    /// Takes the message of a peer that has come in.
    pub(super) fn arrived(&mut self, peer: Rank) -> Option<Unexpected> {
        self.of_peer[peer].as_mut()?.coming.take()
    }

    /// Keeps a message that has come in.
    pub(super) fn keep(&mut self, peer: Rank, message: Unexpected) {
        let queue = self.of_peer[peer].get_or_insert_default();
        if queue.count == 0 {
            self.peers.push(peer);
        }
        queue.count += 1;
        queue.bytes += Unexpected::weight(message.len);
        queue.messages.push(message.descriptor.tag(), message);
    }

    /// Takes the next message with a tag, of a peer or of any, and returns the peer with it.
    pub(super) fn take(&mut self, from: Option<Rank>, tag: Tag) -> Option<(Rank, Unexpected)> {
        // Most programs have none.
        if self.peers.is_empty() {
            return None;
        }
        let has = |peer: Rank| self.of(peer).is_some_and(|queue| queue.messages.front(tag).is_some());
        let peer = match from {
            Some(peer) => peer,
            None => self.peers.iter().copied().find(|&peer| has(peer))?,
        };
        let queue = self.of_peer[peer].as_mut()?;
        let message = queue.messages.pop(tag)?;
        queue.count -= 1;
        queue.bytes -= Unexpected::weight(message.len);
        queue.is_full = false;
        if queue.count == 0 {
            self.peers.retain(|&other| other != peer);
        }
        Some((peer, message))
    }
}
