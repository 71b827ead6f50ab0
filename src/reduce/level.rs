//! Sets of instructions, and the kernel that each has for a reduction.

use std::sync::LazyLock;

use half::{bf16, f16};

use super::arithmetic::{Add, And, ExclusiveOr, Integer, Largest, Multiply, Or, Real, Smallest};
use super::code::Whole;
use super::instructions::{BlockLoops, Converters, Fold, Instructions, Lane};
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};
use crate::float8::{f8e4m3, f8e5m2};
use crate::types::{DType, ReduceOp};

/// The sets of instructions that have kernels, from the slowest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Returns the levels that this processor supports.
    pub(super) fn available() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        #[cfg(target_arch = "x86_64")]
        let has_avx512 =
            is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        let levels = [
            Some(Level::Portable),
            #[cfg(target_arch = "x86_64")]
            has_avx2.then_some(Level::Avx2),
            #[cfg(target_arch = "x86_64")]
            (has_avx2 && has_avx512).then_some(Level::Avx512),
        ];
        levels.into_iter().flatten()
    }

    /// Returns the fastest of them.
    pub(super) fn best() -> Level {
        static BEST: LazyLock<Level> = LazyLock::new(|| Level::available().last().unwrap_or(Level::Portable));
        *BEST
    }

    pub(super) fn kernel(self, dtype: DType, redop: ReduceOp) -> Fold {
        match self {
            Level::Portable => kernel::<Portable>(dtype, redop),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => kernel::<Avx2>(dtype, redop),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => kernel::<Avx512>(dtype, redop),
        }
    }

    /// Returns the conversions between f32 and `half`, which is f16 or bf16.
    pub(super) fn converters(self, half: DType) -> Converters {
        match self {
            Level::Portable => converters::<Portable>(half),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => converters::<Avx2>(half),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => converters::<Avx512>(half),
        }
    }

    /// Returns the loops between buffers of floats and blocks of `codes`, which are i8 or f8e4m3.
    pub(super) fn blocks(self, codes: DType, buffers: DType) -> BlockLoops {
        match self {
            Level::Portable => blocks::<Portable>(codes, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => blocks::<Avx2>(codes, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => blocks::<Avx512>(codes, buffers),
        }
    }
}

/// Names the instructions that this process reduces with, for `kolo doctor`.
pub(crate) fn instructions() -> &'static str {
    match Level::best() {
        Level::Portable if cfg!(target_arch = "aarch64") => "NEON",
        Level::Portable => "the baseline instructions of the target",
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => "AVX2 and F16C",
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => "AVX-512",
    }
}

/// Returns the kernel for a reduction that [applies](ReduceOp::applies_to) to these elements.
fn kernel<I: Instructions>(dtype: DType, redop: ReduceOp) -> Fold {
    match dtype {
        DType::F16 => float::<I, f16>(redop),
        DType::BF16 => float::<I, bf16>(redop),
        DType::F8E4M3 => float::<I, f8e4m3>(redop),
        DType::F8E5M2 => float::<I, f8e5m2>(redop),
        DType::F32 => float::<I, f32>(redop),
        DType::F64 => float::<I, f64>(redop),
        // On 0 and 1, logical or is the maximum and logical and is the minimum.
        DType::I8 | DType::U8 | DType::Bool => integer::<I, i8, u8>(dtype, redop),
        DType::I16 | DType::U16 => integer::<I, i16, u16>(dtype, redop),
        DType::I32 | DType::U32 => integer::<I, i32, u32>(dtype, redop),
        DType::I64 | DType::U64 => integer::<I, i64, u64>(dtype, redop),
    }
}

/// Returns the conversions between f32 and a type of 16 bits.
fn converters<I: Instructions>(half: DType) -> Converters {
    match half {
        DType::F16 => I::converters::<f16>(),
        DType::BF16 => I::converters::<bf16>(),
        other => unreachable!("f32 is not converted to {other}"),
    }
}

/// Returns the loops between buffers of floats and blocks of i8 or f8e4m3.
fn blocks<I: Instructions>(codes: DType, buffers: DType) -> BlockLoops {
    match (codes, buffers) {
        (DType::I8, DType::F32) => I::blocks::<Whole, f32>(),
        (DType::I8, DType::F16) => I::blocks::<Whole, f16>(),
        (DType::I8, DType::BF16) => I::blocks::<Whole, bf16>(),
        (DType::F8E4M3, DType::F32) => I::blocks::<f8e4m3, f32>(),
        (DType::F8E4M3, DType::F16) => I::blocks::<f8e4m3, f16>(),
        (DType::F8E4M3, DType::BF16) => I::blocks::<f8e4m3, bf16>(),
        _ => unreachable!("{buffers} is not packed as blocks of {codes}"),
    }
}

fn float<I: Instructions, T: Lane<Sum: Real>>(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum | ReduceOp::Average => I::compiled::<T, Add>(),
        ReduceOp::Product => I::compiled::<T, Multiply>(),
        ReduceOp::Max => I::compiled::<T, Largest>(),
        ReduceOp::Min => I::compiled::<T, Smallest>(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("refused by ReduceOp::applies_to"),
    }
}

/// Wrapping arithmetic has the same bits with and without a sign, so that only the order of the
/// elements, in [`Largest`] and [`Smallest`], needs kernels of both.
fn integer<I: Instructions, S: Lane<Sum: Integer>, U: Lane<Sum: Integer>>(dtype: DType, redop: ReduceOp) -> Fold {
    let has_sign = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    match redop {
        ReduceOp::Sum => I::compiled::<U, Add>(),
        ReduceOp::Product => I::compiled::<U, Multiply>(),
        ReduceOp::Max if has_sign => I::compiled::<S, Largest>(),
        ReduceOp::Max => I::compiled::<U, Largest>(),
        ReduceOp::Min if has_sign => I::compiled::<S, Smallest>(),
        ReduceOp::Min => I::compiled::<U, Smallest>(),
        ReduceOp::BitAnd => I::compiled::<U, And>(),
        ReduceOp::BitOr => I::compiled::<U, Or>(),
        ReduceOp::BitXor => I::compiled::<U, ExclusiveOr>(),
        ReduceOp::Average => unreachable!("refused by ReduceOp::applies_to"),
    }
}
