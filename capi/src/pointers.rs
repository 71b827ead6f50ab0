//! Pointers of the caller.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

use crate::fault::Fault;

/// Checks a pointer of the caller to one element or more.
pub(crate) fn pointer<T>(at: *const T, what: &'static str) -> Result<(), Fault> {
    match at.is_null() {
        true => Err(Fault::Null { what }),
        false if !at.is_aligned() => Err(Fault::Misaligned { what }),
        false => Ok(()),
    }
}

/// Checks a pointer of the caller to the place of a result.
///
/// # Safety
///
/// Null, misaligned, or valid for writing for as long as the reference is used.
pub(crate) unsafe fn place<'a, T>(to: *mut T, what: &'static str) -> Result<&'a mut MaybeUninit<T>, Fault> {
    pointer(to, what)?;
    // SAFETY: passed on, and the pointer is aligned and not null.
    Ok(unsafe { &mut *to.cast() })
}

/// Checks a pointer of the caller to `len` elements. Without elements it may be anything.
///
/// # Safety
///
/// Null, misaligned, or valid for reading `len` elements, unless they are more than memory can
/// hold. Nothing writes the elements as long as the slice is used.
pub(crate) unsafe fn slice_of<'a, T>(from: *const T, len: usize, what: &'static str) -> Result<&'a [T], Fault> {
    if len == 0 {
        return Ok(&[]);
    }
    pointer(from, what)?;
    if len > isize::MAX as usize / size_of::<T>() {
        return Err(Fault::Long { what, len });
    }
    // SAFETY: passed on, and the pointer is aligned and not null, and the length is one that can be
    // addressed.
    Ok(unsafe { std::slice::from_raw_parts(from, len) })
}

/// Checks a text of the caller; `None` if it is null.
///
/// # Safety
///
/// Null, or ended by a zero. Nothing writes it as long as the text is used.
pub(crate) unsafe fn text<'a>(from: *const c_char, what: &'static str) -> Result<Option<&'a str>, Fault> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(Some).map_err(|_| Fault::Text { what })
}
