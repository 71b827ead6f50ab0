//! CPU reduction kernels: many buffers in, one out, in a single pass over memory.

mod arithmetic;
mod blocks;
mod code;
mod convert;
mod copy;
mod fold;
mod instructions;
mod kernel;
mod level;
mod packing;
mod portable;
mod scale;
#[cfg(feature = "cuda")]
mod scale_to;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use copy::{copy, copy_streaming, copy_up_to, normalise_bools};
pub(crate) use kernel::Kernel;
pub(crate) use level::instructions;
pub(crate) use packing::Packing;
pub(crate) use scale::{Scale, scale};
#[cfg(feature = "cuda")]
pub(crate) use scale_to::{scale_to, scales};

use crate::error::{ArgumentError, Error, Result};
use crate::types::{Element, Op, ReduceOp};

/// Combines buffers of one process as a collective combines those of its ranks: `into[i]` becomes
/// `parts[0][i] op parts[1][i] op ...`, in a single pass over memory. MPI calls it
/// `MPI_Reduce_local`.
///
/// # Errors
///
/// [`Error::Argument`] if there is no part, if a part is not as long as `into`, or if the reduction
/// means nothing on these elements.
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
        return Err(refuse(ArgumentError::Length { buffer: "first", expected, given: 0 }));
    }
    if let Some(part) = parts.iter().find(|part| part.len() != expected) {
        return Err(refuse(ArgumentError::Length { buffer: "send", expected, given: part.len() }));
    }
    let kernel = Kernel::new(T::DTYPE, redop).ok_or(refuse(ArgumentError::ReduceOp { redop, dtype: T::DTYPE }))?;
    let parts: Vec<*const u8> = parts.iter().map(|part| part.as_ptr().cast()).collect();
    // SAFETY: all are slices of as many elements, and the one that is written is borrowed mutably,
    // so it is apart from them.
    unsafe { kernel.fold(&parts, into.as_mut_ptr().cast(), expected, Some(parts.len())) };
    Ok(())
}
