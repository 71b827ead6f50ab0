//! Arithmetic on the types that gradients have.

use half::{bf16, f16};

use crate::types::Element;

/// A type of gradients. Halves are computed with in `f32`.
pub(super) trait Float: Element {
    fn widen(self) -> f64;
    fn narrow(wide: f64) -> Self;
    fn sum(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($type:ty, |$x:ident| $widen:expr, |$wide:ident| $narrow:expr;)*) => {$(
        impl Float for $type {
            #[inline(always)]
            fn widen(self) -> f64 { let $x = self; $widen }
            #[inline(always)]
            fn narrow($wide: f64) -> Self { $narrow }
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
        }
    )*};
}

floats! {
    f32, |x| x.into(), |wide| wide as f32;
    f64, |x| x, |wide| wide;
    f16, |x| x.to_f32().into(), |wide| f16::from_f32(wide as f32);
    bf16, |x| x.to_f32().into(), |wide| bf16::from_f32(wide as f32);
}

/// Multiplies all elements.
pub(super) fn scale<T: Float>(elements: &mut [T], factor: f64) {
    for element in elements {
        *element = T::narrow(element.widen() * factor);
    }
}
