//! Windows: handles of processes, and what the system's tables say about them. Lists the tests that
//! cannot run, with the reason.

mod belongings;
mod listeners;
mod names;

use std::io;

use kolo::Communicator;
use windows_sys::Win32::Foundation::{CloseHandle, HANDLE, WAIT_TIMEOUT};
use windows_sys::Win32::System::LibraryLoader::{GetModuleHandleA, GetProcAddress};
use windows_sys::Win32::System::Performance::{QueryPerformanceCounter, QueryPerformanceFrequency};
use windows_sys::Win32::System::ProcessStatus::{GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::SystemInformation::{ComputerNamePhysicalDnsHostname, GetComputerNameExW};
use windows_sys::Win32::System::Threading::{
    OpenProcess, PROCESS_QUERY_INFORMATION, PROCESS_SUSPEND_RESUME, PROCESS_SYNCHRONIZE, PROCESS_TERMINATE, PROCESS_VM_READ,
    TerminateProcess, WaitForSingleObject,
};

use crate::rank::Task;
use crate::runner::Outcome::{self, NotRun};
use crate::strangers::Stream;

pub(crate) use belongings::{Belongings, sockets, warm_up};
pub(crate) use listeners::listeners;
pub(crate) use names::nothing_left_over;

/// Makes tests that cannot run, for one reason.
macro_rules! not_run {
    ($why:literal: $($test:ident),*) => {
        $(pub(crate) fn $test() -> Outcome {
            NotRun($why.to_owned())
        })*
    };
}

not_run!("Windows has no network namespaces, in which one machine is several hosts":
    partition, reset, slow_and_lossy, different_calls_between_hosts, own_name_on_loopback, ipv6_only, file_store, replayed);
not_run!("Windows has no forks": forked, killed_with_a_child, killed_with_a_child_elsewhere);
not_run!("Windows has no signals": signals);
not_run!("no program is setuid on Windows": setuid);
not_run!("standard input, output and error are no numbers of descriptors on Windows": closed_standard);
not_run!("a program cannot close all of its handles on Windows": close_all);
not_run!("Windows has no limit of handles": no_descriptors, few_descriptors, no_descriptors_for_the_store);
not_run!("a process cannot make its own system calls fail on Windows":
    no_shared_memory, no_memory_in_time, no_thread, no_memory_on_one_rank, refused_calls);
not_run!("a process of another user needs the user's password on Windows": another_user);

/// Processes start slowly under Wine, and ranks answer late while others start.
pub(crate) const TESTS_AT_ONCE: usize = 1;

/// The causes that peers report for a suspended process, what their message says, and what the log
/// says before. The system does not say that a process is suspended.
pub(crate) const STOPPED: [&str; 1] = ["Unresponsive"];
pub(crate) const SAYS_STOPPED: &str = "its process is stopped, or its machine hangs";
pub(crate) const WARNS_OF_STOPPED: &str = "waits for a rank that does not answer";

#[link(name = "ntdll")]
unsafe extern "system" {
    // They have no documented counterpart.
    fn NtSuspendProcess(process: HANDLE) -> i32;
    fn NtResumeProcess(process: HANDLE) -> i32;
}

/// Calls a function with a process, which has not been waited for.
fn with<T>(pid: u32, rights: u32, call: impl FnOnce(HANDLE) -> T) -> T {
    // SAFETY: the call takes numbers.
    let process = unsafe { OpenProcess(rights, 0, pid) };
    assert!(!process.is_null(), "process {pid}: {}", io::Error::last_os_error());
    let result = call(process);
    // SAFETY: the handle was opened above, and nothing else has it.
    unsafe { CloseHandle(process) };
    result
}

/// Ends a process at once.
pub(crate) fn kill(pid: u32) {
    // SAFETY: the handle is open.
    with(pid, PROCESS_TERMINATE, |process| assert_ne!(unsafe { TerminateProcess(process, 1) }, 0));
}

/// Suspends a process until [`go_on`].
pub(crate) fn stop(pid: u32) {
    // SAFETY: the handle is open.
    with(pid, PROCESS_SUSPEND_RESUME, |process| assert_eq!(unsafe { NtSuspendProcess(process) }, 0));
}

/// Continues a suspended process.
pub(crate) fn go_on(pid: u32) {
    // SAFETY: the handle is open.
    with(pid, PROCESS_SUSPEND_RESUME, |process| assert_eq!(unsafe { NtResumeProcess(process) }, 0));
}

/// Returns the microseconds of the clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let (mut count, mut frequency) = (0, 0);
    // SAFETY: the calls write a number each.
    unsafe {
        QueryPerformanceCounter(&mut count);
        QueryPerformanceFrequency(&mut frequency);
    }
    (count as u128 * 1_000_000 / frequency as u128) as u64
}

/// Returns the name of this machine.
pub(crate) fn host_name() -> String {
    let mut name = [0; 256];
    let mut len = name.len() as u32;
    // SAFETY: the call writes at most `len` units.
    assert_ne!(unsafe { GetComputerNameExW(ComputerNamePhysicalDnsHostname, name.as_mut_ptr(), &mut len) }, 0);
    String::from_utf16_lossy(&name[..len as usize])
}

/// Whether a process of this machine has ended.
pub(crate) fn has_ended(pid: u32) -> bool {
    // SAFETY: the call takes numbers.
    let process = unsafe { OpenProcess(PROCESS_SYNCHRONIZE, 0, pid) };
    if process.is_null() {
        return true;
    }
    // SAFETY: the handle was opened above, and nothing else has it.
    unsafe {
        let runs = WaitForSingleObject(process, 0) == WAIT_TIMEOUT;
        CloseHandle(process);
        !runs
    }
}

/// Returns the resident memory of a process, in KiB.
pub(crate) fn memory(pid: u32) -> i64 {
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    with(pid, PROCESS_QUERY_INFORMATION | PROCESS_VM_READ, |process| {
        // SAFETY: the handle is open, and the call writes the counters.
        assert_ne!(unsafe { GetProcessMemoryInfo(process, &mut counters, size_of_val(&counters) as u32) }, 0);
    });
    (counters.WorkingSetSize >> 10) as i64
}

fn is_wine() -> bool {
    // SAFETY: the names end with a zero, and the module is never unloaded.
    unsafe { GetProcAddress(GetModuleHandleA(c"ntdll.dll".as_ptr().cast()), c"wine_get_version".as_ptr().cast()) }.is_some()
}

/// Why a test cannot run that continues a suspended process in the middle of a write.
pub(crate) fn shares_private_pages() -> Option<&'static str> {
    is_wine().then_some("Wine shares the pages of a section that should be copied")
}

/// Why a test cannot run that looks for the listeners of a process.
pub(crate) fn hides_listeners() -> Option<&'static str> {
    is_wine().then_some("Wine does not say which process holds a port")
}

/// No task of this system needs a preparation.
pub(crate) fn prepare(_: &str) {}

/// Runs `connect`. No test limits the handles of a process.
pub(crate) fn connecting<T>(connect: impl FnOnce() -> T) -> T {
    connect()
}

/// This system has no tasks of its own.
pub(crate) fn run_task(task: &str, _: &Communicator) -> Task {
    panic!("there is no task {task:?}")
}

/// Listeners have addresses only.
pub(crate) fn connect_locally(_: &str) -> io::Result<Box<dyn Stream>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// No program of this system is setuid.
pub(crate) fn be_privileged() {
    unreachable!("a program that is setuid");
}

/// No test starts a process of another user.
pub(crate) fn be_a_stranger() {
    unreachable!("a stranger of another user");
}
