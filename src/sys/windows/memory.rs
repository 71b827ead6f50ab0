//! How much memory there is, and in which units.

use std::io;

use windows_sys::Win32::System::SystemInformation::{GetSystemInfo, GlobalMemoryStatusEx, MEMORYSTATUSEX, SYSTEM_INFO};

/// Does nothing: the size of memory files has no limit here.
pub(in crate::sys) fn check_file_size(_: usize) -> io::Result<()> {
    Ok(())
}

/// Returns the bytes of a page of the system.
pub(in crate::sys) fn page_size() -> usize {
    let mut info = SYSTEM_INFO::default();
    // SAFETY: the call writes to `info` and cannot fail.
    unsafe { GetSystemInfo(&mut info) };
    info.dwPageSize as usize
}

/// Returns the bytes that this process could commit now.
pub(crate) fn available_memory() -> Option<u64> {
    let mut status = MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..MEMORYSTATUSEX::default() };
    // SAFETY: the call writes to `status`, which names its own length.
    (unsafe { GlobalMemoryStatusEx(&mut status) } != 0).then_some(status.ullAvailPageFile)
}
