//! Finds the rank at fault for a failure that this rank sees.
//!
//! A rank sees little of a failure: a closed link, a peer that gave up, its own deadline. So it
//! asks that peer, and the ranks to which the answers lead. A rank that failed because of another
//! rank names that one, and a rank that waits for another is not at fault.

use std::thread;
use std::time::{Duration, Instant};

use super::cancel::Diagnosing;
use super::context::CommInfo;
use super::control::{ControlChannel, QueryError};
use super::message::{Query, Reply};
use super::mismatch::{compare_calls, compare_earlier_calls};
use super::report::{Failure, FailureReport};
use super::status::CommStatus;
use crate::error::{Cause, Elsewhere, Error};
use crate::timeouts::{DIAGNOSING, DIAGNOSIS_PAUSE, EXPLANATION, NO_PEER_NAMED, QUERY};
use crate::types::{Descriptor, Rank};

/// Diagnoses the failure that this rank met as `error`, and records the report. Returns `None` if a
/// report of another rank arrived before. `during` is the operation that failed here, and its age.
pub(super) fn diagnose(
    status: &CommStatus,
    info: &CommInfo,
    error: &Error,
    during: Option<(Descriptor, Duration)>,
) -> Option<FailureReport> {
    let about = if let Error::Peer { rank, .. } = error { Some(*rank) } else { None };
    let is_cut_off = matches!(error, Error::Peer { cause, .. } if is_end_of_link(cause));
    status.cancel.set_diagnosing(Some(Diagnosing { about, is_cut_off }));
    let found = report_of(status, info, error, during);
    if let Some(found) = &found {
        status.add_own_report(found.clone());
    }
    status.cancel.set_diagnosing(None);
    found
}

fn report_of(
    status: &CommStatus,
    info: &CommInfo,
    error: &Error,
    during: Option<(Descriptor, Duration)>,
) -> Option<FailureReport> {
    if !status.reports().is_empty() {
        return None;
    }
    let completed = status.recording.history.last_completed();
    let Some(report) = FailureReport::of(error, info, completed) else {
        // The error names no peer: this rank is the one that fails.
        let cause = match error {
            Error::Aborted { .. } => Cause::Aborted,
            Error::Os { .. } => Cause::Failed(error.to_string()),
            _ => Cause::Revoked,
        };
        let (during, after) = during.unwrap_or((Descriptor::nothing(), Duration::ZERO));
        let what = Failure::Failed { culprit: info.rank, cause };
        return Some(FailureReport { origin: info.rank, what, during, after, completed });
    };
    let Some(control) = status.control() else { return Some(report) };
    let (culprit, cause) = match &report.what {
        Failure::Failed { culprit, cause } => (culprit, cause),
        Failure::Mismatch { ranks, calls, .. } => {
            let what = compare_calls(status, &*control, *ranks, *calls)?;
            return Some(FailureReport { what, ..report });
        }
        Failure::Counts { .. } => return Some(report),
    };
    let what = match cause {
        Cause::Diverged => match compare_earlier_calls(status, &*control, *culprit, report.during.seq) {
            Some(what) => what,
            None if status.reports().is_empty() => return Some(report),
            None => return None,
        },
        Cause::Silent { deadline } => WaitChain::new(status, &*control, *culprit, report.during, *deadline).follow()?,
        // It is this rank itself, which is not asked.
        Cause::Unmatched { .. } if *culprit == status.rank => return Some(report),
        Cause::Unmatched { deadline, .. } => {
            match WaitChain::new(status, &*control, *culprit, report.during, *deadline).follow()? {
                // Nothing else keeps it from sending the message.
                Failure::Failed { culprit: last, cause: Cause::Silent { .. } | Cause::Absent { elsewhere: None, .. } }
                    if last == *culprit =>
                {
                    return Some(report);
                }
                what => what,
            }
        }
        cause if is_end_of_link(cause) || *cause == Cause::Revoked => explain(status, &*control, *culprit, cause)?,
        _ => return Some(report),
    };
    Some(FailureReport { what, ..report })
}

fn is_end_of_link(cause: &Cause) -> bool {
    matches!(cause, Cause::Closed | Cause::Gone | Cause::Broken(_) | Cause::Unreachable { .. })
}

/// Asks a peer why it closed its link or gave up. Returns `None` if a report arrives meanwhile.
fn explain(status: &CommStatus, control: &dyn ControlChannel, peer: Rank, seen: &Cause) -> Option<Failure> {
    let began = Instant::now();
    let failed = |cause| Some(Failure::Failed { culprit: peer, cause });
    status.cancel.set_diagnosing(Some(Diagnosing { about: Some(peer), is_cut_off: is_end_of_link(seen) }));
    loop {
        let reply = control.ask(peer, &Query::Doing(None), QUERY);
        let lives = reply.is_ok();
        let patience = match reply {
            Ok(Reply::Doing { reports, diagnosing, .. }) => {
                status.add_reports(reports);
                match diagnosing {
                    // If the peer asks this rank in turn why the link has closed, neither knows more. If it
                    // asks because of its deadline, it has closed the link, and will say why.
                    Some(Diagnosing { about, is_cut_off }) if about != Some(status.rank) || !is_cut_off => DIAGNOSING,
                    _ => EXPLANATION,
                }
            }
            Ok(Reply::Left { last_seq }) if *seen != Cause::Revoked => return failed(Cause::Left { last_seq }),
            Err(QueryError::Gone) if matches!(seen, Cause::Unreachable { .. }) => return failed(Cause::Gone),
            Err(QueryError::Died) => return failed(Cause::Died),
            Err(QueryError::Revoked) => return failed(Cause::Revoked),
            Err(QueryError::Gone) | Ok(_) => return failed(seen.clone()),
            Err(QueryError::Mute | QueryError::Unreachable { .. } | QueryError::Unasked) => EXPLANATION,
        };
        if !status.reports().is_empty() {
            return None;
        }
        if began.elapsed() >= patience {
            // The peer lives, so the connection has failed.
            let is_closed = matches!(seen, Cause::Closed | Cause::Gone | Cause::Unreachable { .. });
            let cause = if is_closed && lives { Cause::Broken(std::io::ErrorKind::ConnectionReset) } else { seen.clone() };
            return failed(cause);
        }
        thread::sleep(DIAGNOSIS_PAUSE);
    }
}

/// The chain of ranks that wait for each other at a deadline: this rank, the rank for which it
/// waits, the rank for which that one waits, and so on, up to the rank that keeps all others
/// waiting.
///
/// The chain may lead through other communicators of the same ranks. A rank to which it leads there
/// is named if it cannot answer. If it can, it owes nothing in this communicator: the report then
/// names the rank that should have made the call here, and the rank for which that one waits.
struct WaitChain<'a> {
    status: &'a CommStatus,
    control: &'a dyn ControlChannel,
    deadline: Duration,
    /// The ranks before the suspect.
    path: Vec<Rank>,
    suspect: Rank,
    /// The call of the rank before the suspect, as that rank made it.
    call: Option<Descriptor>,
    /// Names the rank that should have made the call here and waits in another communicator.
    busy: Option<Failure>,
    /// When the suspect was asked first.
    asked: Instant,
}

/// What an answer of the suspect leads to.
enum Progress {
    /// The failure; `None` if a report arrived.
    Ended(Option<Failure>),
    /// The suspect is asked again.
    Pending,
    /// The next rank of the chain is the suspect.
    Moved,
}

/// A suspect's answer: the fields of [`Reply::Doing`] but for the reports.
struct Doing {
    diagnosing: Option<Diagnosing>,
    waits: Option<(Rank, [u64; Descriptor::WORDS])>,
    elsewhere: Option<(Rank, Option<Descriptor>)>,
    at_your_seq: Option<Descriptor>,
    last_seq: u64,
}

impl<'a> WaitChain<'a> {
    fn new(
        status: &'a CommStatus,
        control: &'a dyn ControlChannel,
        suspect: Rank,
        mine: Descriptor,
        deadline: Duration,
    ) -> WaitChain<'a> {
        let call = if mine.op.is_point_to_point() { Some(mine) } else { status.recording.history.collective(mine.seq) };
        let path = vec![status.rank];
        WaitChain { status, control, deadline, path, suspect, call, busy: None, asked: Instant::now() }
    }

    fn follow(mut self) -> Option<Failure> {
        loop {
            self.status.cancel.set_diagnosing(Some(Diagnosing { about: Some(self.suspect), is_cut_off: false }));
            match self.ask() {
                Progress::Ended(failure) => return failure,
                Progress::Pending => thread::sleep(DIAGNOSIS_PAUSE),
                Progress::Moved => self.asked = Instant::now(),
            }
        }
    }

    /// Asks the suspect what it does.
    fn ask(&mut self) -> Progress {
        let deadline = self.deadline;
        if self.control.is_stopped(self.suspect) {
            return self.failed(Cause::Stopped { deadline });
        }
        match self.control.ask(self.suspect, &Query::Doing(self.call), QUERY) {
            Ok(Reply::Doing { reports, .. }) if !reports.is_empty() => {
                self.status.add_reports(reports);
                Progress::Ended(None)
            }
            Ok(Reply::Doing { diagnosing, waits, elsewhere, at_your_seq, last_seq, .. }) => {
                self.judge(Doing { diagnosing, waits, elsewhere, at_your_seq, last_seq })
            }
            Ok(Reply::Left { last_seq }) => self.busy_or(Cause::Left { last_seq }),
            Ok(_) | Err(QueryError::Unasked) => self.busy_or(Cause::Silent { deadline }),
            Err(QueryError::Died) => self.failed(Cause::Died),
            Err(QueryError::Gone) => self.failed(Cause::Gone),
            Err(QueryError::Revoked) => self.failed(Cause::Revoked),
            Err(QueryError::Mute) => self.failed(Cause::Unresponsive { deadline }),
            Err(QueryError::Unreachable { address, kind }) => self.failed(Cause::Unreachable { address, kind }),
        }
    }

    fn judge(&mut self, answer: Doing) -> Progress {
        let deadline = self.deadline;
        if let (Some(call), Some(theirs)) = (self.call, answer.at_your_seq)
            && call != theirs
        {
            return self.mismatch(call, theirs);
        }
        if let Some((next, words)) = answer.waits {
            return self.follow_wait(next, Descriptor::decode(words));
        }
        if let Some(Diagnosing { about, .. }) = answer.diagnosing {
            // The suspect's deadline has passed too, and its diagnosis will lead to the same rank.
            if let Some(next) = about.filter(|&next| next < self.status.world() && next != self.suspect)
                && !self.path.contains(&next)
            {
                self.busy = None;
                return self.move_to(next, None);
            }
            // Either the suspect has not asked a rank yet, or it asks one that asks this rank: then
            // neither knows more.
            if self.asked.elapsed() < if about.is_none() { DIAGNOSING } else { EXPLANATION } {
                return Progress::Pending;
            }
        }
        if self.call.is_some() && answer.at_your_seq.is_some() {
            if answer.diagnosing.is_none() && self.asked.elapsed() < NO_PEER_NAMED {
                return Progress::Pending;
            }
            // The suspect has made the call, and neither completes it nor waits.
            return self.busy_or(Cause::Silent { deadline });
        }
        match answer.elsewhere {
            Some((job_rank, call)) => self.follow_elsewhere(job_rank, call, answer.last_seq),
            None => self.busy_or(Cause::Absent { deadline, last_seq: answer.last_seq, elsewhere: None }),
        }
    }

    /// The suspect waits for `next` in this communicator, in the operation `theirs`.
    fn follow_wait(&mut self, next: Rank, theirs: Option<Descriptor>) -> Progress {
        if next >= self.status.world() {
            return self.failed(Cause::Corrupt("it waits for a rank that does not exist"));
        }
        if next != self.suspect && !self.path.contains(&next) {
            // The rank for which the suspect waits owes a call here.
            self.busy = None;
            return self.move_to(next, theirs);
        }
        // The ranks wait for each other. If they call different operations, that is why.
        match (self.call, theirs) {
            (Some(call), Some(theirs)) if call.op.of_pair() != theirs.op.of_pair() => self.mismatch(call, theirs),
            _ => self.busy_or(Cause::Silent { deadline: self.deadline }),
        }
    }

    /// The suspect waits in another communicator for `job_rank`, in the operation `call`.
    fn follow_elsewhere(&mut self, job_rank: Rank, call: Option<Descriptor>, last_seq: u64) -> Progress {
        let next = self.status.rank_of(job_rank);
        let elsewhere = Some(Box::new(Elsewhere { job_rank, rank: next, call }));
        let (culprit, cause) = (self.suspect, Cause::Absent { deadline: self.deadline, last_seq, elsewhere });
        self.busy.get_or_insert(Failure::Failed { culprit, cause });
        match next.filter(|next| *next != self.suspect && !self.path.contains(next)) {
            Some(next) => self.move_to(next, None),
            None => Progress::Ended(self.busy.take()),
        }
    }

    fn move_to(&mut self, next: Rank, call: Option<Descriptor>) -> Progress {
        self.path.push(self.suspect);
        (self.suspect, self.call) = (next, call);
        Progress::Moved
    }

    fn failed(&self, cause: Cause) -> Progress {
        Progress::Ended(Some(Failure::Failed { culprit: self.suspect, cause }))
    }

    /// Names the rank that waits in another communicator, if there is one, and else the suspect.
    fn busy_or(&mut self, cause: Cause) -> Progress {
        match self.busy.take() {
            Some(busy) => Progress::Ended(Some(busy)),
            None => self.failed(cause),
        }
    }

    /// The suspect and the rank before it call different operations.
    fn mismatch(&self, call: Descriptor, theirs: Descriptor) -> Progress {
        let before = *self.path.last().expect("the path begins with this rank");
        Progress::Ended(compare_calls(self.status, self.control, [before, self.suspect], [call, theirs]))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::trace::{RankOfJob, Recorder};
    use crate::types::{Member, Op};

    /// Rank 1, whose deadline has passed while it waited for rank 0. It has closed its link with rank 0,
    /// which it asks in turn, and reports only after it was asked as often as this.
    struct PastItsDeadline(AtomicU32);

    impl ControlChannel for PastItsDeadline {
        fn ask(&self, _: Rank, _: &Query, _: Duration) -> Result<Reply, QueryError> {
            let left = self.0.fetch_sub(1, Ordering::Relaxed);
            let cause = Cause::Absent { deadline: Duration::from_secs(1), last_seq: 0, elsewhere: None };
            let report = FailureReport {
                origin: 1,
                what: Failure::Failed { culprit: 0, cause },
                during: Descriptor { op: Op::Recv, ..Descriptor::nothing() },
                after: Duration::from_secs(1),
                completed: 0,
            };
            Ok(Reply::Doing {
                reports: if left == 0 { vec![report] } else { Vec::new() },
                diagnosing: (left > 0).then_some(Diagnosing { about: Some(0), is_cut_off: false }),
                waits: None,
                elsewhere: None,
                at_your_seq: None,
                last_seq: 0,
            })
        }
    }

    /// The rank that waited longer than a peer that lives takes to explain itself is believed, and its
    /// link does not count as broken.
    #[test]
    fn a_peer_that_closed_its_link_at_its_deadline_says_why() {
        let members = vec![Member { host: "here".into(), pid: 1 }; 2];
        let job_rank = RankOfJob { job: "test".to_owned(), run: 1, rank: 0, members };
        let recording = Recorder::new(job_rank, None, None).open(1, 0, [0, 1].into());
        let status = CommStatus::new(0, [0, 1].into(), recording);
        let asked = 2 * (EXPLANATION.as_millis() / DIAGNOSIS_PAUSE.as_millis()) as u32;
        let found = explain(&status, &PastItsDeadline(AtomicU32::new(asked)), 1, &Cause::Closed);
        assert!(found.is_none(), "{found:?}");
        assert!(matches!(status.reports()[..], [FailureReport { origin: 1, .. }]));
    }
}
