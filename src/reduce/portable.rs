//! Kernels for the instructions that the crate is compiled for.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::arithmetic::Combine;
use super::blocks::{fold_blocks, pack_blocks, unpack_blocks};
use super::code::Code;
use super::convert::{narrow_all, widen_all};
use super::fold::fold;
use super::instructions::{BlockLoops, CHUNK, Converters, Fold, Instructions, Lane};

/// The target's baseline instructions. On Arm they include the vectors of NEON.
pub(super) struct Portable;

impl Instructions for Portable {
    fn compiled<T: Lane, C: Combine<T::Sum>>() -> Fold {
        fold::<Portable, T, C>
    }

    fn converters<T: Lane<Sum = f32>>() -> Converters {
        Converters { narrow: narrow_all::<Portable, T>, widen: widen_all::<Portable, T> }
    }

    fn blocks<C: Code, T: Lane<Sum = f32>>() -> BlockLoops {
        BlockLoops { pack: pack_blocks::<Portable, C, T>, unpack: unpack_blocks::<Portable, C, T>, fold: fold_blocks::<C> }
    }

    #[inline(always)]
    fn widen_f16(chunk: &[f16; CHUNK]) -> [f32; CHUNK] {
        let mut sums = [0.0; CHUNK];
        chunk.convert_to_f32_slice(&mut sums);
        sums
    }

    #[inline(always)]
    fn narrow_f16(sums: &[f32; CHUNK]) -> [f16; CHUNK] {
        let mut chunk = [f16::ZERO; CHUNK];
        chunk.convert_from_f32_slice(sums);
        chunk
    }

    #[inline(always)]
    fn widen_bf16(chunk: &[bf16; CHUNK]) -> [f32; CHUNK] {
        std::array::from_fn(|i| f32::from_bits(u32::from(chunk[i].to_bits()) << 16))
    }

    #[inline(always)]
    fn narrow_bf16(sums: &[f32; CHUNK]) -> [bf16; CHUNK] {
        std::array::from_fn(|i| {
            let bits = sums[i].to_bits();
            // Adds half of the last place, less one if the place is even: a carry rounds up.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
            let quiet = bits | 0x0040_0000;
            bf16::from_bits((if sums[i].is_nan() { quiet } else { rounded } >> 16) as u16)
        })
    }

    #[inline(always)]
    unsafe fn stream<T: Lane>(chunk: &[T; CHUNK], to: *mut [T; CHUNK]) {
        // SAFETY: the caller promises that `to` is writable.
        unsafe { to.write(*chunk) }
    }

    #[inline(always)]
    fn end_of_stream() {}
}
