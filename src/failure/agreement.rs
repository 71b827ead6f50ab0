//! From what one rank sees of a failure to what all survivors report.
//!
//! A rank that fails sees little: that a link has closed, that a peer has given up, that its deadline is over. So first it finds
//! out who is at fault, by asking whom it sees: a rank that has failed because of another names that one; a rank that waits for
//! another is not the one to blame. What it finds is a [`FailureReport`], and from then on it finds out no other.
//!
//! Then it tells all others, and hears from each the reports that it knows. A rank that is told before it has found out anything
//! itself finds out nothing any more, and does the same with what it was told before it reports. So of two ranks that found out
//! something by themselves each had done so before the other asked, and hears it then; and whoever was told asks both. All
//! survivors thus know all reports, and report the first of them, in an order on which they agree.

use std::thread;
use std::time::{Duration, Instant};

use super::cancel::Diagnosing;
use super::context::CommInfo;
use super::control::{ControlChannel, QueryError, ask_all};
use super::message::{Query, Reply};
use super::report::{Failure, FailureReport};
use super::status::CommStatus;
use crate::error::{Cause, Elsewhere, Error};
use crate::sys;
use crate::types::{Descriptor, Op, Rank};

/// How long one rank may take to answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// How long a peer that closed a link may take to say why, if it lives.
const EXPLANATION: Duration = Duration::from_millis(60);

/// How long one may that says it is about to.
const DIAGNOSING: Duration = Duration::from_secs(5);

/// How long a rank that has made the call may say of no peer that it waits for it. It says so whenever it wakes, twice a second,
/// but on a machine with too much to do it wakes late.
const BUSY: Duration = Duration::from_secs(1);

/// What this rank reports of a failure that it met as `error`: agrees on it with the others.
pub(crate) fn agree_on_report(status: &CommStatus, info: &CommInfo, mut error: Error) -> Error {
    // Whoever has no descriptor left keeps the others waiting, not they him.
    if let Error::Peer { cause: Cause::Silent { .. } | Cause::Gone | Cause::Unreachable { .. }, .. } = &error
        && let Some(want) = sys::resource_shortage()
    {
        error = Error::os("reaching the other ranks")(want);
    }
    let during = during(status, &error);
    let own = find_out(status, info, &error);
    spread(status);
    let reports = status.reports();
    let Some(first) = reports.iter().min_by_key(|report| report.order()) else { return error };
    let is_own = own.as_ref() == Some(first);
    let is_own_fault = matches!(first.what, Failure::Failed { culprit, .. } if culprit == info.rank);
    match &error {
        // The others have seen only that this rank keeps them waiting.
        Error::Os { .. } if is_own_fault => error,
        // What it is about it tells better than the others.
        Error::Peer {
            cause: Cause::Silent { .. } | Cause::Closed | Cause::Gone | Cause::Unreachable { .. } | Cause::Revoked,
            ..
        } => first.error(info, during),
        _ if is_own => error,
        _ => first.error(info, during),
    }
}

/// This rank gives up of its own accord, and all hear of it.
pub(crate) fn abort(status: &CommStatus) {
    let (during, completed) = (Descriptor::nothing(), status.recording.history.last_completed());
    let what = Failure::Failed { culprit: status.rank, cause: Cause::Aborted };
    status.find_out(FailureReport { origin: status.rank, what, during, after: Duration::ZERO, completed });
    status.cancel.cancel();
    spread(status);
}

/// The operation that was under way here, as this rank called it, and for how long.
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
        // Other ranks may report another pair of calls that differ.
        Error::Mismatch { mine, .. } => since(**mine),
        // No operation, but whoever ends the communicator.
        Error::Aborted { op: Op::Connect, .. } => None,
        Error::Aborted { op, seq } | Error::Counts { op, seq, .. } => {
            let recorded = if op.is_point_to_point() { None } else { history.collective(*seq) };
            since(recorded.unwrap_or(Descriptor { op: *op, seq: *seq, ..Descriptor::nothing() }))
        }
        _ => None,
    }
}

/// What this rank finds out, unless another has told it before.
fn find_out(status: &CommStatus, info: &CommInfo, error: &Error) -> Option<FailureReport> {
    let about = if let Error::Peer { rank, .. } = error { Some(*rank) } else { None };
    status.cancel.set_diagnosing(Some(Diagnosing { about }));
    let found = look_into(status, info, error);
    if let Some(found) = &found {
        status.find_out(found.clone());
    }
    status.cancel.set_diagnosing(None);
    found
}

fn look_into(status: &CommStatus, info: &CommInfo, error: &Error) -> Option<FailureReport> {
    if !status.reports().is_empty() {
        return None;
    }
    let completed = status.recording.history.last_completed();
    let Some(report) = FailureReport::of(error, info, completed) else {
        // It is this rank's own affair.
        let cause = if matches!(error, Error::Aborted { .. }) { Cause::Aborted } else { Cause::Revoked };
        let (during, after) = during(status, error).unwrap_or((Descriptor::nothing(), Duration::ZERO));
        return Some(FailureReport {
            origin: info.rank,
            what: Failure::Failed { culprit: info.rank, cause },
            during,
            after,
            completed,
        });
    };
    let Some(control) = status.control() else { return Some(report) };
    let Failure::Failed { culprit, cause } = &report.what else { return Some(report) };
    let what = match cause {
        Cause::Silent { deadline } => follow(status, &*control, *culprit, report.during, *deadline)?,
        Cause::Closed | Cause::Gone | Cause::Broken(_) | Cause::Unreachable { .. } | Cause::Revoked => {
            explain(status, &*control, *culprit, cause)?
        }
        _ => return Some(report),
    };
    Some(FailureReport { what, ..report })
}

/// Why a peer closed its link or gave up; `None` if the peer or another has told by now.
fn explain(status: &CommStatus, control: &dyn ControlChannel, peer: Rank, seen: &Cause) -> Option<Failure> {
    let began = Instant::now();
    let failed = |cause| Some(Failure::Failed { culprit: peer, cause });
    status.cancel.set_diagnosing(Some(Diagnosing { about: Some(peer) }));
    loop {
        let heard = control.ask(peer, &Query::Doing(None), PATIENCE);
        let lives = heard.is_ok();
        let patience = match heard {
            Ok(Reply::Doing { reports, diagnosing, .. }) => {
                status.hear(reports);
                match diagnosing {
                    // If it asks this rank the same, nobody knows more.
                    Some(Diagnosing { about }) if about != Some(status.rank) => DIAGNOSING,
                    _ => EXPLANATION,
                }
            }
            Ok(Reply::Left { last_seq }) if *seen != Cause::Revoked => return failed(Cause::Left { last_seq }),
            Err(QueryError::Gone) if matches!(seen, Cause::Unreachable { .. }) => return failed(Cause::Gone),
            Err(QueryError::Died) => return failed(Cause::Died),
            Err(QueryError::Gone) | Ok(_) => return failed(seen.clone()),
            Err(QueryError::Mute | QueryError::Unreachable { .. } | QueryError::Unasked) => EXPLANATION,
        };
        if !status.reports().is_empty() {
            return None;
        }
        if began.elapsed() >= patience {
            // It lives, so it is the connection that has ended.
            let is_closed = matches!(seen, Cause::Closed | Cause::Gone | Cause::Unreachable { .. });
            let cause = if is_closed && lives { Cause::Broken(std::io::ErrorKind::ConnectionReset) } else { seen.clone() };
            return failed(cause);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// At the deadline: from the rank that this one waits for to whom that one waits for, and so on, up to who keeps all waiting.
///
/// The way may lead through other communicators of the same ranks. Whom it leads to there is named if it cannot answer; if it
/// can, it owes nothing in this communicator, and the one that should have made the call here is named, with whom it waits for.
fn follow(
    status: &CommStatus,
    control: &dyn ControlChannel,
    first: Rank,
    mine: Descriptor,
    deadline: Duration,
) -> Option<Failure> {
    let mut path = vec![status.rank];
    let mut suspect = first;
    // What the one before called, as it was called.
    let mut call = if mine.op.is_point_to_point() { Some(mine) } else { status.recording.history.collective(mine.seq) };
    // Who should have made the call here, and waits in another communicator.
    let mut busy: Option<Failure> = None;
    // Since when the suspect has been asked, and its answers have led to no other rank.
    let mut asked = (first, Instant::now());
    loop {
        if asked.0 != suspect {
            asked = (suspect, Instant::now());
        }
        let may_still_say = |patience: Duration| asked.1.elapsed() < patience;
        status.cancel.set_diagnosing(Some(Diagnosing { about: Some(suspect) }));
        let failed = |cause| Some(Failure::Failed { culprit: suspect, cause });
        if control.is_stopped(suspect) {
            return failed(Cause::Stopped { deadline });
        }
        let before = *path.last().expect("it begins with this rank");
        let mismatch = |call, theirs| Some(Failure::Mismatch { ranks: [before, suspect], calls: [call, theirs] });
        match control.ask(suspect, &Query::Doing(call), PATIENCE) {
            Ok(Reply::Doing { reports, .. }) if !reports.is_empty() => {
                status.hear(reports);
                return None;
            }
            Ok(Reply::Doing { at_your_seq: Some(theirs), .. }) if call.is_some_and(|call| call != theirs) => {
                return mismatch(call?, theirs);
            }
            Ok(Reply::Doing { waits: Some((next, _)), .. }) if next >= status.world() => {
                return failed(Cause::Corrupt("it waits for a rank that there is not"));
            }
            Ok(Reply::Doing { waits: Some((next, words)), .. }) => {
                let theirs = Descriptor::decode(words);
                path.push(suspect);
                if path.contains(&next) {
                    // They wait for each other. If they call different things, that is why.
                    return match (call, theirs) {
                        (Some(call), Some(theirs)) if call.op != theirs.op => mismatch(call, theirs),
                        _ => busy.or(failed(Cause::Silent { deadline })),
                    };
                }
                // Whom that one waits for owes a call here.
                (suspect, call, busy) = (next, theirs, None);
            }
            // Its deadline is over, too, and it is about to find out the same.
            Ok(Reply::Doing { diagnosing: Some(Diagnosing { about: Some(next) }), .. })
                if next < status.world() && next != suspect && !path.contains(&next) =>
            {
                path.push(suspect);
                (suspect, call, busy) = (next, None, None);
            }
            // It has not come to asking yet.
            Ok(Reply::Doing { diagnosing: Some(Diagnosing { about: None }), .. }) if may_still_say(DIAGNOSING) => {
                thread::sleep(Duration::from_millis(5));
            }
            // It asks a rank that asks this one: neither knows more.
            Ok(Reply::Doing { diagnosing: Some(_), .. }) if may_still_say(EXPLANATION) => {
                thread::sleep(Duration::from_millis(5));
            }
            Ok(Reply::Doing { diagnosing: None, at_your_seq: Some(_), .. }) if call.is_some() && may_still_say(BUSY) => {
                thread::sleep(Duration::from_millis(5));
            }
            // It has made the call, and neither ends it nor waits.
            Ok(Reply::Doing { at_your_seq: Some(_), .. }) if call.is_some() => {
                return busy.or(failed(Cause::Silent { deadline }));
            }
            Ok(Reply::Doing { elsewhere: Some((job_rank, theirs)), last_seq, .. }) => {
                let next = status.rank_of(job_rank);
                let elsewhere = Some(Box::new(Elsewhere { job_rank, rank: next, call: theirs }));
                busy = busy.or_else(|| failed(Cause::Absent { deadline, last_seq, elsewhere }));
                path.push(suspect);
                match next.filter(|next| !path.contains(next)) {
                    Some(next) => (suspect, call) = (next, None),
                    None => return busy,
                }
            }
            Ok(Reply::Doing { last_seq, .. }) => {
                return busy.or(failed(Cause::Absent { deadline, last_seq, elsewhere: None }));
            }
            Ok(Reply::Left { last_seq }) => return busy.or(failed(Cause::Left { last_seq })),
            Ok(_) => return busy.or(failed(Cause::Silent { deadline })),
            Err(QueryError::Died) => return failed(Cause::Died),
            Err(QueryError::Gone) => return failed(Cause::Gone),
            Err(QueryError::Unasked) => return busy.or(failed(Cause::Silent { deadline })),
            Err(QueryError::Mute) => return failed(Cause::Unresponsive { deadline }),
            Err(QueryError::Unreachable { address, kind }) => return failed(Cause::Unreachable { address, kind }),
        }
    }
}

/// Tells the others what is known, and hears what they know.
fn spread(status: &CommStatus) {
    let Some(control) = status.control() else { return };
    let reports = status.reports();
    // Who is gone hears nothing, and who is stopped takes up time.
    let is_lost = |rank: Rank| {
        reports.iter().any(|report| match &report.what {
            Failure::Failed { culprit, cause } => *culprit == rank && is_absence(cause),
            _ => false,
        })
    };
    let peers: Vec<Rank> = status.others().into_iter().filter(|&rank| !is_lost(rank) && !control.is_stopped(rank)).collect();
    ask_all(&*control, &peers, &Query::Hear(reports), PATIENCE, |_, heard| {
        if let Ok(Reply::Doing { reports, .. }) = heard {
            status.hear(reports);
        }
    });
}

/// Whether a rank of which this is true cannot be talked to.
fn is_absence(cause: &Cause) -> bool {
    matches!(
        cause,
        Cause::Died
            | Cause::Closed
            | Cause::Gone
            | Cause::Left { .. }
            | Cause::Stopped { .. }
            | Cause::Unresponsive { .. }
            | Cause::Unreachable { .. }
    )
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

    /// What rank 1 of three reports that has called `mine` and sees an error, after ranks 0 and 2 have told it that they called
    /// different things.
    fn reported(mine: Descriptor, seen: Error) -> Error {
        let members = vec![Member { host: "here".into(), pid: 1 }; 3];
        let who = RankOfJob { job: "test".to_owned(), run: 1, rank: 1, members: members.clone() };
        let recording = Recorder::new(who, None).open(1, 1, (0..3).collect());
        if !mine.op.is_point_to_point() {
            let begun = recording.history.begin(mine.encode(), 0, 0);
            recording.history.end(begun, false);
        }
        let status = CommStatus::new(1, (0..3).collect(), recording);
        let timeout = Duration::from_secs(3600);
        let info = CommInfo { rank: 1, members, timeout, start_timeout: timeout, cancel: status.cancel.clone() };
        let odd = call(Op::Broadcast, None, Some(0), 2);
        let what = Failure::Mismatch { ranks: [2, 0], calls: [odd, call(Op::AllReduce, Some(ReduceOp::Sum), None, 2)] };
        status.hear(vec![FailureReport { origin: 2, what, during: odd, after: Duration::ZERO, completed: 1 }]);
        agree_on_report(&status, &info, seen)
    }

    fn assert_is_of(told: &Error, call: Descriptor) {
        let Error::Peer { rank: 0, op, seq, dtype, count, cause: Cause::Mismatch(_), .. } = told else { panic!("{told}") };
        assert_eq!((*op, *seq, *dtype, *count), (call.op, call.seq, call.dtype, call.count), "{told}");
    }

    /// Rank 1 sees that rank 2 differs from it, too.
    #[test]
    fn an_error_is_of_the_operation_that_its_own_rank_called() {
        let (mine, theirs) = (call(Op::AllReduce, Some(ReduceOp::Sum), None, 5), call(Op::Broadcast, None, Some(0), 2));
        let seen = Error::Mismatch { rank: 1, peer: 2, host: "here".into(), mine: Box::new(mine), theirs: Box::new(theirs) };
        assert_is_of(&reported(mine, seen), mine);
    }

    /// Rank 1 sees that rank 2 has sent it more than it expected.
    #[test]
    fn an_error_of_counts_is_of_the_operation_that_its_own_rank_called() {
        let seen = |op, seq| Error::Counts { rank: 1, peer: 2, host: "here".into(), op, seq, sent: 8, expected: 4 };
        let mine = call(Op::AllToAllV, None, None, 5);
        assert_is_of(&reported(mine, seen(mine.op, mine.seq)), mine);
        // What is said of a message is all that is known of it, and not what is recorded of the collective of the same number.
        let message = Descriptor { op: Op::Send, seq: 2, ..Descriptor::nothing() };
        assert_is_of(&reported(mine, seen(message.op, message.seq)), message);
    }
}
