//! The streams of a process on a fake GPU: threads that do the work they are given in order.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use parking_lot::{Condvar, Mutex};

use super::memory::{FakeGpu, Reach};
use crate::cuda::device::{Address, StreamId};

type Work = Box<dyn FnOnce(&Access<'_>) + Send>;

/// An event: whether its last record is done. A stream that waits for an earlier record keeps waiting
/// for that one.
pub(super) struct Mark {
    pub(super) last: Mutex<Arc<AtomicBool>>,
}

impl Default for Mark {
    fn default() -> Mark {
        Mark { last: Mutex::new(Arc::new(AtomicBool::new(true))) }
    }
}

pub(super) struct Streams {
    senders: Mutex<HashMap<usize, Sender<Work>>>,
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

    /// Runs a kernel: no kernel of another process runs at the same time.
    pub(super) fn kernel(&self, kernel: impl FnOnce()) {
        let _slice = self.shared.gpu.slice.lock();
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
        let streams = Streams { senders: Mutex::default(), shared: Arc::new(shared) };
        streams.start(0);
        Arc::new(streams)
    }

    pub(super) fn start(&self, stream: usize) {
        let (sender, works) = unbounded::<Work>();
        let shared = self.shared.clone();
        std::thread::spawn(move || {
            while let Ok(work) = works.recv() {
                shared.gpu.take_time();
                if shared.failure.lock().is_none()
                    && let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&Access { shared: &shared })))
                    && !panic.is::<Broken>()
                {
                    let said = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "the work panicked".to_owned());
                    shared.failure.lock().get_or_insert(said);
                }
                shared.end_one();
            }
        });
        self.senders.lock().insert(stream, sender);
    }

    pub(super) fn end(&self, stream: StreamId) {
        self.senders.lock().remove(&stream.0);
    }

    pub(super) fn has(&self, stream: StreamId) -> bool {
        self.senders.lock().contains_key(&stream.0)
    }

    pub(super) fn push(&self, stream: StreamId, work: impl FnOnce(&Access<'_>) + Send + 'static) {
        *self.shared.pending.lock() += 1;
        let sent = self.senders.lock()[&stream.0].send(Box::new(work));
        sent.expect("the thread receives work as long as there is a sender");
    }

    /// Waits until a stream has done all its work.
    pub(super) fn synchronise(&self, stream: StreamId) {
        let (done, wait) = unbounded::<()>();
        self.push(stream, move |_| drop(done));
        _ = wait.recv();
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

    pub(super) fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }
}
