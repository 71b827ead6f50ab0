//! What Linux and macOS have in common: mapping memory that a descriptor stands for, handing the
//! descriptor over through a Unix socket, and waiting on such a socket.
//!
//! `named_memory` and `path_socket` use only what POSIX has. macOS shares memory by them. Linux has
//! better means. It compiles them for their tests, and with `--cfg kolo_posix`, which makes the
//! whole library use them: so they are tested without a Mac.

#[cfg(not(target_os = "linux"))]
mod copy_pages;
pub(super) mod local_socket;
pub(super) mod mapping;
pub(super) mod memory;
#[cfg(any(not(target_os = "linux"), kolo_posix, test))]
pub(super) mod named_memory;
pub(super) mod object;
#[cfg(any(not(target_os = "linux"), kolo_posix, test))]
pub(super) mod path_socket;
#[cfg(not(target_os = "linux"))]
pub(super) mod sysctl;
#[cfg(test)]
mod tests;

/// Returns the name of this machine, for messages.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
