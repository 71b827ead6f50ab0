//! The function that a thread calls while it waits.

use std::ffi::c_void;

use kolo::raw::{is_in_wait_check, set_wait_check};

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::fault::Fault;

/// A function for kolo_set_wait_check. 0: the wait goes on.
pub type kolo_wait_check_t = Option<unsafe extern "C" fn(context: *mut c_void) -> i32>;

/// Sets a function that kolo calls on this thread, about 20 times a second, while a call of this
/// thread waits for other ranks. NULL: none. It is for languages whose signal handlers run between
/// two calls, and for programs whose signal handler sets a flag.
///
/// If the function returns another number than 0, the call ends within half a second:
///
/// - A function that makes a communicator returns KOLO_ERR_ABORTED.
/// - A blocking operation ends its communicator, as kolo_comm_abort does, and returns
///   KOLO_ERR_ABORTED, also if it waits for earlier operations of the communicator.
/// - kolo_work_wait, kolo_work_wait_timeout, kolo_work_wait_any and kolo_work_wait_on return
///   KOLO_IN_PROGRESS, and the operation goes on. But a collective that kolo_work_wait runs on this
///   thread, because it had not begun, is a blocking operation.
///
/// In a wait for operations that run elsewhere, the function may call everything. In other waits,
/// kolo_comm_abort and kolo_comm_destroy are allowed, and others return KOLO_ERR_ARGUMENT: the
/// communicator is in use. kolo_comm_destroy then ends the communicator at once, and frees it when
/// the call has returned. The function must not throw C++ exceptions, nor leave by longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_set_wait_check(check: kolo_wait_check_t, context: *mut c_void) -> kolo_result_t {
    boundary(|| {
        refuse("kolo_set_wait_check")?;
        set_wait_check(check.map(|check| {
            // SAFETY: the caller vouches for the function and its argument, as the header says.
            Box::new(move || unsafe { check(context) } == 0) as Box<dyn Fn() -> bool>
        }));
        Ok(())
    })
}

/// Refuses a call of the function inside a call that waits on a communicator.
#[inline(always)]
pub(crate) fn refuse(what: &'static str) -> Result<(), Fault> {
    if is_in_wait_check() { Err(Fault::InWaitCheck { what }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ptr::null_mut;

    use super::*;
    use crate::arguments::KOLO_FLOAT32;
    use crate::codes::{KOLO_ERR_ABORTED, KOLO_ERR_ARGUMENT, KOLO_ERR_HANDLE, KOLO_ERR_PEER, KOLO_IN_PROGRESS, KOLO_OK};
    use crate::collectives::kolo_recv;
    use crate::collectives::kolo_start_recv;
    use crate::communicator::{kolo_comm_abort, kolo_comm_count, kolo_comm_destroy, kolo_comm_init_all, kolo_comm_t};
    use crate::work::{kolo_work_destroy, kolo_work_wait, kolo_work_wait_timeout};

    /// What the function of a test did.
    struct Seen {
        comm: kolo_comm_t,
        calls: Cell<u32>,
        /// The number of calls after which the function ends the wait.
        last: u32,
        destroys: bool,
        results: Cell<[kolo_result_t; 2]>,
    }

    unsafe extern "C" fn look(context: *mut c_void) -> i32 {
        // SAFETY: the tests pass what they have set.
        let seen = unsafe { &*context.cast::<Seen>() };
        seen.calls.set(seen.calls.get() + 1);
        let mut count = 0;
        // SAFETY: the number lives.
        let counted = unsafe { kolo_comm_count(seen.comm, &raw mut count) };
        let ended = if seen.destroys { kolo_comm_destroy(seen.comm) } else { KOLO_OK };
        seen.results.set([counted, ended]);
        i32::from(seen.calls.get() >= seen.last)
    }

    /// Makes two ranks, and has rank 0 look while `waits` waits.
    fn with_two(last: u32, destroys: bool, waits: impl FnOnce(kolo_comm_t, &Seen)) {
        let mut comms = [null_mut(); 2];
        // SAFETY: there is room for two handles, and no configuration.
        assert_eq!(unsafe { kolo_comm_init_all(comms.as_mut_ptr(), 2, std::ptr::null()) }, KOLO_OK);
        let seen = Seen { comm: comms[0], calls: Cell::new(0), last, destroys, results: Cell::default() };
        // SAFETY: what the function reads lives until the check is removed.
        assert_eq!(unsafe { kolo_set_wait_check(Some(look), (&raw const seen).cast_mut().cast()) }, KOLO_OK);
        waits(comms[0], &seen);
        // SAFETY: no function.
        assert_eq!(unsafe { kolo_set_wait_check(None, null_mut()) }, KOLO_OK);
        for comm in comms {
            assert!([KOLO_OK, KOLO_ERR_HANDLE].contains(&kolo_comm_destroy(comm)));
        }
    }

    #[test]
    fn a_blocking_call_ends_its_communicator() {
        for destroys in [false, true] {
            with_two(if destroys { 1000 } else { 3 }, destroys, |comm, seen| {
                let mut values = [0.0f32; 4];
                // SAFETY: the memory lives until the call returns.
                let received = unsafe { kolo_recv(values.as_mut_ptr().cast(), 4, KOLO_FLOAT32, 1, comm, null_mut()) };
                assert_eq!(received, KOLO_ERR_ABORTED);
                assert_eq!(seen.results.get(), [KOLO_ERR_ARGUMENT, KOLO_OK]);
                assert!(destroys || seen.calls.get() == 3);
            });
        }
    }

    #[test]
    fn a_wait_for_an_operation_leaves_it_in_flight() {
        with_two(1, false, |comm, seen| {
            let (mut values, mut work) = ([0.0f32; 4], null_mut());
            // SAFETY: the memory lives until the operation has ended.
            let started =
                unsafe { kolo_start_recv(values.as_mut_ptr().cast(), 4, KOLO_FLOAT32, 1, comm, null_mut(), &raw mut work) };
            assert_eq!(started, KOLO_OK);
            for _ in 0..2 {
                assert_eq!(kolo_work_wait(work), KOLO_IN_PROGRESS);
                // The function may call everything.
                assert_eq!(seen.results.get(), [KOLO_OK, KOLO_OK]);
            }
            let before = seen.calls.get();
            assert_eq!(kolo_work_wait_timeout(work, 3_600_000), KOLO_IN_PROGRESS);
            assert_eq!(seen.calls.get(), before + 1);
            assert_eq!(kolo_comm_abort(comm), KOLO_OK);
            let ended = std::iter::repeat_with(|| kolo_work_wait(work)).find(|&result| result != KOLO_IN_PROGRESS);
            assert!([Some(KOLO_ERR_ABORTED), Some(KOLO_ERR_PEER)].contains(&ended), "{ended:?}");
            assert_eq!(kolo_work_destroy(work), KOLO_OK);
        });
    }
}
