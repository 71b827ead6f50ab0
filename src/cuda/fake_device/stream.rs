//! The streams of a process on a fake GPU: each has a thread that does its work in order. Devices stay
//! for the life of the process, so a thread ends when it has been idle for a moment.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_channel::unbounded;
use parking_lot::{Condvar, Mutex};

use super::memory::{FakeGpu, Reach};
use crate::cuda::device::{Address, StreamId};

type Work = Arc<dyn Fn(&Access<'_>) + Send + Sync>;

/// An event: whether its last record is done. A stream that waits for an earlier record keeps waiting
/// for that one.
pub(super) struct Mark {
    pub(super) last: Mutex<Recorded>,
}

/// A record of an event.
#[derive(Clone)]
pub(super) enum Recorded {
    /// Whether the stream has come there.
    Now(Arc<AtomicBool>),
    /// In a capture: the work that comes before.
    Captured(Arc<Capturing>, Clock),
}

impl Default for Mark {
    fn default() -> Mark {
        Mark { last: Mutex::new(Recorded::Now(Arc::new(AtomicBool::new(true)))) }
    }
}

/// How much work of each stream comes before.
type Clock = HashMap<usize, usize>;

/// The capture of a graph.
pub(super) struct Capturing {
    pub(super) number: u64,
    /// The stream with which it began.
    origin: usize,
    state: Mutex<Captured>,
}

#[derive(Default)]
struct Captured {
    /// The work of all streams, in an order that is right for each of them.
    works: Vec<Work>,
    /// What comes before the next work of each stream, itself included.
    clocks: HashMap<usize, Clock>,
    /// What the end of the graph sets.
    watched: Vec<Arc<AtomicBool>>,
}

/// A graph, with what was instantiated from it.
pub(crate) struct FakeGraph {
    works: Vec<Work>,
    watched: Vec<Arc<AtomicBool>>,
    /// Two replays never run at once.
    runs: Mutex<()>,
}

impl Drop for FakeGraph {
    fn drop(&mut self) {
        self.watched.iter().for_each(|is_gone| is_gone.store(true, Ordering::SeqCst));
    }
}

/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_millis(100);

/// The work of a stream that is not done.
#[derive(Default)]
struct Queue {
    works: Mutex<Works>,
    has_come: Condvar,
}

#[derive(Default)]
struct Works {
    next: VecDeque<Work>,
    has_thread: bool,
}

impl Queue {
    /// Returns the next work; `None` if none comes, and then the thread that asked ends.
    fn next(&self) -> Option<Work> {
        let mut works = self.works.lock();
        if works.next.is_empty() {
            self.has_come.wait_for(&mut works, IDLE);
        }
        let next = works.next.pop_front();
        works.has_thread = next.is_some();
        next
    }
}

pub(super) struct Streams {
    queues: Mutex<HashMap<usize, Arc<Queue>>>,
    /// The capture that each stream belongs to.
    captures: Mutex<HashMap<usize, Arc<Capturing>>>,
    shared: Arc<Shared>,
}

/// What the threads of the streams share.
struct Shared {
    gpu: Arc<FakeGpu>,
    opened: Arc<Reach>,
    /// Work that was enqueued and is not done.
    pending: Mutex<usize>,
    is_idle: Condvar,
    /// The first failure. It stays: no later work is done.
    failure: Mutex<Option<String>>,
    /// Host memory that the device can access: its length, by its address.
    pinned: Mutex<BTreeMap<usize, usize>>,
}

/// This bit is set in the addresses under which the device accesses pinned memory.
const PINNED: u64 = 1 << 60;

impl Shared {
    /// Does the work of a stream, as long as there is some.
    fn work(&self, queue: &Queue) {
        while let Some(work) = queue.next() {
            self.gpu.take_time();
            if self.failure.lock().is_none()
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&Access { shared: self })))
                && !panic.is::<Broken>()
            {
                let said = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "the work panicked".to_owned());
                self.failure.lock().get_or_insert(said);
            }
            self.end_one();
        }
    }

    fn end_one(&self) {
        let mut pending = self.pending.lock();
        *pending -= 1;
        if *pending == 0 {
            self.is_idle.notify_all();
        }
    }
}

/// What work may do.
pub(super) struct Access<'a> {
    shared: &'a Shared,
}

/// The panic of work whose context is broken.
struct Broken;

impl Access<'_> {
    /// Returns the host address of device memory. If there is none, the context is broken.
    pub(super) fn resolve(&self, address: Address, len: usize) -> *mut u8 {
        if address & PINNED != 0 {
            return self.pinned(address, len);
        }
        let resolved = self.shared.gpu.resolve(&self.shared.opened, address, len);
        resolved.unwrap_or_else(|problem| {
            self.shared.failure.lock().get_or_insert(problem);
            resume_unwind(Box::new(Broken))
        })
    }

    /// Returns the host's address of pinned memory. If it is not pinned, the context is broken.
    pub(super) fn pinned(&self, address: Address, len: usize) -> *mut u8 {
        let at = (address & !PINNED) as usize;
        let is_pinned = |(&base, &pinned): (&usize, &usize)| at + len <= base + pinned;
        let found = self.shared.pinned.lock().range(..=at).next_back().is_some_and(is_pinned);
        if address & PINNED == 0 || !found {
            self.shared.failure.lock().get_or_insert_with(|| format!("{address:#x} is not pinned memory"));
            resume_unwind(Box::new(Broken));
        }
        std::ptr::with_exposed_provenance_mut(at)
    }

    /// Runs a kernel: no other one runs on the device at the same time.
    pub(super) fn kernel(&self, kernel: impl FnOnce()) {
        let _slice = self.shared.gpu.slice(self.shared.opened.device).lock();
        kernel();
    }

    /// Waits for a condition, or until the context is broken.
    pub(super) fn until(&self, is_so: impl Fn() -> bool) {
        let mut looks = 0u32;
        while !is_so() && self.shared.failure.lock().is_none() {
            looks += 1;
            if looks < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(20)) }
        }
    }
}

impl Streams {
    pub(super) fn new(gpu: &Arc<FakeGpu>, opened: &Arc<Reach>) -> Arc<Streams> {
        let shared = Shared {
            gpu: gpu.clone(),
            opened: opened.clone(),
            pending: Mutex::default(),
            is_idle: Condvar::new(),
            failure: Mutex::default(),
            pinned: Mutex::default(),
        };
        let streams = Streams { queues: Mutex::default(), captures: Mutex::default(), shared: Arc::new(shared) };
        streams.start(0);
        Arc::new(streams)
    }

    pub(super) fn start(&self, stream: usize) {
        self.queues.lock().insert(stream, Arc::default());
    }

    pub(super) fn end(&self, stream: StreamId) {
        self.queues.lock().remove(&stream.0);
    }

    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.queues.lock().contains_key(&stream.0)
    }

    /// Gives a stream work, or the graph that captures the stream's work.
    pub(super) fn push(&self, stream: StreamId, work: impl Fn(&Access<'_>) + Send + Sync + 'static) {
        if let Some(capturing) = self.captures.lock().get(&stream.0) {
            let mut state = capturing.state.lock();
            state.works.push(Arc::new(work));
            *state.clocks.get_mut(&stream.0).expect("it has joined").entry(stream.0).or_default() += 1;
            return;
        }
        *self.shared.pending.lock() += 1;
        let queue = self.queues.lock()[&stream.0].clone();
        let mut works = queue.works.lock();
        works.next.push_back(Arc::new(work));
        if !std::mem::replace(&mut works.has_thread, true) {
            let (shared, queue) = (self.shared.clone(), queue.clone());
            std::thread::spawn(move || shared.work(&queue));
        }
        queue.has_come.notify_one();
    }

    /// Waits until a stream has done all its work.
    pub(super) fn synchronise(&self, stream: StreamId) {
        assert!(self.capture(stream).is_none(), "a stream is awaited whose work a graph captures");
        let (done, wait) = unbounded::<()>();
        self.push(stream, move |_| _ = done.send(()));
        _ = wait.recv();
    }

    /// The capture that a stream belongs to.
    pub(super) fn capture(&self, stream: StreamId) -> Option<Arc<Capturing>> {
        self.captures.lock().get(&stream.0).cloned()
    }

    pub(super) fn begin_capture(&self, stream: StreamId, number: u64) {
        let capturing = Capturing { number, origin: stream.0, state: Mutex::default() };
        capturing.state.lock().clocks.insert(stream.0, Clock::new());
        let earlier = self.captures.lock().insert(stream.0, Arc::new(capturing));
        assert!(earlier.is_none(), "the stream is captured already");
    }

    /// Records an event on a stream that is captured.
    pub(super) fn record(&self, capturing: &Arc<Capturing>, stream: StreamId) -> Recorded {
        Recorded::Captured(capturing.clone(), capturing.state.lock().clocks[&stream.0].clone())
    }

    /// Has later work of a stream follow what comes before a record. The stream joins the capture.
    pub(super) fn follow(&self, stream: StreamId, capturing: &Arc<Capturing>, before: &Clock) -> Result<(), &'static str> {
        let mut captures = self.captures.lock();
        let own = captures.entry(stream.0).or_insert_with(|| capturing.clone());
        if !Arc::ptr_eq(own, capturing) {
            return Err("two captures would become one");
        }
        let mut state = capturing.state.lock();
        let clock = state.clocks.entry(stream.0).or_default();
        for (&other, &count) in before {
            let known = clock.entry(other).or_default();
            *known = count.max(*known);
        }
        Ok(())
    }

    /// Has `is_gone` be set when the graph of a capture is destroyed.
    pub(super) fn watch(&self, capturing: &Capturing, is_gone: Arc<AtomicBool>) {
        capturing.state.lock().watched.push(is_gone);
    }

    /// Ends a capture. Fails if work of another stream was not joined.
    pub(super) fn end_capture(&self, stream: StreamId) -> Result<FakeGraph, String> {
        let mut captures = self.captures.lock();
        let capturing = captures.get(&stream.0).cloned().ok_or("the stream is not captured")?;
        assert_eq!(capturing.origin, stream.0, "a capture ends where it began");
        captures.retain(|_, other| !Arc::ptr_eq(other, &capturing));
        let Captured { works, clocks, watched } = std::mem::take(&mut *capturing.state.lock());
        let graph = FakeGraph { works, watched, runs: Mutex::default() };
        let joined = &clocks[&stream.0];
        for (other, clock) in &clocks {
            if clock.get(other).copied().unwrap_or(0) > joined.get(other).copied().unwrap_or(0) {
                return Err(format!("work of stream {other} was not joined"));
            }
        }
        Ok(graph)
    }

    /// Has a stream replay a graph.
    pub(super) fn launch(&self, graph: &Arc<FakeGraph>, stream: StreamId) {
        let graph = graph.clone();
        self.push(stream, move |access| {
            let _alone = graph.runs.lock();
            for work in &graph.works {
                access.shared.gpu.take_time();
                work(access);
            }
        });
    }

    /// Waits until all streams have done all their work.
    pub(super) fn until_idle(&self) {
        let mut pending = self.shared.pending.lock();
        while *pending > 0 {
            self.shared.is_idle.wait(&mut pending);
        }
    }

    pub(super) fn pin(&self, memory: *mut u8, len: usize) -> Address {
        let at = memory.expose_provenance();
        assert!(self.shared.pinned.lock().insert(at, len).is_none(), "the memory is pinned already");
        at as Address | PINNED
    }

    pub(super) fn unpin(&self, memory: *mut u8) {
        self.shared.pinned.lock().remove(&memory.addr()).expect("the memory is pinned");
    }

    pub(super) fn pinned(&self) -> usize {
        self.shared.pinned.lock().values().sum()
    }

    pub(super) fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }
}
