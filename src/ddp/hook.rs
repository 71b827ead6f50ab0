//! How a bucket is reduced: averaged, or otherwise.

use std::ops::Range;

use super::on_device::OnDevice;
use super::parameter::Parameter;
use crate::communicator::{Communicator, Registered};
use crate::cuda::device::Address;
use crate::error::{ReducerProblem, Result};
use crate::types::{DType, Element, ReduceOp};

/// Reduces buckets in another way than by averaging them, as with compression.
///
/// A hook runs on the reducer's thread, one bucket after the other, in the same order on all ranks.
pub trait Hook: Send {
    /// What it is, with its options: ranks compare it when a reducer is built.
    fn name(&self) -> String;

    /// Replaces the bucket's elements by their average over all ranks, or what stands for it. May call any collective on
    /// `comm`, which is the reducer's own: all ranks must make the same calls.
    ///
    /// # Errors
    ///
    /// Whatever it returns ends the reducer, and the other ranks' steps.
    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()>;

    /// Whether what [`reduce`](Hook::reduce) leaves there is an average over all ranks, in the step that so many were reduced
    /// before. Where not, [`Uneven::ByRanksWithInput`](super::Uneven) has nothing to divide otherwise. The same on all ranks;
    /// always, if it is not said.
    fn averages(&self, step: u64) -> bool {
        let _ = step;
        true
    }
}

/// The hook that there is if no other is given: every rank gets the average, in place.
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

/// A bucket whose gradients are all there, in flight: nobody else reads or writes it.
#[derive(Debug)]
pub struct Bucket<'a> {
    pub(super) index: usize,
    pub(super) step: u64,
    pub(super) dtype: DType,
    pub(super) elements: Elements<'a>,
    /// The members and their elements' places.
    pub(super) members: &'a [(usize, Range<usize>)],
    pub(super) parameters: &'a [Parameter],
}

/// Where a bucket's elements are.
pub(super) enum Elements<'a> {
    /// In memory that the ranks of the host share.
    Host(&'a mut [u8]),
    Device(DeviceElements<'a>),
}

/// The elements of a bucket on a device; and on the host, if they have been fetched.
pub(super) struct DeviceElements<'a> {
    pub(super) on: &'a OnDevice,
    pub(super) comm: &'a Communicator,
    pub(super) at: Address,
    pub(super) bytes: usize,
    /// As large as the largest bucket that was fetched so far.
    pub(super) scratch: &'a mut Option<Registered<u8>>,
    pub(super) is_fetched: bool,
}

impl DeviceElements<'_> {
    /// The elements on the host, whence they go back in the end.
    fn fetch(&mut self) -> Result<&mut [u8]> {
        let DeviceElements { on, comm, at, bytes, ref mut scratch, .. } = *self;
        if scratch.as_ref().is_none_or(|scratch| scratch.len() < bytes) {
            **scratch = None;
            **scratch = Some(comm.alloc(bytes)?);
        }
        if !self.is_fetched {
            let scratch = self.scratch.as_mut().expect("just allocated");
            // SAFETY: the bucket is this hook's, its gradients are there, and the host's memory has room for them.
            let fetched = unsafe { on.fetch(comm, at, scratch.as_mut_ptr(), bytes) };
            self.or_leak(fetched)?;
            self.is_fetched = true;
        }
        Ok(&mut self.scratch.as_mut().expect("allocated")[..bytes])
    }

    /// What was fetched goes back.
    pub(super) fn bring_back(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_fetched) {
            return Ok(());
        }
        let scratch = self.scratch.as_ref().expect("it was fetched");
        // SAFETY: as above, in the other direction.
        let brought = unsafe { self.on.bring(self.comm, scratch.as_ptr(), self.at, self.bytes) };
        self.or_leak(brought)
    }

    /// What a device may still be copying is not freed.
    fn or_leak(&mut self, result: Result<()>) -> Result<()> {
        result.inspect_err(|_| std::mem::forget(self.scratch.take()))
    }
}

impl std::fmt::Debug for Elements<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Elements::Host(_)) { "Host" } else { "Device" })
    }
}

/// Runs `$body` with `$T` standing for the type of float that `$dtype` names.
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
    /// Its place among the buckets, in the order in which they are launched.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many steps were reduced before this one.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The type of all its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How many elements it has.
    pub fn count(&self) -> usize {
        let bytes = match &self.elements {
            Elements::Host(bytes) => bytes.len(),
            Elements::Device(device) => device.bytes,
        };
        bytes / self.dtype.size()
    }

    /// Whether its elements are in the memory of a device.
    pub fn is_on_device(&self) -> bool {
        matches!(self.elements, Elements::Device(_))
    }

    /// Its parameters: the number of each, what it is, and the place of its gradient among the elements.
    pub fn members(&self) -> impl Iterator<Item = (usize, &'a Parameter, Range<usize>)> + use<'a> {
        let parameters = self.parameters;
        self.members.iter().map(move |(index, range)| (*index, &parameters[*index], range.clone()))
    }

    /// The elements. They are in memory that the ranks of the host share: collectives on them need no staging. Those of a bucket on a
    /// device are copied there by the first call, a collective one, and go back when the hook has returned.
    ///
    /// # Errors
    ///
    /// [`ReducerProblem::Elements`] if they are of another type.
    pub fn elements<T: Element>(&mut self) -> Result<&mut [T]> {
        if T::DTYPE != self.dtype {
            let name = format!("bucket {}", self.index);
            return Err(ReducerProblem::Elements { name, dtype: self.dtype, given: T::DTYPE }.into());
        }
        let count = self.count();
        let bytes = match &mut self.elements {
            Elements::Host(bytes) => &mut **bytes,
            Elements::Device(device) => device.fetch()?,
        };
        // SAFETY: the bytes are borrowed mutably, start at a multiple of the largest element's size, and are elements of this type,
        // every pattern of whose bits is a value.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), count) })
    }

    /// Where the elements are.
    pub(crate) fn address(&mut self) -> *mut u8 {
        match &mut self.elements {
            Elements::Host(bytes) => bytes.as_mut_ptr(),
            Elements::Device(device) => std::ptr::without_provenance_mut(device.at as usize),
        }
    }

    /// Averages it over all ranks, in place, and where it is. The division is part of the reduction's pass over memory.
    pub fn average(&mut self, comm: &Communicator) -> Result<()> {
        let count = self.count();
        if let Elements::Device(DeviceElements { on, at, is_fetched: false, .. }) = self.elements {
            // SAFETY: the bucket is this hook's, and its gradients are there.
            return unsafe { on.all_reduce(comm, (self.dtype, ReduceOp::Average), at, count) };
        }
        with_float!(self.dtype, T => comm.all_reduce(self.elements::<T>()?, ReduceOp::Average))
    }
}
