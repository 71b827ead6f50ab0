//! The loops that convert between f32 and floats of 16 bits. As that of [`super::fold`], they are
//! compiled once for each set of instructions.

use std::marker::PhantomData;

use super::instructions::{CHUNK, Instructions, Lane};

/// Converts one chunk. A type and not a closure, because a closure does not have the instructions of the
/// function that calls it.
trait Chunk<I: Instructions> {
    type From: Lane;
    type To: Lane;

    fn convert(chunk: &[Self::From; CHUNK]) -> [Self::To; CHUNK];
}

struct Narrow<T>(PhantomData<T>);

impl<I: Instructions, T: Lane<Sum = f32>> Chunk<I> for Narrow<T> {
    type From = f32;
    type To = T;

    #[inline(always)]
    fn convert(chunk: &[f32; CHUNK]) -> [T; CHUNK] {
        T::narrow::<I>(chunk)
    }
}

struct Widen<T>(PhantomData<T>);

impl<I: Instructions, T: Lane<Sum = f32>> Chunk<I> for Widen<T> {
    type From = T;
    type To = f32;

    #[inline(always)]
    fn convert(chunk: &[T; CHUNK]) -> [f32; CHUNK] {
        T::widen::<I>(chunk)
    }
}

/// See [`super::Packing::pack`].
///
/// # Safety
///
/// As for [`super::Packing::pack`]; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn narrow_all<I: Instructions, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: passed on.
    unsafe { all::<I, Narrow<T>>(from.cast(), to.cast(), count) }
}

/// See [`super::Packing::unpack`].
///
/// # Safety
///
/// As for [`super::Packing::unpack`]; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn widen_all<I: Instructions, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: passed on.
    unsafe { all::<I, Widen<T>>(from.cast(), to.cast(), count) }
}

/// Converts chunk by chunk. The last elements are padded to a chunk, so that every element is
/// converted by the same instructions.
///
/// # Safety
///
/// `from` is readable and `to` writable for `count` elements, and they do not overlap.
#[inline(always)]
unsafe fn all<I: Instructions, C: Chunk<I>>(from: *const C::From, to: *mut C::To, count: usize) {
    let whole = count / CHUNK * CHUNK;
    // SAFETY: as promised by the caller; chunks end at `whole`, and the rest at `count`.
    unsafe {
        for at in (0..whole).step_by(CHUNK) {
            let chunk = from.add(at).cast::<[C::From; CHUNK]>().read();
            to.add(at).cast::<[C::To; CHUNK]>().write(C::convert(&chunk));
        }
        if whole < count {
            let mut chunk = [C::From::ZERO; CHUNK];
            std::ptr::copy_nonoverlapping(from.add(whole), chunk.as_mut_ptr(), count - whole);
            std::ptr::copy_nonoverlapping(C::convert(&chunk).as_ptr(), to.add(whole), count - whole);
        }
    }
}
