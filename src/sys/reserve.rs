//! A descriptor that a process keeps for when it has no other left.

use std::time::Instant;

use parking_lot::Mutex;
use socket2::{Domain, Socket, Type};

use super::above_standard;
use super::descriptor::Guarded;

/// A descriptor that is open only so that another one can be opened in its place.
pub(crate) struct Reserve(Mutex<Option<Guarded<Socket>>>);

impl Reserve {
    /// Keeps a descriptor, if there is one.
    pub(crate) fn new() -> Reserve {
        Reserve(Mutex::new(open()))
    }

    /// Calls `call` while the descriptor is closed. Then keeps one again, if there is one. Returns `None` if
    /// other threads have done so until the deadline.
    pub(crate) fn without<T>(&self, deadline: Instant, call: impl FnOnce() -> T) -> Option<T> {
        let mut kept = self.0.try_lock_until(deadline)?;
        *kept = None;
        let result = call();
        *kept = open();
        Some(result)
    }
}

/// Opens a socket that no peer can reach.
fn open() -> Option<Guarded<Socket>> {
    above_standard(|| Socket::new(Domain::IPV4, Type::DGRAM, None)).ok().map(Guarded::new)
}
