//! Gradients in the memory of a GPU. They are written in the order of one stream of the caller. A
//! bucket is reduced when that stream has passed the last of its gradients: the host waits for it,
//! as for all events of devices.

mod elements;
mod memory;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use parking_lot::Mutex;

use super::float::is_of_gradients;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::communicator::Communicator;
use crate::cuda::device::{Address, Device, Event, Memory, Reduction, Scaling, Stream, StreamId};
use crate::device::drain;
use crate::error::{Error, ReducerError, Result};
use crate::reduce::{scale_to, scales};
use crate::types::{DType, Op, Rank, ReduceOp};

pub(super) use elements::{ConversionBuffer, DeviceElements};
pub(super) use memory::DeviceMemory;

/// The device of a reducer, and the caller's stream on it.
#[derive(Clone)]
pub(crate) struct Chosen {
    /// The device's number in this process.
    pub(crate) ordinal: usize,
    pub(crate) stream: StreamId,
    /// Keeps the stream alive.
    pub(crate) keeps: Option<Arc<cudarc::driver::CudaStream>>,
}

impl Chosen {
    pub(super) fn new(ordinal: usize, stream: StreamId) -> Chosen {
        Chosen { ordinal, stream, keeps: None }
    }
}

/// What a reducer does on its device.
pub(super) struct BucketDevice {
    device: Arc<dyn Device>,
    chosen: Chosen,
    /// The stream of the reducer's thread.
    own: Stream,
    /// Recorded where a thread waits for a stream. Kept, because to make or to end one waits for all
    /// streams.
    done: Mutex<Event>,
    /// Whether the device has kernels. Without them, elements are scaled on the host.
    has_kernels: bool,
}

impl BucketDevice {
    pub(super) fn new(comm: &Communicator, chosen: Chosen, dtypes: impl IntoIterator<Item = DType>) -> Result<BucketDevice> {
        let device = comm.exec.device(chosen.ordinal)?;
        // Prepares the kernels now, because that may wait for all work of the device.
        let prepared = dtypes.into_iter().filter(|&dtype| is_of_gradients(dtype)).try_for_each(|dtype| {
            device.prepare(dtype, Some(ReduceOp::Sum))?;
            let pairs = DType::ALL.iter().flat_map(|&other| [(dtype, other), (other, dtype)]);
            pairs.filter(|&(from, to)| scales(from, to)).try_for_each(|pair| device.prepare_to_scale(pair))
        });
        let has_kernels = prepared
            .inspect_err(|error| {
                crate::log::warn!(%error, "cannot prepare kernels: buckets are copied through the host, and gradients cannot be accumulated");
            })
            .is_ok();
        Ok(BucketDevice { own: Stream::new(&device)?, done: Mutex::new(Event::new(&device)?), device, chosen, has_kernels })
    }

    pub(super) fn allocate(&self, len: usize) -> Result<Memory> {
        // Not for peers: to map such memory waits for all streams, and hooks allocate between operations.
        Memory::new(&self.device, len.max(1))
    }

    /// Refuses memory that is not on this device.
    pub(super) fn expect_here(&self, comm: &Communicator, name: &str, at: Address) -> Result<()> {
        match comm.exec.locate(std::ptr::without_provenance(at as usize))? {
            Some(device) if device.id() == self.device.id() => Ok(()),
            Some(device) => {
                let why = format!("{name} is on {}, and the reducer on {}", device.name(), self.device.name());
                Err(Error::Unsupported { what: "a tensor on another device", why })
            }
            None => Err(ReducerError::Place { name: name.to_owned(), on_device: true }.into()),
        }
    }

    /// Returns the caller's stream. Fails while it is captured into a graph.
    fn stream(&self) -> Result<StreamId> {
        if self.device.capture(self.chosen.stream)?.is_some() {
            let why = "the other ranks take part on their hosts; run the step outside of the capture".to_owned();
            return Err(Error::Unsupported { what: "a reducer's step in a CUDA graph", why });
        }
        Ok(self.chosen.stream)
    }

    /// Records the event in the caller's stream.
    fn mark(&self, event: &Event) -> Result<()> {
        event.record(self.stream()?)
    }

    /// Waits until the caller's stream has completed all its work, even after errors. Returns
    /// whether it has.
    pub(super) fn drain(&self) -> bool {
        drain(&self.done.lock(), self.chosen.stream)
    }

    /// Waits until the caller's stream has completed all its work.
    pub(super) fn catch_up(&self, comm: &Communicator) -> Result<()> {
        let done = self.done.lock();
        self.mark(&done)?;
        comm.exec.until_done(&done)
    }

    /// Makes the reducer's stream wait for another one, if both are known.
    pub(super) fn wait_for(&self, stream: Option<&Arc<cudarc::driver::CudaStream>>) -> Result<()> {
        let Some((own, stream)) = self.keeps().zip(stream) else { return Ok(()) };
        own.join(stream).map_err(|error| Error::Device {
            device: own.context().name().unwrap_or_default(),
            doing: "making one stream wait for another",
            problem: error.to_string(),
        })
    }

    /// Returns the caller's stream as cudarc's type.
    pub(super) fn keeps(&self) -> Option<&Arc<cudarc::driver::CudaStream>> {
        self.chosen.keeps.as_ref()
    }
}

/// Work for the caller's stream.
///
/// # Safety
///
/// For all methods: the memory is on the device, has the given length, and stays until the stream
/// has passed the work. Until then nothing else writes it, or reads what is written.
impl BucketDevice {
    pub(super) unsafe fn copy(&self, from: Address, to: Address, len: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
        if len > 0 { unsafe { self.device.copy(self.stream()?, from, to, len) } } else { Ok(()) }
    }

    pub(super) unsafe fn zero(&self, at: Address, len: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
        if len > 0 { unsafe { self.device.zero(self.stream()?, at, len) } } else { Ok(()) }
    }

    /// Adds `count` elements at `from` to those at `to`.
    pub(super) unsafe fn add(&self, dtype: DType, from: Address, to: Address, count: usize) -> Result<()> {
        let (sources, targets) = (&[to, from][..], &[to][..]);
        let reduction = Reduction { dtype, redop: ReduceOp::Sum, sources, targets, count, divisor: 1 };
        // SAFETY: as promised by the caller.
        if count > 0 { unsafe { self.device.reduce(self.stream()?, &reduction) } } else { Ok(()) }
    }

    /// Multiplies the elements at `at`. Without kernels, the stream has completed all earlier work on
    /// them, and the work is done when this returns.
    pub(super) unsafe fn scale_in_turn(
        &self,
        comm: &Communicator,
        dtype: DType,
        at: Address,
        count: usize,
        factor: f64,
    ) -> Result<()> {
        let scaling = Scaling { dtypes: (dtype, dtype), source: at, target: at, count, factor };
        // SAFETY: as promised by the caller.
        unsafe { self.scale_on(comm, self.stream()?, &scaling) }
    }
}

/// Work of the reducer's thread, or of a caller of the reducer while that thread has no job. These
/// methods return when the work is done, except for [`scale`](BucketDevice::scale).
///
/// # Safety
///
/// For all methods: the memory is on the device, or on the host where the method says so, and has
/// the given length. Earlier writes to it are complete, and nothing else uses it during the call.
/// After an error, host memory may still be written.
impl BucketDevice {
    /// Copies to host memory.
    pub(super) unsafe fn fetch(&self, comm: &Communicator, from: Address, to: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.device.copy_out(self.own.id, from, to, len)? };
        self.finish(comm)
    }

    /// Copies from host memory.
    pub(super) unsafe fn bring(&self, comm: &Communicator, from: *const u8, to: Address, len: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.device.copy_in(self.own.id, from, to, len)? };
        self.finish(comm)
    }

    /// Enqueues a scaling. Later calls find its result. It is done after a later one that returns when
    /// its work is done, or after [`finish`](BucketDevice::finish).
    pub(super) unsafe fn scale(&self, comm: &Communicator, scaling: &Scaling) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.scale_on(comm, self.own.id, scaling) }
    }

    /// Scales by a kernel on a stream, or on the host if the device has no kernels.
    unsafe fn scale_on(&self, comm: &Communicator, stream: StreamId, scaling: &Scaling) -> Result<()> {
        let Scaling { dtypes, source, target, count, factor } = *scaling;
        if count == 0 {
            return Ok(());
        }
        if self.has_kernels {
            // SAFETY: as promised by the caller.
            return unsafe { self.device.scale(stream, scaling) };
        }
        let bytes = [dtypes.0, dtypes.1].map(|dtype| count * dtype.size());
        // Words, so that the elements are aligned.
        let [mut from, mut to] = bytes.map(|bytes| vec![0u64; bytes.div_ceil(8)]);
        // SAFETY: the vectors have room for `count` elements, and the caller promises the rest.
        let result = unsafe {
            self.fetch(comm, source, from.as_mut_ptr().cast(), bytes[0]).and_then(|()| {
                scale_to(dtypes, from.as_ptr().cast(), to.as_mut_ptr().cast(), count, factor);
                self.bring(comm, to.as_ptr().cast(), target, bytes[1])
            })
        };
        // After an error the device may still be copying: the memory must not be freed.
        result.inspect_err(|_| std::mem::forget((from, to)))
    }

    /// Waits until the work is done.
    pub(super) fn finish(&self, comm: &Communicator) -> Result<()> {
        let done = self.done.lock();
        done.record(self.own.id)?;
        comm.exec.until_done(&done)
    }

    pub(super) unsafe fn all_reduce(
        &self,
        comm: &Communicator,
        (dtype, redop): (DType, ReduceOp),
        at: Address,
        count: usize,
    ) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.in_place(comm, at, Call { redop: Some(redop), count, ..Call::raw(Op::AllReduce, dtype) }) }
    }

    pub(super) unsafe fn broadcast(
        &self,
        comm: &Communicator,
        dtype: DType,
        at: Address,
        count: usize,
        root: Rank,
    ) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.in_place(comm, at, Call { root, count, ..Call::raw(Op::Broadcast, dtype) }) }
    }

    unsafe fn in_place(&self, comm: &Communicator, at: Address, call: Call) -> Result<()> {
        let buffer = RawSliceMut::at(std::ptr::without_provenance_mut(at as usize));
        // SAFETY: as promised by the caller.
        unsafe { comm.exec.run_on_device(Call { send: buffer.as_const(), recv: buffer, ..call }, self.own.id) }
    }
}
