//! Unix: sockets, mmap and, on Linux, the futex and the processor of a thread.

use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A connection between a rank and the comparison.
pub(in crate::compare) type Stream = UnixStream;

/// Accepts the ranks.
pub(in crate::compare) struct Listener(UnixListener);

impl Listener {
    /// Makes the socket at `path`.
    pub(in crate::compare) fn bind(path: &Path) -> io::Result<Listener> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Listener(listener))
    }

    /// Accepts the next rank; `WouldBlock` if there is none.
    pub(in crate::compare) fn accept(&self) -> io::Result<Stream> {
        Ok(self.0.accept()?.0)
    }
}

pub(in crate::compare) fn connect(path: &Path) -> io::Result<Stream> {
    UnixStream::connect(path)
}

/// Returns `Ok`: the programs of other libraries connect to the socket.
pub(in crate::compare) fn check_peers() -> Result<(), String> {
    Ok(())
}

/// Maps the first `len` bytes of a file until the process ends. Processes that map the file share
/// them.
pub(in crate::compare) fn map(file: &File, len: usize) -> io::Result<*mut u8> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
    let base = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)? };
    Ok(base.cast())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::sync::atomic::AtomicU32;

    use rustix::io::Errno;
    use rustix::thread::futex::{Flags, wait, wake};
    use rustix::thread::{CpuSet, sched_setaffinity};

    /// Lets this thread run on one processor only.
    pub(in crate::compare) fn bind_thread(processor: u32) -> io::Result<()> {
        let mut set = CpuSet::new();
        if processor as usize >= CpuSet::MAX_CPU {
            return Err(io::ErrorKind::Unsupported.into());
        }
        set.set(processor as usize);
        Ok(sched_setaffinity(None, &set)?)
    }

    pub(in crate::compare) fn check_futex() -> Result<(), String> {
        Ok(())
    }

    /// Sleeps while the word has this value, or shorter.
    pub(in crate::compare) fn sleep_on(word: &AtomicU32, value: u32) -> io::Result<()> {
        match wait(word, Flags::empty(), value, None) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes all that sleep on the word.
    pub(in crate::compare) fn wake_all(word: &AtomicU32) -> io::Result<()> {
        wake(word, Flags::empty(), i32::MAX as u32)?;
        Ok(())
    }
}

#[cfg(target_os = "linux")]
pub(in crate::compare) use linux::{bind_thread, check_futex, sleep_on, wake_all};

#[cfg(not(target_os = "linux"))]
pub(in crate::compare) use super::no_futex::{bind_thread, check_futex, sleep_on, wake_all};
