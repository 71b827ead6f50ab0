//! Calls that are held back and then carried out together.

use std::cell::{Cell, RefCell};

use super::boundary;
use super::communicator::{enter, kolo_comm_t};
use super::fault::{Fault, kolo_result_t};
use crate::comm::Call;
use crate::{Op, Work};

thread_local! {
    /// How many groups are open on this thread, one inside the other.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static HELD: RefCell<Held> = const { RefCell::new(Held { calls: Vec::new(), refused: 0 }) };
}

/// The calls of a group.
struct Held {
    calls: Vec<(usize, Call)>,
    /// Calls that could not be carried out as written.
    refused: i64,
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

/// Holds a call back.
pub(super) fn hold(comm: kolo_comm_t, call: Result<Call, Fault>) -> Result<(), Fault> {
    HELD.with_borrow_mut(|held| match call {
        Ok(call) => {
            held.calls.push((comm.addr(), call));
            Ok(())
        }
        Err(fault) => {
            held.refused += 1;
            Err(fault)
        }
    })
}

/// Begins a group: until kolo_group_end, this thread's blocking collectives, sends and receives are held back. They return at once, and
/// use their buffers until kolo_group_end returns. Groups may be nested; the outermost counts.
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
/// If a call of the group was refused, none is carried out. If several fail, this returns the first failure.
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
        let Held { calls, refused } = HELD.replace(Held { calls: Vec::new(), refused: 0 });
        if refused > 0 {
            return Err(Fault::value("the number of refused calls in this group", refused, "so none of them was carried out"));
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
        let result = unsafe { this.comm.run_prepared_together(calls) };
        return result.map_err(Fault::from).inspect_err(|fault| this.last.set(&fault.describe()));
    }
    // All are there before the first is started.
    let guards = calls.iter().map(|(comm, _)| enter(handle(*comm))).collect::<Result<Vec<_>, _>>()?;
    let mut result = Ok(());
    let mut works: Vec<Option<Work<()>>> = Vec::with_capacity(calls.len());
    for ((_, call), this) in calls.into_iter().zip(&guards) {
        // SAFETY: the caller lends the buffers until this returns, and it waits for all.
        let started = unsafe { this.comm.start_prepared(call) };
        works.push(started.map_err(|error| result = result.clone().and(Err(error))).ok());
    }
    for (work, this) in works.into_iter().zip(&guards) {
        if let Some(Err(error)) = work.map(Work::wait) {
            this.last.set(&Fault::from(error.clone()).describe());
            result = result.and(Err(error));
        }
    }
    Ok(result?)
}
