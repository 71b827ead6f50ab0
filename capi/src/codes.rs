//! The numbers of the header: results, causes and operations, and what a result means.

use std::ffi::CStr;

use kolo::Op;

/// What a call returns: `KOLO_OK`, or why it failed.
pub type kolo_result_t = i32;

/// It worked.
pub const KOLO_OK: kolo_result_t = 0;
/// An argument cannot be right: a null pointer, a number that stands for nothing, a root that is no rank. Nothing was sent.
pub const KOLO_ERR_ARGUMENT: kolo_result_t = 1;
/// The handle is null, of something else, or of something that was destroyed.
pub const KOLO_ERR_HANDLE: kolo_result_t = 2;
/// What was asked for cannot be had here.
pub const KOLO_ERR_UNSUPPORTED: kolo_result_t = 3;
/// A rank failed, left, or did not come before the deadline.
pub const KOLO_ERR_PEER: kolo_result_t = 4;
/// Ranks called different things.
pub const KOLO_ERR_MISMATCH: kolo_result_t = 5;
/// One rank sent another number of bytes than the other expected.
pub const KOLO_ERR_COUNTS: kolo_result_t = 6;
/// An earlier operation failed, which ended the communicator.
pub const KOLO_ERR_REVOKED: kolo_result_t = 7;
/// The operation was given up: the communicator was aborted or destroyed.
pub const KOLO_ERR_ABORTED: kolo_result_t = 8;
/// A field of the configuration or an environment variable has a value that it cannot have.
pub const KOLO_ERR_SETTING: kolo_result_t = 9;
/// Nothing told this process its rank and how many there are.
pub const KOLO_ERR_NO_LAUNCHER: kolo_result_t = 10;
/// Ranks did not come to the start in time.
pub const KOLO_ERR_MISSING: kolo_result_t = 11;
/// Ranks were given different numbers of ranks.
pub const KOLO_ERR_WORLD_SIZE: kolo_result_t = 12;
/// Two processes were given the same rank.
pub const KOLO_ERR_RANK_TAKEN: kolo_result_t = 13;
/// Ranks have versions of kolo that do not understand each other.
pub const KOLO_ERR_VERSION: kolo_result_t = 14;
/// The store where ranks find each other did not serve.
pub const KOLO_ERR_STORE: kolo_result_t = 15;
/// The operating system refused something.
pub const KOLO_ERR_OS: kolo_result_t = 16;
/// A defect of kolo. The communicator is ended.
pub const KOLO_ERR_INTERNAL: kolo_result_t = 17;
/// The survivors of a failure went on without this rank, which came too late.
pub const KOLO_ERR_EXCLUDED: kolo_result_t = 19;
/// This process was forked from the one that made the communicator.
pub const KOLO_ERR_FORKED: kolo_result_t = 21;
/// A device, or its driver, failed.
pub const KOLO_ERR_DEVICE: kolo_result_t = 22;
/// No error: the operation has not ended yet.
pub const KOLO_IN_PROGRESS: kolo_result_t = 18;

/// A reducer was used as it cannot be, or ranks gave it different parameters. Communicators stay as usable as they were.
pub const KOLO_ERR_REDUCER: kolo_result_t = 20;

/// What a rank did that failed.
pub type kolo_cause_t = i32;

/// The error is about no rank's failure.
pub const KOLO_CAUSE_NONE: kolo_cause_t = 0;
/// Its connection ended without a goodbye: it crashed or was killed.
pub const KOLO_CAUSE_CLOSED: kolo_cause_t = 1;
/// Its process is gone.
pub const KOLO_CAUSE_DIED: kolo_cause_t = 2;
/// It destroyed its communicator in good order.
pub const KOLO_CAUSE_LEFT: kolo_cause_t = 3;
/// It did not take part before the deadline.
pub const KOLO_CAUSE_SILENT: kolo_cause_t = 4;
/// Its connection broke.
pub const KOLO_CAUSE_BROKEN: kolo_cause_t = 5;
/// No connection to it could be made.
pub const KOLO_CAUSE_UNREACHABLE: kolo_cause_t = 6;
/// It has another secret.
pub const KOLO_CAUSE_SECRET: kolo_cause_t = 7;
/// An operation failed on it. Its own error says what happened.
pub const KOLO_CAUSE_REVOKED: kolo_cause_t = 8;
/// It made another call earlier.
pub const KOLO_CAUSE_DIVERGED: kolo_cause_t = 9;
/// It sent what no kolo sends.
pub const KOLO_CAUSE_CORRUPT: kolo_cause_t = 10;

/// It lives, but did not make the call before the deadline.
pub const KOLO_CAUSE_ABSENT: kolo_cause_t = 11;
/// Its process is stopped, by a signal or a debugger.
pub const KOLO_CAUSE_STOPPED: kolo_cause_t = 12;
/// Its machine takes connections, but its process says nothing.
pub const KOLO_CAUSE_UNRESPONSIVE: kolo_cause_t = 13;
/// Nobody is where it was.
pub const KOLO_CAUSE_GONE: kolo_cause_t = 14;
/// It aborted the communicator.
pub const KOLO_CAUSE_ABORTED: kolo_cause_t = 15;
/// It called something else than another rank.
pub const KOLO_CAUSE_MISMATCH: kolo_cause_t = 16;
/// It sent another number of bytes than another rank expected.
pub const KOLO_CAUSE_COUNTS: kolo_cause_t = 17;
/// One of the two does not believe the other's certificate.
pub const KOLO_CAUSE_TLS: kolo_cause_t = 18;

/// An operation, as errors name it.
pub type kolo_op_t = i32;

/// The error is about no operation.
pub const KOLO_OP_NONE: kolo_op_t = -1;
pub const KOLO_OP_ALL_REDUCE: kolo_op_t = 0;
pub const KOLO_OP_BROADCAST: kolo_op_t = 1;
pub const KOLO_OP_BARRIER: kolo_op_t = 2;
pub const KOLO_OP_REDUCE: kolo_op_t = 3;
pub const KOLO_OP_ALL_GATHER: kolo_op_t = 4;
pub const KOLO_OP_ALL_GATHER_V: kolo_op_t = 5;
pub const KOLO_OP_REDUCE_SCATTER: kolo_op_t = 6;
pub const KOLO_OP_REDUCE_SCATTER_V: kolo_op_t = 7;
pub const KOLO_OP_ALL_TO_ALL: kolo_op_t = 8;
pub const KOLO_OP_ALL_TO_ALL_V: kolo_op_t = 9;
pub const KOLO_OP_GATHER: kolo_op_t = 10;
pub const KOLO_OP_SCATTER: kolo_op_t = 11;
pub const KOLO_OP_SEND: kolo_op_t = 12;
pub const KOLO_OP_RECV: kolo_op_t = 13;
pub const KOLO_OP_SPLIT: kolo_op_t = 14;
pub const KOLO_OP_MEM_ALLOC: kolo_op_t = 15;
pub const KOLO_OP_CONNECT: kolo_op_t = 16;

// They are the library's own numbers.
const _: () = {
    let ops = [
        (KOLO_OP_ALL_REDUCE, Op::AllReduce as u8),
        (KOLO_OP_BROADCAST, Op::Broadcast as u8),
        (KOLO_OP_BARRIER, Op::Barrier as u8),
        (KOLO_OP_REDUCE, Op::Reduce as u8),
        (KOLO_OP_ALL_GATHER, Op::AllGather as u8),
        (KOLO_OP_ALL_GATHER_V, Op::AllGatherV as u8),
        (KOLO_OP_REDUCE_SCATTER, Op::ReduceScatter as u8),
        (KOLO_OP_REDUCE_SCATTER_V, Op::ReduceScatterV as u8),
        (KOLO_OP_ALL_TO_ALL, Op::AllToAll as u8),
        (KOLO_OP_ALL_TO_ALL_V, Op::AllToAllV as u8),
        (KOLO_OP_GATHER, Op::Gather as u8),
        (KOLO_OP_SCATTER, Op::Scatter as u8),
        (KOLO_OP_SEND, Op::Send as u8),
        (KOLO_OP_RECV, Op::Recv as u8),
        (KOLO_OP_SPLIT, Op::Split as u8),
        (KOLO_OP_MEM_ALLOC, Op::Alloc as u8),
        (KOLO_OP_CONNECT, Op::Connect as u8),
    ];
    assert!(ops.len() == Op::ALL.len());
    assert_same(&ops);
};

/// The numbers of the header are those of the library.
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
        KOLO_OK => c"it worked",
        KOLO_ERR_ARGUMENT => c"an argument cannot be right",
        KOLO_ERR_HANDLE => c"the handle is null, foreign or destroyed",
        KOLO_ERR_UNSUPPORTED => c"what was asked for cannot be had here",
        KOLO_ERR_PEER => c"a rank failed, left, or did not come before the deadline",
        KOLO_ERR_MISMATCH => c"ranks called different things",
        KOLO_ERR_COUNTS => c"ranks gave different counts for what one sends to the other",
        KOLO_ERR_REVOKED => c"an earlier operation failed, which ended the communicator",
        KOLO_ERR_ABORTED => c"the operation was given up, because the communicator was aborted or destroyed",
        KOLO_ERR_SETTING => c"a setting has a value that it cannot have",
        KOLO_ERR_NO_LAUNCHER => c"nothing told this process its rank and how many there are",
        KOLO_ERR_MISSING => c"ranks did not come to the start in time",
        KOLO_ERR_WORLD_SIZE => c"ranks were given different numbers of ranks",
        KOLO_ERR_RANK_TAKEN => c"two processes were given the same rank",
        KOLO_ERR_VERSION => c"ranks have versions of kolo that do not understand each other",
        KOLO_ERR_STORE => c"the store where ranks find each other did not serve",
        KOLO_ERR_OS => c"the operating system refused something",
        KOLO_ERR_DEVICE => c"a device, or its driver, failed",
        KOLO_ERR_INTERNAL => c"a defect of kolo",
        KOLO_ERR_FORKED => c"this process was forked from the one that made the communicator",
        KOLO_ERR_EXCLUDED => c"the survivors of a failure went on without this rank",
        KOLO_IN_PROGRESS => c"the operation has not ended yet",
        KOLO_ERR_REDUCER => c"a reducer was used as it cannot be, or ranks gave it different parameters",
        _ => c"this number is no result of kolo",
    }
}
