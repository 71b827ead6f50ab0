//! Memory that several ranks map.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Instant;

use super::platform::{LocalStream, Mapping};

/// Zeroed memory that several ranks reach, in one process or in several. It is gone when the last of them drops it,
/// whatever happens to the others.
pub(crate) struct Segment {
    base: NonNull<u8>,
    len: usize,
    kind: Kind,
}

enum Kind {
    /// Ranks of one process share the allocation.
    Heap,
    /// Every process maps the same memory.
    Mapped(Mapping),
}

// SAFETY: a segment is memory with an address; all access to it goes through raw pointers and atomics, whose users
// synchronise.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// What every rank's part is aligned to, so that each can be placed near its rank: the usual page.
    pub(crate) const PAGE: usize = 4096;

    /// Memory for the ranks of this process.
    pub(crate) fn heap(len: usize) -> Segment {
        Segment::try_heap(len).unwrap_or_else(|| handle_alloc_error(Segment::layout(len)))
    }

    /// The same, unless there is not so much.
    pub(crate) fn try_heap(len: usize) -> Option<Segment> {
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(Segment::layout(len)) })?;
        Some(Segment { base, len, kind: Kind::Heap })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), Segment::PAGE).expect("segments are smaller than the address space")
    }

    /// Memory that [`Segment::hand_over`] gives to other processes. It has no name and leaves nothing behind.
    pub(crate) fn create(len: usize) -> io::Result<Segment> {
        let mapping = Mapping::create(len)?;
        Ok(Segment { base: mapping.base(), len, kind: Kind::Mapped(mapping) })
    }

    /// Memory for the same ranks as another segment's.
    pub(crate) fn create_like(other: &Segment, len: usize) -> io::Result<Segment> {
        match other.kind {
            Kind::Heap => Segment::try_heap(len).ok_or_else(|| io::ErrorKind::OutOfMemory.into()),
            Kind::Mapped(_) => Segment::create(len),
        }
    }

    /// Sends the memory's descriptor to the process at the other end.
    pub(crate) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        match &self.kind {
            Kind::Mapped(mapping) => mapping.hand_over(to),
            Kind::Heap => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Maps the memory whose descriptor the other end hands over. It must be of this length.
    pub(crate) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Segment> {
        let mapping = Mapping::take_over(from, len, deadline)?;
        Ok(Segment { base: mapping.base(), len, kind: Kind::Mapped(mapping) })
    }

    /// Makes sure that this part exists, near the calling thread, so that touching it later cannot fail.
    pub(crate) fn reserve(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => mapping.reserve(range),
            Kind::Heap => Ok(()),
        }
    }

    /// Closes the descriptor; the memory stays. From now on nothing can be reserved or handed over.
    pub(crate) fn close(&self) {
        if let Kind::Mapped(mapping) = &self.kind {
            mapping.close();
        }
    }

    /// Gives the memory of this part back to the system; it reads as zeros from now on.
    pub(crate) fn release(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        if let Kind::Mapped(mapping) = &self.kind {
            mapping.release(range);
        }
    }

    /// Replaces this part by private memory of the same content, for this process alone; false if it is memory of this process
    /// anyhow, or the system refuses.
    pub(crate) fn detach(&self, range: Range<usize>) -> bool {
        assert!(range.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => {
                mapping.detach(range).inspect_err(|error| tracing::error!(%error, "memory stays shared")).is_ok()
            }
            Kind::Heap => false,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Kind::Heap = self.kind {
            // SAFETY: allocated in `heap` with the same layout, and nobody refers to it any more.
            unsafe { dealloc(self.base.as_ptr(), Segment::layout(self.len)) };
        }
    }
}
