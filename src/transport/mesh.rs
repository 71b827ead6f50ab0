//! The links of one rank to its peers, opened when they are first needed, and the one place where it sleeps on them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Poll, Token, Waker};

use super::Link;
use crate::error::Cause;
use crate::types::Rank;

/// Why there is no link.
#[derive(Debug)]
pub(crate) enum NoLink {
    /// Because of the peer.
    Peer(Cause),
    /// This process has no descriptor, or no memory, left for one.
    Own(io::Error),
}

impl From<Cause> for NoLink {
    fn from(cause: Cause) -> NoLink {
        NoLink::Peer(cause)
    }
}

/// Makes links. Of two ranks, one dials and the other waits for it; which one, the opener knows.
pub(crate) trait Opener: Send {
    /// The link to a peer, or `None` while the peer has not dialled yet, or cannot be reached and is to be tried again soon; the
    /// waker is woken when it has dialled. May take as long as `patience`.
    fn open(&mut self, peer: Rank, patience: Duration) -> Result<Option<Box<dyn Link>>, NoLink>;

    /// What to wake when a link can be opened.
    fn attach(&mut self, waker: Arc<Waker>);
}

/// All links of one rank.
pub(crate) struct Mesh {
    links: Vec<Option<Box<dyn Link>>>,
    opener: Box<dyn Opener>,
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
}

/// The waker's token; links have their peer's rank.
const WAKER: Token = Token(usize::MAX);

impl Mesh {
    pub(crate) fn new(world: usize, mut opener: Box<dyn Opener>) -> io::Result<Mesh> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        opener.attach(waker.clone());
        let links = std::iter::repeat_with(|| None).take(world).collect();
        Ok(Mesh { links, opener, poll, events: Events::with_capacity(64), waker })
    }

    /// Ends a sleep from another thread.
    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// The link to a peer, once it is open. Opening it may take as long as `patience` says.
    pub(crate) fn link(
        &mut self,
        peer: Rank,
        patience: impl FnOnce() -> Duration,
    ) -> Result<Option<&mut (dyn Link + 'static)>, NoLink> {
        let slot = &mut self.links[peer];
        if slot.is_none() {
            let Some(mut link) = self.opener.open(peer, patience())? else { return Ok(None) };
            link.register(self.poll.registry(), Token(peer)).map_err(NoLink::Own)?;
            *slot = Some(link);
        }
        Ok(slot.as_deref_mut())
    }

    /// The links that are open.
    pub(crate) fn open_links(&mut self) -> impl Iterator<Item = &mut (dyn Link + 'static)> {
        self.links.iter_mut().filter_map(|link| link.as_deref_mut())
    }

    /// Whether the link to a peer is in the middle of something that its caller believes not sent.
    pub(crate) fn has_begun(&self, peer: Rank) -> bool {
        self.links[peer].as_ref().is_some_and(|link| link.has_begun())
    }

    /// Closes the link to a peer, who sees that it ended.
    pub(crate) fn close(&mut self, peer: Rank) {
        self.links[peer] = None;
    }

    /// Sleeps until one of these links can go on (the flags say whether to send, to receive or both), a link can be opened,
    /// or the waker is woken; at most for `timeout`. May return early. All of them must have been tried before.
    pub(crate) fn sleep(&mut self, waits: impl Iterator<Item = (Rank, bool, bool)> + Clone, timeout: Duration) -> io::Result<()> {
        let mut can_sleep = true;
        for (peer, to_send, to_receive) in waits.clone() {
            if let Some(link) = &mut self.links[peer] {
                can_sleep &= link.arm(to_send, to_receive);
            }
        }
        let timeout = if can_sleep { timeout } else { Duration::ZERO };
        match self.poll.poll(&mut self.events, Some(timeout)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => self.events.clear(),
            result => result?,
        }
        for event in &self.events {
            if let Some(Some(link)) = self.links.get_mut(event.token().0) {
                link.disarm(true);
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
