//! Buffers in the memory of a GPU.

use clap::ValueEnum;

use super::operation::Operation;

/// Where the buffers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Place {
    Cpu,
    Cuda,
}

impl Place {
    /// Returns whether the operation has this form here.
    pub(crate) fn has(self, op: Operation, in_place: bool) -> bool {
        use Operation::{AllReduce, Broadcast, Reduce};
        match op {
            _ if self == Place::Cpu => true,
            AllReduce => true,
            Broadcast | Reduce => in_place,
            _ => !in_place,
        }
    }
}

/// Returns an error if an operation cannot be measured on a GPU.
pub(crate) fn check(op: Operation) -> Result<(), String> {
    if !cfg!(feature = "cuda") {
        return Err("this kolo was built without the feature `cuda`".to_owned());
    }
    if op == Operation::SendRecv {
        return Err("send_recv is measured in host memory only".to_owned());
    }
    Ok(())
}

pub(crate) use implementation::OnDevice;

#[cfg(feature = "cuda")]
mod implementation {
    use std::ops::Range;
    use std::sync::Arc;

    use kolo::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};
    use kolo::{Communicator, DeviceBuffer, Error, ReduceOp, Result};

    use super::super::operation::Operation;
    use super::super::pattern::Pattern;

    /// The buffers on this rank's GPU, and the stream that orders their use.
    pub(crate) struct OnDevice<T: Pattern> {
        stream: Arc<CudaStream>,
        send: Buffer<T>,
        recv: Buffer<T>,
    }

    /// A buffer of either kind.
    enum Buffer<T: Pattern> {
        Private(CudaSlice<T>),
        Registered(DeviceBuffer<T>),
    }

    fn failed(doing: &'static str) -> impl Fn(DriverError) -> Error {
        move |error| Error::Device { device: "CUDA".to_owned(), doing, problem: error.to_string() }
    }

    impl<T: Pattern> Buffer<T> {
        fn new(comm: &Communicator, stream: &Arc<CudaStream>, len: usize, registered: bool) -> Result<Buffer<T>> {
            Ok(match registered {
                true => Buffer::Registered(comm.alloc_device(stream, len)?),
                // CUDA has no allocation of zero bytes.
                false => Buffer::Private(stream.alloc_zeros(len.max(1)).map_err(failed("allocating device memory"))?),
            })
        }

        fn take(&mut self, stream: &Arc<CudaStream>, from: &[T]) -> Result<()> {
            match self {
                Buffer::Private(slice) => stream.memcpy_htod(from, &mut slice.slice_mut(..from.len())),
                Buffer::Registered(buffer) => stream.memcpy_htod(from, &mut buffer.slice_mut(0..from.len())),
            }
            .map_err(failed("copying to the device"))
        }

        fn give(&self, stream: &Arc<CudaStream>, to: &mut [T]) -> Result<()> {
            match self {
                Buffer::Private(slice) => stream.memcpy_dtoh(&slice.slice(..to.len()), to),
                Buffer::Registered(buffer) => stream.memcpy_dtoh(&buffer.slice(0..to.len()), to),
            }
            .map_err(failed("copying from the device"))
        }
    }

    impl<T: Pattern> OnDevice<T> {
        /// Allocates the buffers. Ranks share the devices evenly, by rank.
        pub(crate) fn new(comm: &Communicator, sends: usize, recvs: usize, registered: bool) -> Result<OnDevice<T>> {
            // SAFETY: loading the library runs its initialisers, as in every program that uses
            // CUDA. Without this check cudarc panics where there is no library.
            if !unsafe { kolo::cudarc::driver::sys::is_culib_present() } {
                let why = "there is no CUDA driver here; `kolo doctor` says more".to_owned();
                return Err(Error::Unsupported { what: "device memory", why });
            }
            let devices = CudaContext::device_count().map_err(failed("counting devices"))?.max(1);
            let ordinal = comm.rank() % devices as usize;
            let context = CudaContext::new(ordinal).map_err(failed("opening a device"))?;
            let stream = context.new_stream().map_err(failed("making a stream"))?;
            let send = Buffer::new(comm, &stream, sends, registered)?;
            Ok(OnDevice { send, recv: Buffer::new(comm, &stream, recvs, registered)?, stream })
        }

        /// Fills the buffers from host memory.
        pub(crate) fn take(&mut self, send: &[T], recv: &[T]) -> Result<()> {
            if !send.is_empty() {
                self.send.take(&self.stream, send)?;
            }
            if !recv.is_empty() {
                self.recv.take(&self.stream, recv)?;
            }
            self.finish()
        }

        /// Copies the result to host memory.
        pub(crate) fn give(&self, recv: &mut [T]) -> Result<()> {
            if !recv.is_empty() {
                self.recv.give(&self.stream, recv)?;
            }
            self.finish()
        }

        /// Waits until the stream has no work left.
        pub(crate) fn finish(&self) -> Result<()> {
            self.stream.synchronize().map_err(failed("waiting for the stream"))
        }

        /// Enqueues an operation on the stream.
        pub(crate) fn call(
            &mut self,
            op: Operation,
            comm: &Communicator,
            how: (ReduceOp, usize),
            sends: Range<usize>,
            recvs: Range<usize>,
            in_place: bool,
        ) -> Result<()> {
            let OnDevice { stream, send, recv } = self;
            match (send, recv) {
                (Buffer::Private(send), Buffer::Private(recv)) => {
                    let (send, mut recv) = (send.slice(sends), recv.slice_mut(recvs));
                    call(op, comm, stream, how, &send, &mut recv, in_place)
                }
                (Buffer::Registered(send), Buffer::Registered(recv)) => {
                    let (send, mut recv) = (send.slice(sends), recv.slice_mut(recvs));
                    call(op, comm, stream, how, &send, &mut recv, in_place)
                }
                _ => unreachable!("both are of one kind"),
            }
        }
    }

    fn call<T: Pattern>(
        op: Operation,
        comm: &Communicator,
        stream: &CudaStream,
        (redop, root): (ReduceOp, usize),
        send: &impl kolo::cudarc::driver::DevicePtr<T>,
        recv: &mut impl kolo::cudarc::driver::DevicePtrMut<T>,
        in_place: bool,
    ) -> Result<()> {
        let (on, is_root) = (comm.on(stream), comm.rank() == root);
        match op {
            Operation::AllReduce if in_place => on.all_reduce(recv, redop),
            Operation::AllReduce => on.all_reduce_into(send, recv, redop),
            Operation::Broadcast => on.broadcast(recv, root),
            Operation::Reduce => on.reduce(recv, redop, root),
            Operation::AllGather => on.all_gather(send, recv),
            Operation::ReduceScatter => on.reduce_scatter(send, recv, redop),
            Operation::AllToAll => on.all_to_all(send, recv),
            Operation::Gather => on.gather(send, is_root.then_some(recv), root),
            Operation::Scatter => on.scatter(is_root.then_some(send), recv, root),
            Operation::Barrier => on.barrier(),
            Operation::SendRecv => unreachable!("refused by `check`"),
        }
    }
}

/// Stands in for buffers on a GPU. None is ever made: `check` refuses them.
#[cfg(not(feature = "cuda"))]
mod implementation {
    use std::convert::Infallible;
    use std::marker::PhantomData;
    use std::ops::Range;

    use kolo::{Communicator, Error, ReduceOp, Result};

    use super::super::operation::Operation;

    pub(crate) struct OnDevice<T> {
        never: Infallible,
        elements: PhantomData<T>,
    }

    impl<T> OnDevice<T> {
        pub(crate) fn new(_: &Communicator, _: usize, _: usize, _: bool) -> Result<OnDevice<T>> {
            Err(Error::Unsupported { what: "device memory", why: "kolo was built without the feature `cuda`".to_owned() })
        }

        pub(crate) fn take(&mut self, _: &[T], _: &[T]) -> Result<()> {
            match self.never {}
        }

        pub(crate) fn give(&self, _: &mut [T]) -> Result<()> {
            match self.never {}
        }

        pub(crate) fn finish(&self) -> Result<()> {
            match self.never {}
        }

        pub(crate) fn call(
            &mut self,
            _: Operation,
            _: &Communicator,
            _: (ReduceOp, usize),
            _: Range<usize>,
            _: Range<usize>,
            _: bool,
        ) -> Result<()> {
            let _ = self.elements;
            match self.never {}
        }
    }
}
