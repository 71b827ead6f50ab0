//! Products that are converted to another type, as devices compute them: for a device without kernels.

use half::{bf16, f16};

use super::scale::Scale;
use crate::types::DType;

/// Whether [`scale_to`] and devices convert one type to the other: both are the same, or one of them
/// is a half and the other one is f32 or f64.
pub(crate) const fn scales(from: DType, to: DType) -> bool {
    const fn is_half(dtype: DType) -> bool {
        matches!(dtype, DType::F16 | DType::BF16)
    }
    const fn is_wide(dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::F64)
    }
    let is_same = from as u8 == to as u8 && (is_half(from) || is_wide(from));
    is_same || is_half(from) && is_wide(to) || is_wide(from) && is_half(to)
}

/// As [`scale`](super::scale), with the products in another place or in another type.
///
/// # Panics
///
/// If the types are not converted ([`scales`]).
///
/// # Safety
///
/// Both are memory for `count` elements. They are the same memory if the types are the same, or do
/// not overlap.
pub(crate) unsafe fn scale_to((from, to): (DType, DType), source: *const u8, target: *mut u8, count: usize, factor: f64) {
    assert!(scales(from, to), "{from} is not scaled to {to}");
    /// # Safety
    ///
    /// As for `scale_to`.
    unsafe fn run<F: Scale, T: Scale>(source: *const u8, target: *mut u8, count: usize, factor: f64) {
        let (source, target) = (source.cast::<F>(), target.cast::<T>());
        for i in 0..count {
            // SAFETY: there is memory for `count` elements, and each is read before it is written.
            unsafe { target.add(i).write_unaligned(T::narrow(source.add(i).read_unaligned().widen() * factor)) };
        }
    }
    let run = match (from, to) {
        (DType::F32, DType::F16) => run::<f32, f16>,
        (DType::F32, DType::BF16) => run::<f32, bf16>,
        (DType::F32, _) => run::<f32, f32>,
        (DType::F64, DType::F16) => run::<f64, f16>,
        (DType::F64, DType::BF16) => run::<f64, bf16>,
        (DType::F64, _) => run::<f64, f64>,
        (DType::F16, DType::F32) => run::<f16, f32>,
        (DType::F16, DType::F64) => run::<f16, f64>,
        (DType::F16, _) => run::<f16, f16>,
        (_, DType::F32) => run::<bf16, f32>,
        (_, DType::F64) => run::<bf16, f64>,
        (_, _) => run::<bf16, bf16>,
    };
    // SAFETY: as promised by the caller.
    unsafe { run(source, target, count, factor) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::scale;

    #[test]
    fn gradients_are_converted_to_halves_and_back() {
        let pairs = |dtype: DType| DType::ALL.iter().filter(move |&&to| scales(dtype, to)).count();
        assert_eq!([DType::F32, DType::F64, DType::F16, DType::BF16].map(pairs), [3; 4]);
        assert_eq!(DType::ALL.iter().map(|&dtype| pairs(dtype)).sum::<usize>(), 12);
    }

    #[test]
    fn a_product_is_rounded_once_or_by_way_of_f32() {
        let third = 1.0 / 3.0;
        let mut singles = [1.0f32, -7.5, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY];
        let expected = singles.map(|x| (f64::from(x) * third) as f32);
        let mut halves = [0u16; 5];
        let half = (DType::F32, DType::BF16);
        // SAFETY: both have five elements.
        unsafe { scale_to(half, singles.as_ptr().cast(), halves.as_mut_ptr().cast(), 5, third) };
        scale(&mut singles, third);
        assert_eq!(singles, expected);
        assert_eq!(halves.map(bf16::from_bits), expected.map(bf16::from_f32));
        // In f32 this product would be infinite.
        let mut large = [f64::from(f32::MAX) * 4.0];
        let at = large.as_mut_ptr().cast::<u8>();
        // SAFETY: one element in place.
        unsafe { scale_to((DType::F64, DType::F64), at, at, 1, 0.25) };
        assert_eq!(large, [f64::from(f32::MAX)]);
    }
}
