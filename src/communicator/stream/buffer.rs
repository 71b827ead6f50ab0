//! Buffers in the memory of a GPU that the other ranks of the host can reach.

use std::fmt;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use crate::communicator::Communicator;
use crate::cuda::device::{Address, Memory, StreamId};
use crate::error::{ArgumentError, Error, Result};
use crate::types::{Element, Op};

impl Communicator {
    /// Allocates `len` elements of zeros on the device of a stream, in memory that other ranks on
    /// this host can reach: collectives read and write it in place. (The memory of cudarc's own
    /// slices often belongs to CUDA's pools, which other processes cannot reach: it passes through
    /// areas on the GPU.) Where it is CUDA's virtual memory, it may be dropped while other processes
    /// have it open, and CUDA rounds each allocation up to 2 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if this communicator has no devices, [`Error::Device`] if the device
    /// has too little memory.
    pub fn alloc_device<T: Element>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<DeviceBuffer<T>> {
        let too_many = Error::Argument { op: Op::Alloc, problem: ArgumentError::TooMany { count: len } };
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize).ok_or(too_many)?;
        let device = self.exec.device(stream.context().ordinal())?;
        let memory = Memory::for_peers(&device, bytes.max(1))?;
        // SAFETY: it was allocated with as many bytes at least, and belongs to the stream.
        unsafe { device.zero(StreamId(stream.cu_stream().addr()), memory.address, bytes.max(1))? };
        Ok(DeviceBuffer { memory, len, stream: stream.clone(), elements: std::marker::PhantomData })
    }
}

/// A buffer in the memory of a GPU that all ranks of a host can reach; see
/// [`Communicator::alloc_device`]. cudarc accepts it like its own slices.
///
/// It belongs to the stream with which it was allocated. If another stream uses it, that stream
/// waits for the first one, and the host waits for that stream.
pub struct DeviceBuffer<T: Element> {
    memory: Memory,
    len: usize,
    stream: Arc<CudaStream>,
    elements: std::marker::PhantomData<T>,
}

/// A part of a [`DeviceBuffer`] for reading.
#[derive(Debug)]
pub struct DeviceView<'a, T: Element> {
    buffer: &'a DeviceBuffer<T>,
    range: Range<usize>,
}

/// A part of a [`DeviceBuffer`] for writing.
#[derive(Debug)]
pub struct DeviceViewMut<'a, T: Element> {
    buffer: &'a mut DeviceBuffer<T>,
    range: Range<usize>,
}

impl<T: Element> DeviceBuffer<T> {
    /// Returns a part of the buffer for reading.
    ///
    /// # Panics
    ///
    /// If the range is outside the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> DeviceView<'_, T> {
        let range = within(range, self.len);
        DeviceView { buffer: self, range }
    }

    /// Returns a part of the buffer for writing.
    ///
    /// # Panics
    ///
    /// If the range is outside the buffer.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> DeviceViewMut<'_, T> {
        let range = within(range, self.len);
        DeviceViewMut { buffer: self, range }
    }

    fn at(&self, element: usize) -> Address {
        self.memory.address + (element * size_of::<T>()) as Address
    }
}

/// Returns the range of a buffer of `len` elements. Panics if it is outside the buffer.
fn within(range: impl RangeBounds<usize>, len: usize) -> Range<usize> {
    let after = |end: usize| end.checked_add(1).expect("the range ends beyond all memory");
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => after(before),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => after(last),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "{start}..{end} of {len} elements");
    start..end
}

/// The elements' type and number; the host cannot read the elements.
impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("dtype", &T::DTYPE).field("len", &self.len).finish_non_exhaustive()
    }
}

/// Orders the uses of a buffer: a stream other than the buffer's waits for it, and the host waits
/// for that stream.
pub(crate) fn in_turn<'a>(own: &Arc<CudaStream>, stream: &'a CudaStream) -> SyncOnDrop<'a> {
    if stream.cu_stream() == own.cu_stream() {
        return SyncOnDrop::Record(None);
    }
    if let Err(error) = stream.join(own) {
        crate::log::warn!(%error, "a stream cannot wait for the stream of a buffer");
    }
    SyncOnDrop::sync_stream(stream)
}

/// Makes parts of a buffer views for cudarc.
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
        // The work of the stream with it is done first.
        if let Err(error) = self.stream.synchronize() {
            crate::log::debug!(%error, "the stream of a buffer failed before the buffer was freed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_range_selects_elements() {
        assert_eq!(within(.., 8), 0..8);
        assert_eq!(within(2.., 8), 2..8);
        assert_eq!(within(..=7, 8), 0..8);
        assert_eq!(within((Bound::Excluded(1), Bound::Excluded(5)), 8), 2..5);
        assert_eq!(within(8..8, 8), 8..8);
    }

    #[test]
    #[should_panic(expected = "3..9 of 8 elements")]
    fn a_range_outside_panics() {
        _ = within(3..9, 8);
    }
}
