//! The C ABI: `include/kolo.h`, which is generated from here. A thin skin over [`crate::communicator`] and [`crate::ddp`].
//!
//! What holds for all functions: nothing unwinds out of them ([`boundary`]); handles are looked up and never followed
//! ([`registry`]); numbers that stand for something, and pointers that may be null, are checked. What no check can catch, that
//! a pointer is valid for as many elements as the count says, is what makes them unsafe.

// C's names; a public function is one of the library, whoever can reach it in Rust; and what its caller vouches for is said
// once, above, and to C in the words of the header.
#![allow(non_camel_case_types, unreachable_pub, clippy::missing_safety_doc)]

mod arguments;
mod collectives;
mod communicator;
mod config;
mod fault;
mod group;
mod memory;
mod reducer;
mod reducer_config;
mod registry;
mod sized;
mod start;
mod store;
mod unique_id;
mod version;
mod work;

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fault::{Fault, KOLO_OK, kolo_result_t};

/// The numbers of the header are those of the library.
const fn assert_same(pairs: &[(i32, u8)]) {
    let mut i = 0;
    while i < pairs.len() {
        assert!(pairs[i].0 == pairs[i].1 as i32);
        i += 1;
    }
}

/// Where Rust ends: errors become numbers, panics become errors.
#[inline]
fn boundary(call: impl FnOnce() -> Result<(), Fault>) -> kolo_result_t {
    boundary_of(|| call().map(|()| KOLO_OK))
}

/// As [`boundary`], for calls that can succeed in several ways.
#[inline]
fn boundary_of(call: impl FnOnce() -> Result<kolo_result_t, Fault>) -> kolo_result_t {
    // Whatever a panic may have left half done is a communicator's, which is ended then.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(result)) => result,
        Ok(Err(fault)) => failed(&fault),
        Err(panic) => failed(&Fault::Panic(fault::said(&*panic))),
    }
}

#[cold]
fn failed(fault: &Fault) -> kolo_result_t {
    let described = fault.describe();
    fault::remember(&described);
    group::note_failure();
    described.code
}

/// A pointer of the caller's at one or more of something.
fn pointer<T>(at: *const T, what: &'static str) -> Result<(), Fault> {
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
unsafe fn place<'a, T>(to: *mut T, what: &'static str) -> Result<&'a mut MaybeUninit<T>, Fault> {
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
unsafe fn slice_of<'a, T>(from: *const T, len: usize, what: &'static str) -> Result<&'a [T], Fault> {
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
unsafe fn text<'a>(from: *const c_char, what: &'static str) -> Result<Option<&'a str>, Fault> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(Some).map_err(|_| Fault::Text { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors() {
        assert_eq!(boundary(|| panic!("a test")), fault::KOLO_ERR_INTERNAL);
    }
}
