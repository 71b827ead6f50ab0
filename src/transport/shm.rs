//! Links between processes of one host: rings in shared memory. A Unix socket hands the memory
//! over, wakes a rank that sleeps, and closes when the peer's process ends.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Registry, Token};

use super::Link;
use super::ring;
use super::ring_link::{PeerWaker, RingLink};
use crate::config::CopyMode;
use crate::sys::{LocalStream, Region};

/// Bytes of the memory of a link.
const SIZE: usize = ring::pair_size(if Region::PROVIDES_LATER { ring::GROWN } else { ring::AT_FIRST });

/// Makes a link, and hands its memory to the peer at the other end of `stream`.
pub(crate) fn offer(stream: LocalStream, copy_mode: CopyMode) -> io::Result<Box<dyn Link>> {
    let region = Region::create(SIZE)?;
    ring::at_first(&region).into_iter().try_for_each(|ring| region.reserve(ring))?;
    region.hand_over(&stream)?;
    region.close();
    Ok(link(region, 0, stream, copy_mode))
}

/// Returns the memory that the peer at the other end of `stream` offers, once it has come. Does not
/// wait.
pub(crate) fn offered(stream: &LocalStream) -> io::Result<Option<Region>> {
    match Region::take_over(stream, SIZE, Instant::now()) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(None),
        result => result.map(Some),
    }
}

/// Makes the link of the peer that received the memory of [`offer`].
pub(crate) fn accept(stream: LocalStream, region: Region, copy_mode: CopyMode) -> Box<dyn Link> {
    region.close();
    link(region, 1, stream, copy_mode)
}

fn link(region: Region, side: usize, stream: LocalStream, copy_mode: CopyMode) -> Box<dyn Link> {
    Box::new(RingLink::new(Arc::new(region), side, copy_mode, Socket { stream, gone: false }))
}

/// Wakes the peer through a socket. Each byte is one wake, and the end of the stream is the end of
/// the peer.
struct Socket {
    stream: LocalStream,
    gone: bool,
}

impl PeerWaker for Socket {
    fn wake(&mut self) {
        // A full socket holds wakes that the peer has not read. If the socket is broken, the next
        // read shows it.
        let _ = (&self.stream).write(&[0]);
    }

    fn kind(&self) -> &'static str {
        "shm"
    }

    fn drain(&mut self) {
        let mut wakes = [0; 64];
        loop {
            match (&self.stream).read(&mut wakes) {
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

    fn is_intact(&self) -> bool {
        self.stream.is_intact()
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.stream, token, Interest::READABLE)
    }
}
