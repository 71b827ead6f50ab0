//! All calls to the operating system: shared memory, waiting on it, handing it over, raw socket
//! I/O, files, processes, and what distinguishes hosts and processes.
//!
//! `linux`, `macos` and `windows` have shared memory, with the same items. `unix` is what the first
//! two have in common. `portable` stands in on other platforms: every call returns `Unsupported`,
//! and kolo uses TCP.

mod advice;
mod clock;
mod descriptor;
#[cfg(any(not(any(target_os = "linux", windows)), kolo_posix, miri))]
mod doze;
mod environment;
#[cfg(any(not(target_os = "linux"), kolo_posix, test))]
mod extensions;
mod facts;
mod file;
mod fork;
mod helper;
#[cfg(unix)]
mod limits;
mod new_file;
#[cfg(all(feature = "cuda", any(not(target_os = "linux"), miri)))]
mod no_exported_file;
mod poll;
mod process;
mod processor;
mod refusal;
mod region;
mod reserve;
mod scrape;
mod secret;
mod signal;
mod socket;
mod socket_watch;
#[cfg(all(test, any(target_os = "linux", target_os = "macos", windows), not(miri)))]
mod tests;
mod topology;
mod wait;

// Miri runs no system calls. What it can run is the same on all platforms.
#[cfg(all(target_os = "linux", not(miri)))]
mod linux;
#[cfg(all(target_os = "linux", not(miri)))]
use linux as platform;
#[cfg(all(target_os = "macos", not(miri)))]
mod macos;
#[cfg(all(target_os = "macos", not(miri)))]
use macos as platform;
#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
mod unix;
#[cfg(all(windows, not(miri)))]
mod windows;
#[cfg(all(windows, not(miri)))]
use windows as platform;
#[cfg(any(not(any(target_os = "linux", target_os = "macos", windows)), miri))]
mod portable;
#[cfg(any(not(any(target_os = "linux", target_os = "macos", windows)), miri))]
use portable as platform;

pub(crate) use advice::{LOCAL_CONNECTIONS, MORE_MEMORY, READING, READING_CALL, how_to_remove};
pub(crate) use clock::{Timeline, clock_identity, monotonic, ticks, wall};
pub(crate) use descriptor::{Guarded, TcpStream, above_standard};
pub(crate) use environment::{is_overruled, variable, variable_names};
#[cfg(feature = "cuda")]
pub(crate) use facts::loaded_libraries;
pub(crate) use facts::{Cuda, address_space_limit, clock_source, descriptor_limit, may_have_devices, probe_cuda, reading_policy};
pub(crate) use file::{
    NotOpened, check_folder, close, has_drive_letters, has_file_permissions, is_open_to_others, is_still_at, open_own, remove,
    try_lock, try_lock_shared,
};
pub(crate) use fork::{between_forks, count_forks, forks, forks_seen};
pub(crate) use helper::{Helper, by_deadline, resolve};
pub use new_file::{Destination, write_file, write_file_or_device};
pub(crate) use new_file::{make_folder, open_regular};
#[cfg(all(feature = "cuda", any(not(target_os = "linux"), miri)))]
pub(crate) use no_exported_file::{ExportedFile, ImportedFile, can_export_files};
#[cfg(all(feature = "cuda", target_os = "linux", not(miri)))]
pub(crate) use platform::{ExportedFile, ImportedFile, can_export_files};
pub(crate) use platform::{
    LocalListener, LocalStream, ProcessWatch, available_memory, boot_identity, hostname, is_no_process, is_stopped, port_holder,
    process_namespace, read_process, sleep_on, wake_all,
};
pub(crate) use poll::{Poll, Waker, join};
pub(crate) use process::Process;
pub(crate) use processor::{move_thread, processor};
pub(crate) use refusal::{is_refused, naming, refusal, refusal_behind, try_out};
pub(crate) use region::{PageSize, Region};
pub(crate) use reserve::Reserve;
pub(crate) use scrape::ScrapeListener;
pub(crate) use secret::read_secret_file;
#[cfg(all(feature = "redis", test))]
pub(crate) use signal::end_by_sigpipe;
pub(crate) use signal::on_user_signal;
#[cfg(feature = "redis")]
pub(crate) use signal::without_sigpipe;
pub(crate) use socket::{
    LOSS_TOLERANT, MOST_PARTS, PARTS, UNPACED, asks_about_listeners, congestion_control, connect, connect_from, connect_within,
    is_resource_shortage, limit_unsent, listen, listen_anywhere, listen_within, own_loopback, receive, resource_shortage, send,
    set_congestion_control, shortage_of, tcp_socket,
};
pub(crate) use socket_watch::{Flow, SocketInfo, SocketWatch, sent_by_host};
pub use topology::{Domain, domains};
pub(crate) use topology::{Domains, Processors, affinity, is_crowded};
pub(crate) use wait::{Backoff, Patience, Waiting};

/// The advice for a file that is not read or written in time.
pub(crate) const SILENT_FILE: &str = "its file system did not answer in time; check the mount and the server behind it";

/// What a process needs to have another one hand over a file.
#[cfg(any(feature = "cuda", test))]
pub(crate) type Ticket = [u8; 32];

impl Process {
    /// Returns this process.
    pub(crate) fn own() -> Process {
        Process { id: std::process::id(), created: platform::own_creation() }
    }
}

/// Returns whether a process that this one sees is known to have ended.
pub(crate) fn has_ended(process: Process) -> bool {
    match ProcessWatch::open(process) {
        Ok(None) => true,
        Ok(Some(watch)) => watch.has_ended(),
        Err(_) => false,
    }
}

#[cfg(test)]
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../../tests/common/wait.rs"]
mod waiting_tests;
#[cfg(test)]
pub(crate) use waiting_tests::wait_until;

/// Whether tests try every case of a matrix, and not only its diagonal: `KOLO_TEST_ALL=1`.
#[cfg(test)]
pub(crate) fn every_case() -> bool {
    std::env::var_os("KOLO_TEST_ALL").is_some()
}

/// Returns how many processors this process may use.
#[must_use]
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Returns the process that started this one; 0 where the system does not say.
pub(crate) fn parent() -> u32 {
    #[cfg(unix)]
    return std::os::unix::process::parent_id();
    #[cfg(not(unix))]
    return 0;
}
