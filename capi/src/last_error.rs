//! What went wrong, for callers that ask.

use std::ffi::c_char;

use crate::boundary::boundary;
use crate::codes::{kolo_result_t, words};
use crate::communicator::{enter, kolo_comm_t};
use crate::error::{kolo_error_t, nothing};
use crate::last;
use crate::sized::{self, Grows, end_of};

// SAFETY: it begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_error_t {
    const NAMES: (&'static str, &'static str) = ("error", "error->size");
    const FIRST: usize = end_of!(kolo_error_t, message: [c_char; 2048]);
}

/// Copies the last error into `*error`: of this communicator, whichever thread made the call; or, if `comm` is null, of this
/// thread, whatever the call was about. `error->code` is `KOLO_OK` if there was none.
///
/// Set `error->size` to `sizeof(kolo_error_t)` first. A call that succeeds leaves the last error as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_last_error(comm: kolo_comm_t, error: *mut kolo_error_t) -> kolo_result_t {
    boundary(|| {
        let last = match comm.is_null() {
            true => last::of_this_thread(),
            false => enter(comm)?.last.get(),
        };
        // SAFETY: the caller's struct, whose size the caller has set.
        unsafe { sized::write(error, &last.unwrap_or_else(nothing)) }
    })
}

/// What a result means, in a few words. The text is static: it needs no freeing. Of any number, also of one that is no result.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_error_string(result: kolo_result_t) -> *const c_char {
    words(result).as_ptr()
}
