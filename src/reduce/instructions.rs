//! What a kernel's loop needs of an element type and of a set of instructions.

use half::{bf16, f16};

use super::arithmetic::{Combine, Number};
use super::code::Code;
use crate::float8::{f8e4m3, f8e5m2};

/// Elements of a chunk. The accumulators of a chunk of the widest elements just fit the registers
/// of AVX-512.
pub(super) const CHUNK: usize = 64;

/// What a kernel does with its result.
#[derive(Clone, Copy)]
pub(super) struct Finish {
    /// The divisor of the result; 1 for none.
    pub(super) divisor: usize,
    /// Whether the result is stored past the caches, because no core reads it soon.
    pub(super) streams: bool,
}

/// The signature of all kernels; [`super::Kernel::fold`] states the contract.
pub(super) type Fold = unsafe fn(&[*const u8], *mut u8, usize, Finish);

/// A loop that converts as many elements of one buffer into another; [`super::Packing::pack`] states the
/// contract.
pub(super) type Convert = unsafe fn(*const u8, *mut u8, usize);

/// The loops between f32 and one type of 16 bits.
#[derive(Clone, Copy)]
pub(super) struct Converters {
    pub(super) narrow: Convert,
    pub(super) widen: Convert,
}

/// The loops between one type of buffers and blocks of bytes; [`super::Packing`] states the contracts.
#[derive(Clone, Copy)]
pub(super) struct BlockLoops {
    pub(super) pack: unsafe fn(*const u8, *mut u8, usize, Option<u32>),
    pub(super) unpack: Convert,
    pub(super) fold: unsafe fn(&[*const u8], *mut u8, usize, usize, Option<u32>),
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// A set of instructions. Its functions may be called only if the processor has them.
pub(super) trait Instructions {
    /// Returns the loop, compiled with these instructions.
    fn compiled<T: Lane, C: Combine<T::Sum>>() -> Fold;

    /// Returns the conversions between f32 and `T`, compiled with these instructions.
    fn converters<T: Lane<Sum = f32>>() -> Converters;

    /// Returns the loops between `T` and blocks of bytes, compiled with these instructions.
    fn blocks<C: Code, T: Lane<Sum = f32>>() -> BlockLoops;

    fn widen_f16(chunk: &[f16; CHUNK]) -> [f32; CHUNK];

    /// Rounds to nearest, ties to even.
    fn narrow_f16(sums: &[f32; CHUNK]) -> [f16; CHUNK];

    fn widen_bf16(chunk: &[bf16; CHUNK]) -> [f32; CHUNK];

    fn narrow_bf16(sums: &[f32; CHUNK]) -> [bf16; CHUNK];

    /// Stores a chunk past the caches.
    ///
    /// # Safety
    ///
    /// `to` is writable and at the start of a cache line.
    unsafe fn stream<T: Lane>(chunk: &[T; CHUNK], to: *mut [T; CHUNK]);

    /// Orders all streaming stores before later stores.
    fn end_of_stream();
}

/// An element as it lies in memory.
pub(super) trait Lane: Copy {
    /// The type in which it is accumulated.
    type Sum: Number;

    /// Zero.
    const ZERO: Self;

    fn to_sum(self) -> Self::Sum;

    fn from_sum(sum: Self::Sum) -> Self;

    fn widen<I: Instructions>(chunk: &[Self; CHUNK]) -> [Self::Sum; CHUNK];

    fn narrow<I: Instructions>(sums: &[Self::Sum; CHUNK]) -> [Self; CHUNK];
}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Sum = $type;
            const ZERO: Self = 0 as $type;

            #[inline(always)]
            fn to_sum(self) -> Self { self }

            #[inline(always)]
            fn from_sum(sum: Self) -> Self { sum }

            #[inline(always)]
            fn widen<I: Instructions>(chunk: &[Self; CHUNK]) -> [Self; CHUNK] { *chunk }

            #[inline(always)]
            fn narrow<I: Instructions>(sums: &[Self; CHUNK]) -> [Self; CHUNK] { *sums }
        }
    )*};
}

plain!(f32, f64, i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! halves {
    ($($type:ty, $widen:ident, $narrow:ident;)*) => {$(
        impl Lane for $type {
            type Sum = f32;
            const ZERO: Self = <$type>::ZERO;

            #[inline(always)]
            fn to_sum(self) -> f32 { self.to_f32() }

            #[inline(always)]
            fn from_sum(sum: f32) -> Self { <$type>::from_f32(sum) }

            #[inline(always)]
            fn widen<I: Instructions>(chunk: &[Self; CHUNK]) -> [f32; CHUNK] { I::$widen(chunk) }

            #[inline(always)]
            fn narrow<I: Instructions>(sums: &[f32; CHUNK]) -> [Self; CHUNK] { I::$narrow(sums) }
        }
    )*};
}

halves! {
    f16, widen_f16, narrow_f16;
    bf16, widen_bf16, narrow_bf16;
}

macro_rules! bytes {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Sum = f32;
            const ZERO: Self = <$type>::ZERO;

            #[inline(always)]
            fn to_sum(self) -> f32 { self.to_f32() }

            #[inline(always)]
            fn from_sum(sum: f32) -> Self { <$type>::from_f32(sum) }

            // Without branches, so that the compiler makes vectors of it.
            #[inline(always)]
            fn widen<I: Instructions>(chunk: &[Self; CHUNK]) -> [f32; CHUNK] { chunk.map(<$type>::to_f32) }

            #[inline(always)]
            fn narrow<I: Instructions>(sums: &[f32; CHUNK]) -> [Self; CHUNK] { sums.map(<$type>::from_f32) }
        }
    )*};
}

bytes!(f8e4m3, f8e5m2);
