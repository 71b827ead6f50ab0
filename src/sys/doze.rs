//! Waiting for a word of memory where the system cannot wake the thread.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The longest sleep: the wait that it adds to each message of a rank that sleeps.
const LONGEST: Duration = Duration::from_micros(50);

/// Sleeps for a short time, unless the word no longer holds `value`. Nothing ends the sleep early.
pub(super) fn doze(word: &AtomicU32, value: u32, timeout: Duration) {
    if word.load(Ordering::Acquire) == value {
        std::thread::sleep(timeout.min(LONGEST));
    }
}
