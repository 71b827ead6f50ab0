//! The numbers of the header: results, causes and operations, and the meaning of each result.

use std::ffi::CStr;

/// The result of a call: `KOLO_OK`, or why it failed.
pub type kolo_result_t = i32;

/// Success.
pub const KOLO_OK: kolo_result_t = 0;
/// An argument is wrong: a null pointer, an unknown number, a root that is not a rank. Nothing was
/// sent.
pub const KOLO_ERR_ARGUMENT: kolo_result_t = 1;
/// The handle is null, was made for another kind of object, or was destroyed.
pub const KOLO_ERR_HANDLE: kolo_result_t = 2;
/// The request is not supported here.
pub const KOLO_ERR_UNSUPPORTED: kolo_result_t = 3;
/// A rank failed, left, or did not take part before the deadline.
pub const KOLO_ERR_PEER: kolo_result_t = 4;
/// Ranks made different calls.
pub const KOLO_ERR_MISMATCH: kolo_result_t = 5;
/// A rank sent a different number of bytes than its peer expected.
pub const KOLO_ERR_COUNTS: kolo_result_t = 6;
/// An earlier operation failed, which ended the communicator.
pub const KOLO_ERR_REVOKED: kolo_result_t = 7;
/// The operation was cancelled: the communicator was aborted or destroyed.
pub const KOLO_ERR_ABORTED: kolo_result_t = 8;
/// A field of the configuration or an environment variable has an invalid value.
pub const KOLO_ERR_SETTING: kolo_result_t = 9;
/// No launcher told this process its rank and the number of ranks.
pub const KOLO_ERR_NO_LAUNCHER: kolo_result_t = 10;
/// Ranks did not connect before the start deadline.
pub const KOLO_ERR_MISSING: kolo_result_t = 11;
/// Ranks were given different numbers of ranks.
pub const KOLO_ERR_WORLD_SIZE: kolo_result_t = 12;
/// Two processes were given the same rank.
pub const KOLO_ERR_RANK_TAKEN: kolo_result_t = 13;
/// Ranks have versions of kolo that do not understand each other, or the program was compiled with
/// the header of another version.
pub const KOLO_ERR_VERSION: kolo_result_t = 14;
/// The store where ranks find each other failed.
pub const KOLO_ERR_STORE: kolo_result_t = 15;
/// A call to the operating system failed.
pub const KOLO_ERR_OS: kolo_result_t = 16;
/// A defect of kolo. It ended the communicator.
pub const KOLO_ERR_INTERNAL: kolo_result_t = 17;
/// The survivors of a failure continued without this rank, which called too late.
pub const KOLO_ERR_EXCLUDED: kolo_result_t = 19;
/// This process was forked from the one that made the communicator.
pub const KOLO_ERR_FORKED: kolo_result_t = 21;
/// A device or its driver failed.
pub const KOLO_ERR_DEVICE: kolo_result_t = 22;
/// kolo_comm_grow did not admit the newcomers that it found. The communicator stays as it was.
pub const KOLO_ERR_NOT_GROWN: kolo_result_t = 23;
/// The ranks of the job did not admit this process, which was to join them.
pub const KOLO_ERR_NOT_ADMITTED: kolo_result_t = 24;
/// A rank had no memory for what it was about to allocate. In a call of all ranks, all return this,
/// and none keeps any of it.
pub const KOLO_ERR_NO_MEMORY: kolo_result_t = 25;
/// No error: the operation has not ended yet.
pub const KOLO_IN_PROGRESS: kolo_result_t = 18;

/// A reducer was used wrongly, or ranks gave it different parameters. Communicators stay as usable
/// as they were.
pub const KOLO_ERR_REDUCER: kolo_result_t = 20;

/// How a rank failed.
pub type kolo_cause_t = i32;

/// The error is not about the failure of a rank.
pub const KOLO_CAUSE_NONE: kolo_cause_t = 0;
/// Its connection closed without a goodbye: it crashed or was killed.
pub const KOLO_CAUSE_CLOSED: kolo_cause_t = 1;
/// Its process is gone.
pub const KOLO_CAUSE_DIED: kolo_cause_t = 2;
/// It destroyed its communicator.
pub const KOLO_CAUSE_LEFT: kolo_cause_t = 3;
/// It did not take part before the deadline.
pub const KOLO_CAUSE_SILENT: kolo_cause_t = 4;
/// Its connection broke.
pub const KOLO_CAUSE_BROKEN: kolo_cause_t = 5;
/// No connection to it could be made.
pub const KOLO_CAUSE_UNREACHABLE: kolo_cause_t = 6;
/// It has a different secret.
pub const KOLO_CAUSE_SECRET: kolo_cause_t = 7;
/// An operation failed on it. Its own error says what happened.
pub const KOLO_CAUSE_REVOKED: kolo_cause_t = 8;
/// It made a different call earlier.
pub const KOLO_CAUSE_DIVERGED: kolo_cause_t = 9;
/// It sent data that violates the protocol.
pub const KOLO_CAUSE_CORRUPT: kolo_cause_t = 10;

/// It is alive, but did not make the call before the deadline.
pub const KOLO_CAUSE_ABSENT: kolo_cause_t = 11;
/// Its process is stopped, by a signal or a debugger.
pub const KOLO_CAUSE_STOPPED: kolo_cause_t = 12;
/// Its host accepts connections, but its process does not answer.
pub const KOLO_CAUSE_UNRESPONSIVE: kolo_cause_t = 13;
/// No process is at its address any more.
pub const KOLO_CAUSE_GONE: kolo_cause_t = 14;
/// It aborted the communicator.
pub const KOLO_CAUSE_ABORTED: kolo_cause_t = 15;
/// It made a different call than another rank.
pub const KOLO_CAUSE_MISMATCH: kolo_cause_t = 16;
/// It sent a different number of bytes than another rank expected.
pub const KOLO_CAUSE_COUNTS: kolo_cause_t = 17;
/// One of the two ranks rejected the other's certificate.
pub const KOLO_CAUSE_TLS: kolo_cause_t = 18;
/// A thread of it panicked.
pub const KOLO_CAUSE_PANICKED: kolo_cause_t = 19;
/// A system call failed on it.
pub const KOLO_CAUSE_FAILED: kolo_cause_t = 20;
/// It called kolo_comm_shrink, and no rank had reported a failure.
pub const KOLO_CAUSE_SHRINKS: kolo_cause_t = 21;
/// It sent no message with the tag of a receive before the deadline, but others wait. Or it is this
/// rank itself, and a message to itself was not received or not sent. Or its part of a collective is
/// behind messages for which there is no room.
pub const KOLO_CAUSE_UNMATCHED: kolo_cause_t = 22;

/// An operation, as errors name it.
pub type kolo_op_t = i32;

/// The error is not about an operation.
pub const KOLO_OP_NONE: kolo_op_t = -1;
// KOLO_OP_ALL_REDUCE and so on: the test of the header writes a number for each operation of `kolo::Op`.

/// Checks that the numbers of the header are those of the crate `kolo`.
pub(crate) const fn assert_same(pairs: &[(i32, u8)]) {
    let mut i = 0;
    while i < pairs.len() {
        assert!(pairs[i].0 == pairs[i].1 as i32);
        i += 1;
    }
}

pub(crate) fn meaning(result: kolo_result_t) -> &'static str {
    words(result).to_str().expect("it is UTF-8")
}

pub(crate) fn words(result: kolo_result_t) -> &'static CStr {
    match result {
        KOLO_OK => c"success",
        KOLO_ERR_ARGUMENT => c"an argument is wrong",
        KOLO_ERR_HANDLE => c"the handle is null, of another kind, or destroyed",
        KOLO_ERR_UNSUPPORTED => c"the request is not supported here",
        KOLO_ERR_PEER => c"a rank failed, left, or did not take part before the deadline",
        KOLO_ERR_MISMATCH => c"ranks made different calls",
        KOLO_ERR_COUNTS => c"a rank sent a different number of bytes than its peer expected",
        KOLO_ERR_REVOKED => c"an earlier operation failed, which ended the communicator",
        KOLO_ERR_ABORTED => c"the operation was cancelled: the communicator was aborted or destroyed",
        KOLO_ERR_SETTING => c"a setting has an invalid value",
        KOLO_ERR_NO_LAUNCHER => c"no launcher told this process its rank and the number of ranks",
        KOLO_ERR_MISSING => c"ranks did not connect before the start deadline",
        KOLO_ERR_WORLD_SIZE => c"ranks were given different numbers of ranks",
        KOLO_ERR_RANK_TAKEN => c"two processes were given the same rank",
        KOLO_ERR_VERSION => c"ranks, or a program and its library, have versions of kolo that do not understand each other",
        KOLO_ERR_STORE => c"the store where ranks find each other failed",
        KOLO_ERR_OS => c"a call to the operating system failed",
        KOLO_ERR_DEVICE => c"a device or its driver failed",
        KOLO_ERR_INTERNAL => c"a defect of kolo",
        KOLO_ERR_FORKED => c"this process was forked from the one that made the communicator",
        KOLO_ERR_NO_MEMORY => c"a rank has no memory for what it was to allocate",
        KOLO_ERR_NOT_GROWN => c"newcomers were not admitted; the communicator stays as it was",
        KOLO_ERR_NOT_ADMITTED => c"the ranks of the job did not admit this process",
        KOLO_ERR_EXCLUDED => c"the survivors of a failure continued without this rank",
        KOLO_IN_PROGRESS => c"the operation has not ended yet",
        KOLO_ERR_REDUCER => c"a reducer was used wrongly, or ranks gave it different parameters",
        _ => c"not a result of kolo",
    }
}
