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
//! # Exposed memory
//!
//! A producer may expose a stretch of the stream instead of copying it to the buffer: it writes the
//! address, and the consumer has the system copy the bytes from the producer's memory. The
//! consumer's `tail` passes over the stretch as it is read, and that is how the producer learns
//! that the memory is its caller's again. Before a page is read, the producer has touched it: see
//! [`RawSlice::fault_in`]. A consumer that cannot read the memory refuses, and then
//! the producer copies. A producer that takes the memory back earlier closes the ring first; a
//! consumer looks at that after each copy, and does not use what it copied too late.
//!
//! The peer's counter is untrusted, and is checked before it is used.

use std::sync::Arc;
use std::sync::atomic::fence;

use crossbeam_utils::CachePadded;

use super::ALIGN;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::reduce;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys::Region;

/// Bytes of a ring that only [`Producer::push_last`] uses, so that a rank that leaves can always
/// tell its peer.
pub(super) const FOR_THE_LAST: usize = 64;

/// Bytes that one side copies before it tells the other, so that both copy at the same time.
pub(super) const PORTION: usize = 16 << 10;

/// Fewer bytes are copied: a system call would take longer.
const LEAST_EXPOSED: usize = 16 << 10;

/// Bytes of exposed memory whose pages the producer touches before it shows them to the consumer. It touches
/// the next ones while the consumer reads these.
const TOUCHED: usize = 256 << 10;

/// Bytes that it touches before it does something else.
const MOST_TOUCHED: usize = 4 << 20;

/// How often a producer looks whether the consumer waits for memory that would fit in the ring,
/// before it copies: for about as long as the copy takes.
const CHANCES: u32 = 64;

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
    /// Written by the producer, `start` last.
    exposed: CachePadded<ExposedWords>,
    /// Written by the consumer.
    consumer: CachePadded<ConsumerWords>,
}

#[repr(C)]
struct ExposedWords {
    /// The stream position of what was exposed last, plus one; 0 if nothing was.
    start: AtomicU64,
    /// The address in the producer's process.
    address: AtomicU64,
    len: AtomicU64,
    /// The stream position up to which the consumer may read: the pages are there.
    ready_to: AtomicU64,
}

#[repr(C)]
struct ConsumerWords {
    /// Whether the consumer has looked for bytes since it read the last ones.
    waits: AtomicU32,
    /// Whether it cannot read the producer's memory.
    refuses: AtomicU32,
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

    /// Returns the bytes from a position in the buffer to its end, at most `len`. The position
    /// counts the bytes that went through the buffer.
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
    /// Bytes of the stream that were exposed.
    skipped: u64,
    /// What is exposed and has not been read, if anything is. It is the stretch from `head` on.
    exposed: Option<Exposed>,
    /// Whether the consumer may be able to read this process's memory.
    exposes: bool,
    /// How often the consumer did not wait for this memory, which would fit in the ring.
    asked: u32,
}

/// Memory that a producer has exposed.
struct Exposed {
    memory: RawSlice,
    /// How many of its bytes the consumer may read.
    ready: usize,
}

pub(super) struct Consumer {
    memory: RingMemory,
    tail: u64,
    /// The producer's counter as last seen, or the end of what was read of exposed memory.
    head: u64,
    /// Bytes of the stream that were exposed.
    skipped: u64,
    /// Where what was exposed last started: until the producer has seen its end, its counter is still
    /// there.
    exposed_start: u64,
    /// Where it ends, and the address of what has not been read of it.
    exposed_end: u64,
    exposed_address: u64,
    waits: bool,
    refuses: bool,
}

/// Memory of the producer's process that is the next stretch of the stream.
pub(super) struct Readable {
    pub(super) address: u64,
    pub(super) len: usize,
    /// Whether these are the last bytes that are exposed.
    pub(super) is_last: bool,
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
    let producer = Producer { memory: memory(side), head: 0, tail: 0, skipped: 0, exposed: None, exposes: true, asked: 0 };
    let memory = memory(1 - side);
    let consumer = Consumer {
        memory,
        tail: 0,
        head: 0,
        skipped: 0,
        exposed_start: 0,
        exposed_end: 0,
        exposed_address: 0,
        waits: false,
        refuses: false,
    };
    (producer, consumer)
}

impl Producer {
    /// Takes bytes from the front of `parts` while there is room. Returns how many, and whether to
    /// wake the consumer.
    pub(super) fn push(&mut self, parts: &[RawSlice]) -> Result<(usize, bool), Cause> {
        self.asked = 0;
        self.push_up_to(parts, FOR_THE_LAST)
    }

    /// Takes all of `parts` if there is room. Returns whether to wake the consumer; `None` if there is
    /// no room.
    pub(super) fn push_whole(&mut self, parts: &[RawSlice]) -> Result<Option<bool>, Cause> {
        let wanted: usize = parts.iter().map(|part| part.len).sum();
        if self.room() < wanted + FOR_THE_LAST {
            self.look(Ordering::Acquire)?;
        }
        if self.room() < wanted + FOR_THE_LAST {
            return Ok(None);
        }
        self.push(parts).map(|(_, wake)| Some(wake))
    }

    /// Takes the last bytes of the stream, at most [`FOR_THE_LAST`], for which there is always
    /// room. Returns whether to wake the consumer.
    pub(super) fn push_last(&mut self, part: RawSlice) -> Result<bool, Cause> {
        debug_assert!(part.len <= FOR_THE_LAST && self.exposed.is_none());
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
        let mut wake = false;
        let mut published = self.head;
        for part in parts {
            let mut rest = part.take(room);
            room -= rest.len;
            while rest.len > 0 {
                let to = self.memory.stretch(self.head - self.skipped, rest.len.min(PORTION));
                // SAFETY: the consumer has read these bytes of the ring, so only this side uses
                // them. The caller vouches for the part.
                unsafe { reduce::copy(rest.ptr, to.ptr, to.len) };
                self.head += to.len as u64;
                rest = rest.skip(to.len);
                if self.head - published >= PORTION as u64 {
                    wake |= self.publish();
                    published = self.head;
                }
            }
        }
        if self.head > published {
            wake |= self.publish();
        }
        Ok((taken, wake))
    }

    /// Shows the consumer what has been written. Returns whether to wake it.
    fn publish(&mut self) -> bool {
        let control = self.memory.control();
        // This releases the bytes. It is sequentially consistent because of the flag.
        control.head.store(self.head, Ordering::SeqCst);
        claim(&control.consumer_sleeps)
    }

    /// Exposes the memory after `before` to the consumer, if that takes less time than copying it:
    /// the consumer waits for it, or it does not fit in the ring. Returns how many bytes the stream
    /// has taken of both, and whether to wake the consumer; `None` if it does not expose.
    ///
    /// The memory stays readable until the stream has taken it or the ring is closed.
    pub(super) fn expose(&mut self, before: RawSlice, memory: RawSlice) -> Result<Option<(usize, bool)>, Cause> {
        if self.exposed.is_some() {
            return self.settle();
        }
        // Whole units, so that the stream stays aligned.
        let len = memory.len - memory.len % ALIGN;
        if !self.exposes || len < LEAST_EXPOSED {
            return Ok(None);
        }
        let control = self.memory.control();
        let is_awaited = control.consumer.waits.load(Ordering::Relaxed) != 0;
        if !is_awaited && len + before.len + FOR_THE_LAST <= self.memory.capacity {
            // The consumer may come while this side would copy.
            self.asked += 1;
            return Ok((self.asked < CHANCES).then_some((0, false)));
        }
        self.asked = 0;
        let (taken, wake) = self.push(&[before])?;
        if taken < before.len {
            return Ok(Some((taken, wake)));
        }
        let mut exposed = Exposed { memory: memory.take(len), ready: 0 };
        exposed.prepare();
        let control = self.memory.control();
        control.exposed.address.store(memory.ptr.expose_provenance() as u64, Ordering::Relaxed);
        control.exposed.len.store(len as u64, Ordering::Relaxed);
        control.exposed.ready_to.store(self.head + exposed.ready as u64, Ordering::Relaxed);
        // This releases the three. It is sequentially consistent because of the flag.
        control.exposed.start.store(self.head + 1, Ordering::SeqCst);
        let wake = wake | claim(&control.consumer_sleeps) | exposed.prepare_more(self.head, control);
        self.exposed = Some(exposed);
        Ok(Some((taken, wake)))
    }

    /// Returns how many bytes more the consumer has read of what is exposed; `None` if it refuses.
    pub(super) fn settle(&mut self) -> Result<Option<(usize, bool)>, Cause> {
        let Some(exposed) = &mut self.exposed else { return Ok(None) };
        let control = self.memory.control();
        // Acquires the reads of the memory, which the caller may then change.
        let tail = control.tail.load(Ordering::Acquire);
        if tail < self.tail || tail > self.head + exposed.ready as u64 {
            return Err(Cause::Corrupt("a ring's tail is not within its bytes"));
        }
        self.tail = tail;
        if tail <= self.head {
            if control.consumer.refuses.load(Ordering::Acquire) == 0 {
                return Ok(Some((0, exposed.prepare_more(self.head, control))));
            }
            (self.exposed, self.exposes) = (None, false);
            return Ok(None);
        }
        let read = tail - self.head;
        (self.head, self.skipped) = (tail, self.skipped + read);
        *exposed = Exposed { memory: exposed.memory.skip(read as usize), ready: exposed.ready - read as usize };
        let wake = exposed.prepare_more(tail, control);
        if exposed.memory.len == 0 {
            self.exposed = None;
            control.head.store(tail, Ordering::Release);
        }
        Ok(Some((read as usize, wake)))
    }

    /// Whether a stretch is exposed.
    pub(super) fn has_exposed(&self) -> bool {
        self.exposed.is_some()
    }

    /// Exposes no more: the consumer cannot read this process's memory.
    pub(super) fn never_expose(&mut self) {
        self.exposes = false;
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
        let control = self.memory.control();
        control.producer_sleeps.store(1, Ordering::SeqCst);
        if let Some(exposed) = &self.exposed {
            let is_refused = control.consumer.refuses.load(Ordering::SeqCst) != 0;
            return !is_refused && exposed.ready == exposed.memory.len && control.tail.load(Ordering::SeqCst) <= self.head;
        }
        // A corrupt counter is reported by the next push.
        self.look(Ordering::SeqCst).is_ok() && self.room() <= FOR_THE_LAST
    }

    pub(super) fn disarm(&mut self) {
        self.memory.control().producer_sleeps.store(0, Ordering::Relaxed);
    }

    /// Ends the stream.
    pub(super) fn close(&mut self) {
        self.memory.control().closed.store(1, Ordering::SeqCst);
        // Before the memory that is exposed changes. The consumer looks at the two in the other order.
        fence(Ordering::SeqCst);
    }
}

impl Exposed {
    /// Touches the next pages.
    fn prepare(&mut self) {
        let next = self.memory.skip(self.ready).take(TOUCHED);
        // SAFETY: whoever exposed the memory vouches for it until it has been read.
        unsafe { next.fault_in() };
        self.ready += next.len;
    }

    /// Touches more pages and shows them to the consumer. The stretch starts at `head`. Returns
    /// whether to wake the consumer.
    fn prepare_more(&mut self, head: u64, control: &Control) -> bool {
        let most = self.memory.len.min(self.ready + MOST_TOUCHED);
        let mut wake = false;
        while self.ready < most {
            self.prepare();
            // It is sequentially consistent because of the flag.
            control.exposed.ready_to.store(head + self.ready as u64, Ordering::SeqCst);
            wake |= claim(&control.consumer_sleeps);
        }
        wake
    }
}

impl Consumer {
    /// Returns bytes that have arrived, up to the end of the buffer, at most `want`.
    pub(super) fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.head - self.tail < want as u64 {
            self.look(Ordering::Acquire)?;
        }
        let len = want.min((self.head - self.tail) as usize);
        if self.waits != (len == 0) {
            self.waits = len == 0;
            self.memory.control().consumer.waits.store(self.waits.into(), Ordering::Relaxed);
        }
        Ok(self.memory.stretch(self.tail - self.skipped, len).as_const())
    }

    /// Returns what may be read of exposed memory, if the next byte of the stream is exposed.
    pub(super) fn readable(&mut self) -> Option<Readable> {
        if self.tail < self.exposed_end {
            return self.rest_readable();
        }
        let exposed = &self.memory.control().exposed;
        // Acquires the others. Memory that starts here has not been read, so the producer does
        // not change them; those of any other may change while they are read.
        if self.refuses || self.tail != self.head || exposed.start.load(Ordering::SeqCst) != self.tail + 1 {
            return None;
        }
        self.exposed_address = exposed.address.load(Ordering::Relaxed);
        let len = exposed.len.load(Ordering::Relaxed);
        self.exposed_start = self.tail;
        self.exposed_end = self.tail.checked_add(len)?;
        self.rest_readable()
    }

    /// Returns what may be read of the exposed memory now.
    fn rest_readable(&self) -> Option<Readable> {
        let ready_to = self.memory.control().exposed.ready_to.load(Ordering::SeqCst).min(self.exposed_end);
        let len = ready_to.checked_sub(self.tail).filter(|&len| len > 0)?;
        Some(Readable { address: self.exposed_address, len: len as usize, is_last: ready_to == self.exposed_end })
    }

    /// Notes that bytes of the exposed memory have been read. Returns whether to wake the producer.
    pub(super) fn read_exposed(&mut self, count: usize) -> bool {
        if self.waits {
            self.waits = false;
            self.memory.control().consumer.waits.store(0, Ordering::Relaxed);
        }
        self.exposed_address = self.exposed_address.wrapping_add(count as u64);
        self.head += count as u64;
        self.skipped += count as u64;
        self.consume(count)
    }

    /// Refuses the exposed memory and all later. Returns whether to wake the producer, which copies now.
    pub(super) fn refuse(&mut self) -> bool {
        self.refuses = true;
        self.exposed_end = self.tail;
        let control = self.memory.control();
        control.consumer.refuses.store(1, Ordering::SeqCst);
        claim(&control.producer_sleeps)
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
        if head < self.head && head == self.exposed_start {
            return Ok(());
        }
        if head < self.head || head - self.tail > self.memory.capacity as u64 {
            return Err(Cause::Corrupt("a ring's head is not within its bytes"));
        }
        self.head = head;
        Ok(())
    }

    /// Announces a sleep; returns false if there are bytes, or the stream has ended.
    pub(super) fn arm(&mut self) -> bool {
        self.memory.control().consumer_sleeps.store(1, Ordering::SeqCst);
        // All of these with the flag set.
        self.readable().is_none() && !self.is_closed() && self.look(Ordering::SeqCst).is_ok() && self.head == self.tail
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
