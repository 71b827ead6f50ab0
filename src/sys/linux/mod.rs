//! Linux: memfd, futex, descriptors over abstract Unix sockets, pidfd.

#[cfg(any(feature = "cuda", test))]
mod exported_file;
#[cfg(not(kolo_posix))]
mod futex;
mod host;
#[cfg(not(kolo_posix))]
mod local_socket;
#[cfg(not(kolo_posix))]
mod mapping;
#[cfg(kolo_posix)]
mod posix;
mod process;
#[cfg(all(test, not(kolo_posix)))]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use exported_file::{ExportedFile, ImportedFile, can_export_files};
#[cfg(not(kolo_posix))]
pub(crate) use futex::{sleep_on, wake_all};
pub(crate) use host::{boot_identity, port_holder};
#[cfg(not(kolo_posix))]
pub(crate) use local_socket::LocalListener;
#[cfg(not(kolo_posix))]
pub(super) use mapping::Mapping;
#[cfg(kolo_posix)]
pub(super) use posix::Mapping;
#[cfg(kolo_posix)]
pub(crate) use posix::{LocalListener, read_process, sleep_on, wake_all};
pub(super) use process::own_creation;
#[cfg(not(kolo_posix))]
pub(crate) use process::read_process;
pub(crate) use process::{ProcessWatch, is_no_process, is_stopped, process_namespace};

pub(crate) use super::unix::hostname;
pub(crate) use super::unix::local_socket::LocalStream;
pub(crate) use super::unix::memory::available_memory;
pub(super) use super::unix::memory::{check_file_size, page_size};
