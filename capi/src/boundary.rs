//! Where Rust ends: errors become numbers, panics become errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::{KOLO_OK, kolo_result_t};
use crate::fault::Fault;
use crate::held;
use crate::last;

/// Runs a call: errors become numbers, panics become errors.
#[inline(always)]
pub(crate) fn boundary(call: impl FnOnce() -> Result<(), Fault>) -> kolo_result_t {
    boundary_of(|| call().map(|()| KOLO_OK))
}

/// As [`boundary`], for calls with several results that are not errors.
#[inline(always)]
pub(crate) fn boundary_of(call: impl FnOnce() -> Result<kolo_result_t, Fault>) -> kolo_result_t {
    // A panic leaves only its communicator or reducer unfinished, and the caller of this ends that
    // one.
    // Faults become numbers before they leave `catch_unwind`, which would copy them: they are large.
    let called = catch_unwind(AssertUnwindSafe(|| match call() {
        Ok(result) => result,
        Err(fault) => failed(&fault),
    }));
    called.unwrap_or_else(|panic| failed(&Fault::Panic(said(&*panic))))
}

#[cold]
fn failed(fault: &Fault) -> kolo_result_t {
    let described = fault.describe();
    last::remember(&described);
    held::note_failure();
    described.code
}

/// Returns the message of a panic.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the panic has no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::KOLO_ERR_INTERNAL;

    #[test]
    fn panics_become_errors() {
        assert_eq!(boundary(|| panic!("a test")), KOLO_ERR_INTERNAL);
    }
}
