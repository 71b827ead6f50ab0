//! Sleeping on a word of memory.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;

/// Sleeps until [`wake_all`] is called on `word`, at most for `timeout`. Returns at once if the
/// word does not hold `value`, and may return early. The word may be shared between processes: a
/// PRIVATE futex would miss their wakes.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match futex::wait(word, futex::Flags::empty(), value, Some(&timeout)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
        Err(error) => crate::log::warn!(%error, "cannot sleep on a futex"),
    }
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    if let Err(error) = futex::wake(word, futex::Flags::empty(), i32::MAX as u32) {
        crate::log::warn!(%error, "cannot wake a futex");
    }
}
