//! Communication hooks: how a bucket is reduced.

use std::ops::Range;

use super::on_device::DeviceElements;
use super::parameter::Parameter;
use crate::communicator::Communicator;
use crate::error::{ReducerError, Result};
use crate::reduce::scale;
use crate::types::{DType, Element, ReduceOp};

/// A communication hook: reduces buckets in another way than by averaging, such as with
/// compression.
///
/// A hook runs on the reducer's thread, for one bucket after the other, in the same order on all
/// ranks.
///
/// ```
/// use kolo::ddp::{Bucket, Hook, Parameter, Reducer};
/// use kolo::{Communicator, DType};
///
/// /// Limits each rank's gradients before they are averaged.
/// struct Clip(f32);
///
/// impl Hook for Clip {
///     fn name(&self) -> String {
///         format!("clip at {}", self.0)
///     }
///
///     fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> kolo::Result<()> {
///         for element in bucket.elements::<f32>()? {
///             *element = element.clamp(-self.0, self.0);
///         }
///         bucket.average(comm)
///     }
/// }
///
/// # fn main() -> kolo::Result<()> {
/// let comm = Communicator::from_env()?;
/// let weight = Parameter::new("weight", [2], DType::F32);
/// let mut reducer = Reducer::builder().parameters([weight]).hook(Clip(1.0)).build(&comm)?;
/// let step = reducer.begin()?;
/// step.put(0, &[0.5f32, 7.0])?;
/// step.finish()?;
/// assert_eq!(reducer.gradient::<f32>(0)?, [0.5, 1.0]);
/// # Ok(())
/// # }
/// ```
pub trait Hook: Send {
    /// Returns the hook's name and options, which ranks compare when a reducer is built.
    fn name(&self) -> String;

    /// Replaces the bucket's elements by their average over all ranks, or what stands for it. May
    /// call any collective on `comm`, the reducer's own communicator: all ranks must make the same
    /// calls.
    ///
    /// # Errors
    ///
    /// An error ends the reducer, and makes the other ranks' steps fail.
    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()>;

    /// Returns whether [`reduce`](Hook::reduce) leaves an average over all ranks in the bucket.
    /// `step` is the number of steps reduced before. If it returns false,
    /// [`Uneven::ByRanksWithInput`](super::Uneven) does not rescale the bucket. Must return the
    /// same on all ranks. Default: true.
    fn averages(&self, step: u64) -> bool {
        let _ = step;
        true
    }
}

/// A hook that a program chooses when it runs.
impl<H: Hook + ?Sized> Hook for Box<H> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        (**self).reduce(bucket, comm)
    }

    fn averages(&self, step: u64) -> bool {
        (**self).averages(step)
    }
}

/// The default hook: averages in place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Average;

impl Hook for Average {
    fn name(&self) -> String {
        "average".to_owned()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        bucket.average(comm)
    }
}

/// A bucket whose gradients are complete. Nothing else accesses it while the hook runs.
#[derive(Debug)]
pub struct Bucket<'a> {
    pub(super) index: usize,
    pub(super) step: u64,
    pub(super) dtype: DType,
    pub(super) elements: Elements<'a>,
    /// The parameters in the bucket, and the ranges of their elements.
    pub(super) members: &'a [(usize, Range<usize>)],
    pub(super) parameters: &'a [Parameter],
}

/// Where a bucket's elements are stored.
pub(super) enum Elements<'a> {
    /// In memory that the ranks of the host share.
    Host(&'a mut [u8]),
    Device(DeviceElements<'a>),
}

impl std::fmt::Debug for Elements<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Elements::Host(_)) { "Host" } else { "Device" })
    }
}

/// Runs `$body` with `$T` as the float type that `$dtype` names.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::types::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::types::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::types::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::types::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => unreachable!("a parameter of {other} was refused"),
        }
    };
}
pub(crate) use with_float;

impl<'a> Bucket<'a> {
    /// Returns the bucket's index, in the order in which buckets are launched.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns how many steps were reduced before this one.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns how many elements it has.
    pub fn count(&self) -> usize {
        let bytes = match &self.elements {
            Elements::Host(bytes) => bytes.len(),
            Elements::Device(device) => device.bytes(),
        };
        bytes / self.dtype.size()
    }

    /// Returns whether its elements are in the memory of a device.
    pub fn is_on_device(&self) -> bool {
        matches!(self.elements, Elements::Device(_))
    }

    /// Returns its parameters: the index and description of each, and the range of its elements.
    pub fn members(&self) -> impl Iterator<Item = (usize, &'a Parameter, Range<usize>)> + use<'a> {
        let parameters = self.parameters;
        self.members.iter().map(move |(index, range)| (*index, &parameters[*index], range.clone()))
    }

    /// Returns the elements. They lie in memory that the ranks of the host share, so collectives on
    /// them need no staging. For a bucket on a device, the first call copies the elements to the
    /// host (a collective call), and they are copied back when the hook returns.
    ///
    /// # Errors
    ///
    /// [`ReducerError::Elements`] if they have another type than `T`.
    pub fn elements<T: Element>(&mut self) -> Result<&mut [T]> {
        if T::DTYPE != self.dtype {
            let name = format!("bucket {}", self.index);
            return Err(ReducerError::Elements { name, dtype: self.dtype, given: T::DTYPE }.into());
        }
        let count = self.count();
        let bytes = match &mut self.elements {
            Elements::Host(bytes) => &mut **bytes,
            Elements::Device(device) => device.fetch()?,
        };
        // SAFETY: the bytes are borrowed mutably, start at a multiple of the largest element's
        // size, and are elements of this type, for which every bit pattern is valid.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), count) })
    }

    /// Multiplies all elements, on their device if no hook has fetched them.
    pub(super) fn scale(&mut self, factor: f64) -> Result<()> {
        let count = self.count();
        if let Elements::Device(device) = &self.elements
            && !device.is_fetched()
        {
            return device.scale(self.dtype, count, factor);
        }
        with_float!(self.dtype, T => scale(self.elements::<T>()?, factor));
        Ok(())
    }

    /// Returns the address of the elements, on the device if they are there.
    pub(crate) fn address(&mut self) -> *mut u8 {
        match &mut self.elements {
            Elements::Host(bytes) => bytes.as_mut_ptr(),
            Elements::Device(device) => std::ptr::without_provenance_mut(device.at() as usize),
        }
    }

    /// Averages the bucket over all ranks, in place and on its device. The reduction divides in the
    /// same pass over memory.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce`].
    pub fn average(&mut self, comm: &Communicator) -> Result<()> {
        let count = self.count();
        if let Elements::Device(device) = &self.elements
            && !device.is_fetched()
        {
            return device.average(comm, self.dtype, count);
        }
        with_float!(self.dtype, T => comm.all_reduce(self.elements::<T>()?, ReduceOp::Average))
    }
}
