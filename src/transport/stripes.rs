//! The stripes of a link over several connections: how they travel, and how the receiver joins them
//! to a stream again.
//!
//! Before each stripe, a header says where in the stream it belongs. The receiver puts a stripe where
//! it belongs if the caller has asked for those bytes, and leaves later stripes in their sockets. If
//! bytes may be sent again, they can be behind later ones. Then the receiver sets these aside.

use std::collections::BTreeMap;

use mio::net::TcpStream;

use super::link::received;
use super::receive_buffer::{BUFFER, ReceiveBuffer};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys;
use crate::trace::Traffic;

/// The most bytes of one stripe.
pub(super) const STRIPE: u64 = 128 << 10;

/// Bytes of a header: the start of the stripe (8), its length (4) and a mark (4), little-endian.
pub(super) const HEADER: usize = 16;
const MARK: u32 = 0x6b6f_7069;

/// From this many bytes on, a receive that finds the buffer empty bypasses it.
const DIRECT: usize = 16 << 10;

/// How far stripes may be ahead of the first byte that is missing. The sender goes no further, so that
/// the receiver can set aside all that lies before a stripe that was sent again.
pub(super) const MOST_AHEAD: u64 = 64 << 20;

/// The most bytes that are read at once to be dropped.
pub(super) const DROPPED: usize = 16 << 10;

/// Returns the header of the stripe from `start` to `end`.
pub(super) fn encode(start: u64, end: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&start.to_le_bytes());
    header[8..12].copy_from_slice(&((end - start) as u32).to_le_bytes());
    header[12..].copy_from_slice(&MARK.to_le_bytes());
    header
}

/// Returns the start, the length and the mark in a header.
fn decode(header: &[u8; HEADER]) -> (u64, u64, u32) {
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    (u64::from(word(0)) | u64::from(word(4)) << 32, word(8).into(), word(12))
}

/// A stripe that comes in on one connection: first its header, then the bytes from `next` to `end`.
#[derive(Default)]
pub(super) struct Incoming {
    header: [u8; HEADER],
    header_received: usize,
    /// Whether anything has come.
    pub(super) has_begun: bool,
    next: u64,
    end: u64,
    /// What has arrived of a stripe that is set aside.
    aside: Option<Vec<u8>>,
}

/// What a connection delivered.
#[derive(Default)]
pub(super) struct Delivery {
    /// Whether bytes of the stream have arrived.
    pub(super) has_moved: bool,
    /// Whether a stripe waits that is not wanted yet.
    pub(super) is_ahead: bool,
    /// The peer has closed the connection between two stripes.
    pub(super) has_ended: bool,
}

/// Where bytes of the stream go.
#[derive(Clone, Copy)]
pub(super) struct Goal {
    /// The memory for the bytes from `from` on; the receiver's own buffer if `None`.
    into: Option<RawSliceMut>,
    from: u64,
    /// Stream position before which bytes are wanted.
    limit: u64,
}

/// Joins the stripes of several connections.
pub(super) struct Joiner {
    pub(super) arrived: ReceiveBuffer,
    /// Stream position up to which everything has arrived.
    complete: u64,
    /// Ranges beyond `complete` that have arrived: start to end.
    beyond: BTreeMap<u64, u64>,
    /// Whether the ranges beyond `complete` are in `arrived`, and not in memory of the caller.
    is_buffered: bool,
    /// Whether the peer may send bytes more than once, and whether it has.
    may_repeat: bool,
    pub(super) has_repeated: bool,
    /// Stripes that are not wanted yet, by their start, and their bytes.
    aside: BTreeMap<u64, Vec<u8>>,
    bytes_aside: usize,
}

impl Joiner {
    pub(super) fn new(may_repeat: bool) -> Joiner {
        Joiner {
            arrived: ReceiveBuffer::new(),
            complete: 0,
            beyond: BTreeMap::new(),
            is_buffered: false,
            may_repeat,
            has_repeated: false,
            aside: BTreeMap::new(),
            bytes_aside: 0,
        }
    }

    /// Stream position up to which everything has arrived.
    pub(super) fn complete(&self) -> u64 {
        self.complete
    }

    /// Whether stripes are set aside.
    pub(super) fn has_aside(&self) -> bool {
        !self.aside.is_empty()
    }

    /// Returns what to read so that `want` bytes can be shown; `None` if they can be already, or if
    /// later bytes are in memory of the caller, which has to receive what is missing there. Call
    /// [`Joiner::show`] after reading.
    pub(super) fn goal_to_show(&mut self, want: usize) -> Option<Goal> {
        if !self.is_buffered && !self.beyond.is_empty() {
            return None;
        }
        let missing = want.min(BUFFER).checked_sub(self.arrived.len()).filter(|&missing| missing > 0)?;
        self.is_buffered = true;
        Some(Goal { into: None, from: self.complete, limit: self.complete + missing as u64 })
    }

    /// Shows the bytes that have arrived since the goal was set.
    pub(super) fn show(&mut self, goal: Goal) {
        self.arrived.filled((self.complete - goal.from) as usize);
    }

    /// Returns what to read so that bytes go to memory directly; `None` if they have to pass through
    /// the buffer: they are few, or later bytes wait there. Call [`Joiner::bypass`] after reading.
    pub(super) fn goal_in_memory(&mut self, into: RawSliceMut) -> Option<Goal> {
        let is_buffered = if self.beyond.is_empty() { into.len < DIRECT } else { self.is_buffered };
        if is_buffered {
            return None;
        }
        self.is_buffered = false;
        Some(Goal { into: Some(into), from: self.complete, limit: self.complete + into.len as u64 })
    }

    /// Returns how many bytes have arrived in the goal's memory.
    pub(super) fn bypass(&mut self, goal: Goal) -> usize {
        let count = (self.complete - goal.from) as usize;
        self.arrived.passed(count);
        count
    }

    /// Takes what the goal wants of the stripes that were set aside. Returns whether there was any.
    ///
    /// # Safety
    ///
    /// The memory of the goal is writable until this returns, and no other thread accesses it.
    pub(super) unsafe fn take_aside(&mut self, goal: Goal) -> bool {
        let before = self.complete;
        while let Some(first) = self.aside.first_entry()
            && *first.key() <= self.complete
        {
            let (start, bytes) = (*first.key(), first.remove());
            let end = start + bytes.len() as u64;
            while self.complete < end.min(goal.limit) {
                let (next, wanted) = (self.complete, (end.min(goal.limit) - self.complete) as usize);
                let part = self.place(goal, next, wanted)[0];
                let from = RawSlice::of(&bytes[(next - start) as usize..]);
                // SAFETY: the part is in the buffer, or the caller vouches for it. It holds no more
                // than is left of the stripe.
                unsafe { std::ptr::copy_nonoverlapping(from.ptr, part.ptr, part.len) };
                note(&mut self.beyond, &mut self.complete, next, next + part.len as u64);
            }
            if self.complete < end {
                self.aside.insert(start, bytes);
                break;
            }
            self.bytes_aside -= bytes.len();
        }
        self.complete > before
    }

    /// Reads from one connection what the goal wants. With `sets_aside`, reads what is not wanted yet
    /// as well.
    ///
    /// # Safety
    ///
    /// The memory of the goal is writable until this returns, and no other thread accesses it.
    pub(super) unsafe fn read(
        &mut self,
        stream: &TcpStream,
        incoming: &mut Incoming,
        goal: Goal,
        sets_aside: bool,
        traffic: &Traffic,
    ) -> Result<Delivery, Cause> {
        let mut delivery = Delivery::default();
        loop {
            match self.read_header(stream, incoming)? {
                Some(true) => {}
                Some(false) => return Ok(delivery),
                None => return Ok(Delivery { has_ended: true, ..delivery }),
            }
            let (next, len) = (incoming.next, (incoming.end - incoming.next) as usize);
            // The second holds for every sender whose stripes do not overlap.
            let has_room = incoming.end <= self.complete + MOST_AHEAD && self.bytes_aside as u64 <= MOST_AHEAD + STRIPE;
            if len > 0 && (incoming.aside.is_some() || (sets_aside && has_room && next >= goal.limit)) {
                if !self.set_aside(stream, incoming, len, traffic)? {
                    return Ok(delivery);
                }
                delivery.has_moved = true;
                continue;
            }
            // Another connection may have received the same bytes meanwhile.
            let known = self.complete.saturating_sub(next);
            if known > 0 && !self.may_repeat {
                return Err(Cause::Corrupt("overlapping stripes of a link"));
            }
            self.has_repeated |= known > 0;
            let wanted = if known > 0 { known.min(DROPPED as u64) } else { goal.limit.saturating_sub(next) };
            let wanted = wanted.min(len as u64) as usize;
            if wanted == 0 && len > 0 {
                return Ok(Delivery { is_ahead: true, ..delivery });
            }
            if wanted > 0 {
                let mut dropped = [0u8; DROPPED];
                let parts = match known {
                    0 => self.place(goal, next, wanted),
                    _ => [RawSliceMut::of(&mut dropped).take(wanted), RawSliceMut::EMPTY],
                };
                // SAFETY: the parts are the buffer's or `dropped`, or the caller vouches for them.
                let count = received(stream.try_io(|| unsafe { sys::receive(stream, &parts) }))?;
                if count == 0 {
                    return Ok(delivery);
                }
                incoming.next += count as u64;
                if known == 0 {
                    delivery.has_moved = true;
                    traffic.received(count);
                    note(&mut self.beyond, &mut self.complete, next, incoming.next);
                }
            }
            if incoming.next == incoming.end {
                incoming.header_received = 0;
            }
        }
    }

    /// Sets aside what has arrived of a stripe. Returns whether that was all of it.
    fn set_aside(&mut self, stream: &TcpStream, incoming: &mut Incoming, len: usize, traffic: &Traffic) -> Result<bool, Cause> {
        let bytes = incoming.aside.get_or_insert_with(|| Vec::with_capacity(len));
        let room = RawSliceMut { ptr: bytes.spare_capacity_mut().as_mut_ptr().cast(), len };
        // SAFETY: the vector had room for the whole stripe, and has it for the `len` bytes that are left.
        let count = received(stream.try_io(|| unsafe { sys::receive(stream, &[room]) }))?;
        // SAFETY: the system has written `count` bytes there, at most `len`.
        unsafe { bytes.set_len(bytes.len() + count) };
        incoming.next += count as u64;
        traffic.received(count);
        if incoming.next < incoming.end {
            return Ok(false);
        }
        let bytes = incoming.aside.take().unwrap_or_default();
        let start = incoming.end - bytes.len() as u64;
        self.bytes_aside += bytes.len();
        // A stripe that was sent again may have another end.
        if let Some(same) = self.aside.remove(&start) {
            self.bytes_aside -= same.len().min(bytes.len());
            self.aside.insert(start, if same.len() > bytes.len() { same } else { bytes });
        } else {
            self.aside.insert(start, bytes);
        }
        incoming.header_received = 0;
        Ok(true)
    }

    fn place(&mut self, goal: Goal, position: u64, len: usize) -> [RawSliceMut; 2] {
        match goal.into {
            None => self.arrived.room_at(position, len),
            Some(into) => [into.skip((position - goal.from) as usize).take(len), RawSliceMut::EMPTY],
        }
    }

    /// Returns whether the header of the stripe has arrived; `None` if the peer has closed the
    /// connection instead.
    fn read_header(&self, stream: &TcpStream, incoming: &mut Incoming) -> Result<Option<bool>, Cause> {
        let Incoming { header, header_received, has_begun, next, end, .. } = incoming;
        if *header_received == HEADER {
            return Ok(Some(true));
        }
        let into = RawSliceMut::of(&mut header[*header_received..]);
        // SAFETY: the header is the connection's own.
        match received(stream.try_io(|| unsafe { sys::receive(stream, &[into]) })) {
            Err(Cause::Closed) if *header_received == 0 => return Ok(None),
            result => *header_received += result?,
        }
        *has_begun |= *header_received > 0;
        if *header_received < HEADER {
            return Ok(Some(false));
        }
        let (start, len, mark) = decode(header);
        let is_possible = mark == MARK && len <= STRIPE && start.checked_add(len).is_some();
        // An empty stripe only shows that the connection works.
        if !is_possible || (!self.may_repeat && (len == 0 || start < self.complete)) {
            return Err(Cause::Corrupt("an impossible stripe of a link"));
        }
        (*next, *end) = (start, start + len);
        Ok(Some(true))
    }
}

/// Records that a range has arrived.
fn note(beyond: &mut BTreeMap<u64, u64>, complete: &mut u64, start: u64, end: u64) {
    let (mut start, mut end) = (start, end);
    if let Some((&before, &reached)) = beyond.range(..start).next_back()
        && reached >= start
    {
        (start, end) = (before, end.max(reached));
    }
    while let Some((&after, &reached)) = beyond.range(start..=end).next() {
        beyond.remove(&after);
        end = end.max(reached);
    }
    if start <= *complete {
        *complete = end.max(*complete);
    } else {
        beyond.insert(start, end);
    }
}

/// Copies bytes of the stream, which lie in `chunks` from position `from` on, behind what `to` holds.
///
/// # Safety
///
/// The chunks are readable until this returns, and hold the bytes from `start` to `end`.
pub(super) unsafe fn append(to: &mut Vec<u8>, chunks: &[RawSlice], from: u64, start: u64, end: u64) {
    let (mut skip, mut left) = ((start - from) as usize, (end - start) as usize);
    to.reserve(left);
    for chunk in chunks {
        let here = chunk.skip(skip.min(chunk.len)).take(left);
        skip -= skip.min(chunk.len);
        left -= here.len;
        // SAFETY: the caller vouches for the chunk, and the vector has room for `left` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(here.ptr, to.as_mut_ptr().add(to.len()), here.len);
            to.set_len(to.len() + here.len);
        }
    }
    debug_assert_eq!(left, 0);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever ranges arrive, and however often, what is complete is what has arrived without a
        /// gap.
        #[test]
        fn ranges_are_joined(ranges in proptest::collection::vec((0u64..60, 1u64..12), 0..40)) {
            let (mut beyond, mut complete, mut known) = (BTreeMap::new(), 0, [false; 80]);
            for (start, len) in ranges {
                known[start as usize..(start + len) as usize].fill(true);
                note(&mut beyond, &mut complete, start, start + len);
                let prefix = known.iter().take_while(|&&known| known).count();
                prop_assert_eq!(complete, prefix as u64);
                prop_assert!(beyond.iter().all(|(&start, &end)| start > complete && start < end));
                let ranges = beyond.iter().map(|(start, end)| end - start).sum::<u64>() + complete;
                prop_assert_eq!(ranges, known.iter().filter(|&&known| known).count() as u64);
            }
        }
    }
}
