//! A thread that lets streams continue, and ends the communicator, if the thread that runs their
//! operation makes no progress, for example because it waits for a full pipe of the program's log. It
//! calls no driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::failure;
use crate::progress::CommState;
use crate::timeouts::{WATCHDOG_GRACE, WATCHDOG_LOOK};

/// An operation that is watched until this is dropped.
pub(super) struct Watched(Arc<Entry>);

struct Entry {
    shared: Weak<CommState>,
    /// The operation's own deadlines end each of its steps earlier.
    patience: Duration,
    /// When its last step began.
    step: Mutex<Instant>,
    /// Set at its end, or when it was late: it is not watched any more.
    has_ended: AtomicBool,
}

/// How often it looks in vain before it ends.
const IDLE: u32 = 20;

static WATCHED: Mutex<List> = Mutex::new(List { entries: Vec::new(), has_thread: false });

struct List {
    entries: Vec<Arc<Entry>>,
    has_thread: bool,
}

impl Watched {
    pub(super) fn new(shared: &Arc<CommState>, timeout: Duration) -> Watched {
        let entry = Arc::new(Entry {
            shared: Arc::downgrade(shared),
            patience: timeout.saturating_add(WATCHDOG_GRACE),
            step: Mutex::new(Instant::now()),
            has_ended: AtomicBool::new(false),
        });
        let mut list = WATCHED.lock();
        list.entries.push(entry.clone());
        if !list.has_thread {
            match std::thread::Builder::new().name("kolo-cuda-watch".to_owned()).spawn(watch) {
                Ok(_) => list.has_thread = true,
                Err(error) => crate::log::warn!(%error, "no thread watches operations on devices"),
            }
        }
        Watched(entry)
    }

    /// Another step begins.
    pub(super) fn step(&self) {
        *self.0.step.lock() = Instant::now();
    }
}

#[cfg(test)]
impl Watched {
    /// Has the step of a communicator's operation begun this much earlier, and returns when it has;
    /// `None` if no operation is watched.
    pub(super) fn backdate(shared: &Arc<CommState>, earlier: Duration) -> Option<Instant> {
        let list = WATCHED.lock();
        let is_its = |entry: &&Arc<Entry>| std::ptr::eq(entry.shared.as_ptr(), Arc::as_ptr(shared));
        let entry = list.entries.iter().filter(is_its).find(|entry| !entry.has_ended.load(Ordering::Relaxed))?;
        let mut step = entry.step.lock();
        *step -= earlier;
        Some(*step)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Relaxed);
    }
}

fn watch() {
    let mut in_vain = 0;
    loop {
        std::thread::sleep(WATCHDOG_LOOK);
        let mut list = WATCHED.lock();
        list.entries.retain(|entry| !entry.has_ended.load(Ordering::Relaxed));
        in_vain = if list.entries.is_empty() { in_vain + 1 } else { 0 };
        if in_vain == IDLE {
            list.has_thread = false;
            return;
        }
        let is_late = |entry: &&Arc<Entry>| entry.step.lock().elapsed() >= entry.patience;
        let late: Vec<_> = list.entries.iter().filter(is_late).cloned().collect();
        drop(list);
        for entry in late {
            entry.has_ended.store(true, Ordering::Relaxed);
            if let Some(shared) = entry.shared.upgrade() {
                // The streams first: whatever else happens, they continue. The operation notices it.
                shared.devices.release();
                failure::abort(&shared.status);
            }
        }
    }
}
