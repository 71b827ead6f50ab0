//! What a call needs whose buffers are on a device, or that takes its turn in a stream.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::device::{Device, Event, Gate, StreamId};
use crate::error::Result;

/// The turn of a call in its caller's stream: when the stream has reached the call, and how it
/// waits for the call's end.
pub(crate) struct Lent {
    pub(super) device: Arc<dyn Device>,
    /// Whether the send and the receive buffer are the device's.
    pub(super) on_device: [bool; 2],
    /// The stream in which the call takes its turn.
    pub(super) stream: StreamId,
    /// Done when the stream has reached the call.
    pub(super) ready: Event,
    /// Where streams can wait for the end of the call; `None` if streams of this device cannot wait
    /// for the host.
    pub(super) gate: Option<Gate>,
    /// Whether the caller's stream waits at the gate.
    pub(super) is_closed: AtomicBool,
    /// Whether the device can reduce.
    pub(super) has_kernels: bool,
}

impl Lent {
    /// Has the caller's stream wait for the end of the call, if it can. Then the caller need not
    /// wait.
    pub(crate) fn close(&self) -> Result<bool> {
        let closed = self.close_on(self.stream)?;
        self.is_closed.store(closed, Ordering::Relaxed);
        Ok(closed)
    }

    /// Whether the caller's stream waits for the end of the call.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Whether the caller's stream has reached the call, or has failed and never will.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.is_done().unwrap_or(true)
    }

    /// Has a stream wait for the end of the call, if it can.
    pub(crate) fn close_on(&self, stream: StreamId) -> Result<bool> {
        self.gate.as_ref().map(|gate| gate.close(&*self.device, stream)).transpose().map(|closed| closed.is_some())
    }

    /// The call has ended: the streams that wait for it continue.
    pub(crate) fn open(&self) {
        if let Some(gate) = &self.gate {
            gate.open();
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("device", &self.device.name()).field("on_device", &self.on_device).finish_non_exhaustive()
    }
}
