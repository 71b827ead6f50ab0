//! Gives the messages of a peer to its receives in the order of the calls.

use std::collections::VecDeque;

use crate::types::Rank;

/// The keys of the receives that wait, in order. Later ones have higher keys.
#[derive(Default)]
pub(super) struct Receivers {
    /// For each peer, those that wait for its message.
    of_peer: Vec<VecDeque<u64>>,
    /// The peers for which any wait.
    peers: Vec<Rank>,
    /// Those that wait for the message of any rank.
    of_any: VecDeque<u64>,
}

impl Receivers {
    pub(super) fn new(world: usize) -> Receivers {
        Receivers { of_peer: vec![VecDeque::new(); world], peers: Vec::new(), of_any: VecDeque::new() }
    }

    pub(super) fn clear(&mut self) {
        let Receivers { of_peer, peers, of_any } = self;
        peers.drain(..).for_each(|peer| of_peer[peer].clear());
        of_any.clear();
    }

    /// Adds a receive that begins after all others.
    pub(super) fn push(&mut self, from: Option<Rank>, key: u64) {
        let Some(peer) = from else { return self.of_any.push_back(key) };
        if self.of_peer[peer].is_empty() {
            self.peers.push(peer);
        }
        self.of_peer[peer].push_back(key);
    }

    /// Returns the peers for which receives wait.
    pub(super) fn peers(&self) -> &[Rank] {
        &self.peers
    }

    /// Returns the first receive from a peer.
    pub(super) fn first_of(&self, peer: Rank) -> Option<u64> {
        self.of_peer[peer].front().copied()
    }

    /// Returns the receive that gets the next message of a peer; `None` if one from any rank may.
    pub(super) fn next_of(&self, peer: Rank) -> Option<u64> {
        let first = self.first_of(peer)?;
        self.of_any.front().is_none_or(|&any| any > first).then_some(first)
    }

    /// Returns the first receive from any rank.
    pub(super) fn next_of_any(&self) -> Option<u64> {
        self.of_any.front().copied()
    }

    /// Whether the next message of a peer may be that of the first receive from any rank.
    pub(super) fn may_send_to_any(&self, peer: Rank) -> bool {
        match (self.of_any.front(), self.of_peer[peer].front()) {
            (Some(any), Some(first)) => any < first,
            _ => true,
        }
    }

    /// The first receive from any rank has found its sender.
    pub(super) fn found(&mut self, peer: Rank) {
        let Some(key) = self.of_any.pop_front() else { return };
        if self.of_peer[peer].is_empty() {
            self.peers.push(peer);
        }
        self.of_peer[peer].push_front(key);
    }

    /// The first receive from a peer has ended.
    pub(super) fn pop(&mut self, peer: Rank) {
        self.of_peer[peer].pop_front();
        if self.of_peer[peer].is_empty() {
            self.peers.retain(|&waiting| waiting != peer);
        }
    }

    /// The first receive from any rank has ended.
    pub(super) fn pop_any(&mut self) {
        self.of_any.pop_front();
    }
}
