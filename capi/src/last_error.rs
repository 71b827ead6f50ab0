//! The functions that return the last error.

use std::ffi::c_char;

use crate::boundary::boundary;
use crate::codes::{kolo_result_t, words};
use crate::communicator::{enter, kolo_comm_t};
use crate::error::{kolo_error_t, nothing};
use crate::last;
use crate::sized::{self, Grows, end_of};

// SAFETY: the struct begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_error_t {
    const NAMES: (&'static str, &'static str) = ("error", "error->size");
    const FIRST: usize = end_of!(kolo_error_t, message: [c_char; 2048]);
}

/// Copies the last error into `*error`. With a communicator, it is the last error on that
/// communicator, from any thread. If `comm` is NULL, it is the last error of this thread.
/// `error->code` is `KOLO_OK` if there was none.
///
/// Set `error->size` to `sizeof(kolo_error_t)` first. A call that succeeds leaves the last error as
/// it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_last_error(comm: kolo_comm_t, error: *mut kolo_error_t) -> kolo_result_t {
    boundary(|| {
        let last = match comm.is_null() {
            true => last::of_this_thread(),
            false => enter(comm)?.last.get(),
        };
        // SAFETY: the caller has set the size of the struct.
        unsafe { sized::write(error, &last.unwrap_or_else(nothing)) }
    })
}

/// Returns the meaning of a result in a few words, for any number. The text is static: do not free
/// it.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_error_string(result: kolo_result_t) -> *const c_char {
    words(result).as_ptr()
}
