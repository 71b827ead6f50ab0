//! A link over several TCP connections ("lanes") that share its work: one connection rarely fills a
//! fast wire.
//!
//! The stream is cut into [stripes](super::stripes). A lane with room takes the next stripe, so that a
//! slow lane carries fewer. On each lane, stripes are in stream order. So the first missing stripe is
//! always at the front of some lane, and the stream cannot get stuck.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Registry, Token};

use super::Link;
use super::link::sent;
use super::stripes::{Goal, HEADER, Incoming, Joiner, STRIPE, encode};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::{self, SocketWatch, TcpStream};
use crate::timeouts::LANES_ENDING;
use crate::trace::Traffic;

pub(super) struct StripedLink {
    lanes: Vec<Lane>,
    /// Stream position of the first byte that has not been taken from the caller.
    taken: u64,
    /// Stream position up to which stripes have been given to lanes.
    assigned: u64,
    joiner: Joiner,
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

impl StripedLink {
    pub(super) fn new(streams: Vec<TcpStream>) -> StripedLink {
        let traffic = Traffic::of_sockets(streams.iter().map(|stream| SocketWatch::new(stream)).collect());
        let lane = |stream| Lane { stream, sending: None, receiving: Incoming::default(), closed: false };
        let lanes = streams.into_iter().map(lane).collect();
        StripedLink { lanes, taken: 0, assigned: 0, joiner: Joiner::new(false), ending: None, traffic }
    }

    /// Reads from all lanes what the goal wants.
    ///
    /// # Safety
    ///
    /// The memory of the goal is writable until this returns, and no other thread accesses it.
    unsafe fn collect(&mut self, goal: Goal) -> Result<(), Cause> {
        let before = self.joiner.complete();
        let mut has_moved = false;
        for lane in self.lanes.iter_mut().filter(|lane| !lane.closed) {
            // SAFETY: the caller vouches for the memory.
            let delivery = unsafe { self.joiner.read(&lane.stream, &mut lane.receiving, goal, false, &self.traffic)? };
            has_moved |= delivery.has_moved;
            lane.closed = delivery.has_ended;
        }
        let closed = self.lanes.iter().filter(|lane| lane.closed).count();
        if closed == 0 || has_moved {
            self.ending = None;
        } else if closed == self.lanes.len() && self.joiner.complete() == before {
            return Err(Cause::Closed);
        } else if self.ending.get_or_insert_with(Instant::now).elapsed() >= LANES_ENDING {
            // The stripes of the ended lanes will not come.
            return Err(Cause::Broken(io::ErrorKind::ConnectionReset));
        }
        Ok(())
    }
}

impl Lane {
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

    fn has_begun(&self) -> bool {
        self.assigned > self.taken
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if let Some(goal) = self.joiner.goal_to_show(want) {
            // SAFETY: the memory is the link's own.
            unsafe { self.collect(goal)? };
            self.joiner.show(goal);
        }
        Ok(self.joiner.arrived.front(want))
    }

    fn consume(&mut self, count: usize) {
        self.joiner.arrived.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let buffered = self.joiner.arrived.take(into);
        if buffered > 0 {
            return Ok(buffered);
        }
        let Some(goal) = self.joiner.goal_in_memory(into) else {
            self.peek(into.len)?;
            return Ok(self.joiner.arrived.take(into));
        };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.collect(goal)? };
        Ok(self.joiner.bypass(goal))
    }

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some(("tcp", self.traffic.clone()))
    }

    fn is_intact(&self) -> bool {
        self.lanes.iter().all(|lane| lane.stream.is_intact())
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
