//! A link over a pair of rings in memory that both ends reach.

use std::io;
use std::sync::Arc;

use mio::{Registry, Token};

use super::Link;
use super::ring::{self, Consumer, PORTION, Producer};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config::CopyMode;
use crate::error::Cause;
use crate::reduce;
use crate::sys::Region;
use crate::trace::Traffic;

/// How the two ends of a pair of rings wake each other.
pub(super) trait PeerWaker: Send {
    /// Wakes the peer.
    fn wake(&mut self);

    /// Says what kind of link this makes.
    fn kind(&self) -> &'static str;

    /// Takes in the wakes of the peer, or its end.
    fn drain(&mut self);

    /// Returns whether the peer's process has ended.
    fn is_gone(&self) -> bool;

    /// As [`Link::is_intact`].
    fn is_intact(&self) -> bool {
        true
    }

    /// Registers with the mesh that the peer wakes.
    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()>;
}

/// A link over a pair of rings.
pub(super) struct RingLink<W: PeerWaker> {
    producer: Producer,
    consumer: Consumer,
    waker: W,
    traffic: Arc<Traffic>,
}

impl<W: PeerWaker> RingLink<W> {
    /// Makes side 0 or 1 of the link over the rings in this region.
    pub(super) fn new(region: Arc<Region>, side: usize, copy_mode: CopyMode, waker: W) -> RingLink<W> {
        let (producer, consumer) = ring::pair(region, side, copy_mode);
        RingLink { producer, consumer, waker, traffic: Arc::default() }
    }

    fn peer_has_ended(&self) -> bool {
        self.consumer.is_closed() || self.waker.is_gone()
    }
}

impl<W: PeerWaker> Link for RingLink<W> {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        let (taken, wake) = self.producer.push(parts)?;
        if wake {
            self.waker.wake();
        }
        if taken == 0 && self.peer_has_ended() {
            return Err(Cause::Closed);
        }
        self.traffic.sent(taken);
        Ok(taken)
    }

    unsafe fn send_whole(&mut self, parts: &[RawSlice]) -> Result<bool, Cause> {
        let Some(wake) = self.producer.push_whole(parts)? else { return Ok(false) };
        if wake {
            self.waker.wake();
        }
        self.traffic.sent(parts.iter().map(|part| part.len).sum());
        Ok(true)
    }

    unsafe fn send_last(&mut self, message: RawSlice) -> Result<usize, Cause> {
        if self.producer.push_last(message)? {
            self.waker.wake();
        }
        Ok(message.len)
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        let part = self.consumer.peek(want)?;
        if part.len > 0 || !self.peer_has_ended() {
            return Ok(part);
        }
        // Bytes that the peer wrote before it ended are still to be read.
        let part = self.consumer.peek(want)?;
        if part.len > 0 { Ok(part) } else { Err(Cause::Closed) }
    }

    fn consume(&mut self, count: usize) {
        self.traffic.received(count);
        if self.consumer.consume(count) {
            self.waker.wake();
        }
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let mut rest = into;
        while rest.len > 0 {
            let want = rest.len.min(PORTION);
            let part = if rest.len == into.len { self.peek(want)? } else { self.consumer.peek(want)? };
            if part.len == 0 {
                break;
            }
            // SAFETY: the ring holds these bytes until they are consumed, and the caller vouches
            // for `into`.
            unsafe { reduce::copy(part.ptr, rest.ptr, part.len) };
            self.consume(part.len);
            rest = rest.skip(part.len);
        }
        Ok(into.len - rest.len)
    }

    fn arm(&mut self, to_send: bool, to_receive: bool) -> bool {
        (!to_send || self.producer.arm()) & (!to_receive || self.consumer.arm())
    }

    fn disarm(&mut self, event: bool) {
        self.producer.disarm();
        self.consumer.disarm();
        if event {
            self.waker.drain();
        }
    }

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some((self.waker.kind(), self.traffic.clone()))
    }

    fn is_intact(&self) -> bool {
        self.waker.is_intact()
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.waker.register(registry, token)
    }
}

impl<W: PeerWaker> Drop for RingLink<W> {
    fn drop(&mut self) {
        self.producer.close();
        if self.waker.is_intact() {
            self.waker.wake();
        }
    }
}
