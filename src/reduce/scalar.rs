//! The kernels in plain Rust: the truth that every faster kernel is compared with.
//!
//! Memory is walked in blocks that fit the first-level cache: a block of accumulators takes in one part after the other, so
//! that every byte of every part is loaded once and the result is stored once, however many parts there are.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::types::{DType, ReduceOp};

/// The form of all kernels; see [`super::Kernel::fold`] for its contract. The result is divided by the last argument.
pub(super) type Fold = unsafe fn(&[*const u8], *mut u8, usize, usize);

/// Elements of one block.
const BLOCK: usize = 512;

pub(super) fn kernel(dtype: DType, redop: ReduceOp) -> Fold {
    match dtype {
        DType::F16 => float::<f16>(redop),
        DType::BF16 => float::<bf16>(redop),
        DType::F32 => float::<f32>(redop),
        DType::F64 => float::<f64>(redop),
        DType::I8 => integer::<i8>(redop),
        // Logical or and and are the largest and the smallest of 0 and 1.
        DType::U8 | DType::Bool => integer::<u8>(redop),
        DType::I16 => integer::<i16>(redop),
        DType::U16 => integer::<u16>(redop),
        DType::I32 => integer::<i32>(redop),
        DType::U32 => integer::<u32>(redop),
        DType::I64 => integer::<i64>(redop),
        DType::U64 => integer::<u64>(redop),
    }
}

fn float<T: Lane<Sum: Real>>(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum | ReduceOp::Average => fold::<T, Add>,
        ReduceOp::Product => fold::<T, Multiply>,
        ReduceOp::Max => fold::<T, Largest>,
        ReduceOp::Min => fold::<T, Smallest>,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("refused by ReduceOp::applies_to"),
    }
}

fn integer<T: Lane<Sum: Integer>>(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum => fold::<T, Add>,
        ReduceOp::Product => fold::<T, Multiply>,
        ReduceOp::Max => fold::<T, Largest>,
        ReduceOp::Min => fold::<T, Smallest>,
        ReduceOp::BitAnd => fold::<T, And>,
        ReduceOp::BitOr => fold::<T, Or>,
        ReduceOp::BitXor => fold::<T, ExclusiveOr>,
        ReduceOp::Average => unreachable!("refused by ReduceOp::applies_to"),
    }
}

/// An element as it lies in memory.
trait Lane: Copy {
    /// What it is accumulated in.
    type Sum: Number;

    /// Loads a block of elements.
    ///
    /// # Safety
    ///
    /// `from` is aligned and readable for `sums.len()` elements, which is at most [`BLOCK`].
    unsafe fn load(from: *const Self, sums: &mut [Self::Sum]);

    /// Stores a block of elements.
    ///
    /// # Safety
    ///
    /// `to` is aligned and writable for `sums.len()` elements, which is at most [`BLOCK`].
    unsafe fn store(sums: &[Self::Sum], to: *mut Self);

    /// Whether loading and storing change nothing, so that two parts can be combined without accumulators.
    const PLAIN: bool;
}

/// An accumulator.
trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn largest(self, other: Self) -> Self;
    fn smallest(self, other: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

trait Real: Number {}

trait Integer: Number + std::ops::BitAnd<Output = Self> + std::ops::BitOr<Output = Self> + std::ops::BitXor<Output = Self> {}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Sum = $type;
            const PLAIN: bool = true;

            #[inline(always)]
            unsafe fn load(from: *const Self, sums: &mut [Self]) {
                // SAFETY: the caller vouches for `from`; `sums` is memory of its own.
                unsafe { std::ptr::copy_nonoverlapping(from, sums.as_mut_ptr(), sums.len()) }
            }

            #[inline(always)]
            unsafe fn store(sums: &[Self], to: *mut Self) {
                // SAFETY: the caller vouches for `to`; `sums` is memory of its own.
                unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), to, sums.len()) }
            }
        }
    )*};
}

plain!(f32, f64, i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Sum = f32;
            const PLAIN: bool = false;

            #[inline(always)]
            unsafe fn load(from: *const Self, sums: &mut [f32]) {
                let mut block = [<$type>::ZERO; BLOCK];
                // SAFETY: the caller vouches for `from` and for the length; `block` is memory of its own.
                unsafe { std::ptr::copy_nonoverlapping(from, block.as_mut_ptr(), sums.len()) };
                block[..sums.len()].convert_to_f32_slice(sums);
            }

            #[inline(always)]
            unsafe fn store(sums: &[f32], to: *mut Self) {
                let mut block = [<$type>::ZERO; BLOCK];
                block[..sums.len()].convert_from_f32_slice(sums);
                // SAFETY: the caller vouches for `to` and for the length; `block` is memory of its own.
                unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), to, sums.len()) };
            }
        }
    )*};
}

halves!(f16, bf16);

macro_rules! reals {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self * other }
            // A NaN on either side is the result: on the left by the second test, on the right because no comparison holds.
            #[inline(always)]
            fn largest(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { self / by as $type }
        }

        impl Real for $type {}
    )*};
}

reals!(f32, f64);

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn largest(self, other: Self) -> Self { self.max(other) }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn divide(self, _: usize) -> Self { unreachable!("averages of integers are refused") }
        }

        impl Integer for $type {}
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// A reduction of two accumulators.
trait Combine<S> {
    fn combine(a: S, b: S) -> S;
}

macro_rules! combine {
    ($($name:ident, $bound:path, |$a:ident, $b:ident| $result:expr;)*) => {$(
        struct $name;

        impl<S: $bound> Combine<S> for $name {
            #[inline(always)]
            fn combine($a: S, $b: S) -> S { $result }
        }
    )*};
}

combine! {
    Add, Number, |a, b| a.add(b);
    Multiply, Number, |a, b| a.multiply(b);
    Largest, Number, |a, b| a.largest(b);
    Smallest, Number, |a, b| a.smallest(b);
    And, Integer, |a, b| a & b;
    Or, Integer, |a, b| a | b;
    ExclusiveOr, Integer, |a, b| a ^ b;
}

unsafe fn fold<T: Lane, C: Combine<T::Sum>>(parts: &[*const u8], dst: *mut u8, count: usize, divisor: usize) {
    let mut sums = [T::Sum::default(); BLOCK];
    let mut part_block = [T::Sum::default(); BLOCK];
    for at in (0..count).step_by(BLOCK) {
        let len = BLOCK.min(count - at);
        let (sums, part_block) = (&mut sums[..len], &mut part_block[..len]);
        // SAFETY: the caller vouches for `count` elements behind every pointer, and `at + len <= count`.
        let source = |part: *const u8| unsafe { part.cast::<T>().add(at) };
        match parts {
            [a, b] if T::PLAIN => {
                // A plain element is its own sum.
                let (a, b) = (source(*a).cast::<T::Sum>(), source(*b).cast::<T::Sum>());
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: `i < len`.
                    *sum = unsafe { C::combine(*a.add(i), *b.add(i)) };
                }
            }
            [first, rest @ ..] => {
                // SAFETY: as above, and `len <= BLOCK`.
                unsafe { T::load(source(*first), sums) };
                for part in rest {
                    // SAFETY: as above.
                    unsafe { T::load(source(*part), part_block) };
                    for (sum, part) in sums.iter_mut().zip(&*part_block) {
                        *sum = C::combine(*sum, *part);
                    }
                }
            }
            [] => unreachable!("a fold has at least one part"),
        }
        if divisor > 1 {
            for sum in &mut *sums {
                *sum = sum.divide(divisor);
            }
        }
        // SAFETY: `dst` has `count` elements. Where it is one of the parts, this block of it has been read.
        unsafe { T::store(sums, dst.cast::<T>().add(at)) };
    }
}
