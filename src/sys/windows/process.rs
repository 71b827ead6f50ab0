//! Other processes of this machine.

use std::io;
use std::os::windows::io::{AsRawHandle, OwnedHandle};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use windows_sys::Win32::Foundation::{ERROR_INVALID_PARAMETER, FILETIME, HANDLE, WAIT_OBJECT_0};
use windows_sys::Win32::System::Diagnostics::Debug::ReadProcessMemory;
use windows_sys::Win32::System::Threading::{
    GetCurrentProcess, GetProcessTimes, OpenProcess, PROCESS_ACCESS_RIGHTS, PROCESS_QUERY_LIMITED_INFORMATION,
    PROCESS_SYNCHRONIZE, PROCESS_VM_READ, WaitForSingleObject,
};

use super::handle::own;
use crate::sys::Process;

/// Opens a process; `None` if it has ended, even if another one has its id by now.
pub(super) fn open(process: Process, access: PROCESS_ACCESS_RIGHTS) -> io::Result<Option<OwnedHandle>> {
    // SAFETY: the call takes numbers, and has just made the handle.
    let opened = unsafe { own(OpenProcess(access | PROCESS_QUERY_LIMITED_INFORMATION, 0, process.id)) };
    match opened {
        Ok(handle) if process.created == 0 || created(handle.as_raw_handle())? == process.created => Ok(Some(handle)),
        Ok(_) => Ok(None),
        Err(error) if is_no_process(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns when a process was created, in units of the system.
fn created(process: HANDLE) -> io::Result<u64> {
    let mut times = [FILETIME::default(); 4];
    let [creation, exit, kernel, user] = &mut times;
    // SAFETY: the caller's handle is open, and the call writes four times.
    if unsafe { GetProcessTimes(process, creation, exit, kernel, user) } == 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::from(times[0].dwHighDateTime) << 32 | u64::from(times[0].dwLowDateTime))
}

/// Returns when this process was created; 0 if the system does not say.
pub(in crate::sys) fn own_creation() -> u64 {
    static OWN: OnceLock<u64> = OnceLock::new();
    // SAFETY: the call returns a constant, which needs no closing.
    *OWN.get_or_init(|| created(unsafe { GetCurrentProcess() }).unwrap_or(0))
}

/// Detects the end of another process.
pub(crate) struct ProcessWatch(OwnedHandle);

impl ProcessWatch {
    /// Begins to watch a process; `None` if it has ended.
    pub(crate) fn open(process: Process) -> io::Result<Option<ProcessWatch>> {
        Ok(open(process, PROCESS_SYNCHRONIZE)?.map(ProcessWatch))
    }

    pub(crate) fn has_ended(&self) -> bool {
        has_ended(&self.0)
    }
}

fn has_ended(process: &OwnedHandle) -> bool {
    // SAFETY: the handle is open.
    unsafe { WaitForSingleObject(process.as_raw_handle(), 0) == WAIT_OBJECT_0 }
}

/// Returns `false`: the system does not say whether all threads of a process are suspended, short of
/// a list of all threads of the machine.
pub(crate) fn is_stopped(_: Process) -> bool {
    false
}

/// The processes whose memory this one has read last. Opening one takes longer than reading a few
/// pages.
static READ: Mutex<Vec<(Process, Arc<OwnedHandle>)>> = Mutex::new(Vec::new());

/// How many of them are kept open.
const KEPT: usize = 64;

fn open_to_read(process: Process) -> io::Result<Arc<OwnedHandle>> {
    let mut read = READ.lock();
    if let Some((_, handle)) = read.iter().find(|(known, _)| *known == process) {
        return Ok(handle.clone());
    }
    let handle = open(process, PROCESS_VM_READ | PROCESS_SYNCHRONIZE)?;
    let handle = Arc::new(handle.ok_or_else(|| io::Error::from_raw_os_error(ERROR_INVALID_PARAMETER as i32))?);
    read.truncate(KEPT - 1);
    // An id alone may be that of another process soon.
    if process.created != 0 {
        read.insert(0, (process, handle.clone()));
    }
    Ok(handle)
}

/// Copies memory of another process of this machine, which may change meanwhile. `address` belongs
/// to that process: the system reads there, and this process never dereferences it.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and no other thread accesses it meanwhile.
pub(crate) unsafe fn read_process(process: Process, address: u64, to: *mut u8, len: usize) -> io::Result<()> {
    let handle = open_to_read(process)?;
    let from = std::ptr::without_provenance(address as usize);
    let mut done = 0;
    // SAFETY: the caller vouches for `to`, and the system checks the address in the other process.
    if unsafe { ReadProcessMemory(handle.as_raw_handle(), from, to.cast(), len, &mut done) } != 0 && done == len {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // The handle of a process that has ended stays valid, and its memory is gone.
    if has_ended(&handle) { Err(io::Error::from_raw_os_error(ERROR_INVALID_PARAMETER as i32)) } else { Err(error) }
}

/// Returns whether an error says that a process does not exist.
pub(crate) fn is_no_process(error: &io::Error) -> bool {
    error.raw_os_error() == Some(ERROR_INVALID_PARAMETER as i32)
}

/// Returns the namespace of process ids: the processes of a machine have one.
pub(crate) fn process_namespace() -> Option<u64> {
    Some(1)
}
