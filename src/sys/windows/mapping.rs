//! Memory that processes share: a section that each of them maps.
//!
//! A section begins with the table of those that sleep on its words, and with a table of its
//! extensions. The memory of the mapping follows. Windows cannot make a section larger, so one that
//! will be extended is made with the addresses of its extensions, which take no memory until a
//! process commits them.

use std::io;
use std::ops::Range;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windows_sys::Win32::Foundation::{DUPLICATE_SAME_ACCESS, DuplicateHandle, HANDLE, INVALID_HANDLE_VALUE};
use windows_sys::Win32::System::Memory::{
    CreateFileMappingW, MEM_COMMIT, MEMORY_BASIC_INFORMATION, PAGE_READWRITE, PAGE_WRITECOPY, SEC_COMMIT, SEC_RESERVE,
    VirtualAlloc, VirtualProtect, VirtualQuery,
};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use super::handle::own;
use super::local_socket::LocalStream;
use super::memory::{available_memory, page_size};
use super::sleep::{Sleepers, TABLE};
use super::view::View;
use crate::sys::extensions::{Extensions, MORE};

/// The bytes before the memory: views begin at multiples of this.
const HEAD: usize = 64 << 10;

/// What a section begins with. It starts as zeros.
#[repr(C)]
struct Head {
    /// [`Sleepers`] uses them.
    _sleepers: [AtomicU8; TABLE],
    extensions: Extensions,
}

const _: () = assert!(size_of::<Head>() <= HEAD, "the tables fit their place");

/// How long the rest of a message may take whose first byte has come.
const REST_OF_MESSAGE: Duration = Duration::from_secs(2);

/// A section, or an extension of one, that is mapped whole.
pub(in crate::sys) struct Mapping {
    /// `None` once nothing more is handed over or extended.
    section: Mutex<Option<Arc<OwnedHandle>>>,
    view: View,
    /// Where the view begins in the memory.
    #[cfg(test)]
    start: usize,
    len: usize,
    head: Arc<View>,
    sleepers: Arc<Sleepers>,
}

impl Mapping {
    /// Makes memory of `len` bytes that will be extended to about `room`.
    pub(in crate::sys) fn create(len: usize, room: usize) -> io::Result<Mapping> {
        check_memory(len)?;
        // For reserved addresses, Windows needs memory of a five-hundredth of their size.
        let (kind, size) = if room > len { (SEC_RESERVE, HEAD + MORE * room) } else { (SEC_COMMIT, HEAD + len) };
        let size = size as u64;
        // SAFETY: the call makes a section without a name, which only this process can open.
        let section = unsafe {
            own(CreateFileMappingW(
                INVALID_HANDLE_VALUE,
                std::ptr::null(),
                PAGE_READWRITE | kind,
                (size >> 32) as u32,
                size as u32,
                std::ptr::null(),
            ))
        }?;
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|_| io::Error::other("the system has no random numbers"))?;
        Mapping::first(section, id, len)
    }

    /// Maps the first part of a section.
    fn first(section: OwnedHandle, id: [u8; 16], len: usize) -> io::Result<Mapping> {
        let head = View::map(&section, 0, size_of::<Head>())?;
        commit(&head, size_of::<Head>())?;
        let head = Arc::new(head);
        let sleepers = Arc::new(Sleepers::new(head.clone(), id));
        Mapping::map(Arc::new(section), head, sleepers, 0..len)
    }

    fn map(section: Arc<OwnedHandle>, head: Arc<View>, sleepers: Arc<Sleepers>, range: Range<usize>) -> io::Result<Mapping> {
        let view = View::map(&section, (HEAD + range.start) as u64, range.len())?;
        commit(&view, range.len())?;
        sleepers.add(view.base(), range.len(), range.start);
        Ok(Mapping {
            section: Mutex::new(Some(section)),
            view,
            #[cfg(test)]
            start: range.start,
            len: range.len(),
            head,
            sleepers,
        })
    }

    /// Allocates a range of the section behind this mapping, and maps it. Several processes may do
    /// so at the same time.
    pub(in crate::sys) fn extend(&self, range: Range<usize>, _: Instant) -> io::Result<Mapping> {
        check_memory(range.len())?;
        Extensions::check(&range)?;
        let extension = self.map_extension(range.clone())?;
        self.extensions().add(&range);
        Ok(extension)
    }

    /// Maps a range of the section behind this mapping; `NotFound` if no process has extended the
    /// memory by it.
    pub(in crate::sys) fn extension(&self, range: Range<usize>) -> io::Result<Mapping> {
        if !self.extensions().contain(&range) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.map_extension(range)
    }

    fn map_extension(&self, range: Range<usize>) -> io::Result<Mapping> {
        let mapping = Mapping::map(self.section()?, self.head.clone(), self.sleepers.clone(), range)?;
        // Only the first mapping is extended.
        mapping.close();
        Ok(mapping)
    }

    fn extensions(&self) -> &Extensions {
        // SAFETY: the view has a head's bytes, which start as zeros, a valid head, and are accessed
        // through atomics only.
        unsafe { &self.head.base().cast::<Head>().as_ref().extensions }
    }

    #[cfg(test)]
    pub(in crate::sys) fn again(&self) -> io::Result<Mapping> {
        Mapping::map(self.section()?, self.head.clone(), self.sleepers.clone(), self.start..self.start + self.len)
    }

    #[cfg(test)]
    pub(super) fn fill_table_of_sleepers(&self) {
        self.sleepers.fill();
    }

    fn section(&self) -> io::Result<Arc<OwnedHandle>> {
        self.section.lock().clone().ok_or_else(|| io::Error::other("the memory is not shared any more"))
    }

    pub(in crate::sys) fn base(&self) -> NonNull<u8> {
        self.view.base()
    }

    /// Does nothing: the memory was committed when it was mapped.
    pub(in crate::sys) fn reserve(&self, _: Range<usize>, _: Instant) -> io::Result<()> {
        self.section().map(drop)
    }

    /// Does nothing: the system cannot.
    pub(in crate::sys) fn populate(&self, _: Range<usize>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::sys) fn provide(&self, _: Range<usize>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::sys) fn close(&self) {
        *self.section.lock() = None;
    }

    /// Clears a range. Windows takes no committed memory back from a section.
    pub(in crate::sys) fn release(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        // SAFETY: the range is within the view, and no thread uses released memory.
        unsafe { self.base().as_ptr().add(range.start).write_bytes(0, range.len()) };
    }

    /// Has the system copy each page of a range when it is written, and writes to each of them.
    pub(in crate::sys) fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        self.section()?;
        let at = self.base().as_ptr().wrapping_add(pages.start);
        let mut before = 0;
        // SAFETY: these are whole pages of this view. They stay readable and writable.
        if unsafe { VirtualProtect(at.cast(), pages.len(), PAGE_WRITECOPY, &mut before) } == 0 {
            return Err(io::Error::last_os_error());
        }
        for offset in (0..pages.len()).step_by(page_size()) {
            // SAFETY: the byte is within the view, which other threads may be using. The exchange
            // changes no byte and loses none of their writes.
            let byte = unsafe { AtomicU8::from_ptr(at.add(offset)) };
            let mut seen = byte.load(Ordering::Relaxed);
            while let Err(other) = byte.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
                seen = other;
            }
        }
        // Once a page has been copied, it is not copied again, and the system says so. (Wine
        // accepts the protection and shares the pages as before.)
        if information(at).is_some_and(|page| page.Protect == PAGE_WRITECOPY) {
            return Err(io::Error::other("the system does not copy the pages of shared memory"));
        }
        Ok(())
    }

    /// Puts a handle of the section into the process at the other end, and sends its number with
    /// the number of the section.
    pub(in crate::sys) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        let section = self.section()?;
        let peer = to.peer_process()?;
        let mut theirs: HANDLE = null_mut();
        // SAFETY: both processes and the section are open, and the call writes a handle, which
        // belongs to the other process.
        let is_done = unsafe {
            DuplicateHandle(
                GetCurrentProcess(),
                section.as_raw_handle(),
                peer.as_raw_handle(),
                &mut theirs,
                0,
                0,
                DUPLICATE_SAME_ACCESS,
            )
        };
        if is_done == 0 {
            return Err(io::Error::last_os_error());
        }
        let mut message = [0; MESSAGE];
        message[0] = b'm';
        message[1..9].copy_from_slice(&(theirs.expose_provenance() as u64).to_le_bytes());
        message[9..].copy_from_slice(&self.sleepers.id());
        // The other process never writes much on such a connection, so there is room.
        io::Write::write_all(&mut &*to, &message)
    }

    pub(in crate::sys) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Mapping> {
        let mut message = [0; MESSAGE];
        let (kind, rest) = message.split_at_mut(1);
        io::Read::read_exact(&mut from.until(deadline), kind)?;
        if kind != b"m" {
            let why = "the leader of the host has no memory to share";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        io::Read::read_exact(&mut from.until(deadline.max(Instant::now() + REST_OF_MESSAGE)), rest)?;
        let handle = u64::from_le_bytes(message[1..9].try_into().expect("a handle has eight bytes"));
        let id = message[9..].try_into().expect("a number of a section has sixteen bytes");
        let handle: HANDLE = std::ptr::with_exposed_provenance_mut(handle as usize);
        if handle.is_null() || handle == INVALID_HANDLE_VALUE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the process at the other end has made this handle for this one by
        // DuplicateHandle, so no other value owns it. It runs as this user: with a wrong number it
        // could close another handle of this process, which it can do without kolo, too.
        let section = unsafe { OwnedHandle::from_raw_handle(handle) };
        Mapping::first(section, id, len).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Bytes that hand a section over: a letter, the handle, the number of the section.
const MESSAGE: usize = 1 + 8 + 16;

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the view goes, and another one comes to its address.
        self.sleepers.remove(self.view.base());
    }
}

/// Fails if there is less memory than this.
fn check_memory(bytes: usize) -> io::Result<()> {
    if available_memory().is_some_and(|available| bytes as u64 > available) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(())
}

/// Has the system provide the memory of a view. Memory that it has provided stays as it is.
fn commit(view: &View, len: usize) -> io::Result<()> {
    // SAFETY: the range is within the view. Committing it changes no byte.
    if !unsafe { VirtualAlloc(view.base().as_ptr().cast(), len, MEM_COMMIT, PAGE_READWRITE) }.is_null() {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // The memory of a section that is not extended was provided when it was made.
    let is_provided = |page: &MEMORY_BASIC_INFORMATION| page.State == MEM_COMMIT && page.RegionSize >= len;
    if information(view.base().as_ptr()).as_ref().is_some_and(is_provided) { Ok(()) } else { Err(error) }
}

/// Returns what the system says about the pages from an address on that are alike.
fn information(at: *const u8) -> Option<MEMORY_BASIC_INFORMATION> {
    let mut information = MEMORY_BASIC_INFORMATION::default();
    // SAFETY: the call writes at most as many bytes as the value has.
    let written = unsafe { VirtualQuery(at.cast(), &mut information, size_of::<MEMORY_BASIC_INFORMATION>()) };
    (written != 0).then_some(information)
}
