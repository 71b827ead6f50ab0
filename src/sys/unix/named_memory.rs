//! Memory that processes share, on systems on which memory begins with a name: an object of
//! `shm_open`, whose name is removed at once.
//!
//! macOS sets the size of such an object once, and no process can change it afterwards. So an
//! object that will be extended is made with the addresses of its extensions, which take no memory
//! until a process touches them. It begins with the table of its extensions, and the memory
//! follows.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Instant;

use rustix::fs::{fstat, ftruncate};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::mapping::{Memory, reserve_in_pieces, write_every_page};
use super::memory::check_file_size;
use super::object::create_without_name;
use crate::sys::Guarded;
use crate::sys::extensions::{Extensions, MORE};

/// The bytes before the memory.
const HEAD: usize = 64 << 10;

const _: () = assert!(size_of::<Extensions>() <= HEAD, "the table fits its place");

pub(in crate::sys) struct NamedMemory {
    file: Guarded<OwnedFd>,
    head: Head,
}

/// The mapped table of extensions.
struct Head {
    base: NonNull<Extensions>,
    /// The process that mapped the table: see [`super::mapping::Mapping`].
    owner: u32,
}

// SAFETY: the table is at a fixed address, and is accessed through atomics only.
unsafe impl Send for Head {}
// SAFETY: as above.
unsafe impl Sync for Head {}

impl Head {
    fn map(file: &OwnedFd) -> io::Result<Head> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), HEAD, access, MapFlags::SHARED, file, 0)? };
        Ok(Head { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, owner: std::process::id() })
    }

    fn extensions(&self) -> &Extensions {
        // SAFETY: the mapping is larger than the table, which starts as zeros, a valid one, and is
        // accessed through atomics only. It lives as long as this value.
        unsafe { self.base.as_ref() }
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        // SAFETY: `map` mapped these bytes, and no reference outlives this value.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), HEAD) } {
            crate::log::debug!(%error, "cannot unmap memory");
        }
    }
}

impl AsFd for NamedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
impl NamedMemory {
    /// The table that every peer can write.
    pub(super) fn extensions(&self) -> &Extensions {
        self.head.extensions()
    }
}

/// Returns whether a file is an object of `shm_open`, whose size can only be set once. A process
/// could shrink an ordinary file, and touching memory behind its end would kill this process.
#[cfg(target_os = "macos")]
fn is_object(file: &OwnedFd, state: &rustix::fs::Stat) -> io::Result<bool> {
    let size = usize::try_from(state.st_size).unwrap_or(0);
    // Setting a size beyond the limit of this process would kill it.
    check_file_size(size)?;
    // Such objects have no type. The system refuses to set the size once more.
    let has_type = u32::from(state.st_mode) & u32::from(libc::S_IFMT) != 0;
    Ok(!has_type && ftruncate(file, size as u64) == Err(Errno::INVAL))
}

/// Returns `true`: the tests hand over no other files.
#[cfg(not(target_os = "macos"))]
fn is_object(_: &OwnedFd, _: &rustix::fs::Stat) -> io::Result<bool> {
    Ok(true)
}

impl Memory for NamedMemory {
    const START: u64 = HEAD as u64;

    fn create(len: usize, room: usize) -> io::Result<NamedMemory> {
        let size = if room > len { room.checked_mul(MORE) } else { Some(len) };
        let size = size.and_then(|size| size.checked_add(HEAD)).ok_or(Errno::NOMEM)?;
        check_file_size(size)?;
        let file = create_without_name()?;
        ftruncate(&file, size as u64)?;
        Ok(NamedMemory { head: Head::map(&file)?, file: Guarded::new(file) })
    }

    fn received(file: OwnedFd, len: usize) -> io::Result<NamedMemory> {
        let state = fstat(&file)?;
        let size = u64::try_from(state.st_size).unwrap_or(0);
        let is_large_enough = HEAD.checked_add(len).is_some_and(|least| size >= least as u64);
        if !is_large_enough || !is_object(&file, &state)? {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(NamedMemory { head: Head::map(&file)?, file: Guarded::new(file) })
    }

    fn check(&self) -> io::Result<()> {
        self.file.check()
    }

    fn extend(&self, range: &Range<usize>, _: Instant) -> io::Result<()> {
        Extensions::check(range)?;
        let size = u64::try_from(fstat(&self.file)?.st_size).unwrap_or(0);
        if (HEAD + range.end) as u64 <= size { Ok(()) } else { Err(Errno::NOMEM.into()) }
    }

    fn extended(&self, at: NonNull<u8>, range: &Range<usize>, deadline: Instant) -> io::Result<()> {
        self.reserve(at, range.clone(), deadline)?;
        self.head.extensions().add(range);
        Ok(())
    }

    /// The peers write the table: only the object's size tells which memory can be touched.
    fn is_extended(&self, range: &Range<usize>) -> io::Result<bool> {
        let size = u64::try_from(fstat(&self.file)?.st_size).unwrap_or(0);
        Ok(self.head.extensions().contain(range) && (HEAD + range.end) as u64 <= size)
    }

    /// Has the system allocate the pages by touching them: POSIX has no call for it.
    fn reserve(&self, at: NonNull<u8>, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        reserve_in_pieces(range.clone(), deadline, |piece| {
            // SAFETY: the range is mapped at `at`, and other processes access it through atomics
            // and raw pointers only.
            unsafe { write_every_page(at.add(piece.start - range.start), piece.len()) };
            Ok(())
        })
    }

    /// Clears the memory. Its pages stay with the object.
    unsafe fn release(at: NonNull<u8>, len: usize) -> io::Result<()> {
        // SAFETY: the caller vouches for the range.
        unsafe { at.write_bytes(0, len) };
        Ok(())
    }

    unsafe fn make_private(&self, at: NonNull<u8>, pages: Range<usize>) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        // SAFETY: the caller vouches for the pages, which are those of this file.
        unsafe {
            super::mapping::make_pages_private(&self.file, at, pages.len(), (HEAD + pages.start) as u64)
        }
        #[cfg(not(target_os = "linux"))]
        // SAFETY: the caller vouches for the pages.
        unsafe {
            super::copy_pages::copy_in_place(at, pages.len())
        }
    }
}
