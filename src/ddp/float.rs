//! Arithmetic on the types that gradients have.

use half::{bf16, f16};

use crate::reduce::Scale;
use crate::types::DType;

/// Whether gradients can have this type. Floats of eight bits are too coarse to be accumulated.
pub(super) const fn is_of_gradients(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// An element type that gradients can have.
pub(super) trait Float: Scale {
    fn to_single(self) -> f32;
    fn of_single(single: f32) -> Self;
    /// Returns the product with a factor, rounded once.
    fn share(self, factor: f32) -> f32;
    fn sum(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($type:ty, |$x:ident| $to_single:expr, $of_single:expr, |$factor:ident| $share:expr;)*) => {$(
        impl Float for $type {
            #[inline(always)]
            fn to_single(self) -> f32 { let $x = self; $to_single }
            #[inline(always)]
            fn of_single($x: f32) -> Self { $of_single }
            #[inline(always)]
            fn share(self, $factor: f32) -> f32 { let $x = self; $share }
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
        }
    )*};
}

floats! {
    f32, |x| x, x, |factor| x * factor;
    f64, |x| x as f32, x.into(), |factor| (x * f64::from(factor)) as f32;
    f16, |x| x.to_f32(), f16::from_f32(x), |factor| x.to_f32() * factor;
    bf16, |x| x.to_f32(), bf16::from_f32(x), |factor| x.to_f32() * factor;
}
