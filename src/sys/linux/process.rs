//! Other processes of this machine.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sys::{Guarded, Process, above_standard};

/// Returns 0: an id is given to another process only after all others have been given.
pub(in crate::sys) fn own_creation() -> u64 {
    0
}

/// Detects the end of another process.
pub(crate) struct ProcessWatch(Guarded<OwnedFd>);

impl ProcessWatch {
    /// Begins to watch a process; `None` if it has ended.
    pub(crate) fn open(process: Process) -> io::Result<Option<ProcessWatch>> {
        let pid = Pid::from_raw(process.id as i32).ok_or(io::ErrorKind::InvalidInput)?;
        match above_standard(|| pidfd_open(pid, PidfdFlags::empty())) {
            Ok(file) => Ok(Some(ProcessWatch(Guarded::new(file)))),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)), Ok(count) if count > 0)
    }
}

/// Returns whether a process that this one sees is stopped, by a signal or a debugger.
pub(crate) fn is_stopped(process: Process) -> bool {
    let pid = process.id;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain any characters.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let is_ours = || fs::read_link(format!("/proc/{pid}/ns/pid")).ok() == fs::read_link("/proc/self/ns/pid").ok();
    matches!(state, Some('T' | 't')) && is_ours()
}

/// Copies memory of another process of this machine, which may change meanwhile. `address` belongs
/// to that process: the system reads there, and this process never dereferences it.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and no other thread accesses it meanwhile.
#[cfg(not(kolo_posix))]
pub(crate) unsafe fn read_process(process: Process, address: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: (address as usize).wrapping_add(done) as *mut _, iov_len: len - done };
        // SAFETY: each vector has one element. The caller vouches for `to`, and the system checks
        // the address in the other process.
        match unsafe { libc::process_vm_readv(process.id as i32, &local, 1, &remote, 1, 0) } {
            count @ 1.. => done += count as usize,
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Returns whether an error of [`read_process`] says that the process does not exist.
pub(crate) fn is_no_process(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns the process namespace: processes with the same one see each other under the same process
/// ids.
pub(crate) fn process_namespace() -> Option<u64> {
    Some(fstat(fs::File::open("/proc/self/ns/pid").ok()?).ok()?.st_ino)
}
