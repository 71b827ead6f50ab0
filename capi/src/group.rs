//! Groups of calls, which are held back and then executed together.

use kolo::Op;
use kolo::raw::{PreparedCall, RawWork, run_together};

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::communicator::enter;
use crate::fault::Fault;
use crate::held;

/// Begins a group. Until kolo_group_end, the blocking collectives, sends and receives of this
/// thread are held back: they return at once, and use their buffers until kolo_group_end returns.
/// Groups may be nested; the end of the outermost group executes all calls.
///
/// If a call fails, the group drops all its calls: their buffers belong to the caller again, and
/// later calls fail until kolo_group_end.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_group_start() -> kolo_result_t {
    boundary(|| {
        held::open();
        Ok(())
    })
}

/// Ends a group: executes the calls that were held back, and returns when all are done. Sends and
/// receives progress side by side, so that none waits for an earlier one; so do the calls of
/// different communicators. Collectives of one communicator take effect in order. No buffer in which
/// one of the calls receives may overlap another call's, except a send of the same memory: see
/// kolo_send_recv.
///
/// If any call of this thread has failed since kolo_group_start, on any communicator, no call is
/// executed, and this returns KOLO_ERR_ARGUMENT. If several calls fail when they are executed, this
/// returns the first failure.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_group_end() -> kolo_result_t {
    boundary(|| held::close()?.map_or(Ok(()), run))
}

/// Executes the calls of a group, each with the handle of its communicator.
fn run(calls: Vec<(usize, PreparedCall)>) -> Result<(), Fault> {
    let Some(&(first, _)) = calls.first() else { return Ok(()) };
    let is_side_by_side = calls.iter().all(|(comm, call)| *comm == first && matches!(call.op(), Op::Send | Op::Recv));
    if is_side_by_side {
        let this = enter(std::ptr::without_provenance_mut(first))?;
        let calls = calls.into_iter().map(|(_, call)| call).collect();
        // SAFETY: the caller lends the buffers until this returns. A handle stands for the same
        // communicator as long as it lives.
        let result = unsafe { run_together(&this.comm, calls) };
        return result.map_err(Fault::from).inspect_err(|fault| this.last.set(&fault.describe()));
    }
    run_in_order(calls)
}

/// Starts all calls, and waits for all.
fn run_in_order(calls: Vec<(usize, PreparedCall)>) -> Result<(), Fault> {
    // All communicators are found before the first call is started.
    let find = |(comm, _): &(usize, PreparedCall)| enter(std::ptr::without_provenance_mut(*comm));
    let guards = calls.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    let mut result = Ok(());
    let mut works: Vec<Option<RawWork>> = Vec::with_capacity(calls.len());
    for ((_, call), this) in calls.into_iter().zip(&guards) {
        // SAFETY: the caller lends the buffers until this returns, and it waits for all.
        let started = unsafe { call.start(&this.comm) };
        works.push(started.map_err(|error| result = result.clone().and(Err(error))).ok());
    }
    for (work, this) in works.into_iter().zip(&guards) {
        if let Some(Err(error)) = work.and_then(|work| work.outcome(None)) {
            this.last.set(&Fault::from(error.clone()).describe());
            result = result.and(Err(error));
        }
    }
    Ok(result?)
}
