//! Memory that is communicated, as a pointer and a length. It is never a reference, because a peer
//! may be writing it. And the stream of a device in whose order it is used.

use std::ffi::c_void;

/// Memory that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSlice {
    pub(crate) ptr: *const u8,
    pub(crate) len: usize,
}

/// Memory that is written, and perhaps read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSliceMut {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: this is an address. Code that dereferences it vouches that the memory exists and that its
// owner lets it be used.
unsafe impl Send for RawSlice {}
// SAFETY: as above. No method reads or writes the memory, so threads that share the address share
// two numbers.
unsafe impl Sync for RawSlice {}
// SAFETY: as above.
unsafe impl Send for RawSliceMut {}
// SAFETY: as above. A public type that contains one writes the memory through `&mut` or by value
// only.
unsafe impl Sync for RawSliceMut {}

impl RawSlice {
    pub(crate) const EMPTY: RawSlice = RawSlice { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    /// Returns memory whose length a call tells by its counts.
    pub(crate) const fn at(ptr: *const u8) -> RawSlice {
        RawSlice { ptr, len: 0 }
    }

    pub(crate) fn of<T>(slice: &[T]) -> RawSlice {
        RawSlice { ptr: slice.as_ptr().cast(), len: size_of_val(slice) }
    }

    /// Returns the memory without its first `count` bytes.
    pub(crate) fn skip(self, count: usize) -> RawSlice {
        assert!(count <= self.len);
        RawSlice { ptr: self.ptr.wrapping_add(count), len: self.len - count }
    }

    /// Returns the first `len` bytes, or all if there are fewer.
    pub(crate) fn take(self, len: usize) -> RawSlice {
        RawSlice { len: self.len.min(len), ..self }
    }
}

impl RawSlice {
    /// Reads a byte of each page, before another process reads the memory. If the program or a file
    /// system that has to provide a page does not, this thread waits for it, and the peers see whom
    /// they wait for. The system's copy would wait for it in the peer, where nothing can end the wait.
    ///
    /// # Safety
    ///
    /// The memory is readable until this returns.
    pub(crate) unsafe fn fault_in(self) {
        // The smallest page that systems use.
        const PAGE: usize = 4096;
        let ends = self.len.checked_sub(1);
        for at in (0..self.len).step_by(PAGE).chain(ends) {
            // SAFETY: `at` is within the memory. Volatile, so that the read is not left out.
            unsafe { self.ptr.add(at).read_volatile() };
        }
    }
}

impl RawSliceMut {
    pub(crate) const EMPTY: RawSliceMut = RawSliceMut { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    /// As [`RawSlice::at`].
    pub(crate) const fn at(ptr: *mut u8) -> RawSliceMut {
        RawSliceMut { ptr, len: 0 }
    }

    pub(crate) fn of<T>(slice: &mut [T]) -> RawSliceMut {
        RawSliceMut { ptr: slice.as_mut_ptr().cast(), len: size_of_val(slice) }
    }

    /// Returns the memory without its first `count` bytes.
    pub(crate) fn skip(self, count: usize) -> RawSliceMut {
        assert!(count <= self.len);
        RawSliceMut { ptr: self.ptr.wrapping_add(count), len: self.len - count }
    }

    /// Returns the first `len` bytes, or all if there are fewer.
    pub(crate) fn take(self, len: usize) -> RawSliceMut {
        RawSliceMut { len: self.len.min(len), ..self }
    }

    /// Returns the same memory, for reading.
    pub(crate) fn as_const(self) -> RawSlice {
        RawSlice { ptr: self.ptr, len: self.len }
    }
}

/// Where to write the rank whose message was received, if it may be any rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Rank(*mut usize),
    /// A pointer from C, not used if it is null.
    Int(*mut i32),
}

// SAFETY: this is an address. Code that writes to it vouches for the memory.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

impl Source {
    /// Writes the rank.
    ///
    /// # Safety
    ///
    /// The address is writable, and no other thread accesses it meanwhile; or it is from C and
    /// null.
    pub(crate) unsafe fn put(self, rank: usize) {
        // SAFETY: the caller vouches for the address.
        unsafe {
            match self {
                Source::Rank(address) => address.write(rank),
                Source::Int(address) if address.is_null() => {}
                Source::Int(address) => address.write(i32::try_from(rank).unwrap_or(i32::MAX)),
            }
        }
    }
}

/// An address in the memory of a device. It is not a pointer: the host cannot read there.
pub(crate) type Address = u64;

/// A stream, whose work a device does in order: a user's `CUstream` or one of kolo's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId(pub(crate) usize);

impl StreamId {
    /// CUDA's default stream; no stream, for a call on host memory.
    pub(crate) const DEFAULT: StreamId = StreamId(0);
}

impl From<*mut c_void> for StreamId {
    fn from(stream: *mut c_void) -> StreamId {
        StreamId(stream.addr())
    }
}
