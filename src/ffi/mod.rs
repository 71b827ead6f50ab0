//! The C ABI: `include/kolo.h`, which is generated from here. A thin skin over [`crate::comm`] and [`crate::ddp`].
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
mod start;
mod store;
mod unique_id;
mod version;
mod work;

use std::ffi::{CStr, c_char};
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
    described.code
}

/// A place of the caller's for a result.
///
/// # Safety
///
/// Null, or valid for writing for as long as the reference is used.
unsafe fn place<'a, T>(to: *mut T, what: &'static str) -> Result<&'a mut std::mem::MaybeUninit<T>, Fault> {
    // SAFETY: passed on.
    unsafe { to.cast::<std::mem::MaybeUninit<T>>().as_mut() }.ok_or(Fault::Null { what })
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
