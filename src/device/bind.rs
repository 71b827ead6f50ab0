//! A call finds the device of its buffers, and its place in a stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::DeviceCall;
use super::state::DeviceState;
use crate::call::{Call, Lengths};
use crate::cuda;
use crate::cuda::device::{Device, Driver, Event, StreamId};
use crate::error::{Error, Result};
use crate::progress::{CommState, Executor};
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

impl DeviceState {
    /// The devices of this process, looked for at the first use; `None` if the communicator has
    /// none.
    pub(super) fn driver(&self, state: &CommState) -> Option<&Arc<dyn Driver>> {
        let devices = || if state.settings.devices { cuda::driver() } else { None };
        // A larger communicator may have none, although this process has some.
        let driver = self.driver.get_or_init(devices).as_ref().filter(|_| state.settings.devices);
        if driver.is_none() {
            state.has_no_devices.store(true, Ordering::Relaxed);
        }
        driver
    }

    /// Finds out whether the buffers of a call are on a device. If so, or if there is a stream, the
    /// call will take its place in the stream.
    pub(super) fn try_to_bind(&self, state: &CommState, call: &mut Call, stream: StreamId) -> Result<()> {
        let Some(driver) = self.driver(state) else {
            return if stream == StreamId::DEFAULT { Ok(()) } else { Err(no_devices(state, "a stream")) };
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
            (None, None) if stream == StreamId::DEFAULT => return Ok(()),
            (None, None) => driver.device_of(stream)?,
        };
        let capture = device.capture(stream)?;
        if capture.is_some() && call.source.is_some() {
            let why = "the place for the source rank is valid only until the call returns; receive from a given rank".to_owned();
            return Err(Error::Unsupported { what: "a receive from any rank in a CUDA graph", why });
        }
        // On this thread: it may wait for streams, and none waits for this call yet.
        let (dtype, redop) = if state.asks(call) { kernel(call) } else { copy_kernel(call.dtype) };
        let prepared = if on_device.contains(&true) { device.prepare(dtype, Some(redop)) } else { Ok(()) };
        let has_kernels = prepared
            .inspect_err(|error| crate::log::warn!(%error, "there are no kernels: buffers on this device pass through the host"))
            .is_ok();
        call.on_device = Some(Arc::new(DeviceCall::new(device, on_device, (stream, capture), has_kernels)));
        Ok(())
    }
}

/// Why this communicator has no devices.
fn no_devices(state: &CommState, what: &'static str) -> Error {
    let why = match state.settings.devices {
        false => {
            "rank 0 found no driver on its machine, KOLO_DEVICES (or the setting `devices`) is none there, or a rank's kolo was \
             built without the feature `cuda`: rank 0's log names it"
        }
        true => "there is no CUDA driver here; `kolo doctor` says more",
    };
    Error::Unsupported { what, why: why.to_owned() }
}

/// For a reducer with gradients on a device.
impl Executor {
    fn driver(&self) -> Option<&Arc<dyn Driver>> {
        DeviceState::of(&self.state).driver(&self.state)
    }

    /// The device with this number in this process.
    pub(crate) fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        self.driver().ok_or_else(|| no_devices(&self.state, "device memory"))?.device(ordinal)
    }

    /// The device that an address is on; `None` for host memory.
    pub(crate) fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        self.driver().map_or(Ok(None), |driver| driver.locate(address))
    }

    /// Runs a call on the buffers of a device, in the order of a stream that waits for nothing
    /// else, and waits for its end.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until this returns, and nothing else uses them.
    pub(crate) unsafe fn run_on_device(&self, mut call: Call, stream: StreamId) -> Result<()> {
        self.check(&mut call, Lengths::Counted)?;
        self.state.bind(&mut call, stream)?;
        self.state.check_process(call.op)?;
        if call.on_device.is_none() {
            // SAFETY: passed on.
            return unsafe { self.submit_checked(&call) };
        }
        let work = self.enqueue_one(&call, false, false)?;
        self.wait_for(call.op, &work.expect("its end is not left to its stream"))
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
}
