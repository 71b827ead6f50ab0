//! Copies between buffers, with the kernels' instructions where these are faster than libc's.

use super::kernel::Kernel;
use crate::types::{DType, ReduceOp};

/// Copies bytes past the caches: the destination's lines are not loaded first. For large results
/// that no core reads soon.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap. During the call
/// nothing else writes `from` or accesses `to`.
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    // A reduction of one part is a copy.
    let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("ReduceOp::Max is defined on u8");
    // SAFETY: as promised by the caller; every address is aligned to bytes.
    unsafe { copy.fold_streaming(&[from], to, len, None) }
}

/// Lengths in bytes that vectors copy faster than libc does. From the upper end on, libc uses the
/// processor's own instruction for copying (`rep movsb`), which takes 0.1 us to start.
const SHORT: std::ops::RangeInclusive<usize> = 2 << 10..=4 << 10;

/// Whether `rep movsb` takes up to twenty times as long as vectors, measured on an AMD EPYC with
/// FSRM for 4 KiB to 256 KiB: where the destination lies 1 to 31 bytes after the source within a
/// page. A large block of `malloc` begins 16 bytes after a page, and slots begin with one.
#[inline]
fn is_slow_by_bytes(from: *const u8, to: *mut u8) -> bool {
    const PAGE: usize = 4096;
    cfg!(target_arch = "x86_64") && (1..32).contains(&(to.addr().wrapping_sub(from.addr()) % PAGE))
}

/// Copies bytes that another core is about to read, or has just written.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { copy_up_to(*SHORT.end(), from, to, len) }
}

/// As [`copy`], but uses vectors up to `most` bytes. `rep movsb` wins by not loading the
/// destination's lines, which is no advantage if this core holds them already.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy_up_to(most: usize, from: *const u8, to: *mut u8, len: usize) {
    if (*SHORT.start()..=most).contains(&len) || (len > most && is_slow_by_bytes(from, to)) {
        let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("ReduceOp::Max is defined on u8");
        // SAFETY: as promised by the caller; every address is aligned to bytes.
        unsafe { copy.fold(&[from], to, len, None) }
    } else {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }
}

/// Sets every byte of a `bool` buffer to 0 or 1: a peer may have sent other values.
///
/// # Safety
///
/// `ptr` is valid for reads and writes of `count` bytes, and nothing else accesses them during the
/// call.
pub(crate) unsafe fn normalise_bools(ptr: *mut u8, count: usize) {
    for i in 0..count {
        // SAFETY: within the `count` bytes that the caller promises.
        unsafe { *ptr.add(i) = u8::from(*ptr.add(i) != 0) };
    }
}
