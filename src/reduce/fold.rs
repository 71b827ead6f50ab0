//! The loop of all kernels: many parts in, one result out. Every byte of every part is loaded once,
//! and the result is stored once.
//!
//! The loop is generic over the element, the reduction and the [`Instructions`], and is compiled
//! once for each combination. The compiler vectorises it: chunks have a fixed length, and the
//! accumulators of a chunk stay in registers while the parts are added one after the other.

use super::arithmetic::{Combine, Number};
use super::instructions::{CHUNK, Finish, Instructions, LINE, Lane};

/// The most elements that are faster one by one than as a padded chunk.
const FEW: usize = 4;

/// See [`super::Kernel::fold`].
///
/// # Safety
///
/// As for [`super::Kernel::fold`]; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn fold<I: Instructions, T: Lane, C: Combine<T::Sum>>(
    parts: &[*const u8],
    dst: *mut u8,
    count: usize,
    finish: Finish,
) {
    let dst = dst.cast::<T>();
    let (head, whole) = if finish.streams {
        // Streaming stores start at the beginning of a cache line.
        let head = (dst.addr().wrapping_neg() % LINE / size_of::<T>()).min(count);
        (head, (count - head) / CHUNK * CHUNK)
    } else {
        (0, count / CHUNK * CHUNK)
    };
    // The elements before the first and after the last whole chunk, in one loop: it is compiled for so
    // many types, reductions and instructions that a second copy would cost seconds of every build.
    for (at, count) in [(0, head), (head + whole, count - head - whole)] {
        // SAFETY: the caller promises `count` elements behind every pointer, of which these are two
        // ranges. If `dst` is one of the parts, each element is read before it is written.
        unsafe { edge::<I, T, C>(parts, dst, at, count, finish.divisor) };
    }
    // SAFETY: the caller promises `count` elements behind every pointer, of which this is the range between
    // those two. If `dst` is one of the parts, each element is read before it is written.
    unsafe {
        for at in (head..head + whole).step_by(CHUNK) {
            let load = |part: *const u8| part.cast::<T>().add(at).cast::<[T; CHUNK]>().read();
            let result = combine::<I, T, C>(parts, finish.divisor, load);
            let to = dst.add(at).cast::<[T; CHUNK]>();
            if finish.streams { I::stream(&result, to) } else { to.write(result) }
        }
        if finish.streams {
            I::end_of_stream();
        }
    }
}

/// Reduces fewer elements than a chunk has.
///
/// # Safety
///
/// As for [`fold`], from element `at`.
#[inline(always)]
unsafe fn edge<I: Instructions, T: Lane, C: Combine<T::Sum>>(
    parts: &[*const u8],
    dst: *mut T,
    at: usize,
    count: usize,
    divisor: usize,
) {
    if count <= FEW {
        for i in at..at + count {
            // SAFETY: the caller promises `count` elements from `at` on.
            let load = |part: *const u8| unsafe { part.cast::<T>().add(i).read() }.to_sum();
            let mut sum = load(parts[0]);
            for &part in &parts[1..] {
                sum = C::combine(sum, load(part));
            }
            if divisor > 1 {
                sum = sum.divide(divisor);
            }
            // SAFETY: as above; all parts have been read.
            unsafe { dst.add(i).write(T::from_sum(sum)) };
        }
        return;
    }
    let load = |part: *const u8| {
        let mut chunk = [T::ZERO; CHUNK];
        // SAFETY: the caller promises `count` elements from `at` on.
        unsafe { std::ptr::copy_nonoverlapping(part.cast::<T>().add(at), chunk.as_mut_ptr(), count) };
        chunk
    };
    let result = combine::<I, T, C>(parts, divisor, load);
    // SAFETY: as above; all parts have been read.
    unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), dst.add(at), count) };
}

#[inline(always)]
fn combine<I: Instructions, T: Lane, C: Combine<T::Sum>>(
    parts: &[*const u8],
    divisor: usize,
    load: impl Fn(*const u8) -> [T; CHUNK],
) -> [T; CHUNK] {
    let mut sums = T::widen::<I>(&load(parts[0]));
    for &part in &parts[1..] {
        let part = T::widen::<I>(&load(part));
        // Not over a range: builds for tests do not optimise, and its iterator would take most of their time.
        let mut i = 0;
        while i < CHUNK {
            sums[i] = C::combine(sums[i], part[i]);
            i += 1;
        }
    }
    if divisor > 1 {
        for sum in &mut sums {
            *sum = sum.divide(divisor);
        }
    }
    T::narrow::<I>(&sums)
}
