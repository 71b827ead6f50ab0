//! The part of a call that is on a device: its buffers are there, or it has its place in a stream.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::handshake::Handshake;
use super::host_area::HostArea;
use crate::buffer::RawSliceMut;
use crate::call::{Call, Counts, OnDevice};
use crate::cuda::device::{Address, Device, Event, StreamId};
use crate::cuda::lanes::Lane;
use crate::cuda::peers::{Announcement, Peers};
use crate::cuda::pinned::PinnedBuffer;
use crate::cuda::rounds::Cut;
use crate::error::{Error, Result};
use crate::sys::Region;

/// A call on a device or in a stream. All of its work is enqueued when it is called. The host then
/// runs it by reading and writing memory.
pub(crate) struct DeviceCall {
    pub(super) device: Arc<dyn Device>,
    /// Whether the send and the receive buffer are the device's.
    pub(super) on_device: [bool; 2],
    /// The caller's stream.
    pub(super) stream: StreamId,
    /// Whether the device can reduce.
    pub(super) has_kernels: bool,
    /// The number of the capture, if a CUDA graph captures the work of the caller's stream. The call
    /// runs each time that the graph is replayed.
    pub(super) capture: Option<u64>,
    /// Set when the call is enqueued.
    pub(super) enqueued: OnceLock<Enqueued>,
    /// Whether only the caller's stream waits for the call's end.
    is_unattended: AtomicBool,
}

/// The work of a call in a stream, and how the host runs it.
pub(super) struct Enqueued {
    pub(super) path: Path,
    /// The stream that does the work: the caller's, or kolo's own.
    pub(super) stream: StreamId,
    /// Recorded on kolo's own stream after the call, if a graph captures it.
    pub(super) captured_end: Option<Event>,
    /// `None` where the host copies, because streams cannot wait for it.
    pub(super) handshake: Option<Handshake>,
}

/// How a call's data passes.
pub(super) enum Path {
    /// It has no data on the device: only its place in the order of the stream.
    OrderOnly,
    /// Nothing is left to do for the host: the stream copies from one buffer to the other.
    DeviceCopy,
    /// As a whole through pinned memory: where what is sent is, where what is received comes, and whether
    /// kernels copy it. If not, copy engines do.
    Pinned { send: Option<PinnedAt>, recv: Option<PinnedAt>, by_kernel: bool },
    /// In rounds through host memory.
    Staged { cut: Cut, area: Arc<HostArea> },
    /// In rounds, where the buffers are or through areas on the device.
    Direct { cut: Cut, peers: Arc<Peers>, announced: Box<Announcement> },
    /// By one kernel, which copies what its rank sends to a slot, and reduces the slots of all ranks.
    OneShot { peers: Arc<Peers> },
    /// As a whole through host memory that the host copies, because streams cannot wait for it.
    Copied { memory: Arc<Region>, send: Option<usize>, recv: Option<usize>, lane: Arc<Lane>, to: RawSliceMut },
}

/// A place in pinned memory.
#[derive(Clone, Copy)]
pub(super) struct PinnedAt {
    /// Where the host finds it.
    pub(super) host: *mut u8,
    /// Where the device finds it.
    pub(super) device: Address,
}

impl PinnedAt {
    pub(super) fn of(memory: &PinnedBuffer, offset: usize) -> PinnedAt {
        PinnedAt { host: memory.at(offset), device: memory.address() + offset as Address }
    }
}

// SAFETY: the pointers are addresses, into the handshake's memory and the caller's buffer, which both live
// until the stream has left. The host and the stream take turns to use them, by the words.
unsafe impl Send for Path {}
// SAFETY: as above.
unsafe impl Sync for Path {}

impl Path {
    /// Whether the kernels of the ranks may wait for each other. Then the host does not wait for the
    /// stream before it tells the other ranks of the call.
    pub(super) fn have_barrier(&self) -> bool {
        match self {
            Path::OneShot { .. } => true,
            Path::Direct { peers, .. } => peers.have_barrier(),
            _ => false,
        }
    }
}

impl DeviceCall {
    pub(super) fn new(
        device: Arc<dyn Device>,
        on_device: [bool; 2],
        (stream, capture): (StreamId, Option<u64>),
        has_kernels: bool,
    ) -> DeviceCall {
        let (enqueued, is_unattended) = (OnceLock::new(), AtomicBool::new(false));
        DeviceCall { device, on_device, stream, capture, has_kernels, enqueued, is_unattended }
    }

    pub(super) fn handshake(&self) -> Option<&Handshake> {
        self.enqueued.get()?.handshake.as_ref()
    }

    pub(super) fn path(&self) -> Option<&Path> {
        Some(&self.enqueued.get()?.path)
    }

    /// From now on only a stream waits for the end of the call.
    pub(super) fn set_unattended(&self) {
        self.is_unattended.store(true, Ordering::Relaxed);
    }

    /// Whether a graph has captured the call.
    pub(super) fn is_captured(&self) -> bool {
        self.capture.is_some()
    }

    /// Whether the stream has reached the call.
    pub(super) fn has_arrived(&self) -> bool {
        self.handshake().is_none_or(|handshake| handshake.words().has_arrived(0))
    }

    /// Whether the call only receives, into pinned memory, which no earlier work of the stream uses.
    pub(super) fn receives_into_pinned(&self) -> bool {
        matches!(self.path(), Some(Path::Pinned { send: None, recv: Some(_), .. }))
    }

    /// As [`OnDevice::hold_stream`], in the capture that the call belongs to.
    fn hold_captured(&self, stream: StreamId) -> Result<()> {
        if self.device.capture(stream)? != self.capture {
            let why = "a CUDA graph has captured it; wait on a stream of that capture, before the capture ends".to_owned();
            return Err(Error::Unsupported { what: "waiting for this operation", why });
        }
        match self.enqueued.get().and_then(|enqueued| enqueued.captured_end.as_ref()) {
            Some(end) => self.device.wait_for_event(stream, end.id),
            None => Ok(()),
        }
    }

    /// Lets the streams continue that wait for the call: it has ended, or the communicator has failed.
    pub(super) fn release(&self) {
        if let Some(handshake) = self.handshake() {
            handshake.release();
        }
    }
}

impl OnDevice for DeviceCall {
    fn sends_from_device(&self) -> bool {
        self.on_device[0]
    }

    fn is_captured(&self) -> bool {
        DeviceCall::is_captured(self)
    }

    fn leave_to_stream(&self) -> bool {
        self.handshake().inspect(|_| self.set_unattended()).is_some()
    }

    fn is_unattended(&self) -> bool {
        self.is_unattended.load(Ordering::Relaxed)
    }

    /// The streams that wait for it continue, unless a graph will replay the call.
    fn end(&self, result: &Result<()>) {
        if result.is_err() || !self.is_captured() {
            self.release();
        }
    }

    fn hold_stream(&self, stream: StreamId) -> Result<bool> {
        if self.is_captured() {
            return self.hold_captured(stream).map(|()| true);
        }
        let Some(handshake) = self.handshake() else { return Ok(false) };
        let _enqueueing = self.device.held().enqueueing();
        handshake.words().enqueue_until_over(&*self.device, stream).map(|()| true)
    }
}

/// The device's part of a call, if it has one.
pub(super) fn device_call(call: &Call) -> Option<&DeviceCall> {
    let any: &dyn Any = call.on_device.as_deref()?;
    Some(any.downcast_ref().expect(ONE_KIND))
}

/// As [`device_call`], to keep.
pub(super) fn device_call_to_keep(call: &Call) -> Option<Arc<DeviceCall>> {
    let any: Arc<dyn Any + Send + Sync> = call.on_device.clone()?;
    Some(any.downcast().expect(ONE_KIND))
}

/// How a collective is cut into rounds: into one.
pub(super) fn cut_of(call: &Call, world: usize) -> Cut {
    let Call { op, root, count, dtype, .. } = *call;
    let counts = call.recv_counts.as_ref().or(call.send_counts.as_ref());
    match counts.map(Counts::offsets) {
        Some(offsets) => Cut::of(op, world, root, offsets.to_vec(), dtype.size()),
        None => Cut::even(op, world, root, count, dtype.size()),
    }
}

/// The error of a call that a device refuses before any rank has seen it: the communicator is usable.
pub(super) fn refused(error: Error) -> Error {
    match error {
        Error::Device { .. } => Error::Unsupported { what: "a call on a device", why: error.to_string() },
        error => error,
    }
}

const ONE_KIND: &str = "there is one kind of call on a device";

impl fmt::Debug for DeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCall")
            .field("device", &self.device.name())
            .field("on_device", &self.on_device)
            .finish_non_exhaustive()
    }
}
