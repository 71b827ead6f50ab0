//! What stands in for Linux's own means with `--cfg kolo_posix`: what macOS has, as far as Linux
//! has it, too.

use std::io;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use crate::sys::Process;
use crate::sys::doze::doze;
use crate::sys::unix::local_socket::{self, LocalStream};
use crate::sys::unix::mapping;
use crate::sys::unix::named_memory::NamedMemory;
use crate::sys::unix::path_socket::{Folder, connect};

pub(crate) type LocalListener = local_socket::LocalListener<Folder>;
pub(in crate::sys) type Mapping = mapping::Mapping<NamedMemory>;

impl LocalStream {
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        connect(name, deadline)
    }
}

/// Dozes, as before macOS 14.4.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    doze(word, value, timeout);
}

pub(crate) fn wake_all(_: &AtomicU32) {}

/// Returns `Unsupported`.
pub(crate) unsafe fn read_process(_: Process, _: u64, _: *mut u8, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
