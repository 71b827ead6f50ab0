//! The elements of one bucket on a device, while a hook has them.

use super::BucketDevice;
use crate::communicator::{Communicator, Registered};
use crate::cuda::device::{Address, Memory, Scaling};
use crate::error::Result;
use crate::types::{DType, ReduceOp};

/// The elements of a bucket on a device, and their copy on the host if they were fetched. Only the hook
/// uses the bucket, and its gradients are complete.
pub(in crate::ddp) struct DeviceElements<'a> {
    on: &'a BucketDevice,
    comm: &'a Communicator,
    at: Address,
    bytes: usize,
    /// The copy's memory. It grows to the largest bucket that was fetched.
    scratch: &'a mut Option<Registered<u8>>,
    is_fetched: bool,
}

/// Memory of the device in which a hook has elements of another type, and how many.
#[derive(Default)]
pub(in crate::ddp) struct ConversionBuffer(Option<(Memory, usize)>);

impl<'a> DeviceElements<'a> {
    /// # Safety
    ///
    /// The device has as many bytes at the address, which nothing else uses as long as this lives.
    pub(in crate::ddp) unsafe fn new(
        on: &'a BucketDevice,
        comm: &'a Communicator,
        (at, bytes): (Address, usize),
        scratch: &'a mut Option<Registered<u8>>,
    ) -> DeviceElements<'a> {
        DeviceElements { on, comm, at, bytes, scratch, is_fetched: false }
    }

    pub(in crate::ddp) fn at(&self) -> Address {
        self.at
    }

    pub(in crate::ddp) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(in crate::ddp) fn is_fetched(&self) -> bool {
        self.is_fetched
    }

    /// Copies the elements to the host. They go back when the hook returns.
    pub(in crate::ddp) fn fetch(&mut self) -> Result<&mut [u8]> {
        let DeviceElements { on, comm, at, bytes, ref mut scratch, .. } = *self;
        if scratch.as_ref().is_none_or(|scratch| scratch.len() < bytes) {
            **scratch = None;
            **scratch = Some(comm.alloc(bytes)?);
        }
        if !self.is_fetched {
            let scratch = self.scratch.as_mut().expect("just allocated");
            // SAFETY: only this hook uses the bucket, its gradients are complete, and the host
            // memory is large enough.
            let fetched = unsafe { on.fetch(comm, at, scratch.as_mut_ptr(), bytes) };
            self.or_leak(fetched)?;
            self.is_fetched = true;
        }
        Ok(&mut self.scratch.as_mut().expect("allocated")[..bytes])
    }

    /// Copies fetched elements back to the device.
    pub(in crate::ddp) fn bring_back(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.is_fetched) {
            return Ok(());
        }
        let scratch = self.scratch.as_ref().expect("it was fetched");
        // SAFETY: only this hook uses the bucket, and the host memory has as many bytes.
        let brought = unsafe { self.on.bring(self.comm, scratch.as_ptr(), self.at, self.bytes) };
        self.or_leak(brought)
    }

    /// After an error the device may still be copying: the memory must not be freed.
    fn or_leak(&mut self, result: Result<()>) -> Result<()> {
        result.inspect_err(|_| std::mem::forget(self.scratch.take()))
    }

    /// Multiplies the elements, which have not been fetched.
    pub(in crate::ddp) fn scale(&self, dtype: DType, count: usize, factor: f64) -> Result<()> {
        let scaling = Scaling { dtypes: (dtype, dtype), source: self.at, target: self.at, count, factor };
        // SAFETY: only this hook uses the bucket, which has `count` elements.
        unsafe { self.on.scale(self.comm, &scaling)? };
        self.on.finish(self.comm)
    }

    /// Averages the elements, which have not been fetched, over all ranks.
    pub(in crate::ddp) fn average(&self, comm: &Communicator, dtype: DType, count: usize) -> Result<()> {
        // SAFETY: only this hook uses the bucket, which has `count` elements, and its gradients are complete.
        unsafe { self.on.all_reduce(comm, (dtype, ReduceOp::Average), self.at, count) }
    }

    /// Multiplies the elements, which have not been fetched, by a share, and sums them over all ranks as
    /// elements of another type.
    pub(in crate::ddp) fn sum_as(
        &self,
        comm: &Communicator,
        (dtype, short): (DType, DType),
        scratch: &mut ConversionBuffer,
        share: f64,
    ) -> Result<()> {
        let DeviceElements { on, at, bytes, .. } = *self;
        let count = bytes / dtype.size();
        if scratch.0.as_ref().is_none_or(|&(_, len)| len < count) {
            scratch.0 = None;
            scratch.0 = Some((on.allocate(count * short.size())?, count));
        }
        let between = scratch.0.as_ref().expect("just allocated").0.address;
        let to_short = Scaling { dtypes: (dtype, short), source: at, target: between, count, factor: share };
        let back = Scaling { dtypes: (short, dtype), source: between, target: at, count, factor: 1.0 };
        // SAFETY: only this hook uses both memories, which have `count` elements. The gradients are
        // complete.
        let result = unsafe {
            on.scale(comm, &to_short)
                .and_then(|()| on.all_reduce(comm, (short, ReduceOp::Sum), between, count))
                .and_then(|()| on.scale(comm, &back))
                .and_then(|()| on.finish(comm))
        };
        // After an error, other ranks may still use the memory: it must not be freed.
        result.inspect_err(|_| std::mem::forget(scratch.0.take()))
    }
}
