//! A connection through the network or inside the host.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use mio::Registry;
use mio::event::Source;

use crate::network::identity::Medium;
use crate::sys::{self, LocalStream, TcpStream};
use crate::transport::tcp;

/// A connection to a peer.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Local(LocalStream),
}

impl Stream {
    pub(super) fn medium(&self) -> Medium {
        match self {
            Stream::Tcp(_) => Medium::Network,
            Stream::Local(_) => Medium::Local,
        }
    }

    pub(super) fn source(&mut self) -> &mut dyn Source {
        match self {
            Stream::Tcp(stream) => stream,
            Stream::Local(stream) => stream,
        }
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Local(stream) => (&*stream).read(into),
        }
    }

    pub(super) fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(from),
            Stream::Local(stream) => (&*stream).write(from),
        }
    }

    /// Returns whether the peer has closed the connection, and nothing is left to read.
    pub(crate) fn is_ended(&self) -> bool {
        let peeked = match self {
            Stream::Tcp(stream) => stream.peek(&mut [0]),
            Stream::Local(stream) => stream.peek(),
        };
        match peeked {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    /// Removes the connection from the poll of its handshake and sets it up for a link.
    pub(super) fn release(mut self, registry: &Registry) -> io::Result<Stream> {
        registry.deregister(self.source())?;
        if let Stream::Tcp(stream) = &self {
            tcp::prepare(stream)?;
        }
        Ok(self)
    }
}

/// A stream whose reads and writes end with a deadline, however slowly the peer sends.
pub(crate) struct Until<'a> {
    pub(crate) stream: &'a std::net::TcpStream,
    pub(crate) deadline: Instant,
}

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?).map_err(sys::naming("setsockopt"))?;
        self.stream.read(into)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?).map_err(sys::naming("setsockopt"))?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
