//! A library with the name of NVIDIA's driver, for machines without a GPU: programs that use CUDA's
//! driver run with it unchanged, and with them the code of kolo that calls the driver. Its GPUs are in
//! host memory. Processes share them as the driver's do. `build.sh` makes libcuda.so.1 of it.
//!
//! Its lock, its streams, its events and its graphs are those of the fake device of the unit tests. Like
//! that, it is as unfriendly as the driver where a program can notice:
//!
//! - Device addresses are invalid on the host. An access to memory that is not there is an error that
//!   stays.
//! - A call that frees or unpins memory, closes another process's memory, makes or ends streams and
//!   events, or first launches a kernel takes a lock alone and waits for all streams. All other calls
//!   queue behind it.
//! - Kernels of two processes never run at once on a GPU.
//! - A process opens an allocation of another process once. Memory of pools cannot be opened.
//! - A call that CUDA calls unsafe ends a capture, unless its thread has the relaxed mode.
//!
//! `KOLO_FAKE_GPUS` is the number of GPUs (1 by default). `CUDA_VISIBLE_DEVICES` chooses some of them.
//! With `KOLO_FAKE_LIMIT` they say that they end kernels which run for some seconds.
//!
//! The kernels are those of `cuda-kernels`, compiled as C++: `kernels.cpp`.

#![cfg(target_os = "linux")]

mod calls;
mod code;
mod kernel;
#[path = "../../../src/cuda/fake_device/lock.rs"]
mod lock;
mod memory;
#[path = "../../../src/cuda/fake_device/stream.rs"]
#[allow(dead_code, reason = "the fake device uses more of it")]
mod stream;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::Mutex;

use self::code::{Code, ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_HANDLE};
use self::kernel::Kernels;
use self::lock::DriverLock;
use self::memory::{Memory, Physical};
use self::stream::{FakeGraph, Mark, Mode, Space, Streams};

type Answer<R = ()> = Result<R, Code>;

/// The number of the next stream, event, graph, allocation or handle. Small numbers are the default
/// streams.
static NEXT: AtomicUsize = AtomicUsize::new(16);

fn next() -> usize {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

thread_local! {
    /// The ordinals of the GPUs whose contexts are current.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Returns the ordinal of the GPU whose context is current.
fn current() -> Answer<usize> {
    CURRENT.with_borrow(|current| current.last().copied().ok_or(INVALID_CONTEXT))
}

/// What the program has, by the numbers that it knows as handles.
struct Table<T>(Mutex<HashMap<usize, T>>);

impl<T: Clone> Table<T> {
    fn add(&self, one: T) -> usize {
        let number = next();
        self.0.lock().insert(number, one);
        number
    }

    fn get(&self, number: usize) -> Answer<T> {
        self.0.lock().get(&number).cloned().ok_or(INVALID_HANDLE)
    }

    fn remove(&self, number: usize) -> Answer<T> {
        self.0.lock().remove(&number).ok_or(INVALID_HANDLE)
    }
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table(Mutex::default())
    }
}

/// What a graph destroys with itself.
struct UserObject {
    pointer: usize,
    destroy: extern "C" fn(usize),
}

impl Drop for UserObject {
    fn drop(&mut self) {
        (self.destroy)(self.pointer);
    }
}

struct Process {
    lock: DriverLock,
    /// The GPUs that this process sees.
    gpus: Vec<usize>,
    streams: Streams,
    /// The ordinal of the GPU of each stream.
    of_streams: Table<usize>,
    /// By ordinal.
    default_streams: Mutex<HashMap<usize, usize>>,
    memory: Memory,
    kernels: Kernels,
    events: Table<Arc<Mark>>,
    graphs: Table<Arc<FakeGraph>>,
    physical: Table<Arc<Physical>>,
    /// With how many references the program has.
    objects: Mutex<HashMap<usize, (Arc<UserObject>, u32)>>,
    /// The contexts that have access to others.
    peers: Mutex<HashSet<(usize, usize)>>,
}

/// The streams find memory where the process has it.
struct Addresses;

impl Space for Addresses {
    fn resolve(&self, address: u64, len: usize) -> Result<*mut u8, String> {
        let resolved = process().memory.resolve(address, len);
        resolved.ok_or_else(|| {
            let problem = format!("{len} bytes at {address:#x} are not device memory");
            eprintln!("fake CUDA driver: {problem}");
            problem
        })
    }
}

fn process() -> &'static Process {
    static ONLY: LazyLock<Process> = LazyLock::new(|| Process {
        lock: DriverLock::new(Duration::MAX),
        gpus: visible(),
        streams: Streams::new(Addresses),
        of_streams: Table::default(),
        default_streams: Mutex::default(),
        memory: Memory::default(),
        kernels: Kernels::default(),
        events: Table::default(),
        graphs: Table::default(),
        physical: Table::default(),
        objects: Mutex::default(),
        peers: Mutex::default(),
    });
    &ONLY
}

/// Returns the GPUs that the environment lets this process see.
fn visible() -> Vec<usize> {
    let count = std::env::var("KOLO_FAKE_GPUS").ok().and_then(|count| count.parse().ok()).unwrap_or(1);
    let Ok(visible) = std::env::var("CUDA_VISIBLE_DEVICES") else { return (0..count).collect() };
    visible.split(',').map_while(|gpu| gpu.parse().ok().filter(|&gpu| gpu < count)).collect()
}

impl Process {
    fn check(&self) -> Answer {
        if self.streams.failure().is_some() { Err(ILLEGAL_ADDRESS) } else { Ok(()) }
    }

    /// Makes a call that shares the lock.
    fn share<R>(&self, call: impl FnOnce() -> Answer<R>) -> Answer<R> {
        self.lock.share(|| {
            self.check()?;
            call()
        })
    }

    /// Makes a call that takes the lock alone and waits for all streams.
    fn alone<R>(&self, call: impl FnOnce() -> Answer<R>) -> Answer<R> {
        self.lock.alone(|| {
            self.streams.until_idle();
            self.check()?;
            call()
        })
    }

    /// Refuses a call that is unsafe while a graph is captured, and ends the capture.
    fn refuse_in_capture(&self) -> Answer {
        Ok(self.streams.refuse_in_capture(MODE.get())?)
    }

    fn new_stream(&self, ordinal: usize) -> usize {
        let stream = self.of_streams.add(ordinal);
        self.streams.start(stream);
        stream
    }

    /// Returns the stream of a handle, which may be a default stream.
    fn find(&self, handle: usize) -> Answer<usize> {
        if handle > 2 {
            return self.of_streams.get(handle).map(|_| handle);
        }
        let ordinal = current()?;
        Ok(*self.default_streams.lock().entry(ordinal).or_insert_with(|| self.new_stream(ordinal)))
    }

    /// Gives a stream work, or the graph that captures the stream's work.
    fn enqueue(&self, handle: usize, work: impl Fn(&stream::Access<'_>) + Send + Sync + 'static) -> Answer {
        Ok(self.streams.push(self.find(handle)?, work)?)
    }

    fn synchronise(&self, handle: usize) -> Answer {
        self.streams.synchronise(self.find(handle)?)?;
        self.check()
    }
}
