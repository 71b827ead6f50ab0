//! Looks after the ranks for which operations wait long: are they there, and do they call the same?
//!
//! One small thread for each process. It asks only whom an operation has been waiting for, so it costs nothing while things go
//! well, and finds what no link shows: a rank that ended before there was a link, a host that is cut off, calls that differ while
//! each side waits for something else.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::cancel::Wait;
use super::control::{ControlChannel, QueryError};
use super::message::{Query, Reply};
use super::report::{Failure, FailureReport};
use super::status::{CommStatus, Posted};
use crate::error::{Cause, Elsewhere};
use crate::types::{Descriptor, Rank};

/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);

/// How long an operation has waited before anybody is asked, and how long until it is asked again at most.
const FIRST: Duration = Duration::from_millis(150);
const SELDOM: Duration = Duration::from_secs(1);

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// How long a rank that is not there any more is still waited for: what it sent last may be under way.
const AFTERMATH: Duration = Duration::from_millis(200);

/// How long a rank may be out of reach, after an answer has failed to come: with what goes before, 5 s at most.
const OUT_OF_REACH: Duration = Duration::from_millis(3500);

/// After how long a rank that does not move is spoken of.
const SUSPECT: Duration = Duration::from_secs(1);

/// The thread. It ends when this is dropped.
pub(super) struct Watch {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `None` if there is no thread to be had: then failures that links do not show are found at the deadline.
    pub(super) fn start(posted: Arc<Mutex<Posted>>) -> Option<Watch> {
        let stop: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("kolo-health".to_owned()).spawn(move || watch(&posted, &stopped));
        match thread {
            Ok(thread) => Some(Watch { stop, thread: Some(thread) }),
            Err(error) => {
                tracing::warn!(%error, "failures of ranks are not detected");
                None
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic there has been printed, and there is nothing to mend.
            let _ = thread.join();
        }
    }
}

/// What is known of one wait.
struct Case {
    since: Instant,
    next: Instant,
    pause: Duration,
    /// Since when the rank has not been there, or out of reach.
    gone: Option<Instant>,
    lost: Option<Instant>,
    is_spoken_of: bool,
}

type Cases = HashMap<(u64, Rank, Rank, bool, [u64; Descriptor::WORDS]), Case>;

fn watch(posted: &Mutex<Posted>, stop: &(Mutex<bool>, Condvar)) {
    let mut cases = Cases::new();
    loop {
        {
            let mut stopped = stop.0.lock();
            if !*stopped {
                stop.1.wait_for(&mut stopped, LOOK);
            }
            if *stopped {
                return;
            }
        }
        let statuses: Vec<((u64, Rank), Arc<CommStatus>)> = {
            let posted = posted.lock();
            posted.statuses.iter().map(|(&name, status)| (name, status.clone())).collect()
        };
        let mut waited = Vec::new();
        for ((comm_id, member), status) in statuses {
            let Some(control) = status.control().filter(|_| !status.cancel.is_cancelled()) else { continue };
            for wait in status.cancel.waits().into_iter().filter(|wait| wait.since.elapsed() >= FIRST) {
                let name = (comm_id, member, wait.peer, wait.is_for_any, wait.words);
                waited.push(name);
                let new = || Case {
                    since: wait.since,
                    next: Instant::now(),
                    pause: FIRST,
                    gone: None,
                    lost: None,
                    is_spoken_of: false,
                };
                let case = cases.entry(name).or_insert_with(new);
                if case.since != wait.since {
                    *case = new();
                }
                // The end of the last communicator waits for this thread, and not for all that it would ask.
                if *stop.0.lock() {
                    return;
                }
                if case.next <= Instant::now() {
                    look_after(&status, &*control, &wait, case);
                }
            }
        }
        cases.retain(|name, _| waited.contains(name));
    }
}

/// Asks the rank for which an operation waits.
fn look_after(status: &CommStatus, control: &dyn ControlChannel, wait: &Wait, case: &mut Case) {
    let Some(mine) = Descriptor::decode(wait.words) else { return };
    let peer = wait.peer;
    let after = wait.since.elapsed();
    let find_out = |what| {
        status.find_out(FailureReport {
            origin: status.rank,
            what,
            during: mine,
            after,
            completed: status.recording.history.last_completed(),
        })
    };
    let failed = |cause| match cause {
        Cause::Left { .. } | Cause::Died | Cause::Gone if wait.is_for_any => status.cancel.miss(peer, cause),
        cause => find_out(Failure::Failed { culprit: peer, cause }),
    };
    let mut speak = |what: &str| {
        if after >= SUSPECT && !std::mem::replace(&mut case.is_spoken_of, true) {
            tracing::warn!(rank = peer, ?after, "{} waits for a rank that {what}", mine.op);
        }
    };
    let (mut gone, mut lost) = (None, None);
    if control.is_stopped(peer) {
        speak("is stopped");
    } else {
        match control.ask(peer, &Query::Doing(Some(mine)), PATIENCE) {
            Ok(Reply::Doing { reports, .. }) if !reports.is_empty() => status.hear(reports),
            Ok(Reply::Doing { at_your_seq: Some(theirs), .. }) if theirs != mine => {
                find_out(Failure::Mismatch { ranks: [status.rank, peer], calls: [mine, theirs] });
            }
            Ok(Reply::Doing { waits: None, elsewhere: Some((job_rank, call)), .. }) => {
                let elsewhere = Elsewhere { job_rank, rank: status.rank_of(job_rank), call };
                speak(&format!("is there, but did not make this call yet; it waits for {elsewhere}"));
            }
            Ok(Reply::Doing { waits: None, .. }) => speak("is there, but did not make this call yet, or is busy with it"),
            Ok(Reply::Doing { waits: Some((other, _)), .. }) => speak(&format!("waits for rank {other}")),
            Ok(Reply::Left { last_seq }) if mine.op.is_point_to_point() || last_seq < mine.seq => {
                gone = Some(Cause::Left { last_seq });
            }
            Ok(_) => {}
            Err(QueryError::Died) => gone = Some(Cause::Died),
            Err(QueryError::Gone) => gone = Some(Cause::Gone),
            Err(QueryError::Unasked) => speak("cannot be asked: this process has no descriptor or no memory left"),
            Err(QueryError::Unreachable { address, kind }) => {
                lost = Some(Cause::Unreachable { address, kind });
                speak("cannot be reached");
            }
            Err(QueryError::Mute) => speak("answers nothing; it is stopped, or its machine stuck"),
        }
    }
    let now = Instant::now();
    for (cause, since, patience) in [(gone, &mut case.gone, AFTERMATH), (lost, &mut case.lost, OUT_OF_REACH)] {
        match cause {
            None => *since = None,
            Some(cause) if now.duration_since(*since.get_or_insert(now)) >= patience => failed(cause),
            Some(_) => case.pause = FIRST,
        }
    }
    case.next = now + case.pause;
    case.pause = (2 * case.pause).min(SELDOM);
}
