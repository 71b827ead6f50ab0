//! The texts of `ncclGetLastError`.

use std::cell::RefCell;
use std::ffi::c_char;

use parking_lot::Mutex;

use kolo::raw::between_forks;

/// The bytes of a text in C, with its zero.
const MOST: usize = 4096;

/// The last error of the process, for a thread that had none: NCCL has one text for all threads.
static LAST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    static OF_THREAD: RefCell<String> = const { RefCell::new(String::new()) };
    /// What `ncclGetLastError` returned to this thread last. Programs keep the pointer, as that of NCCL is
    /// always the same.
    static TOLD: RefCell<[u8; MOST]> = const { RefCell::new([0; MOST]) };
}

/// Remembers the error of a call.
pub(crate) fn remember(text: &str) {
    between_forks(|| text.clone_into(&mut LAST.lock()));
    // When a thread ends, its storage may be gone: then no call can ask for the error.
    let _ = OF_THREAD.try_with(|last| text.clone_into(&mut last.borrow_mut()));
}

/// Returns the last error of this thread, or that of another one.
pub(crate) fn latest() -> String {
    let own = OF_THREAD.try_with(|last| last.borrow().clone()).unwrap_or_default();
    if own.is_empty() { between_forks(|| LAST.lock().clone()) } else { own }
}

/// Returns a text to C. It stays until this thread asks again, and is cut where the room ends.
pub(crate) fn tell(text: String) -> *const c_char {
    let text = text.replace('\0', " ");
    let text = &text.as_bytes()[..text.len().min(MOST - 1)];
    let told = TOLD.try_with(|told| {
        let mut told = told.borrow_mut();
        told[..text.len()].copy_from_slice(text);
        told[text.len()] = 0;
        told.as_ptr().cast::<c_char>()
    });
    told.unwrap_or(c"".as_ptr())
}
