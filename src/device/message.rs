//! Sends and receives of device memory: streams copy them to pinned host memory and from it.

use std::sync::Arc;

use super::call::{DeviceCall, Path, device_call_to_keep};
use super::handshake::Handshake;
use super::state::{DeviceState, finish};
use crate::call::Call;
use crate::error::Result;
use crate::progress::CommState;
use crate::progress::state::DeviceMessage;
use crate::trace::PathTaken;

/// A message on its way from or to a device.
struct StagedMessage {
    call: Call,
    bound: Arc<DeviceCall>,
    /// Where it is on the host.
    memory: *mut u8,
}

/// Replaces the device memory of a call by host memory, when the stream has copied there what is
/// sent. Returns `None` if the call is not on a device.
pub(super) fn begin_message(devices: &DeviceState, state: &CommState, call: &mut Call) -> Result<Option<Box<dyn DeviceMessage>>> {
    let Some(bound) = device_call_to_keep(call) else { return Ok(None) };
    call.on_device = None;
    let whole = call.clone();
    if !devices.can_begin(&bound) {
        let begun = state.until_stream(call, &bound, None, |handshake| handshake.words().has_arrived(0));
        begun.inspect_err(|_| bound.release())?;
    }
    let mut memory = call.recv.ptr;
    match bound.path() {
        Some(Path::Pinned { send, recv, .. }) => {
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
    Ok(Some(Box::new(StagedMessage { call: whole, bound, memory })))
}

impl DeviceMessage for StagedMessage {
    fn end(&self, state: &CommState) -> Result<()> {
        if let Some(Path::Copied { memory, recv: Some(_), lane, to, .. }) = self.bound.path() {
            // SAFETY: the memory is as long as the caller's buffer, which is still the operation's.
            unsafe { lane.device.copy_in(lane.stream.id, self.memory, to.ptr.addr() as u64, to.len)? };
            let finished = finish(lane, self.call.timeout.unwrap_or(state.info.timeout));
            // The device may still copy from it.
            finished.inspect_err(|_| std::mem::forget(memory.clone()))?;
        }
        if let Some(handshake) = self.bound.handshake() {
            handshake.end(0);
        }
        Ok(())
    }

    fn has_left(&self) -> bool {
        self.bound.handshake().is_none_or(Handshake::has_left)
    }

    fn until_left(&self, state: &CommState) -> Result<()> {
        state.until_stream(&self.call, &self.bound, None, Handshake::has_left)
    }

    fn count(&self, state: &CommState) {
        match self.bound.path() {
            Some(Path::Pinned { .. }) => state.recording.counters.count(PathTaken::Whole),
            Some(Path::Copied { .. }) => state.recording.counters.count(PathTaken::Copied),
            _ => {}
        }
    }
}
