//! Where Rust ends: faults become numbers, panics become faults.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::{SUCCESS, ncclResult_t};
use crate::fault::Fault;
use crate::{held, last};

/// Runs the call of a function.
pub(crate) fn boundary(name: &str, call: impl FnOnce() -> Result<ncclResult_t, Fault>) -> ncclResult_t {
    let fault = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(result)) => return result,
        Ok(Err(fault)) => fault,
        Err(panic) => held::counted::<()>(Err(Fault::panic(&*panic))).expect_err("it is a panic"),
    };
    last::report(&format!("{name}: {fault}"));
    fault.code()
}

/// Runs the call of a function that cannot fail in C. A fault gives `otherwise`.
pub(crate) fn infallible<T>(name: &str, otherwise: T, call: impl FnOnce() -> Result<T, Fault>) -> T {
    let mut value = None;
    boundary(name, || {
        value = Some(call()?);
        Ok(SUCCESS)
    });
    value.unwrap_or(otherwise)
}
