//! What the C ABI says when something went wrong: a number, a sentence, and who it was.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

use parking_lot::Mutex;

use super::boundary;
use super::communicator::{enter, kolo_comm_t};
use super::sized::{self, Grows, end_of};
use crate::{Cause, Error, Op};

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
    super::assert_same(&ops);
};

/// What went wrong, in full. Begin with KOLO_ERROR_INITIALIZER, or set `size`, before kolo_last_error.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_error_t {
    /// In: the size of this struct as the caller knows it.
    pub size: usize,
    /// What the call returned; `KOLO_OK` if nothing has failed.
    pub code: kolo_result_t,
    /// Whether the communicator can still be used: 1 or 0.
    pub usable: i32,
    /// The rank at fault, in the communicator of the call; -1 if it is none's or not known whose. Of several ranks, the lowest.
    pub rank: i32,
    /// What it did.
    pub cause: kolo_cause_t,
    /// The operation that failed. What goes wrong between two ranks while one receives is told of the send that it waits for.
    pub op: kolo_op_t,
    /// Its process on its host; 0 if not known.
    pub pid: u32,
    /// The operation's sequence number in its communicator (for `send` and `recv`, among the messages of the two ranks).
    pub seq: u64,
    /// How long the operation had been running, in microseconds; 0 if not known.
    pub after_us: u64,
    /// The name of the host of the rank at fault; empty if not known.
    pub host: [c_char; 256],
    /// What happened, to whom, and what to do: a sentence in UTF-8.
    pub message: [c_char; 2048],
}

// SAFETY: it begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_error_t {
    const NAMES: (&'static str, &'static str) = ("error", "error->size");
    const FIRST: usize = end_of!(kolo_error_t, message: [c_char; 2048]);
}

/// Why a call failed, before it becomes a number.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Kolo(#[from] Error),
    #[error("the {what} handle is {}; it must be one that kolo made and that was not destroyed yet", if *is_null { "null" } else { "not alive" })]
    Handle { what: &'static str, is_null: bool },
    #[error("{what} is null")]
    Null { what: &'static str },
    #[error("{what} is not aligned to what it points to")]
    Misaligned { what: &'static str },
    #[error("{what} are {len}, which is more than memory can hold")]
    Long { what: &'static str, len: usize },
    #[error("{what} is {given}; {expected}")]
    Value { what: &'static str, given: i64, expected: String },
    #[error("{what} is not UTF-8")]
    Text { what: &'static str },
    #[error("{what}: {why}")]
    Unsupported { what: &'static str, why: &'static str },
    #[error("{what} in a group: {why}")]
    Group { what: &'static str, why: &'static str },
    #[error("a defect of kolo, which panicked: {0}; please report it")]
    Panic(String),
}

impl Fault {
    pub(super) fn value(what: &'static str, given: impl Into<i64>, expected: impl Into<String>) -> Fault {
        Fault::Value { what, given: given.into(), expected: expected.into() }
    }

    pub(super) fn code(&self) -> kolo_result_t {
        match self {
            Fault::Kolo(error) => code(error),
            Fault::Handle { .. } => KOLO_ERR_HANDLE,
            Fault::Null { .. } | Fault::Misaligned { .. } | Fault::Long { .. } => KOLO_ERR_ARGUMENT,
            Fault::Value { .. } | Fault::Text { .. } | Fault::Group { .. } => KOLO_ERR_ARGUMENT,
            Fault::Unsupported { .. } => KOLO_ERR_UNSUPPORTED,
            Fault::Panic(_) => KOLO_ERR_INTERNAL,
        }
    }

    /// What `kolo_last_error` gives.
    pub(super) fn describe(&self) -> kolo_error_t {
        let mut described = nothing();
        described.code = self.code();
        write(&mut described.message, &self.to_string());
        match self {
            Fault::Kolo(error) => {
                described.usable = error.leaves_communicator_usable().into();
                culprit(&mut described, error);
            }
            Fault::Panic(_) => described.usable = 0,
            _ => described.usable = 1,
        }
        described
    }
}

pub(super) fn code(error: &Error) -> kolo_result_t {
    match error {
        Error::Argument { .. } => KOLO_ERR_ARGUMENT,
        Error::Peer { .. } => KOLO_ERR_PEER,
        Error::Mismatch { .. } => KOLO_ERR_MISMATCH,
        Error::Counts { .. } => KOLO_ERR_COUNTS,
        Error::Revoked { .. } => KOLO_ERR_REVOKED,
        Error::Aborted { .. } => KOLO_ERR_ABORTED,
        Error::Setting { .. } => KOLO_ERR_SETTING,
        Error::NoLauncher { .. } => KOLO_ERR_NO_LAUNCHER,
        Error::Missing { .. } => KOLO_ERR_MISSING,
        Error::WorldSize { .. } => KOLO_ERR_WORLD_SIZE,
        Error::RankTaken { .. } => KOLO_ERR_RANK_TAKEN,
        Error::Version { .. } => KOLO_ERR_VERSION,
        Error::Store { .. } => KOLO_ERR_STORE,
        Error::Reducer { .. } => KOLO_ERR_REDUCER,
        Error::Unsupported { .. } => KOLO_ERR_UNSUPPORTED,
        Error::Device { .. } => KOLO_ERR_DEVICE,
        Error::Os { .. } => KOLO_ERR_OS,
        Error::Excluded { .. } => KOLO_ERR_EXCLUDED,
        Error::Forked { .. } => KOLO_ERR_FORKED,
        Error::Panicked { .. } => KOLO_ERR_INTERNAL,
    }
}

/// Who it was, and what was being done; of a communicator that has ended, those of what ended it.
fn culprit(described: &mut kolo_error_t, error: &Error) {
    let kolo_error_t { rank, op, seq, pid, cause, after_us, host, .. } = described;
    let operation = |it: &Op| *it as u8 as kolo_op_t;
    match error {
        Error::Argument { op: called, .. } | Error::Forked { op: called } | Error::Panicked { op: called } => {
            *op = operation(called)
        }
        Error::Aborted { op: called, seq: number } => (*op, *seq) = (operation(called), *number),
        Error::Peer { rank: peer, host: name, pid: process, op: called, seq: number, after, cause: did, .. } => {
            (*rank, *op, *seq, *pid, *cause) = (*peer as i32, operation(called), *number, *process, cause_number(did));
            *after_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
            write(host, name);
        }
        Error::Mismatch { peer, host: name, mine, .. } => {
            (*rank, *op, *seq) = (*peer as i32, operation(&mine.op), mine.seq);
            write(host, name);
        }
        Error::Counts { peer, host: name, op: called, seq: number, .. } => {
            (*rank, *op, *seq) = (*peer as i32, operation(called), *number);
            write(host, name);
        }
        Error::Revoked { first } => culprit(described, first),
        Error::Missing { ranks, .. } => {
            (*rank, *op) = (ranks.first().map_or(-1, |&rank| rank as i32), operation(&Op::Connect));
        }
        Error::WorldSize { rank: peer, host: name, .. } | Error::Version { rank: peer, host: name, .. } => {
            (*rank, *op) = (*peer as i32, operation(&Op::Connect));
            write(host, name);
        }
        Error::RankTaken { rank: taken, .. } => (*rank, *op) = (*taken as i32, operation(&Op::Connect)),
        _ => {}
    }
}

fn cause_number(cause: &Cause) -> kolo_cause_t {
    match cause {
        Cause::Closed => KOLO_CAUSE_CLOSED,
        Cause::Died => KOLO_CAUSE_DIED,
        Cause::Left { .. } => KOLO_CAUSE_LEFT,
        Cause::Silent { .. } => KOLO_CAUSE_SILENT,
        Cause::Broken(_) => KOLO_CAUSE_BROKEN,
        Cause::Unreachable { .. } => KOLO_CAUSE_UNREACHABLE,
        Cause::Secret => KOLO_CAUSE_SECRET,
        Cause::Revoked => KOLO_CAUSE_REVOKED,
        Cause::Diverged => KOLO_CAUSE_DIVERGED,
        Cause::Corrupt(_) => KOLO_CAUSE_CORRUPT,
        Cause::Absent { .. } => KOLO_CAUSE_ABSENT,
        Cause::Stopped { .. } => KOLO_CAUSE_STOPPED,
        Cause::Unresponsive { .. } => KOLO_CAUSE_UNRESPONSIVE,
        Cause::Gone => KOLO_CAUSE_GONE,
        Cause::Aborted => KOLO_CAUSE_ABORTED,
        Cause::Mismatch(_) => KOLO_CAUSE_MISMATCH,
        Cause::Counts { .. } => KOLO_CAUSE_COUNTS,
        Cause::Tls(_) => KOLO_CAUSE_TLS,
    }
}

/// No error.
fn nothing() -> kolo_error_t {
    kolo_error_t {
        size: size_of::<kolo_error_t>(),
        code: KOLO_OK,
        usable: 1,
        rank: -1,
        cause: KOLO_CAUSE_NONE,
        op: KOLO_OP_NONE,
        pid: 0,
        seq: 0,
        after_us: 0,
        host: [0; 256],
        message: [0; 2048],
    }
}

/// Writes as much of a text as there is room for, to a whole character, and a zero after it.
fn write(to: &mut [c_char], text: &str) {
    let end = (0..to.len().min(text.len() + 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    for (to, from) in to.iter_mut().zip(text[..end].bytes().chain([0])) {
        *to = from as c_char;
    }
}

/// The last error of a communicator.
#[derive(Default)]
pub(super) struct Last(Mutex<Option<Box<kolo_error_t>>>);

impl Last {
    pub(super) fn set(&self, error: &kolo_error_t) {
        *self.0.lock() = Some(Box::new(*error));
    }
}

thread_local! {
    static LAST: RefCell<Option<Box<kolo_error_t>>> = const { RefCell::new(None) };
}

/// Remembers an error for this thread.
pub(super) fn remember(error: &kolo_error_t) {
    // At the end of a thread there may be nobody left to ask.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(Box::new(*error)));
}

/// Copies the last error into `*error`: of this communicator, whichever thread made the call; or, if `comm` is null, of this
/// thread, whatever the call was about. `error->code` is `KOLO_OK` if there was none.
///
/// Set `error->size` to `sizeof(kolo_error_t)` first. A call that succeeds leaves the last error as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_last_error(comm: kolo_comm_t, error: *mut kolo_error_t) -> kolo_result_t {
    boundary(|| {
        let last = match comm.is_null() {
            true => LAST.try_with(|last| last.borrow().as_deref().copied()).ok().flatten(),
            false => enter(comm)?.last.0.lock().as_deref().copied(),
        };
        // SAFETY: the caller's struct, whose size the caller has set.
        unsafe { sized::write(error, &last.unwrap_or_else(nothing)) }
    })
}

/// What a result means, in a few words. The text is static: it needs no freeing. Of any number, also of one that is no result.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_error_string(result: kolo_result_t) -> *const c_char {
    words(result).as_ptr()
}

pub(super) fn meaning(result: kolo_result_t) -> &'static str {
    words(result).to_str().expect("it is UTF-8")
}

fn words(result: kolo_result_t) -> &'static CStr {
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

/// What a panic said.
pub(super) fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without words".to_owned())
}
