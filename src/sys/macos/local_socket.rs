//! The names of local sockets: paths below a folder of this user.

use std::io;
use std::time::Instant;

use crate::sys::unix::local_socket::{self, LocalStream};
use crate::sys::unix::path_socket::{self, Folder};

pub(crate) type LocalListener = local_socket::LocalListener<Folder>;

impl LocalStream {
    /// Connects to a name of this host. Fails with `ConnectionRefused` if there is no listener of
    /// this name, and with `TimedOut` if its queue is full until the deadline.
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        path_socket::connect(name, deadline)
    }
}
