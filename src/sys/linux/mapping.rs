//! Memory that processes share: a memfd.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Instant;

use rustix::fs::{
    FallocateFlags, FileType, MemfdFlags, SealFlags, Stat, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::mm::{Advice, madvise};

use crate::sys::unix::mapping::{self, Memory, make_pages_private, reserve_in_pieces};
use crate::sys::unix::memory::check_file_size;
use crate::sys::unix::object::create_without_name;
use crate::sys::{Guarded, above_standard, is_refused, naming};

pub(in crate::sys) type Mapping = mapping::Mapping<Memfd>;

pub(in crate::sys) struct Memfd(Guarded<OwnedFd>);

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns whether a file is what [`create_without_name`] makes, where memfds are refused. It cannot be
/// sealed. Only processes to which one of this user has handed it could shrink it, and those could also
/// end this one.
fn is_object_of_this_user(state: &Stat) -> bool {
    let is_regular = FileType::from_raw_mode(state.st_mode) == FileType::RegularFile;
    let user = rustix::process::geteuid().as_raw();
    is_regular && state.st_uid == user && state.st_mode & 0o077 == 0 && state.st_nlink == 0
}

impl Memory for Memfd {
    const START: u64 = 0;

    /// The file can be extended without end, so the room for that is not needed.
    fn create(len: usize, _: usize) -> io::Result<Memfd> {
        check_file_size(len)?;
        let made = above_standard(|| memfd_create("kolo", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING));
        let file = match made.map_err(|error| naming("memfd_create")(error.into())) {
            Ok(file) => {
                ftruncate(&file, len as u64)?;
                // No process can shrink the file while others use it. It may grow: see `extend`.
                fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
                file
            }
            Err(error) if is_refused(&error) => {
                crate::log::debug!(%error, "shared memory is in /dev/shm");
                let made = create_without_name().and_then(|file| {
                    ftruncate(&file, len as u64)?;
                    Ok(file)
                });
                made.map_err(|other| io::Error::new(error.kind(), format!("{error}; in /dev/shm there is no memory: {other}")))?
            }
            Err(error) => return Err(error),
        };
        Ok(Memfd(Guarded::new(file)))
    }

    fn received(file: OwnedFd, len: usize) -> io::Result<Memfd> {
        // The peer must not be able to shrink the file: touching memory behind its end would kill
        // this process.
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let state = fstat(&file)?;
        let is_whole = state.st_size == len as i64;
        if is_whole && (is_sealed || is_object_of_this_user(&state)) {
            Ok(Memfd(Guarded::new(file)))
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }

    fn check(&self) -> io::Result<()> {
        self.0.check()
    }

    fn extend(&self, range: &Range<usize>, deadline: Instant) -> io::Result<()> {
        check_file_size(range.end)?;
        reserve_in_pieces(range.clone(), deadline, |piece| {
            // This makes the file larger if it ends before the piece, and never smaller.
            fallocate(&self.0, FallocateFlags::empty(), piece.start as u64, piece.len() as u64)
        })
    }

    /// Touching memory behind the end of a file kills the process. This file keeps its end, because
    /// no process can shrink it, or only those of this user that have it.
    fn is_extended(&self, range: &Range<usize>) -> io::Result<bool> {
        Ok(u64::try_from(fstat(&self.0)?.st_size).is_ok_and(|size| range.end as u64 <= size))
    }

    fn reserve(&self, _: NonNull<u8>, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        reserve_in_pieces(range, deadline, |piece| {
            fallocate(&self.0, FallocateFlags::KEEP_SIZE, piece.start as u64, piece.len() as u64)
        })
    }

    unsafe fn release(at: NonNull<u8>, len: usize) -> io::Result<()> {
        // SAFETY: the caller vouches for the range, which then reads as zeros.
        unsafe { madvise(at.as_ptr().cast(), len, Advice::LinuxRemove)? };
        Ok(())
    }

    unsafe fn make_private(&self, at: NonNull<u8>, pages: Range<usize>) -> io::Result<()> {
        // SAFETY: the caller vouches for the pages, which are those of this file.
        unsafe { make_pages_private(&self.0, at, pages.len(), pages.start as u64) }
    }
}
