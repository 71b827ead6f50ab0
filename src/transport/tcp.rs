//! A link over one TCP connection.
//!
//! Bytes go from the caller's memory to the socket in one call. Long messages that are not reduced
//! arrive directly in the caller's memory. Others arrive in a buffer that stays in the cache, from
//! which they are reduced.

use std::io;
use std::sync::Arc;

use mio::{Interest, Registry, Token};

use super::Link;
use super::congestion;
use super::link::{received, sent};
use super::receive_buffer::{BUFFER, ReceiveBuffer};
use super::stripe::StripedLink;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::{self, SocketWatch, TcpStream};
use crate::trace::Traffic;

/// From this many bytes on, a receive that finds the buffer empty bypasses it.
const DIRECT: usize = 16 << 10;

/// Makes the link over one connection, or over several that share the work.
pub(crate) fn link(mut streams: Vec<TcpStream>) -> Box<dyn Link> {
    if streams.len() == 1 {
        let stream = streams.remove(0);
        let traffic = Traffic::of_sockets(vec![SocketWatch::new(&stream)]);
        Box::new(TcpLink { stream, arrived: ReceiveBuffer::new(), traffic })
    } else {
        for stream in streams.iter().filter(|stream| congestion::is_long(stream)) {
            if let Err(error) = sys::limit_unsent(&socket2::SockRef::from(stream), UNSENT) {
                crate::log::debug!(%error, "cannot limit what waits in a connection; its link may be slower");
            }
        }
        Box::new(StripedLink::new(streams))
    }
}

/// Bytes that wait in one of several connections of a link with a long round trip until its window
/// allows them to be sent. With more of them, the first connection would take stripes that the others
/// could send now. With a short round trip, the connections keep a fast network busy by what waits.
const UNSENT: u32 = 256 << 10;

/// Sets the options of every connection of a link: no delay of small messages, and buffers that
/// keep a fast wire busy.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true).map_err(sys::naming("setsockopt"))?;
    let buffer = if congestion::is_local(stream) { LOCAL_BUFFER } else { WIRE_BUFFER };
    // The system may grant less, or refuse. That costs speed, but not correctness.
    for result in [socket.set_send_buffer_size(buffer), socket.set_recv_buffer_size(buffer)] {
        if let Err(error) = result {
            crate::log::debug!(%error, "cannot set an option of a socket; its link may be slower");
        }
    }
    Ok(())
}

/// Buffers for a fast wire, in bytes.
const WIRE_BUFFER: usize = 8 << 20;

/// Buffers inside a machine, in bytes. There is no wire to fill, and bytes that wait in the socket
/// should still be in a cache when they are read: 64 MiB in both directions take 27 ms, and 38 ms
/// with buffers of 8 MiB.
const LOCAL_BUFFER: usize = 1 << 20;

struct TcpLink {
    stream: TcpStream,
    arrived: ReceiveBuffer,
    traffic: Arc<Traffic>,
}

impl TcpLink {
    /// Reads what the socket has into the buffer.
    fn fill(&mut self) -> Result<(), Cause> {
        let room = self.arrived.room();
        // Reading one part is quicker than reading two.
        let parts = if room[0].len >= DIRECT { &room[..1] } else { &room };
        let stream = &self.stream;
        // SAFETY: the room belongs to the buffer, which is this link's own.
        let count = received(stream.try_io(|| unsafe { sys::receive(stream, parts) }))?;
        self.arrived.filled(count);
        self.traffic.received(count);
        Ok(())
    }
}

impl Link for TcpLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        // SAFETY: the caller vouches for the parts.
        let count = sent(self.stream.try_io(|| unsafe { sys::send(&self.stream, parts) }))?;
        self.traffic.sent(count);
        Ok(count)
    }

    fn most_parts(&self) -> usize {
        sys::MOST_PARTS
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
            // SAFETY: the caller vouches for `into`.
            let count = received(self.stream.try_io(|| unsafe { sys::receive(&self.stream, &[into]) }))?;
            self.arrived.passed(count);
            self.traffic.received(count);
            return Ok(count);
        }
        if self.arrived.len() == 0 {
            self.fill()?;
        }
        Ok(self.arrived.take(into))
    }

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some(("tcp", self.traffic.clone()))
    }

    fn is_intact(&self) -> bool {
        self.stream.is_intact()
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.stream, token, Interest::READABLE | Interest::WRITABLE)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.traffic.close();
    }
}
