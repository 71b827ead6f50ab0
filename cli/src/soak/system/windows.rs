//! Processes of Windows.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use kolo::Registered;
use windows_sys::Win32::Foundation::{CloseHandle, HANDLE, STATUS_CONTROL_C_EXIT};
use windows_sys::Win32::System::Threading::{
    GetCurrentProcess, OpenProcess, PROCESS_SUSPEND_RESUME, PROCESS_TERMINATE, TerminateProcess,
};

/// Ranks write their traces when they are asked by a signal.
pub(in crate::soak) const HAS_SIGNALS: bool = false;
pub(in crate::soak) const HAS_FORKS: bool = false;
/// The system does not tell a process which connections it has.
pub(in crate::soak) const CUTS_CONNECTIONS: bool = false;

#[link(name = "ntdll")]
unsafe extern "system" {
    // The system's own debuggers and Job Objects stop processes by these, which have no documented
    // counterpart.
    fn NtSuspendProcess(process: HANDLE) -> i32;
    fn NtResumeProcess(process: HANDLE) -> i32;
}

/// Calls a function with a process, unless the process has ended. Its id is not used again before
/// it has been waited for.
fn with(pid: u32, rights: u32, call: impl FnOnce(HANDLE)) {
    // SAFETY: the call takes numbers.
    let process = unsafe { OpenProcess(rights, 0, pid) };
    if !process.is_null() {
        call(process);
        // SAFETY: the handle was opened above, and no other code has it.
        unsafe { CloseHandle(process) };
    }
}

/// With this status, the launcher says that a rank was ended by another process.
const KILLED: u32 = STATUS_CONTROL_C_EXIT as u32;

/// Ends a rank at once.
pub(in crate::soak) fn kill(pid: u32) {
    with(pid, PROCESS_TERMINATE, |process| {
        // SAFETY: the handle is open.
        unsafe { TerminateProcess(process, KILLED) };
    });
}

/// Lets a stopped rank continue.
pub(in crate::soak) fn go_on(pid: u32) {
    with(pid, PROCESS_SUSPEND_RESUME, |process| {
        // SAFETY: the handle is open.
        unsafe { NtResumeProcess(process) };
    });
}

/// Does nothing: no rank hears of a signal here.
pub(in crate::soak) fn ask_for_trace(_: u32) {}

pub(in crate::soak) fn kill_this_process() {
    // SAFETY: the pseudo-handle of this process is always valid.
    unsafe { TerminateProcess(GetCurrentProcess(), KILLED) };
}

/// Stops this process until its parent lets it go on.
pub(in crate::soak) fn stop_this_process() {
    // SAFETY: the pseudo-handle of this process is always valid.
    unsafe { NtSuspendProcess(GetCurrentProcess()) };
}

/// Does nothing: the system does not tell a process which sockets it has.
pub(in crate::soak) fn cut_a_connection(_: impl FnOnce(usize) -> usize) {}

/// Does nothing: the system has no forks.
pub(in crate::soak) fn free_in_a_child(_: &Registered<u64>) {}

/// Listeners have addresses only.
#[derive(Debug)]
pub(in crate::soak) struct LocalListener(Infallible);

impl LocalListener {
    pub(in crate::soak) fn connect(&self, _: Duration) -> Option<TcpStream> {
        match self.0 {}
    }
}

/// Returns no listener of a rank. A stranger finds that of the store.
pub(in crate::soak) fn listeners(_: u32) -> (Vec<SocketAddr>, Vec<LocalListener>) {
    (Vec::new(), Vec::new())
}
