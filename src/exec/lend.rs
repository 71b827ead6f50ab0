//! Device memory and streams, from the side of the caller: a call finds its devices and takes its
//! turn in a stream.

use std::sync::Arc;

use super::call::Call;
use super::lent::Lent;
use super::raw::Raw;
use super::submit::Executor;
use crate::cuda;
use crate::cuda::device::{Device, Driver, Event, StreamId};
use crate::error::{Error, Result};
use crate::types::{DType, Op, ReduceOp};

/// The kernel of a call on a device. A copy is the bitwise or of one source, in the integer of the
/// element's size: other reductions may change the payload of a NaN. Bytes become bools by a maximum.
pub(super) fn kernel(call: &Call) -> (DType, ReduceOp) {
    match (call.redop, call.dtype) {
        (Some(redop), dtype) => (dtype, redop),
        (None, DType::Bool) => (DType::Bool, ReduceOp::Max),
        (None, dtype) => copy_kernel(dtype),
    }
}

/// The kernel that copies elements of a type with all their bits.
pub(super) fn copy_kernel(dtype: DType) -> (DType, ReduceOp) {
    let integer = match dtype.size() {
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        _ => DType::U64,
    };
    (integer, ReduceOp::BitOr)
}

/// No stream, and CUDA's default stream.
const NULL: StreamId = StreamId(0);

impl Executor {
    /// The devices of this process, looked for at the first use; `None` if the communicator has
    /// none.
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        let devices = || if self.state.settings.devices { cuda::driver() } else { None };
        self.state.driver.get_or_init(devices).as_ref()
    }

    /// Passes the devices on to another communicator of this process, which then need not look for
    /// them.
    pub(crate) fn pass_devices_on(&self, other: &Executor) {
        if let Some(driver) = self.state.driver.get() {
            let _ = other.state.driver.set(driver.clone());
        }
    }

    /// The device with this number in this process.
    pub(crate) fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        self.driver().ok_or_else(|| self.no_devices("device memory"))?.device(ordinal)
    }

    /// Why this communicator has no devices.
    fn no_devices(&self, what: &'static str) -> Error {
        let why = match (cfg!(feature = "cuda"), self.state.settings.devices) {
            (false, _) => "this kolo was built without the feature `cuda`",
            (true, false) => "rank 0 found no driver on its machine, or KOLO_DEVICES (or the setting `devices`) is none there",
            (true, true) => "there is no CUDA driver here; `kolo doctor` says more",
        };
        Error::Unsupported { what, why: why.to_owned() }
    }

    /// Finds out whether the buffers of a call are on a device. If so, or if there is a stream, the
    /// call will take its turn in the stream. A failure leaves the communicator usable: no other rank
    /// has seen the call yet.
    #[inline(always)]
    pub(crate) fn lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        // Known after the first call.
        let has_no_devices = matches!(self.state.driver.get(), Some(None));
        if has_no_devices && stream == NULL { Ok(()) } else { self.look_and_lend(call, stream) }
    }

    #[inline(never)]
    fn look_and_lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        self.try_to_lend(call, stream).map_err(|error| match error {
            Error::Device { .. } => Error::Unsupported { what: "a call on a device", why: error.to_string() },
            error => error,
        })
    }

    fn try_to_lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        let Some(driver) = self.driver() else {
            return if stream == NULL { Ok(()) } else { Err(self.no_devices("a stream")) };
        };
        let locate = |ptr: *const u8, len: usize| if len > 0 { driver.locate(ptr) } else { Ok(None) };
        let send = locate(call.send.ptr, call.send.len)?;
        let recv = locate(call.recv.ptr, call.recv.len)?;
        let on_device = [send.is_some(), recv.is_some()];
        let device = match (send, recv) {
            (Some(send), Some(recv)) if send.id() != recv.id() => {
                let why = format!("one is on {}, the other on {}; copy one of them", send.name(), recv.name());
                return Err(Error::Unsupported { what: "a call with buffers on two devices", why });
            }
            (Some(device), _) | (None, Some(device)) => device,
            (None, None) if stream == NULL => return Ok(()),
            (None, None) => driver.device_of(stream)?,
        };
        let capture = device.capture(stream)?;
        if capture.is_some() && call.source.is_some() {
            let why = "the place for the source rank is valid only until the call returns; receive from a given rank".to_owned();
            return Err(Error::Unsupported { what: "a receive from any rank in a CUDA graph", why });
        }
        // On this thread: it may wait for streams, and none waits for this call yet.
        let (dtype, redop) = if self.state.asks(call) { kernel(call) } else { copy_kernel(call.dtype) };
        let prepared = if on_device.contains(&true) { device.prepare(dtype, Some(redop)) } else { Ok(()) };
        let has_kernels = prepared
            .inspect_err(|error| crate::log::warn!(%error, "there are no kernels: buffers on this device pass through the host"))
            .is_ok();
        call.lent = Some(Arc::new(Lent::new(device, on_device, (stream, capture), has_kernels)));
        Ok(())
    }

    /// Runs a call on the buffers of a device, in the order of a stream that waits for nothing
    /// else, and waits for its end.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until this returns, and nothing else uses them.
    pub(crate) unsafe fn run_on_device(&self, raw: &Raw<'_>, stream: StreamId) -> Result<()> {
        let mut call = self.prepare(raw)?;
        self.lend(&mut call, stream)?;
        self.state.check_process(call.op)?;
        if call.lent.is_none() {
            // SAFETY: passed on.
            return unsafe { self.submit_checked(&call) };
        }
        Ok(self.enqueue(std::slice::from_ref(&call), false, || self.queue_call(call.clone()))?.wait()?)
    }

    /// Waits for what the caller gave its stream, as an operation would: until the deadline of
    /// operations, or until the communicator ends. To be called while no operation is in flight.
    pub(crate) fn until_done(&self, event: &Event) -> Result<()> {
        let result = self.state.until_event(event, self.state.info.timeout, Op::AllReduce);
        result.map_err(|error| match error {
            Error::Aborted { .. } => self.fail(error),
            error => error,
        })
    }

    /// The device that an address is on; `None` for host memory.
    pub(crate) fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        self.driver().map_or(Ok(None), |driver| driver.locate(address))
    }
}
