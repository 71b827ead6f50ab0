//! A reduction kernel, chosen for this processor.

use std::sync::LazyLock;

use super::instructions::{Finish, Fold};
use super::level::Level;
use crate::types::{DType, ReduceOp};

/// The kernels of the best level, by the numbers of element type and reduction: to choose one takes as long as
/// to reduce a few elements.
static KERNELS: LazyLock<[[Option<Kernel>; ReduceOp::ALL.len()]; DType::ALL.len()]> = LazyLock::new(|| {
    let of = |dtype: DType| std::array::from_fn(|redop| Kernel::of_level(Level::best(), dtype, ReduceOp::ALL[redop]));
    std::array::from_fn(|dtype| of(DType::ALL[dtype]))
});

/// The kernel for one reduction on one element type.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    run: Fold,
    /// For the size of an element.
    dtype: DType,
    /// Whether a finished result is divided.
    averages: bool,
}

impl Kernel {
    /// Returns the kernel, or `None` if the reduction is not defined on these elements.
    #[inline]
    pub(crate) fn new(dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        KERNELS[dtype as usize][redop as usize]
    }

    pub(super) fn of_level(level: Level, dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        redop.applies_to(dtype).then(|| Kernel { run: level.kernel(dtype, redop), dtype, averages: redop == ReduceOp::Average })
    }

    /// Computes `dst[i] = parts[0][i] op parts[1][i] op ...` for `count` elements, in the order of
    /// the parts. Elements of 16 bits and floats of 8 are accumulated in `f32` and rounded once. `finish` is the
    /// number of ranks whose parts are in the result, by which an average is divided; `None` for a
    /// partial result.
    ///
    /// # Safety
    ///
    /// Every part is readable and `dst` writable for `count` elements, and all are aligned to the
    /// element. `dst` is one of the parts or overlaps none of them. During the call nothing else
    /// writes the parts or accesses `dst`.
    pub(crate) unsafe fn fold(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: as promised by the caller.
        unsafe { self.fold_to(parts, dst, count, finish, false) }
    }

    /// As [`Kernel::fold`], but stores past the caches: for results that no core reads soon.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::fold`].
    pub(crate) unsafe fn fold_streaming(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: as promised by the caller.
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
        // SAFETY: the caller promises what the kernel requires, and the level has only kernels
        // whose instructions the processor has.
        unsafe { (self.run)(parts, dst, count, Finish { divisor, streams }) }
    }
}
