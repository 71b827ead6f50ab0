//! Gives the messages of a peer to its receives: of those with the message's tag, to the one that was
//! called first.

use super::by_tag::ByTag;
use crate::types::{Rank, Tag};

/// The keys of the receives that wait, in order. Later ones have higher keys.
#[derive(Default)]
pub(super) struct Receivers {
    /// For each peer, those that wait for its message.
    of_peer: Vec<OfPeer>,
    /// The peers for which any wait.
    peers: Vec<Rank>,
    /// Those that wait for the message of any rank.
    of_any: ByTag<u64>,
    /// The peer whose link receives from any rank look at first.
    pub(super) first_peer: Rank,
    /// A collective, which is alone.
    pub(super) collective: Option<u64>,
}

#[derive(Default)]
struct OfPeer {
    waiting: ByTag<u64>,
    /// The receive that gets the message that comes in.
    current: Option<u64>,
}

impl OfPeer {
    fn is_empty(&self) -> bool {
        self.current.is_none() && self.waiting.is_empty()
    }
}

impl Receivers {
    pub(super) fn new(world: usize) -> Receivers {
        Receivers { of_peer: (0..world).map(|_| OfPeer::default()).collect(), ..Receivers::default() }
    }

    pub(super) fn clear(&mut self) {
        let Receivers { of_peer, peers, of_any, first_peer: _, collective } = self;
        for peer in peers.drain(..) {
            of_peer[peer].waiting.clear();
            of_peer[peer].current = None;
        }
        of_any.clear();
        *collective = None;
    }

    fn of_peer(&mut self, peer: Rank) -> &mut OfPeer {
        if self.of_peer[peer].is_empty() {
            self.peers.push(peer);
        }
        &mut self.of_peer[peer]
    }

    /// Adds a receive that begins after all others.
    pub(super) fn push(&mut self, from: Option<Rank>, tag: Tag, key: u64) {
        match from {
            Some(peer) => self.of_peer(peer).waiting.push(tag, key),
            None => self.of_any.push(tag, key),
        }
    }

    /// Adds a receive whose message comes in.
    pub(super) fn resume(&mut self, peer: Rank, key: u64) {
        self.of_peer(peer).current = Some(key);
    }

    /// Returns the peers for which receives wait.
    pub(super) fn peers(&self) -> &[Rank] {
        &self.peers
    }

    /// Returns the receive that gets the message that comes in from a peer.
    pub(super) fn current(&self, peer: Rank) -> Option<u64> {
        self.of_peer[peer].current
    }

    /// Returns a receive from a peer, the same until it ends or gets a message.
    pub(super) fn first_of(&self, peer: Rank) -> Option<u64> {
        let OfPeer { waiting, current } = &self.of_peer[peer];
        current.or_else(|| waiting.first().copied())
    }

    /// Returns a receive from any rank, as [`Receivers::first_of`] does.
    pub(super) fn first_of_any(&self) -> Option<u64> {
        self.of_any.first().copied()
    }

    /// Returns the receive that gets a message of a peer, if one waits for it.
    pub(super) fn take(&mut self, peer: Rank, tag: Tag) -> Option<u64> {
        let OfPeer { waiting, current } = &mut self.of_peer[peer];
        let (named, any) = (waiting.front(tag), self.of_any.front(tag));
        let is_for_any = any.is_some_and(|any| named.is_none_or(|named| any < named));
        let key = if is_for_any { self.of_any.pop(tag) } else { waiting.pop(tag) }?;
        if current.is_none() && !self.peers.contains(&peer) {
            self.peers.push(peer);
        }
        *current = Some(key);
        Some(key)
    }

    /// The receive that got the message of a peer has ended.
    pub(super) fn end(&mut self, peer: Rank) {
        self.of_peer[peer].current = None;
        if self.of_peer[peer].is_empty() {
            self.peers.retain(|&waiting| waiting != peer);
        }
    }
}
