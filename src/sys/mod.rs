//! The only place with calls to the operating system: shared memory, waiting on it, handing it over, raw socket I/O, and
//! what tells one host and one process from another.
//!
//! `linux` has all of it. `portable` stands in where a platform lacks shared memory so far: every call answers
//! "unsupported", and kolo uses TCP.

mod segment;
mod socket;
mod wait;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
use linux as platform;
#[cfg(not(target_os = "linux"))]
mod portable;
#[cfg(not(target_os = "linux"))]
use portable as platform;

pub(crate) use platform::{
    LocalListener, LocalStream, ProcessWatch, boot_identity, hostname, port_holder, process_namespace, sleep_on, wake_all,
};
pub(crate) use segment::Segment;
pub(crate) use socket::{PARTS, receive, send};
pub(crate) use wait::{Patience, Waiting};

/// Processors that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
