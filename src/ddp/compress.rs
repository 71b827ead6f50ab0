//! Compression of gradients to 16 bits.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use super::float::Float;
use super::hook::{Bucket, Elements, Hook};
use super::on_device::ConversionBuffer;
use crate::communicator::{Communicator, Registered};
use crate::error::Result;
use crate::types::{DType, Element, ReduceOp};

/// How many elements are converted at once: few enough to stay in the L1 cache.
const BLOCK: usize = 1024;

/// Sends gradients of `f32` and `f64` as `f16` or `bf16`: half the bytes of `f32`. Gradients of
/// other types are averaged without compression.
///
/// Each gradient is divided by the world size when it is converted, so that the sum stays in range.
/// In `f16`, a gradient above 65504 times the world size becomes infinite.
pub struct Compress {
    /// [`DType::F16`] or [`DType::BF16`].
    to: DType,
    /// The compressed bucket. It grows to the largest so far.
    scratch: Option<Registered<u16>>,
    /// The same on the device, and its length in elements.
    on_device: ConversionBuffer,
}

impl Compress {
    /// Compresses to IEEE half precision, with 11 significant bits.
    pub fn f16() -> Compress {
        Compress { to: DType::F16, scratch: None, on_device: ConversionBuffer::default() }
    }

    /// Compresses to bfloat16, the upper half of an `f32`: 8 significant bits, and the range of
    /// `f32`.
    pub fn bf16() -> Compress {
        Compress { to: DType::BF16, scratch: None, on_device: ConversionBuffer::default() }
    }

    fn all_reduce<T: Float>(&mut self, values: &mut [T], comm: &Communicator) -> Result<()> {
        if self.scratch.as_ref().is_none_or(|scratch| scratch.len() < values.len()) {
            self.scratch = None;
            self.scratch = Some(comm.alloc(values.len())?);
        }
        let bits = &mut self.scratch.as_mut().expect("just allocated")[..values.len()];
        match self.to {
            DType::F16 => sum_as::<f16, T>(bits.reinterpret_cast_mut(), values, comm),
            _ => sum_as::<bf16, T>(bits.reinterpret_cast_mut(), values, comm),
        }
    }
}

/// Returns the factor of each rank's gradients. It is a number of f32, so that its product with one
/// is the same in f32 and in f64.
fn share(comm: &Communicator) -> f32 {
    1.0 / comm.world_size() as f32
}

/// Averages values in a shorter type.
fn sum_as<H: Element, T: Float>(short: &mut [H], values: &mut [T], comm: &Communicator) -> Result<()>
where
    [H]: HalfFloatSliceExt,
{
    let share = share(comm);
    let mut block = [0.0f32; BLOCK];
    for (short, values) in short.chunks_mut(BLOCK).zip(values.chunks(BLOCK)) {
        let block = &mut block[..values.len()];
        for (wide, &value) in block.iter_mut().zip(values) {
            *wide = value.share(share);
        }
        short.convert_from_f32_slice(block);
    }
    comm.all_reduce(short, ReduceOp::Sum)?;
    for (short, values) in short.chunks(BLOCK).zip(values.chunks_mut(BLOCK)) {
        let block = &mut block[..values.len()];
        short.convert_to_f32_slice(block);
        for (value, &wide) in values.iter_mut().zip(block.iter()) {
            *value = T::of_single(wide);
        }
    }
    Ok(())
}

impl Hook for Compress {
    fn name(&self) -> String {
        format!("compress to {}", self.to)
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        let dtype = bucket.dtype();
        match (&bucket.elements, dtype) {
            (Elements::Device(elements), DType::F32 | DType::F64) if !elements.is_fetched() => {
                elements.sum_as(comm, (dtype, self.to), &mut self.on_device, share(comm).into())
            }
            (_, DType::F32) => self.all_reduce(bucket.elements::<f32>()?, comm),
            (_, DType::F64) => self.all_reduce(bucket.elements::<f64>()?, comm),
            _ => bucket.average(comm),
        }
    }
}

impl std::fmt::Debug for Compress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compress").field("to", &self.to).finish_non_exhaustive()
    }
}
