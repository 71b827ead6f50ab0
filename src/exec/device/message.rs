//! Sends and receives of device memory, through host memory.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::RawSliceMut;
use crate::cuda::device::{Device, Event, Stream, StreamId};
use crate::error::{ArgumentError, Error, Result};
use crate::exec::call::Call;
use crate::exec::device_state::until_done;
use crate::exec::lent::Lent;
use crate::exec::state::CommState;
use crate::sys::Region;

/// A message in host memory, on its way from or to a device.
pub(in crate::exec) struct Staged {
    memory: Arc<Region>,
    /// Where the device wants what was received; empty for a send.
    to: RawSliceMut,
    lent: Arc<Lent>,
    /// How long a copy may take.
    timeout: Duration,
}

impl Staged {
    /// Replaces the device memory of a call by host memory, and copies there what is sent. Returns
    /// `None` if the call is not lent. The memory is the message's until that has ended.
    ///
    /// # Safety
    ///
    /// The call's buffers are lent until it has ended.
    pub(in crate::exec) unsafe fn begin(shared: &CommState, call: &mut Call) -> Result<Option<Staged>> {
        let Some(lent) = call.lent.take() else { return Ok(None) };
        shared.until_ready(call, &lent, None)?;
        let (send, recv) = (call.send, call.recv);
        let problem = ArgumentError::TooMany { count: call.count };
        let memory = Region::try_heap(send.len.max(recv.len).max(1)).ok_or(Error::Argument { op: call.op, problem })?;
        let timeout = call.timeout.unwrap_or(shared.info.timeout);
        let mut staged = Staged { memory: Arc::new(memory), to: RawSliceMut::EMPTY, lent, timeout };
        let [sends, receives] = staged.lent.on_device;
        let there = staged.memory.at(0);
        if sends {
            // SAFETY: there is room for it.
            staged.copy(|device, stream| unsafe { device.copy_out(stream, send.ptr.addr() as u64, there, send.len) })?;
            call.send.ptr = there;
        }
        if receives {
            staged.to = recv;
            call.recv.ptr = there;
        }
        Ok(Some(staged))
    }

    /// Copies what was received to the device.
    ///
    /// # Safety
    ///
    /// The buffer is still lent.
    pub(in crate::exec) unsafe fn finish(&self) -> Result<()> {
        if self.to.len == 0 {
            return Ok(());
        }
        let (from, to) = (self.memory.at(0), self.to.ptr.addr() as u64);
        // SAFETY: both have that length.
        self.copy(|device, stream| unsafe { device.copy_in(stream, from, to, self.to.len) })
    }

    /// Enqueues a copy and waits for it.
    fn copy(&self, copy: impl FnOnce(&dyn Device, StreamId) -> Result<()>) -> Result<()> {
        let device = &self.lent.device;
        let (stream, event) = (Stream::new(device)?, Event::new(device)?);
        copy(&**device, stream.id)?;
        event.record(stream.id).and_then(|()| until_done(&event, self.timeout)).inspect_err(|_| {
            // The device may still use the memory, so it is never freed.
            std::mem::forget(self.memory.clone());
        })
    }
}
