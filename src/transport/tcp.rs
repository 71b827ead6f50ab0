//! A link over one TCP connection.
//!
//! What is sent goes from the caller's memory to the socket in one call. What arrives goes straight to the caller's memory
//! where it is long and wanted as it is; otherwise through a buffer that stays in the cache, from which it is reduced.

use std::io;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::{ALIGN, Link, moved};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys;

/// Bytes that arrive at once at most, where they go through the buffer.
pub(super) const BUFFER: usize = 256 << 10;

/// From this many bytes on, a receive that finds the buffer empty goes around it.
const DIRECT: usize = 16 << 10;

/// The link over one connection, or over several that share the work.
pub(crate) fn link(mut streams: Vec<TcpStream>) -> Box<dyn Link> {
    if streams.len() == 1 {
        Box::new(TcpLink { stream: streams.remove(0), arrived: Arrived::new() })
    } else {
        Box::new(super::stripe::StripedLink::new(streams))
    }
}

/// Sets what every connection of a link needs: no delay of small messages, and buffers that keep a fast wire busy.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let is_local = matches!((stream.local_addr(), stream.peer_addr()), (Ok(here), Ok(there)) if here.ip() == there.ip());
    let buffer = if is_local { LOCAL_BUFFER } else { WIRE_BUFFER };
    // The system may grant less, or not allow the choice; that costs speed, not correctness.
    for result in [
        socket.set_send_buffer_size(buffer),
        socket.set_recv_buffer_size(buffer),
        if is_local { sys::send_unpaced(&socket) } else { Ok(()) },
    ] {
        if let Err(error) = result {
            tracing::debug!(%error, "a socket stays as it is");
        }
    }
    Ok(())
}

/// What a fast wire holds.
const WIRE_BUFFER: usize = 8 << 20;

/// Inside a machine there is no wire to fill, and what waits in the socket should still be in a cache when it is taken: 64 MiB
/// both ways take 27 ms instead of the 38 of 8 MiB buffers. Nor is there anything to pace: BBR sends no faster than it once saw
/// the peer receive, after which 64 KiB take 38 us instead of 17.
const LOCAL_BUFFER: usize = 1 << 20;

struct TcpLink {
    stream: TcpStream,
    arrived: Arrived,
}

impl TcpLink {
    /// Reads what the socket has into the buffer.
    fn fill(&mut self) -> Result<(), Cause> {
        let room = self.arrived.room();
        // One part is quicker than two.
        let parts = if room[0].len >= DIRECT { &room[..1] } else { &room };
        let stream = &self.stream;
        // SAFETY: the room is of the buffer, which is this link's own.
        let count = end_is_closed(stream.try_io(|| unsafe { sys::receive(stream, parts) }))?;
        self.arrived.filled(count);
        Ok(())
    }
}

impl Link for TcpLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        // SAFETY: passed on.
        moved(self.stream.try_io(|| unsafe { sys::send(&self.stream, parts) }))
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        if self.arrived.len() < want.min(BUFFER) {
            self.fill()?;
        }
        Ok(self.arrived.front(want))
    }

    fn consume(&mut self, count: usize) {
        self.arrived.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        if self.arrived.len() == 0 && into.len >= DIRECT {
            // SAFETY: passed on.
            let count = end_is_closed(self.stream.try_io(|| unsafe { sys::receive(&self.stream, &[into]) }))?;
            self.arrived.passed(count);
            return Ok(count);
        }
        if self.arrived.len() == 0 {
            self.fill()?;
        }
        Ok(self.arrived.take(into))
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.stream, token, Interest::READABLE | Interest::WRITABLE)
    }
}

/// As `moved`, for receiving, where a count of 0 is the end of the stream.
pub(super) fn end_is_closed(result: io::Result<usize>) -> Result<usize, Cause> {
    match result {
        Ok(0) => Err(Cause::Closed),
        other => moved(other),
    }
}

/// A ring of bytes that have arrived and not been consumed. The stream's n-th byte lies at n modulo the size.
pub(super) struct Arrived {
    bytes: Box<[Aligned]>,
    /// Stream position of the first byte that has not been consumed.
    front: u64,
    /// Stream position up to which bytes have arrived.
    back: u64,
}

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Aligned([u8; ALIGN]);

impl Arrived {
    pub(super) fn new() -> Arrived {
        Arrived { bytes: vec![Aligned([0; ALIGN]); BUFFER / ALIGN].into_boxed_slice(), front: 0, back: 0 }
    }

    pub(super) fn len(&self) -> usize {
        (self.back - self.front) as usize
    }

    /// The bytes from a stream position on, up to the end of the ring; at most `len`.
    fn stretch(&mut self, position: u64, len: usize) -> RawSliceMut {
        let at = position as usize % BUFFER;
        RawSliceMut { ptr: self.bytes.as_mut_ptr().cast::<u8>().wrapping_add(at), len: len.min(BUFFER - at) }
    }

    /// Where the stream's bytes from `position` on go, as far as there is room, at most `len`; in two parts where the ring
    /// wraps around.
    pub(super) fn room_at(&mut self, position: u64, len: usize) -> [RawSliceMut; 2] {
        let len = len.min((self.front + BUFFER as u64 - position) as usize);
        let first = self.stretch(position, len);
        [first, self.stretch(position + first.len as u64, len - first.len)]
    }

    pub(super) fn room(&mut self) -> [RawSliceMut; 2] {
        self.room_at(self.back, BUFFER)
    }

    /// Bytes have been written behind the last one.
    pub(super) fn filled(&mut self, count: usize) {
        self.back += count as u64;
        debug_assert!(self.len() <= BUFFER);
    }

    /// Bytes went around the empty ring.
    pub(super) fn passed(&mut self, count: usize) {
        debug_assert_eq!(self.front, self.back);
        self.front += count as u64;
        self.back = self.front;
    }

    pub(super) fn front(&mut self, want: usize) -> RawSlice {
        let len = want.min(self.len());
        self.stretch(self.front, len).as_const()
    }

    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.len());
        self.front += count as u64;
    }

    /// Moves as many bytes as there are and fit.
    pub(super) fn take(&mut self, into: RawSliceMut) -> usize {
        let mut rest = into;
        while rest.len > 0 && self.len() > 0 {
            let chunk = self.front(rest.len);
            // SAFETY: `chunk` is in the ring, and the caller of the link vouches for `into`.
            unsafe { std::ptr::copy_nonoverlapping(chunk.ptr, rest.ptr, chunk.len) };
            self.consume(chunk.len);
            rest = rest.skip(chunk.len);
        }
        into.len - rest.len
    }
}
