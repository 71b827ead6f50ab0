//! Links between processes of one host: rings in shared memory. A Unix socket hands the memory over, wakes a sleeper, and
//! tells of the end of the peer's process.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Registry, Token};

use super::Link;
use super::memory::{Bell, RingLink};
use super::ring;
use crate::sys::{LocalStream, Segment};

/// Bytes of one ring: enough that neither side of a stream waits for the other's every step, little enough for the caches and for
/// many links.
const CAPACITY: usize = 128 << 10;

/// Makes the memory of a link, and hands it to the peer at the other end of `stream`.
pub(crate) fn offer(stream: LocalStream) -> io::Result<Box<dyn Link>> {
    let segment = Segment::create(ring::pair_size(CAPACITY))?;
    segment.reserve(0..segment.len())?;
    segment.hand_over(&stream)?;
    segment.close();
    Ok(link(segment, 0, stream))
}

/// The memory that the peer at the other end of `stream` offers, once it has come. Does not wait.
pub(crate) fn offered(stream: &LocalStream) -> io::Result<Option<Segment>> {
    match Segment::take_over(stream, ring::pair_size(CAPACITY), Instant::now()) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(None),
        result => result.map(Some),
    }
}

/// The other side of [`offer`].
pub(crate) fn accept(stream: LocalStream, segment: Segment) -> Box<dyn Link> {
    segment.close();
    link(segment, 1, stream)
}

fn link(segment: Segment, side: usize, stream: LocalStream) -> Box<dyn Link> {
    Box::new(RingLink::new(Arc::new(segment), side, Socket { stream, gone: false }))
}

/// A socket as a bell: each byte is one ring, the end of the stream is the end of the peer.
struct Socket {
    stream: LocalStream,
    gone: bool,
}

impl Bell for Socket {
    fn ring(&mut self) {
        // A full socket holds rings that the peer has still to answer; a broken one shows when it is read.
        let _ = (&self.stream).write(&[0]);
    }

    fn answer(&mut self) {
        let mut rings = [0; 64];
        loop {
            match (&self.stream).read(&mut rings) {
                Ok(0) => self.gone = true,
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => self.gone = true,
            }
            return;
        }
    }

    fn is_gone(&self) -> bool {
        self.gone
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.stream, token, Interest::READABLE)
    }
}
