//! A link over several TCP connections ("lanes") that share its work: one connection rarely fills a
//! fast wire.
//!
//! The stream is cut into stripes. A lane with room takes the next stripe, so that a slow lane
//! carries fewer. Before each stripe, a header says where in the stream it belongs. The receiver
//! puts a stripe where it belongs if the caller has asked for those bytes, and leaves later stripes
//! in their sockets. On each lane, stripes are in stream order. So the first missing stripe is
//! always at the front of some lane, and the stream cannot get stuck.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::Link;
use super::link::{received, sent};
use super::receive_buffer::{BUFFER, ReceiveBuffer};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::{self, SocketWatch};
use crate::trace::Traffic;

/// The most bytes of one stripe.
const STRIPE: u64 = 128 << 10;

/// Bytes of a header: the start of the stripe (8), its length (4) and a mark (4), little-endian.
const HEADER: usize = 16;
const MARK: u32 = 0x6b6f_7069;

/// How long the link may receive nothing when some lanes have ended and others have not. A peer
/// that leaves closes all lanes at once, but bytes on some of them may still be in flight.
const ENDING: Duration = Duration::from_secs(2);

pub(super) struct StripedLink {
    lanes: Vec<Lane>,
    /// Stream position of the first byte that has not been taken from the caller.
    taken: u64,
    /// Stream position up to which stripes have been given to lanes.
    assigned: u64,
    arrived: ReceiveBuffer,
    /// Stream position up to which everything has arrived.
    complete: u64,
    /// Ranges beyond `complete` that have arrived: start to end.
    beyond: BTreeMap<u64, u64>,
    /// Since when nothing has arrived, while some lanes have ended and others have not.
    ending: Option<Instant>,
    traffic: Arc<Traffic>,
}

struct Lane {
    stream: TcpStream,
    sending: Option<Outgoing>,
    receiving: Incoming,
    /// The peer has closed the lane between two stripes. The other lanes may still hold bytes.
    closed: bool,
}

/// A stripe that a lane is sending.
struct Outgoing {
    header: [u8; HEADER],
    header_sent: usize,
    /// Stream position of the next byte to send.
    next: u64,
    end: u64,
}

/// A stripe that a lane is receiving: first its header, then the bytes from `next` to `end`.
#[derive(Default)]
struct Incoming {
    header: [u8; HEADER],
    header_received: usize,
    next: u64,
    end: u64,
}

impl StripedLink {
    pub(super) fn new(streams: Vec<TcpStream>) -> StripedLink {
        let traffic = Traffic::of_sockets(streams.iter().map(SocketWatch::new).collect());
        let lane = |stream| Lane { stream, sending: None, receiving: Incoming::default(), closed: false };
        let lanes = streams.into_iter().map(lane).collect();
        StripedLink {
            lanes,
            taken: 0,
            assigned: 0,
            arrived: ReceiveBuffer::new(),
            complete: 0,
            beyond: BTreeMap::new(),
            ending: None,
            traffic,
        }
    }

    /// Reads from all lanes the bytes before `limit`. `place` returns where the bytes from a stream
    /// position on go.
    fn collect(
        &mut self,
        limit: u64,
        mut place: impl FnMut(&mut ReceiveBuffer, u64, usize) -> [RawSliceMut; 2],
    ) -> Result<(), Cause> {
        let before = self.complete;
        let mut has_moved = false;
        for lane in &mut self.lanes {
            while let Some((next, len)) = lane.receive_header(self.complete)? {
                // Another lane may have received the same bytes meanwhile.
                if next < self.complete {
                    return Err(Cause::Corrupt("overlapping stripes of a link"));
                }
                let wanted = (limit.saturating_sub(next)).min(len as u64) as usize;
                if wanted == 0 {
                    break;
                }
                let parts = place(&mut self.arrived, next, wanted);
                let stream = &lane.stream;
                // SAFETY: `place` returns parts of this link's buffer, or of the memory that the
                // caller of `receive` vouches for.
                let count = received(stream.try_io(|| unsafe { sys::receive(stream, &parts) }))?;
                if count == 0 {
                    break;
                }
                has_moved = true;
                lane.receiving.next += count as u64;
                self.traffic.received(count);
                note(&mut self.beyond, &mut self.complete, next, next + count as u64);
                if lane.receiving.next == lane.receiving.end {
                    lane.receiving.header_received = 0;
                }
            }
        }
        let closed = self.lanes.iter().filter(|lane| lane.closed).count();
        if closed == 0 || has_moved {
            self.ending = None;
        } else if closed == self.lanes.len() && self.complete == before {
            return Err(Cause::Closed);
        } else if self.ending.get_or_insert_with(Instant::now).elapsed() >= ENDING {
            // The stripes of the ended lanes will not come.
            return Err(Cause::Broken(io::ErrorKind::ConnectionReset));
        }
        Ok(())
    }
}

/// Records that a range has arrived.
fn note(beyond: &mut BTreeMap<u64, u64>, complete: &mut u64, start: u64, end: u64) {
    // A stripe arrives in order, so a range can only continue one that ends where it starts.
    match beyond.iter_mut().find(|(_, known)| **known == start) {
        Some((_, known)) if start != *complete => *known = end,
        _ if start == *complete => *complete = end,
        _ => drop(beyond.insert(start, end)),
    }
    while let Some(end) = beyond.remove(complete) {
        *complete = end;
    }
}

/// Returns the header of the stripe from `start` to `end`.
fn encode(start: u64, end: u64) -> [u8; HEADER] {
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

impl Lane {
    /// Returns where the lane's next bytes belong and how many they are, once the header has
    /// arrived.
    fn receive_header(&mut self, complete: u64) -> Result<Option<(u64, usize)>, Cause> {
        if self.closed {
            return Ok(None);
        }
        let Incoming { header, header_received, next, end } = &mut self.receiving;
        if *header_received < HEADER {
            let into = RawSliceMut::of(&mut header[*header_received..]);
            let stream = &self.stream;
            // SAFETY: the header is this lane's own.
            match received(stream.try_io(|| unsafe { sys::receive(stream, &[into]) })) {
                Err(Cause::Closed) if *header_received == 0 => self.closed = true,
                result => *header_received += result?,
            }
            if *header_received < HEADER {
                return Ok(None);
            }
            let (start, len, mark) = decode(header);
            if mark != MARK || len == 0 || len > STRIPE || start < complete || start.checked_add(len).is_none() {
                return Err(Cause::Corrupt("an impossible stripe of a link"));
            }
            (*next, *end) = (start, start + len);
        }
        Ok(Some((*next, (*end - *next) as usize)))
    }

    /// Sends the rest of the lane's stripe; `bytes` are the stream's bytes from `from` on.
    ///
    /// # Safety
    ///
    /// The bytes are readable until this returns.
    unsafe fn send(&mut self, bytes: &[RawSlice], from: u64) -> Result<(), Cause> {
        let Some(stripe) = &mut self.sending else { return Ok(()) };
        let header = RawSlice::of(&stripe.header[stripe.header_sent..]);
        let mut parts = [header, RawSlice::EMPTY, RawSlice::EMPTY, RawSlice::EMPTY];
        let mut skip = (stripe.next - from) as usize;
        let mut left = (stripe.end - stripe.next) as usize;
        let mut used = 1;
        for chunk in bytes {
            let here = chunk.skip(skip.min(chunk.len)).take(left);
            skip -= skip.min(chunk.len);
            left -= here.len;
            if here.len > 0 {
                parts[used] = here;
                used += 1;
            }
        }
        let stream = &self.stream;
        // SAFETY: the caller vouches for the bytes, and the header is this lane's own.
        let count = sent(stream.try_io(|| unsafe { sys::send(stream, &parts[..used]) }))?;
        let of_header = count.min(header.len);
        stripe.header_sent += of_header;
        stripe.next += (count - of_header) as u64;
        if stripe.next == stripe.end && stripe.header_sent == HEADER {
            self.sending = None;
        }
        Ok(())
    }
}

impl Link for StripedLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        assert!(parts.len() < sys::PARTS, "one part is the header");
        let offered = self.taken + parts.iter().map(|part| part.len as u64).sum::<u64>();
        for lane in &mut self.lanes {
            loop {
                if lane.sending.is_none() && self.assigned < offered {
                    let end = offered.min(self.assigned + STRIPE);
                    let header = encode(self.assigned, end);
                    lane.sending = Some(Outgoing { header, header_sent: 0, next: self.assigned, end });
                    self.assigned = end;
                }
                let had_stripe = lane.sending.is_some();
                // SAFETY: the caller vouches for the parts.
                unsafe { lane.send(parts, self.taken)? };
                if !had_stripe || lane.sending.is_some() {
                    break;
                }
            }
        }
        let pending = self.lanes.iter().filter_map(|lane| lane.sending.as_ref()).map(|stripe| stripe.next).min();
        let taken = pending.unwrap_or(self.assigned);
        let count = taken - self.taken;
        self.taken = taken;
        self.traffic.sent(count as usize);
        Ok(count as usize)
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.arrived.len() < want.min(BUFFER) {
            let before = self.complete;
            let limit = before + (want.min(BUFFER) - self.arrived.len()) as u64;
            self.collect(limit, |arrived, position, len| arrived.room_at(position, len))?;
            self.arrived.filled((self.complete - before) as usize);
        }
        Ok(self.arrived.front(want))
    }

    fn consume(&mut self, count: usize) {
        self.arrived.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let buffered = self.arrived.take(into);
        if buffered > 0 {
            return Ok(buffered);
        }
        let before = self.complete;
        self.collect(before + into.len as u64, |_, position, len| {
            [into.skip((position - before) as usize).take(len), RawSliceMut::EMPTY]
        })?;
        let count = (self.complete - before) as usize;
        self.arrived.passed(count);
        Ok(count)
    }

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some(("tcp", self.traffic.clone()))
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.lanes
            .iter_mut()
            .try_for_each(|lane| registry.register(&mut lane.stream, token, Interest::READABLE | Interest::WRITABLE))
    }
}

impl Drop for StripedLink {
    fn drop(&mut self) {
        self.traffic.close();
    }
}
