//! Links between ranks of one process: rings on the heap.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use mio::{Registry, Token, Waker};
use parking_lot::Mutex;

use super::ring::{self, Consumer, Producer};
use super::{Link, NoLink, Opener};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::Segment;
use crate::types::Rank;

/// Bytes of one ring.
const CAPACITY: usize = 256 << 10;

/// What the ranks of one process share: where they find each other's links and memory.
pub(crate) struct Hub {
    /// Bytes of one ring.
    capacity: usize,
    /// Segments of which one user has come and the others not yet, by name, with how many are still to come.
    segments: Mutex<HashMap<Name, (Arc<Segment>, usize)>>,
    wakers: Mutex<HashMap<(u64, Rank), Arc<Waker>>>,
    /// Segments that ranks lend each other, by owner and number.
    lent: Mutex<HashMap<(Rank, u32), Arc<Segment>>>,
}

/// A communicator, and what in it: the two ranks of a link, or a window.
type Name = (u64, [u64; 2]);

impl Default for Hub {
    fn default() -> Hub {
        Hub { capacity: CAPACITY, segments: Mutex::default(), wakers: Mutex::default(), lent: Mutex::default() }
    }
}

impl Hub {
    /// With rings of `capacity` bytes, so that a test reaches their end soon.
    #[cfg(test)]
    pub(crate) fn with_rings(capacity: usize) -> Hub {
        Hub { capacity, ..Hub::default() }
    }

    /// Memory of `len` bytes that `users` share under a name.
    pub(crate) fn segment(&self, name: Name, len: usize, users: usize) -> Arc<Segment> {
        let mut segments = self.segments.lock();
        let entry = segments.entry(name).or_insert_with(|| (Arc::new(Segment::heap(len)), users));
        entry.1 -= 1;
        let (segment, left) = (entry.0.clone(), entry.1);
        if left == 0 {
            segments.remove(&name);
        }
        segment
    }

    pub(crate) fn lend(&self, name: (Rank, u32), segment: Arc<Segment>) {
        self.lent.lock().insert(name, segment);
    }

    pub(crate) fn withdraw(&self, name: (Rank, u32)) {
        self.lent.lock().remove(&name);
    }

    pub(crate) fn lent(&self, name: (Rank, u32)) -> Option<Arc<Segment>> {
        self.lent.lock().get(&name).cloned()
    }

    fn wake(&self, comm_id: u64, rank: Rank) {
        // A rank without a waker has never slept.
        if let Some(Err(error)) = self.wakers.lock().get(&(comm_id, rank)).map(|waker| waker.wake()) {
            tracing::warn!(%error, "a rank of this process could not be woken");
        }
    }
}

/// Opens links between ranks of one process.
pub(crate) struct MemoryOpener {
    pub(crate) hub: Arc<Hub>,
    /// Tells the communicators of the process apart.
    pub(crate) comm_id: u64,
    pub(crate) rank: Rank,
}

impl MemoryOpener {
    pub(crate) fn link(&self, peer: Rank) -> Box<dyn Link> {
        let (low, high) = (self.rank.min(peer), self.rank.max(peer));
        let segment = self.hub.segment((self.comm_id, [low as u64, high as u64]), ring::pair_size(self.hub.capacity), 2);
        let bell = Peer { hub: self.hub.clone(), comm_id: self.comm_id, peer };
        Box::new(RingLink::new(segment, usize::from(self.rank > peer), bell))
    }
}

impl Opener for MemoryOpener {
    fn open(&mut self, peer: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        Ok(Some(self.link(peer)))
    }

    fn attach(&mut self, waker: Arc<Waker>) {
        self.hub.wakers.lock().insert((self.comm_id, self.rank), waker);
    }
}

impl Drop for MemoryOpener {
    fn drop(&mut self) {
        self.hub.wakers.lock().remove(&(self.comm_id, self.rank));
    }
}

/// Wakes a rank of this process.
pub(crate) struct Peer {
    hub: Arc<Hub>,
    comm_id: u64,
    peer: Rank,
}

impl Bell for Peer {
    fn ring(&mut self) {
        self.hub.wake(self.comm_id, self.peer);
    }

    fn answer(&mut self) {}

    fn is_gone(&self) -> bool {
        false
    }

    fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        // The peer wakes this rank's mesh by its waker.
        Ok(())
    }
}

/// How the two ends of a pair of rings wake each other.
pub(super) trait Bell: Send {
    /// Wakes the peer.
    fn ring(&mut self);

    /// The peer has woken this end, or is gone.
    fn answer(&mut self);

    /// Whether the peer's process has ended.
    fn is_gone(&self) -> bool;

    /// Has a mesh listen.
    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()>;
}

/// A link over a pair of rings.
pub(super) struct RingLink<B: Bell> {
    producer: Producer,
    consumer: Consumer,
    bell: B,
}

impl<B: Bell> RingLink<B> {
    /// Side 0 or 1 of the rings in this segment.
    pub(super) fn new(segment: Arc<Segment>, side: usize, bell: B) -> RingLink<B> {
        let (producer, consumer) = ring::pair(segment, side);
        RingLink { producer, consumer, bell }
    }

    fn peer_has_ended(&self) -> bool {
        self.consumer.is_closed() || self.bell.is_gone()
    }
}

impl<B: Bell> Link for RingLink<B> {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        let (taken, wake) = self.producer.push(parts)?;
        if wake {
            self.bell.ring();
        }
        if taken == 0 && self.peer_has_ended() {
            return Err(Cause::Closed);
        }
        Ok(taken)
    }

    unsafe fn send_last(&mut self, message: RawSlice) -> Result<usize, Cause> {
        if self.producer.push_last(message)? {
            self.bell.ring();
        }
        Ok(message.len)
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        let chunk = self.consumer.peek(want)?;
        if chunk.len > 0 || !self.peer_has_ended() {
            return Ok(chunk);
        }
        // What the peer wrote before it ended is still to be read.
        let chunk = self.consumer.peek(want)?;
        if chunk.len > 0 { Ok(chunk) } else { Err(Cause::Closed) }
    }

    fn consume(&mut self, count: usize) {
        if self.consumer.consume(count) {
            self.bell.ring();
        }
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let mut rest = into;
        while rest.len > 0 {
            let chunk = if rest.len == into.len { self.peek(rest.len)? } else { self.consumer.peek(rest.len)? };
            if chunk.len == 0 {
                break;
            }
            // SAFETY: the ring holds these bytes until they are consumed, and the caller vouches for `into`.
            unsafe { std::ptr::copy_nonoverlapping(chunk.ptr, rest.ptr, chunk.len) };
            self.consume(chunk.len);
            rest = rest.skip(chunk.len);
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
            self.bell.answer();
        }
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.bell.register(registry, token)
    }
}

impl<B: Bell> Drop for RingLink<B> {
    fn drop(&mut self) {
        self.producer.close();
        self.bell.ring();
    }
}
