//! A barrier of threads whose waits end.

use std::sync::{Condvar, Mutex};

use super::PATIENCE;

/// As [`std::sync::Barrier`], but a thread that the others do not join panics: one of them may have
/// failed, and the test would hang.
pub(crate) struct Barrier {
    threads: usize,
    /// How often threads have come.
    arrivals: Mutex<usize>,
    changed: Condvar,
}

impl Barrier {
    pub(crate) fn new(threads: usize) -> Barrier {
        Barrier { threads, arrivals: Mutex::new(0), changed: Condvar::new() }
    }

    pub(crate) fn wait(&self) {
        let mut arrivals = self.arrivals.lock().unwrap();
        *arrivals += 1;
        let all = arrivals.next_multiple_of(self.threads);
        self.changed.notify_all();
        // Each of the others may take as long as an operation.
        let (arrivals, waited) = self.changed.wait_timeout_while(arrivals, 2 * PATIENCE, |arrivals| *arrivals < all).unwrap();
        drop(arrivals);
        assert!(!waited.timed_out(), "not all threads have come to a barrier");
    }
}
