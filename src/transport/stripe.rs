//! A link over several TCP connections ("lanes") that share its work: one connection rarely fills a fast wire.
//!
//! The stream is cut into pieces. Whichever lane has room takes the next piece, so that a slow lane carries fewer; each piece
//! is preceded by where in the stream it belongs. The receiver puts pieces where they belong as long as that is within what
//! it was asked for, and leaves those beyond in their sockets. On each lane pieces are in stream order, so the first one that
//! is missing is always at the front of some lane: the stream cannot get stuck.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::tcp::{Arrived, BUFFER, end_is_closed};
use super::{Link, moved};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys;

/// Bytes of one piece at most.
const PIECE: u64 = 128 << 10;

/// What precedes a piece: its start, its length and a mark, little-endian.
const HEADER: usize = 16;
const MARK: u32 = 0x6b6f_7069;

/// How long nothing may arrive when some lanes have ended and others have not. A peer that leaves closes all at once, but what it
/// sent on some may still be under way.
const ENDING: Duration = Duration::from_secs(2);

pub(super) struct StripedLink {
    lanes: Vec<Lane>,
    /// Stream position of the first byte that has not been taken from the caller.
    taken: u64,
    /// Stream position up to which pieces have been given to lanes.
    assigned: u64,
    arrived: Arrived,
    /// Stream position up to which everything has arrived.
    complete: u64,
    /// Stretches beyond `complete` that have arrived: start to end.
    beyond: BTreeMap<u64, u64>,
    /// Since when nothing has arrived though some lanes have ended, and others have not.
    ending: Option<Instant>,
}

struct Lane {
    stream: TcpStream,
    sending: Option<Outgoing>,
    receiving: Incoming,
    /// The peer has closed the lane, between two pieces. The other lanes may still hold bytes.
    closed: bool,
}

/// A piece that a lane is sending.
struct Outgoing {
    header: [u8; HEADER],
    header_sent: usize,
    /// Stream position of the next byte to send.
    next: u64,
    end: u64,
}

/// What a lane is receiving: first a header, then the bytes from `next` to `end`.
#[derive(Default)]
struct Incoming {
    header: [u8; HEADER],
    header_received: usize,
    next: u64,
    end: u64,
}

impl StripedLink {
    pub(super) fn new(streams: Vec<TcpStream>) -> StripedLink {
        let lane = |stream| Lane { stream, sending: None, receiving: Incoming::default(), closed: false };
        let lanes = streams.into_iter().map(lane).collect();
        StripedLink { lanes, taken: 0, assigned: 0, arrived: Arrived::new(), complete: 0, beyond: BTreeMap::new(), ending: None }
    }

    /// Reads from all lanes what belongs before `limit`; `place` says where the bytes from a stream position on go.
    fn collect(&mut self, limit: u64, mut place: impl FnMut(&mut Arrived, u64, usize) -> [RawSliceMut; 2]) -> Result<(), Cause> {
        let before = self.complete;
        let mut moved = false;
        for lane in &mut self.lanes {
            while let Some((next, len)) = lane.receive_header(self.complete)? {
                // Another lane may have brought the same bytes meanwhile.
                if next < self.complete {
                    return Err(Cause::Corrupt("pieces of a striped link that overlap"));
                }
                let wanted = (limit.saturating_sub(next)).min(len as u64) as usize;
                if wanted == 0 {
                    break;
                }
                let parts = place(&mut self.arrived, next, wanted);
                let stream = &lane.stream;
                // SAFETY: `place` gives parts of this link's buffer, or of what the caller of `receive` vouches for.
                let count = end_is_closed(stream.try_io(|| unsafe { sys::receive(stream, &parts) }))?;
                if count == 0 {
                    break;
                }
                moved = true;
                lane.receiving.next += count as u64;
                note(&mut self.beyond, &mut self.complete, next, next + count as u64);
                if lane.receiving.next == lane.receiving.end {
                    lane.receiving.header_received = 0;
                }
            }
        }
        let closed = self.lanes.iter().filter(|lane| lane.closed).count();
        if closed == 0 || moved {
            self.ending = None;
        } else if closed == self.lanes.len() && self.complete == before {
            return Err(Cause::Closed);
        } else if self.ending.get_or_insert_with(Instant::now).elapsed() >= ENDING {
            // What this lane had been given, nobody brings.
            return Err(Cause::Broken(io::ErrorKind::ConnectionReset));
        }
        Ok(())
    }
}

/// Records that a stretch has arrived.
fn note(beyond: &mut BTreeMap<u64, u64>, complete: &mut u64, start: u64, end: u64) {
    // A piece arrives in order, so a stretch can only continue one that ends where it starts.
    match beyond.iter_mut().find(|(_, known)| **known == start) {
        Some((_, known)) if start != *complete => *known = end,
        _ if start == *complete => *complete = end,
        _ => drop(beyond.insert(start, end)),
    }
    while let Some(end) = beyond.remove(complete) {
        *complete = end;
    }
}

impl Lane {
    /// Where the lane's next bytes belong and how many they are, once the header has arrived.
    fn receive_header(&mut self, complete: u64) -> Result<Option<(u64, usize)>, Cause> {
        if self.closed {
            return Ok(None);
        }
        let Incoming { header, header_received, next, end } = &mut self.receiving;
        if *header_received < HEADER {
            let into = RawSliceMut::of(&mut header[*header_received..]);
            let stream = &self.stream;
            // SAFETY: the header is this lane's own.
            match end_is_closed(stream.try_io(|| unsafe { sys::receive(stream, &[into]) })) {
                Err(Cause::Closed) if *header_received == 0 => self.closed = true,
                result => *header_received += result?,
            }
            if *header_received < HEADER {
                return Ok(None);
            }
            let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let start = u64::from(word(0)) | u64::from(word(4)) << 32;
            let len = u64::from(word(8));
            if word(12) != MARK || len == 0 || len > PIECE || start < complete || start.checked_add(len).is_none() {
                return Err(Cause::Corrupt("a piece of a striped link that cannot be"));
            }
            (*next, *end) = (start, start + len);
        }
        Ok(Some((*next, (*end - *next) as usize)))
    }

    /// Sends what the lane has of its piece; `bytes` are the stream's bytes from `from` on.
    ///
    /// # Safety
    ///
    /// The bytes are readable until this returns.
    unsafe fn send(&mut self, bytes: &[RawSlice], from: u64) -> Result<(), Cause> {
        let Some(piece) = &mut self.sending else { return Ok(()) };
        let header = RawSlice::of(&piece.header[piece.header_sent..]);
        let mut parts = [header, RawSlice::EMPTY, RawSlice::EMPTY, RawSlice::EMPTY];
        let mut skip = (piece.next - from) as usize;
        let mut left = (piece.end - piece.next) as usize;
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
        // SAFETY: the caller vouches for the bytes; the header is this lane's own.
        let count = moved(stream.try_io(|| unsafe { sys::send(stream, &parts[..used]) }))?;
        let of_header = count.min(header.len);
        piece.header_sent += of_header;
        piece.next += (count - of_header) as u64;
        if piece.next == piece.end && piece.header_sent == HEADER {
            self.sending = None;
        }
        Ok(())
    }
}

impl Link for StripedLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        assert!(parts.len() < sys::PARTS, "one part is the piece's header");
        let offered = self.taken + parts.iter().map(|part| part.len as u64).sum::<u64>();
        for lane in &mut self.lanes {
            loop {
                if lane.sending.is_none() && self.assigned < offered {
                    let end = offered.min(self.assigned + PIECE);
                    let mut header = [0; HEADER];
                    header[..8].copy_from_slice(&self.assigned.to_le_bytes());
                    header[8..12].copy_from_slice(&((end - self.assigned) as u32).to_le_bytes());
                    header[12..].copy_from_slice(&MARK.to_le_bytes());
                    lane.sending = Some(Outgoing { header, header_sent: 0, next: self.assigned, end });
                    self.assigned = end;
                }
                let had_piece = lane.sending.is_some();
                // SAFETY: passed on.
                unsafe { lane.send(parts, self.taken)? };
                if !had_piece || lane.sending.is_some() {
                    break;
                }
            }
        }
        let pending = self.lanes.iter().filter_map(|lane| lane.sending.as_ref()).map(|piece| piece.next).min();
        let taken = pending.unwrap_or(self.assigned);
        let count = taken - self.taken;
        self.taken = taken;
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

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.lanes
            .iter_mut()
            .try_for_each(|lane| registry.register(&mut lane.stream, token, Interest::READABLE | Interest::WRITABLE))
    }
}
