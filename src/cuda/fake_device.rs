//! A fake GPU in host memory, for tests on machines without one. Its streams are threads with
//! random delays, and its addresses are invalid on the host. So a test fails if work is not ordered
//! by events, or if a device address is used as a host address.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use parking_lot::Mutex;

use super::device::{Address, Device, DeviceId, Driver, EventId, Extent, Gates, Handle, Reduction, StreamId};
use crate::error::{Error, Result};
use crate::reduce::Kernel;
use crate::types::{DType, ReduceOp, mix};

/// This bit is set in all addresses of the device: no host has memory there.
const OF_DEVICE: u64 = 1 << 62;

/// This bit is set in the addresses of imported allocations.
const IMPORTED: u64 = 1 << 61;

type Work = Box<dyn FnOnce(&State) + Send>;

/// One fake GPU.
pub(crate) struct FakeDevice {
    state: Arc<State>,
    streams: Mutex<HashMap<usize, Sender<Work>>>,
    events: Mutex<HashMap<usize, Arc<Mark>>>,
    gates: Mutex<Option<Arc<Gates>>>,
    next: AtomicUsize,
    /// Whether streams can wait for the host.
    pub(crate) has_gates: AtomicBool,
    /// Whether peers can open allocations.
    pub(crate) exports: AtomicBool,
    pub(crate) is_capturing: AtomicBool,
    pub(crate) has_kernels: AtomicBool,
    /// The number of imports so far.
    pub(crate) imports: AtomicUsize,
    /// The number of reductions so far.
    pub(crate) reductions: AtomicUsize,
    /// The number of copies to or from the host so far.
    pub(crate) copies: AtomicUsize,
    /// The number of calls after which one fails; none fails if it is negative.
    pub(crate) fails_after: AtomicI64,
    /// Whether recording an event fails.
    pub(crate) marks_fail: AtomicBool,
}

/// What the threads of the streams use.
struct State {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    /// How often each allocation is open.
    open: Mutex<HashMap<u64, usize>>,
    random: AtomicU64,
    /// The panic of a stream's thread, with which a test fails.
    failed: Mutex<Option<String>>,
}

struct Allocation {
    memory: Box<[u64]>,
    len: usize,
    id: u64,
    /// Whether peers cannot reach it.
    is_hidden: bool,
}

/// An event: how often it was recorded, and the last record that is done.
#[derive(Default)]
struct Mark {
    recorded: AtomicU64,
    done: AtomicU64,
}

impl State {
    /// Returns the host address of device memory. Panics if the range is not within one allocation.
    fn resolve(&self, address: Address, len: usize) -> *mut u8 {
        assert!(address & OF_DEVICE != 0, "{address:#x} is not an address of the device");
        let base = address & !IMPORTED;
        let mut allocations = self.allocations.lock();
        let (&start, allocation) = allocations.range_mut(..=base).next_back().expect("the memory was never allocated");
        let offset = (base - start) as usize;
        assert!(offset + len <= allocation.len, "{len} bytes from {offset} on of {}", allocation.len);
        if address & IMPORTED != 0 {
            assert!(self.open.lock().get(&start).is_some_and(|&times| times > 0), "the memory is not open");
        }
        allocation.memory.as_mut_ptr().cast::<u8>().wrapping_add(offset)
    }

    /// Waits for a random time, as the work of a GPU does.
    fn take_time(&self) {
        match mix(self.random.fetch_add(1, Ordering::Relaxed), 7) % 8 {
            0 => std::thread::sleep(Duration::from_micros(200)),
            1..4 => std::thread::yield_now(),
            _ => {}
        }
    }
}

impl FakeDevice {
    pub(crate) fn new() -> FakeDevice {
        let random = AtomicU64::new(1);
        let state = State { allocations: Mutex::default(), open: Mutex::default(), random, failed: Mutex::default() };
        let device = FakeDevice {
            state: Arc::new(state),
            streams: Mutex::default(),
            events: Mutex::default(),
            gates: Mutex::default(),
            next: AtomicUsize::new(1),
            has_gates: AtomicBool::new(true),
            exports: AtomicBool::new(true),
            is_capturing: AtomicBool::new(false),
            has_kernels: AtomicBool::new(true),
            imports: AtomicUsize::new(0),
            reductions: AtomicUsize::new(0),
            copies: AtomicUsize::new(0),
            fails_after: AtomicI64::new(-1),
            marks_fail: AtomicBool::new(false),
        };
        device.start(0);
        device
    }

    fn start(&self, stream: usize) {
        let (sender, works) = unbounded::<Work>();
        let state = self.state.clone();
        std::thread::spawn(move || {
            while let Ok(work) = works.recv() {
                state.take_time();
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&state)));
                if let Err(panic) = done {
                    let said = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "the work panicked".to_owned());
                    *state.failed.lock() = Some(said);
                }
            }
        });
        self.streams.lock().insert(stream, sender);
    }

    fn push(&self, stream: StreamId, work: impl FnOnce(&State) + Send + 'static) {
        self.streams.lock()[&stream.0].send(Box::new(work)).expect("the thread receives work as long as there is a sender");
    }

    fn may_fail(&self) -> Result<()> {
        if self.fails_after.load(Ordering::SeqCst) >= 0 && self.fails_after.fetch_sub(1, Ordering::SeqCst) == 0 {
            return Err(self.problem("enqueueing work", "the test asks for this failure"));
        }
        Ok(())
    }

    fn problem(&self, doing: &'static str, problem: &str) -> Error {
        Error::Device { device: self.name(), doing, problem: problem.to_owned() }
    }

    fn mark(&self, event: EventId) -> Arc<Mark> {
        self.events.lock()[&event.0].clone()
    }

    /// Returns a new stream of a user.
    pub(crate) fn user_stream(&self) -> StreamId {
        self.new_stream().unwrap()
    }

    /// Makes an allocation unreachable for peers, like those of CUDA's memory pools.
    pub(crate) fn hide(&self, address: Address) {
        self.state.allocations.lock().get_mut(&address).expect("the memory was allocated").is_hidden = true;
    }

    /// Waits until a stream has done all its work.
    pub(crate) fn synchronise(&self, stream: StreamId) {
        let (done, wait) = unbounded::<()>();
        self.push(stream, move |_| drop(done));
        _ = wait.recv();
        assert_eq!(*self.state.failed.lock(), None);
    }

    /// Enqueues a write to device memory.
    pub(crate) fn write(&self, stream: StreamId, to: Address, bytes: Vec<u8>) {
        self.push(stream, move |state| {
            let to = state.resolve(to, bytes.len());
            // SAFETY: the address was resolved for as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        });
    }

    /// Returns the content of device memory after the earlier work of a stream.
    pub(crate) fn read(&self, stream: StreamId, from: Address, len: usize) -> Vec<u8> {
        let (done, wait) = unbounded();
        self.push(stream, move |state| {
            let mut bytes = vec![0; len];
            // SAFETY: the address is resolved for as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(state.resolve(from, len), bytes.as_mut_ptr(), len) };
            _ = done.send(bytes);
        });
        let read = wait.recv();
        read.unwrap_or_else(|_| panic!("{:?}", *self.state.failed.lock()))
    }

    /// Returns how many allocations are open.
    pub(crate) fn open(&self) -> usize {
        self.state.open.lock().values().sum()
    }
}

/// A machine with one device, which all ranks of a test share.
#[derive(Clone)]
pub(crate) struct Machine(pub(crate) Arc<FakeDevice>);

impl Driver for Machine {
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        let is_mine = address.addr() as u64 & OF_DEVICE != 0;
        Ok(is_mine.then(|| self.0.clone() as Arc<dyn Device>))
    }

    fn device(&self, _: usize) -> Result<Arc<dyn Device>> {
        Ok(self.0.clone())
    }

    fn device_of(&self, _: StreamId) -> Result<Arc<dyn Device>> {
        Ok(self.0.clone())
    }
}

/// A host address that a stream's thread uses.
struct Host(Cell<*mut u8>);

// SAFETY: the caller that enqueues the work promises that the memory stays valid until it is done.
unsafe impl Send for Host {}

impl Device for FakeDevice {
    fn id(&self) -> DeviceId {
        [7; 16]
    }

    fn name(&self) -> String {
        "the fake device".to_owned()
    }

    fn extent(&self, address: Address) -> Result<Extent> {
        let allocations = self.state.allocations.lock();
        let (&base, allocation) = allocations.range(..=address).next_back().expect("the memory was allocated");
        Ok(Extent { base, size: allocation.len as u64, id: allocation.id })
    }

    fn new_stream(&self) -> Result<StreamId> {
        let stream = self.next.fetch_add(1, Ordering::Relaxed);
        self.start(stream);
        Ok(StreamId(stream))
    }

    fn end_stream(&self, stream: StreamId) {
        self.streams.lock().remove(&stream.0);
    }

    fn new_event(&self) -> Result<EventId> {
        let event = self.next.fetch_add(1, Ordering::Relaxed);
        self.events.lock().insert(event, Arc::default());
        Ok(EventId(event))
    }

    fn end_event(&self, event: EventId) {
        self.events.lock().remove(&event.0);
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        if self.marks_fail.load(Ordering::SeqCst) {
            return Err(self.problem("recording an event", "the test asks for this failure"));
        }
        let mark = self.mark(event);
        let number = mark.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        self.push(stream, move |_| mark.done.store(number, Ordering::SeqCst));
        Ok(())
    }

    fn is_done(&self, event: EventId) -> Result<bool> {
        if let Some(problem) = &*self.state.failed.lock() {
            return Err(self.problem("querying an event", problem));
        }
        let mark = self.mark(event);
        Ok(mark.done.load(Ordering::SeqCst) >= mark.recorded.load(Ordering::SeqCst))
    }

    fn is_capturing(&self, _: StreamId) -> Result<bool> {
        Ok(self.is_capturing.load(Ordering::SeqCst))
    }

    fn gates(&self) -> Result<Option<Arc<Gates>>> {
        if !self.has_gates.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let mut gates = self.gates.lock();
        if gates.is_none() {
            *gates = Some(Gates::new(|_, _| Ok(()))?);
        }
        Ok(gates.clone())
    }

    unsafe fn wait_for_word(&self, stream: StreamId, word: *const AtomicU32, value: u32) -> Result<()> {
        let word = Host(Cell::new(word.cast_mut().cast()));
        self.push(stream, move |_| {
            let word = word;
            // SAFETY: the caller promises that the word stays valid.
            let word = unsafe { &*word.0.get().cast::<AtomicU32>() };
            while (word.load(Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
                std::thread::yield_now();
            }
        });
        Ok(())
    }

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()> {
        self.may_fail()?;
        self.copies.fetch_add(1, Ordering::SeqCst);
        let to = Host(Cell::new(to));
        self.push(stream, move |state| {
            let to = to;
            // SAFETY: the device address is resolved, and the caller vouches for the host address.
            unsafe { std::ptr::copy_nonoverlapping(state.resolve(from, len), to.0.get(), len) };
        });
        Ok(())
    }

    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()> {
        self.may_fail()?;
        self.copies.fetch_add(1, Ordering::SeqCst);
        let from = Host(Cell::new(from.cast_mut()));
        self.push(stream, move |state| {
            let from = from;
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.0.get(), state.resolve(to, len), len) };
        });
        Ok(())
    }

    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()> {
        self.may_fail()?;
        self.push(stream, move |state| {
            // SAFETY: both addresses are resolved; they may be the same.
            unsafe { std::ptr::copy(state.resolve(from, len), state.resolve(to, len), len) };
        });
        Ok(())
    }

    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()> {
        self.may_fail()?;
        self.push(stream, move |state| {
            // SAFETY: the address is resolved for as many bytes.
            unsafe { state.resolve(address, len).write_bytes(0, len) };
        });
        Ok(())
    }

    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()> {
        self.may_fail()?;
        self.reductions.fetch_add(1, Ordering::SeqCst);
        let Reduction { dtype, redop, count, divisor, .. } = *reduction;
        let (sources, targets) = (reduction.sources.to_vec(), reduction.targets.to_vec());
        self.push(stream, move |state| {
            let len = count * dtype.size();
            let parts: Vec<Vec<u64>> = sources
                .iter()
                .map(|&source| {
                    let mut part = vec![0u64; len.div_ceil(8)];
                    // SAFETY: the source is resolved, and `part` has room for as many bytes.
                    unsafe { std::ptr::copy_nonoverlapping(state.resolve(source, len), part.as_mut_ptr().cast(), len) };
                    part
                })
                .collect();
            let parts: Vec<*const u8> = parts.iter().map(|part| part.as_ptr().cast()).collect();
            let mut result = vec![0u64; len.div_ceil(8)];
            let kernel = Kernel::new(dtype, redop).expect("the reduction applies to the type");
            // SAFETY: all have room for `count` elements, and the result overlaps no part.
            unsafe { kernel.fold(&parts, result.as_mut_ptr().cast(), count, Some(divisor)) };
            for &target in &targets {
                // SAFETY: the target is resolved for as many bytes.
                unsafe { std::ptr::copy_nonoverlapping(result.as_ptr().cast(), state.resolve(target, len), len) };
            }
        });
        Ok(())
    }

    fn prepare(&self, _: DType, _: Option<ReduceOp>) -> Result<()> {
        if self.has_kernels.load(Ordering::SeqCst) {
            Ok(())
        } else {
            Err(self.problem("loading the kernels", "the test asks for this failure"))
        }
    }

    unsafe fn pin(&self, _: *mut u8, _: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn unpin(&self, _: *mut u8) {}

    fn allocate(&self, len: usize) -> Result<Address> {
        let mut memory = vec![0u64; len.div_ceil(8) + 1].into_boxed_slice();
        let base = memory.as_mut_ptr().addr() as u64 | OF_DEVICE;
        let id = self.next.fetch_add(1, Ordering::Relaxed) as u64;
        self.state.allocations.lock().insert(base, Allocation { memory, len, id, is_hidden: false });
        Ok(base)
    }

    unsafe fn free(&self, address: Address) {
        self.state.allocations.lock().remove(&address).expect("the memory was allocated");
    }

    fn export(&self, extent: &Extent) -> Result<Handle> {
        let is_hidden = self.state.allocations.lock()[&extent.base].is_hidden;
        if is_hidden || !self.exports.load(Ordering::SeqCst) {
            return Err(self.problem("exporting memory", "the test asks for this failure"));
        }
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&extent.base.to_le_bytes());
        handle[8..16].copy_from_slice(&extent.id.to_le_bytes());
        Ok(handle)
    }

    fn import(&self, handle: &Handle) -> Result<Address> {
        self.imports.fetch_add(1, Ordering::SeqCst);
        let number = |at: usize| u64::from_le_bytes(handle[at..at + 8].try_into().unwrap());
        let (base, id) = (number(0), number(8));
        if self.state.allocations.lock().get(&base).is_none_or(|allocation| allocation.id != id) {
            return Err(self.problem("importing memory", "the allocation was freed"));
        }
        *self.state.open.lock().entry(base).or_default() += 1;
        Ok(base | IMPORTED)
    }

    unsafe fn close(&self, address: Address) {
        *self.state.open.lock().get_mut(&(address & !IMPORTED)).expect("the allocation is open") -= 1;
    }

    fn reach(&self, _: Address) -> Result<()> {
        Ok(())
    }
}
