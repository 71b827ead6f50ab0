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
/// The elements before the first and after the last whole chunk go through the same instructions as
/// those within: the loop is compiled for so many types, reductions and instructions that a second
/// copy in each would cost seconds of every build.
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
    // Streaming stores start at the beginning of a cache line.
    let head = if finish.streams { dst.addr().wrapping_neg() % LINE / size_of::<T>() } else { 0 };
    let mut at = 0;
    while at < count {
        let length = (count - at).min(if at < head { head } else { CHUNK });
        if length <= FEW {
            for i in at..at + length {
                // SAFETY: the caller promises `count` elements behind every pointer, and `i` is less.
                let load = |part: *const u8| unsafe { part.cast::<T>().add(i).read() }.to_sum();
                let mut sum = load(parts[0]);
                for &part in &parts[1..] {
                    sum = C::combine(sum, load(part));
                }
                if finish.divisor > 1 {
                    sum = sum.divide(finish.divisor);
                }
                // SAFETY: as promised, and if `dst` is one of the parts, its element has been read.
                unsafe { dst.add(i).write(T::from_sum(sum)) };
            }
        } else {
            let mut padded = [T::ZERO; CHUNK];
            let load = |part: *const u8| {
                // SAFETY: the caller promises `count` elements, of which these are `length` from `at`
                // on; where that is less than a chunk, they are copied into one.
                unsafe {
                    let mut from = part.cast::<T>().add(at);
                    if length < CHUNK {
                        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), length);
                        from = padded.as_ptr();
                    }
                    from.cast::<[T; CHUNK]>().read()
                }
            };
            let result = combine::<I, T, C>(parts, finish.divisor, load);
            // SAFETY: as above, and all parts have been read. The line of a whole chunk that is
            // streamed starts at `head`.
            unsafe {
                let to = dst.add(at);
                if length < CHUNK {
                    std::ptr::copy_nonoverlapping(result.as_ptr(), to, length);
                } else if finish.streams {
                    I::stream(&result, to.cast());
                } else {
                    to.cast::<[T; CHUNK]>().write(result);
                }
            }
        }
        at += length;
    }
    if finish.streams {
        I::end_of_stream();
    }
}

#[inline(always)]
fn combine<I: Instructions, T: Lane, C: Combine<T::Sum>>(
    parts: &[*const u8],
    divisor: usize,
    mut load: impl FnMut(*const u8) -> [T; CHUNK],
) -> [T; CHUNK] {
    let mut sums = T::widen::<I>(&load(parts[0]));
    for &part in &parts[1..] {
        let part = T::widen::<I>(&load(part));
        for i in 0..CHUNK {
            sums[i] = C::combine(sums[i], part[i]);
        }
    }
    if divisor > 1 {
        for sum in &mut sums {
            *sum = sum.divide(divisor);
        }
    }
    T::narrow::<I>(&sums)
}
