//! A link over a pair of rings in memory that both ends reach.

use std::io;
use std::sync::Arc;

use mio::{Registry, Token};

use super::Link;
use super::ring::{self, Consumer, Producer};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::Region;

/// How the two ends of a pair of rings wake each other.
pub(super) trait PeerWaker: Send {
    /// Wakes the peer.
    fn wake(&mut self);

    /// Takes in the wakes of the peer, or its end.
    fn drain(&mut self);

    /// Returns whether the peer's process has ended.
    fn is_gone(&self) -> bool;

    /// Registers with the mesh that the peer wakes.
    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()>;
}

/// A link over a pair of rings.
pub(super) struct RingLink<W: PeerWaker> {
    producer: Producer,
    consumer: Consumer,
    waker: W,
}

impl<W: PeerWaker> RingLink<W> {
    /// Makes side 0 or 1 of the link over the rings in this region.
    pub(super) fn new(region: Arc<Region>, side: usize, waker: W) -> RingLink<W> {
        let (producer, consumer) = ring::pair(region, side);
        RingLink { producer, consumer, waker }
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
        Ok(taken)
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
        if self.consumer.consume(count) {
            self.waker.wake();
        }
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let mut rest = into;
        while rest.len > 0 {
            let part = if rest.len == into.len { self.peek(rest.len)? } else { self.consumer.peek(rest.len)? };
            if part.len == 0 {
                break;
            }
            // SAFETY: the ring holds these bytes until they are consumed, and the caller vouches
            // for `into`.
            unsafe { std::ptr::copy_nonoverlapping(part.ptr, rest.ptr, part.len) };
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

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.waker.register(registry, token)
    }
}

impl<W: PeerWaker> Drop for RingLink<W> {
    fn drop(&mut self) {
        self.producer.close();
        self.waker.wake();
    }
}
