//! The texts of the last error. The process has one, so no test of another kind runs beside these.

#![allow(missing_docs)]

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::*;

/// The tests run one after the other.
fn alone() -> impl Drop {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Programs keep the pointer to the text.
#[test]
fn the_last_error_has_one_place() {
    let _alone = alone();
    let at = last_error_at(null_mut());
    assert_eq!(ncclCommDestroy(std::ptr::dangling_mut()), INVALID_ARGUMENT);
    let again = last_error_at(null_mut());
    assert_eq!(at, again);
}

#[test]
fn a_group_with_a_failed_call_executes_nothing() {
    let _alone = alone();
    let mut comm = null_mut();
    ok(ncclCommInitAll(&mut comm, 1, null()));
    let (sent, mut got) = (7i32, 0i32);
    ok(ncclGroupStart());
    ok(ncclAllReduce((&raw const sent).cast(), (&raw mut got).cast(), 1, INT32, SUM, comm, null_mut()));
    assert_eq!(ncclSend((&raw const sent).cast(), 1, INT32, 5, comm, null_mut()), INVALID_ARGUMENT);
    assert!(last_error(null_mut()).contains("peer is 5"), "{}", last_error(null_mut()));
    assert_eq!(ncclGroupEnd(), INVALID_ARGUMENT);
    assert_eq!(got, 0);
    assert_eq!(ncclGroupEnd(), INVALID_USAGE);
    assert_eq!(sum(comm, 3), Ok(3));
    ok(ncclCommDestroy(comm));
}

#[test]
fn wrong_arguments_are_told() {
    let _alone = alone();
    let mut comm = null_mut();
    ok(ncclCommInitAll(&mut comm, 1, null()));
    let mut value = 1i32;
    let at = (&raw mut value).cast::<c_void>();
    let call = |at: *mut c_void, dtype, op, comm| ncclAllReduce(at, at, 1, dtype, op, comm, null_mut());
    // Each call when it is its turn, because the text is that of the last one.
    let calls: [(&dyn Fn() -> c_int, &str); 11] = [
        (&|| call(at, 12, SUM, comm), "datatype is 12"),
        (&|| call(at, INT32, -1, comm), "op is -1"),
        (&|| call(at, INT32, 5, comm), "op is 5"),
        (&|| call(null_mut(), INT32, SUM, comm), "null"),
        (&|| call(at, INT32, SUM, null_mut()), "comm is null"),
        (&|| call(at, INT32, SUM, at), "no communicator"),
        (&|| call(at.wrapping_byte_add(1), INT32, SUM, comm), "aligned"),
        (&|| ncclCommInitRank(&mut comm.clone(), 2, Id([0; 128]), 2), "rank is 2"),
        (&|| ncclCommInitRank(&mut comm.clone(), 1, Id([7; 128]), 0), "commId"),
        (&|| ncclCommInitRank(null_mut(), 1, Id([7; 128]), 0), "newcomm is null"),
        (&|| ncclCommSplit(comm, -2, 0, &mut comm.clone(), null()), "color is -2"),
    ];
    for (call, part) in calls {
        assert_eq!(call(), INVALID_ARGUMENT, "{part}");
        assert!(last_error(null_mut()).contains(part), "{part}: {}", last_error(null_mut()));
    }
    ok(ncclCommDestroy(comm));
}

/// Polls the state until it is another one.
fn until_other_than(comm: Comm, before: c_int) -> c_int {
    let deadline = Instant::now() + Duration::from_secs(10);
    while state(comm) == before && Instant::now() < deadline {
        std::thread::yield_now();
    }
    state(comm)
}

/// The thread of a start reports its error after the state has changed: it prints the error, which is
/// the last one of the process then.
fn wait_until_reported(part: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !last_error(null_mut()).contains(part) {
        assert!(Instant::now() < deadline, "{}", last_error(null_mut()));
        std::thread::yield_now();
    }
}

/// No call returns it. Programs such as PyTorch ask for the error of no communicator.
#[test]
fn what_a_communicator_finds_out_is_the_last_error_of_the_process() {
    let _alone = alone();
    assert_eq!(ncclCommDestroy(std::ptr::dangling_mut()), INVALID_ARGUMENT);
    let mut failed = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut failed, 1, Id([7; 128]), 0, &Config::blocking(0)), IN_PROGRESS);
    assert_eq!(until_other_than(failed, IN_PROGRESS), INVALID_ARGUMENT);
    assert!(last_error(failed).contains("commId"), "{}", last_error(failed));
    wait_until_reported("ncclCommInitRank: commId");
    ok(ncclCommAbort(failed));
}

/// This program starts itself, because the library reads NCCL_DEBUG.
#[cfg(unix)]
#[test]
fn each_error_is_printed_once() {
    let _alone = alone();
    const CHILD: &str = "KOLO_NCCL_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        program.args(["each_error_is_printed_once", "--exact", "--nocapture"]);
        let child = program.envs([(CHILD, "1"), ("NCCL_DEBUG", "WARN")]).output().unwrap();
        let printed = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{printed}");
        for part in ["NCCL WARN ncclCommInitRank: commId", "peer is 5", "NCCL WARN ncclAllReduce"] {
            assert_eq!(printed.matches(part).count(), 1, "{part}: {printed}");
        }
        assert_eq!(printed.matches("NCCL WARN").count(), 3, "{printed}");
        return;
    }
    let mut failed = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut failed, 1, Id([7; 128]), 0, &Config::blocking(0)), IN_PROGRESS);
    assert_eq!(until_other_than(failed, IN_PROGRESS), INVALID_ARGUMENT);
    wait_until_reported("commId");
    on_threads(2, |rank, comm| {
        if rank == 0 {
            assert_eq!(ncclSend((&raw const rank).cast(), 1, INT32, 5, comm, null_mut()), INVALID_ARGUMENT);
            assert!(sum(comm, 1).is_err());
            // The state is the same failure.
            assert_ne!(state(comm), SUCCESS);
            assert_ne!(state(comm), SUCCESS);
        }
        ok(ncclCommAbort(comm));
    });
}
