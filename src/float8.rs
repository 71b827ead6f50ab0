//! Floating-point numbers of eight bits, which the crate `half` does not have: the formats of the
//! paper "FP8 Formats for Deep Learning" (Micikevicius and others, 2022), rounded as PyTorch rounds
//! them.

use std::cmp::Ordering;
use std::fmt;

/// The bits of an infinity in `f32`. Greater magnitudes are NaN.
const INFINITY: u32 = 0x7f80_0000;

/// Defines one format. `$mantissa`: explicit bits of the mantissa. `$bias`: of the exponent.
/// `$too_large`: the least magnitude, as the bits of an `f32`, that is not rounded by adding half a
/// unit in the last place, because the result has no bits. `$overflow`: what it becomes.
macro_rules! float8 {
    ($(#[$meta:meta])* $name:ident, $mantissa:literal, $bias:literal, $too_large:literal, $overflow:literal, |$bits:ident| $widen:expr) => {
        $(#[$meta])*
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);

            /// A number that is not one.
            pub const NAN: Self = Self(0x7f);

            /// Returns the number with these bits.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Returns the bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Rounds to the nearest number, of two to the even one.
            #[inline(always)]
            pub fn from_f32(number: f32) -> Self {
                const DROPPED: u32 = 23 - $mantissa;
                // The first number whose unit in the last place, in f32, is that of the least
                // number here. Adding it rounds to that unit.
                const UNIT: f32 = f32::from_bits((127 + 23 + 1 - $bias - $mantissa) << 23);
                const FIRST_NORMAL: u32 = (127 + 1 - $bias) << 23;
                let bits = number.to_bits();
                let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
                let denormal = (f32::from_bits(magnitude) + UNIT).to_bits().wrapping_sub(UNIT.to_bits());
                // Adds half of the last place, less one if the place is even: a carry rounds up.
                let rounded = magnitude.wrapping_add((1 << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1));
                let normal = rounded.wrapping_sub((127 - $bias) << 23) >> DROPPED;
                let finite = if magnitude < FIRST_NORMAL { denormal } else { normal } as u8;
                let large = if magnitude > INFINITY { 0x7f } else { $overflow };
                Self(sign | if magnitude < $too_large { finite } else { large })
            }

            /// Rounds to the nearest number: first to `f32`, and that once more.
            pub fn from_f64(number: f64) -> Self {
                Self::from_f32(number as f32)
            }

            /// Returns the number, which `f32` has exactly.
            #[inline(always)]
            pub fn to_f32(self) -> f32 {
                let $bits = u32::from(self.0);
                $widen
            }

            /// Returns the number, which `f64` has exactly.
            pub fn to_f64(self) -> f64 {
                self.to_f32().into()
            }

            /// Whether this is NaN.
            pub fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_f32().fmt(f)
            }
        }
    };
}

float8! {
    /// Four bits of exponent and three of mantissa, without infinities: PyTorch's `float8_e4m3fn`,
    /// NVIDIA's E4M3. The largest number is 448.
    ///
    /// A number that would round to more than 448 becomes 448, and so does an infinity: as in
    /// PyTorch (from 2.13 on; it was NaN before), in CUDA's conversions and in NCCL.
    f8e4m3, 3, 7, 0x43e8_0000, 0x7e, |bits| {
        let (sign, magnitude) = ((bits & 0x80) << 24, bits & 0x7f);
        // A denormal is a multiple of 2^-9.
        let denormal = (magnitude as f32 / 512.0).to_bits();
        let normal = (magnitude << 20) + ((127 - 7) << 23);
        let finite = if magnitude < 8 { denormal } else { normal };
        f32::from_bits(sign | if magnitude == 0x7f { 0x7fc0_0000 } else { finite })
    }
}

float8! {
    /// Five bits of exponent and two of mantissa: PyTorch's `float8_e5m2`, NVIDIA's E5M2. The
    /// largest number is 57344; what would round to more becomes an infinity, as in IEEE 754 and in
    /// PyTorch. CUDA's conversions, and with them NCCL, return 57344 instead.
    f8e5m2, 2, 15, 0x4780_0000, 0x7c, |bits| {
        let (sign, magnitude) = ((bits & 0x80) << 24, bits & 0x7f);
        // A denormal is a multiple of 2^-16.
        let denormal = (magnitude as f32 / 65536.0).to_bits();
        let normal = (magnitude << 21) + ((127 - 15) << 23);
        // An infinity, and NaN, whose bits stay in the upper part.
        let special = INFINITY | if magnitude > 0x7c { 0x0040_0000 | (magnitude & 3) << 21 } else { 0 };
        let finite = if magnitude < 4 { denormal } else { normal };
        f32::from_bits(sign | if magnitude >= 0x7c { special } else { finite })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of finite bits, by the definition.
    fn value(bits: u8, mantissa: i32, bias: i32) -> f64 {
        let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        let exponent = i32::from(bits & 0x7f) >> mantissa;
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if bits & 0x80 == 0 { magnitude } else { -magnitude }
    }

    /// Numbers on both sides of each number, of each tie, and on them.
    fn around(values: &[f64]) -> Vec<f32> {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        let ties = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let all: Vec<f32> = values.iter().copied().chain(ties).map(|value| value as f32).collect();
        all.into_iter().flat_map(|value| [value.next_down(), value, value.next_up()]).collect()
    }

    /// The nearest of the finite numbers, of two the one with an even last bit. `beyond`: the number
    /// after the largest, which stands for an overflow.
    fn nearest(number: f64, finite: &[(u8, f64)], beyond: (u8, f64)) -> u8 {
        let sign = if number.is_sign_negative() { 0x80 } else { 0 };
        let candidates = finite.iter().filter(|(bits, _)| bits & 0x80 == 0).chain([&beyond]);
        let distance = |value: f64| (value - number.abs()).abs();
        let least = candidates.min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)).then((a.0 & 1).cmp(&(b.0 & 1))));
        sign | least.unwrap().0
    }

    #[test]
    fn every_e4m3_is_what_the_definition_says() {
        let finite: Vec<(u8, f64)> = (0..=255).filter(|bits| bits & 0x7f != 0x7f).map(|bits| (bits, value(bits, 3, 7))).collect();
        for &(bits, expected) in &finite {
            let got = f8e4m3::from_bits(bits);
            assert_eq!(got.to_f32().to_bits(), (expected as f32).to_bits(), "{bits:#x}");
            assert_eq!(f8e4m3::from_f32(got.to_f32()).to_bits(), bits);
        }
        assert!(f8e4m3::from_bits(0x7f).is_nan() && f8e4m3::from_bits(0xff).is_nan());
        assert_eq!(f8e4m3::from_bits(0x7e).to_f32(), 448.0);
        let values: Vec<f64> = finite.iter().map(|each| each.1).chain([480.0, -480.0, 1e6, -1e6]).collect();
        for number in around(&values) {
            // What is greater becomes the largest.
            let expected = nearest(number.into(), &finite, (0x7e, 448.0));
            assert_eq!(f8e4m3::from_f32(number).to_bits(), expected, "{number}");
        }
        assert_eq!(f8e4m3::from_f32(f32::NEG_INFINITY).to_f32(), -448.0);
        assert!(f8e4m3::from_f32(f32::NAN).is_nan());
    }

    #[test]
    fn every_e5m2_is_what_the_definition_says() {
        let finite: Vec<(u8, f64)> = (0..=255).filter(|bits| bits & 0x7f < 0x7c).map(|bits| (bits, value(bits, 2, 15))).collect();
        for &(bits, expected) in &finite {
            let got = f8e5m2::from_bits(bits);
            assert_eq!(got.to_f32().to_bits(), (expected as f32).to_bits(), "{bits:#x}");
            assert_eq!(f8e5m2::from_f32(got.to_f32()).to_bits(), bits);
        }
        for bits in 0..=255u8 {
            // It is the upper half of an f16.
            let half = half::f16::from_bits(u16::from(bits) << 8).to_f32();
            let got = f8e5m2::from_bits(bits).to_f32();
            assert!(got.to_bits() == half.to_bits() || got.is_nan() && half.is_nan(), "{bits:#x}");
        }
        let values: Vec<f64> = finite.iter().map(|each| each.1).chain([65536.0, -65536.0]).collect();
        for number in around(&values) {
            let expected = nearest(number.into(), &finite, (0x7c, 65536.0));
            assert_eq!(f8e5m2::from_f32(number).to_bits(), expected, "{number}");
        }
        assert_eq!(f8e5m2::from_f32(f32::MAX).to_f32(), f32::INFINITY);
        assert_eq!(f8e5m2::from_f32(f32::NEG_INFINITY).to_f32(), f32::NEG_INFINITY);
        assert!(f8e5m2::from_f32(f32::NAN).is_nan());
    }
}
