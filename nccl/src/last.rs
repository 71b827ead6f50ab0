//! The texts of `ncclGetLastError`.

use std::cell::RefCell;
use std::ffi::c_char;

use parking_lot::Mutex;

use kolo::raw::between_forks;

use crate::environment::{Level, print};

/// The bytes of a text in C, with its zero.
const MOST: usize = 4096;

/// The last error of the process. As in NCCL, there is one text for all threads: an error that a
/// communicator finds out has no thread that called.
static LAST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// What `ncclGetLastError` returned to this thread last. Programs keep the pointer, as that of NCCL is
    /// always the same.
    static TOLD: RefCell<[u8; MOST]> = const { RefCell::new([0; MOST]) };
}

/// Prints an error if `NCCL_DEBUG` asks for it, and remembers it as the last one of the process.
pub(crate) fn report(text: &str) {
    print(Level::Warn, || text.to_owned());
    between_forks(|| text.clone_into(&mut LAST.lock()));
}

/// Returns the last error of the process.
pub(crate) fn latest() -> String {
    between_forks(|| LAST.lock().clone())
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
