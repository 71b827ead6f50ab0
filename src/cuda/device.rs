//! What kolo needs of a GPU: a small part of CUDA's driver behind traits. On a machine without a
//! GPU, tests use a fake device (`fake_device`) in host memory.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use super::held::Held;
pub(crate) use crate::buffer::{Address, StreamId};
use crate::error::Result;
use crate::sys::Ticket;
use crate::types::{DType, ReduceOp};
use crate::wire::Reader;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventId(pub(crate) usize);

/// What another process needs to open an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Handle {
    /// A handle of CUDA IPC. A process opens it once.
    Ipc([u8; 64]),
    /// A file that stands for the memory, and the bytes of the allocation. The owner's process hands
    /// it over.
    File { ticket: Ticket, size: u64 },
}

impl Handle {
    /// Bytes of an encoded handle.
    pub(crate) const LEN: usize = 1 + 64;

    pub(crate) fn encode(&self) -> [u8; Handle::LEN] {
        let mut bytes = [0; Handle::LEN];
        match self {
            Handle::Ipc(handle) => bytes[1..].copy_from_slice(handle),
            Handle::File { ticket, size } => {
                bytes[0] = 1;
                bytes[1..33].copy_from_slice(ticket);
                bytes[33..41].copy_from_slice(&size.to_le_bytes());
            }
        }
        bytes
    }

    /// Decodes a handle of a peer; `None` if it is malformed.
    pub(crate) fn decode(bytes: [u8; Handle::LEN]) -> Option<Handle> {
        let mut reader = Reader::new(&bytes);
        match reader.array()? {
            [0] => Some(Handle::Ipc(reader.array()?)),
            [1] => Some(Handle::File { ticket: reader.array()?, size: reader.number()? }),
            _ => None,
        }
    }
}

/// The identity of a device, which is unique over all hosts and processes.
pub(crate) type DeviceId = [u8; 16];

/// Returns the identity of a device as `nvidia-smi -L` prints it.
pub(crate) fn uuid(id: &DeviceId) -> String {
    let hex = |range: Range<usize>| id[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}

/// An allocation, of which a buffer is a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) base: Address,
    pub(crate) size: u64,
    /// Unique in the process, also if the allocation has the address of an earlier one.
    pub(crate) id: u64,
}

/// The devices of this process.
pub(crate) trait Driver: Send + Sync {
    /// Returns the device in whose memory an address lies; `None` if it is host memory.
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>>;

    /// Returns a device by the number under which this process sees it.
    fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>>;

    /// How many devices this process sees.
    fn count(&self) -> usize;

    /// Returns the device of a stream that is not the default stream.
    fn device_of(&self, stream: StreamId) -> Result<Arc<dyn Device>>;
}

/// A reduction on a device: `targets[..][i] = sources[0][i] op sources[1][i] op ...`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction<'a> {
    pub(crate) dtype: DType,
    pub(crate) redop: ReduceOp,
    pub(crate) sources: &'a [Address],
    pub(crate) targets: &'a [Address],
    /// Elements of each source and target.
    pub(crate) count: usize,
    /// The divisor of an average.
    pub(crate) divisor: usize,
}

/// A scaling on a device: `target[i] = source[i] * factor`, converted to another type. The bits are
/// those of [`scale_to`](crate::reduce::scale_to).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaling {
    /// The types of the source and of the target, which [`scales`](crate::reduce::scales) accepts.
    pub(crate) dtypes: (DType, DType),
    pub(crate) source: Address,
    /// The source itself if the types are the same, or memory that does not overlap it.
    pub(crate) target: Address,
    /// Elements.
    pub(crate) count: usize,
    pub(crate) factor: f64,
}

/// Where a kernel finds what it is to move: [`Moves`](super::moves::Moves).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MovesAt {
    /// Memory of the device, to which another kernel copies them before.
    pub(crate) on_device: Address,
    /// Pinned memory, to which the host writes them.
    pub(crate) on_host: Address,
}

/// The most sources, and the most targets, of a [`Reduction`].
pub(crate) const MOST_PARTS: usize = 16;

/// One device. Calls with a stream only enqueue work, which the device does later in the order of
/// the stream. They return only errors of enqueueing.
///
/// # Safety
///
/// For the unsafe functions: device memory belongs to this device or to a peer that it can reach.
/// All memory has the given length and stays valid until the stream has completed the work.
pub(crate) trait Device: Send + Sync {
    fn id(&self) -> DeviceId;

    /// The name of the device, for users.
    fn name(&self) -> String;

    /// Returns the allocation of which an address is a part.
    fn extent(&self, address: Address) -> Result<Extent>;

    fn new_stream(&self) -> Result<StreamId>;
    fn end_stream(&self, stream: StreamId);
    fn new_event(&self) -> Result<EventId>;
    fn end_event(&self, event: EventId);

    /// Records an event: it is done when the stream has completed all earlier work. If a graph
    /// captures the stream's work, only streams of that capture can wait for the event.
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;

    /// Whether an event, as it was last recorded, is done. Returns an error if work before it
    /// failed.
    fn is_done(&self, event: EventId) -> Result<bool>;

    /// Has later work of a stream wait for an event, as it was last recorded. If that was in a
    /// capture, the graph captures the work of this stream, too.
    fn wait_for_event(&self, stream: StreamId, event: EventId) -> Result<()>;

    /// Returns the number of the capture, of this process, if a CUDA graph captures the work of the
    /// stream. Then the stream does it when the graph is replayed.
    fn capture(&self, stream: StreamId) -> Result<Option<u64>>;

    /// Has `is_gone` be set when the graph that captures the work of the stream is destroyed, with
    /// all that was instantiated from it.
    fn watch_graph(&self, stream: StreamId, is_gone: Arc<AtomicBool>) -> Result<()>;

    /// The streams of the device that this process holds back.
    fn held(&self) -> &Arc<Held>;

    /// What the communicators of this process share of the device; see [`shared`](super::shared).
    fn extension(&self) -> &Extension;

    /// Whether streams of this device can wait for words of the host, and write them.
    fn has_words(&self) -> Result<bool>;

    /// Has the stream wait until the word, in pinned memory, is at least `value`. The comparison
    /// wraps around.
    unsafe fn wait_for_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()>;

    /// Has the stream write the word, in pinned memory. A host that sees the value also sees what
    /// the earlier work of the stream has written.
    unsafe fn write_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()>;

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()>;
    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()>;
    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()>;
    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()>;
    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()>;
    unsafe fn scale(&self, stream: StreamId, scaling: &Scaling) -> Result<()>;

    /// Has the stream do the moves that the host has written when the stream comes to it. `most` has the
    /// most bytes of a target. If the kernel may wait for those of other ranks, it leaves room on the
    /// device for other kernels.
    unsafe fn run_moves(
        &self,
        stream: StreamId,
        kernel: (DType, ReduceOp),
        moves: MovesAt,
        most: u64,
        may_wait: bool,
    ) -> Result<()>;

    /// Whether the device ends kernels that run for some seconds, because it has a display.
    fn limits_kernels(&self) -> bool;

    /// Loads what later calls with this type and reduction need. It may wait for all streams of the
    /// device.
    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()>;

    /// As [`prepare`](Device::prepare), for scalings from one type to another.
    fn prepare_to_scale(&self, dtypes: (DType, DType)) -> Result<()>;

    /// Pins host memory, so that copies to and from the device do not pass through another buffer.
    /// Returns the address under which the device reaches it.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<Address>;
    unsafe fn unpin(&self, memory: *mut u8);

    fn allocate(&self, len: usize) -> Result<Address>;

    /// Allocates memory that other processes may still have open when it is freed, if the device has
    /// such memory. All devices of this process that reach this one can access it.
    fn allocate_for_peers(&self, len: usize) -> Result<Address>;

    unsafe fn free(&self, address: Address);

    /// Returns the handle with which another process opens an allocation.
    fn export(&self, extent: &Extent) -> Result<Handle>;

    /// Opens another process's allocation and returns the address of its first byte.
    fn import(&self, handle: &Handle) -> Result<Address>;
    unsafe fn close(&self, address: Address);

    /// Makes memory of this process on another device reachable from this device.
    fn reach(&self, address: Address) -> Result<()>;
}

/// A place that a device has for what is built on it.
pub(crate) type Extension = OnceLock<Box<dyn Any + Send + Sync>>;

/// A stream that kolo created, beside those of the user. It ends when no stream is held back, as
/// events and memory do: see [`held`](super::held).
pub(crate) struct Stream {
    device: Arc<dyn Device>,
    pub(crate) id: StreamId,
}

impl Stream {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Stream> {
        Ok(Stream { id: device.new_stream()?, device: device.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (device, id) = (self.device.clone(), self.id);
        self.device.held().later(move || device.end_stream(id));
    }
}

/// An event, which marks a point in a stream.
pub(crate) struct Event {
    device: Arc<dyn Device>,
    pub(crate) id: EventId,
}

impl Event {
    pub(crate) fn device(&self) -> &dyn Device {
        &*self.device
    }

    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Event> {
        Ok(Event { id: device.new_event()?, device: device.clone() })
    }

    pub(crate) fn record(&self, stream: StreamId) -> Result<()> {
        self.device.record(self.id, stream)
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        self.device.is_done(self.id)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let (device, id) = (self.device.clone(), self.id);
        self.device.held().later(move || device.end_event(id));
    }
}

/// Device memory that kolo allocated.
pub(crate) struct Memory {
    device: Arc<dyn Device>,
    pub(crate) address: Address,
}

impl Memory {
    pub(crate) fn new(device: &Arc<dyn Device>, len: usize) -> Result<Memory> {
        Ok(Memory { address: device.allocate(len)?, device: device.clone() })
    }

    /// As [`Memory::new`], for users: they do not know when other processes close it.
    pub(crate) fn for_peers(device: &Arc<dyn Device>, len: usize) -> Result<Memory> {
        Ok(Memory { address: device.allocate_for_peers(len)?, device: device.clone() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (device, address) = (self.device.clone(), self.address);
        // SAFETY: the memory was allocated on that device, and its owner no longer uses it.
        self.device.held().later(move || unsafe { device.free(address) });
    }
}

/// Pinned host memory.
pub(crate) struct Pinned {
    device: Arc<dyn Device>,
    memory: *mut u8,
    /// Where the device finds it.
    pub(crate) address: Address,
}

// SAFETY: the pointer is only an address, which is not dereferenced here.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// # Safety
    ///
    /// The memory stays allocated as long as the returned value lives.
    pub(crate) unsafe fn new(device: &Arc<dyn Device>, memory: *mut u8, len: usize) -> Result<Pinned> {
        // SAFETY: the caller keeps the same contract.
        let address = unsafe { device.pin(memory, len)? };
        Ok(Pinned { device: device.clone(), memory, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: `new` pinned this memory.
        unsafe { self.device.unpin(self.memory) };
    }
}
