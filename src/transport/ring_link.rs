//! A link over a pair of rings in memory that both ends reach.

use std::io;
use std::sync::Arc;

use mio::{Registry, Token};

use super::Link;
use super::ring::{self, Consumer, PORTION, Producer};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::reduce;
use crate::sys::{self, Process, Region};
use crate::trace::Traffic;
use std::sync::atomic::{Ordering, fence};

/// Bytes of exposed memory that are read before the producer is told. It sees them move within the time for
/// which it spins, so it does not sleep.
const MOST_READ: usize = 256 << 10;

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

    /// The peer's process, if the system may copy from its memory.
    fn process(&self) -> Option<Process> {
        None
    }

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
    pub(super) fn new(region: Arc<Region>, side: usize, waker: W) -> RingLink<W> {
        let (mut producer, consumer) = ring::pair(region, side);
        if waker.process().is_none() {
            producer.never_expose();
        }
        RingLink { producer, consumer, waker, traffic: Arc::default() }
    }

    /// Reads what comes next in the stream, if it is exposed. Returns how many bytes.
    ///
    /// # Safety
    ///
    /// `into` is writable until this returns, and no other thread accesses it.
    unsafe fn read_exposed(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let (Some(readable), Some(process)) = (self.consumer.readable(), self.waker.process()) else { return Ok(0) };
        let count = into.len.min(readable.len).min(MOST_READ);
        // SAFETY: the caller vouches for `into`.
        let read = unsafe { sys::read_process(process, readable.address, into.ptr, count) };
        if count == readable.len && readable.is_last {
            // All of it was the message if the producer has not taken its memory back, and if the
            // process is the peer's: another one may have the id of a process that has ended.
            fence(Ordering::SeqCst);
            self.waker.drain();
            if self.peer_has_ended() {
                return Err(Cause::Closed);
            }
        }
        let (count, wake) = match read {
            Ok(()) => (count, self.consumer.read_exposed(count)),
            Err(error) => {
                crate::log::debug!(%error, "cannot read the memory of a peer, which copies its messages instead");
                (0, self.consumer.refuse())
            }
        };
        if wake {
            self.waker.wake();
        }
        Ok(count)
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

    unsafe fn expose(&mut self, before: RawSlice, memory: RawSlice) -> Result<Option<usize>, Cause> {
        let Some((mut taken, wake)) = self.producer.expose(before, memory)? else { return Ok(None) };
        if wake {
            self.waker.wake();
        }
        if taken == 0 && self.peer_has_ended() {
            // What the peer read before it ended has arrived. It may have read the rest since.
            taken = self.producer.settle()?.map_or(0, |(taken, _)| taken);
            if taken == 0 {
                return Err(Cause::Closed);
            }
        }
        self.traffic.sent(taken);
        Ok(Some(taken))
    }

    fn has_begun(&self) -> bool {
        self.producer.has_exposed()
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
                // SAFETY: the caller vouches for `into`.
                let count = unsafe { self.read_exposed(rest)? };
                self.traffic.received(count);
                // Not more at once: other messages and the deadline are looked at in between.
                return Ok(into.len - rest.len + count);
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::transport::ALIGN;

    /// A peer that reads all that is exposed and ends, when it is asked whether it has ended.
    struct EndsWhenAsked(RefCell<Option<Consumer>>);

    impl PeerWaker for EndsWhenAsked {
        fn wake(&mut self) {}

        fn kind(&self) -> &'static str {
            "test"
        }

        fn drain(&mut self) {}

        fn is_gone(&self) -> bool {
            let mut peer = self.0.take().expect("it is asked once");
            assert_eq!(peer.peek(ALIGN).unwrap().len, ALIGN);
            peer.consume(ALIGN);
            let readable = peer.readable().expect("the message is exposed");
            peer.read_exposed(readable.len);
            true
        }

        fn process(&self) -> Option<Process> {
            Some(Process::own())
        }

        fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
            Ok(())
        }
    }

    /// A message that the peer has read as its last act has been sent.
    #[test]
    fn what_a_peer_read_before_it_ended_has_arrived() {
        let region = Arc::new(Region::heap(ring::pair_size(1024)));
        let (_, peer) = ring::pair(region.clone(), 1);
        let mut link = RingLink::new(region, 0, EndsWhenAsked(RefCell::new(Some(peer))));
        let (header, memory) = (vec![1u8; ALIGN], vec![2u8; 1 << 20]);
        // SAFETY: both live until the end of the test.
        let mut expose = |before: &[u8]| unsafe { link.expose(RawSlice::of(before), RawSlice::of(&memory)) };
        assert_eq!(expose(&header), Ok(Some(ALIGN)));
        assert_eq!(expose(&[]), Ok(Some(memory.len())));
    }
}
