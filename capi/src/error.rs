//! The content of an error: a code, a message, and the rank at fault.

use std::ffi::c_char;

use kolo::{Cause, Error, Op};

use crate::codes::*;

/// All that is known about an error. Initialize it with KOLO_ERROR_INITIALIZER, or set `size`,
/// before kolo_last_error.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_error_t {
    /// In: the `sizeof` of this struct in the caller's header.
    pub size: usize,
    /// The result of the call; `KOLO_OK` if no call has failed.
    pub code: kolo_result_t,
    /// Whether the communicator can still be used: 1 or 0.
    pub usable: i32,
    /// The rank at fault, in the communicator of the call; the lowest of several ranks; -1 if no
    /// rank is at fault or it is not known.
    pub rank: i32,
    /// How that rank failed.
    pub cause: kolo_cause_t,
    /// The operation that failed.
    pub op: kolo_op_t,
    /// The process id of the rank at fault, on its host; 0 if not known.
    pub pid: u32,
    /// The sequence number of the operation in its communicator. A send or a receive counts the
    /// messages between the two ranks.
    pub seq: u64,
    /// How long the operation had been running, in microseconds; 0 if not known.
    pub after_us: u64,
    /// The name of the host of the rank at fault; empty if not known.
    pub host: [c_char; 256],
    /// A message in UTF-8: what happened, which rank is at fault, and what to do.
    pub message: [c_char; 2048],
}

pub(crate) fn code(error: &Error) -> kolo_result_t {
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
        Error::NotGrown { .. } => KOLO_ERR_NOT_GROWN,
        Error::NotAdmitted { .. } => KOLO_ERR_NOT_ADMITTED,
        Error::NoMemory { .. } => KOLO_ERR_NO_MEMORY,
        Error::Forked { .. } => KOLO_ERR_FORKED,
        Error::Panicked { .. } => KOLO_ERR_INTERNAL,
        // `tests/layers.rs` checks that every variant has an arm above.
        _ => KOLO_ERR_INTERNAL,
    }
}

/// Fills in the rank at fault and the operation. The error of a revoked communicator gets those of
/// the failure that ended it.
pub(crate) fn blame(described: &mut kolo_error_t, error: &Error) {
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
        Error::Mismatch { culprit, peer, host: name, mine, .. } => {
            (*rank, *op, *seq) = (*culprit as i32, operation(&mine.op()), mine.seq());
            // The error has the peer's host, and this rank may be the one at fault.
            if culprit == peer {
                write(host, name);
            }
        }
        Error::Counts { peer, host: name, op: called, seq: number, .. } => {
            (*rank, *op, *seq) = (*peer as i32, operation(called), *number);
            write(host, name);
        }
        Error::NoMemory { op: called, rank: lacks, host: name, .. } => {
            (*rank, *op) = (*lacks as i32, operation(called));
            write(host, name);
        }
        Error::Os { rank: Some(own), .. } => *rank = *own as i32,
        Error::Revoked { first } => blame(described, first),
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
        Cause::Panicked => KOLO_CAUSE_PANICKED,
        Cause::Failed(_) => KOLO_CAUSE_FAILED,
        Cause::Shrinks => KOLO_CAUSE_SHRINKS,
        Cause::Unmatched { .. } => KOLO_CAUSE_UNMATCHED,
        // As above.
        _ => KOLO_CAUSE_NONE,
    }
}

/// Returns a struct that says that nothing has failed.
pub(crate) fn nothing() -> kolo_error_t {
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

/// Writes as many whole characters of a text as fit, and a zero after them.
pub(crate) fn write(to: &mut [c_char], text: &str) {
    let end = (0..to.len().min(text.len() + 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    for (to, from) in to.iter_mut().zip(text[..end].bytes().chain([0])) {
        *to = from as c_char;
    }
}
