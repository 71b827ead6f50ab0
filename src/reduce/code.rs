//! What the bytes of blocks stand for.

use crate::float8::f8e4m3;

/// What a byte stands for, times the scale of its block.
pub(super) trait Code {
    /// The largest.
    const LARGEST: f32;

    /// Returns the byte of the nearest; of two, the even one.
    fn nearest(number: f32) -> u8;

    /// Returns the byte of one of the two beside the number, each as likely as the number is close to
    /// it, if all values of `noise` are.
    fn either(number: f32, noise: u32) -> u8;

    fn value(code: u8) -> f32;
}

/// Whole numbers from -127 to 127.
pub(super) struct Whole;

/// Added to a number below 2^22, it leaves no bits for a fraction.
const INTEGER: f32 = 12_582_912.0;

impl Code for Whole {
    const LARGEST: f32 = 127.0;

    #[inline(always)]
    fn nearest(number: f32) -> u8 {
        (number + INTEGER).to_bits() as u8
    }

    #[inline(always)]
    fn either(number: f32, noise: u32) -> u8 {
        // From -1/2 to just below 1/2. The largest number could else become 128.
        let shift = (noise >> 16) as f32 / 65536.0 - 0.5;
        Whole::nearest((number + shift).clamp(-127.0, 127.0))
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

impl Code for f8e4m3 {
    const LARGEST: f32 = 448.0;

    #[inline(always)]
    fn nearest(number: f32) -> u8 {
        f8e4m3::from_f32(number).to_bits()
    }

    #[inline(always)]
    fn either(number: f32, noise: u32) -> u8 {
        // Bits of an f32 that the code does not have, and the bits of the first normal number.
        const DROPPED: u32 = (1 << 20) - 1;
        const FIRST_NORMAL: u32 = (127 - 6) << 23;
        let (sign, magnitude) = (number.to_bits() & 0x8000_0000, number.to_bits() & 0x7fff_ffff);
        let normal = (magnitude + (noise & DROPPED)) & !DROPPED;
        // Those below are multiples of 2^-9.
        let multiple = f32::from_bits(magnitude) * 512.0 + (noise >> 16) as f32 / 65536.0 - 0.5 + INTEGER;
        let denormal = ((multiple - INTEGER) / 512.0).to_bits();
        f8e4m3::from_f32(f32::from_bits(sign | if magnitude < FIRST_NORMAL { denormal } else { normal })).to_bits()
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        f8e4m3::from_bits(code).to_f32()
    }
}
