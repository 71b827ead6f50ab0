//! The loop of all kernels: many parts in, one out, every byte of every part loaded once and the result stored once.
//!
//! It is generic over the element, the reduction and the [`Instructions`], and is compiled once for each of them. The compiler
//! makes vectors of it: chunks have a fixed length, and a chunk of accumulators stays in registers while it takes in one part
//! after the other.

use half::{bf16, f16};

use super::arithmetic::{Add, And, Combine, ExclusiveOr, Integer, Largest, Multiply, Number, Or, Real, Smallest};
use super::instructions::{Instructions, LINE};
use crate::types::{DType, ReduceOp};

/// Elements of a chunk. Of the widest elements, accumulators of so many just fit the registers of AVX-512.
pub(super) const CHUNK: usize = 64;

/// Elements that are quicker one by one.
const FEW: usize = 4;

/// What a kernel is told beside its buffers.
#[derive(Clone, Copy)]
pub(super) struct Finish {
    /// What the result is divided by; 1 if by nothing.
    pub(super) divisor: usize,
    /// Whether the result goes past the caches, because nobody reads it soon.
    pub(super) streams: bool,
}

/// The form of all kernels; see [`super::Kernel::fold`] for the contract.
pub(super) type Fold = unsafe fn(&[*const u8], *mut u8, usize, Finish);

/// The kernel for a reduction that [applies](ReduceOp::applies_to) to these elements.
pub(super) fn kernel<I: Instructions>(dtype: DType, redop: ReduceOp) -> Fold {
    match dtype {
        DType::F16 => float::<I, f16>(redop),
        DType::BF16 => float::<I, bf16>(redop),
        DType::F32 => float::<I, f32>(redop),
        DType::F64 => float::<I, f64>(redop),
        DType::I8 => integer::<I, i8>(redop),
        // Logical or and and are the largest and the smallest of 0 and 1.
        DType::U8 | DType::Bool => integer::<I, u8>(redop),
        DType::I16 => integer::<I, i16>(redop),
        DType::U16 => integer::<I, u16>(redop),
        DType::I32 => integer::<I, i32>(redop),
        DType::U32 => integer::<I, u32>(redop),
        DType::I64 => integer::<I, i64>(redop),
        DType::U64 => integer::<I, u64>(redop),
    }
}

fn float<I: Instructions, T: Lane<Sum: Real>>(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum | ReduceOp::Average => I::compiled::<T, Add>(),
        ReduceOp::Product => I::compiled::<T, Multiply>(),
        ReduceOp::Max => I::compiled::<T, Largest>(),
        ReduceOp::Min => I::compiled::<T, Smallest>(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("refused by ReduceOp::applies_to"),
    }
}

fn integer<I: Instructions, T: Lane<Sum: Integer>>(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum => I::compiled::<T, Add>(),
        ReduceOp::Product => I::compiled::<T, Multiply>(),
        ReduceOp::Max => I::compiled::<T, Largest>(),
        ReduceOp::Min => I::compiled::<T, Smallest>(),
        ReduceOp::BitAnd => I::compiled::<T, And>(),
        ReduceOp::BitOr => I::compiled::<T, Or>(),
        ReduceOp::BitXor => I::compiled::<T, ExclusiveOr>(),
        ReduceOp::Average => unreachable!("refused by ReduceOp::applies_to"),
    }
}

/// An element as it lies in memory.
pub(super) trait Lane: Copy {
    /// What it is accumulated in.
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

/// See [`super::Kernel::fold`].
///
/// # Safety
///
/// As there; and the processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn fold<I: Instructions, T: Lane, C: Combine<T::Sum>>(
    parts: &[*const u8],
    dst: *mut u8,
    count: usize,
    finish: Finish,
) {
    let dst = dst.cast::<T>();
    let (head, whole) = if finish.streams {
        // Lines can be streamed from where one begins.
        let head = (dst.addr().wrapping_neg() % LINE / size_of::<T>()).min(count);
        (head, (count - head) / CHUNK * CHUNK)
    } else {
        (0, count / CHUNK * CHUNK)
    };
    // SAFETY: the caller vouches for `count` elements behind every pointer, of which these are three ranges. Where `dst` is
    // one of the parts, each element of it is read before it is written.
    unsafe {
        edge::<I, T, C>(parts, dst, 0, head, finish.divisor);
        for at in (head..head + whole).step_by(CHUNK) {
            let load = |part: *const u8| part.cast::<T>().add(at).cast::<[T; CHUNK]>().read();
            let result = combine::<I, T, C>(parts, finish.divisor, load);
            let to = dst.add(at).cast::<[T; CHUNK]>();
            if finish.streams { I::stream(&result, to) } else { to.write(result) }
        }
        edge::<I, T, C>(parts, dst, head + whole, count - head - whole, finish.divisor);
        if finish.streams {
            I::end_of_stream();
        }
    }
}

/// Fewer elements than a chunk has.
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
            // SAFETY: the caller vouches for so many elements from there.
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
        // SAFETY: the caller vouches for so many elements from there.
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
