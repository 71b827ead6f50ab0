//! Conversion between f32 and floats of 16 bits, for messages of fewer bytes.

use super::level::Level;
use crate::types::DType;

/// Rounds `count` floats to `half`, to nearest and ties to even. NaN stays NaN. What is too large
/// for f16 becomes infinite.
///
/// # Panics
///
/// If `half` is neither f16 nor bf16.
///
/// # Safety
///
/// `from` is readable for `count` f32 and `to` writable for `count` elements of 16 bits, both
/// aligned. They do not overlap, and nothing else writes `from` or accesses `to` meanwhile.
pub(crate) unsafe fn narrow(half: DType, from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: passed on; the level has only loops whose instructions the processor has.
    unsafe { (Level::best().converters(half).narrow)(from, to, count) }
}

/// Converts `count` elements of `half` to f32, which has all their values.
///
/// # Panics
///
/// If `half` is neither f16 nor bf16.
///
/// # Safety
///
/// As for [`narrow`], with `from` and `to` exchanged.
pub(crate) unsafe fn widen(half: DType, from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: as above.
    unsafe { (Level::best().converters(half).widen)(from, to, count) }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::instructions::{Converters, Lane};
    use super::*;

    /// Numbers of every kind: those of `halves`, their neighbours in f32, ties, and random bits.
    fn numbers(halves: impl Fn(u16) -> f32) -> Vec<f32> {
        let mut numbers = Vec::new();
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 4099 } else { 1 }) {
            let half = halves(bits);
            numbers.extend([half, f32::from_bits(half.to_bits() ^ 1), half * (1.0 + 1.0 / 256.0), half * (1.0 + 1.0 / 2048.0)]);
            numbers.push(f32::from_bits(crate::types::mix(u64::from(bits), 3) as u32));
        }
        numbers.extend([65504.0, 65519.99, 65520.0, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN]);
        numbers
    }

    fn check<H: Lane + PartialEq>(
        half: DType,
        numbers: &[f32],
        narrowed: impl Fn(f32) -> H,
        bits: impl Fn(H) -> (bool, u16, f32),
    ) {
        for level in Level::available() {
            let Converters { narrow, widen } = level.converters(half);
            for count in [0, 1, 63, 64, 65, 1000.min(numbers.len()), numbers.len()] {
                let numbers = &numbers[numbers.len() - count..];
                let mut halves = vec![H::ZERO; count];
                let mut wide = vec![0f32; count];
                // SAFETY: all have `count` elements.
                unsafe {
                    narrow(numbers.as_ptr().cast(), halves.as_mut_ptr().cast(), count);
                    widen(halves.as_ptr().cast(), wide.as_mut_ptr().cast(), count);
                }
                for ((&number, half), wide) in numbers.iter().zip(halves).zip(wide) {
                    let (got, expected) = (bits(half), bits(narrowed(number)));
                    let same = if expected.0 { got.0 && wide.is_nan() } else { got.1 == expected.1 && wide == expected.2 };
                    assert!(same, "{level:?}: {number:e} became {:#x} and {wide:e}, not {:#x}", got.1, expected.1);
                }
            }
        }
    }

    #[test]
    fn conversions_round_to_nearest_on_every_level() {
        let of_f16 = |x: f16| (x.is_nan(), x.to_bits(), x.to_f32());
        let of_bf16 = |x: bf16| (x.is_nan(), x.to_bits(), x.to_f32());
        check(DType::F16, &numbers(|bits| f16::from_bits(bits).to_f32()), f16::from_f32, of_f16);
        check(DType::BF16, &numbers(|bits| bf16::from_bits(bits).to_f32()), bf16::from_f32, of_bf16);
    }
}
