//! A reduction kernel, chosen for this processor.

use super::instructions::{Finish, Fold};
use super::level::Level;
use crate::types::{DType, ReduceOp};

/// The kernel for one reduction on one element type.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    run: Fold,
    /// The element type, for its size.
    dtype: DType,
    /// Whether a finished result is divided.
    averages: bool,
}

impl Kernel {
    /// The kernel, where the reduction means something on these elements.
    pub(crate) fn new(dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        Kernel::of_level(Level::best(), dtype, redop)
    }

    pub(super) fn of_level(level: Level, dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        redop.applies_to(dtype).then(|| Kernel { run: level.kernel(dtype, redop), dtype, averages: redop == ReduceOp::Average })
    }

    /// `dst[i] = parts[0][i] op parts[1][i] op ...` for `count` elements, operands in the order given; halves are summed in
    /// `f32` and rounded once. With `finish`, the number of ranks whose parts went in, an average is divided by it.
    ///
    /// # Safety
    ///
    /// Every part is readable and `dst` writable for `count` elements, all are aligned to the element, and `dst` is either
    /// one of the parts or apart from all of them. Nobody else writes the parts or touches `dst` meanwhile.
    pub(crate) unsafe fn fold(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: passed on.
        unsafe { self.fold_to(parts, dst, count, finish, false) }
    }

    /// The same, past the caches: for results that nobody reads soon.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::fold`].
    pub(crate) unsafe fn fold_streaming(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: passed on.
        unsafe { self.fold_to(parts, dst, count, finish, true) }
    }

    unsafe fn fold_to(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>, streams: bool) {
        debug_assert!(!parts.is_empty());
        if count == 0 {
            return;
        }
        let is_aligned = |ptr: *const u8| ptr.addr().is_multiple_of(self.dtype.size());
        debug_assert!(parts.iter().all(|&part| is_aligned(part)) && is_aligned(dst));
        let divisor = finish.filter(|_| self.averages).unwrap_or(1);
        // SAFETY: what the caller promises is what the kernel asks for, and the processor has the kernel's instructions.
        unsafe { (self.run)(parts, dst, count, Finish { divisor, streams }) }
    }
}
