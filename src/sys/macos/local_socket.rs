//! The names of local sockets: paths below a folder of this user.

use std::io;
use std::time::Instant;

use crate::sys::unix::{self, Folder, LocalStream};

pub(crate) type LocalListener = unix::LocalListener<Folder>;

impl LocalStream {
    /// Connects to a name of this host. Fails with `ConnectionRefused` if there is no listener of
    /// this name, and with `TimedOut` if its queue is full until the deadline.
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        unix::connect(name, deadline)
    }
}
