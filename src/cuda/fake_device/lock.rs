//! The lock of a driver in one process. Most calls share it. Some take it alone, and while such a
//! call waits, all later calls queue behind it, as in CUDA.
//!
//! The fake device of the unit tests and the fake driver in `tests/cuda_driver` both have this file.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub(super) struct DriverLock {
    state: Mutex<State>,
    changed: Condvar,
    /// How long a call waits for the lock before it panics. Calls of the real driver wait for ever.
    most: Duration,
}

#[derive(Default)]
struct State {
    sharing: usize,
    is_alone: bool,
    wanting_alone: usize,
}

impl DriverLock {
    pub(super) fn new(most: Duration) -> DriverLock {
        DriverLock { state: Mutex::default(), changed: Condvar::new(), most }
    }

    /// Runs a call that shares the lock.
    pub(super) fn share<R>(&self, call: impl FnOnce() -> R) -> R {
        let mut state = self.state.lock();
        while state.is_alone || state.wanting_alone > 0 {
            let waited = self.changed.wait_for(&mut state, self.most);
            assert!(!waited.timed_out(), "a driver call waits for ever behind a call that waits for a stream");
        }
        state.sharing += 1;
        drop(state);
        let result = call();
        self.state.lock().sharing -= 1;
        self.changed.notify_all();
        result
    }

    /// Runs a call that takes the lock alone.
    pub(super) fn alone<R>(&self, call: impl FnOnce() -> R) -> R {
        let mut state = self.state.lock();
        state.wanting_alone += 1;
        while state.is_alone || state.sharing > 0 {
            let waited = self.changed.wait_for(&mut state, self.most);
            assert!(!waited.timed_out(), "a driver call waits for ever for another");
        }
        state.wanting_alone -= 1;
        state.is_alone = true;
        drop(state);
        let result = call();
        self.state.lock().is_alone = false;
        self.changed.notify_all();
        result
    }
}
