//! Which streams of this process kolo holds back, and what must wait until it holds back none.
//!
//! To free device memory, to unpin host memory, or to close another process's memory waits for all
//! streams, and meanwhile other driver calls wait, too. So this is done when no stream waits for
//! the host, on a thread that nothing else depends on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use crate::sys;
use crate::timeouts::{HELD_IDLE, STREAM_LOOK};

/// Work that waits for all streams.
type Release = Box<dyn FnOnce() + Send>;

/// Something that a stream may still use. Returns whether the stream has left it, and gives it back
/// then.
type Leaving = Box<dyn FnMut() -> bool + Send>;

/// The streams of one device that this process holds back.
pub(crate) struct Held {
    /// Forks that led to this process: another number in a forked child, which has no devices.
    forks: u32,
    /// Operations that streams may wait for.
    count: AtomicUsize,
    /// Shared by calls that enqueue such an operation. Taken alone by what waits for all streams.
    enqueueing: RwLock<()>,
    later: Mutex<Later>,
    changed: Condvar,
}

#[derive(Default)]
struct Later {
    releases: Vec<Release>,
    leaving: Vec<Leaving>,
    has_thread: bool,
    is_working: bool,
}

/// An operation that a stream may wait for.
pub(crate) struct Hold {
    held: Arc<Held>,
}

impl Default for Held {
    fn default() -> Held {
        Held {
            forks: sys::forks(),
            count: AtomicUsize::new(0),
            enqueueing: RwLock::default(),
            later: Mutex::default(),
            changed: Condvar::new(),
        }
    }
}

impl Held {
    /// Keeps releases from beginning while a call enqueues work that waits for the host.
    pub(crate) fn enqueueing(&self) -> RwLockReadGuard<'_, ()> {
        self.enqueueing.read()
    }

    /// Counts an operation until the hold is dropped.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.count.fetch_add(1, Ordering::SeqCst);
        Hold { held: self.clone() }
    }

    /// Calls a function when no stream is held back.
    pub(crate) fn later(self: &Arc<Self>, release: impl FnOnce() + Send + 'static) {
        self.add(|later| later.releases.push(Box::new(release)));
    }

    /// Calls a function from time to time, until it returns that its stream has left.
    pub(crate) fn until_left(self: &Arc<Self>, leaving: impl FnMut() -> bool + Send + 'static) {
        self.add(|later| later.leaving.push(Box::new(leaving)));
    }

    fn add(self: &Arc<Self>, add: impl FnOnce(&mut Later)) {
        if self.forks != sys::forks() {
            // What a forked child drops is its parent's.
            return;
        }
        let mut later = self.later.lock();
        add(&mut later);
        self.changed.notify_all();
        if later.has_thread {
            return;
        }
        let held = self.clone();
        match std::thread::Builder::new().name("kolo-cuda-free".to_owned()).spawn(move || held.work()) {
            Ok(_) => later.has_thread = true,
            // The next call tries again.
            Err(error) => crate::log::warn!(%error, "no thread to free the memory of a device"),
        }
    }

    fn work(&self) {
        let mut later = self.later.lock();
        loop {
            let mut leaving = std::mem::take(&mut later.leaving);
            later.is_working = true;
            drop(later);
            leaving.retain_mut(|leaving| !leaving());
            later = self.later.lock();
            later.leaving.append(&mut leaving);
            if !later.releases.is_empty()
                && self.count.load(Ordering::SeqCst) == 0
                && let Some(_alone) = self.enqueueing.try_write()
                // Again, because an operation may have been enqueued before the lock was taken.
                && self.count.load(Ordering::SeqCst) == 0
            {
                let releases = std::mem::take(&mut later.releases);
                drop(later);
                for release in releases {
                    if catch_unwind(AssertUnwindSafe(release)).is_err() {
                        crate::log::error!("freeing memory of a device panicked");
                    }
                }
                later = self.later.lock();
            }
            later.is_working = false;
            self.changed.notify_all();
            let has_work = !later.releases.is_empty() || !later.leaving.is_empty();
            let waited = self.changed.wait_for(&mut later, if has_work { STREAM_LOOK } else { HELD_IDLE });
            if waited.timed_out() && later.releases.is_empty() && later.leaving.is_empty() {
                later.has_thread = false;
                return;
            }
        }
    }

    /// Whether this process is the one that has the device.
    pub(crate) fn is_own(&self) -> bool {
        self.forks == sys::forks()
    }

    /// Waits until all that was to be done has been done.
    #[cfg(test)]
    pub(crate) fn until_released(&self) {
        let mut later = self.later.lock();
        while later.is_working || !later.releases.is_empty() || !later.leaving.is_empty() {
            let waited = self.changed.wait_for(&mut later, std::time::Duration::from_secs(60));
            assert!(!waited.timed_out(), "a stream is held back for ever");
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.held.is_own() && self.held.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            // The thread looks at once.
            self.held.changed.notify_all();
        }
    }
}
