//! Locks on files, and what distinguishes two files.

use std::fs::{File, TryLockError};
use std::io;
use std::os::windows::io::AsRawHandle;

use windows_sys::Win32::Foundation::{ERROR_IO_PENDING, ERROR_LOCK_VIOLATION};
use windows_sys::Win32::Storage::FileSystem::{
    BY_HANDLE_FILE_INFORMATION, GetFileInformationByHandle, LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY, LockFileEx,
};
use windows_sys::Win32::System::IO::{OVERLAPPED, OVERLAPPED_0, OVERLAPPED_0_0};

/// Locks a file, alone or beside others. Windows keeps all other processes from the locked bytes,
/// readers too. So the lock is on one byte that no file is long enough to have.
pub(in crate::sys) fn lock(file: &File, alone: bool) -> Result<(), TryLockError> {
    const BEYOND: u32 = 0x4000_0000;
    let position = OVERLAPPED_0 { Anonymous: OVERLAPPED_0_0 { Offset: 0, OffsetHigh: BEYOND } };
    let mut overlapped = OVERLAPPED { Anonymous: position, ..OVERLAPPED::default() };
    let flags = LOCKFILE_FAIL_IMMEDIATELY | if alone { LOCKFILE_EXCLUSIVE_LOCK } else { 0 };
    // SAFETY: the handle is open, and not for overlapped calls, so this call is over when it
    // returns.
    if unsafe { LockFileEx(file.as_raw_handle(), flags, 0, 1, 0, &mut overlapped) } != 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error().map(|code| code as u32) {
        Some(ERROR_LOCK_VIOLATION | ERROR_IO_PENDING) => Err(TryLockError::WouldBlock),
        _ => Err(TryLockError::Error(error)),
    }
}

/// Returns what distinguishes an open file from all others: its volume, and its number there.
pub(in crate::sys) fn file_id(file: &File) -> io::Result<(u32, u64)> {
    let mut information = BY_HANDLE_FILE_INFORMATION::default();
    // SAFETY: the handle is open, and the call writes to `information`.
    if unsafe { GetFileInformationByHandle(file.as_raw_handle(), &mut information) } == 0 {
        return Err(io::Error::last_os_error());
    }
    let BY_HANDLE_FILE_INFORMATION { dwVolumeSerialNumber, nFileIndexHigh, nFileIndexLow, .. } = information;
    Ok((dwVolumeSerialNumber, u64::from(nFileIndexHigh) << 32 | u64::from(nFileIndexLow)))
}
