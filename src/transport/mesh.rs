//! The links of one rank to its peers, opened when they are first used, and where the rank sleeps
//! on them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Registry, Token};

use super::Link;
use super::loopback::Loopback;
use crate::error::Cause;
use crate::sys::{Poll, Waker};
use crate::trace::{LinkTable, Traffic};
use crate::types::Rank;

/// Why there is no link.
#[derive(Debug)]
pub(crate) enum NoLink {
    /// The peer is the cause.
    Peer(Cause),
    /// This process has no descriptor or no memory left for a link.
    Own(io::Error),
}

impl From<Cause> for NoLink {
    fn from(cause: Cause) -> NoLink {
        NoLink::Peer(cause)
    }
}

/// Opens links. Of two ranks, one connects and the other accepts; the opener knows which.
pub(crate) trait Opener: Send {
    /// Returns the link to a peer, or `None` while it is not open. Does not wait: the next call
    /// continues to open the link. Call it when `token` or the waker is woken, or when
    /// [`Opener::left`] has passed.
    fn open(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink>;

    /// Returns how long until the link to a peer needs another call even if nothing is woken.
    fn left(&self, _peer: Rank) -> Option<Duration> {
        None
    }

    /// Returns whether a peer's process lives; `None` if this process cannot see it.
    fn is_alive(&self, _peer: Rank) -> Option<bool> {
        None
    }

    /// Returns whether what a peer has sent is there at once.
    fn delivers_at_once(&self) -> bool {
        false
    }

    /// Sets the waker for when a link can be opened.
    fn attach(&mut self, waker: Arc<Waker>);
}

/// Opens the links of a rank that is alone.
pub(crate) struct NoPeers;

impl Opener for NoPeers {
    fn open(&mut self, _: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        Ok(None)
    }

    fn attach(&mut self, _: Arc<Waker>) {}
}

/// All links of one rank.
pub(crate) struct Mesh {
    links: Vec<Option<Box<dyn Link>>>,
    /// The counters of the open links that count.
    counters: Vec<Option<Arc<Traffic>>>,
    opener: Box<dyn Opener>,
    /// This rank, which sends messages to itself.
    own: Option<Rank>,
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
    /// Where the links are listed.
    table: Arc<LinkTable>,
    /// The peers that have closed their ends of open links. An event says so only once.
    closing: Vec<Rank>,
}

/// The waker's token. The token of a link is the peer's rank.
const WAKER: Token = Token(usize::MAX);

impl Mesh {
    pub(crate) fn new(world: usize, mut opener: Box<dyn Opener>) -> io::Result<Mesh> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(&poll, WAKER)?);
        opener.attach(waker.clone());
        let links = std::iter::repeat_with(|| None).take(world).collect();
        Ok(Mesh {
            links,
            counters: vec![None; world],
            opener,
            own: None,
            poll,
            events: Events::with_capacity(64),
            waker,
            table: Arc::default(),
            closing: Vec::new(),
        })
    }

    /// Lists the links in a table when they open.
    pub(crate) fn listed_in(self, table: Arc<LinkTable>) -> Mesh {
        Mesh { table, ..self }
    }

    /// Gives a rank a link to itself.
    pub(crate) fn with_loopback(self, own: Rank) -> Mesh {
        Mesh { own: Some(own), ..self }
    }

    /// Returns the waker, which ends a sleep from another thread.
    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// Returns the link to a peer, once it is open. Does not wait.
    pub(crate) fn link(&mut self, peer: Rank) -> Result<Option<&mut (dyn Link + 'static)>, NoLink> {
        let slot = &mut self.links[peer];
        if slot.is_none() {
            if self.own == Some(peer) {
                return Ok(Some(&mut **slot.insert(Box::new(Loopback::default()))));
            }
            let (registry, token) = (self.poll.registry(), Token(peer));
            let Some(mut link) = self.opener.open(peer, registry, token)? else { return Ok(None) };
            link.register(registry, token).map_err(NoLink::Own)?;
            if let Some((kind, traffic)) = link.traffic() {
                self.counters[peer] = Some(traffic.clone());
                self.table.opened(peer, kind, traffic);
            }
            *slot = Some(link);
        }
        Ok(slot.as_deref_mut())
    }

    /// Returns the open links and their peers, except for links whose descriptors the program has
    /// closed.
    pub(crate) fn open_links(&mut self) -> impl Iterator<Item = (Rank, &mut (dyn Link + 'static))> {
        self.links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| Some((peer, link.as_deref_mut().filter(|link| link.is_intact())?)))
    }

    /// Returns whether a peer's process lives; `None` if this process cannot see it.
    pub(crate) fn is_alive(&self, peer: Rank) -> Option<bool> {
        self.opener.is_alive(peer)
    }

    /// Returns a number that changes whenever the link to a peer moves bytes; `None` if nothing that the
    /// peer has sent can be on its way.
    pub(crate) fn moved(&self, peer: Rank) -> Option<u64> {
        self.links[peer].as_ref().filter(|_| !self.opener.delivers_at_once())?;
        Some(self.counters[peer].as_ref().map_or(0, |counters| counters.moved()))
    }

    /// Returns whether the link to a peer has begun to send bytes that it has not yet taken from
    /// the caller.
    pub(crate) fn has_begun(&self, peer: Rank) -> bool {
        self.links[peer].as_ref().is_some_and(|link| link.has_begun())
    }

    /// Returns the peers that have closed their ends of open links. What they have sent may still be there.
    pub(crate) fn closing(&self) -> &[Rank] {
        &self.closing
    }

    /// Closes the link to a peer, which sees that it ended.
    pub(crate) fn close(&mut self, peer: Rank) {
        (self.links[peer], self.counters[peer]) = (None, None);
        self.closing.retain(|closing| *closing != peer);
    }

    /// Sleeps until one of these links can make progress or can be opened, or until the waker is
    /// woken, at most for `timeout`. The flags say whether the rank wants to send and to receive.
    /// May return early. The caller must have tried all these links before.
    pub(crate) fn sleep(&mut self, waits: impl Iterator<Item = (Rank, bool, bool)> + Clone, timeout: Duration) -> io::Result<()> {
        let mut timeout = timeout;
        for (peer, to_send, to_receive) in waits.clone() {
            match &mut self.links[peer] {
                Some(link) => {
                    if !link.arm(to_send, to_receive) {
                        timeout = Duration::ZERO;
                    }
                    timeout = timeout.min(link.left().unwrap_or(timeout));
                }
                None => timeout = timeout.min(self.opener.left(peer).unwrap_or(timeout)),
            }
        }
        match self.poll.poll(&mut self.events, Some(timeout)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => self.events.clear(),
            result => result?,
        }
        for event in &self.events {
            if event.token() == WAKER {
                self.waker.notice();
            }
            let peer = event.token().0;
            if let Some(Some(link)) = self.links.get_mut(peer) {
                link.disarm(true);
                if (event.is_read_closed() || event.is_error()) && !self.closing.contains(&peer) {
                    self.closing.push(peer);
                }
            }
        }
        for (peer, ..) in waits {
            if let Some(link) = &mut self.links[peer] {
                link.disarm(false);
            }
        }
        Ok(())
    }
}
