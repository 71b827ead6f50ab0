//! Memory of sections, mapped into this process, and pages with a name.

use std::io;
use std::os::windows::io::{AsRawHandle, OwnedHandle};
use std::ptr::NonNull;

use windows_sys::Win32::Foundation::{ERROR_ALREADY_EXISTS, GetLastError, INVALID_HANDLE_VALUE};
use windows_sys::Win32::System::Memory::{
    CreateFileMappingW, FILE_MAP_READ, FILE_MAP_WRITE, MEMORY_MAPPED_VIEW_ADDRESS, MapViewOfFile, OpenFileMappingW,
    PAGE_READWRITE, UnmapViewOfFile,
};

use super::handle::{in_session, own};
use super::security;

/// Part of a section, mapped into this process.
pub(super) struct View {
    base: NonNull<u8>,
}

// SAFETY: a view is memory at a fixed address. All access goes through raw pointers and atomics,
// whose users synchronise.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Maps `len` bytes from `start` on, a multiple of 64 KiB. Fails if the section is smaller.
    pub(super) fn map(section: &OwnedHandle, start: u64, len: usize) -> io::Result<View> {
        View::map_for(section, FILE_MAP_READ | FILE_MAP_WRITE, start, len)
    }

    /// As [`View::map`], to read only.
    pub(super) fn map_to_read(section: &OwnedHandle, len: usize) -> io::Result<View> {
        View::map_for(section, FILE_MAP_READ, 0, len)
    }

    fn map_for(section: &OwnedHandle, access: u32, start: u64, len: usize) -> io::Result<View> {
        // SAFETY: a new view at an address that the system chooses replaces nothing.
        let view = unsafe { MapViewOfFile(section.as_raw_handle(), access, (start >> 32) as u32, start as u32, len) };
        let base = NonNull::new(view.Value.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(View { base })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: `map_for` mapped the view. Every user of an address in it also holds the view.
        if unsafe { UnmapViewOfFile(MEMORY_MAPPED_VIEW_ADDRESS { Value: self.base.as_ptr().cast() }) } == 0 {
            crate::log::debug!(error = %io::Error::last_os_error(), "cannot unmap memory");
        }
    }
}

/// A page of memory with a name in this session, which only this user can open.
pub(super) struct NamedPage {
    /// The name lasts as long as a process has the section open.
    _section: OwnedHandle,
    pub(super) view: View,
}

/// Bytes of a named page. It starts as zeros.
pub(super) const NAMED_PAGE: usize = 4096;

impl NamedPage {
    /// Makes the page; `AlreadyExists` if a process has one of this name.
    pub(super) fn create(name: &str) -> io::Result<NamedPage> {
        let (page, is_new) = NamedPage::create_or_open(name)?;
        if is_new { Ok(page) } else { Err(io::ErrorKind::AlreadyExists.into()) }
    }

    /// Makes the page or opens that of another process. Returns whether it is new.
    pub(super) fn create_or_open(name: &str) -> io::Result<(NamedPage, bool)> {
        let name = in_session(name);
        let (section, is_new) = security::with_owner_only(|attributes| {
            // SAFETY: the attributes and the name live until the call returns.
            let handle = unsafe {
                CreateFileMappingW(INVALID_HANDLE_VALUE, attributes, PAGE_READWRITE, 0, NAMED_PAGE as u32, name.as_ptr())
            };
            // SAFETY: the call reads a number of this thread.
            let is_new = unsafe { GetLastError() } != ERROR_ALREADY_EXISTS;
            // SAFETY: the call has just made the handle.
            Ok((unsafe { own(handle) }?, is_new))
        })?;
        if !is_new {
            security::check_owner(&section)?;
        }
        Ok((NamedPage { view: View::map(&section, 0, NAMED_PAGE)?, _section: section }, is_new))
    }

    /// Opens the page of another process of this user, to read it; `NotFound` if there is none.
    pub(super) fn open(name: &str) -> io::Result<NamedPage> {
        /// To read the owner.
        const READ_CONTROL: u32 = 0x2_0000;
        let name = in_session(name);
        // SAFETY: the name lives until the call returns, which has just made the handle.
        let section = unsafe { own(OpenFileMappingW(FILE_MAP_READ | READ_CONTROL, 0, name.as_ptr())) }?;
        security::check_owner(&section)?;
        Ok(NamedPage { view: View::map_to_read(&section, NAMED_PAGE)?, _section: section })
    }
}
