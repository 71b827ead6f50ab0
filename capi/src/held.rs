//! The calls that an open group of this thread holds back.

use std::cell::{Cell, RefCell};

use kolo::raw::PreparedCall;

use crate::fault::Fault;

thread_local! {
    /// How many nested groups are open on this thread.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// The calls of the group, each with the handle of its communicator.
    static HELD: RefCell<Vec<(usize, PreparedCall)>> = const { RefCell::new(Vec::new()) };
    /// How many calls of any kind failed while the group was open.
    static FAILED: Cell<i64> = const { Cell::new(0) };
}

#[inline]
pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Refuses, inside a group, a call that cannot be held back.
pub(crate) fn refuse(what: &'static str) -> Result<(), Fault> {
    match is_open() {
        true => Err(Fault::Group {
            what,
            why: "only blocking collectives, sends and receives are allowed; call it after kolo_group_end",
        }),
        false => Ok(()),
    }
}

/// Holds calls back. After a failure the group executes no call, so a later call must not succeed:
/// a caller that has left the group may never call kolo_group_end.
pub(crate) fn hold<const N: usize>(comm: usize, calls: [PreparedCall; N]) -> Result<(), Fault> {
    if FAILED.get() > 0 {
        return Err(Fault::Group { what: "a call", why: "an earlier call of this group has failed; call kolo_group_end first" });
    }
    HELD.with_borrow_mut(|held| held.extend(calls.map(|call| (comm, call))));
    Ok(())
}

/// Records that a call of this thread has failed, and drops the calls that were held back.
pub(crate) fn note_failure() {
    if is_open() {
        FAILED.set(FAILED.get() + 1);
        HELD.take();
    }
}

/// Opens a group. Groups may be nested.
pub(crate) fn open() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Closes the innermost group. Returns the calls that were held back, or `None` if an outer group
/// is still open.
pub(crate) fn close() -> Result<Option<Vec<(usize, PreparedCall)>>, Fault> {
    let depth = DEPTH.get();
    if depth == 0 {
        return Err(Fault::Group { what: "kolo_group_end", why: "no group is open; call kolo_group_start first" });
    }
    DEPTH.set(depth - 1);
    if depth > 1 {
        return Ok(None);
    }
    let (calls, failed) = (HELD.take(), FAILED.take());
    match failed {
        0 => Ok(Some(calls)),
        _ => Err(Fault::value("the number of failed calls in this group", failed, "so none of them was executed")),
    }
}
