//! Detects ranks that are gone or call something else, while operations wait for them.
//!
//! Each process has one thread for this. It asks only the peers for which an operation has been
//! waiting a while, so that costs nothing while all goes well. It detects what no link shows: a rank
//! that ended before there was a link, a host that is cut off, and calls that differ while each
//! side waits for something else. It also asks the system about the links that are used, and so notices those
//! that carry much less than before.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::cancel::Wait;
use super::control::{ControlChannel, QueryError};
use super::message::{Query, Reply};
use super::mismatch::compare_calls;
use super::report::{Failure, FailureReport, culprit_of};
use super::status::{CommStatus, Posted};
use crate::error::{Cause, Elsewhere, shown};
use crate::sys;
use crate::timeouts::{DETECTOR_LOOK, FIRST_QUERY, LATE_MESSAGES, PEER_OUT_OF_REACH, QUERY, QUERY_PAUSE, SUSPECT};
use crate::trace::Recording;
use crate::types::{Descriptor, Rank};

/// The thread. It ends when this is dropped.
pub(super) struct DetectorThread {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl DetectorThread {
    /// Starts the thread. Returns `None` if the system has no thread left: then failures that links
    /// do not show are detected at the deadline.
    pub(super) fn start(posted: Arc<Mutex<Posted>>) -> Option<DetectorThread> {
        let stop: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let stopped = stop.clone();
        let run = move || {
            let mut cases = Cases::new();
            while !pause(&stopped) {
                look(&posted, &stopped.0, &mut cases);
            }
        };
        match std::thread::Builder::new().name("kolo-detector".to_owned()).spawn(run) {
            Ok(thread) => Some(DetectorThread { stop, thread: Some(thread) }),
            Err(error) => {
                crate::log::warn!(%error, "cannot start the failure detector: failures are found at the deadline");
                None
            }
        }
    }
}

impl Drop for DetectorThread {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            sys::join(thread);
        }
    }
}

/// Waits until it is time to look again. Returns whether the thread is to stop.
fn pause(stop: &(Mutex<bool>, Condvar)) -> bool {
    let mut stopped = stop.0.lock();
    if !*stopped {
        stop.1.wait_for(&mut stopped, DETECTOR_LOOK);
    }
    *stopped
}

/// What is known of one wait.
struct Case {
    since: Instant,
    /// When the peer is asked next, and the pause after that.
    next: Instant,
    pause: Duration,
    /// Since when the peer has been gone.
    gone: Option<Instant>,
    /// Since when the peer has been out of reach.
    lost: Option<Instant>,
    has_warned: bool,
}

impl Case {
    fn new(wait: &Wait) -> Case {
        Case { since: wait.since, next: Instant::now(), pause: FIRST_QUERY, gone: None, lost: None, has_warned: false }
    }
}

/// The waits, by comm id, the waiting rank, its peer, whether any other peer's message would do,
/// and the operation.
type Cases = HashMap<(u64, Rank, Rank, bool, [u64; Descriptor::WORDS]), Case>;

/// Asks the peers for which operations have been waiting.
fn look(posted: &Mutex<Posted>, stopped: &Mutex<bool>, cases: &mut Cases) {
    let statuses: Vec<((u64, Rank), Arc<CommStatus>)> = {
        let posted = posted.lock();
        posted.statuses.iter().map(|(&name, status)| (name, status.clone())).collect()
    };
    Recording::look_at_links(statuses.iter().map(|(_, status)| &*status.recording));
    let mut waiting = Vec::new();
    for ((comm_id, member), status) in statuses {
        let Some(control) = status.control().filter(|_| !status.cancel.is_cancelled()) else { continue };
        for wait in status.cancel.waits().into_iter().filter(|wait| wait.since.elapsed() >= FIRST_QUERY) {
            let name = (comm_id, member, wait.peer, wait.is_for_any, wait.words);
            waiting.push(name);
            let case = cases.entry(name).or_insert_with(|| Case::new(&wait));
            if case.since != wait.since {
                *case = Case::new(&wait);
            }
            // Dropping the last communicator waits for this thread, but not for all its queries.
            if *stopped.lock() {
                return;
            }
            if case.next <= Instant::now() {
                check_peer(&status, &*control, &wait, case);
            }
        }
    }
    cases.retain(|name, _| waiting.contains(name));
}

/// Asks the peer for which an operation waits.
fn check_peer(status: &CommStatus, control: &dyn ControlChannel, wait: &Wait, case: &mut Case) {
    let Some(mine) = Descriptor::decode(wait.words) else { return };
    // Each of them may have been the sender.
    let others = if wait.is_for_any { status.others() } else { Vec::new() };
    if let Some(culprit) = others.into_iter().find(|&rank| control.was_killed(rank)) {
        return report(status, wait, mine, Failure::Failed { culprit, cause: Cause::Died });
    }
    // Another communicator of this process has failed because of a rank that crashed.
    let crashed = control.lost().into_iter().filter(|(_, cause)| matches!(cause, Cause::Died | Cause::Closed));
    if let Some((culprit, cause)) = culprit_of(&crashed.collect::<Vec<_>>()).cloned() {
        return report(status, wait, mine, Failure::Failed { culprit, cause });
    }
    let absence = if control.is_stopped(wait.peer) {
        warn(wait, mine, case, "is stopped");
        Absence::default()
    } else {
        ask(status, control, wait, mine, case)
    };
    let now = Instant::now();
    let Absence { gone, lost } = absence;
    // An open link says itself when all that the peer has sent has come; only that of a host that was started
    // anew does not.
    let is_open = wait.moved.is_some() && gone == Some(Cause::Gone);
    let last_messages = if is_open { PEER_OUT_OF_REACH } else { LATE_MESSAGES };
    for (cause, since, patience) in [(gone, &mut case.gone, last_messages), (lost, &mut case.lost, PEER_OUT_OF_REACH)] {
        let Some(cause) = cause else {
            *since = None;
            continue;
        };
        let until = *since.get_or_insert(now) + patience;
        if now < until {
            case.pause = FIRST_QUERY;
        } else if wait.seen < until {
            // The waiting rank has not looked since: what it waits for may be there.
            status.cancel.wake();
            case.pause = DETECTOR_LOOK;
        } else {
            absent(status, wait, mine, cause);
        }
    }
    case.next = now + case.pause;
    case.pause = (2 * case.pause).min(QUERY_PAUSE);
}

/// Why a peer does not take part: the causes that count once they have lasted.
#[derive(Default)]
struct Absence {
    gone: Option<Cause>,
    lost: Option<Cause>,
}

/// Asks a peer what it does while the operation `mine` waits for it.
fn ask(status: &CommStatus, control: &dyn ControlChannel, wait: &Wait, mine: Descriptor, case: &mut Case) -> Absence {
    let mut warn = |what: &str| warn(wait, mine, case, what);
    let mut absence = Absence::default();
    match control.ask(wait.peer, &Query::Doing(Some(mine)), QUERY) {
        Ok(Reply::Doing { reports, .. }) if !reports.is_empty() => status.add_reports(reports),
        Ok(Reply::Doing { at_your_seq: Some(theirs), .. }) if theirs != mine => {
            if let Some(what) = compare_calls(status, control, [status.rank, wait.peer], [mine, theirs]) {
                report(status, wait, mine, what);
            }
        }
        Ok(Reply::Doing { waits: None, elsewhere: Some((job_rank, call)), .. }) => {
            // The ranks wait for each other in different calls. They may not have come to these if a rank had
            // not crashed for which none of them waits.
            let crashed = status.others().into_iter().find(|&rank| control.was_killed(rank)).map(|rank| (rank, Cause::Died));
            let crashed = crashed.or_else(|| status.cancel.closed().first().map(|&rank| (rank, Cause::Closed)));
            if let Some((culprit, cause)) = crashed {
                report(status, wait, mine, Failure::Failed { culprit, cause });
            }
            let elsewhere = Elsewhere { job_rank, rank: status.rank_of(job_rank), call };
            warn(&format!("is alive, but did not make this call yet; it waits for {elsewhere}"));
        }
        Ok(Reply::Doing { waits: None, .. }) => warn("is alive, but did not make this call yet, or is busy with it"),
        Ok(Reply::Doing { waits: Some((other, _)), .. }) => warn(&format!("waits for rank {other}")),
        // What it sent before it left may still come on a link, which says when that is all.
        Ok(Reply::Left { last_seq }) if wait.moved.is_none() || !mine.op.is_point_to_point() && last_seq < mine.seq => {
            absence.gone = Some(Cause::Left { last_seq });
        }
        Ok(_) => {}
        Err(QueryError::Died) => absence.gone = Some(Cause::Died),
        Err(QueryError::Gone) => absence.gone = Some(Cause::Gone),
        Err(QueryError::Revoked) => absence.gone = Some(Cause::Revoked),
        Err(QueryError::Unasked) => warn("cannot be asked: this process has no file descriptor or no memory left"),
        Err(QueryError::Unreachable { address, kind }) => {
            absence.lost = Some(Cause::Unreachable { address, kind });
            warn("cannot be reached");
        }
        Err(QueryError::Mute) => warn("does not answer: its process is stopped, or its host is stuck"),
    }
    absence
}

/// The peer does not come back.
fn absent(status: &CommStatus, wait: &Wait, mine: Descriptor, cause: Cause) {
    match cause {
        // Another rank may still send.
        Cause::Left { .. } | Cause::Died | Cause::Gone if wait.is_for_any => status.cancel.miss(wait.peer, cause),
        cause => report(status, wait, mine, Failure::Failed { culprit: wait.peer, cause }),
    }
}

fn report(status: &CommStatus, wait: &Wait, mine: Descriptor, what: Failure) {
    status.add_own_report(FailureReport {
        origin: status.rank,
        what,
        during: mine,
        after: wait.since.elapsed(),
        completed: status.recording.history.last_completed(),
    });
}

/// Logs, once for each wait, what the peer does while the operation waits for it.
fn warn(wait: &Wait, mine: Descriptor, case: &mut Case, what: &str) {
    let after = wait.since.elapsed();
    if after >= SUSPECT && !std::mem::replace(&mut case.has_warned, true) {
        crate::log::warn!(rank = wait.peer, after = %shown::time(after), "{} waits for a rank that {what}", mine.op);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::failure::cancel::Moved;
    use crate::trace::{RankOfJob, Recorder};
    use crate::types::{Member, Op};

    /// A peer that does not answer, for this reason.
    struct Silent(QueryError);

    impl ControlChannel for Silent {
        fn ask(&self, _: Rank, _: &Query, _: Duration) -> Result<Reply, QueryError> {
            Err(self.0.clone())
        }
    }

    const MINE: Descriptor = Descriptor { op: Op::Barrier, seq: 3, ..Descriptor::nothing() };

    fn status() -> CommStatus {
        let members = vec![Member { host: "here".into(), pid: 1 }; 2];
        let job_rank = RankOfJob { job: "test".to_owned(), run: 1, rank: 0, members };
        CommStatus::new(0, [0, 1].into(), Recorder::new(job_rank, None, None).open(1, 0, [0, 1].into()))
    }

    /// A rank that is late itself, because its host is busy, may find that what it waits for has come.
    #[test]
    fn a_peer_is_absent_once_the_waiting_rank_has_looked_again() {
        let unreachable = QueryError::Unreachable { address: "there".into(), kind: std::io::ErrorKind::TimedOut };
        let (late, long): (Duration, Duration) = (LATE_MESSAGES, PEER_OUT_OF_REACH);
        let cases: [(QueryError, Moved, Duration); 5] = [
            (QueryError::Died, None, late),
            (QueryError::Died, Some(7), late),
            (QueryError::Gone, None, late),
            // The link says when all has come.
            (QueryError::Gone, Some(7), long),
            (unreachable, Some(7), long),
        ];
        for (error, moved, patience) in cases {
            let status = status();
            let woken = Arc::new(AtomicU32::new(0));
            let wakes = woken.clone();
            status.cancel.attach(move || _ = wakes.fetch_add(1, Ordering::Relaxed));
            let now = Instant::now();
            let mut case = Case { since: now, next: now, pause: FIRST_QUERY, gone: None, lost: None, has_warned: false };
            // `over`: when the peer has been absent for too long. `seen`: when this rank looked last.
            let mut look = |over: Option<Instant>, seen: Instant| {
                for since in [&mut case.gone, &mut case.lost] {
                    *since = since.and(over).map(|over| over - patience);
                }
                let words = MINE.encode();
                let wait = Wait { peer: 1, moved, words, since: now, is_for_any: false, missed: None, seen };
                check_peer(&status, &Silent(error.clone()), &wait, &mut case);
                (status.reports().len(), woken.load(Ordering::Relaxed))
            };
            let later = now + Duration::from_secs(3600);
            assert_eq!(look(None, later), (0, 0), "{error:?}: absent for the first time");
            assert_eq!(look(Some(later), later), (0, 0), "{error:?}: last messages may be on the way");
            let earlier = now - Duration::from_nanos(1);
            assert_eq!(look(Some(now), earlier), (0, 1), "{error:?}: this rank has not looked since");
            assert_eq!(look(Some(now), now), (1, 2), "{error:?}: it has, and nothing came");
        }
    }
}
