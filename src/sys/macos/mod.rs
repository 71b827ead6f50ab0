//! macOS: objects of `shm_open`, descriptors over Unix sockets, `os_sync_wait_on_address`, kqueue.
//!
//! No process reads another's memory: that needs the right to debug it. Callers copy through shared
//! memory instead.

mod host;
mod local_socket;
mod process;
mod sleep;

pub(crate) use host::{boot_identity, port_holder};
pub(crate) use local_socket::LocalListener;
pub(super) use process::own_creation;
pub(crate) use process::{ProcessWatch, is_no_process, is_stopped, process_namespace, read_process};
pub(crate) use sleep::{sleep_on, wake_all};

pub(crate) use super::unix::hostname;
pub(crate) use super::unix::local_socket::LocalStream;
pub(crate) use super::unix::memory::available_memory;
pub(super) use super::unix::memory::{check_file_size, page_size};

pub(super) type Mapping = super::unix::mapping::Mapping<super::unix::named_memory::NamedMemory>;
