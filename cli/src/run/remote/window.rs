//! How many bytes of a stream may be under way between launcher and agent.
//!
//! Neither side stops reading because a reader of output, or rank 0, is slow: then the end of a rank
//! and signals would wait, too.

use std::sync::{Condvar, Mutex, PoisonError};

/// A number of bytes that may still be sent.
pub(super) struct Window {
    /// `None` after the end of the connection.
    left: Mutex<Option<usize>>,
    changed: Condvar,
    size: usize,
}

impl Window {
    pub(super) fn new(size: usize) -> Window {
        Window { left: Mutex::new(Some(size)), changed: Condvar::new(), size }
    }

    /// Waits until bytes may be sent, at most as many as the window has. Returns `false` if the
    /// connection has ended.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.changed.wait_while(left, |left| left.is_some_and(|left| left < bytes.min(self.size)));
        let mut left = wait.unwrap_or_else(PoisonError::into_inner);
        match &mut *left {
            Some(left) => {
                *left -= bytes.min(self.size);
                true
            }
            None => false,
        }
    }

    /// Notes that bytes have been used.
    pub(super) fn give(&self, bytes: usize) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.map(|left| left.saturating_add(bytes).min(self.size));
        drop(left);
        self.changed.notify_all();
    }

    /// Notes the end of the connection: nothing waits any more.
    pub(super) fn close(&self) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_until_others_were_used() {
        let window = Window::new(10);
        assert!(window.take(7) && window.take(3));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| window.take(6));
            window.give(5);
            assert!(!waits.is_finished(), "5 bytes are not enough");
            window.give(1);
            assert!(waits.join().unwrap());
            let ends = scope.spawn(|| window.take(1));
            window.close();
            assert!(!ends.join().unwrap());
        });
    }
}
