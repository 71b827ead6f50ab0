//! The socket at which a process serves its metrics, and its connections: TCP, or a Unix socket.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};

use super::{above_standard, naming};

#[cfg(all(unix, not(miri)))]
use self::path::PathListener;

/// A socket that collectors of metrics connect to.
pub(crate) enum ScrapeListener {
    Tcp(mio::net::TcpListener),
    #[cfg(all(unix, not(miri)))]
    Path(PathListener),
}

impl ScrapeListener {
    /// Listens at an address. Returns the address, too, because the system chooses port 0.
    pub(crate) fn at_address(address: SocketAddr) -> io::Result<(ScrapeListener, SocketAddr)> {
        let listener = above_standard(|| mio::net::TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        Ok((ScrapeListener::Tcp(listener), address))
    }

    /// Listens at a path. Only this user can connect. Takes the place of a socket that no process
    /// listens at any more.
    pub(crate) fn at_path(path: &str) -> io::Result<ScrapeListener> {
        #[cfg(all(unix, not(miri)))]
        return PathListener::bind(path).map(ScrapeListener::Path);
        #[cfg(any(not(unix), miri))]
        {
            let _ = path;
            Err(io::Error::new(io::ErrorKind::Unsupported, "this system has no Unix sockets for metrics"))
        }
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            ScrapeListener::Tcp(listener) => registry.register(listener, token, Interest::READABLE),
            #[cfg(all(unix, not(miri)))]
            ScrapeListener::Path(listener) => registry.register(&mut listener.socket, token, Interest::READABLE),
        }
    }

    /// Accepts a connection, whose reads and writes end by the deadline; `WouldBlock` if there is
    /// none.
    pub(crate) fn accept(&self, patience: Duration) -> io::Result<ScrapeStream> {
        let socket = match self {
            ScrapeListener::Tcp(listener) => above_standard(|| listener.accept())
                .map_err(naming("accept4"))
                .map(|(stream, _)| socket2::Socket::from(std::net::TcpStream::from(stream)))?,
            #[cfg(all(unix, not(miri)))]
            ScrapeListener::Path(listener) => listener.accept_next()?,
        };
        socket.set_nonblocking(false)?;
        #[cfg(target_vendor = "apple")]
        socket.set_nosigpipe(true)?;
        Ok(ScrapeStream { socket, deadline: Instant::now() + patience })
    }
}

/// A connection of a collector, whose reads and writes end by a deadline, however slow it is.
pub(crate) struct ScrapeStream {
    socket: socket2::Socket,
    deadline: Instant,
}

impl ScrapeStream {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        // A time that rounds down to zero would be none.
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left.max(Duration::from_millis(1)))) }
    }
}

impl Read for ScrapeStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(into)
    }
}

impl Write for ScrapeStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        // Without SIGPIPE, which the program may not ignore. On Apple's systems, an option of the socket
        // does this.
        #[cfg(all(unix, not(target_vendor = "apple")))]
        return self.socket.send_with_flags(from, libc::MSG_NOSIGNAL);
        #[cfg(not(all(unix, not(target_vendor = "apple"))))]
        return self.socket.send(from);
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(unix, not(miri)))]
mod path {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileTypeExt;
    use std::path::{Path, PathBuf};

    use rustix::fs::Mode;

    use crate::sys::{above_standard, naming};

    /// A Unix socket at a path, which is removed when this is dropped.
    pub(crate) struct PathListener {
        pub(super) socket: mio::net::UnixListener,
        path: PathBuf,
        /// The process that made it. A forked child also has this value.
        owner: u32,
    }

    impl PathListener {
        pub(super) fn bind(path: &str) -> io::Result<PathListener> {
            let path = std::path::absolute(path)?;
            let socket = match listen(&path) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(&path) => {
                    std::fs::remove_file(&path)?;
                    listen(&path)?
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_no_socket(&path) => {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket is there"));
                }
                bound => bound?,
            };
            Ok(PathListener { socket, path, owner: std::process::id() })
        }

        pub(super) fn accept_next(&self) -> io::Result<socket2::Socket> {
            let (stream, _) = above_standard(|| self.socket.accept()).map_err(naming("accept4"))?;
            Ok(OwnedFd::from(stream).into())
        }
    }

    impl Drop for PathListener {
        fn drop(&mut self) {
            if self.owner == std::process::id() {
                // If it has been removed, there is nothing to do.
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }

    fn listen(path: &Path) -> io::Result<mio::net::UnixListener> {
        let socket = bound(path)?;
        socket.listen(128)?;
        Ok(mio::net::UnixListener::from_std(OwnedFd::from(socket).into()))
    }

    /// Makes the socket at a path, to which only this user has a right. It does not listen yet: other
    /// users could connect to one that listened before.
    fn bound(path: &Path) -> io::Result<socket2::Socket> {
        const OWN: Mode = Mode::RUSR.union(Mode::WUSR);
        let socket = above_standard(|| socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None))?;
        socket.set_nonblocking(true)?;
        // On Linux, the socket at the path has the rights of the socket itself.
        #[cfg(target_os = "linux")]
        rustix::fs::fchmod(&socket, OWN)?;
        socket.bind(&socket2::SockAddr::unix(path)?)?;
        #[cfg(not(target_os = "linux"))]
        rustix::fs::chmodat(rustix::fs::CWD, path, OWN, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
            .inspect_err(|_| _ = std::fs::remove_file(path))?;
        Ok(socket)
    }

    fn is_no_socket(path: &Path) -> bool {
        path.symlink_metadata().is_ok_and(|metadata| !metadata.file_type().is_socket())
    }

    /// Returns whether a path is a socket at which no process listens.
    fn is_abandoned(path: &Path) -> bool {
        let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
        // A process that accepts nothing still listens: a connection does not wait for it.
        let connects = || {
            let socket = above_standard(|| socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None))?;
            socket.set_nonblocking(true)?;
            socket.connect(&socket2::SockAddr::unix(path)?)
        };
        is_socket && connects().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    }

    #[cfg(test)]
    mod tests {
        use std::os::unix::fs::PermissionsExt;
        use std::os::unix::net::UnixStream;

        use super::*;

        #[test]
        fn no_other_user_has_a_right_to_a_socket_when_it_begins_to_listen() {
            let path = std::env::temp_dir().join(format!("kolo-scrape-{}", std::process::id()));
            let socket = bound(&path).unwrap();
            let mode = path.metadata().unwrap().permissions().mode() & 0o777;
            let before = UnixStream::connect(&path).map_err(|error| error.kind());
            socket.listen(1).unwrap();
            let after = UnixStream::connect(&path).map(drop);
            std::fs::remove_file(&path).unwrap();
            assert_eq!((mode, before.err()), (0o600, Some(io::ErrorKind::ConnectionRefused)));
            after.unwrap();
        }
    }
}
