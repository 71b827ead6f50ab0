//! Buffers in the memory of a GPU that the other ranks of the host can reach.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use crate::communicator::Communicator;
use crate::cuda::device::{Address, Memory, StreamId};
use crate::error::{Argument, Error, Result};
use crate::types::{Element, Op};

impl Communicator {
    /// Allocates `len` elements of zeros on the device of a stream, in memory that other ranks on this host can reach: collectives
    /// read and write it where it is. (The memory of cudarc's own slices is often of CUDA's pools, which other processes cannot
    /// reach: then it passes through the host.)
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if this communicator has no devices, [`Error::Device`] if there is not so much memory.
    pub fn alloc_device<T: Element>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<DeviceBuffer<T>> {
        let too_many = Error::Argument { op: Op::Alloc, problem: Argument::TooMany { count: len } };
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize).ok_or(too_many)?;
        let device = self.exec.device(stream.context().ordinal())?;
        let memory = Memory::new(&device, bytes.max(1))?;
        // SAFETY: it was allocated with as many bytes at least, and belongs to the stream.
        unsafe { device.zero(StreamId(stream.cu_stream().addr()), memory.address, bytes.max(1))? };
        Ok(DeviceBuffer { memory, len, stream: stream.clone(), elements: std::marker::PhantomData })
    }
}

/// A buffer in the memory of a GPU that all ranks of a host can reach; see [`Communicator::alloc_device`]. cudarc takes it as it
/// takes its own slices.
///
/// It belongs to the stream with which it was allocated. Another one that uses it comes after that, and is waited for by the host.
pub struct DeviceBuffer<T: Element> {
    memory: Memory,
    len: usize,
    stream: Arc<CudaStream>,
    elements: std::marker::PhantomData<T>,
}

/// A part of a [`DeviceBuffer`], to be read.
pub struct DeviceView<'a, T: Element> {
    buffer: &'a DeviceBuffer<T>,
    range: Range<usize>,
}

/// A part of a [`DeviceBuffer`], to be written.
pub struct DeviceViewMut<'a, T: Element> {
    buffer: &'a mut DeviceBuffer<T>,
    range: Range<usize>,
}

impl<T: Element> DeviceBuffer<T> {
    /// A part of it.
    ///
    /// # Panics
    ///
    /// If there are not so many elements.
    pub fn slice(&self, range: Range<usize>) -> DeviceView<'_, T> {
        self.check(&range);
        DeviceView { buffer: self, range }
    }

    /// A part of it.
    ///
    /// # Panics
    ///
    /// If there are not so many elements.
    pub fn slice_mut(&mut self, range: Range<usize>) -> DeviceViewMut<'_, T> {
        self.check(&range);
        DeviceViewMut { buffer: self, range }
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
    }

    fn at(&self, element: usize) -> Address {
        self.memory.address + (element * size_of::<T>()) as Address
    }
}

/// Has another stream than that of a buffer come after it, and whoever uses the other wait for it: so that no use overtakes another.
pub(crate) fn in_turn<'a>(own: &Arc<CudaStream>, stream: &'a CudaStream) -> SyncOnDrop<'a> {
    if stream.cu_stream() == own.cu_stream() {
        return SyncOnDrop::Record(None);
    }
    if let Err(error) = stream.join(own) {
        tracing::warn!(%error, "a stream does not wait for the one of a buffer");
    }
    SyncOnDrop::sync_stream(stream)
}

/// Parts of a buffer are to cudarc what its own views are.
macro_rules! views {
    ($($view:ident),*) => {$(
        impl<T: Element> DeviceSlice<T> for $view<'_, T> {
            fn len(&self) -> usize {
                self.range.len()
            }

            fn stream(&self) -> &Arc<CudaStream> {
                &self.buffer.stream
            }
        }

        impl<T: Element> DevicePtr<T> for $view<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
                (self.buffer.at(self.range.start), in_turn(&self.buffer.stream, stream))
            }
        }
    )*};
}

views!(DeviceView, DeviceViewMut);

impl<T: Element> DevicePtrMut<T> for DeviceViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
        (self.buffer.at(self.range.start), in_turn(&self.buffer.stream, stream))
    }
}

impl<T: Element> DeviceSlice<T> for DeviceBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T: Element> DevicePtr<T> for DeviceBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
        (self.memory.address, in_turn(&self.stream, stream))
    }
}

impl<T: Element> DevicePtrMut<T> for DeviceBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
        (self.memory.address, in_turn(&self.stream, stream))
    }
}

impl<T: Element> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // What the stream was given with it is done first.
        if let Err(error) = self.stream.synchronize() {
            tracing::debug!(%error, "a buffer is freed");
        }
    }
}
