//! The lock of a driver in one process. Most calls share it. Some take it alone, and while such a
//! call waits, all later calls queue behind it, as in CUDA.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub(super) struct DriverLock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sharing: usize,
    is_alone: bool,
    wanting_alone: usize,
}

/// How long a test waits for the lock. Calls of the real driver wait for ever.
const FOREVER: Duration = Duration::from_secs(20);

impl DriverLock {
    /// Runs a call that shares the lock.
    pub(super) fn share<R>(&self, call: impl FnOnce() -> R) -> R {
        let mut state = self.state.lock();
        while state.is_alone || state.wanting_alone > 0 {
            let waited = self.changed.wait_for(&mut state, FOREVER);
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
            let waited = self.changed.wait_for(&mut state, FOREVER);
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
