//! The calls that an open group of this thread holds back.

use std::cell::{Cell, RefCell};

use kolo::raw::PreparedCall;

use crate::fault::Fault;

thread_local! {
    /// How many groups are open on this thread, one inside the other.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// The calls of a group, with their communicators' handles.
    static HELD: RefCell<Vec<(usize, PreparedCall)>> = const { RefCell::new(Vec::new()) };
    /// Calls of any kind that failed while a group was open.
    static FAILED: Cell<i64> = const { Cell::new(0) };
}

#[inline]
pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// What cannot be held back is refused inside a group.
pub(crate) fn refuse(what: &'static str) -> Result<(), Fault> {
    match is_open() {
        true => {
            Err(Fault::Group { what, why: "only blocking collectives, sends and receives can be; call it after kolo_group_end" })
        }
        false => Ok(()),
    }
}

/// Holds calls back. After a failure the group carries out nothing, and a call that is not carried out does not succeed: the
/// kolo_group_end of a caller that has left the group may never come.
pub(crate) fn hold<const N: usize>(comm: usize, calls: [PreparedCall; N]) -> Result<(), Fault> {
    if FAILED.get() > 0 {
        return Err(Fault::Group { what: "a call", why: "an earlier call of this group has failed; call kolo_group_end first" });
    }
    HELD.with_borrow_mut(|held| held.extend(calls.map(|call| (comm, call))));
    Ok(())
}

/// A call of this thread has failed. Its group is given up, and with it what was held back.
pub(crate) fn note_failure() {
    if is_open() {
        FAILED.set(FAILED.get() + 1);
        HELD.take();
    }
}

/// Opens a group, inside another if one is open.
pub(crate) fn open() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Closes the innermost group. Returns what the outermost held back, or `None` if another is still open.
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
        _ => Err(Fault::value("the number of calls that failed in this group", failed, "so none of them was carried out")),
    }
}
