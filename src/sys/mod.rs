//! The only place with calls to the operating system: shared memory, waiting on it, handing it over, raw socket I/O, and
//! what tells one host and one process from another.
//!
//! `linux` has all of it. `portable` stands in where a platform lacks shared memory so far: every call answers
//! "unsupported", and kolo uses TCP.

mod clock;
mod facts;
mod file;
mod fork;
mod helper;
mod secret;
mod segment;
mod signal;
mod socket;
mod wait;

// Miri runs no system calls; what it can run is the same everywhere.
#[cfg(all(target_os = "linux", not(miri)))]
mod linux;
#[cfg(all(target_os = "linux", not(miri)))]
use linux as platform;
#[cfg(any(not(target_os = "linux"), miri))]
mod portable;
#[cfg(any(not(target_os = "linux"), miri))]
use portable as platform;

pub(crate) use clock::{Timeline, clock_identity, monotonic, ticks, wall};
pub(crate) use facts::{Cuda, address_space_limit, clock_source, descriptor_limit, may_have_devices, probe_cuda, reading_policy};
pub(crate) use file::{
    NotOpened, check_folder, close, has_file_permissions, is_locked_out, is_open_to_others, is_still_at, open_own,
};
pub(crate) use fork::{between_forks, count_forks, forks, forks_seen};
pub(crate) use helper::{Helper, by_deadline, resolve};
pub(crate) use platform::{
    LocalListener, LocalStream, ProcessWatch, available_memory, boot_identity, hostname, is_stopped, port_holder,
    process_namespace, read_process, sleep_on, wake_all,
};
pub(crate) use secret::read_secret_file;
pub(crate) use segment::{PageSize, Segment};
pub(crate) use signal::on_user_signal;
pub(crate) use socket::{PARTS, is_want, listen, own_loopback, receive, send, send_unpaced, want};
pub(crate) use wait::{Patience, Waiting};

/// What to do about a file that is not read or written in time.
pub(crate) const SILENT_FILE: &str = "its file system did not answer in time; check the mount and the server behind it";

/// Whether a process that this one sees has ended, as far as the system says.
pub(crate) fn has_ended(pid: u32) -> bool {
    match ProcessWatch::open(pid) {
        Ok(None) => true,
        Ok(Some(watch)) => watch.has_ended(),
        Err(_) => false,
    }
}

/// Processors that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The process that started this one; 0 where that cannot be told.
pub(crate) fn parent() -> u32 {
    #[cfg(unix)]
    return std::os::unix::process::parent_id();
    #[cfg(not(unix))]
    return 0;
}
