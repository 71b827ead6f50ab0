//! What kolo needs of a GPU: a small part of CUDA's driver behind traits. On a machine without a
//! GPU, tests use a fake device (`fake_device`) in host memory.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::types::{DType, ReduceOp};

/// An address in the memory of a device. It is not a pointer: the host cannot read there.
pub(crate) type Address = u64;

/// A stream, whose work a device does in order: a user's `CUstream` (0 is the default stream) or a
/// [`Stream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId(pub(crate) usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventId(pub(crate) usize);

/// What another process needs to open an allocation.
pub(crate) type Handle = [u8; 64];

/// The identity of a device, which is unique over all hosts and processes.
pub(crate) type DeviceId = [u8; 16];

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

    /// Returns the device of a stream that is not the default stream.
    fn device_of(&self, stream: StreamId) -> Result<Arc<dyn Device>>;
}

/// A reduction on a device: `targets[..][i] = sources[0][i] op sources[1][i] op ...`.
#[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "only a device has a use for it"))]
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

    /// Records an event: it is done when the stream has completed all earlier work.
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;

    /// Whether an event, as it was last recorded, is done. Returns an error if work before it
    /// failed.
    fn is_done(&self, event: EventId) -> Result<bool>;

    /// Whether a graph captures the work of the stream, so that it is not done now.
    fn is_capturing(&self, stream: StreamId) -> Result<bool>;

    /// Returns the gates at which streams wait for the host; `None` if streams of this device
    /// cannot.
    fn gates(&self) -> Result<Option<Arc<Gates>>>;

    /// Has the stream wait until the word is at least `value`. The comparison wraps around.
    unsafe fn wait_for_word(&self, stream: StreamId, word: *const AtomicU32, value: u32) -> Result<()>;

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()>;
    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()>;
    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()>;
    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()>;
    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()>;

    /// Loads what later calls with this type and reduction need. It may wait for all streams of the
    /// device.
    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()>;

    /// Pins host memory, so that copies to and from the device do not pass through another buffer.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()>;
    unsafe fn unpin(&self, memory: *mut u8);

    fn allocate(&self, len: usize) -> Result<Address>;

    unsafe fn free(&self, address: Address);

    /// Returns the handle with which another process opens an allocation.
    fn export(&self, extent: &Extent) -> Result<Handle>;

    /// Opens another process's allocation and returns the address of its first byte.
    fn import(&self, handle: &Handle) -> Result<Address>;
    unsafe fn close(&self, address: Address);

    /// Makes memory of this process on another device reachable from this device.
    fn reach(&self, address: Address) -> Result<()>;
}

/// A stream that kolo created, beside those of the user.
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
        self.device.end_stream(self.id);
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
        self.device.end_event(self.id);
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
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated on that device, and its owner no longer uses it.
        unsafe { self.device.free(self.address) };
    }
}

/// Words in host memory for which users' streams wait. Each operation opens its gate when it has
/// ended, also if it has failed: otherwise the user's stream would wait forever.
pub(crate) struct Gates {
    /// Never freed: a stream may reach a gate long after the operation has failed and everything
    /// else is gone.
    page: &'static Page,
    free: Mutex<Vec<usize>>,
}

/// One page of host memory, the unit in which memory is pinned.
#[repr(C, align(4096))]
struct Page([AtomicU32; 1024]);

impl Gates {
    /// Returns gates in a page that `pin` pins.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "only a device has a use for it"))]
    pub(crate) fn new(pin: impl FnOnce(*mut u8, usize) -> Result<()>) -> Result<Arc<Gates>> {
        let page: &'static Page = Box::leak(Box::new(Page(std::array::from_fn(|_| AtomicU32::new(0)))));
        pin(page.0.as_ptr().cast_mut().cast(), size_of::<Page>())?;
        Ok(Arc::new(Gates { page, free: Mutex::new((0..page.0.len()).collect()) }))
    }

    /// Returns a closed gate; `None` if all gates are in use.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Gate> {
        let place = self.free.lock().pop()?;
        let opened = self.page.0[place].load(Ordering::Relaxed).wrapping_add(1);
        Some(Gate { gates: self.clone(), place, opened })
    }
}

/// A gate at which streams wait. It opens when the operation has ended, and at the latest when it
/// is dropped.
pub(crate) struct Gate {
    gates: Arc<Gates>,
    place: usize,
    /// The value of the word once the gate is open. A stream that comes later finds at least this
    /// value and continues.
    opened: u32,
}

impl Gate {
    /// Opens the gate. A stream that sees it open also sees what was copied before.
    pub(crate) fn open(&self) {
        self.gates.page.0[self.place].store(self.opened, Ordering::Release);
    }

    /// Has a stream wait until the gate opens.
    pub(crate) fn close(&self, device: &dyn Device, stream: StreamId) -> Result<()> {
        // SAFETY: the page is pinned and never freed.
        unsafe { device.wait_for_word(stream, &self.gates.page.0[self.place], self.opened) }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
        self.gates.free.lock().push(self.place);
    }
}

/// Pinned host memory.
pub(crate) struct Pinned {
    device: Arc<dyn Device>,
    memory: *mut u8,
}

// SAFETY: the pointer is only an address, which is not dereferenced here.
unsafe impl Send for Pinned {}

impl Pinned {
    /// # Safety
    ///
    /// The memory stays allocated as long as the returned value lives.
    pub(crate) unsafe fn new(device: &Arc<dyn Device>, memory: *mut u8, len: usize) -> Result<Pinned> {
        // SAFETY: the caller keeps the same contract.
        unsafe { device.pin(memory, len)? };
        Ok(Pinned { device: device.clone(), memory })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: `new` pinned this memory.
        unsafe { self.device.unpin(self.memory) };
    }
}

/// A user's stream, as a `CUstream`.
impl From<*mut c_void> for StreamId {
    fn from(stream: *mut c_void) -> StreamId {
        StreamId(stream.addr())
    }
}
