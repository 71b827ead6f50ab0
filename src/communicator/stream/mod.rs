//! Collectives on the memory of GPUs, from Rust: on slices of cudarc, in the order of a stream.

#[cfg(test)]
mod on_a_gpu;

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

#[cfg(test)]
pub(crate) use on_a_gpu::on_one_gpu;

use super::Communicator;
use crate::cuda::device::{Address, Memory, StreamId};
use crate::error::{Argument, Error, Result};
use crate::exec::Call;
use crate::exec::Raw;
use crate::types::{Element, Op, Rank, ReduceOp};

/// The collectives of a communicator, in the order of a CUDA stream; see [`Communicator::on`].
#[derive(Clone, Copy)]
pub struct OnStream<'a> {
    comm: &'a Communicator,
    stream: &'a CudaStream,
}

impl Communicator {
    /// The collectives on buffers in the memory of GPUs, in the order of a stream, as NCCL's are: a call is given to the stream
    /// and returns at once. It reads its buffers after what the stream was given before; what the stream is given afterwards finds
    /// the result. A failure is said by the next call, and streams go on, with anything in the buffers. (Where streams cannot wait
    /// for the host, calls return when they are done, with their own failures.)
    ///
    /// Buffers are slices of [`cudarc`](crate::cudarc), or of [`Communicator::alloc_device`], which are quickest. Other ranks may give
    /// buffers in host memory to the same operation. Several ranks may share a GPU.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kolo::cudarc::driver::CudaContext;
    ///
    /// let comm = kolo::Communicator::from_env()?;
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let mut gradients = stream.clone_htod(&vec![comm.rank() as f32; 1 << 20])?;
    /// comm.on(&stream).all_reduce(&mut gradients, kolo::ReduceOp::Average)?;
    /// let average = stream.clone_dtoh(&gradients)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on<'a>(&'a self, stream: &'a CudaStream) -> OnStream<'a> {
        OnStream { comm: self, stream }
    }

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

/// An address of the device, for a call.
fn ptr(address: Address) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}

impl OnStream<'_> {
    /// Gives a call to the stream.
    ///
    /// # Safety
    ///
    /// The buffers have as many elements as the call says, and whoever lent them keeps to the order of the stream.
    unsafe fn run(&self, raw: &Raw<'_>) -> Result<()> {
        let mut call: Call = self.comm.exec.prepare(raw)?;
        self.comm.exec.lend(&mut call, StreamId(self.stream.cu_stream().addr()))?;
        // SAFETY: passed on.
        unsafe { self.comm.exec.run_prepared(&call) }
    }

    fn raw<T: Element>(op: Op, count: usize) -> Raw<'static> {
        Raw { count, ..Raw::new(op, T::DTYPE) }
    }

    /// In place.
    fn within<T: Element>(&self, raw: Raw<'_>, buf: &mut impl DevicePtrMut<T>) -> Result<()> {
        let (address, _until_given) = buf.device_ptr_mut(self.stream);
        // SAFETY: one buffer of as many elements as the caller has checked, which cudarc orders by streams.
        unsafe { self.run(&Raw { send: ptr(address), recv: ptr(address), ..raw }) }
    }

    /// From one buffer to another.
    fn between<T: Element>(&self, raw: Raw<'_>, send: &impl DevicePtr<T>, recv: &mut impl DevicePtrMut<T>) -> Result<()> {
        let (from, _until_read) = send.device_ptr(self.stream);
        let (to, _until_written) = recv.device_ptr_mut(self.stream);
        // SAFETY: as above.
        unsafe { self.run(&Raw { send: ptr(from), recv: ptr(to), ..raw }) }
    }

    fn expect(op: Op, buffer: &'static str, expected: usize, given: usize) -> Result<()> {
        let problem = Argument::Length { buffer, expected, given };
        if expected == given { Ok(()) } else { Err(Error::Argument { op, problem }) }
    }

    /// Elements of each rank's block in a buffer of one for each.
    fn block(&self, op: Op, buffer: &'static str, given: usize) -> Result<usize> {
        let world_size = self.comm.world_size();
        let problem = Argument::Blocks { buffer, given, world_size };
        if given.is_multiple_of(world_size) { Ok(given / world_size) } else { Err(Error::Argument { op, problem }) }
    }

    /// Elements of one rank's block, and of all.
    fn counted(&self, op: Op, counts: &[usize]) -> Result<(usize, usize)> {
        let refuse = |problem| Error::Argument { op, problem };
        let (given, world_size) = (counts.len(), self.comm.world_size());
        if given != world_size {
            return Err(refuse(Argument::Counts { given, world_size }));
        }
        let all = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        Ok((counts[self.comm.rank()], all.ok_or(refuse(Argument::TooMany { count: usize::MAX }))?))
    }

    /// As [`Communicator::all_reduce`].
    pub fn all_reduce<T: Element>(&self, buf: &mut impl DevicePtrMut<T>, op: ReduceOp) -> Result<()> {
        self.within(Raw { redop: Some(op), ..Self::raw::<T>(Op::AllReduce, buf.len()) }, buf)
    }

    /// As [`Communicator::all_reduce_into`].
    pub fn all_reduce_into<T: Element>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        Self::expect(Op::AllReduce, "receive", send.len(), recv.len())?;
        self.between(Raw { redop: Some(op), ..Self::raw::<T>(Op::AllReduce, send.len()) }, send, recv)
    }

    /// As [`Communicator::broadcast`].
    pub fn broadcast<T: Element>(&self, buf: &mut impl DevicePtrMut<T>, root: Rank) -> Result<()> {
        self.within(Raw { root, ..Self::raw::<T>(Op::Broadcast, buf.len()) }, buf)
    }

    /// As [`Communicator::reduce`].
    pub fn reduce<T: Element>(&self, buf: &mut impl DevicePtrMut<T>, op: ReduceOp, root: Rank) -> Result<()> {
        self.within(Raw { redop: Some(op), root, ..Self::raw::<T>(Op::Reduce, buf.len()) }, buf)
    }

    /// As [`Communicator::all_gather`].
    pub fn all_gather<T: Element>(&self, send: &impl DevicePtr<T>, recv: &mut impl DevicePtrMut<T>) -> Result<()> {
        Self::expect(Op::AllGather, "receive", send.len() * self.comm.world_size(), recv.len())?;
        self.between(Self::raw::<T>(Op::AllGather, send.len()), send, recv)
    }

    /// As [`Communicator::all_gather_v`].
    pub fn all_gather_v<T: Element>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        counts: &[usize],
    ) -> Result<()> {
        let (own, all) = self.counted(Op::AllGatherV, counts)?;
        Self::expect(Op::AllGatherV, "send", own, send.len())?;
        Self::expect(Op::AllGatherV, "receive", all, recv.len())?;
        self.between(Raw { recv_counts: Some(counts), ..Self::raw::<T>(Op::AllGatherV, 0) }, send, recv)
    }

    /// As [`Communicator::reduce_scatter_v`].
    pub fn reduce_scatter_v<T: Element>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let (own, all) = self.counted(Op::ReduceScatterV, counts)?;
        Self::expect(Op::ReduceScatterV, "send", all, send.len())?;
        Self::expect(Op::ReduceScatterV, "receive", own, recv.len())?;
        let raw = Raw { redop: Some(op), send_counts: Some(counts), ..Self::raw::<T>(Op::ReduceScatterV, 0) };
        self.between(raw, send, recv)
    }

    /// As [`Communicator::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(
        &self,
        send: &impl DevicePtr<T>,
        recv: &mut impl DevicePtrMut<T>,
        op: ReduceOp,
    ) -> Result<()> {
        let count = self.block(Op::ReduceScatter, "send", send.len())?;
        Self::expect(Op::ReduceScatter, "receive", count, recv.len())?;
        self.between(Raw { redop: Some(op), ..Self::raw::<T>(Op::ReduceScatter, count) }, send, recv)
    }

    /// As [`Communicator::all_to_all`].
    pub fn all_to_all<T: Element>(&self, send: &impl DevicePtr<T>, recv: &mut impl DevicePtrMut<T>) -> Result<()> {
        let count = self.block(Op::AllToAll, "send", send.len())?;
        Self::expect(Op::AllToAll, "receive", send.len(), recv.len())?;
        self.between(Self::raw::<T>(Op::AllToAll, count), send, recv)
    }

    /// As [`Communicator::all_to_all_v`].
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &impl DevicePtr<T>,
        send_counts: &[usize],
        recv: &mut impl DevicePtrMut<T>,
        recv_counts: &[usize],
    ) -> Result<()> {
        Self::expect(Op::AllToAllV, "send", self.counted(Op::AllToAllV, send_counts)?.1, send.len())?;
        Self::expect(Op::AllToAllV, "receive", self.counted(Op::AllToAllV, recv_counts)?.1, recv.len())?;
        let counts = (Some(send_counts), Some(recv_counts));
        self.between(Raw { send_counts: counts.0, recv_counts: counts.1, ..Self::raw::<T>(Op::AllToAllV, 0) }, send, recv)
    }

    /// As [`Communicator::gather`]: of the root, `recv` has a block for each rank; of others, none.
    pub fn gather<T: Element, R: DevicePtrMut<T>>(
        &self,
        send: &impl DevicePtr<T>,
        recv: Option<&mut R>,
        root: Rank,
    ) -> Result<()> {
        let raw = Raw { root, ..Self::raw::<T>(Op::Gather, send.len()) };
        match recv {
            Some(recv) => {
                Self::expect(Op::Gather, "receive", send.len() * self.comm.world_size(), recv.len())?;
                self.between(raw, send, recv)
            }
            None => {
                self.expect_other(Op::Gather, "receive", send.len(), root)?;
                let (from, _until_read) = send.device_ptr(self.stream);
                // SAFETY: as above, and nothing is received.
                unsafe { self.run(&Raw { send: ptr(from), ..raw }) }
            }
        }
    }

    /// As [`Communicator::scatter`]: of the root, `send` has a block for each rank; of others, none.
    pub fn scatter<T: Element, S: DevicePtr<T>>(
        &self,
        send: Option<&S>,
        recv: &mut impl DevicePtrMut<T>,
        root: Rank,
    ) -> Result<()> {
        let raw = Raw { root, ..Self::raw::<T>(Op::Scatter, recv.len()) };
        match send {
            Some(send) => {
                Self::expect(Op::Scatter, "send", recv.len() * self.comm.world_size(), send.len())?;
                self.between(raw, send, recv)
            }
            None => {
                self.expect_other(Op::Scatter, "send", recv.len(), root)?;
                let (to, _until_written) = recv.device_ptr_mut(self.stream);
                // SAFETY: as above, and nothing is sent.
                unsafe { self.run(&Raw { recv: ptr(to), ..raw }) }
            }
        }
    }

    /// Only the root needs the buffer that was not given.
    fn expect_other(&self, op: Op, buffer: &'static str, count: usize, root: Rank) -> Result<()> {
        let needed = if self.comm.rank() == root { count * self.comm.world_size() } else { 0 };
        Self::expect(op, buffer, needed, 0)
    }

    /// As [`Communicator::send`].
    pub fn send<T: Element>(&self, buf: &impl DevicePtr<T>, to: Rank) -> Result<()> {
        let (from, _until_read) = buf.device_ptr(self.stream);
        // SAFETY: as above, and nothing is received.
        unsafe { self.run(&Raw { send: ptr(from), root: to, ..Self::raw::<T>(Op::Send, buf.len()) }) }
    }

    /// As [`Communicator::recv`].
    pub fn recv<T: Element>(&self, buf: &mut impl DevicePtrMut<T>, from: Rank) -> Result<()> {
        let raw = Raw { root: from, ..Self::raw::<T>(Op::Recv, buf.len()) };
        let (to, _until_written) = buf.device_ptr_mut(self.stream);
        // SAFETY: as above, and nothing is sent.
        unsafe { self.run(&Raw { recv: ptr(to), ..raw }) }
    }

    /// As [`Communicator::send_recv`].
    pub fn send_recv<T: Element, U: Element>(
        &self,
        send: &impl DevicePtr<T>,
        to: Rank,
        recv: &mut impl DevicePtrMut<U>,
        from: Rank,
    ) -> Result<()> {
        let (source, _until_read) = send.device_ptr(self.stream);
        let raw = Raw { send: ptr(source), root: to, ..Self::raw::<T>(Op::Send, send.len()) };
        let mut sends = self.comm.exec.prepare(&raw)?;
        let count = recv.len();
        let (target, _until_written) = recv.device_ptr_mut(self.stream);
        let mut receives = self.comm.exec.prepare(&Raw { recv: ptr(target), root: from, ..Self::raw::<U>(Op::Recv, count) })?;
        let stream = StreamId(self.stream.cu_stream().addr());
        self.comm.exec.lend(&mut sends, stream)?;
        self.comm.exec.lend(&mut receives, stream)?;
        // SAFETY: two buffers of as many elements, which cudarc orders by streams.
        unsafe { self.comm.exec.run_prepared_together(vec![sends, receives]) }
    }

    /// As [`Communicator::barrier`]: the stream goes on when those of all ranks have come to it.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: a barrier touches no buffer.
        unsafe { self.run(&Self::raw::<u8>(Op::Barrier, 0)) }
    }
}
