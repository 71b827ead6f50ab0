//! Stands in on platforms without shared memory. No value of these types can be made, so no method
//! is ever called; the types let the rest of the library compile unchanged.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};

use super::Process;
use super::doze::doze;

fn unsupported<T>() -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "kolo has no shared memory between processes on this platform"))
}

pub(super) fn check_file_size(_: usize) -> io::Result<()> {
    unsupported()
}

pub(super) struct Mapping(Infallible);

impl Mapping {
    pub(super) fn create(_: usize, _: usize) -> io::Result<Mapping> {
        unsupported()
    }

    pub(super) fn take_over(_: &LocalStream, _: usize, _: Instant) -> io::Result<Mapping> {
        unsupported()
    }

    #[cfg(test)]
    pub(super) fn again(&self) -> io::Result<Mapping> {
        match self.0 {}
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        match self.0 {}
    }

    pub(super) fn extend(&self, _: Range<usize>, _: Instant) -> io::Result<Mapping> {
        match self.0 {}
    }

    pub(super) fn extension(&self, _: Range<usize>) -> io::Result<Mapping> {
        match self.0 {}
    }

    pub(super) fn reserve(&self, _: Range<usize>, _: Instant) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn populate(&self, _: Range<usize>) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn provide(&self, _: Range<usize>) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn close(&self) {
        match self.0 {}
    }

    pub(super) fn release(&self, _: Range<usize>) {
        match self.0 {}
    }

    pub(super) fn make_private(&self, _: Range<usize>) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn hand_over(&self, _: &LocalStream) -> io::Result<()> {
        match self.0 {}
    }
}

/// Returns the alignment of regions; no pages are mapped here.
pub(super) fn page_size() -> usize {
    4096
}

/// Dozes: there is no way to sleep on memory.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    doze(word, value, timeout);
}

pub(crate) fn wake_all(_: &AtomicU32) {}

pub(crate) struct LocalStream(Infallible);

impl LocalStream {
    pub(crate) fn connect(_: &str, _: Instant) -> io::Result<LocalStream> {
        unsupported()
    }

    pub(crate) fn is_of_this_user(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn peek(&self) -> io::Result<usize> {
        match self.0 {}
    }

    pub(crate) fn is_intact(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn until(&self, _: Instant) -> LocalUntil {
        match self.0 {}
    }
}

impl Read for &LocalStream {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }
}

impl Write for &LocalStream {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0 {}
    }
}

impl mio::event::Source for LocalStream {
    fn register(&mut self, _: &Registry, _: Token, _: Interest) -> io::Result<()> {
        match self.0 {}
    }

    fn reregister(&mut self, _: &Registry, _: Token, _: Interest) -> io::Result<()> {
        match self.0 {}
    }

    fn deregister(&mut self, _: &Registry) -> io::Result<()> {
        match self.0 {}
    }
}

pub(crate) struct LocalUntil(Infallible);

impl Read for LocalUntil {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }
}

impl Write for LocalUntil {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0 {}
    }
}

pub(crate) struct LocalListener(Infallible);

impl LocalListener {
    pub(crate) fn bind(_: &str) -> io::Result<LocalListener> {
        unsupported()
    }

    pub(crate) fn accept(&self) -> io::Result<LocalStream> {
        match self.0 {}
    }

    pub(crate) fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        match self.0 {}
    }
}

pub(crate) struct ProcessWatch(Infallible);

impl ProcessWatch {
    pub(crate) fn open(_: Process) -> io::Result<Option<ProcessWatch>> {
        unsupported()
    }

    pub(crate) fn has_ended(&self) -> bool {
        match self.0 {}
    }
}

pub(super) fn own_creation() -> u64 {
    0
}

pub(crate) fn is_stopped(_: Process) -> bool {
    false
}

pub(crate) unsafe fn read_process(_: Process, _: u64, _: *mut u8, _: usize) -> io::Result<()> {
    unsupported()
}

pub(crate) fn is_no_process(_: &io::Error) -> bool {
    false
}

pub(crate) fn hostname() -> String {
    ["HOSTNAME", "COMPUTERNAME"]
        .iter()
        .find_map(|name| super::variable(name)?.into_string().ok())
        .unwrap_or_else(|| "localhost".to_owned())
}

pub(crate) fn boot_identity() -> Option<String> {
    None
}

pub(crate) fn process_namespace() -> Option<u64> {
    None
}

pub(crate) fn available_memory() -> Option<u64> {
    None
}

pub(crate) fn port_holder(_: &[SocketAddr]) -> Option<String> {
    None
}
