//! Arithmetic on the types that gradients have.

use half::{bf16, f16};

use crate::types::{DType, Element};

/// Whether gradients can have this type. Floats of eight bits are too coarse to be accumulated.
pub(super) const fn is_of_gradients(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// An element type that gradients can have.
pub(super) trait Float: Element {
    fn to_single(self) -> f32;
    fn of_single(single: f32) -> Self;
    fn to_double(self) -> f64;
    fn of_double(double: f64) -> Self;
    fn sum(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($type:ty, |$x:ident| $to_single:expr, $of_single:expr, $to_double:expr, $of_double:expr;)*) => {$(
        impl Float for $type {
            #[inline(always)]
            fn to_single(self) -> f32 { let $x = self; $to_single }
            #[inline(always)]
            fn of_single($x: f32) -> Self { $of_single }
            #[inline(always)]
            fn to_double(self) -> f64 { let $x = self; $to_double }
            #[inline(always)]
            fn of_double($x: f64) -> Self { $of_double }
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
        }
    )*};
}

floats! {
    f32, |x| x, x, x.into(), x as f32;
    f64, |x| x as f32, x.into(), x, x;
    f16, |x| x.to_f32(), f16::from_f32(x), x.to_f64(), f16::from_f64(x);
    bf16, |x| x.to_f32(), bf16::from_f32(x), x.to_f64(), bf16::from_f64(x);
}

/// Multiplies all elements.
pub(super) fn scale<T: Float>(elements: &mut [T], factor: f64) {
    for element in elements {
        *element = T::of_double(element.to_double() * factor);
    }
}
