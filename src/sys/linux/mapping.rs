//! Memory that processes share: a memfd that each of them maps.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::local_socket::LocalStream;
use super::memory::{check_file_size, check_memory, page_size};

/// A memfd, or an extension of one, that is mapped whole.
pub(in crate::sys) struct Mapping {
    /// `None` once nothing more is reserved or handed over. The lock is held for a moment only:
    /// reserving memory may take long, and meanwhile the listener hands the descriptor over.
    file: Mutex<Option<Arc<OwnedFd>>>,
    pub(super) base: NonNull<u8>,
    pub(super) len: usize,
    /// The process that mapped the memory. A forked child also has this value and shares the
    /// memory, but only the parent gives it back.
    pub(super) owner: u32,
}

impl Mapping {
    /// The file can be extended without end, so the room for that is not needed.
    pub(in crate::sys) fn create(len: usize, _: usize) -> io::Result<Mapping> {
        check_memory(len)?;
        check_file_size(len)?;
        let file = memfd_create("kolo", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        // No process can shrink the file while others use it. It may grow: see `extend`.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Mapping::map(Arc::new(file), 0..len)
    }

    fn map(file: Arc<OwnedFd>, range: Range<usize>) -> io::Result<Mapping> {
        let (access, len) = (ProtFlags::READ | ProtFlags::WRITE, range.len());
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, range.start as u64)? };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { file: Mutex::new(Some(file)), base, len, owner: std::process::id() })
    }

    /// Allocates a range of the file behind this mapping, and maps it. Several processes may do so
    /// at the same time.
    pub(in crate::sys) fn extend(&self, range: Range<usize>, deadline: Instant) -> io::Result<Mapping> {
        check_memory(range.len())?;
        check_file_size(range.end)?;
        let file = self.file()?;
        reserve_in_pieces(range.clone(), deadline, |piece| {
            // This makes the file larger if it ends before the piece, and never smaller.
            fallocate(&file, FallocateFlags::empty(), piece.start as u64, piece.len() as u64)
        })?;
        Mapping::map_extension(file, range)
    }

    /// Maps a range of the file behind this mapping; `NotFound` if the file ends before the end of
    /// the range.
    pub(in crate::sys) fn extension(&self, range: Range<usize>) -> io::Result<Mapping> {
        let file = self.file()?;
        // Touching memory behind the end of a file kills the process. This file keeps its end,
        // because no process can shrink it.
        if u64::try_from(fstat(&file)?.st_size).is_ok_and(|size| range.end as u64 > size) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Mapping::map_extension(file, range)
    }

    fn map_extension(file: Arc<OwnedFd>, range: Range<usize>) -> io::Result<Mapping> {
        let mapping = Mapping::map(file, range)?;
        // Offsets equal those of the file only in the first mapping, which keeps the descriptor
        // open.
        mapping.close();
        Ok(mapping)
    }

    #[cfg(test)]
    pub(in crate::sys) fn again(&self) -> io::Result<Mapping> {
        Mapping::map(Arc::new(self.file()?.try_clone()?), 0..self.len)
    }

    pub(super) fn file(&self) -> io::Result<Arc<OwnedFd>> {
        Ok(self.file.lock().clone().ok_or(Errno::BADF)?)
    }

    pub(in crate::sys) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(in crate::sys) fn reserve(&self, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        check_memory(range.len())?;
        let file = self.file()?;
        reserve_in_pieces(range, deadline, |piece| {
            fallocate(&file, FallocateFlags::KEEP_SIZE, piece.start as u64, piece.len() as u64)
        })
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
        let released = unsafe { madvise(self.base.as_ptr().add(range.start).cast(), range.len(), Advice::LinuxRemove) };
        if let Err(error) = released {
            tracing::debug!(%error, "cannot give memory back to the system before it is unmapped");
        }
    }

    fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    pub(in crate::sys) fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        let file = self.file()?;
        let at = self.base.as_ptr().wrapping_add(pages.start);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: these are whole pages of this mapping. The new mapping replaces them atomically
        // (a thread that touches them meanwhile waits), contains the same bytes of the same file,
        // and is unmapped with the rest.
        unsafe { mmap(at.cast(), pages.len(), access, flags, &file, pages.start as u64)? };
        // A page belongs to the file until it is written. Then the system copies it, and no write
        // of another thread is lost. A second mapping would lose the writes since the first.
        // SAFETY: the range is within this mapping, and populating changes no byte.
        match rustix::io::retry_on_intr(|| unsafe { madvise(at.cast(), pages.len(), Advice::LinuxPopulateWrite) }) {
            Err(Errno::INVAL) => write_every_page(at, pages.len()),
            populated => populated?,
        }
        Ok(())
    }

    pub(in crate::sys) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        let file = self.file()?;
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&to.0, &[IoSlice::new(b"m")], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(in crate::sys) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Mapping> {
        from.until(deadline).wait(PollFlags::IN)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&from.0, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let file =
            file.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the leader of the host has no memory to share"))?;
        // The peer must not be able to shrink the file: touching memory behind its end would kill
        // this process.
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if fstat(&file)?.st_size != len as i64 || !is_sealed {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Mapping::map(Arc::new(file), 0..len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child that shares its parent's address space, as after vfork, would unmap the parent's
        // memory.
        if !self.is_own() {
            return;
        }
        // SAFETY: `map` mapped this address with this length. Every user of an address in it also
        // holds the region.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::debug!(%error, "cannot unmap memory");
        }
    }
}

/// The most bytes that one call reserves. The deadline is checked between calls.
pub(super) const MOST_RESERVED: usize = 16 << 20;

/// Reserves a range piece by piece, until the deadline. Before Linux 6.10, a signal undoes the call
/// that it interrupts. If a timer is quicker than a piece, no piece would ever be reserved. So
/// pieces get smaller when calls are interrupted.
pub(super) fn reserve_in_pieces(
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

/// Writes to every page the bytes that it contains, for kernels before 5.14, which have no call for
/// it.
pub(super) fn write_every_page(at: *mut u8, len: usize) {
    for offset in (0..len).step_by(page_size()) {
        // SAFETY: the byte is within a mapping of the caller, which other threads may be using. The
        // exchange changes no byte and loses none of their writes.
        let byte = unsafe { AtomicU8::from_ptr(at.add(offset)) };
        let mut seen = byte.load(Ordering::Relaxed);
        while let Err(other) = byte.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
            seen = other;
        }
    }
}
