//! Products of elements with one factor, which may be converted to another type on the way.

use half::{bf16, f16};

use crate::types::Element;

/// An element type that [`scale`] multiplies.
pub(crate) trait Scale: Element {
    fn widen(self) -> f64;

    /// Rounds to f32 for the halves, and then to the element.
    fn narrow(wide: f64) -> Self;
}

macro_rules! scale {
    ($($type:ty, |$x:ident| $widen:expr, $narrow:expr;)*) => {$(
        impl Scale for $type {
            #[inline(always)]
            fn widen(self) -> f64 { let $x = self; $widen }
            #[inline(always)]
            fn narrow($x: f64) -> Self { $narrow }
        }
    )*};
}

scale! {
    f32, |x| x.into(), x as f32;
    f64, |x| x, x;
    f16, |x| x.to_f32().into(), f16::from_f32(x as f32);
    bf16, |x| x.to_f32().into(), bf16::from_f32(x as f32);
}

/// Multiplies all elements. The product is that of f64, rounded to the element as in
/// [`Scale::narrow`]. Devices compute the same bits (`cuda-kernels/scale.cu`).
pub(crate) fn scale<T: Scale>(elements: &mut [T], factor: f64) {
    for element in elements {
        *element = T::narrow(element.widen() * factor);
    }
}
