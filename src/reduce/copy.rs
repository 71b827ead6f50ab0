//! Copies between buffers, with the kernels' instructions where these are faster than libc's.

use super::kernel::Kernel;
use crate::types::{DType, ReduceOp};

/// Copies bytes past the caches, for large results that nobody reads soon: their old content is not loaded first.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, and they are apart. Nobody else writes the one or touches the other
/// meanwhile.
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    // A reduction of one part is a copy.
    let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("bytes have a largest");
    // SAFETY: passed on; every address is aligned to bytes.
    unsafe { copy.fold_streaming(&[from], to, len, None) }
}

/// Bytes that are copied quicker by vectors than by the processor's own instruction for copying (`rep movsb`), which libc uses
/// from so many on, and which takes a tenth of a microsecond to begin.
const SHORT: std::ops::RangeInclusive<usize> = 2 << 10..=4 << 10;

/// Copies bytes that another core is about to read, or has just written.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe { copy_up_to(*SHORT.end(), from, to, len) }
}

/// As [`copy`], but up to another length by vectors: where this core holds the destination's lines already, the processor's own
/// instruction loses its advantage, which is not to load them.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy_up_to(most: usize, from: *const u8, to: *mut u8, len: usize) {
    if (*SHORT.start()..=most).contains(&len) {
        let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("bytes have a largest");
        // SAFETY: passed on; every address is aligned to bytes.
        unsafe { copy.fold(&[from], to, len, None) }
    } else {
        // SAFETY: passed on.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }
}

/// Makes every byte of a `bool` buffer 0 or 1: what came from a peer may be neither.
///
/// # Safety
///
/// `ptr` is valid for reads and writes of `count` bytes, and nobody else touches them meanwhile.
pub(crate) unsafe fn normalise_bools(ptr: *mut u8, count: usize) {
    for i in 0..count {
        // SAFETY: within the `count` bytes that the caller vouches for.
        unsafe { *ptr.add(i) = u8::from(*ptr.add(i) != 0) };
    }
}
