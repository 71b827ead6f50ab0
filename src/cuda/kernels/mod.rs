//! What runs on a GPU: the programs of `cuda-kernels`, the names of their entries, what they are told, and by how many threads
//! they are run. [`image`] gives the code that a driver loads.
//!
//! The bits are those of the kernels for host memory in `reduce`, except for which NaN a NaN is: see `cuda-kernels/elements.cu`.

mod cache;
mod image;
mod nvrtc;
// They load what g++ makes, by Unix's means.
#[cfg(all(test, unix))]
mod tests;

use cudarc::driver::DeviceRepr;

use crate::types::{DType, ReduceOp};

pub(super) use image::{compiler, load};

/// Sources, and targets, of one [`Reduction`] at most. More are reduced in several passes, which round halves each time.
pub(super) const MOST: usize = super::device::MOST_PARTS;

/// Threads of a block, as `cuda-kernels/elements.cu` has it.
const THREADS: u32 = 512;

/// Blocks that a multiprocessor runs at once, as there.
const BLOCKS: u32 = 2;

/// Bytes of the widest access to memory.
const LINE: u64 = 16;

/// The entry that reduces so: it takes a [`Reduction`]. There is one where the reduction [applies](ReduceOp::applies_to).
///
/// A copy is the [`ReduceOp::BitOr`] of one source in the integer of the element's size: other reductions may change which NaN
/// a half is.
pub(super) fn entry(dtype: DType, redop: ReduceOp) -> Option<String> {
    redop.applies_to(dtype).then(|| format!("kolo_reduce_{redop}_{dtype}"))
}

/// The entry that multiplies elements in place, for floating-point elements: it takes a [`Mapping`].
#[allow(dead_code, reason = "for averages by another count and for compressed gradients, which do without for now")]
pub(super) fn scale_entry(dtype: DType) -> Option<String> {
    dtype.is_float().then(|| format!("kolo_scale_{dtype}"))
}

/// The entry that converts between [`DType::F32`] and a half, and multiplies: it takes a [`Mapping`].
#[allow(dead_code, reason = "for averages by another count and for compressed gradients, which do without for now")]
pub(super) fn cast_entry(from: DType, to: DType) -> Option<String> {
    let is_half = |dtype| matches!(dtype, DType::F16 | DType::BF16);
    let is_there = from == DType::F32 && is_half(to) || is_half(from) && to == DType::F32;
    is_there.then(|| format!("kolo_cast_{from}_{to}"))
}

/// What a reduction is told: the only parameter of its entry, by value.
///
/// `target[i] = sources[0][i] op sources[1][i] op ...` for every target, operands in the order given; halves are summed in `f32`
/// and rounded once. All sources of an element are read before a target of it is written, and no element is touched by two
/// threads, so that a target may be one of the sources, but must not overlap one in another way. Pointers are aligned to the
/// element; where all of them lie in the same way modulo 16 bytes, memory moves in lines of 16 bytes, else element by element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    sources: [u64; MOST],
    targets: [u64; MOST],
    count: u64,
    source_count: u32,
    target_count: u32,
    divisor: u32,
    unused: u32,
}

const _: () = assert!(size_of::<Reduction>() == 280);

// SAFETY: plain numbers in C's layout, as the kernels declare it; the device pointers among them are plain addresses.
unsafe impl DeviceRepr for Reduction {}

impl Reduction {
    /// Of device pointers to `count` elements each. An average is divided by `divisor`, unless that is 1; other reductions do not
    /// look at it.
    ///
    /// # Panics
    ///
    /// If there is no source, no target, or more than [`MOST`] of either.
    pub(super) fn new(sources: &[u64], targets: &[u64], count: usize, divisor: u32) -> Reduction {
        let list = |pointers: &[u64]| {
            assert!((1..=MOST).contains(&pointers.len()), "{} buffers in one kernel", pointers.len());
            let mut list = [0; MOST];
            list[..pointers.len()].copy_from_slice(pointers);
            list
        };
        Reduction {
            sources: list(sources),
            targets: list(targets),
            count: count as u64,
            source_count: sources.len() as u32,
            target_count: targets.len() as u32,
            divisor,
            unused: 0,
        }
    }
}

/// What a scaling or a conversion is told: the only parameter of its entry, by value.
///
/// `target[i] = source[i] * factor`, rounded once: in `f64` for `f64`, else in `f32`, to which the factor is rounded first. The
/// source is also the target where the element stays the same, or is apart from it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    source: u64,
    target: u64,
    count: u64,
    factor: f64,
}

const _: () = assert!(size_of::<Mapping>() == 32);

// SAFETY: as for `Reduction`.
unsafe impl DeviceRepr for Mapping {}

impl Mapping {
    /// Of device pointers to `count` elements each.
    #[allow(dead_code, reason = "for averages by another count and for compressed gradients, which do without for now")]
    pub(super) fn new(source: u64, target: u64, count: usize, factor: f64) -> Mapping {
        Mapping { source, target, count: count as u64, factor }
    }
}

/// By how many threads an entry is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

/// The grid for so many bytes of one buffer: a thread for each line, as far as the GPU runs them at once.
pub(super) fn grid(bytes: u64, multiprocessors: u32) -> Grid {
    let blocks = bytes.div_ceil(LINE * u64::from(THREADS)).clamp(1, u64::from((BLOCKS * multiprocessors).max(1)));
    Grid { blocks: blocks as u32, threads: THREADS }
}
