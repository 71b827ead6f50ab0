//! The socket at which a process serves its metrics, and its connections: TCP, or a Unix socket.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};

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
        let listener = mio::net::TcpListener::bind(address)?;
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
            ScrapeListener::Tcp(listener) => {
                listener.accept().map(|(stream, _)| socket2::Socket::from(std::net::TcpStream::from(stream)))?
            }
            #[cfg(all(unix, not(miri)))]
            ScrapeListener::Path(listener) => listener.accept()?,
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
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::path::{Path, PathBuf};

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
            let socket = match mio::net::UnixListener::bind(&path) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(&path) => {
                    std::fs::remove_file(&path)?;
                    mio::net::UnixListener::bind(&path)?
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_no_socket(&path) => {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket is there"));
                }
                bound => bound?,
            };
            let listener = PathListener { socket, path, owner: std::process::id() };
            std::fs::set_permissions(&listener.path, std::fs::Permissions::from_mode(0o600))?;
            Ok(listener)
        }

        pub(super) fn accept(&self) -> io::Result<socket2::Socket> {
            let (stream, _) = self.socket.accept()?;
            Ok(std::os::fd::OwnedFd::from(stream).into())
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

    fn is_no_socket(path: &Path) -> bool {
        path.symlink_metadata().is_ok_and(|metadata| !metadata.file_type().is_socket())
    }

    /// Returns whether a path is a socket at which no process listens.
    fn is_abandoned(path: &Path) -> bool {
        let is_socket = path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
        // A process that accepts nothing still listens: a connection does not wait for it.
        let connects = || {
            let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            socket.connect(&socket2::SockAddr::unix(path)?)
        };
        is_socket && connects().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    }
}
