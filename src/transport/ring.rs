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
//! # Growth
//!
//! A line that the producer writes again while the consumer's second-level cache still has it takes
//! twice as long to write, so a ring in which large messages are copied is larger than that cache. A
//! ring is small at first: most never carry a large message. It grows while it is empty, so that all
//! bytes in it are at positions modulo the same size. The consumer reads the size after the counter
//! that shows it the first byte that was written since.
//!
//! # Times
//!
//! See [`super::copying`]. The producer says which bytes it wants timed, before it shows them. The
//! consumer adds up how long its reader had those bytes, as far as they came in pieces that are worth a
//! reading of the clock, and says where they ended, and how long that was.
//!
//! The peer's words are untrusted, and are checked before they are used.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crossbeam_utils::CachePadded;

use super::copying::{Copying, LEAST};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config::CopyMode;
use crate::error::Cause;
use crate::reduce;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys::{Region, ticks};

/// Bytes of a ring that only [`Producer::push_last`] uses, so that a rank that leaves can always
/// tell its peer.
pub(super) const FOR_THE_LAST: usize = 64;

/// Bytes that one side copies before it tells the other, so that both copy at the same time.
pub(super) const PORTION: usize = 16 << 10;

/// Bytes of a ring at first, if it may grow. That is large enough that neither side of a stream waits for
/// each step of the other, and small enough for many links.
pub(super) const AT_FIRST: usize = 128 << 10;

/// Bytes of a ring that has grown: at least the second-level cache of a core.
pub(super) const GROWN: usize = 2 << 20;

/// Fewer bytes are shown together with those before them, so that the consumer finds both at once: also the
/// header of a message of [`PORTION`].
const SHORT_REST: usize = 4 << 10;

/// Fewer bytes take about as long to read as the clock.
const LEAST_TIMED: usize = 2 << 10;

/// The rings that may grow in one process, while their links live. Later ones stay small, so that a host
/// whose ranks all send to each other keeps its memory.
const MOST_GROWN: usize = 16;

/// The rings of this process that have grown.
static GROWN_RINGS: AtomicUsize = AtomicUsize::new(0);

/// The words through which the two sides synchronise. They start as zeros.
#[repr(C)]
struct Control {
    /// Written by the producer.
    head: CachePadded<HeadWords>,
    /// Written by the consumer.
    tail: CachePadded<AtomicU64>,
    /// Set by a producer that waits for room, cleared by the side that wakes it.
    producer_sleeps: CachePadded<AtomicU32>,
    /// Set by a consumer that waits for bytes, cleared by the side that wakes it.
    consumer_sleeps: CachePadded<AtomicU32>,
    /// Set by a producer that writes no more.
    closed: AtomicU32,
    /// Written by the consumer.
    timed: CachePadded<TimedWords>,
}

#[repr(C)]
struct HeadWords {
    head: AtomicU64,
    /// The bytes of the ring if it has grown; 0 before.
    capacity: AtomicU64,
    /// The bytes of the stream for which the consumer is to time how long it takes to read them.
    timed_from: AtomicU64,
    timed_to: AtomicU64,
}

#[repr(C)]
struct TimedWords {
    /// Where the bytes ended that the consumer has timed last.
    to: AtomicU64,
    ticks: AtomicU64,
}

/// The memory of a ring: its control block, then its bytes.
#[derive(Clone)]
struct RingMemory {
    region: Arc<Region>,
    offset: usize,
    /// The bytes that are used: a power of two.
    capacity: usize,
    /// The bytes that may be used later.
    room: usize,
}

// SAFETY of all accesses below: `pair` has checked that the region holds both rings. The region
// lives as long as this value. Its memory starts zeroed, which is a valid Control, and the control
// block is accessed through its atomics only.
impl RingMemory {
    fn control(&self) -> &Control {
        // SAFETY: see above. The offset is a multiple of the block's alignment.
        unsafe { &*self.region.at(self.offset).cast::<Control>() }
    }

    /// Returns the bytes from a position of the stream to the end of the buffer, at most `len`.
    fn stretch(&self, position: u64, len: usize) -> RawSliceMut {
        let at = position as usize & (self.capacity - 1);
        let start = self.offset + size_of::<Control>() + at;
        RawSliceMut { ptr: self.region.at(start), len: len.min(self.capacity - at) }
    }
}

pub(super) struct Producer {
    memory: RingMemory,
    head: u64,
    /// The consumer's counter as last seen.
    tail: u64,
    copying: Copying,
    /// Whether this ring is counted in [`GROWN_RINGS`].
    has_grown: bool,
}

pub(super) struct Consumer {
    memory: RingMemory,
    tail: u64,
    /// The producer's counter as last seen.
    head: u64,
    /// When the bytes were shown that the reader has now, if they are timed.
    shown_at: Option<u64>,
    /// How long the reader had the timed bytes before them.
    ticks: u64,
    /// The end of the timed bytes of which the producer was told last.
    timed_to: u64,
}

/// Returns the bytes of a region for two rings of at most `room` bytes each.
pub(super) const fn pair_size(room: usize) -> usize {
    2 * (size_of::<Control>() + room)
}

/// Returns the bytes of such a region that each ring uses at first.
pub(super) fn at_first(region: &Region) -> [Range<usize>; 2] {
    let half = region.len() / 2;
    [0, half].map(|start| start..(start + size_of::<Control>() + AT_FIRST).min(start + half))
}

/// Returns one side of the two rings of a link: side 0 produces what side 1 consumes, and vice
/// versa.
pub(super) fn pair(region: Arc<Region>, side: usize, copy_mode: CopyMode) -> (Producer, Consumer) {
    let room = region.len() / 2 - size_of::<Control>();
    assert!(room > FOR_THE_LAST && room.is_power_of_two(), "a region of {} bytes", region.len());
    let memory = |ring: usize| {
        let (region, offset) = (region.clone(), ring * (size_of::<Control>() + room));
        RingMemory { region, offset, capacity: if room < GROWN { room } else { AT_FIRST }, room }
    };
    let producer = Producer { memory: memory(side), head: 0, tail: 0, copying: Copying::new(copy_mode), has_grown: false };
    (producer, Consumer { memory: memory(1 - side), tail: 0, head: 0, shown_at: None, ticks: 0, timed_to: 0 })
}

impl Producer {
    /// Takes bytes from the front of `parts` while there is room. Returns how many, and whether to
    /// wake the consumer.
    pub(super) fn push(&mut self, parts: &[RawSlice]) -> Result<(usize, bool), Cause> {
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
        if let [part] = parts
            && part.len < LEAST
            && let to = self.memory.stretch(self.head, part.len)
            && to.len == part.len
        {
            // SAFETY: there is room, so only this side uses these bytes. The caller vouches for the part.
            unsafe { reduce::copy(part.ptr, to.ptr, to.len) };
            self.head += to.len as u64;
            return Ok(Some(self.publish()));
        }
        self.push(parts).map(|(_, wake)| Some(wake))
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
        let may_grow = wanted >= LEAST && self.memory.capacity < self.memory.room;
        if may_grow || self.room() < wanted + kept {
            self.look(Ordering::Acquire)?;
        }
        let mut taken = self.room().saturating_sub(kept).min(wanted);
        if taken == 0 {
            return Ok((0, false));
        }
        let timed = &self.memory.control().timed;
        let read = || (timed.to.load(Ordering::Acquire), timed.ticks.load(Ordering::Relaxed));
        let way = self.copying.way(wanted, taken, read);
        if may_grow && !way.is_streamed && self.tail == self.head {
            self.grow();
            taken = self.room().saturating_sub(kept).min(wanted);
        }
        let mut room = taken;
        let mut wake = false;
        let mut published = self.head;
        let (from, began) = (self.head, way.begin());
        if began.is_some() {
            // The counter releases them.
            self.memory.control().head.timed_from.store(from, Ordering::Relaxed);
            self.memory.control().head.timed_to.store(from + taken as u64, Ordering::Relaxed);
        }
        for part in parts {
            let mut rest = part.take(room);
            room -= rest.len;
            while rest.len > 0 {
                let to = self.memory.stretch(self.head, rest.len.min(PORTION));
                // SAFETY: the consumer has read these bytes of the ring, so only this side uses
                // them. The caller vouches for the part.
                unsafe { way.copy(rest.ptr, to.ptr, to.len) };
                self.head += to.len as u64;
                rest = rest.skip(to.len);
                if self.head - published >= PORTION as u64 && room + rest.len >= SHORT_REST {
                    wake |= self.publish();
                    published = self.head;
                }
            }
        }
        if self.head > published {
            wake |= self.publish();
        }
        self.copying.ended(way, began, from..self.head);
        Ok((taken, wake))
    }

    /// Uses all memory of the ring, which is empty, from now on; or never, if others do or if there is no
    /// memory.
    #[cold]
    fn grow(&mut self) {
        let one_more = |rings: usize| (rings < MOST_GROWN).then_some(rings + 1);
        self.has_grown = GROWN_RINGS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok();
        let RingMemory { region, offset, capacity, room } = &mut self.memory;
        let start = *offset + size_of::<Control>();
        if !self.has_grown {
            *room = *capacity;
            return;
        }
        if let Err(error) = region.provide(start + *capacity..start + *room) {
            crate::log::debug!(%error, "a link stays small, because the system provides no memory");
            *room = *capacity;
            self.has_grown = false;
            GROWN_RINGS.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        *capacity = *room;
        // The counter that shows the next byte releases it.
        self.memory.control().head.capacity.store(self.memory.room as u64, Ordering::Relaxed);
    }

    /// Shows the consumer what has been written. Returns whether to wake it.
    fn publish(&mut self) -> bool {
        let control = self.memory.control();
        // This releases the bytes. It is sequentially consistent because of the flag.
        control.head.head.store(self.head, Ordering::SeqCst);
        claim(&control.consumer_sleeps)
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

impl Drop for Producer {
    fn drop(&mut self) {
        if self.has_grown {
            GROWN_RINGS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Consumer {
    /// Returns bytes that have arrived, up to the end of the buffer, at most `want`.
    pub(super) fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.head - self.tail < want as u64 {
            self.look(Ordering::Acquire)?;
        }
        let len = want.min((self.head - self.tail) as usize);
        if len >= LEAST_TIMED {
            self.time();
        }
        Ok(self.memory.stretch(self.tail, len).as_const())
    }

    /// Notes that the next bytes are shown, if the producer wants to know how long they take.
    fn time(&mut self) {
        let words = &self.memory.control().head;
        let to = words.timed_to.load(Ordering::Relaxed);
        if to == self.timed_to {
            return;
        }
        if self.tail >= to {
            self.tell_time(to);
        } else if self.tail >= words.timed_from.load(Ordering::Relaxed) {
            self.shown_at = Some(ticks());
        }
    }

    /// Tells the producer how long the bytes up to `to` took, as far as they were timed.
    #[cold]
    fn tell_time(&mut self, to: u64) {
        let timed = &self.memory.control().timed;
        timed.ticks.store(std::mem::take(&mut self.ticks), Ordering::Relaxed);
        // This releases them.
        timed.to.store(to, Ordering::Release);
        self.timed_to = to;
    }

    /// Gives bytes back to the producer. Returns whether to wake it.
    pub(super) fn consume(&mut self, count: usize) -> bool {
        let shown_at = self.shown_at.take();
        self.tail += count as u64;
        debug_assert!(self.tail <= self.head);
        if let Some(shown_at) = shown_at {
            self.ticks = self.ticks.saturating_add(ticks().saturating_sub(shown_at));
            let to = self.memory.control().head.timed_to.load(Ordering::Relaxed);
            // The last bytes may be too few to be timed. Then the next ones end this.
            if self.tail >= to {
                self.tell_time(to);
            }
        }
        let control = self.memory.control();
        // This releases the room. It is sequentially consistent because of the flag.
        control.tail.store(self.tail, Ordering::SeqCst);
        claim(&control.producer_sleeps)
    }

    /// Reads the producer's counter, and acquires the bytes that it wrote.
    fn look(&mut self, order: Ordering) -> Result<(), Cause> {
        let words = &self.memory.control().head;
        let head = words.head.load(order);
        if self.tail == self.head && self.memory.capacity < self.memory.room {
            // The ring may have grown when it was empty, before the next byte.
            match words.capacity.load(Ordering::Relaxed) {
                0 => {}
                capacity if capacity == self.memory.room as u64 => self.memory.capacity = self.memory.room,
                _ => return Err(Cause::Corrupt("a ring's size is not that of its memory")),
            }
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
        // Both with the flag set.
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

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    /// A ring, and what both sides have passed through it so far.
    struct Both {
        region: Arc<Region>,
        producer: Producer,
        consumer: Consumer,
        sent: u64,
        received: u64,
    }

    /// Returns bytes of a stream, whose period no ring's size is a multiple of.
    fn stream(from: u64, len: usize) -> &'static [u8] {
        const PERIOD: usize = 251;
        const LONGEST: usize = if cfg!(miri) { 2 * LEAST } else { GROWN };
        static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| (0..PERIOD + LONGEST).map(|at| (at % PERIOD) as u8).collect());
        &BYTES[(from % PERIOD as u64) as usize..][..len]
    }

    impl Both {
        fn new(room: usize, copy_mode: CopyMode) -> Both {
            let region = Arc::new(Region::heap(pair_size(room)));
            let (producer, _) = pair(region.clone(), 0, copy_mode);
            let (_, consumer) = pair(region.clone(), 1, copy_mode);
            Both { region, producer, consumer, sent: 0, received: 0 }
        }

        /// Sends up to `len` bytes; returns how many.
        fn send(&mut self, len: usize) -> usize {
            let (count, _) = self.producer.push(&[RawSlice::of(stream(self.sent, len))]).unwrap();
            self.sent += count as u64;
            count
        }

        /// Receives up to `most` bytes; returns how many.
        fn receive(&mut self, most: usize) -> usize {
            let part = self.consumer.peek(most).unwrap();
            // SAFETY: the ring shows these bytes until they are consumed.
            let bytes = unsafe { std::slice::from_raw_parts(part.ptr, part.len) };
            assert!(bytes == stream(self.received, part.len), "the {} bytes from {} on", part.len, self.received);
            self.received += part.len as u64;
            self.consumer.consume(part.len);
            part.len
        }

        fn receive_all(&mut self) {
            while self.receive(usize::MAX) > 0 {}
            assert_eq!(self.received, self.sent);
        }

        /// Whether the ring takes a message that is larger than a small one.
        fn takes_much(&mut self) -> bool {
            let count = self.send(GROWN);
            self.receive_all();
            count > AT_FIRST
        }
    }

    /// A ring that is empty grows for a large message, wherever its counters are, and its bytes stay in order.
    /// A process has few that do.
    #[test]
    #[cfg_attr(miri, ignore = "it copies many MiB")]
    fn a_ring_grows_for_large_messages_while_it_is_empty() {
        for before in [0, 48, 100 << 10, 200 << 10] {
            let mut both = Both::new(GROWN, CopyMode::Staged);
            while both.sent < before {
                both.send(1000.min((before - both.sent) as usize));
                both.receive_all();
            }
            assert_eq!(both.send(16), 16);
            assert!(both.send(GROWN) < AT_FIRST, "it was not empty");
            both.receive_all();
            assert!(both.takes_much());
            for _ in 0..5 {
                both.send(GROWN / 2);
                both.receive(GROWN / 3);
            }
            both.receive_all();
        }
        let mut grown = Vec::new();
        let mut small = loop {
            let mut next = Both::new(GROWN, CopyMode::Staged);
            if !next.takes_much() {
                break next;
            }
            grown.push(next);
            assert!(grown.len() <= MOST_GROWN);
        };
        drop(grown);
        assert!(!small.takes_much(), "it stays small");
        assert!(Both::new(GROWN, CopyMode::Staged).takes_much());
    }

    /// However the consumer cuts a part that is timed, the producer learns of its end, at the latest with the
    /// next large part.
    #[test]
    fn the_consumer_tells_how_long_a_part_took() {
        let whole = LEAST + 1000;
        for pieces in [&[whole][..], &[48, whole], &[48, LEAST_TIMED, 100, whole], &[48, LEAST, 904, 48]] {
            let mut both = Both::new(64 << 10, CopyMode::Auto);
            both.send(whole);
            let to = both.sent;
            for &piece in pieces {
                both.receive(piece);
            }
            both.receive_all();
            both.send(LEAST);
            both.receive_all();
            let timed = &both.producer.memory.control().timed;
            assert!(timed.to.load(Ordering::Relaxed) >= to, "{pieces:?}");
            assert!(timed.ticks.load(Ordering::Relaxed) > 0 || cfg!(miri), "{pieces:?}");
        }
    }

    /// What a peer writes to the words of times changes no byte.
    #[test]
    fn garbage_in_times_is_harmless() {
        let words = [
            std::mem::offset_of!(Control, head) + std::mem::offset_of!(HeadWords, timed_from),
            std::mem::offset_of!(Control, head) + std::mem::offset_of!(HeadWords, timed_to),
            std::mem::offset_of!(Control, timed) + std::mem::offset_of!(TimedWords, to),
            std::mem::offset_of!(Control, timed) + std::mem::offset_of!(TimedWords, ticks),
        ];
        for garbage in [0, 1, u64::MAX / 2, u64::MAX] {
            let mut both = Both::new(64 << 10, CopyMode::Auto);
            for turn in 0..100 {
                // SAFETY: the word is within the region and aligned, and this thread is the only one.
                unsafe { both.region.at(words[turn % words.len()]).cast::<u64>().write(garbage) };
                both.send(LEAST + turn);
                both.receive(LEAST - turn);
                both.receive_all();
            }
        }
    }
}
