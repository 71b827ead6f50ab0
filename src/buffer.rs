//! Memory that is being communicated: a pointer and a length, never a reference, since a peer may be writing it.

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

// SAFETY: these are addresses. Whoever dereferences them vouches that the memory is there and that its owner has lent it.
unsafe impl Send for RawSlice {}
// SAFETY: as above.
unsafe impl Send for RawSliceMut {}

impl RawSlice {
    pub(crate) const EMPTY: RawSlice = RawSlice { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    pub(crate) fn of<T>(slice: &[T]) -> RawSlice {
        RawSlice { ptr: slice.as_ptr().cast(), len: size_of_val(slice) }
    }

    /// The chunk without its first `count` bytes.
    pub(crate) fn skip(self, count: usize) -> RawSlice {
        assert!(count <= self.len);
        RawSlice { ptr: self.ptr.wrapping_add(count), len: self.len - count }
    }

    /// The first `len` bytes, or all if there are fewer.
    pub(crate) fn take(self, len: usize) -> RawSlice {
        RawSlice { len: self.len.min(len), ..self }
    }
}

impl RawSliceMut {
    pub(crate) const EMPTY: RawSliceMut = RawSliceMut { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    pub(crate) fn of<T>(slice: &mut [T]) -> RawSliceMut {
        RawSliceMut { ptr: slice.as_mut_ptr().cast(), len: size_of_val(slice) }
    }

    /// The chunk without its first `count` bytes.
    pub(crate) fn skip(self, count: usize) -> RawSliceMut {
        assert!(count <= self.len);
        RawSliceMut { ptr: self.ptr.wrapping_add(count), len: self.len - count }
    }

    /// The first `len` bytes, or all if there are fewer.
    pub(crate) fn take(self, len: usize) -> RawSliceMut {
        RawSliceMut { len: self.len.min(len), ..self }
    }

    /// The same memory, to be read.
    pub(crate) fn as_const(self) -> RawSlice {
        RawSlice { ptr: self.ptr, len: self.len }
    }
}

/// Where to put the rank whose message was received, if it may be any.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Rank(*mut usize),
    /// C's; of no interest if it is null.
    Int(*mut i32),
}

// SAFETY: an address may be sent; whoever uses it says why it may.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

impl Source {
    /// # Safety
    ///
    /// The place is writable, and nobody else touches it meanwhile; or it is C's and null.
    pub(crate) unsafe fn put(self, rank: usize) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Source::Rank(place) => place.write(rank),
                Source::Int(place) if place.is_null() => {}
                Source::Int(place) => place.write(i32::try_from(rank).unwrap_or(i32::MAX)),
            }
        }
    }
}
