//! A bounded stream of bytes from one rank to another through memory that both reach.
//!
//! The producer owns `head`, the number of bytes ever written, the consumer `tail`, the number ever read; what lies between
//! is in the buffer, at positions modulo its size. Each side reads the other's counter only when its last copy of it does
//! not suffice, so that in a steady stream the counters' cache lines rarely move.
//!
//! A side that is about to sleep says so in a flag and then looks at the other's counter once more; the other side writes its
//! counter and then looks at the flag. All four are sequentially consistent, so at least one of them sees the other: no wake
//! is lost.
//!
//! The peer's counter is untrusted: it is checked before it is used.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys::Segment;

/// Bytes of a ring that only [`Producer::push_last`] uses: a rank that leaves can always say so.
pub(super) const FOR_THE_LAST: usize = 64;

/// What the two sides say to each other. Starts zeroed.
#[repr(C)]
struct Control {
    /// Written by the producer.
    head: CachePadded<AtomicU64>,
    /// Written by the consumer.
    tail: CachePadded<AtomicU64>,
    /// Set by a producer that waits for room, cleared by whoever wakes it.
    producer_sleeps: CachePadded<AtomicU32>,
    /// Set by a consumer that waits for bytes, cleared by whoever wakes it.
    consumer_sleeps: CachePadded<AtomicU32>,
    /// Set by a producer that will write no more.
    closed: AtomicU32,
}

/// Where a ring lies: its control block, then its bytes.
#[derive(Clone)]
struct RingMemory {
    segment: Arc<Segment>,
    offset: usize,
    capacity: usize,
}

// SAFETY of all accesses below: `pair` checked that the segment holds both rings, the segment lives as long as the place
// does, its memory started zeroed (a valid Control), and the control block is only touched through its atomics.
impl RingMemory {
    fn control(&self) -> &Control {
        // SAFETY: see above; the offset is a multiple of the block's alignment.
        unsafe { &*self.segment.at(self.offset).cast::<Control>() }
    }

    /// The bytes from a stream position to the end of the buffer, at most `len`.
    fn stretch(&self, position: u64, len: usize) -> RawSliceMut {
        let at = position as usize % self.capacity;
        let start = self.offset + size_of::<Control>() + at;
        RawSliceMut { ptr: self.segment.at(start), len: len.min(self.capacity - at) }
    }
}

pub(super) struct Producer {
    place: RingMemory,
    head: u64,
    /// The consumer's counter as last seen.
    tail: u64,
}

pub(super) struct Consumer {
    place: RingMemory,
    tail: u64,
    /// The producer's counter as last seen.
    head: u64,
}

/// Bytes that a segment needs for two rings of `capacity` each.
pub(super) const fn pair_size(capacity: usize) -> usize {
    2 * (size_of::<Control>() + capacity)
}

/// The two rings of one link: what side 0 produces, side 1 consumes, and the other way round.
pub(super) fn pair(segment: Arc<Segment>, side: usize) -> (Producer, Consumer) {
    let capacity = segment.len() / 2 - size_of::<Control>();
    assert!(capacity > FOR_THE_LAST && capacity.is_multiple_of(128), "a segment of {} bytes", segment.len());
    let place = |ring: usize| RingMemory { segment: segment.clone(), offset: ring * (size_of::<Control>() + capacity), capacity };
    (Producer { place: place(side), head: 0, tail: 0 }, Consumer { place: place(1 - side), tail: 0, head: 0 })
}

impl Producer {
    /// Takes bytes from the front of `parts` as long as there is room. True as well if the consumer has to be woken.
    pub(super) fn push(&mut self, parts: &[RawSlice]) -> Result<(usize, bool), Cause> {
        self.push_up_to(parts, FOR_THE_LAST)
    }

    /// As [`Producer::push`], of the last bytes of the stream, at most [`FOR_THE_LAST`]: there is room for them.
    pub(super) fn push_last(&mut self, part: RawSlice) -> Result<bool, Cause> {
        debug_assert!(part.len <= FOR_THE_LAST);
        self.push_up_to(&[part], 0).map(|(_, wake)| wake)
    }

    /// Leaves `kept` bytes free.
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
                let to = self.place.stretch(self.head, rest.len);
                // SAFETY: the consumer has read past these bytes of the ring, and the caller vouches for the part.
                unsafe { std::ptr::copy_nonoverlapping(rest.ptr, to.ptr, to.len) };
                self.head += to.len as u64;
                rest = rest.skip(to.len);
            }
        }
        if taken == 0 {
            return Ok((0, false));
        }
        let control = self.place.control();
        // Releases the bytes; sequentially consistent for the flag.
        control.head.store(self.head, Ordering::SeqCst);
        Ok((taken, claim(&control.consumer_sleeps)))
    }

    fn room(&self) -> usize {
        self.place.capacity - (self.head - self.tail) as usize
    }

    /// Reads the consumer's counter; acquires the room that it gave back.
    fn look(&mut self, order: Ordering) -> Result<(), Cause> {
        let tail = self.place.control().tail.load(order);
        if tail < self.tail || tail > self.head {
            return Err(Cause::Corrupt("a ring's tail is not within its bytes"));
        }
        self.tail = tail;
        Ok(())
    }

    /// Announces a sleep; false if there is room.
    pub(super) fn arm(&mut self) -> bool {
        self.place.control().producer_sleeps.store(1, Ordering::SeqCst);
        // A corrupt counter is reported by the next push.
        self.look(Ordering::SeqCst).is_ok() && self.room() <= FOR_THE_LAST
    }

    pub(super) fn disarm(&mut self) {
        self.place.control().producer_sleeps.store(0, Ordering::Relaxed);
    }

    /// No more bytes will come.
    pub(super) fn close(&mut self) {
        self.place.control().closed.store(1, Ordering::SeqCst);
    }
}

impl Consumer {
    /// The bytes that have arrived, up to the end of the buffer; at most `want`.
    pub(super) fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.head - self.tail < want as u64 {
            self.look(Ordering::Acquire)?;
        }
        let len = want.min((self.head - self.tail) as usize);
        Ok(self.place.stretch(self.tail, len).as_const())
    }

    /// Gives bytes back to the producer. True if it has to be woken.
    pub(super) fn consume(&mut self, count: usize) -> bool {
        self.tail += count as u64;
        debug_assert!(self.tail <= self.head);
        let control = self.place.control();
        // Releases the room; sequentially consistent for the flag.
        control.tail.store(self.tail, Ordering::SeqCst);
        claim(&control.producer_sleeps)
    }

    /// Reads the producer's counter; acquires the bytes that it wrote.
    fn look(&mut self, order: Ordering) -> Result<(), Cause> {
        let head = self.place.control().head.load(order);
        if head < self.head || head - self.tail > self.place.capacity as u64 {
            return Err(Cause::Corrupt("a ring's head is not within its bytes"));
        }
        self.head = head;
        Ok(())
    }

    /// Announces a sleep; false if there are bytes, or will be none.
    pub(super) fn arm(&mut self) -> bool {
        self.place.control().consumer_sleeps.store(1, Ordering::SeqCst);
        !self.is_closed() && self.look(Ordering::SeqCst).is_ok() && self.head == self.tail
    }

    pub(super) fn disarm(&mut self) {
        self.place.control().consumer_sleeps.store(0, Ordering::Relaxed);
    }

    /// Whether the producer has closed its end. There may still be bytes: look for them after this.
    pub(super) fn is_closed(&self) -> bool {
        self.place.control().closed.load(Ordering::SeqCst) != 0
    }
}

/// Takes over the duty to wake a sleeper, if there is one.
fn claim(sleeps: &AtomicU32) -> bool {
    sleeps.load(Ordering::SeqCst) != 0 && sleeps.swap(0, Ordering::SeqCst) != 0
}
