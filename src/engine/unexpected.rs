//! Unexpected messages: those that have arrived while no receive waits for their tags.

use super::by_tag::ByTag;
use crate::transport::MOST_WAITING;
use crate::types::{Descriptor, Rank, Tag};

/// What a message counts beside its payload: about what an empty one takes that is the only one with
/// its tag.
const OVERHEAD: usize = 384;

/// A message for which no receive waits yet.
pub(super) struct Unexpected {
    pub(super) descriptor: Descriptor,
    /// Its bytes, as far as they have arrived.
    pub(super) payload: Vec<u8>,
    /// How many there are in all, and how many with the padding.
    pub(super) len: usize,
    /// Bytes of the padding received so far.
    pub(super) padding: usize,
    /// How many messages of all peers were kept before it.
    number: u64,
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
    /// The tag of the next message, if it has to wait at its sender until others were received.
    pub(super) refused: Option<Tag>,
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
    /// How many messages have been kept.
    kept: u64,
}

impl UnexpectedMessages {
    pub(super) fn new(world: usize) -> UnexpectedMessages {
        UnexpectedMessages { of_peer: (0..world).map(|_| None).collect(), peers: Vec::new(), kept: 0 }
    }

    pub(super) fn of(&self, peer: Rank) -> Option<&Queue> {
        self.of_peer[peer].as_deref()
    }

    /// Whether a peer's next message waits until others were received.
    pub(super) fn is_full(&self, peer: Rank) -> bool {
        self.of(peer).is_some_and(|queue| queue.refused.is_some())
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
        queue.refused = fits.is_none().then(|| descriptor.tag());
        let Some(len) = fits else { return Ok(false) };
        let mut payload = Vec::new();
        payload.try_reserve_exact(len)?;
        queue.coming = Some(Unexpected { descriptor, payload, len, padding: 0, number: 0 });
        Ok(true)
    }

    /// A receive gets the peer's next message, so that it waits at its sender no longer.
    pub(super) fn passed(&mut self, peer: Rank) {
        if let Some(queue) = &mut self.of_peer[peer] {
            queue.refused = None;
        }
    }

    /// Takes the message of a peer that has come in.
    pub(super) fn arrived(&mut self, peer: Rank) -> Option<Unexpected> {
        self.of_peer[peer].as_mut()?.coming.take()
    }

    /// Keeps a message that has come in.
    pub(super) fn keep(&mut self, peer: Rank, mut message: Unexpected) {
        self.kept += 1;
        message.number = self.kept;
        let queue = self.of_peer[peer].get_or_insert_default();
        if queue.count == 0 {
            self.peers.push(peer);
        }
        queue.count += 1;
        queue.bytes += Unexpected::weight(message.len);
        queue.messages.push(message.descriptor.tag(), message);
    }

    /// Takes the message with a tag, of a peer or of any, that has arrived first. Returns the peer with it.
    pub(super) fn take(&mut self, from: Option<Rank>, tag: Tag) -> Option<(Rank, Unexpected)> {
        // Most programs have none.
        if self.peers.is_empty() {
            return None;
        }
        let first = |peer: Rank| Some(self.of(peer)?.messages.front(tag)?.number);
        let peer = match from {
            Some(peer) => peer,
            None => self.peers.iter().copied().filter_map(|peer| Some((first(peer)?, peer))).min()?.1,
        };
        let queue = self.of_peer[peer].as_mut()?;
        let message = queue.messages.pop(tag)?;
        queue.count -= 1;
        queue.bytes -= Unexpected::weight(message.len);
        queue.refused = None;
        if queue.count == 0 {
            self.peers.retain(|&other| other != peer);
        }
        Some((peer, message))
    }
}
