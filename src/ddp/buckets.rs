//! The memory of the buckets.

use std::ops::Range;

use super::layout::Layout;
use super::parameter::Parameter;
use crate::comm::{Communicator, Registered};
use crate::error::Result;

/// Buckets in one piece of registered memory.
///
/// Peers read and write a bucket while it is being reduced, and only then. So no reference to it exists while it is in flight:
/// who holds one is what [`Core`](super::core::Core) keeps count of.
pub(super) struct Buckets {
    pub(super) layout: Layout,
    base: *mut u8,
    _memory: Registered<u8>,
}

// SAFETY: an address and the memory behind it, which is this value's own. Whoever dereferences it vouches for being alone.
unsafe impl Send for Buckets {}
// SAFETY: as above.
unsafe impl Sync for Buckets {}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buckets").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Buckets {
    /// A collective call.
    pub(super) fn allocate(comm: &Communicator, layout: Layout) -> Result<Buckets> {
        let mut memory = comm.alloc::<u8>(layout.bytes)?;
        let base = memory.as_mut_ptr();
        Ok(Buckets { layout, base, _memory: memory })
    }

    /// Where a range of its bytes is.
    pub(super) fn at(&self, bytes: &Range<usize>) -> *mut u8 {
        assert!(bytes.start <= bytes.end && bytes.end <= self.layout.bytes);
        self.base.wrapping_add(bytes.start)
    }

    /// The gradient of a parameter: its address and bytes.
    pub(super) fn gradient(&self, index: usize) -> (*mut u8, usize) {
        let bytes = self.layout.bytes_of(index);
        (self.at(&bytes), bytes.len())
    }

    /// # Safety
    ///
    /// Nobody else uses the parameter's gradient meanwhile.
    pub(super) unsafe fn zero(&self, index: usize) {
        let (address, len) = self.gradient(index);
        // SAFETY: within the memory, and passed on.
        unsafe { address.write_bytes(0, len) }
    }

    /// Takes over gradients that lie elsewhere in another layout of the same parameters.
    ///
    /// # Safety
    ///
    /// Nobody else uses either memory meanwhile.
    pub(super) unsafe fn copy_from(&self, other: &Buckets, parameters: &[Parameter]) {
        for index in 0..parameters.len() {
            let ((to, len), (from, _)) = (self.gradient(index), other.gradient(index));
            // SAFETY: both are of the same parameter and so equally long, in memories that are apart; the rest is passed on.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
        }
    }
}
