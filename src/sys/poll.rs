//! Waiting for descriptors, and ending such a wait from another thread.

use std::io;
use std::time::Duration;

use mio::{Events, Registry, Token};

use super::above_standard;

/// Waits for several descriptors at once.
pub(crate) struct Poll(mio::Poll);

impl Poll {
    pub(crate) fn new() -> io::Result<Poll> {
        above_standard(mio::Poll::new).map(Poll)
    }

    pub(crate) fn registry(&self) -> &Registry {
        self.0.registry()
    }

    pub(crate) fn poll(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        self.0.poll(events, timeout)
    }
}

/// Ends the waits of a [`Poll`].
pub(crate) struct Waker(mio::Waker);

impl Waker {
    pub(crate) fn new(poll: &Poll, token: Token) -> io::Result<Waker> {
        above_standard(|| mio::Waker::new(poll.registry(), token)).map(Waker)
    }

    /// Ends the wait that is under way, or else the next one.
    pub(crate) fn wake(&self) -> io::Result<()> {
        self.0.wake()
    }
}
