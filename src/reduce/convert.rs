//! The loops that convert between f32 and floats of 16 bits. As that of [`super::fold`], they are
//! compiled once for each set of instructions.

use super::instructions::{CHUNK, Instructions, Lane};

/// See [`super::narrow`].
///
/// # Safety
///
/// As for [`super::narrow`]; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn narrow_all<I: Instructions, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: passed on.
    unsafe { all::<f32, T>(from.cast(), to.cast(), count, |chunk| T::narrow::<I>(chunk)) }
}

/// See [`super::widen`].
///
/// # Safety
///
/// As for [`super::widen`]; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn widen_all<I: Instructions, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: passed on.
    unsafe { all::<T, f32>(from.cast(), to.cast(), count, |chunk| T::widen::<I>(chunk)) }
}

/// Converts chunk by chunk. The last elements are padded to a chunk, so that every element is
/// converted by the same instructions.
///
/// # Safety
///
/// `from` is readable and `to` writable for `count` elements, and they do not overlap.
#[inline(always)]
unsafe fn all<F: Lane, T: Lane>(from: *const F, to: *mut T, count: usize, convert: impl Fn(&[F; CHUNK]) -> [T; CHUNK]) {
    let whole = count / CHUNK * CHUNK;
    // SAFETY: as promised by the caller; chunks end at `whole`, and the rest at `count`.
    unsafe {
        for at in (0..whole).step_by(CHUNK) {
            let chunk = from.add(at).cast::<[F; CHUNK]>().read();
            to.add(at).cast::<[T; CHUNK]>().write(convert(&chunk));
        }
        if whole < count {
            let mut chunk = [F::ZERO; CHUNK];
            std::ptr::copy_nonoverlapping(from.add(whole), chunk.as_mut_ptr(), count - whole);
            std::ptr::copy_nonoverlapping(convert(&chunk).as_ptr(), to.add(whole), count - whole);
        }
    }
}
