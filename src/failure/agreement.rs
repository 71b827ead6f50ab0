//! Turns what one rank sees of a failure into the report of all survivors.
//!
//! A rank that fails first diagnoses the failure, by [`super::diagnosis`]: that gives a
//! [`FailureReport`], and the rank makes no second one. Then it sends its reports to all others,
//! and receives theirs. A rank that receives a report before it has a diagnosis of its own adopts
//! that report, and forwards it before it reports an error. So if two ranks diagnose different
//! failures, each has done so before the other one asks, and receives the other's report then. A
//! rank that adopted a report asks both. All survivors thus know all reports, and report the first
//! of them in an order on which they agree.

use std::io::ErrorKind;
use std::time::Duration;

use parking_lot::Mutex;

use super::board::StatusBoard;
use super::context::CommInfo;
use super::control::{QueryError, ask_all};
use super::diagnosis::diagnose;
use super::message::{Query, Reply};
use super::refused::{name_refused_call, refusal_that_peers_saw};
use super::report::{Failure, FailureReport, culprit_of};
use super::status::CommStatus;
use crate::error::{Cause, Error};
use crate::sys;
use crate::timeouts::QUERY;
use crate::types::{Descriptor, Op, Rank};

/// Agrees with the others on the failure that this rank met as `error`. Returns the error that this
/// rank reports.
pub(crate) fn agree_on_report(status: &CommStatus, info: &CommInfo, error: Error) -> Error {
    let mut error = name_refused_call(error);
    match &error {
        // No peer can take memory from this process.
        Error::Peer { rank, cause: Cause::Broken(ErrorKind::OutOfMemory), .. } => {
            error = Error::os(format!("communicating with rank {rank}"))(ErrorKind::OutOfMemory.into());
        }
        // A rank without file descriptors cannot reach its peers. The peers wait for this rank.
        Error::Peer { cause: Cause::Silent { .. } | Cause::Gone | Cause::Unreachable { .. }, .. } => {
            if let Some(want) = sys::resource_shortage() {
                error = Error::os("reaching the other ranks")(want);
            }
        }
        _ => {}
    }
    let during = during(status, &error);
    let own = diagnose(status, info, &error, during);
    spread(status);
    let reports = status.reports();
    let Some(first) = reports.iter().min_by_key(|report| report.order()) else { return error };
    let is_own = own.as_ref() == Some(first);
    let is_own_fault = matches!(first.what, Failure::Failed { culprit, .. } if culprit == info.rank);
    let told = || first.error(info, during, |seq| status.recording.history.collective(seq));
    if let Failure::Failed { culprit, cause } = &first.what
        && *culprit == info.rank
        && !matches!(error, Error::Os { .. })
        && let Some(refusal) = refusal_that_peers_saw(cause)
    {
        return Error::os("communicating with the other ranks")(refusal).on_rank(info.rank);
    }
    match &error {
        // The others have seen only that this rank keeps them waiting.
        Error::Os { .. } if is_own_fault => error.on_rank(info.rank),
        // The diagnosis says more than these causes.
        Error::Peer {
            cause:
                Cause::Silent { .. }
                | Cause::Unmatched { .. }
                | Cause::Closed
                | Cause::Gone
                | Cause::Unreachable { .. }
                | Cause::Revoked
                | Cause::Diverged,
            ..
        } => told(),
        // The diagnosis says which of the ranks is at fault.
        Error::Mismatch { .. } => told(),
        _ if is_own => error,
        _ => told(),
    }
}

/// Ends the communicator for a caller that aborts or drops it, and informs the others.
pub(crate) fn abort(status: &CommStatus) {
    end(status, Cause::Aborted);
}

/// Ends the communicator because a thread of this rank panics, and informs the others.
pub(crate) fn end_by_panic(status: &CommStatus) {
    end(status, Cause::Panicked);
}

/// Ends the communicator because of this rank's own failure outside of a wait for peers, and informs the
/// others.
pub(crate) fn end_by_error(status: &CommStatus, error: &Error) {
    end(status, Cause::Failed(error.to_string()));
}

/// Ends a communicator that this rank makes by a split, because the one that is split has failed with
/// `error`. Informs the others, which may have made it already: the rank at fault need not be a member.
pub(crate) fn give_up_part(status: &CommStatus, error: &Error) {
    end(status, Cause::Failed(split_failed(error)));
}

/// As [`give_up_part`], for a part that has been taken down from the `board`.
pub(crate) fn give_up_former_part(board: &StatusBoard, comm_id: u64, (rank, member): (Rank, Rank), error: &Error) {
    let what = Failure::Failed { culprit: rank, cause: Cause::Failed(split_failed(error)) };
    let during = Descriptor::nothing();
    board.amend(comm_id, member, FailureReport { origin: rank, what, during, after: Duration::ZERO, completed: 0 });
}

fn split_failed(error: &Error) -> String {
    let first = if let Error::Revoked { first } = error { first } else { error };
    format!("the communicator that was split has failed: {first}")
}

/// Ends the communicator because this rank shrinks it, and informs the others. If a rank is lost, the
/// report names that rank: another communicator of this process knows of it, or this function asks.
pub(crate) fn end_by_shrink(status: &CommStatus) {
    if let Some(control) = status.control().filter(|_| status.reports().is_empty()) {
        let lost = Mutex::new(control.lost());
        if lost.lock().is_empty() {
            ask_all(&*control, &status.others(), &Query::Doing(None), QUERY, |rank, reply| match reply {
                Ok(Reply::Doing { reports, .. }) => status.add_reports(reports),
                Err(QueryError::Died) => lost.lock().push((rank, Cause::Died)),
                Err(QueryError::Gone) => lost.lock().push((rank, Cause::Gone)),
                _ => {}
            });
        }
        if let Some((culprit, cause)) = culprit_of(&lost.into_inner()).cloned() {
            report(status, culprit, cause);
        }
    }
    end(status, Cause::Shrinks);
}

/// Ends the communicator on behalf of this rank, and informs the others.
fn end(status: &CommStatus, cause: Cause) {
    report(status, status.rank, cause);
    status.cancel.cancel();
    spread(status);
}

/// Adds this rank's report of a failure outside of its operations, unless it knows of one already.
fn report(status: &CommStatus, culprit: Rank, cause: Cause) {
    let (during, completed) = (Descriptor::nothing(), status.recording.history.last_completed());
    let what = Failure::Failed { culprit, cause };
    status.add_own_report(FailureReport { origin: status.rank, what, during, after: Duration::ZERO, completed });
}

/// The operation that was running on this rank, as this rank called it, and for how long.
fn during(status: &CommStatus, error: &Error) -> Option<(Descriptor, Duration)> {
    let history = &status.recording.history;
    let since = |call: Descriptor| {
        let since = if call.op.is_point_to_point() { None } else { history.since(call.seq) };
        Some((call, since.unwrap_or_default()))
    };
    match error {
        Error::Peer { op, seq, dtype, count, after, .. } => {
            Some((Descriptor { op: *op, seq: *seq, dtype: *dtype, count: *count, ..Descriptor::nothing() }, *after))
        }
        // The first report may be about another pair of calls.
        Error::Mismatch { mine, .. } => since(**mine),
        // The caller ended the communicator outside of any operation.
        Error::Aborted { op: Op::Connect, .. } => None,
        Error::Aborted { op, seq } | Error::Counts { op, seq, .. } => {
            let recorded = if op.is_point_to_point() { None } else { history.collective(*seq) };
            since(recorded.unwrap_or(Descriptor { op: *op, seq: *seq, ..Descriptor::nothing() }))
        }
        _ => None,
    }
}

/// Sends this rank's reports to the others, and receives theirs.
fn spread(status: &CommStatus) {
    let Some(control) = status.control() else { return };
    let reports = status.reports();
    // A rank that is gone receives nothing, and a stopped one costs time.
    let is_lost = |rank: Rank| {
        reports.iter().any(|report| match &report.what {
            Failure::Failed { culprit, cause: Cause::Left { .. } } => *culprit == rank,
            _ => report.absence().is_some_and(|(lost, _)| lost == rank),
        })
    };
    let peers: Vec<Rank> = status.others().into_iter().filter(|&rank| !is_lost(rank) && !control.is_stopped(rank)).collect();
    let query = Query::Reports(reports);
    let unasked = Mutex::new(Vec::new());
    let heard = |rank, reply| match reply {
        Ok(Reply::Doing { reports, .. }) => status.add_reports(reports),
        Err(QueryError::Unasked) => unasked.lock().push(rank),
        _ => {}
    };
    ask_all(&*control, &peers, &query, QUERY, heard);
    // One query at a time may need no more descriptors than this process has.
    for rank in unasked.into_inner() {
        if let Ok(Reply::Doing { reports, .. }) = control.ask(rank, &query, QUERY) {
            status.add_reports(reports);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{RankOfJob, Recorder};
    use crate::types::Member;
    use crate::types::{DType, ReduceOp};

    fn call(op: Op, redop: Option<ReduceOp>, root: Option<u32>, count: u64) -> Descriptor {
        Descriptor { op, dtype: DType::F32, redop, root, count, seq: 2, ..Descriptor::nothing() }
    }

    /// Returns what rank 1 of three reports. It has called `mine` and sees an error, after ranks 0
    /// and 2 reported that they called different operations.
    fn reported(mine: Descriptor, seen: Error) -> Error {
        let members = vec![Member { host: "here".into(), pid: 1 }; 3];
        let who = RankOfJob { job: "test".to_owned(), run: 1, rank: 1, members: members.clone() };
        let recording = Recorder::new(who, None, None).open(1, 1, (0..3).collect());
        if !mine.op.is_point_to_point() {
            let begun = recording.history.begin(&mine.encode(), 0, 0);
            recording.history.end(begun, false);
        }
        let status = CommStatus::new(1, (0..3).collect(), recording);
        let timeout = Duration::from_secs(3600);
        let info = CommInfo { rank: 1, members, timeout, start_timeout: timeout, cancel: status.cancel.clone() };
        let odd = call(Op::Broadcast, None, Some(0), 2);
        let what = Failure::Mismatch {
            ranks: [2, 0],
            calls: [odd, call(Op::AllReduce, Some(ReduceOp::Sum), None, 2)],
            known: 2,
            is_tie: false,
        };
        status.add_reports(vec![FailureReport { origin: 2, what, during: odd, after: Duration::ZERO, completed: 1 }]);
        agree_on_report(&status, &info, seen)
    }

    fn assert_is_of(told: &Error, call: Descriptor) {
        match told {
            Error::Mismatch { culprit: 0, rank: 1, peer: 0, mine, .. } => assert_eq!(**mine, call, "{told}"),
            Error::Peer { rank: 0, op, seq, dtype, count, cause: Cause::Mismatch(_), .. } => {
                assert_eq!((*op, *seq, *dtype, *count), (call.op, call.seq, call.dtype, call.count), "{told}");
            }
            _ => panic!("{told}"),
        }
    }

    /// Rank 1 sees a call mismatch with rank 2.
    #[test]
    fn an_error_is_of_the_operation_that_its_own_rank_called() {
        let (mine, theirs) = (call(Op::AllReduce, Some(ReduceOp::Sum), None, 5), call(Op::Broadcast, None, Some(0), 2));
        let seen = Error::Mismatch {
            culprit: 2,
            rank: 1,
            peer: 2,
            host: "here".into(),
            mine: Box::new(mine),
            theirs: Box::new(theirs),
            is_tie: false,
        };
        assert_is_of(&reported(mine, seen), mine);
    }

    /// Rank 1 receives more from rank 2 than it expected.
    #[test]
    fn an_error_of_counts_is_of_the_operation_that_its_own_rank_called() {
        let seen = |op, seq| Error::Counts { rank: 1, peer: 2, host: "here".into(), op, seq, sent: 8, expected: 4 };
        let mine = call(Op::AllToAllV, None, None, 5);
        assert_is_of(&reported(mine, seen(mine.op, mine.seq)), mine);
        // The report of a message must not take on what is recorded of the collective with the same
        // number.
        let message = Descriptor { op: Op::Send, seq: 2, ..Descriptor::nothing() };
        assert_is_of(&reported(mine, seen(message.op, message.seq)), message);
    }

    /// Rank 2 waited for rank 1 in an all-reduce, and rank 1 in a receive: it is no stranger to itself.
    #[test]
    fn a_rank_that_is_late_for_another_call_is_told_both_calls() {
        let members = vec![Member { host: "here".into(), pid: 1 }; 3];
        let timeout = Duration::from_secs(3600);
        let info = CommInfo { rank: 1, members, timeout, start_timeout: timeout, cancel: Default::default() };
        let cause = Cause::Absent { deadline: timeout, last_seq: 0, elsewhere: None };
        let theirs = call(Op::AllReduce, Some(ReduceOp::Sum), None, 2);
        let what = Failure::Failed { culprit: 1, cause };
        let report = FailureReport { origin: 2, what, during: theirs, after: timeout, completed: 0 };
        let told = |mine: Descriptor| report.error(&info, Some((mine, timeout)), |_| None);
        match told(call(Op::Recv, None, None, 2)) {
            Error::Mismatch { culprit: 1, rank: 1, peer: 2, mine, theirs, .. } => {
                assert_eq!((mine.op, theirs.op), (Op::Recv, Op::AllReduce));
            }
            other => panic!("{other}"),
        }
        assert!(matches!(told(theirs), Error::Peer { rank: 1, cause: Cause::Absent { .. }, .. }));
    }
}
