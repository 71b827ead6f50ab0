//! The form of every operation on device memory: it is given to a CUDA stream.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::communicator::operations::operations;
use crate::communicator::{Communicator, calls};
use crate::cuda::device::StreamId;
use crate::error::Result;
use crate::types::{Element, Rank, ReduceOp, Tag};

/// The operations of a communicator in the order of a CUDA stream; see [`Communicator::on`].
#[derive(Clone, Copy, Debug)]
pub struct OnStream<'a> {
    comm: &'a Communicator,
    stream: &'a CudaStream,
}

impl Communicator {
    /// Returns the operations on device memory in the order of a CUDA stream, as those of NCCL: a
    /// call is enqueued on the stream and returns at once. It reads its buffers after the earlier
    /// work of the stream, and later work of the stream finds the result. The first call of more than
    /// 64 KiB waits for the other ranks.
    ///
    /// The call after a failed operation reports the failure. The stream continues, and the buffers
    /// hold anything. Where streams cannot wait for the host, a call returns when its operation has
    /// ended, and reports its own failure.
    ///
    /// Buffers are slices of [`cudarc`](crate::cudarc), or of [`Communicator::alloc_device`], which
    /// are the fastest. Other ranks may give host memory to the same operation. Several ranks may
    /// share a GPU.
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
}

/// The documentation of a method.
macro_rules! enqueues {
    ($name:ident) => {
        concat!(
            "Gives [`Communicator::",
            stringify!($name),
            "`] on device memory to the stream; see [`Communicator::on`] for when it ",
            "returns and how it fails.\n\n",
            "# Errors\n\nThose of every operation (see [`Communicator`](Communicator#errors)), of this call or of an earlier one ",
            "of the stream; [`Error::Unsupported`](crate::Error::Unsupported) if the device or the stream cannot take part."
        )
    };
}

/// One method, by the buffers of an operation. The guards of cudarc order what other streams do
/// with the buffers before and after.
macro_rules! on_stream {
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| () => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name(&self) -> Result<()> {
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($buf:ident: in_place $(, $arg:ident: $value:ident)*) => $call:expr) => {
        on_stream! { @one $name |$comm| ($buf $(, $arg: $value)*) => $call }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($buf:ident: output $(, $arg:ident: $value:ident)*) => $call:expr) => {
        on_stream! { @one $name |$comm| ($buf $(, $arg: $value)*) => $call }
    };
    (@one $name:ident |$comm:ident| ($buf:ident $(, $arg:ident: $value:ident)*) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element>(&self, $buf: &mut impl DevicePtrMut<T> $(, $arg: argument!($value))*) -> Result<()> {
            let $comm = self.comm;
            _ = $comm;
            let ($buf, _until_written) = self.writes($buf);
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: input, $recv:ident: output $(, $arg:ident: $value:ident)*) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element>(
            &self, $send: &impl DevicePtr<T>, $recv: &mut impl DevicePtrMut<T> $(, $arg: argument!($value))*
        ) -> Result<()> {
            let $comm = self.comm;
            _ = $comm;
            let ($send, _until_read) = self.reads($send);
            let ($recv, _until_written) = self.writes($recv);
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: input, $sends:ident: counts, $recv:ident: output, $recvs:ident: counts) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element>(
            &self, $send: &impl DevicePtr<T>, $sends: &[usize], $recv: &mut impl DevicePtrMut<T>, $recvs: &[usize]
        ) -> Result<()> {
            let $comm = self.comm;
            let ($send, _until_read) = self.reads($send);
            let ($recv, _until_written) = self.writes($recv);
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: input, $recv:ident: root_output $(, $arg:ident: $value:ident)*) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element, R: DevicePtrMut<T>>(
            &self, $send: &impl DevicePtr<T>, $recv: Option<&mut R> $(, $arg: argument!($value))*
        ) -> Result<()> {
            let $comm = self.comm;
            let ($send, _until_read) = self.reads($send);
            let ($recv, _until_written): (_, Option<_>) = $recv.map(|recv| self.writes(recv)).unzip();
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident|
        ($send:ident: root_input, $recv:ident: output $(, $arg:ident: $value:ident)*) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element, S: DevicePtr<T>>(
            &self, $send: Option<&S>, $recv: &mut impl DevicePtrMut<T> $(, $arg: argument!($value))*
        ) -> Result<()> {
            let $comm = self.comm;
            let ($send, _until_read): (_, Option<_>) = $send.map(|send| self.reads(send)).unzip();
            let ($recv, _until_written) = self.writes($recv);
            self.submit($call)
        }
    };
    // After those with a second buffer, which it would match as well.
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($buf:ident: input $(, $arg:ident: $value:ident)*) => $call:expr) => {
        #[doc = enqueues!($name)]
        pub fn $name<T: Element>(&self, $buf: &impl DevicePtr<T> $(, $arg: argument!($value))*) -> Result<()> {
            let ($buf, _until_read) = self.reads($buf);
            self.submit($call)
        }
    };
}

/// The type of an argument that is no buffer.
macro_rules! argument {
    (counts) => {
        &[usize]
    };
    ($value:ident) => {
        $value
    };
}

impl OnStream<'_> {
    /// Where a buffer is that the stream will read, ordered by cudarc until the guard is dropped.
    fn reads<'a, T: Element>(&'a self, buf: &'a impl DevicePtr<T>) -> (RawSlice, SyncOnDrop<'a>) {
        let len = buf.len() * size_of::<T>();
        let (address, until_read) = buf.device_ptr(self.stream);
        (RawSlice { ptr: std::ptr::without_provenance(address as usize), len }, until_read)
    }

    /// Where a buffer is that the stream will write, ordered by cudarc until the guard is dropped.
    fn writes<'a, T: Element>(&'a self, buf: &'a mut impl DevicePtrMut<T>) -> (RawSliceMut, SyncOnDrop<'a>) {
        let len = buf.len() * size_of::<T>();
        let (address, until_written) = buf.device_ptr_mut(self.stream);
        (RawSliceMut { ptr: std::ptr::without_provenance_mut(address as usize), len }, until_written)
    }

    /// Checks a call and gives it its place in the order of the stream.
    fn bind(&self, call: Call) -> Result<Call> {
        let mut call = call.check(self.comm.rank(), self.comm.world_size())?;
        self.comm.exec.state.bind(&mut call, StreamId(self.stream.cu_stream().addr()))?;
        Ok(call)
    }

    fn submit(&self, call: Call) -> Result<()> {
        let call = self.bind(call)?;
        // SAFETY: every caller is a public method that made `call` from slices of cudarc, which are
        // as long as they say. cudarc keeps them until the stream has passed the call, and
        // orders other uses by streams.
        unsafe { self.comm.exec.submit_checked(&call) }
    }

    operations!(on_stream);

    /// Gives [`Communicator::send_recv`] on device memory to the stream; see [`Communicator::on`]
    /// for when it returns and how it fails.
    ///
    /// # Errors
    ///
    /// As for [`OnStream::send`].
    pub fn send_recv<T: Element, U: Element>(
        &self,
        send: &impl DevicePtr<T>,
        to: Rank,
        recv: &mut impl DevicePtrMut<U>,
        from: Rank,
    ) -> Result<()> {
        let (send, _until_read) = self.reads(send);
        let (recv, _until_written) = self.writes(recv);
        let calls = vec![self.bind(calls::send::<T>(send, to))?, self.bind(calls::recv::<U>(recv, from))?];
        // SAFETY: as in `submit`.
        unsafe { self.comm.exec.submit_together_checked(calls) }
    }
}
