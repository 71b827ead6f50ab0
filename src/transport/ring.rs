//! A bounded stream of bytes from one rank to another through memory that both reach.
//!
//! The producer owns `head`, the number of bytes ever written. The consumer owns `tail`, the number
//! ever read. The bytes between are in the buffer, at positions modulo its size. Each side reads
//! the other's counter only when its last copy does not suffice, so that in a steady stream the
//! counters' cache lines rarely move.
//!
//! A side that is about to sleep sets a flag, and then reads the other's counter once more. The
//! other side writes its counter, and then reads the flag. All four accesses are sequentially
//! consistent, so at least one side sees the other's write, and no wake is lost.
//!
//! The peer's counter is untrusted, and is checked before it is used.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys::Region;

/// Bytes of a ring that only [`Producer::push_last`] uses, so that a rank that leaves can always
/// tell its peer.
pub(super) const FOR_THE_LAST: usize = 64;

/// The words through which the two sides synchronise. They start as zeros.
#[repr(C)]
struct Control {
    /// Written by the producer.
    head: CachePadded<AtomicU64>,
    /// Written by the consumer.
    tail: CachePadded<AtomicU64>,
    /// Set by a producer that waits for room, cleared by the side that wakes it.
    producer_sleeps: CachePadded<AtomicU32>,
    /// Set by a consumer that waits for bytes, cleared by the side that wakes it.
    consumer_sleeps: CachePadded<AtomicU32>,
    /// Set by a producer that writes no more.
    closed: AtomicU32,
}

/// The memory of a ring: its control block, then its bytes.
#[derive(Clone)]
struct RingMemory {
    region: Arc<Region>,
    offset: usize,
    capacity: usize,
}

// SAFETY of all accesses below: `pair` has checked that the region holds both rings. The region
// lives as long as this value. Its memory starts zeroed, which is a valid Control, and the control
// block is accessed through its atomics only.
impl RingMemory {
    fn control(&self) -> &Control {
        // SAFETY: see above. The offset is a multiple of the block's alignment.
        unsafe { &*self.region.at(self.offset).cast::<Control>() }
    }

    /// Returns the bytes from a stream position to the end of the buffer, at most `len`.
    fn stretch(&self, position: u64, len: usize) -> RawSliceMut {
        let at = position as usize % self.capacity;
        let start = self.offset + size_of::<Control>() + at;
        RawSliceMut { ptr: self.region.at(start), len: len.min(self.capacity - at) }
    }
}

pub(super) struct Producer {
    memory: RingMemory,
    head: u64,
    /// The consumer's counter as last seen.
    tail: u64,
}

pub(super) struct Consumer {
    memory: RingMemory,
    tail: u64,
    /// The producer's counter as last seen.
    head: u64,
}

/// Returns the bytes of a region for two rings of `capacity` bytes each.
pub(super) const fn pair_size(capacity: usize) -> usize {
    2 * (size_of::<Control>() + capacity)
}

/// Returns one side of the two rings of a link: side 0 produces what side 1 consumes, and vice
/// versa.
pub(super) fn pair(region: Arc<Region>, side: usize) -> (Producer, Consumer) {
    let capacity = region.len() / 2 - size_of::<Control>();
    assert!(capacity > FOR_THE_LAST && capacity.is_multiple_of(128), "a region of {} bytes", region.len());
    let memory = |ring: usize| RingMemory { region: region.clone(), offset: ring * (size_of::<Control>() + capacity), capacity };
    (Producer { memory: memory(side), head: 0, tail: 0 }, Consumer { memory: memory(1 - side), tail: 0, head: 0 })
}

impl Producer {
    /// Takes bytes from the front of `parts` while there is room. Returns how many, and whether to
    /// wake the consumer.
    pub(super) fn push(&mut self, parts: &[RawSlice]) -> Result<(usize, bool), Cause> {
        self.push_up_to(parts, FOR_THE_LAST)
    }

    /// Takes the last bytes of the stream, at most [`FOR_THE_LAST`], for which there is always
    /// room. Returns whether to wake the consumer.
    pub(super) fn push_last(&mut self, part: RawSlice) -> Result<bool, Cause> {
        debug_assert!(part.len <= FOR_THE_LAST);
        self.push_up_to(&[part], 0).map(|(_, wake)| wake)
    }

    /// As [`Producer::push`], but leaves `kept` bytes free.
    fn push_up_to(&mut self, parts: &[RawSlice], kept: usize) -> Result<(usize, bool), Cause> {
        let wanted: usize = parts.iter().map(|part| part.len).sum();
        if self.room() < wanted + kept {
            self.look(Ordering::Acquire)?;
        }
        let mut room = self.room().saturating_sub(kept).min(wanted);
        let taken = room;
        for part in parts {
            let mut rest = part.take(room);
            room -= rest.len;
            while rest.len > 0 {
                let to = self.memory.stretch(self.head, rest.len);
                // SAFETY: the consumer has read these bytes of the ring, so only this side uses
                // them. The caller vouches for the part.
                unsafe { std::ptr::copy_nonoverlapping(rest.ptr, to.ptr, to.len) };
                self.head += to.len as u64;
                rest = rest.skip(to.len);
            }
        }
        if taken == 0 {
            return Ok((0, false));
        }
        let control = self.memory.control();
        // This releases the bytes. It is sequentially consistent because of the flag.
        control.head.store(self.head, Ordering::SeqCst);
        Ok((taken, claim(&control.consumer_sleeps)))
    }

    fn room(&self) -> usize {
        self.memory.capacity - (self.head - self.tail) as usize
    }

    /// Reads the consumer's counter, and acquires the room that it gave back.
    fn look(&mut self, order: Ordering) -> Result<(), Cause> {
        let tail = self.memory.control().tail.load(order);
        if tail < self.tail || tail > self.head {
            return Err(Cause::Corrupt("a ring's tail is not within its bytes"));
        }
        self.tail = tail;
        Ok(())
    }

    /// Announces a sleep; returns false if there is room.
    pub(super) fn arm(&mut self) -> bool {
        self.memory.control().producer_sleeps.store(1, Ordering::SeqCst);
        // A corrupt counter is reported by the next push.
        self.look(Ordering::SeqCst).is_ok() && self.room() <= FOR_THE_LAST
    }

    pub(super) fn disarm(&mut self) {
        self.memory.control().producer_sleeps.store(0, Ordering::Relaxed);
    }

    /// Ends the stream.
    pub(super) fn close(&mut self) {
        self.memory.control().closed.store(1, Ordering::SeqCst);
    }
}

impl Consumer {
    /// Returns bytes that have arrived, up to the end of the buffer, at most `want`.
    pub(super) fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.head - self.tail < want as u64 {
            self.look(Ordering::Acquire)?;
        }
        let len = want.min((self.head - self.tail) as usize);
        Ok(self.memory.stretch(self.tail, len).as_const())
    }

    /// Gives bytes back to the producer. Returns whether to wake it.
    pub(super) fn consume(&mut self, count: usize) -> bool {
        self.tail += count as u64;
        debug_assert!(self.tail <= self.head);
        let control = self.memory.control();
        // This releases the room. It is sequentially consistent because of the flag.
        control.tail.store(self.tail, Ordering::SeqCst);
        claim(&control.producer_sleeps)
    }

    /// Reads the producer's counter, and acquires the bytes that it wrote.
    fn look(&mut self, order: Ordering) -> Result<(), Cause> {
        let head = self.memory.control().head.load(order);
        if head < self.head || head - self.tail > self.memory.capacity as u64 {
            return Err(Cause::Corrupt("a ring's head is not within its bytes"));
        }
        self.head = head;
        Ok(())
    }

    /// Announces a sleep; returns false if there are bytes, or the stream has ended.
    pub(super) fn arm(&mut self) -> bool {
        self.memory.control().consumer_sleeps.store(1, Ordering::SeqCst);
        !self.is_closed() && self.look(Ordering::SeqCst).is_ok() && self.head == self.tail
    }

    pub(super) fn disarm(&mut self) {
        self.memory.control().consumer_sleeps.store(0, Ordering::Relaxed);
    }

    /// Returns whether the producer has ended the stream. Bytes may still be in the ring: read them
    /// after this call.
    pub(super) fn is_closed(&self) -> bool {
        self.memory.control().closed.load(Ordering::SeqCst) != 0
    }
}

/// Returns whether the other side sleeps, and clears its flag: the caller must then wake it.
fn claim(sleeps: &AtomicU32) -> bool {
    sleeps.load(Ordering::SeqCst) != 0 && sleeps.swap(0, Ordering::SeqCst) != 0
}
