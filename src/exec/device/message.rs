//! Sends and receives of device memory: host memory takes its place.

use super::*;

/// A message on its way through host memory, which takes the place of the device's.
pub(crate) struct Staged {
    pub(super) memory: Arc<Segment>,
    /// Where it goes when it has been received.
    pub(super) to: RawSliceMut,
    pub(super) lent: Arc<Lent>,
    /// How long a copy may take.
    pub(super) timeout: Duration,
}

impl Staged {
    /// What a message needs before it is sent or received; `None` if it is not lent. Keep it until the message has ended.
    ///
    /// # Safety
    ///
    /// The call's buffers are lent until it has ended.
    pub(crate) unsafe fn begin(shared: &CommState, call: &mut Call) -> Result<Option<Staged>> {
        let Some(lent) = call.lent.take() else { return Ok(None) };
        shared.until_ready(call, &lent, None)?;
        let (send, recv) = (call.send, call.recv);
        let problem = Argument::TooMany { count: call.count };
        let memory = Segment::try_heap(send.len.max(recv.len).max(1)).ok_or(Error::Argument { op: call.op, problem })?;
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

    /// Takes what was received to the device.
    ///
    /// # Safety
    ///
    /// The buffer is still lent.
    pub(crate) unsafe fn finish(&self) -> Result<()> {
        if self.to.len == 0 {
            return Ok(());
        }
        let (from, to) = (self.memory.at(0), self.to.ptr.addr() as u64);
        // SAFETY: both are as long.
        self.copy(|device, stream| unsafe { device.copy_in(stream, from, to, self.to.len) })
    }

    /// Does so, and waits for it.
    fn copy(&self, copy: impl FnOnce(&dyn Device, StreamId) -> Result<()>) -> Result<()> {
        let device = &self.lent.device;
        let (stream, event) = (Stream::new(device)?, Event::new(device)?);
        copy(&**device, stream.id)?;
        event.record(stream.id).and_then(|()| until_done(&event, self.timeout)).inspect_err(|_| {
            // The device may still be at it: the memory is never freed.
            std::mem::forget(self.memory.clone());
        })
    }
}
