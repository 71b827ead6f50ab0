//! The kernels that run on a GPU, whose sources are in `cuda-kernels`: the names of their entries,
//! their parameter and their grid. [`image`] returns the code that a driver loads.
//!
//! Results have the same bits as those of the kernels for host memory in `reduce`, except for the
//! payload of a NaN: see `cuda-kernels/elements.cu`.

mod cache;
mod image;
mod nvrtc;
// The tests load what g++ compiles with Unix's `dlopen`.
#[cfg(all(test, unix))]
mod tests;

use cudarc::driver::DeviceRepr;

use super::device::{MovesAt, Scaling};
use super::moves::Move;
use crate::reduce::scales;
use crate::types::{DType, ReduceOp};

pub(crate) use image::compiler;
pub(super) use image::load;

/// A kernel, by what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// Takes a [`Parameter`].
    Reduce(DType, ReduceOp),
    /// From one type to another. Takes a [`ScaleParameter`].
    Scale(DType, DType),
    /// Copies what the next kernel is to do. Takes a [`TakeParameter`].
    TakeMoves,
}

impl Kernel {
    /// The name of its entry.
    ///
    /// # Panics
    ///
    /// Panics where the reduction does not [apply](ReduceOp::applies_to), or the types are not
    /// [converted](scales).
    pub(super) fn name(self) -> String {
        let name = match self {
            Kernel::Reduce(dtype, redop) => entry(dtype, redop),
            Kernel::Scale(from, to) => scale_entry(from, to),
            Kernel::TakeMoves => Some("kolo_take_moves".to_owned()),
        };
        name.unwrap_or_else(|| panic!("there is no kernel for {self:?}"))
    }

    /// The line that makes its entry, as in `cuda-kernels/entries.cu`.
    fn line(self) -> String {
        match self {
            Kernel::Reduce(dtype, redop) => format!("REDUCE({redop}, {redop:?}, {dtype}, {dtype:?})\n"),
            Kernel::Scale(from, to) => format!("SCALE({from}, {to}, {from:?}, {to:?})\n"),
            Kernel::TakeMoves => "TAKE_MOVES\n".to_owned(),
        }
    }
}

/// Threads of a block, as in `cuda-kernels/elements.cu`.
const THREADS: u32 = 512;

/// Blocks that a multiprocessor runs at once, as in `cuda-kernels/elements.cu`.
const BLOCKS: u32 = 2;

/// Returns the most blocks of a kernel that waits for those of other GPUs, on a GPU with so many
/// multiprocessors. All blocks must be on the GPU at once, also beside those of other communicators:
/// eight such kernels fit. That 32 blocks are enough for the links between GPUs is a guess: no machine
/// with several GPUs has run it.
pub(super) fn most_waiting(multiprocessors: u32) -> u32 {
    (BLOCKS * multiprocessors / 8).clamp(1, 32)
}

/// Bytes of the widest access to memory.
const LINE: u64 = 16;

/// Returns the name of the entry for a reduction, which takes a [`Parameter`]; `None` where the
/// reduction does not [apply](ReduceOp::applies_to).
///
/// A copy is the [`ReduceOp::BitOr`] of one source in the integer of the element's size: other
/// reductions may change the payload of a NaN in a half.
pub(super) fn entry(dtype: DType, redop: ReduceOp) -> Option<String> {
    redop.applies_to(dtype).then(|| format!("kolo_reduce_{redop}_{dtype}"))
}

/// The only parameter of an entry that reduces, passed by value: one move, or where the
/// [`Moves`](super::moves::Moves) are.
///
/// A move computes `target[i] = sources[0][i] op sources[1][i] op ...` for every target, with the
/// operands in the given order. Halves are summed in `f32` and rounded once. A thread reads an
/// element of all sources before it writes that element of a target, and no two threads access the
/// same element. So a target may be one of the sources, but must not overlap one otherwise. Pointers
/// are aligned to the element. If all of them are congruent modulo 16 bytes, memory moves in lines of
/// 16 bytes, otherwise element by element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Parameter {
    only: Move,
    moves: MovesAt,
}

const _: () = assert!(size_of::<Parameter>() == 296);

// SAFETY: the type consists of numbers in C's layout, as the kernels declare it. Its device
// pointers are plain addresses.
unsafe impl DeviceRepr for Parameter {}

impl Parameter {
    pub(super) fn of(only: Move) -> Parameter {
        Parameter { only, moves: MovesAt { on_device: 0, on_host: 0 } }
    }

    pub(super) fn at(moves: MovesAt) -> Parameter {
        Parameter { only: Move::new(&[0], &[0], 0, 1), moves }
    }
}

/// The only parameter of the entry that takes moves, passed by value. If there are none, it does
/// nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct TakeParameter {
    from: u64,
    to: u64,
}

const _: () = assert!(size_of::<TakeParameter>() == 16);

// SAFETY: as for `Parameter`.
unsafe impl DeviceRepr for TakeParameter {}

impl TakeParameter {
    pub(super) const NOTHING: TakeParameter = TakeParameter { from: 0, to: 0 };

    pub(super) fn of(moves: MovesAt) -> TakeParameter {
        TakeParameter { from: moves.on_host, to: moves.on_device }
    }
}

/// Returns the name of the entry that scales elements from one type to another, which takes a
/// [`ScaleParameter`]; `None` where the types are not [converted](scales).
pub(super) fn scale_entry(from: DType, to: DType) -> Option<String> {
    scales(from, to).then(|| format!("kolo_scale_{from}_{to}"))
}

/// The only parameter of an entry that scales, passed by value.
///
/// It computes `target[i] = source[i] * factor` in `f64`. A half is rounded to `f32` first. Memory
/// moves in lines of 16 bytes of the longer element if both addresses allow that, otherwise element by
/// element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaleParameter {
    source: u64,
    target: u64,
    count: u64,
    factor: f64,
}

const _: () = assert!(size_of::<ScaleParameter>() == 32);

// SAFETY: as for `Parameter`.
unsafe impl DeviceRepr for ScaleParameter {}

impl ScaleParameter {
    pub(super) fn of(scaling: &Scaling) -> ScaleParameter {
        let Scaling { source, target, count, factor, .. } = *scaling;
        ScaleParameter { source, target, count: count as u64, factor }
    }
}

/// The grid of threads that runs an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

impl Grid {
    /// Returns the same with at most this many blocks.
    pub(super) fn at_most(self, blocks: u32) -> Grid {
        Grid { blocks: self.blocks.min(blocks), ..self }
    }
}

/// Returns the grid for a buffer of `bytes`: a thread for each line, up to the number of threads
/// that the GPU runs at once.
pub(super) fn grid(bytes: u64, multiprocessors: u32) -> Grid {
    let blocks = bytes.div_ceil(LINE * u64::from(THREADS)).clamp(1, u64::from((BLOCKS * multiprocessors).max(1)));
    Grid { blocks: blocks as u32, threads: THREADS }
}
