//! Mapping memory that processes share, and handing it over.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::local_socket::LocalStream;
use super::memory::{check_memory, page_size};

/// Memory without a name that a descriptor stands for. Ranges are those of the memory, which begins
/// at a byte of the object.
pub(in crate::sys) trait Memory: AsFd + Sized {
    /// Where the memory begins in the object: a multiple of every system's pages.
    const START: u64;

    /// Makes memory of `len` bytes that will be extended to about `room`.
    fn create(len: usize, room: usize) -> io::Result<Self>;

    /// Takes an object that a peer has handed over. Fails with `InvalidData` if touching the first
    /// `len` bytes of its memory could kill this process, now or later.
    fn received(file: OwnedFd, len: usize) -> io::Result<Self>;

    /// Fails if the program has closed the descriptor, whose number another file may have.
    fn check(&self) -> io::Result<()>;

    /// Allocates a range behind the memory, before it is mapped.
    fn extend(&self, range: &Range<usize>, deadline: Instant) -> io::Result<()>;

    /// Makes an extension known, which is mapped at `at`.
    fn extended(&self, _at: NonNull<u8>, _range: &Range<usize>, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }

    /// Returns whether a range behind the memory was allocated, by any process.
    fn is_extended(&self, range: &Range<usize>) -> io::Result<bool>;

    /// Allocates the pages of a range, which is mapped at `at`, so that touching them cannot fail.
    fn reserve(&self, at: NonNull<u8>, range: Range<usize>, deadline: Instant) -> io::Result<()>;

    /// Clears mapped memory, and gives its pages back to the system where it takes them.
    ///
    /// # Safety
    ///
    /// These `len` bytes are mapped, and no thread uses them.
    unsafe fn release(at: NonNull<u8>, len: usize) -> io::Result<()>;

    /// Makes mapped pages private to this process. They keep their bytes.
    ///
    /// # Safety
    ///
    /// The range of this memory is mapped at `at`, and both consist of whole pages.
    unsafe fn make_private(&self, at: NonNull<u8>, pages: Range<usize>) -> io::Result<()>;
}

/// Memory that is mapped whole, or an extension of it.
pub(in crate::sys) struct Mapping<M: Memory> {
    /// `None` once nothing more is reserved or handed over. The lock is held for a moment only:
    /// reserving memory may take long, and meanwhile the listener hands the descriptor over.
    file: Mutex<Option<Arc<M>>>,
    pub(in crate::sys) base: NonNull<u8>,
    pub(in crate::sys) len: usize,
    /// The process that mapped the memory. A forked child also has this value and shares the
    /// memory, but only the parent gives it back.
    pub(in crate::sys) owner: u32,
}

impl<M: Memory> Mapping<M> {
    pub(in crate::sys) fn create(len: usize, room: usize) -> io::Result<Mapping<M>> {
        check_memory(len)?;
        Mapping::map(Arc::new(M::create(len, room)?), 0..len)
    }

    fn map(file: Arc<M>, range: Range<usize>) -> io::Result<Mapping<M>> {
        let (access, len) = (ProtFlags::READ | ProtFlags::WRITE, range.len());
        let offset = M::START + range.start as u64;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file.as_fd(), offset)? };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { file: Mutex::new(Some(file)), base, len, owner: std::process::id() })
    }

    /// Allocates a range behind the memory, and maps it. Several processes may do so at the same
    /// time.
    pub(in crate::sys) fn extend(&self, range: Range<usize>, deadline: Instant) -> io::Result<Mapping<M>> {
        check_memory(range.len())?;
        let file = self.file()?;
        file.extend(&range, deadline)?;
        let mapping = Mapping::map_extension(file.clone(), range.clone())?;
        file.extended(mapping.base, &range, deadline)?;
        Ok(mapping)
    }

    /// Maps a range behind the memory; `NotFound` if no process has extended the memory by it.
    pub(in crate::sys) fn extension(&self, range: Range<usize>) -> io::Result<Mapping<M>> {
        let file = self.file()?;
        if !file.is_extended(&range)? {
            return Err(io::ErrorKind::NotFound.into());
        }
        Mapping::map_extension(file, range)
    }

    fn map_extension(file: Arc<M>, range: Range<usize>) -> io::Result<Mapping<M>> {
        let mapping = Mapping::map(file, range)?;
        // Offsets equal those of the memory only in the first mapping, which keeps the descriptor
        // open.
        mapping.close();
        Ok(mapping)
    }

    #[cfg(test)]
    pub(in crate::sys) fn again(&self) -> io::Result<Mapping<M>> {
        Mapping::map(self.file()?, 0..self.len)
    }

    pub(in crate::sys) fn file(&self) -> io::Result<Arc<M>> {
        let file = self.file.lock().clone().ok_or(Errno::BADF)?;
        file.check()?;
        Ok(file)
    }

    pub(in crate::sys) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the address of a byte.
    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len);
        // SAFETY: the byte is within the mapping, or the first one behind it.
        unsafe { self.base.add(offset) }
    }

    pub(in crate::sys) fn reserve(&self, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        check_memory(range.len())?;
        self.file()?.reserve(self.at(range.start), range, deadline)
    }

    /// Maps the pages of a range, and allocates those that are not there. Fails on kernels before 5.14.
    #[cfg(target_os = "linux")]
    pub(in crate::sys) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        use rustix::mm::{Advice, madvise};
        assert!(range.end <= self.len);
        // SAFETY: the range is within this mapping, and populating changes no byte.
        let populate = || unsafe { madvise(self.at(range.start).as_ptr().cast(), range.len(), Advice::LinuxPopulateWrite) };
        rustix::io::retry_on_intr(populate).map_err(io::Error::from)
    }

    /// Other systems map pages when they are touched.
    #[cfg(not(target_os = "linux"))]
    pub(in crate::sys) fn populate(&self, _: Range<usize>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::sys) fn provide(&self, range: Range<usize>) -> io::Result<()> {
        check_memory(range.len())?;
        self.populate(range)
    }

    pub(in crate::sys) fn close(&self) {
        *self.file.lock() = None;
    }

    pub(in crate::sys) fn release(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        if !self.is_own() {
            return;
        }
        // SAFETY: the range is within this mapping. Afterwards it reads as zeros, as the caller
        // asks for.
        if let Err(error) = unsafe { M::release(self.at(range.start), range.len()) } {
            crate::log::debug!(%error, "cannot give memory back to the system before it is unmapped");
        }
    }

    fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    pub(in crate::sys) fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        assert!(pages.end <= self.len);
        // SAFETY: these are whole pages of this mapping.
        unsafe { self.file()?.make_private(self.at(pages.start), pages) }
    }

    pub(in crate::sys) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        to.send_file(self.file()?.as_fd())
    }

    pub(in crate::sys) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Mapping<M>> {
        let file = from.receive_file(deadline)?;
        let file =
            file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the leader of the host has no memory to share"))?;
        Mapping::map(Arc::new(M::received(file, len)?), 0..len)
    }
}

impl<M: Memory> Drop for Mapping<M> {
    fn drop(&mut self) {
        // A child that shares its parent's address space, as after vfork, would unmap the parent's
        // memory.
        if !self.is_own() {
            return;
        }
        // SAFETY: `map` mapped this address with this length. Every user of an address in it also
        // holds the region.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            crate::log::debug!(%error, "cannot unmap memory");
        }
    }
}

/// The most bytes that one call reserves. The deadline is checked between calls.
pub(in crate::sys) const MOST_RESERVED: usize = 16 << 20;

/// Reserves a range piece by piece, until the deadline. Before Linux 6.10, a signal undoes the call
/// that it interrupts. If a timer is quicker than a piece, no piece would ever be reserved. So
/// pieces get smaller when calls are interrupted.
pub(in crate::sys) fn reserve_in_pieces(
    range: Range<usize>,
    deadline: Instant,
    mut reserve: impl FnMut(Range<usize>) -> rustix::io::Result<()>,
) -> io::Result<()> {
    let (mut at, mut most) = (range.start, MOST_RESERVED);
    while at < range.end {
        let piece = at..range.end.min(at + most);
        match reserve(piece.clone()) {
            Ok(()) => (at, most) = (piece.end, MOST_RESERVED.min(2 * most)),
            Err(Errno::INTR) => most = page_size().max(most / 2),
            Err(error) => return Err(error.into()),
        }
        if at < range.end && Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Writes to every page the bytes that it contains. So the system allocates the page, or copies it
/// if it is private.
///
/// # Safety
///
/// These `len` bytes are mapped. Other threads and processes may be using them through atomics or
/// raw pointers.
pub(in crate::sys) unsafe fn write_every_page(at: NonNull<u8>, len: usize) {
    for offset in (0..len).step_by(page_size()) {
        // SAFETY: the caller vouches for the byte. The exchange changes no byte and loses none of
        // the writes of others.
        let byte = unsafe { AtomicU8::from_ptr(at.as_ptr().add(offset)) };
        let mut seen = byte.load(Ordering::Relaxed);
        while let Err(other) = byte.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
            seen = other;
        }
    }
}

/// Maps pages of a file privately, in place of the pages that are mapped at `at`.
///
/// # Safety
///
/// The pages at `at` are those of the same file from `offset` on, and belong to the caller.
#[cfg(target_os = "linux")]
pub(in crate::sys) unsafe fn map_pages_private(file: impl AsFd, at: NonNull<u8>, len: usize, offset: u64) -> io::Result<()> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: the caller vouches for the pages. The new mapping replaces them atomically (a thread
    // that touches them meanwhile waits), contains the same bytes of the same file, and is unmapped
    // with the rest.
    unsafe { mmap(at.as_ptr().cast(), len, access, flags, file, offset)? };
    Ok(())
}

/// As [`map_pages_private`], and copies the pages.
///
/// # Safety
///
/// As for [`map_pages_private`].
#[cfg(target_os = "linux")]
pub(in crate::sys) unsafe fn make_pages_private(file: impl AsFd, at: NonNull<u8>, len: usize, offset: u64) -> io::Result<()> {
    use rustix::mm::{Advice, madvise};
    // SAFETY: the caller vouches for the pages.
    unsafe { map_pages_private(file, at, len, offset)? };
    // A page belongs to the file until it is written. Then the system copies it, and no write of
    // another thread is lost. A second mapping would lose the writes since the first.
    // SAFETY: the pages were just mapped, and populating changes no byte.
    match rustix::io::retry_on_intr(|| unsafe { madvise(at.as_ptr().cast(), len, Advice::LinuxPopulateWrite) }) {
        // Kernels before 5.14 have no call for it.
        // SAFETY: as above.
        Err(Errno::INVAL) => unsafe { write_every_page(at, len) },
        populated => populated?,
    }
    Ok(())
}
