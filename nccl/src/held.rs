//! What an open group of this thread holds back.

use std::cell::{Cell, RefCell};

use crate::codes::{SUCCESS, ncclResult_t};
use crate::fault::Fault;
use crate::jobs::Job;
use crate::request::Request;

/// The calls of a group, in their order.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) requests: Vec<Request>,
    pub(crate) jobs: Vec<Job>,
}

thread_local! {
    /// How many nested groups are open on this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static HELD: RefCell<Held> = RefCell::default();
    /// The result of the first call that failed while the group was open.
    static FAILED: Cell<ncclResult_t> = const { Cell::new(SUCCESS) };
}

pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

pub(crate) fn open() {
    DEPTH.set(DEPTH.get() + 1);
}

pub(crate) fn hold(request: Request) {
    HELD.with_borrow_mut(|held| held.requests.push(request));
}

pub(crate) fn hold_job(job: Job) {
    HELD.with_borrow_mut(|held| held.jobs.push(job));
}

/// Passes on the result of a call that can be held back: if it failed, its group will execute nothing. A
/// question that failed has no such effect.
pub(crate) fn counted<T>(result: Result<T, Fault>) -> Result<T, Fault> {
    result.inspect_err(|fault| {
        if is_open() && FAILED.get() == SUCCESS {
            FAILED.set(fault.code());
        }
    })
}

/// Closes the innermost group. Returns what was held back, and the result of a call that failed;
/// `None` if an outer group is still open.
pub(crate) fn close(what: &str) -> Result<Option<(Held, ncclResult_t)>, Fault> {
    let depth = DEPTH.get();
    if depth == 0 {
        return Err(Fault::usage(format!("{what}: no group is open; call ncclGroupStart first")));
    }
    DEPTH.set(depth - 1);
    Ok((depth == 1).then(|| (HELD.take(), FAILED.replace(SUCCESS))))
}
