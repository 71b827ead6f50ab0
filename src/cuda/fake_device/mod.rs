//! A fake GPU in host memory, for tests on machines without one. It is as unfriendly as a real one:
//!
//! - Its streams are threads with random delays, and its addresses are invalid on the host. So a
//!   test fails if work is not ordered by the stream, or if a device address is used as a host
//!   address.
//! - A process has a lock for its driver calls ([`lock`]). Calls that free memory, unpin it, map it,
//!   close another process's memory, make or destroy streams and events, or load a kernel take it
//!   alone and wait for all streams of the process.
//! - Kernels of two processes never run at once on a device.
//! - An access to memory that is not there is an error that stays: all later calls fail, and the
//!   work of all streams is lost.
//! - What a device writes to another one may be lost, although they report that they reach each
//!   other, if a test asks for it.
//! - A stream that waits for an event of a capture joins that capture, which fails to end if such a
//!   stream was not joined again.
//! - Memory of pools and of expandable segments cannot be opened by other processes, and other
//!   devices of its own process do not reach it. An expandable segment is several allocations in one
//!   range of addresses.
//! - By CUDA IPC, a process opens an allocation once, and not while it has open what was freed at
//!   the same address. Mapped memory has no such limits, lives as long as any process has it mapped,
//!   and has no handle of CUDA IPC.
//! - A process accesses only its own memory and what it has opened. It may number devices differently
//!   than another process.
//!
//! What it cannot show: the driver's real locks, the order in which memory becomes visible, and
//! times.

mod lock;
mod memory;
#[allow(dead_code, reason = "the fake driver uses more of it")]
mod stream;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::lock::DriverLock;
use self::memory::{OF_DEVICE, Reach};
use self::stream::{Mark, Mode, Refusal, Space, Streams};
use super::barrier::DeviceBarrier;
use super::device::{
    Address, Device, DeviceId, Driver, EventId, Extension, Extent, Handle, MovesAt, Reduction, Scaling, StreamId,
};
use super::held::Held;
use super::moves::{KernelTask, Move, Moves};
use crate::error::{Error, Result};
use crate::reduce::{Kernel, normalise_bools, scale_to};
use crate::types::{DType, ReduceOp};

pub(crate) use self::memory::FakeGpu;
pub(crate) use self::stream::FakeGraph;

/// The number of the next process, stream or event.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// How long a driver call of a test waits for another.
const FOREVER: Duration = Duration::from_secs(20);

/// The driver of one process, and its context on a GPU.
pub(crate) struct FakeDevice {
    id: DeviceId,
    gpu: Arc<FakeGpu>,
    /// Of the process.
    lock: Arc<DriverLock>,
    streams: Arc<Streams>,
    /// What this process has opened of others.
    opened: Arc<Reach>,
    /// The kernels that were launched before.
    loaded: Mutex<HashSet<Entry>>,
    events: Mutex<HashMap<usize, Arc<Mark>>>,
    held: Arc<Held>,
    extension: Extension,
    /// Whether streams can wait for words.
    pub(crate) has_words: AtomicBool,
    /// Whether it has memory that other processes open by a file.
    pub(crate) has_mapped_memory: AtomicBool,
    /// Whether peers can open allocations.
    pub(crate) exports: AtomicBool,
    /// Whether it can open allocations of peers.
    pub(crate) reaches: AtomicBool,
    pub(crate) has_kernels: AtomicBool,
    /// Whether kernels that run for long are ended.
    pub(crate) limits_kernels: AtomicBool,
    /// Whether every call takes a random time.
    pub(crate) is_slow: AtomicBool,
    /// How many times as fast as the host's the clock of its kernels is: they find a rank late long before
    /// their hosts do.
    pub(crate) clock: Arc<AtomicU32>,
    /// How many devices the process of a [`Machine`] sees.
    pub(crate) visible: AtomicUsize,
    /// The number of reductions so far that were not moves.
    pub(crate) reductions: AtomicUsize,
    /// The number of scalings so far.
    pub(crate) scalings: AtomicUsize,
    /// The number of moves so far.
    pub(crate) moves: Arc<AtomicUsize>,
    /// The number of kernels that were launched for moves.
    pub(crate) launches: AtomicUsize,
    /// The number of kernels so far that waited for those of all other ranks.
    pub(crate) barriers: Arc<AtomicUsize>,
    /// The number of copies to or from the host so far.
    pub(crate) copies: AtomicUsize,
    /// The number of calls after which one fails; none fails if it is negative.
    pub(crate) fails_after: AtomicI64,
    /// Whether recording an event fails.
    pub(crate) marks_fail: AtomicBool,
}

/// A kernel.
#[derive(PartialEq, Eq, Hash)]
enum Entry {
    Reduce(DType, Option<ReduceOp>),
    Scale(DType, DType),
}

impl FakeDevice {
    /// A GPU with one process.
    pub(crate) fn new() -> FakeDevice {
        FakeDevice::on(&Arc::default(), [7; 16])
    }

    /// A process on a GPU, or on one of several that share their memory.
    pub(crate) fn on(gpu: &Arc<FakeGpu>, id: DeviceId) -> FakeDevice {
        FakeDevice::of(gpu, id, NEXT.fetch_add(1, Ordering::Relaxed) as u64, Arc::new(DriverLock::new(FOREVER)))
    }

    /// Another GPU of the same process.
    pub(crate) fn beside(&self, id: DeviceId) -> FakeDevice {
        FakeDevice::of(&self.gpu, id, self.opened.process, self.lock.clone())
    }

    fn of(gpu: &Arc<FakeGpu>, id: DeviceId, process: u64, lock: Arc<DriverLock>) -> FakeDevice {
        let opened = Arc::new(Reach::new(process, id));
        let streams = Streams::new(Reached { gpu: gpu.clone(), opened: opened.clone() });
        // The default one.
        streams.start(0);
        FakeDevice {
            id,
            streams: Arc::new(streams),
            gpu: gpu.clone(),
            lock,
            opened,
            loaded: Mutex::default(),
            events: Mutex::default(),
            held: Arc::default(),
            extension: Extension::new(),
            has_words: AtomicBool::new(true),
            has_mapped_memory: AtomicBool::new(true),
            exports: AtomicBool::new(true),
            reaches: AtomicBool::new(true),
            has_kernels: AtomicBool::new(true),
            limits_kernels: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            clock: Arc::new(AtomicU32::new(1)),
            visible: AtomicUsize::new(1),
            reductions: AtomicUsize::new(0),
            scalings: AtomicUsize::new(0),
            moves: Arc::default(),
            launches: AtomicUsize::new(0),
            barriers: Arc::default(),
            copies: AtomicUsize::new(0),
            fails_after: AtomicI64::new(-1),
            marks_fail: AtomicBool::new(false),
        }
    }

    /// A driver call.
    fn call<R>(&self, call: impl FnOnce() -> R) -> R {
        self.delay();
        self.lock.share(call)
    }

    /// A driver call that waits for all streams of the process.
    fn call_alone<R>(&self, call: impl FnOnce() -> R) -> R {
        self.delay();
        self.lock.alone(|| {
            self.streams.until_idle();
            call()
        })
    }

    fn delay(&self) {
        if self.is_slow.load(Ordering::Relaxed) {
            self.gpu.take_time();
        }
    }

    /// Fails if the context is broken.
    fn check(&self, doing: &'static str) -> Result<()> {
        match self.streams.failure() {
            None => Ok(()),
            Some(problem) => Err(self.problem(doing, &problem)),
        }
    }

    /// Enqueues work that may fail because a test asks for it.
    fn enqueue(&self, stream: StreamId, work: impl Fn(&stream::Access<'_>) + Send + Sync + 'static) -> Result<()> {
        self.call(|| {
            self.check("enqueueing work")?;
            self.fail_if_asked()?;
            self.refused("enqueueing work", self.streams.push(stream.0, work))
        })
    }

    /// Enqueues a kernel: no other one runs on the device at the same time.
    fn enqueue_kernel(&self, stream: StreamId, kernel: impl Fn(&stream::Access<'_>) + Send + Sync + 'static) -> Result<()> {
        let slice = self.gpu.slice(self.id);
        self.enqueue(stream, move |access| {
            let _slice = slice.lock();
            kernel(access);
        })
    }

    fn fail_if_asked(&self) -> Result<()> {
        if self.fails_after.load(Ordering::SeqCst) >= 0 && self.fails_after.fetch_sub(1, Ordering::SeqCst) == 0 {
            return Err(self.problem("enqueueing work", "the test asks for this failure"));
        }
        Ok(())
    }

    fn refused<R>(&self, doing: &'static str, result: std::result::Result<R, Refusal>) -> Result<R> {
        result.map_err(|refusal| self.problem(doing, &format!("{refusal:?}")))
    }

    fn problem(&self, doing: &'static str, problem: &str) -> Error {
        Error::Device { device: self.name(), doing, problem: problem.to_owned() }
    }

    fn mark(&self, event: EventId) -> Arc<Mark> {
        self.events.lock()[&event.0].clone()
    }

    /// Loads a kernel at its first launch, as the driver does.
    fn load(&self, kernel: Entry) {
        if self.loaded.lock().insert(kernel) {
            self.call_alone(|| ());
        }
    }

    /// Returns a new stream of a user.
    pub(crate) fn user_stream(&self) -> StreamId {
        self.new_stream().unwrap()
    }

    /// Allocates a range of several handles, like PyTorch's expandable segments.
    pub(crate) fn allocate_segments(&self, parts: &[usize]) -> Address {
        self.call(|| self.gpu.map_segments(&self.opened, parts))
    }

    /// Makes an allocation unreachable for peers, like those of CUDA's memory pools.
    pub(crate) fn hide(&self, address: Address) {
        self.gpu.hide(address);
    }

    /// Has a graph capture the work of a stream.
    pub(crate) fn begin_capture(&self, stream: StreamId) {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) as u64;
        self.call(|| self.streams.begin_capture(stream.0, Mode::Relaxed, number)).unwrap();
    }

    /// Ends the capture that began on a stream.
    pub(crate) fn end_capture(&self, stream: StreamId) -> Result<Arc<FakeGraph>> {
        let graph = self.call(|| self.streams.end_capture(stream.0));
        self.refused("ending a capture", graph).map(Arc::new)
    }

    pub(crate) fn launch(&self, graph: &Arc<FakeGraph>, stream: StreamId) {
        self.call(|| self.streams.launch(graph, stream.0)).unwrap();
    }

    /// Has a stream wait until the sender is dropped.
    pub(crate) fn hold_back(&self, stream: StreamId) -> crossbeam_channel::Sender<()> {
        let (sender, gone) = crossbeam_channel::unbounded::<()>();
        self.call(|| self.streams.push(stream.0, move |_| _ = gone.recv())).unwrap();
        sender
    }

    /// Keeps all kernels on the device from running until the result is dropped.
    pub(crate) fn hold_back_kernels(&self) -> impl Drop + use<> {
        self.gpu.slice(self.id).lock()
    }

    /// Waits until a stream has done all its work.
    pub(crate) fn synchronise(&self, stream: StreamId) {
        self.streams.synchronise(stream.0).unwrap();
        assert_eq!(self.streams.failure(), None);
    }

    /// Enqueues a write to device memory.
    pub(crate) fn write(&self, stream: StreamId, to: Address, bytes: Vec<u8>) {
        let write = move |access: &stream::Access<'_>| {
            let to = access.resolve(to, bytes.len());
            // SAFETY: the address was resolved for as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        };
        self.call(|| self.streams.push(stream.0, write)).unwrap();
    }

    /// Returns the content of device memory after the earlier work of a stream.
    pub(crate) fn read(&self, stream: StreamId, from: Address, len: usize) -> Vec<u8> {
        let (done, wait) = crossbeam_channel::unbounded();
        let read = move |access: &stream::Access<'_>| {
            let mut bytes = vec![0; len];
            // SAFETY: the address is resolved for as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(access.resolve(from, len), bytes.as_mut_ptr(), len) };
            _ = done.send(bytes);
        };
        self.call(|| self.streams.push(stream.0, read)).unwrap();
        wait.recv().unwrap_or_else(|_| panic!("{:?}", self.streams.failure()))
    }

    /// Loses what the device writes to memory of other devices, although it reaches them.
    pub(crate) fn lose_writes_to_peers(&self) {
        self.opened.loses_writes.store(true, Ordering::SeqCst);
    }

    /// Bytes that are allocated on the GPU, by all processes.
    pub(crate) fn gpu_used(&self) -> usize {
        self.gpu.used()
    }

    /// Returns how many bytes of host memory are pinned.
    pub(crate) fn pinned(&self) -> usize {
        self.streams.pinned()
    }

    /// Returns how many allocations of other processes are open.
    pub(crate) fn open(&self) -> usize {
        self.opened.count()
    }

    /// The number of imports so far.
    pub(crate) fn imports(&self) -> usize {
        self.opened.imports.load(Ordering::SeqCst)
    }
}

/// A machine as one process sees it, which uses one device.
#[derive(Clone)]
pub(crate) struct Machine(pub(crate) Arc<FakeDevice>);

impl Driver for Machine {
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        let is_mine = address.addr() as u64 & OF_DEVICE != 0;
        Ok(self.0.call(|| is_mine.then(|| self.0.clone() as Arc<dyn Device>)))
    }

    fn device(&self, _: usize) -> Result<Arc<dyn Device>> {
        Ok(self.0.clone())
    }

    fn count(&self) -> usize {
        self.0.visible.load(Ordering::SeqCst)
    }

    fn device_of(&self, _: StreamId) -> Result<Arc<dyn Device>> {
        Ok(self.0.call(|| self.0.clone()))
    }
}

/// A machine with several devices, in the order in which one process sees them.
pub(crate) struct Machines(pub(crate) Vec<Arc<FakeDevice>>);

impl Driver for Machines {
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        let (address, first) = (address.addr() as u64, &self.0[0]);
        let id = first.call(|| first.gpu.device_at(address).filter(|_| address & OF_DEVICE != 0));
        let device = self.0.iter().find(|device| Some(device.id) == id);
        Ok(device.map(|device| device.clone() as Arc<dyn Device>))
    }

    fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        Ok(self.0[ordinal].clone())
    }

    fn count(&self) -> usize {
        self.0.len()
    }

    fn device_of(&self, stream: StreamId) -> Result<Arc<dyn Device>> {
        let device = self.0.iter().find(|device| device.streams.has(stream.0));
        Ok(device.expect("the stream is alive").clone())
    }
}

/// What the streams of a process reach of the memory of GPUs.
struct Reached {
    gpu: Arc<FakeGpu>,
    opened: Arc<Reach>,
}

impl Space for Reached {
    fn resolve(&self, address: Address, len: usize) -> std::result::Result<*mut u8, String> {
        self.gpu.resolve(&self.opened, address, len)
    }

    fn take_time(&self) {
        self.gpu.take_time();
    }
}

/// Tells that a graph is gone when it is dropped with the graph.
struct Watch(Arc<AtomicBool>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A host address that a stream's thread uses.
struct Host(*mut u8);

// SAFETY: the caller that enqueues the work promises that the memory stays valid until it is done.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Host {
    /// A method, so that a closure captures all of `self`.
    fn pointer(&self) -> *mut u8 {
        self.0
    }
}

impl Device for FakeDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn name(&self) -> String {
        "the fake device".to_owned()
    }

    fn extent(&self, address: Address) -> Result<Extent> {
        let extent = self.call(|| self.gpu.extent(address));
        extent.ok_or_else(|| self.problem("looking up an allocation", "there is no memory at this address"))
    }

    fn new_stream(&self) -> Result<StreamId> {
        let stream = NEXT.fetch_add(1, Ordering::Relaxed);
        self.call_alone(|| self.streams.start(stream));
        Ok(StreamId(stream))
    }

    fn end_stream(&self, stream: StreamId) {
        self.call_alone(|| self.streams.end(stream.0));
    }

    fn new_event(&self) -> Result<EventId> {
        let event = NEXT.fetch_add(1, Ordering::Relaxed);
        self.call_alone(|| self.events.lock().insert(event, Arc::default()));
        Ok(EventId(event))
    }

    fn end_event(&self, event: EventId) {
        self.call_alone(|| self.events.lock().remove(&event.0));
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        if self.marks_fail.load(Ordering::SeqCst) {
            return Err(self.problem("recording an event", "the test asks for this failure"));
        }
        let mark = self.mark(event);
        self.refused("recording an event", self.call(|| self.streams.record(&mark, stream.0)))
    }

    fn is_done(&self, event: EventId) -> Result<bool> {
        self.call(|| {
            self.check("querying an event")?;
            self.refused("querying an event", self.mark(event).is_done())
        })
    }

    fn capture(&self, stream: StreamId) -> Result<Option<u64>> {
        Ok(self.call(|| self.streams.capture(stream.0).map(|capturing| capturing.number)))
    }

    fn watch_graph(&self, stream: StreamId, is_gone: Arc<AtomicBool>) -> Result<()> {
        self.call(|| {
            self.check("watching a graph")?;
            let capturing = self.streams.capture(stream.0);
            let capturing = capturing.ok_or_else(|| self.problem("watching a graph", "the stream is not captured"))?;
            assert!(self.streams.keep(capturing.number, Box::new(Watch(is_gone))));
            Ok(())
        })
    }

    fn wait_for_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.call(|| {
            self.check("enqueueing a wait for an event")?;
            self.fail_if_asked()?;
            self.refused("enqueueing a wait for an event", self.streams.wait_for(stream.0, &self.mark(event)))
        })
    }

    fn held(&self) -> &Arc<Held> {
        &self.held
    }

    fn extension(&self) -> &Extension {
        &self.extension
    }

    fn has_words(&self) -> Result<bool> {
        Ok(self.has_words.load(Ordering::SeqCst))
    }

    unsafe fn wait_for_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()> {
        self.enqueue(stream, move |access| {
            let word = access.pinned(word, 4).cast::<AtomicU32>();
            // SAFETY: the memory is pinned, and the caller promises that it stays valid.
            let word = unsafe { &*word };
            access.until(|| (word.load(Ordering::Acquire).wrapping_sub(value) as i32) >= 0);
        })
    }

    unsafe fn write_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()> {
        self.enqueue(stream, move |access| {
            let word = access.pinned(word, 4).cast::<AtomicU32>();
            // SAFETY: as above.
            unsafe { (*word).store(value, Ordering::Release) };
        })
    }

    unsafe fn run_moves(
        &self,
        stream: StreamId,
        (dtype, redop): (DType, ReduceOp),
        moves: MovesAt,
        _: u64,
        may_wait: bool,
    ) -> Result<()> {
        self.load(Entry::Reduce(dtype, Some(redop)));
        self.launches.fetch_add(1, Ordering::SeqCst);
        let (moved, barriers, clock) = (self.moves.clone(), self.barriers.clone(), self.clock.clone());
        self.enqueue_kernel(stream, move |access| {
            let began = Instant::now();
            let MovesAt { on_device, on_host } = moves;
            let on_host = access.pinned(on_host, 8);
            // SAFETY: the memory is pinned until the stream has left, and the host has written a task there.
            let (before, barrier, after) = unsafe { Moves::read(on_host) };
            let copy = access.resolve(on_device, Moves::bytes(before.len() + after.len()));
            let (count, moves) = (before.len(), [before, after].concat());
            // SAFETY: there is room for it, and no other kernel uses it until this one is done.
            let (before, _, after) = unsafe {
                Moves::write(copy, KernelTask { moves, before: count, barrier: DeviceBarrier::none() });
                Moves::read(copy)
            };
            let run = |moves: &[Move]| {
                for one in moves {
                    let (count, divisor) = (one.count as usize, one.divisor as usize);
                    reduce(access, (dtype, redop), (one.sources(), one.targets()), count, divisor);
                }
                moved.fetch_add(moves.len(), Ordering::SeqCst);
            };
            if !barrier.is_any() {
                run(&before);
                run(&after);
                return;
            }
            assert!(may_wait, "the kernel was launched as one that waits for no other");
            // As in `cuda-kernels/reduce.cu`: the number of moves is read before this.
            if barrier.is_cancelled() {
                return;
            }
            run(&before);
            let elapsed = || began.elapsed() * clock.load(Ordering::SeqCst);
            let wait = |is_second| barrier.wait(&elapsed, is_second, |address| access.resolve(address, 4));
            if wait(false) {
                run(&after);
                barriers.fetch_add(wait(true).into(), Ordering::SeqCst);
            }
        })
    }

    fn limits_kernels(&self) -> bool {
        self.limits_kernels.load(Ordering::SeqCst)
    }

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()> {
        self.copies.fetch_add(1, Ordering::SeqCst);
        let to = Host(to);
        self.enqueue(stream, move |access| {
            // SAFETY: the device address is resolved, and the caller vouches for the host address.
            unsafe { std::ptr::copy_nonoverlapping(access.resolve(from, len), to.pointer(), len) };
        })
    }

    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()> {
        self.copies.fetch_add(1, Ordering::SeqCst);
        let from = Host(from.cast_mut());
        self.enqueue(stream, move |access| {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.pointer(), access.resolve(to, len), len) };
        })
    }

    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()> {
        self.enqueue(stream, move |access| {
            // SAFETY: both addresses are resolved; they may be the same.
            unsafe { std::ptr::copy(access.resolve(from, len), access.resolve(to, len), len) };
        })
    }

    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()> {
        self.enqueue(stream, move |access| {
            // SAFETY: the address is resolved for as many bytes.
            unsafe { access.resolve(address, len).write_bytes(0, len) };
        })
    }

    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()> {
        self.reductions.fetch_add(1, Ordering::SeqCst);
        let Reduction { dtype, redop, count, divisor, .. } = *reduction;
        self.load(Entry::Reduce(dtype, Some(redop)));
        let (sources, targets) = (reduction.sources.to_vec(), reduction.targets.to_vec());
        self.enqueue_kernel(stream, move |access| reduce(access, (dtype, redop), (&sources, &targets), count, divisor))
    }

    unsafe fn scale(&self, stream: StreamId, scaling: &Scaling) -> Result<()> {
        self.scalings.fetch_add(1, Ordering::SeqCst);
        let Scaling { dtypes, source, target, count, factor } = *scaling;
        self.load(Entry::Scale(dtypes.0, dtypes.1));
        self.enqueue_kernel(stream, move |access| {
            let source = access.resolve(source, count * dtypes.0.size());
            let target = access.resolve(target, count * dtypes.1.size());
            // SAFETY: both are resolved for `count` elements, and the caller vouches for the rest.
            unsafe { scale_to(dtypes, source, target, count, factor) };
        })
    }

    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()> {
        if !self.has_kernels.load(Ordering::SeqCst) {
            return Err(self.problem("loading the kernels", "the test asks for this failure"));
        }
        self.load(Entry::Reduce(dtype, redop));
        Ok(())
    }

    fn prepare_to_scale(&self, (from, to): (DType, DType)) -> Result<()> {
        if !self.has_kernels.load(Ordering::SeqCst) {
            return Err(self.problem("loading the kernels", "the test asks for this failure"));
        }
        self.load(Entry::Scale(from, to));
        Ok(())
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<Address> {
        self.call(|| {
            self.check("pinning host memory")?;
            Ok(self.streams.pin(memory, len).expect("the memory is not pinned yet"))
        })
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        assert!(self.call_alone(|| self.streams.unpin(memory)), "the memory is pinned");
    }

    fn allocate(&self, len: usize) -> Result<Address> {
        self.call(|| {
            self.check("allocating device memory")?;
            Ok(self.gpu.allocate(&self.opened, len))
        })
    }

    fn allocate_for_peers(&self, len: usize) -> Result<Address> {
        if !self.has_mapped_memory.load(Ordering::SeqCst) {
            return self.allocate(len);
        }
        self.call_alone(|| {
            self.check("allocating device memory")?;
            Ok(self.gpu.map(&self.opened, len))
        })
    }

    unsafe fn free(&self, address: Address) {
        self.call_alone(|| self.gpu.free(&self.opened, address));
    }

    fn export(&self, extent: &Extent) -> Result<Handle> {
        let handle = self.call(|| self.gpu.export(extent).filter(|_| self.exports.load(Ordering::SeqCst)));
        handle.ok_or_else(|| self.problem("exporting memory", "the memory cannot be exported"))
    }

    fn import(&self, handle: &Handle) -> Result<Address> {
        let open = || {
            self.check("importing memory")?;
            if !self.reaches.load(Ordering::SeqCst) {
                return Err(self.problem("importing memory", "the GPUs do not reach each other"));
            }
            self.gpu.open(&self.opened, handle).map_err(|problem| self.problem("importing memory", problem))
        };
        match handle {
            Handle::Ipc(_) => self.call(open),
            Handle::File { .. } => self.call_alone(open),
        }
    }

    unsafe fn close(&self, address: Address) {
        self.call_alone(|| self.opened.close(address));
    }

    fn reach(&self, address: Address) -> Result<()> {
        self.call(|| {
            let device = self.gpu.device_at(address);
            let device = device.ok_or_else(|| self.problem("reaching memory", "there is no memory at this address"))?;
            if !self.reaches.load(Ordering::SeqCst) {
                return Err(self.problem("reaching memory", "the GPUs do not reach each other"));
            }
            self.opened.reached.lock().insert(device);
            Ok(())
        })
    }
}

/// What a kernel of a reduction does.
fn reduce(
    access: &stream::Access<'_>,
    (dtype, redop): (DType, ReduceOp),
    (sources, targets): (&[Address], &[Address]),
    count: usize,
    divisor: usize,
) {
    let len = count * dtype.size();
    let read = |&source: &Address| {
        let mut part = vec![0u64; len.div_ceil(8)];
        // SAFETY: the source is resolved, and `part` has room for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(access.resolve(source, len), part.as_mut_ptr().cast(), len) };
        part
    };
    let parts: Vec<Vec<u64>> = sources.iter().map(read).collect();
    let parts: Vec<*const u8> = parts.iter().map(|part| part.as_ptr().cast()).collect();
    let mut result = vec![0u64; len.div_ceil(8)];
    let kernel = Kernel::new(dtype, redop).expect("the reduction applies to the type");
    // SAFETY: all have room for `count` elements, and the result overlaps no part.
    unsafe { kernel.fold(&parts, result.as_mut_ptr().cast(), count, Some(divisor)) };
    if dtype == DType::Bool {
        // As the kernels do: any byte but zero is true.
        // SAFETY: the result has `count` bytes.
        unsafe { normalise_bools(result.as_mut_ptr().cast(), count) };
    }
    for &target in targets {
        // SAFETY: the target is resolved for as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr().cast(), access.resolve(target, len), len) };
    }
}
