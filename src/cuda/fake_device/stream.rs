//! The streams of a process on fake GPUs, with their events and the graphs that capture their work.
//! Each stream has a thread that does its work in order. Devices stay for the life of the process,
//! so a thread ends when it has been idle for a moment.
//!
//! The fake device of the unit tests and the fake driver in `tests/cuda_driver` both have this file.

use std::any::Any;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use crossbeam_channel::unbounded;
use parking_lot::{Condvar, Mutex};

/// An address as the work of streams uses it.
type Address = u64;

type Work = Arc<dyn Fn(&Access<'_>) + Send + Sync>;

/// What lives as long as a graph.
pub(super) type Object = Box<dyn Any + Send + Sync>;

/// The memory that the streams of a process use.
pub(super) trait Space: Send + Sync {
    /// Returns the host's address of device memory, or why there is none.
    fn resolve(&self, address: Address, len: usize) -> Result<*mut u8, String>;

    /// Waits as long as a GPU takes before it begins with a work.
    fn take_time(&self) {}
}

/// Why a stream or an event does not do what it is asked for, as CUDA names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The call is unsafe while a graph captures work.
    Unsupported,
    /// The capture has failed before.
    Invalidated,
    /// Two captures would become one.
    Merge,
    /// A capture does not end where it began.
    Unmatched,
    /// Work of another stream was not joined.
    Unjoined,
    /// The event was recorded outside of the capture.
    Isolation,
    /// The event was recorded in a capture.
    CapturedEvent,
}

/// Which calls end a capture: those of all threads, of the thread that began it, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Global,
    ThreadLocal,
    Relaxed,
}

/// An event: whether its last record is done. A stream that waits for an earlier record keeps waiting
/// for that one.
pub(super) struct Mark {
    last: Mutex<Recorded>,
}

/// A record of an event.
#[derive(Clone)]
enum Recorded {
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

impl Mark {
    /// Returns whether the last record is done.
    pub(super) fn is_done(&self) -> Result<bool, Refusal> {
        match &*self.last.lock() {
            Recorded::Now(done) => Ok(done.load(Ordering::SeqCst)),
            Recorded::Captured(..) => Err(Refusal::CapturedEvent),
        }
    }
}

/// How much work of each stream comes before.
type Clock = HashMap<usize, usize>;

/// The capture of a graph.
pub(super) struct Capturing {
    pub(super) number: u64,
    /// The stream and the thread with which it began.
    origin: (usize, ThreadId),
    mode: Mode,
    state: Mutex<Captured>,
}

impl Capturing {
    /// Has the capture fail.
    fn invalidate(&self) {
        self.state.lock().is_invalid = true;
    }

    pub(super) fn is_invalid(&self) -> bool {
        self.state.lock().is_invalid
    }
}

#[derive(Default)]
struct Captured {
    /// The work of all streams, in an order that is right for each of them.
    works: Vec<Work>,
    /// What comes before the next work of each stream, itself included.
    clocks: HashMap<usize, Clock>,
    objects: Vec<Object>,
    is_invalid: bool,
}

/// A graph, with what was instantiated from it.
pub(crate) struct FakeGraph {
    works: Vec<Work>,
    /// Dropped with the graph.
    _objects: Vec<Object>,
    /// Two replays never run at once.
    runs: Mutex<()>,
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
    space: Box<dyn Space>,
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
            self.space.take_time();
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

    fn resolve_pinned(&self, address: Address, len: usize) -> Result<*mut u8, String> {
        let at = (address & !PINNED) as usize;
        let is_pinned = |(&base, &pinned): (&usize, &usize)| at + len <= base + pinned;
        let found = self.pinned.lock().range(..=at).next_back().is_some_and(is_pinned);
        if address & PINNED == 0 || !found {
            return Err(format!("{len} bytes at {address:#x} are not pinned memory"));
        }
        Ok(std::ptr::with_exposed_provenance_mut(at))
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
    /// Returns the host's address of device memory, or of pinned memory. If there is none, the context
    /// is broken, and this work ends.
    pub(super) fn resolve(&self, address: Address, len: usize) -> *mut u8 {
        self.find(address, len).unwrap_or_else(|| resume_unwind(Box::new(Broken)))
    }

    /// As [`resolve`](Access::resolve), but of pinned memory only.
    pub(super) fn pinned(&self, address: Address, len: usize) -> *mut u8 {
        let found = self.shared.resolve_pinned(address, len);
        found.unwrap_or_else(|problem| {
            self.shared.failure.lock().get_or_insert(problem);
            resume_unwind(Box::new(Broken))
        })
    }

    /// As [`resolve`](Access::resolve), but returns `None` where the context is broken.
    pub(super) fn find(&self, address: Address, len: usize) -> Option<*mut u8> {
        let is_pinned = address & PINNED != 0;
        let found = if is_pinned { self.shared.resolve_pinned(address, len) } else { self.shared.space.resolve(address, len) };
        found.map_err(|problem| self.shared.failure.lock().get_or_insert(problem).clone()).ok()
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
    pub(super) fn new(space: impl Space + 'static) -> Streams {
        let shared = Shared {
            space: Box::new(space),
            pending: Mutex::default(),
            is_idle: Condvar::new(),
            failure: Mutex::default(),
            pinned: Mutex::default(),
        };
        Streams { queues: Mutex::default(), captures: Mutex::default(), shared: Arc::new(shared) }
    }

    pub(super) fn start(&self, stream: usize) {
        self.queues.lock().insert(stream, Arc::default());
    }

    pub(super) fn end(&self, stream: usize) {
        self.queues.lock().remove(&stream);
    }

    pub(super) fn has(&self, stream: usize) -> bool {
        self.queues.lock().contains_key(&stream)
    }

    /// Gives a stream work, or the graph that captures the stream's work.
    pub(super) fn push(&self, stream: usize, work: impl Fn(&Access<'_>) + Send + Sync + 'static) -> Result<(), Refusal> {
        if let Some(capturing) = self.captures.lock().get(&stream) {
            let mut state = capturing.state.lock();
            if state.is_invalid {
                return Err(Refusal::Invalidated);
            }
            state.works.push(Arc::new(work));
            *state.clocks.get_mut(&stream).expect("it has joined").entry(stream).or_default() += 1;
            return Ok(());
        }
        *self.shared.pending.lock() += 1;
        let queue = self.queues.lock()[&stream].clone();
        let mut works = queue.works.lock();
        works.next.push_back(Arc::new(work));
        if !std::mem::replace(&mut works.has_thread, true) {
            let (shared, queue) = (self.shared.clone(), queue.clone());
            std::thread::spawn(move || shared.work(&queue));
        }
        queue.has_come.notify_one();
        Ok(())
    }

    /// Waits until a stream has done all its work.
    pub(super) fn synchronise(&self, stream: usize) -> Result<(), Refusal> {
        if let Some(capturing) = self.capture(stream) {
            capturing.invalidate();
            return Err(Refusal::Unsupported);
        }
        let (done, wait) = unbounded::<()>();
        self.push(stream, move |_| _ = done.send(()))?;
        _ = wait.recv();
        Ok(())
    }

    /// The capture that a stream belongs to.
    pub(super) fn capture(&self, stream: usize) -> Option<Arc<Capturing>> {
        self.captures.lock().get(&stream).cloned()
    }

    /// Whether a graph captures work of any stream.
    pub(super) fn is_capturing(&self) -> bool {
        !self.captures.lock().is_empty()
    }

    /// Refuses a call that is unsafe while a graph is captured, and ends the capture. `mode` is that of
    /// the calling thread.
    pub(super) fn refuse_in_capture(&self, mode: Mode) -> Result<(), Refusal> {
        for capturing in self.captures.lock().values() {
            let is_own = capturing.origin.1 == std::thread::current().id();
            let is_for_all = capturing.mode == Mode::Global && mode == Mode::Global;
            if mode != Mode::Relaxed && (is_for_all || (capturing.mode != Mode::Relaxed && is_own)) {
                capturing.invalidate();
                return Err(Refusal::Unsupported);
            }
        }
        Ok(())
    }

    /// Has a graph capture the work of a stream, unless one does already.
    pub(super) fn begin_capture(&self, stream: usize, mode: Mode, number: u64) -> Result<(), Refusal> {
        let mut captures = self.captures.lock();
        if captures.contains_key(&stream) {
            return Err(Refusal::Merge);
        }
        let origin = (stream, std::thread::current().id());
        let capturing = Capturing { number, origin, mode, state: Mutex::default() };
        capturing.state.lock().clocks.insert(stream, Clock::new());
        captures.insert(stream, Arc::new(capturing));
        Ok(())
    }

    /// Records an event on a stream.
    pub(super) fn record(&self, mark: &Mark, stream: usize) -> Result<(), Refusal> {
        if let Some(capturing) = self.capture(stream) {
            let before = capturing.state.lock().clocks[&stream].clone();
            *mark.last.lock() = Recorded::Captured(capturing, before);
            return Ok(());
        }
        let done = Arc::new(AtomicBool::new(false));
        *mark.last.lock() = Recorded::Now(done.clone());
        self.push(stream, move |_| done.store(true, Ordering::SeqCst))
    }

    /// Has later work of a stream wait for an event. If that was recorded in a capture, the stream joins
    /// the capture.
    pub(super) fn wait_for(&self, stream: usize, mark: &Mark) -> Result<(), Refusal> {
        let last = mark.last.lock().clone();
        match last {
            Recorded::Now(_) if self.capture(stream).is_some() => Err(Refusal::Isolation),
            Recorded::Now(done) => self.push(stream, move |access| access.until(|| done.load(Ordering::SeqCst))),
            Recorded::Captured(capturing, before) => self.follow(stream, &capturing, &before),
        }
    }

    fn follow(&self, stream: usize, capturing: &Arc<Capturing>, before: &Clock) -> Result<(), Refusal> {
        let mut captures = self.captures.lock();
        let own = captures.entry(stream).or_insert_with(|| capturing.clone());
        if !Arc::ptr_eq(own, capturing) {
            return Err(Refusal::Merge);
        }
        let mut state = capturing.state.lock();
        let clock = state.clocks.entry(stream).or_default();
        for (&other, &count) in before {
            let known = clock.entry(other).or_default();
            *known = count.max(*known);
        }
        Ok(())
    }

    /// Has an object live as long as the graph of a capture. Returns whether there is such a capture.
    pub(super) fn keep(&self, number: u64, object: Object) -> bool {
        let captures = self.captures.lock();
        let Some(capturing) = captures.values().find(|capturing| capturing.number == number) else { return false };
        capturing.state.lock().objects.push(object);
        true
    }

    /// Ends a capture. Fails if it has failed before, or if work of another stream was not joined.
    pub(super) fn end_capture(&self, stream: usize) -> Result<FakeGraph, Refusal> {
        let mut captures = self.captures.lock();
        let capturing = captures.get(&stream).filter(|capturing| capturing.origin.0 == stream);
        let capturing = capturing.cloned().ok_or(Refusal::Unmatched)?;
        captures.retain(|_, other| !Arc::ptr_eq(other, &capturing));
        let Captured { works, clocks, objects, is_invalid } = std::mem::take(&mut *capturing.state.lock());
        let joined = &clocks[&stream];
        let of = |clock: &Clock, other: usize| clock.get(&other).copied().unwrap_or(0);
        if is_invalid {
            Err(Refusal::Invalidated)
        } else if clocks.iter().any(|(&other, clock)| of(clock, other) > of(joined, other)) {
            Err(Refusal::Unjoined)
        } else {
            Ok(FakeGraph { works, _objects: objects, runs: Mutex::default() })
        }
    }

    /// Has a stream replay a graph.
    pub(super) fn launch(&self, graph: &Arc<FakeGraph>, stream: usize) -> Result<(), Refusal> {
        let graph = graph.clone();
        self.push(stream, move |access| {
            let _alone = graph.runs.lock();
            for work in &graph.works {
                access.shared.space.take_time();
                work(access);
            }
        })
    }

    /// Waits until all streams have done all their work.
    pub(super) fn until_idle(&self) {
        let mut pending = self.shared.pending.lock();
        while *pending > 0 {
            self.shared.is_idle.wait(&mut pending);
        }
    }

    /// Pins host memory, and returns the address under which devices reach it; `None` if it is pinned
    /// already.
    pub(super) fn pin(&self, memory: *mut u8, len: usize) -> Option<Address> {
        let at = memory.expose_provenance();
        match self.shared.pinned.lock().entry(at) {
            Entry::Occupied(_) => None,
            Entry::Vacant(place) => {
                place.insert(len);
                Some(at as Address | PINNED)
            }
        }
    }

    /// Returns the address under which devices reach pinned memory; `None` if it is not pinned.
    pub(super) fn address_of_pinned(&self, memory: *const u8) -> Option<Address> {
        let address = memory.addr() as Address | PINNED;
        self.shared.resolve_pinned(address, 1).ok().map(|_| address)
    }

    /// Returns whether the memory was pinned.
    pub(super) fn unpin(&self, memory: *mut u8) -> bool {
        self.shared.pinned.lock().remove(&memory.addr()).is_some()
    }

    /// Returns how many bytes are pinned.
    pub(super) fn pinned(&self) -> usize {
        self.shared.pinned.lock().values().sum()
    }

    pub(super) fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }
}
