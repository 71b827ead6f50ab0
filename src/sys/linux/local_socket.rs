//! The names of local sockets: abstract ones.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::time::Instant;

use crate::sys::unix::local_socket::{self, LocalStream, connect_to};

/// Such a name leaves nothing in the file system.
pub(crate) type LocalListener = local_socket::LocalListener<()>;

impl LocalStream {
    /// Connects to a name of this host. Fails with `ConnectionRefused` if there is no listener of
    /// this name, and with `TimedOut` if its queue is full until the deadline.
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        connect_to(&SocketAddr::from_abstract_name(name)?, deadline, |error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl LocalListener {
    pub(crate) fn bind(name: &str) -> io::Result<LocalListener> {
        LocalListener::at(&SocketAddr::from_abstract_name(name)?, ())
    }
}
