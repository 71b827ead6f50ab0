//! Handles and names of objects of the system.

use std::io;
use std::os::windows::io::{FromRawHandle, OwnedHandle};

use windows_sys::Win32::Foundation::{HANDLE, INVALID_HANDLE_VALUE};

/// Takes the handle that a call has returned; the system's error if it returned none.
///
/// # Safety
///
/// The handle is null, invalid, or owned by no other value.
pub(super) unsafe fn own(handle: HANDLE) -> io::Result<OwnedHandle> {
    if handle.is_null() || handle == INVALID_HANDLE_VALUE {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller vouches for it.
    Ok(unsafe { OwnedHandle::from_raw_handle(handle) })
}

/// Returns the name of an object of this session, as the system takes it.
pub(super) fn in_session(name: &str) -> Vec<u16> {
    wide(&format!("Local\\{name}"))
}

/// Returns a text as the system takes it: UTF-16, with a zero at the end.
pub(super) fn wide(text: &str) -> Vec<u16> {
    text.encode_utf16().chain([0]).collect()
}
