//! Pointers of the caller.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

use crate::fault::Fault;

/// A pointer of the caller's at one or more of something.
pub(crate) fn pointer<T>(at: *const T, what: &'static str) -> Result<(), Fault> {
    match at.is_null() {
        true => Err(Fault::Null { what }),
        false if !at.is_aligned() => Err(Fault::Misaligned { what }),
        false => Ok(()),
    }
}

/// A place of the caller's for a result.
///
/// # Safety
///
/// Null, misaligned, or valid for writing for as long as the reference is used.
pub(crate) unsafe fn place<'a, T>(to: *mut T, what: &'static str) -> Result<&'a mut MaybeUninit<T>, Fault> {
    pointer(to, what)?;
    // SAFETY: passed on, and it is not null and aligned.
    Ok(unsafe { &mut *to.cast() })
}

/// Several of the caller's. Of none, the pointer does not matter.
///
/// # Safety
///
/// Null, misaligned, or valid for reading `len` of them, unless those are more than memory can hold; left as they are for as long
/// as the slice is used.
pub(crate) unsafe fn slice_of<'a, T>(from: *const T, len: usize, what: &'static str) -> Result<&'a [T], Fault> {
    if len == 0 {
        return Ok(&[]);
    }
    pointer(from, what)?;
    if len > isize::MAX as usize / size_of::<T>() {
        return Err(Fault::Long { what, len });
    }
    // SAFETY: passed on, and it is not null, aligned, and not larger than what can be addressed.
    Ok(unsafe { std::slice::from_raw_parts(from, len) })
}

/// Text of the caller's.
///
/// # Safety
///
/// Null, or ended by a zero and left as it is for as long as the text is used.
pub(crate) unsafe fn text<'a>(from: *const c_char, what: &'static str) -> Result<Option<&'a str>, Fault> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(Some).map_err(|_| Fault::Text { what })
}
