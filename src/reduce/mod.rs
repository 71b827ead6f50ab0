//! CPU reduction kernels: many buffers in, one out, in a single pass over memory.

mod arithmetic;
mod fold;
mod instructions;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use crate::error::{Argument, Error, Result};
use crate::types::{DType, Element, Op, ReduceOp};
use fold::{Finish, Fold};

/// Combines buffers of one process as a collective combines those of its ranks: `into[i]` becomes `parts[0][i] op parts[1][i]
/// op ...`, in a single pass over memory. MPI calls it `MPI_Reduce_local`.
///
/// # Errors
///
/// [`Error::Argument`] if there is no part, if a part is not as long as `into`, or if the reduction means nothing on these
/// elements.
///
/// ```
/// # fn main() -> kolo::Result<()> {
/// let mut average = [0.0f32; 3];
/// kolo::reduce_local(&[&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]], &mut average, kolo::ReduceOp::Average)?;
/// assert_eq!(average, [2.0; 3]);
/// # Ok(())
/// # }
/// ```
pub fn reduce_local<T: Element>(parts: &[&[T]], into: &mut [T], redop: ReduceOp) -> Result<()> {
    let refuse = |problem| Error::Argument { op: Op::Reduce, problem };
    let expected = into.len();
    if parts.is_empty() {
        return Err(refuse(Argument::Length { buffer: "first", expected, given: 0 }));
    }
    if let Some(part) = parts.iter().find(|part| part.len() != expected) {
        return Err(refuse(Argument::Length { buffer: "send", expected, given: part.len() }));
    }
    let kernel = Kernel::new(T::DTYPE, redop).ok_or(refuse(Argument::ReduceOp { redop, dtype: T::DTYPE }))?;
    let parts: Vec<*const u8> = parts.iter().map(|part| part.as_ptr().cast()).collect();
    // SAFETY: all are slices of as many elements, and the one that is written is borrowed mutably, so it is apart from them.
    unsafe { kernel.fold(&parts, into.as_mut_ptr().cast(), expected, Some(parts.len())) };
    Ok(())
}

/// The kernel for one reduction on one element type.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    run: Fold,
    /// The element type, for its size.
    dtype: DType,
    /// Whether a finished result is divided.
    averages: bool,
}

/// The sets of instructions that there are kernels for, the best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Those that this processor has.
    fn available() -> impl Iterator<Item = Level> {
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

    /// The best of them.
    fn best() -> Level {
        static BEST: LazyLock<Level> = LazyLock::new(|| Level::available().last().unwrap_or(Level::Portable));
        *BEST
    }

    fn kernel(self, dtype: DType, redop: ReduceOp) -> Fold {
        match self {
            Level::Portable => fold::kernel::<instructions::Portable>(dtype, redop),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => fold::kernel::<instructions::Avx2>(dtype, redop),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => fold::kernel::<instructions::Avx512>(dtype, redop),
        }
    }
}

/// The instructions with which this process reduces, for people.
pub(crate) fn instructions() -> &'static str {
    match Level::best() {
        Level::Portable if cfg!(target_arch = "aarch64") => "NEON",
        Level::Portable => "what every processor has",
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => "AVX2 and F16C",
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => "AVX-512",
    }
}

impl Kernel {
    /// The kernel, where the reduction means something on these elements.
    pub(crate) fn new(dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        Kernel::of_level(Level::best(), dtype, redop)
    }

    fn of_level(level: Level, dtype: DType, redop: ReduceOp) -> Option<Kernel> {
        redop.applies_to(dtype).then(|| Kernel { run: level.kernel(dtype, redop), dtype, averages: redop == ReduceOp::Average })
    }

    /// `dst[i] = parts[0][i] op parts[1][i] op ...` for `count` elements, operands in the order given; halves are summed in
    /// `f32` and rounded once. With `finish`, the number of ranks whose parts went in, an average is divided by it.
    ///
    /// # Safety
    ///
    /// Every part is readable and `dst` writable for `count` elements, all are aligned to the element, and `dst` is either
    /// one of the parts or apart from all of them. Nobody else writes the parts or touches `dst` meanwhile.
    pub(crate) unsafe fn fold(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: passed on.
        unsafe { self.fold_to(parts, dst, count, finish, false) }
    }

    /// The same, past the caches: for results that nobody reads soon.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::fold`].
    pub(crate) unsafe fn fold_streaming(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>) {
        // SAFETY: passed on.
        unsafe { self.fold_to(parts, dst, count, finish, true) }
    }

    unsafe fn fold_to(&self, parts: &[*const u8], dst: *mut u8, count: usize, finish: Option<usize>, streams: bool) {
        debug_assert!(!parts.is_empty());
        if count == 0 {
            return;
        }
        let is_aligned = |ptr: *const u8| ptr.addr().is_multiple_of(self.dtype.size());
        debug_assert!(parts.iter().all(|&part| is_aligned(part)) && is_aligned(dst));
        let divisor = finish.filter(|_| self.averages).unwrap_or(1);
        // SAFETY: what the caller promises is what the kernel asks for, and the processor has the kernel's instructions.
        unsafe { (self.run)(parts, dst, count, Finish { divisor, streams }) }
    }
}

/// Copies bytes past the caches, for large results that nobody reads soon: their old content is not loaded first.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` bytes, and they are apart. Nobody else writes the one or touches the other
/// meanwhile.
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    // A reduction of one part is a copy.
    let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("bytes have a largest");
    // SAFETY: passed on; every address is aligned to bytes.
    unsafe { copy.fold_streaming(&[from], to, len, None) }
}

/// Bytes that are copied quicker by vectors than by the processor's own instruction for copying (`rep movsb`), which libc uses
/// from so many on, and which takes a tenth of a microsecond to begin.
const SHORT: std::ops::RangeInclusive<usize> = 2 << 10..=4 << 10;

/// Copies bytes that another core is about to read, or has just written.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe { copy_up_to(*SHORT.end(), from, to, len) }
}

/// As [`copy`], but up to another length by vectors: where this core holds the destination's lines already, the processor's own
/// instruction loses its advantage, which is not to load them.
///
/// # Safety
///
/// As for [`copy_streaming`].
#[inline]
pub(crate) unsafe fn copy_up_to(most: usize, from: *const u8, to: *mut u8, len: usize) {
    if (*SHORT.start()..=most).contains(&len) {
        let copy = Kernel::new(DType::U8, ReduceOp::Max).expect("bytes have a largest");
        // SAFETY: passed on; every address is aligned to bytes.
        unsafe { copy.fold(&[from], to, len, None) }
    } else {
        // SAFETY: passed on.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }
}

/// Makes every byte of a `bool` buffer 0 or 1: what came from a peer may be neither.
///
/// # Safety
///
/// `ptr` is valid for reads and writes of `count` bytes, and nobody else touches them meanwhile.
pub(crate) unsafe fn normalise_bools(ptr: *mut u8, count: usize) {
    for i in 0..count {
        // SAFETY: within the `count` bytes that the caller vouches for.
        unsafe { *ptr.add(i) = u8::from(*ptr.add(i) != 0) };
    }
}
