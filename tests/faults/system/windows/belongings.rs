//! What a process has.

use std::ffi::c_void;
use std::ptr::null;

use kolo::Communicator;
use windows_sys::Win32::Foundation::{CloseHandle, INVALID_HANDLE_VALUE, STATUS_INFO_LENGTH_MISMATCH};
use windows_sys::Win32::System::Diagnostics::ToolHelp::{
    CreateToolhelp32Snapshot, TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
};
use windows_sys::Win32::System::Memory::{MEM_MAPPED, MEMORY_BASIC_INFORMATION, VirtualQuery};
use windows_sys::Win32::System::Threading::{OpenProcess, PROCESS_SYNCHRONIZE};

use crate::job::wait_until;

/// The resources that a process may leak.
#[derive(Debug, PartialEq)]
pub(crate) struct Belongings {
    threads: usize,
    /// Sockets, sections, events and others.
    handles: usize,
    /// Regions of memory that the process may share with others.
    pub(crate) regions: usize,
}

impl Belongings {
    pub(crate) fn count() -> Belongings {
        Belongings { threads: threads(), handles: handles(), regions: regions() }
    }
}

fn threads() -> usize {
    let own = std::process::id();
    let mut entry = THREADENTRY32 { dwSize: size_of::<THREADENTRY32>() as u32, ..Default::default() };
    let mut count = 0;
    // SAFETY: the snapshot is open until it is closed, and the calls write an entry.
    unsafe {
        let snapshot = CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0);
        assert_ne!(snapshot, INVALID_HANDLE_VALUE);
        let mut has_more = Thread32First(snapshot, &mut entry);
        while has_more != 0 {
            count += usize::from(entry.th32OwnerProcessID == own);
            has_more = Thread32Next(snapshot, &mut entry);
        }
        CloseHandle(snapshot);
    }
    count
}

#[link(name = "ntdll")]
unsafe extern "system" {
    fn NtQuerySystemInformation(class: u32, to: *mut c_void, len: u32, written: *mut u32) -> i32;
}

/// The class that lists all handles of the machine.
const SYSTEM_EXTENDED_HANDLE_INFORMATION: u32 = 64;

/// A handle of the machine, as the system lists them after their number and a reserved word.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    _object: *const c_void,
    process: usize,
    value: usize,
    _access: u32,
    _trace: u16,
    kind: u16,
    _attributes: u32,
    _reserved: u32,
}

/// Starts and ends a communicator of two ranks, so that what the process keeps for all
/// communicators is there before its belongings are counted: the page that says which ranks are on
/// this machine, and handles of the system's libraries.
pub(crate) fn warm_up() {
    let file = std::env::temp_dir().join(format!("kolo-faults-warm-up-{}", std::process::id()));
    let store = format!("file://{}", file.display());
    let work = |rank| {
        let builder = Communicator::builder().rank(rank).world_size(2).store(&store).job("warm-up");
        builder.connect().and_then(|comm| comm.barrier()).unwrap();
    };
    // The thread that will make the calls keeps an event, too.
    std::thread::scope(|scope| {
        scope.spawn(|| work(1));
        work(0);
    });
    let _ = std::fs::remove_file(format!("{}.lock", file.display()));
    wait_until("threads are left", || threads() == 1);
}

/// Counts the handles of this process, except those of processes: it keeps some, whatever
/// communicators there are, to read their memory. (Wine does not know the number by itself.)
fn handles() -> usize {
    // SAFETY: the call takes numbers.
    let example = unsafe { OpenProcess(PROCESS_SYNCHRONIZE, 0, std::process::id()) };
    let (_, of_example) = all_handles().into_iter().find(|(value, _)| *value == example as usize).unwrap();
    // SAFETY: the handle was opened above, and nothing else has it.
    unsafe { CloseHandle(example) };
    all_handles().iter().filter(|(_, kind)| *kind != of_example).count()
}

/// Returns the handles of this process, each with the number of its kind.
fn all_handles() -> Vec<(usize, u16)> {
    let own = std::process::id() as usize;
    let mut table = vec![0u64; 16 << 10];
    loop {
        let len = size_of_val(&*table) as u32;
        // SAFETY: the call writes at most `len` bytes.
        let status =
            unsafe { NtQuerySystemInformation(SYSTEM_EXTENDED_HANDLE_INFORMATION, table.as_mut_ptr().cast(), len, &mut 0) };
        if status != STATUS_INFO_LENGTH_MISMATCH {
            assert_eq!(status, 0, "the system does not list the handles");
            break;
        }
        table.resize(2 * table.len(), 0);
    }
    // SAFETY: the system has written `table[0]` handles after that number and a reserved word.
    let handles = (0..table[0] as usize).map(|i| unsafe { table[2..].as_ptr().cast::<Handle>().add(i).read() });
    handles.filter(|handle| handle.process == own).map(|handle| (handle.value, handle.kind)).collect()
}

/// Counts the handles of this process, which sockets are.
pub(crate) fn sockets() -> usize {
    handles()
}

fn regions() -> usize {
    let mut info = MEMORY_BASIC_INFORMATION::default();
    let mut at = null::<c_void>();
    let mut found = Vec::new();
    // SAFETY: the call writes at most the given number of bytes.
    while unsafe { VirtualQuery(at, &mut info, size_of_val(&info)) } != 0 {
        if info.Type == MEM_MAPPED && found.last() != Some(&info.AllocationBase) {
            found.push(info.AllocationBase);
        }
        at = info.BaseAddress.cast_const().wrapping_byte_add(info.RegionSize);
    }
    found.len()
}
