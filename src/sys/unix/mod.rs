//! What Linux and macOS have in common: mapping memory that a descriptor stands for, handing the
//! descriptor over through a Unix socket, and waiting on such a socket.
//!
//! `named_memory` and `path_socket` use only what POSIX has. macOS shares memory by them. Linux has
//! better means. It compiles them for their tests, and with `--cfg kolo_posix`, which makes the whole
//! library use them: so they are tested without a Mac.

#[cfg(not(target_os = "linux"))]
mod copy_pages;
mod local_socket;
mod mapping;
mod memory;
#[cfg(any(not(target_os = "linux"), kolo_posix, test))]
mod named_memory;
#[cfg(any(not(target_os = "linux"), kolo_posix, test))]
mod path_socket;
#[cfg(not(target_os = "linux"))]
pub(super) mod sysctl;
#[cfg(test)]
mod tests;

pub(super) use local_socket::connect_to;
pub(crate) use local_socket::{LocalListener, LocalStream};
#[cfg(target_os = "linux")]
pub(super) use mapping::make_pages_private;
#[cfg(all(test, target_os = "linux"))]
pub(super) use mapping::{MOST_RESERVED, map_pages_private, write_every_page};
pub(super) use mapping::{Mapping, Memory, reserve_in_pieces};
pub(crate) use memory::available_memory;
#[cfg(all(test, target_os = "linux"))]
pub(crate) use memory::resident_bytes;
pub(super) use memory::{check_file_size, page_size};
#[cfg(any(not(target_os = "linux"), kolo_posix))]
pub(super) use named_memory::NamedMemory;
#[cfg(any(not(target_os = "linux"), kolo_posix))]
pub(super) use path_socket::{Folder, connect, folder_of_listeners};

/// Returns the name of this machine, for messages.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
