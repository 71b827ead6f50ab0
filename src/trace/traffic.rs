//! The bytes that went over each link, for metrics and `kolo top`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::pace::{Change, LinkPace, LinkReading, OpKind, Slow};
use crate::sys::{Flow, SocketWatch};
use crate::types::Rank;

/// The bytes of one link. The thread that uses the link counts, and any thread may read.
#[derive(Default)]
pub(crate) struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    /// How often a rail failed.
    lost_rails: AtomicU64,
    /// The sockets of the link, as long as it is open. Held only while a link opens or closes, and
    /// while the system is asked about a socket.
    sockets: Mutex<Vec<SocketWatch>>,
    /// What the sockets carry.
    pace: Mutex<LinkPace>,
}

impl Traffic {
    /// Makes the counters of a link over these sockets. The link calls [`Traffic::close`] before it
    /// closes one of them.
    pub(crate) fn of_sockets(sockets: Vec<SocketWatch>) -> Arc<Traffic> {
        Arc::new(Traffic { sockets: Mutex::new(sockets), ..Traffic::default() })
    }

    /// Counts bytes that the link took to send. One thread at a time calls this.
    #[inline(always)]
    pub(crate) fn sent(&self, count: usize) {
        self.sent.store(self.sent.load(Ordering::Relaxed).wrapping_add(count as u64), Ordering::Relaxed);
    }

    /// Counts bytes that arrived. One thread at a time calls this.
    #[inline(always)]
    pub(crate) fn received(&self, count: usize) {
        self.received.store(self.received.load(Ordering::Relaxed).wrapping_add(count as u64), Ordering::Relaxed);
    }

    /// Returns how many bytes the link has moved.
    pub(crate) fn moved(&self) -> u64 {
        self.sent.load(Ordering::Relaxed).wrapping_add(self.received.load(Ordering::Relaxed))
    }

    /// Counts a rail of the link that failed.
    pub(crate) fn lost_rail(&self) {
        self.lost_rails.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether anything was written, or waited, since the last time.
    fn is_due(&self) -> bool {
        self.pace.lock().is_due(self.sent.load(Ordering::Relaxed))
    }

    /// Returns what the sockets carry, if the system says so.
    pub(super) fn flow(&self) -> Option<Flow> {
        let flows: Option<Vec<Flow>> = self.sockets.lock().iter().map(|socket| socket.read()?.flow).collect();
        let flows = flows.filter(|flows| !flows.is_empty())?;
        // The connections of one link share its bytes.
        Some(Flow {
            acknowledged: flows.iter().map(|flow| flow.acknowledged).sum(),
            busy: flows.iter().map(|flow| flow.busy).max()?,
            is_full: flows.iter().any(|flow| flow.is_full),
        })
    }

    /// As [`LinkPace::look`].
    pub(super) fn look(&self, seen: LinkReading, kind: Option<OpKind>) -> Option<Change> {
        self.pace.lock().look(seen, kind)
    }

    /// Forgets the sockets, which the link is about to close.
    pub(crate) fn close(&self) {
        self.sockets.lock().clear();
    }
}

/// What the system says about the TCP connections of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Connections {
    /// Segments that were sent again, over all connections.
    pub(crate) retransmits: u64,
    /// The longest round trip of a connection, in microseconds.
    pub(crate) round_trip: u64,
}

/// What went over the links to one peer so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkTotal {
    /// The peer in the communicator.
    pub(crate) peer: Rank,
    /// `tcp`, `tls`, `shm` or `memory`.
    pub(crate) kind: &'static str,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// How often a rail of the links failed.
    pub(crate) lost_rails: u64,
    /// `None` where the link has no TCP connection, or the system does not say.
    pub(crate) connections: Option<Connections>,
    /// What it carries, if that is much less than before.
    pub(crate) slow: Option<Slow>,
}

/// The links of one communicator.
#[derive(Default)]
pub(crate) struct LinkTable(Mutex<Vec<(LinkTotal, Arc<Traffic>)>>);

impl LinkTable {
    /// Adds a link to a peer that has been opened. It takes the place of an earlier one to the same
    /// peer.
    pub(crate) fn opened(&self, peer: Rank, kind: &'static str, traffic: Arc<Traffic>) {
        let mut links = self.0.lock();
        let mut past = LinkTotal { peer, kind, sent: 0, received: 0, lost_rails: 0, connections: None, slow: None };
        if let Some(at) = links.iter().position(|(link, _)| link.peer == peer) {
            let (before, counted) = links.swap_remove(at);
            past.sent = before.sent + counted.sent.load(Ordering::Relaxed);
            past.received = before.received + counted.received.load(Ordering::Relaxed);
            past.lost_rails = before.lost_rails + counted.lost_rails.load(Ordering::Relaxed);
        }
        links.push((past, traffic));
    }

    /// Returns the links over which anything was written lately.
    pub(super) fn used(&self) -> Vec<(Rank, Arc<Traffic>)> {
        let links = self.0.lock();
        let used = links.iter().filter(|(_, traffic)| traffic.is_due());
        used.map(|(link, traffic)| (link.peer, traffic.clone())).collect()
    }

    /// Forgets which links are slow. Returns their peers.
    pub(super) fn recover(&self) -> Vec<Rank> {
        let links = self.0.lock();
        links.iter().filter(|(_, traffic)| traffic.pace.lock().recover()).map(|(link, _)| link.peer).collect()
    }

    /// Returns what went over each link, by peer, for at most `most` of them.
    pub(crate) fn read(&self, most: usize) -> Vec<LinkTotal> {
        let mut links = self.0.lock().clone();
        links.sort_by_key(|(link, _)| link.peer);
        links.truncate(most);
        let total = |(past, traffic): (LinkTotal, Arc<Traffic>)| {
            let infos: Vec<_> = traffic.sockets.lock().iter().filter_map(SocketWatch::read).collect();
            let connections = (!infos.is_empty()).then(|| Connections {
                retransmits: infos.iter().map(|info| info.retransmits).sum(),
                round_trip: infos.iter().map(|info| info.round_trip).max().unwrap_or_default(),
            });
            let (sent, received) = (traffic.sent.load(Ordering::Relaxed), traffic.received.load(Ordering::Relaxed));
            let lost_rails = past.lost_rails + traffic.lost_rails.load(Ordering::Relaxed);
            let slow = traffic.pace.lock().slow();
            LinkTotal { sent: past.sent + sent, received: past.received + received, lost_rails, connections, slow, ..past }
        };
        links.into_iter().map(total).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_opened_again_keeps_its_bytes() {
        let links = LinkTable::default();
        let first = Traffic::of_sockets(Vec::new());
        links.opened(3, "tcp", first.clone());
        links.opened(1, "shm", Arc::default());
        first.sent(10);
        first.received(4);
        first.lost_rail();
        let second = Arc::new(Traffic::default());
        links.opened(3, "tcp", second.clone());
        second.sent(5);
        second.lost_rail();
        let link = |peer, kind, sent, received, lost_rails| LinkTotal {
            peer,
            kind,
            sent,
            received,
            lost_rails,
            connections: None,
            slow: None,
        };
        assert_eq!(links.read(9), [link(1, "shm", 0, 0, 0), link(3, "tcp", 15, 4, 2)]);
        assert_eq!(links.read(1), [link(1, "shm", 0, 0, 0)]);
    }
}
