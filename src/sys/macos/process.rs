//! Other processes of this machine.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::kqueue::{Event, EventFilter, EventFlags, ProcessEvents, kevent, kqueue};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::sys::{Guarded, Process, above_standard};

/// Returns what the system says about a process; an error of [`is_no_process`] if it has ended.
fn information(id: u32) -> io::Result<libc::proc_bsdinfo> {
    // SAFETY: all fields are numbers.
    let mut information: libc::proc_bsdinfo = unsafe { std::mem::zeroed() };
    let len = size_of::<libc::proc_bsdinfo>() as libc::c_int;
    // SAFETY: the call writes at most `len` bytes.
    let written = unsafe { libc::proc_pidinfo(id as libc::c_int, libc::PROC_PIDTBSDINFO, 0, (&raw mut information).cast(), len) };
    if written == len { Ok(information) } else { Err(io::Error::last_os_error()) }
}

/// Returns when a process was created, in microseconds.
fn created(id: u32) -> io::Result<u64> {
    information(id).map(|of| of.pbi_start_tvsec * 1_000_000 + of.pbi_start_tvusec)
}

/// Returns when this process was created; 0 if the system does not say. A forked child was created
/// at another time than its parent.
pub(in crate::sys) fn own_creation() -> u64 {
    created(std::process::id()).unwrap_or(0)
}

/// Detects the end of another process.
pub(crate) struct ProcessWatch {
    queue: Guarded<OwnedFd>,
    /// The system reports the end once.
    has_ended: AtomicBool,
}

impl ProcessWatch {
    /// Begins to watch a process; `None` if it has ended, even if another one has its id by now.
    pub(crate) fn open(process: Process) -> io::Result<Option<ProcessWatch>> {
        let pid = i32::try_from(process.id).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let queue = above_standard(kqueue)?;
        rustix::io::fcntl_setfd(&queue, rustix::io::FdFlags::CLOEXEC)?;
        let end = EventFilter::Proc { pid, flags: ProcessEvents::EXIT };
        let watched = Event::new(end, EventFlags::ADD, std::ptr::null_mut());
        let mut none: [Event; 0] = [];
        // SAFETY: the filter names a process and no descriptor.
        match unsafe { kevent(&queue, &[watched], &mut none[..], Some(Duration::ZERO)) } {
            Ok(_) => {}
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // Now that the process of this id is watched, it is known which one that is.
        match created(process.id) {
            Ok(other) if process.created != 0 && other != process.created => Ok(None),
            Err(error) if is_no_process(&error) => Ok(None),
            // Another user's process has the id now: this one's ranks run as this user.
            Err(error) if process.created != 0 && error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
            _ => Ok(Some(ProcessWatch { queue: Guarded::new(queue), has_ended: AtomicBool::new(false) })),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        if self.has_ended.load(Ordering::Relaxed) {
            return true;
        }
        let mut events = Vec::with_capacity(1);
        // SAFETY: the call changes no filter.
        let reported = unsafe { kevent(&self.queue, &[], rustix::buffer::spare_capacity(&mut events), Some(Duration::ZERO)) };
        let has_ended = matches!(reported, Ok(count) if count > 0);
        if has_ended {
            self.has_ended.store(true, Ordering::Relaxed);
        }
        has_ended
    }
}

/// Returns whether a process is stopped, by a signal or a debugger.
pub(crate) fn is_stopped(process: Process) -> bool {
    information(process.id).is_ok_and(|of| of.pbi_status == libc::SSTOP)
}

/// Returns `Unsupported`: only a process that may debug another one reads its memory.
///
/// # Safety
///
/// There are no conditions. On other systems there are.
pub(crate) unsafe fn read_process(_: Process, _: u64, _: *mut u8, _: usize) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "macOS does not let a process read another one's memory"))
}

/// Returns whether an error says that a process does not exist.
pub(crate) fn is_no_process(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns the namespace of process ids: the processes of a machine have one.
pub(crate) fn process_namespace() -> Option<u64> {
    Some(1)
}
