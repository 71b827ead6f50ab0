//! The texts of `ncclGetLastError`.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use parking_lot::Mutex;

use kolo::raw::between_forks;

/// The last error of the process, for a thread that had none: NCCL has one text for all threads.
static LAST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    static OF_THREAD: RefCell<String> = const { RefCell::new(String::new()) };
    /// What `ncclGetLastError` returned to this thread last.
    static TOLD: RefCell<CString> = RefCell::new(CString::default());
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

/// Returns a text to C. It stays until this thread asks again.
pub(crate) fn tell(text: String) -> *const c_char {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let told = TOLD.try_with(|told| {
        *told.borrow_mut() = text;
        told.borrow().as_ptr()
    });
    told.unwrap_or(c"".as_ptr())
}
