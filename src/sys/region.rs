//! Regions of memory that several ranks share.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::platform::{self, LocalStream, Mapping};

/// The size of the system's pages. Memory is mapped, and made private, in whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageSize(usize);

impl PageSize {
    /// Returns the page size of this machine.
    pub(crate) fn system() -> PageSize {
        PageSize(platform::page_size())
    }

    /// Returns a page size that this machine need not have.
    #[cfg(test)]
    pub(crate) fn of(bytes: usize) -> PageSize {
        assert!(bytes.is_power_of_two());
        PageSize(bytes)
    }

    pub(crate) fn bytes(self) -> usize {
        self.0
    }

    /// Returns the next multiple of the size; `None` beyond the address space.
    pub(crate) fn round_up(self, bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(self.0)
    }

    /// Returns the whole pages that hold the bytes of a range.
    pub(crate) fn holding(self, range: Range<usize>) -> Range<usize> {
        range.start / self.0 * self.0..range.end.next_multiple_of(self.0)
    }
}

/// A region of memory that several ranks share, in one process or in several. It starts zeroed, and
/// is freed when the last of them drops it or ends.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    kind: Kind,
}

enum Kind {
    /// Ranks of one process share the allocation. Extensions are separate allocations, by their
    /// ranges of bytes.
    Heap { extensions: Mutex<HashMap<Range<usize>, Arc<Region>>> },
    /// Every process maps the same memory.
    Mapped(Mapping),
}

// SAFETY: a region is memory at a fixed address. All access goes through raw pointers and atomics,
// whose users synchronise.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// A deadline far longer than it takes to reserve memory of the sizes that the library chooses.
const LONG: Duration = Duration::from_secs(60);

impl Region {
    /// Whether [`Region::provide`] may succeed for memory of several processes: the system provides it when it
    /// is needed, and can refuse it then.
    pub(crate) const PROVIDES_LATER: bool = cfg!(target_os = "linux");

    /// Allocates memory for the ranks of this process.
    pub(crate) fn heap(len: usize) -> Region {
        Region::try_heap(len).unwrap_or_else(|| handle_alloc_error(Region::layout(len)))
    }

    /// As [`Region::heap`]; `None` if there is not enough memory.
    pub(crate) fn try_heap(len: usize) -> Option<Region> {
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(Region::layout(len)) })?;
        Some(Region { base, len, kind: Kind::Heap { extensions: Mutex::default() } })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), PageSize::system().bytes()).expect("regions are smaller than the address space")
    }

    /// Creates memory that [`Region::hand_over`] gives to other processes. It has no name and
    /// leaves nothing behind.
    pub(crate) fn create(len: usize) -> io::Result<Region> {
        Region::create_extensible(len, len)
    }

    /// As [`Region::create`], for memory that will be extended, to about `room` bytes.
    pub(crate) fn create_extensible(len: usize, room: usize) -> io::Result<Region> {
        let mapping = Mapping::create(len, room)?;
        Ok(Region { base: mapping.base(), len, kind: Kind::Mapped(mapping) })
    }

    /// Fails if this process may not make files of this size. The limit on files includes memory
    /// files.
    pub(crate) fn check_size(len: usize) -> io::Result<()> {
        platform::check_file_size(len)
    }

    /// Creates memory for the same ranks as those of another region.
    pub(crate) fn create_like(other: &Region, len: usize) -> io::Result<Region> {
        match other.kind {
            Kind::Heap { .. } => Region::try_heap(len).ok_or_else(|| io::ErrorKind::OutOfMemory.into()),
            Kind::Mapped(_) => Region::create(len),
        }
    }

    /// Hands the memory over to the process at the other end of a connection.
    pub(crate) fn hand_over(&self, to: &LocalStream) -> io::Result<()> {
        match &self.kind {
            Kind::Mapped(mapping) => mapping.hand_over(to),
            Kind::Heap { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Maps the memory that the other end hands over. It must be of this length.
    pub(crate) fn take_over(from: &LocalStream, len: usize, deadline: Instant) -> io::Result<Region> {
        let mapping = Mapping::take_over(from, len, deadline)?;
        Ok(Region { base: mapping.base(), len, kind: Kind::Mapped(mapping) })
    }

    /// Allocates the pages of a range, near the calling thread, so that touching them later cannot
    /// fail. The range is of a size that the library chooses.
    pub(crate) fn reserve(&self, range: Range<usize>) -> io::Result<()> {
        self.reserve_by(range, Instant::now() + LONG)
    }

    /// As [`Region::reserve`] for a range of any size; `TimedOut` at the deadline.
    pub(crate) fn reserve_by(&self, range: Range<usize>, deadline: Instant) -> io::Result<()> {
        assert!(range.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => mapping.reserve(range, deadline),
            Kind::Heap { .. } => Ok(()),
        }
    }

    /// Maps the pages of a range at once, where the system can: touching them one by one takes a few
    /// microseconds each.
    pub(crate) fn populate(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => {
                if let Err(error) = mapping.populate(self.pages_of(range)) {
                    crate::log::debug!(%error, "cannot map pages before they are touched");
                }
            }
            Kind::Heap { .. } => {}
        }
    }

    /// Allocates the pages of a range of memory that may be closed. Fails if there is no memory, or if the
    /// system cannot say so: then touching the range might end the process.
    pub(crate) fn provide(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => mapping.provide(self.pages_of(range)),
            Kind::Heap { .. } => Ok(()),
        }
    }

    /// Returns the whole pages that hold the bytes of a range.
    fn pages_of(&self, range: Range<usize>) -> Range<usize> {
        let pages = PageSize::system().holding(range);
        pages.start..pages.end.min(self.len)
    }

    /// Extends the memory by a range of bytes behind it, and reserves the range. Every process that
    /// has mapped this region can map the range with [`Region::extension`], even after this process
    /// has ended.
    pub(crate) fn extend(&self, range: Range<usize>) -> io::Result<Arc<Region>> {
        assert!(self.len <= range.start && range.start < range.end);
        match &self.kind {
            Kind::Mapped(mapping) => Ok(Region::mapped(mapping.extend(range.clone(), Instant::now() + LONG)?, range.len())),
            Kind::Heap { extensions } => {
                let extension = Arc::new(Region::try_heap(range.len()).ok_or(io::ErrorKind::OutOfMemory)?);
                extensions.lock().insert(range, extension.clone());
                Ok(extension)
            }
        }
    }

    /// Maps a range by which a rank has extended the memory; `NotFound` if there is no such range.
    /// The result can neither reserve memory nor be handed over.
    pub(crate) fn extension(&self, range: Range<usize>) -> io::Result<Arc<Region>> {
        assert!(self.len <= range.start && range.start < range.end);
        match &self.kind {
            Kind::Mapped(mapping) => Ok(Region::mapped(mapping.extension(range.clone())?, range.len())),
            Kind::Heap { extensions } => extensions.lock().get(&range).cloned().ok_or_else(|| io::ErrorKind::NotFound.into()),
        }
    }

    fn mapped(mapping: Mapping, len: usize) -> Arc<Region> {
        Arc::new(Region { base: mapping.base(), len, kind: Kind::Mapped(mapping) })
    }

    /// Closes the descriptor. The memory stays mapped, but can no longer be reserved, handed over
    /// or extended.
    pub(crate) fn close(&self) {
        if let Kind::Mapped(mapping) = &self.kind {
            mapping.close();
        }
    }

    /// Gives the memory of a range back to the system. The range reads as zeros from then on. Does
    /// nothing in a child of the process that mapped the memory.
    pub(crate) fn release(&self, range: Range<usize>) {
        assert!(range.end <= self.len);
        if let Kind::Mapped(mapping) = &self.kind {
            mapping.release(range);
        }
    }

    /// Makes whole pages private to this process. They keep their bytes, and later writes of other
    /// processes do not change them. Other threads of this process may use them meanwhile.
    /// `Unsupported` for memory of ranks of one process.
    pub(crate) fn make_private(&self, pages: Range<usize>) -> io::Result<()> {
        assert!(pages.start <= pages.end && pages.end <= self.len);
        match &self.kind {
            Kind::Mapped(mapping) => mapping.make_private(pages),
            Kind::Heap { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns a second mapping of the same memory, as another process has; `None` where memory is
    /// not mapped.
    #[cfg(test)]
    #[cfg_attr(any(miri, windows), expect(dead_code, reason = "only tests on Unix map memory again"))]
    pub(crate) fn mapped_again(&self) -> Option<Region> {
        let Kind::Mapped(mapping) = &self.kind else { return None };
        let again = mapping.again().expect("the address space has room for a second mapping");
        Some(Region { base: again.base(), len: self.len, kind: Kind::Mapped(again) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Kind::Heap { .. } = self.kind {
            // SAFETY: `try_heap` allocated the memory with the same layout, and all holders of the
            // region are gone.
            unsafe { dealloc(self.base.as_ptr(), Region::layout(self.len)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ranges_are_whole_pages_of_the_system() {
        let page = PageSize::of(64 << 10);
        assert_eq!([0, 1, 4096, 65_536, 65_537].map(|bytes| page.round_up(bytes)), [0, 1, 1, 1, 2].map(|n| Some(n << 16)));
        assert_eq!(page.round_up(usize::MAX), None);
        assert_eq!(page.holding(70_000..70_001), 65_536..131_072);
        assert_eq!(page.holding(0..65_536), 0..65_536);
        assert_eq!(page.holding(65_535..65_537), 0..131_072);
        let system = PageSize::system();
        assert!(system.bytes().is_power_of_two());
        assert!(Region::heap(1).at(0).addr().is_multiple_of(system.bytes()));
    }
}
