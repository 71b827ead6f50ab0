//! Kernels for the vectors of x86-64.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::arithmetic::Combine;
use super::blocks::{fold_blocks, pack_blocks, unpack_blocks};
use super::code::Code;
use super::convert::{narrow_all, widen_all};
use super::fold::fold;
use super::instructions::{BlockLoops, CHUNK, Converters, Finish, Fold, Instructions, Lane};
use super::portable::Portable;

/// AVX2 with F16C, which all processors with AVX2 have.
pub(super) struct Avx2;

/// AVX-512 with words and short vectors (F, BW, VL), as in all server processors that have AVX-512.
pub(super) struct Avx512;

/// Compiles the loops with a set of instructions. A caller of one promises what the loop asks, and that
/// the processor has the instructions.
macro_rules! compile {
    ($level:ident, $features:literal) => {
        impl $level {
            #[target_feature(enable = $features)]
            unsafe fn fold<T: Lane, C: Combine<T::Sum>>(parts: &[*const u8], dst: *mut u8, count: usize, finish: Finish) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { fold::<$level, T, C>(parts, dst, count, finish) }
            }

            #[target_feature(enable = $features)]
            unsafe fn narrow<T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { narrow_all::<$level, T>(from, to, count) }
            }

            #[target_feature(enable = $features)]
            unsafe fn widen<T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { widen_all::<$level, T>(from, to, count) }
            }

            #[target_feature(enable = $features)]
            unsafe fn pack<C: Code, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize, noise: Option<u32>) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { pack_blocks::<$level, C, T>(from, to, count, noise) }
            }

            #[target_feature(enable = $features)]
            unsafe fn unpack<C: Code, T: Lane<Sum = f32>>(from: *const u8, to: *mut u8, count: usize) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { unpack_blocks::<$level, C, T>(from, to, count) }
            }

            #[target_feature(enable = $features)]
            unsafe fn fold_packed<C: Code>(parts: &[*const u8], to: *mut u8, count: usize, divisor: usize, noise: Option<u32>) {
                // SAFETY: as promised by the caller, for the loop and the instructions.
                unsafe { fold_blocks::<C>(parts, to, count, divisor, noise) }
            }
        }
    };
}

compile!(Avx2, "avx2,f16c");
compile!(Avx512, "avx512f,avx512bw,avx512vl,avx2,f16c");

impl Instructions for Avx2 {
    fn compiled<T: Lane, C: Combine<T::Sum>>() -> Fold {
        Avx2::fold::<T, C>
    }

    fn converters<T: Lane<Sum = f32>>() -> Converters {
        Converters { narrow: Avx2::narrow::<T>, widen: Avx2::widen::<T> }
    }

    fn blocks<C: Code, T: Lane<Sum = f32>>() -> BlockLoops {
        BlockLoops { pack: Avx2::pack::<C, T>, unpack: Avx2::unpack::<C, T>, fold: Avx2::fold_packed::<C> }
    }

    #[inline(always)]
    fn widen_f16(chunk: &[f16; CHUNK]) -> [f32; CHUNK] {
        let mut sums = [0.0; CHUNK];
        for at in (0..CHUNK).step_by(8) {
            // SAFETY: both arrays have eight elements from `at` on.
            unsafe {
                let halves = _mm_loadu_si128(chunk.as_ptr().add(at).cast());
                _mm256_storeu_ps(sums.as_mut_ptr().add(at), _mm256_cvtph_ps(halves));
            }
        }
        sums
    }

    #[inline(always)]
    fn narrow_f16(sums: &[f32; CHUNK]) -> [f16; CHUNK] {
        let mut chunk = [f16::ZERO; CHUNK];
        for at in (0..CHUNK).step_by(8) {
            // SAFETY: as above.
            unsafe {
                let sums = _mm256_loadu_ps(sums.as_ptr().add(at));
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums);
                _mm_storeu_si128(chunk.as_mut_ptr().add(at).cast(), halves);
            }
        }
        chunk
    }

    #[inline(always)]
    fn widen_bf16(chunk: &[bf16; CHUNK]) -> [f32; CHUNK] {
        Portable::widen_bf16(chunk)
    }

    #[inline(always)]
    fn narrow_bf16(sums: &[f32; CHUNK]) -> [bf16; CHUNK] {
        let mut chunk = [bf16::ZERO; CHUNK];
        for at in (0..CHUNK).step_by(16) {
            // SAFETY: both arrays have sixteen elements from `at` on.
            unsafe {
                // As in `Portable`, eight at a time. Packing interleaves the halves of the vectors,
                // which the permutation undoes.
                let round = |sums: __m256| {
                    let bits = _mm256_castps_si256(sums);
                    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
                    let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(sums, sums));
                    _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan))
                };
                let low = round(_mm256_loadu_ps(sums.as_ptr().add(at)));
                let high = round(_mm256_loadu_ps(sums.as_ptr().add(at + 8)));
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
                _mm256_storeu_si256(chunk.as_mut_ptr().add(at).cast(), words);
            }
        }
        chunk
    }

    #[inline(always)]
    unsafe fn stream<T: Lane>(chunk: &[T; CHUNK], to: *mut [T; CHUNK]) {
        for at in (0..size_of_val(chunk)).step_by(32) {
            // SAFETY: within the chunk. The caller promises that `to` is writable and aligned to a
            // line.
            unsafe {
                let bytes = _mm256_loadu_si256(chunk.as_ptr().byte_add(at).cast());
                _mm256_stream_si256(to.byte_add(at).cast(), bytes);
            }
        }
    }

    #[inline(always)]
    fn end_of_stream() {
        // SAFETY: every processor of this architecture has the instruction.
        unsafe { _mm_sfence() };
    }
}

impl Instructions for Avx512 {
    fn compiled<T: Lane, C: Combine<T::Sum>>() -> Fold {
        Avx512::fold::<T, C>
    }

    fn converters<T: Lane<Sum = f32>>() -> Converters {
        Converters { narrow: Avx512::narrow::<T>, widen: Avx512::widen::<T> }
    }

    fn blocks<C: Code, T: Lane<Sum = f32>>() -> BlockLoops {
        BlockLoops { pack: Avx512::pack::<C, T>, unpack: Avx512::unpack::<C, T>, fold: Avx512::fold_packed::<C> }
    }

    #[inline(always)]
    fn widen_f16(chunk: &[f16; CHUNK]) -> [f32; CHUNK] {
        let mut sums = [0.0; CHUNK];
        for at in (0..CHUNK).step_by(16) {
            // SAFETY: both arrays have sixteen elements from `at` on.
            unsafe {
                let halves = _mm256_loadu_si256(chunk.as_ptr().add(at).cast());
                _mm512_storeu_ps(sums.as_mut_ptr().add(at), _mm512_cvtph_ps(halves));
            }
        }
        sums
    }

    #[inline(always)]
    fn narrow_f16(sums: &[f32; CHUNK]) -> [f16; CHUNK] {
        let mut chunk = [f16::ZERO; CHUNK];
        for at in (0..CHUNK).step_by(16) {
            // SAFETY: as above.
            unsafe {
                let sums = _mm512_loadu_ps(sums.as_ptr().add(at));
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums);
                _mm256_storeu_si256(chunk.as_mut_ptr().add(at).cast(), halves);
            }
        }
        chunk
    }

    #[inline(always)]
    fn widen_bf16(chunk: &[bf16; CHUNK]) -> [f32; CHUNK] {
        let mut sums = [0.0; CHUNK];
        for at in (0..CHUNK).step_by(16) {
            // SAFETY: as above.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(chunk.as_ptr().add(at).cast()));
                _mm512_storeu_si512(sums.as_mut_ptr().add(at).cast(), _mm512_slli_epi32::<16>(halves));
            }
        }
        sums
    }

    #[inline(always)]
    fn narrow_bf16(sums: &[f32; CHUNK]) -> [bf16; CHUNK] {
        // The indices of the upper halves of 32 numbers in two vectors.
        const UPPER: [u16; 32] = {
            let mut words = [0; 32];
            let mut i = 0;
            while i < 32 {
                words[i] = 2 * i as u16 + 1;
                i += 1;
            }
            words
        };
        let mut chunk = [bf16::ZERO; CHUNK];
        for at in (0..CHUNK).step_by(32) {
            // SAFETY: both arrays have 32 elements from `at` on.
            unsafe {
                // As in `Portable`, sixteen at a time. The processor's own conversion (AVX512_BF16)
                // flushes denormals.
                let round = |sums: __m512| {
                    let bits = _mm512_castps_si512(sums);
                    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
                    _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000))
                };
                let low = round(_mm512_loadu_ps(sums.as_ptr().add(at)));
                let high = round(_mm512_loadu_ps(sums.as_ptr().add(at + 16)));
                let words = _mm512_permutex2var_epi16(low, _mm512_loadu_si512(UPPER.as_ptr().cast()), high);
                _mm512_storeu_si512(chunk.as_mut_ptr().add(at).cast(), words);
            }
        }
        chunk
    }

    #[inline(always)]
    unsafe fn stream<T: Lane>(chunk: &[T; CHUNK], to: *mut [T; CHUNK]) {
        for at in (0..size_of_val(chunk)).step_by(64) {
            // SAFETY: within the chunk. The caller promises that `to` is writable and aligned to a
            // line.
            unsafe {
                let bytes = _mm512_loadu_si512(chunk.as_ptr().byte_add(at).cast());
                _mm512_stream_si512(to.byte_add(at).cast(), bytes);
            }
        }
    }

    #[inline(always)]
    fn end_of_stream() {
        // SAFETY: every processor of this architecture has the instruction.
        unsafe { _mm_sfence() };
    }
}
