//! What kolo asks of a GPU: a small part of CUDA's driver, behind traits, so that a fake device (`fake_device`) of host memory can
//! take its place where there is none.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::types::{DType, ReduceOp};

/// An address in the memory of a device. It is no pointer: the host cannot read there.
pub(crate) type Address = u64;

/// A stream: work that a device does in order. A user's (`CUstream`; 0 is the default one), or one of [`Stream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId(pub(crate) usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventId(pub(crate) usize);

/// By what another process finds an allocation.
pub(crate) type Handle = [u8; 64];

/// What tells a device from all others, on whatever host and in whatever process.
pub(crate) type DeviceId = [u8; 16];

/// An allocation: what a buffer is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) base: Address,
    pub(crate) size: u64,
    /// No two allocations of a process have the same, also if one comes where the other was.
    pub(crate) id: u64,
}

/// The devices of this process.
pub(crate) trait Driver: Send + Sync {
    /// The device in whose memory an address lies; `None` if it is the host's.
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>>;

    /// A device, by the number under which this process sees it.
    fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>>;

    /// The device of a stream that is not the default one.
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
    /// Elements of each.
    pub(crate) count: usize,
    /// What an average is divided by.
    pub(crate) divisor: usize,
}

/// So many sources and so many targets has a [`Reduction`] at most.
pub(crate) const MOST_PARTS: usize = 16;

/// One device. What it is given to do it does later, in the order of the stream; only errors of giving are returned then.
///
/// # Safety
///
/// Of the unsafe functions: memory is that of this device (or of a peer whose memory it can reach), of the host where it says so,
/// as long as is said, and stays until the stream has come to what follows.
pub(crate) trait Device: Send + Sync {
    fn id(&self) -> DeviceId;

    /// For people.
    fn name(&self) -> String;

    /// The allocation of which an address is a part.
    fn extent(&self, address: Address) -> Result<Extent>;

    fn new_stream(&self) -> Result<StreamId>;
    fn end_stream(&self, stream: StreamId);
    fn new_event(&self) -> Result<EventId>;
    fn end_event(&self, event: EventId);

    /// The event is done when the stream has come here.
    fn record(&self, event: EventId, stream: StreamId) -> Result<()>;

    /// Whether an event, as it was last recorded, is done; or what went wrong before it.
    fn is_done(&self, event: EventId) -> Result<bool>;

    /// Whether what the stream is given is recorded for a graph, and not done.
    fn is_capturing(&self, stream: StreamId) -> Result<bool>;

    /// Where streams can wait for the host, if they can.
    fn gates(&self) -> Result<Option<Arc<Gates>>>;

    /// The stream goes on when the word, as a number that wraps around, is at least `value`.
    unsafe fn wait_for_word(&self, stream: StreamId, word: *const AtomicU32, value: u32) -> Result<()>;

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()>;
    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()>;
    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()>;
    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()>;
    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()>;

    /// Makes ready what is needed later for such calls, and may wait for all streams of the device for it.
    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()>;

    /// Makes host memory known to the device, so that copies need not stop over.
    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()>;
    unsafe fn unpin(&self, memory: *mut u8);

    fn allocate(&self, len: usize) -> Result<Address>;

    unsafe fn free(&self, address: Address);

    /// What another process opens to reach an allocation.
    fn export(&self, extent: &Extent) -> Result<Handle>;

    /// Another process's allocation; its first byte.
    fn import(&self, handle: &Handle) -> Result<Address>;
    unsafe fn close(&self, address: Address);

    /// Makes memory of this process, on whatever device, reachable from this one.
    fn reach(&self, address: Address) -> Result<()>;
}

/// A stream of kolo's own, beside those of the user.
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

/// A mark in a stream.
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

/// Memory of a device that kolo allocated.
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
        // SAFETY: it was allocated there, and whoever drops it uses it no more.
        unsafe { self.device.free(self.address) };
    }
}

/// Words in host memory for which streams of users wait: each operation opens its own when it has ended, however that was. One that
/// has failed would else stop the user's stream for ever.
pub(crate) struct Gates {
    /// Never freed: a stream may come to a gate long after the operation has failed and everything else is gone.
    page: &'static Page,
    free: Mutex<Vec<usize>>,
}

/// As large as what is pinned at once.
#[repr(C, align(4096))]
struct Page([AtomicU32; 1024]);

impl Gates {
    /// Gates whose words `pin` makes known to the device.
    #[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "only a device has a use for it"))]
    pub(crate) fn new(pin: impl FnOnce(*mut u8, usize) -> Result<()>) -> Result<Arc<Gates>> {
        let page: &'static Page = Box::leak(Box::new(Page(std::array::from_fn(|_| AtomicU32::new(0)))));
        pin(page.0.as_ptr().cast_mut().cast(), size_of::<Page>())?;
        Ok(Arc::new(Gates { page, free: Mutex::new((0..page.0.len()).collect()) }))
    }

    /// A gate that is closed; `None` if all are in use.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Gate> {
        let place = self.free.lock().pop()?;
        let opened = self.page.0[place].load(Ordering::Relaxed).wrapping_add(1);
        Some(Gate { gates: self.clone(), place, opened })
    }
}

/// What streams wait at. It opens when the operation has ended, and at the latest when it is dropped.
pub(crate) struct Gate {
    gates: Arc<Gates>,
    place: usize,
    /// What the word is once it is open. A stream that comes later finds at least that, and goes on.
    opened: u32,
}

impl Gate {
    /// What was copied for the user is there for whoever sees this.
    pub(crate) fn open(&self) {
        self.gates.page.0[self.place].store(self.opened, Ordering::Release);
    }

    /// Has a stream wait until it opens.
    pub(crate) fn close(&self, device: &dyn Device, stream: StreamId) -> Result<()> {
        // SAFETY: the page is pinned, and stays.
        unsafe { device.wait_for_word(stream, &self.gates.page.0[self.place], self.opened) }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
        self.gates.free.lock().push(self.place);
    }
}

/// Host memory that a device knows.
pub(crate) struct Pinned {
    device: Arc<dyn Device>,
    memory: *mut u8,
}

// SAFETY: an address; it is dereferenced by nobody here.
unsafe impl Send for Pinned {}

impl Pinned {
    /// # Safety
    ///
    /// The memory stays where it is for as long as this lives.
    pub(crate) unsafe fn new(device: &Arc<dyn Device>, memory: *mut u8, len: usize) -> Result<Pinned> {
        // SAFETY: passed on.
        unsafe { device.pin(memory, len)? };
        Ok(Pinned { device: device.clone(), memory })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was pinned when this was made.
        unsafe { self.device.unpin(self.memory) };
    }
}

/// A user's stream, as the driver knows it.
impl From<*mut c_void> for StreamId {
    fn from(stream: *mut c_void) -> StreamId {
        StreamId(stream.addr())
    }
}
