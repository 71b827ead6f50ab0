//! Connections between processes of one host: Unix sockets with abstract names.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// A connection inside the host. Reads and writes do not block; those of [`LocalStream::until`] do.
pub(crate) struct LocalStream(pub(super) mio::net::UnixStream);

impl LocalStream {
    /// Connects to a name of this host. Fails with `TimedOut` if the listener's queue is full until
    /// the deadline.
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        /// The pause before the next attempt to join a queue that is full.
        const PAUSE: Duration = Duration::from_millis(1);
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        // A blocking connect would wait as long as the listener's queue is full, and strangers can
        // keep it full.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(LocalStream(mio::net::UnixStream::from_std(UnixStream::from(socket)))),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns whether the process at the other end runs as the user of this process.
    pub(crate) fn is_of_this_user(&self) -> bool {
        rustix::net::sockopt::socket_peercred(&self.0).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
    }

    /// Returns the stream with reads and writes that wait until the deadline.
    pub(crate) fn until(&self, deadline: Instant) -> LocalUntil<'_> {
        LocalUntil { stream: self, deadline }
    }
}

impl io::Read for &LocalStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(into)
    }
}

impl io::Write for &LocalStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, from, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl mio::event::Source for LocalStream {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.0.deregister(registry)
    }
}

/// A [`LocalStream`] whose reads and writes wait.
pub(crate) struct LocalUntil<'a> {
    stream: &'a LocalStream,
    deadline: Instant,
}

impl LocalUntil<'_> {
    /// Waits until the stream is ready, or fails with `TimedOut` at the deadline.
    pub(super) fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&self.stream.0, flags)], Some(&timeout)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl io::Read for LocalUntil<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        (&mut &*self.stream).read(into)
    }
}

impl io::Write for LocalUntil<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.wait(PollFlags::OUT)?;
        (&mut &*self.stream).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Accepts connections from processes of this host, under a name that is not in the file system, so
/// that nothing is left behind.
pub(crate) struct LocalListener(mio::net::UnixListener);

impl LocalListener {
    pub(crate) fn bind(name: &str) -> io::Result<LocalListener> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(LocalListener(mio::net::UnixListener::from_std(listener)))
    }

    /// Accepts the next connection; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<LocalStream> {
        self.0.accept().map(|(stream, _)| LocalStream(stream))
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.0, token, Interest::READABLE)
    }
}
