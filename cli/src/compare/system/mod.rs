//! What a comparison asks of the system, where systems differ: the connection between a rank and
//! the comparison, memory that ranks map, a sleep on it, and the
//! processor of a thread.

#[cfg(not(target_os = "linux"))]
mod no_futex;
#[cfg(unix)]
mod unix;
#[cfg(unix)]
use unix as platform;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as platform;

pub(super) use platform::{Listener, Stream, bind_thread, check_futex, check_peers, connect, map, sleep_on, wake_all};
