//! Linux: memfd, futex, descriptors over abstract Unix sockets, pidfd.

mod futex;
mod host;
mod local_socket;
mod mapping;
mod memory;
mod process;
#[cfg(test)]
mod tests;

pub(crate) use futex::{sleep_on, wake_all};
pub(crate) use host::{boot_identity, hostname, port_holder};
pub(crate) use local_socket::{LocalListener, LocalStream};
pub(super) use mapping::Mapping;
pub(crate) use memory::available_memory;
#[cfg(test)]
pub(crate) use memory::resident_bytes;
pub(super) use memory::{check_file_size, page_size};
pub(super) use process::own_creation;
pub(crate) use process::{ProcessWatch, is_no_process, is_stopped, process_namespace, read_process};
