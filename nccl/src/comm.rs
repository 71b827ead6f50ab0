//! Communicators: what a handle stands for, and in which state it is.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use kolo::Communicator;
use kolo::raw::{RawWork, forks};

use crate::codes::*;
use crate::config::Config;
use crate::driver;
use crate::fault::Fault;
use crate::last;
use crate::registry::{Kind, Registry};
use crate::scalar::Factor;

/// A communicator in C: a number that is never followed.
pub(crate) struct ncclComm {
    _opaque: [u8; 0],
}
pub(crate) type ncclComm_t = *mut ncclComm;

/// What a handle stands for.
pub(crate) struct Comm {
    state: Mutex<State>,
    /// How many calls that prepare or end it run on threads of their own.
    pending: AtomicUsize,
    is_aborted: AtomicBool,
    is_finalized: AtomicBool,
    /// Whether another rank of it is in this process.
    has_companion: AtomicBool,
    pub(crate) config: Config,
    /// The device that was current when it was made; -1 without a driver.
    pub(crate) device: c_int,
    /// What streams wait for, and what has not been pruned yet.
    works: Mutex<Vec<RawWork>>,
    /// The operators of ncclRedOpCreatePreMulSum, by their number.
    pub(crate) operators: Mutex<BTreeMap<c_int, Factor>>,
    /// Registered memory, by handle.
    pub(crate) registered: Mutex<BTreeMap<usize, Registration>>,
    last: Mutex<String>,
    /// Whether the failure that ended it was remembered. Programs ask for the state again and again.
    has_told_failure: AtomicBool,
    forks: u32,
}

/// Memory of ncclCommRegister or ncclCommWindowRegister.
#[derive(Clone, Copy)]
pub(crate) struct Registration {
    pub(crate) address: usize,
    pub(crate) is_window: bool,
}

enum State {
    Starting,
    Ready(Arc<Communicator>),
    Failed(Fault),
}

static COMMUNICATORS: Registry<Arc<Comm>> = Registry::new(Kind::Communicator);

impl Comm {
    /// Makes a communicator that has not started, and its handle.
    pub(crate) fn starting(config: Config, device: c_int) -> Result<(Arc<Comm>, ncclComm_t), Fault> {
        let comm = Arc::new(Comm {
            state: Mutex::new(State::Starting),
            pending: AtomicUsize::new(0),
            is_aborted: AtomicBool::new(false),
            is_finalized: AtomicBool::new(false),
            has_companion: AtomicBool::new(false),
            config,
            device,
            works: Mutex::default(),
            operators: Mutex::default(),
            registered: Mutex::default(),
            last: Mutex::default(),
            has_told_failure: AtomicBool::new(false),
            forks: forks(),
        });
        let handle = COMMUNICATORS
            .insert(comm.clone())
            .map_err(|_| Fault::System("there are too many communicators; destroy some".to_owned()))?;
        Ok((comm, std::ptr::without_provenance_mut(handle)))
    }

    /// Sets what starting has led to, and whether another rank is in this process.
    pub(crate) fn started(&self, result: Result<(Communicator, bool), Fault>) {
        let mut state = self.state.lock();
        match result {
            Ok((comm, has_companion)) => {
                if self.is_aborted.load(Ordering::SeqCst) {
                    comm.abort();
                }
                self.has_companion.store(has_companion, Ordering::SeqCst);
                *state = State::Ready(Arc::new(comm));
            }
            Err(fault) => {
                self.note(&fault.to_string());
                *state = State::Failed(fault);
            }
        }
    }

    /// Refuses device memory where another rank of the communicator is in this process. The driver may
    /// wait for all streams of a process, also for one that waits for this rank.
    pub(crate) fn check_memory(&self, buffers: [*const c_void; 2]) -> Result<(), Fault> {
        match self.has_companion.load(Ordering::SeqCst) && buffers.into_iter().any(driver::is_on_device) {
            true => Err(Fault::usage(
                "the buffer is in device memory, and several ranks of the communicator are in this process, where their \
                 streams would wait for each other; start a process for each rank, or use host memory",
            )),
            false => Ok(()),
        }
    }

    /// Returns kolo's communicator, if calls are allowed now.
    pub(crate) fn ready(&self) -> Result<Arc<Communicator>, Fault> {
        self.check_process()?;
        if self.pending.load(Ordering::SeqCst) > 0 {
            return Err(in_progress());
        }
        match &*self.state.lock() {
            State::Starting => Err(in_progress()),
            State::Ready(comm) => Ok(comm.clone()),
            State::Failed(fault) => Err(fault.clone()),
        }
    }

    /// As [`Comm::ready`], for calls that send data.
    pub(crate) fn for_calls(&self) -> Result<Arc<Communicator>, Fault> {
        if self.is_finalized.load(Ordering::SeqCst) {
            return Err(Fault::usage("the communicator was finalized; it takes no more operations"));
        }
        self.ready()
    }

    fn check_process(&self) -> Result<(), Fault> {
        match self.forks == forks() {
            true => Ok(()),
            false => Err(Fault::usage("this process was forked after the communicator was made; make a new one here")),
        }
    }

    /// Returns the state, as ncclCommGetAsyncError does.
    pub(crate) fn state(&self) -> ncclResult_t {
        if self.check_process().is_err() {
            return INVALID_USAGE;
        }
        let comm = match &*self.state.lock() {
            State::Starting => return IN_PROGRESS,
            State::Failed(fault) => return fault.code(),
            State::Ready(comm) => comm.clone(),
        };
        if self.pending.load(Ordering::SeqCst) > 0 {
            return IN_PROGRESS;
        }
        // What the program asked for is no error.
        match comm.failure() {
            Some(error) if !self.is_aborted.load(Ordering::SeqCst) => {
                let fault = Fault::from(error.clone());
                if !self.has_told_failure.swap(true, Ordering::Relaxed) {
                    self.remember(&fault.to_string());
                }
                fault.code()
            }
            _ => SUCCESS,
        }
    }

    /// Marks a call that runs on a thread of its own.
    pub(crate) fn begin(self: &Arc<Comm>) -> Pending {
        self.pending.fetch_add(1, Ordering::SeqCst);
        Pending(self.clone())
    }

    /// Keeps an operation for which a stream waits.
    pub(crate) fn keep(&self, work: RawWork) {
        let mut works = self.works.lock();
        works.retain(|work| !work.is_finished());
        works.push(work);
    }

    /// Waits until all operations have ended. Each has a deadline.
    pub(crate) fn flush(&self) -> Result<(), Fault> {
        let works = std::mem::take(&mut *self.works.lock());
        let mut result = Ok(());
        for work in works {
            if let Some(Err(error)) = work.outcome(None) {
                result = result.and(Err(Fault::from(error)));
            }
        }
        result
    }

    /// Allows no more operations. Returns false if that is so already.
    pub(crate) fn finalize(&self) -> bool {
        !self.is_finalized.swap(true, Ordering::SeqCst)
    }

    /// Cancels everything, also a start.
    pub(crate) fn abort(&self) {
        self.is_aborted.store(true, Ordering::SeqCst);
        let comm = match &*self.state.lock() {
            State::Ready(comm) => Some(comm.clone()),
            _ => None,
        };
        if let Some(comm) = comm {
            comm.abort();
        }
    }

    /// Ends the start, if the communicator has not started: the program has destroyed it, and waits no
    /// longer.
    pub(crate) fn abandon(&self) {
        if matches!(*self.state.lock(), State::Starting) {
            self.is_aborted.store(true, Ordering::SeqCst);
        }
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// Remembers an error that no call returns, also as the last one of the process, unless it is the
    /// last one of the communicator already.
    pub(crate) fn remember(&self, text: &str) {
        if self.note(text) {
            last::report(text);
        }
    }

    /// Remembers an error of this communicator, which its caller reports. Returns whether it is another
    /// one than before.
    pub(crate) fn note(&self, text: &str) -> bool {
        let mut last = self.last.lock();
        let is_other = *last != text;
        text.clone_into(&mut last);
        is_other
    }

    pub(crate) fn last(&self) -> String {
        self.last.lock().clone()
    }
}

/// A call in progress on a thread of its own.
pub(crate) struct Pending(Arc<Comm>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::SeqCst);
    }
}

fn in_progress() -> Fault {
    Fault::argument(
        "an earlier call on the communicator is in progress; wait until ncclCommGetAsyncError no longer gives ncclInProgress",
    )
}

/// Returns what a handle stands for.
pub(crate) fn enter(comm: ncclComm_t) -> Result<Arc<Comm>, Fault> {
    let found = COMMUNICATORS.get(comm.addr()).map(|comm| comm.clone());
    found.ok_or_else(|| match comm.is_null() {
        true => Fault::argument("comm is null"),
        false => Fault::argument("comm is no communicator, or was destroyed or aborted"),
    })
}

/// Takes a communicator out of the table: its handle is invalid from now on. `Ok(None)` in a forked
/// child, if a thread of its parent used it at the fork.
pub(crate) fn take(comm: ncclComm_t) -> Result<Option<Arc<Comm>>, Fault> {
    enter(comm)?;
    COMMUNICATORS.take(comm.addr()).ok_or_else(|| Fault::argument("comm was destroyed meanwhile"))
}
