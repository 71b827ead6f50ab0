//! Calls that are held back and then carried out together.

use std::cell::{Cell, RefCell};

use super::boundary;
use super::communicator::{enter, kolo_comm_t};
use super::fault::{Fault, kolo_result_t};
use crate::exec::Call;
use crate::{Op, Work};

thread_local! {
    /// How many groups are open on this thread, one inside the other.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// The calls of a group, with their communicators' handles.
    static HELD: RefCell<Vec<(usize, Call)>> = const { RefCell::new(Vec::new()) };
    /// Calls of any kind that failed while a group was open.
    static FAILED: Cell<i64> = const { Cell::new(0) };
}

#[inline]
pub(super) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// What cannot be held back is refused inside a group.
pub(super) fn refuse(what: &'static str) -> Result<(), Fault> {
    match is_open() {
        true => {
            Err(Fault::Group { what, why: "only blocking collectives, sends and receives can be; call it after kolo_group_end" })
        }
        false => Ok(()),
    }
}

/// Holds calls back. After a failure the group carries out nothing, and a call that is not carried out does not succeed: the
/// kolo_group_end of a caller that has left the group may never come.
pub(super) fn hold<const N: usize>(comm: kolo_comm_t, calls: [Call; N]) -> Result<(), Fault> {
    if FAILED.get() > 0 {
        return Err(Fault::Group { what: "a call", why: "an earlier call of this group has failed; call kolo_group_end first" });
    }
    HELD.with_borrow_mut(|held| held.extend(calls.map(|call| (comm.addr(), call))));
    Ok(())
}

/// A call of this thread has failed. Its group is given up, and with it what was held back.
pub(super) fn note_failure() {
    if is_open() {
        FAILED.set(FAILED.get() + 1);
        HELD.take();
    }
}

/// Begins a group: until kolo_group_end, this thread's blocking collectives, sends and receives are held back. They return at once, and
/// use their buffers until kolo_group_end returns. Groups may be nested; the outermost counts.
///
/// If a call fails, the group is given up: its buffers are the caller's again, and further calls fail until kolo_group_end.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_group_start() -> kolo_result_t {
    boundary(|| {
        DEPTH.set(DEPTH.get() + 1);
        Ok(())
    })
}

/// Ends a group: carries out what was held back, and returns when all of it is done. Sends and receives go on side by side, so that
/// none waits for one before it; so do the calls of different communicators. Collectives of one communicator take effect in order.
///
/// If any call of this thread has failed since kolo_group_start, whatever it was and whatever handle it was given, none is carried out,
/// and this returns KOLO_ERR_ARGUMENT.
/// If several fail when they are carried out, this returns the first failure.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_group_end() -> kolo_result_t {
    boundary(|| {
        let depth = DEPTH.get();
        if depth == 0 {
            return Err(Fault::Group { what: "kolo_group_end", why: "no group is open; call kolo_group_start first" });
        }
        DEPTH.set(depth - 1);
        if depth > 1 {
            return Ok(());
        }
        let (calls, failed) = (HELD.take(), FAILED.take());
        if failed > 0 {
            return Err(Fault::value("the number of calls that failed in this group", failed, "so none of them was carried out"));
        }
        carry_out(calls)
    })
}

fn carry_out(calls: Vec<(usize, Call)>) -> Result<(), Fault> {
    let Some(&(first, _)) = calls.first() else { return Ok(()) };
    let handle = std::ptr::without_provenance_mut;
    let is_side_by_side = calls.iter().all(|(comm, call)| *comm == first && matches!(call.op, Op::Send | Op::Recv));
    if is_side_by_side {
        let this = enter(handle(first))?;
        let calls = calls.into_iter().map(|(_, call)| call).collect();
        // SAFETY: the caller lends the buffers until this returns.
        let result = unsafe { this.comm.exec.run_prepared_together(calls) };
        return result.map_err(Fault::from).inspect_err(|fault| this.last.set(&fault.describe()));
    }
    // All are there before the first is started.
    let guards = calls.iter().map(|(comm, _)| enter(handle(*comm))).collect::<Result<Vec<_>, _>>()?;
    let mut result = Ok(());
    let mut works: Vec<Option<Work<()>>> = Vec::with_capacity(calls.len());
    for ((_, call), this) in calls.into_iter().zip(&guards) {
        // SAFETY: the caller lends the buffers until this returns, and it waits for all.
        let started = unsafe { this.comm.exec.start_prepared(call) };
        works.push(started.map_err(|error| result = result.clone().and(Err(error))).ok());
    }
    for (work, this) in works.into_iter().zip(&guards) {
        if let Some(Err(error)) = work.map(|work| work.wait().map_err(crate::Error::from)) {
            this.last.set(&Fault::from(error.clone()).describe());
            result = result.and(Err(error));
        }
    }
    Ok(result?)
}
