//! The last error of each thread and of each communicator.

use std::cell::RefCell;

use parking_lot::Mutex;

use crate::error::kolo_error_t;

/// The last error of a communicator.
#[derive(Default)]
pub(crate) struct Last(Mutex<Option<Box<kolo_error_t>>>);

impl Last {
    pub(crate) fn set(&self, error: &kolo_error_t) {
        *self.0.lock() = Some(Box::new(*error));
    }

    pub(crate) fn get(&self) -> Option<kolo_error_t> {
        self.0.lock().as_deref().copied()
    }
}

thread_local! {
    static LAST: RefCell<Option<Box<kolo_error_t>>> = const { RefCell::new(None) };
}

/// Remembers an error for this thread.
pub(crate) fn remember(error: &kolo_error_t) {
    // When a thread ends, its storage may be gone: then no call can ask for the error.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(Box::new(*error)));
}

pub(crate) fn of_this_thread() -> Option<kolo_error_t> {
    LAST.try_with(|last| last.borrow().as_deref().copied()).ok().flatten()
}
