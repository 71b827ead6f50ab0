//! Windows: sections, named events, sockets on loopback, handles of processes.
//!
//! A section has no name. A process hands it over as a handle in the receiver's process. What peers
//! find by its name (the port of a listener, the events of sleepers, the number of the machine) has
//! a security descriptor that admits this user only.

mod file;
mod handle;
mod host;
mod local_socket;
mod mapping;
mod memory;
mod process;
mod security;
mod sleep;
#[cfg(test)]
mod tests;
mod view;

pub(super) use file::{file_id, lock};
pub(crate) use host::{boot_identity, hostname, port_holder};
pub(crate) use local_socket::{LocalListener, LocalStream};
pub(super) use mapping::Mapping;
pub(crate) use memory::available_memory;
pub(super) use memory::{check_file_size, page_size};
pub(super) use process::own_creation;
pub(crate) use process::{ProcessWatch, is_no_process, is_stopped, process_namespace, read_process};
pub(crate) use sleep::{sleep_on, wake_all};
