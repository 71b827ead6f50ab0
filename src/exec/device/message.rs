//! Sends and receives of device memory: streams copy them to pinned host memory and from it.

use std::sync::Arc;

use crate::error::Result;
use crate::exec::call::Call;
use crate::exec::device_state::finish;
use crate::exec::lent::{Gate, Lent, Path};
use crate::exec::state::CommState;
use crate::trace::PathTaken;

/// A message on its way from or to a device.
pub(in crate::exec) struct MessageOnDevice {
    call: Box<Call>,
    lent: Arc<Lent>,
    /// Where it is on the host.
    memory: *mut u8,
}

impl MessageOnDevice {
    /// Replaces the device memory of a call by host memory, when the stream has copied there what is
    /// sent. Returns `None` if the call is not lent.
    pub(in crate::exec) fn begin(shared: &CommState, call: &mut Call) -> Result<Option<MessageOnDevice>> {
        let Some(lent) = call.lent.take() else { return Ok(None) };
        let whole = call.clone();
        if !shared.can_run_message(&lent) {
            let begun = shared.until_stream(call, &lent, None, |gate| gate.words().has_arrived(0));
            begun.inspect_err(|_| lent.release())?;
        }
        let mut memory = call.recv.ptr;
        match lent.path() {
            Some(Path::Whole { send, recv, .. }) => {
                call.send.ptr = send.map_or(call.send.ptr, |pinned| pinned.host);
                call.recv.ptr = recv.map_or(call.recv.ptr, |pinned| pinned.host);
            }
            Some(Path::Copied { memory: copied, send, recv, .. }) => {
                call.send.ptr = send.map_or(call.send.ptr, |offset| copied.at(offset));
                call.recv.ptr = recv.map_or(call.recv.ptr, |offset| copied.at(offset));
                memory = call.recv.ptr;
            }
            _ => {}
        }
        Ok(Some(MessageOnDevice { call: Box::new(whole), lent, memory }))
    }

    /// The message has been sent or received: the stream goes on with it.
    pub(in crate::exec) fn end(&self, shared: &CommState) -> Result<()> {
        if let Some(Path::Copied { memory, recv: Some(_), lane, to, .. }) = self.lent.path() {
            // SAFETY: the memory is as long as the caller's buffer, which is still lent.
            unsafe { lane.device.copy_in(lane.stream.id, self.memory, to.ptr.addr() as u64, to.len)? };
            let finished = finish(lane, self.call.timeout.unwrap_or(shared.info.timeout));
            // The device may still copy from it.
            finished.inspect_err(|_| std::mem::forget(memory.clone()))?;
        }
        if let Some(gate) = self.lent.gate() {
            gate.end(0);
        }
        Ok(())
    }

    /// Whether the stream has left the message. It may wait for the end of others before.
    pub(in crate::exec) fn has_left(&self) -> bool {
        self.lent.gate().is_none_or(Gate::has_left)
    }

    /// Waits until the stream has left the message, of which [`MessageOnDevice::has_left`] has said
    /// that it has not.
    pub(in crate::exec) fn until_left(&self, shared: &CommState) -> Result<()> {
        shared.until_stream(&self.call, &self.lent, None, Gate::has_left)
    }

    /// Counts the message, which has ended.
    pub(in crate::exec) fn count(&self, shared: &CommState) {
        match self.lent.path() {
            Some(Path::Whole { .. }) => shared.recording.counters.count(PathTaken::Whole),
            Some(Path::Copied { .. }) => shared.recording.counters.count(PathTaken::Copied),
            _ => {}
        }
    }
}
