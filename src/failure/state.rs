//! What others may know of one rank's communicator, and how they ask.
//!
//! Every communicator has a [`CommStatus`] on each of its ranks. Peers ask it [`Query`]s at any time: the process's listener answers
//! from there on its own thread, whatever the rank itself is busy with. So whoever does not answer is not there.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::detector::Watch;
use super::message::{Query, Reply};
use super::report::FailureReport;
use super::shrink::{Decision, Shrink};
use crate::failure::CancelToken;
use crate::trace::Recording;
use crate::types::{Descriptor, Rank};

/// How a rank reaches the bulletins of the others of its communicator.
pub(crate) trait ControlChannel: Send + Sync {
    /// Asks a rank. Takes at most `patience`.
    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError>;

    /// Whether a rank's process is known to be stopped.
    fn is_stopped(&self, _peer: Rank) -> bool {
        false
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryError {
    /// Nobody is at home any more: its process has ended, or has dropped all its communicators.
    Gone,
    /// No connection could be made.
    Unreachable { address: String, kind: std::io::ErrorKind },
    /// Its process took the connection and says nothing, or what no kolo says.
    Mute,
    /// Its process has ended, as the system says: even if one that it forked holds its connections open.
    Died,
    /// This process cannot ask: it has no descriptor or no memory left.
    Unasked,
}

/// What others may know of one rank's communicator.
pub(crate) struct CommStatus {
    /// This rank.
    pub(crate) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    members: Arc<[Rank]>,
    pub(crate) cancel: Arc<CancelToken>,
    pub(crate) recording: Arc<Recording>,
    /// `None` for a rank alone, and when it is taken down: so that whoever answers is never the last to hold the network.
    control: Mutex<Option<Arc<dyn ControlChannel>>>,
    /// The last operation, when the rank has left.
    pub(crate) last_seq: AtomicU64,
    /// Why the communicator ended: what this rank and others have found out.
    reports: Mutex<Vec<FailureReport>>,
    pub(super) shrink: Mutex<Shrink>,
    /// What is known of a shrink is another.
    pub(super) changed: Condvar,
}

/// As many reports are kept: a rank finds out at most one, so only large communicators in which many fail at once lose some.
const MOST_NOTICES: usize = 64;

impl CommStatus {
    pub(crate) fn new(rank: Rank, members: Arc<[Rank]>, recording: Arc<Recording>) -> CommStatus {
        CommStatus {
            rank,
            members,
            cancel: Arc::default(),
            recording,
            control: Mutex::default(),
            last_seq: AtomicU64::new(0),
            reports: Mutex::default(),
            shrink: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// How the others are reached, from when on they may be asked.
    pub(crate) fn reach(&self, control: Arc<dyn ControlChannel>) {
        *self.control.lock() = Some(control);
    }

    pub(crate) fn control(&self) -> Option<Arc<dyn ControlChannel>> {
        self.control.lock().clone()
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// All ranks but this one.
    pub(crate) fn others(&self) -> Vec<Rank> {
        (0..self.world()).filter(|&rank| rank != self.rank).collect()
    }

    pub(crate) fn reports(&self) -> Vec<FailureReport> {
        self.reports.lock().clone()
    }

    /// This rank has found something out, unless it knows already why the communicator ended.
    pub(crate) fn find_out(&self, report: FailureReport) {
        let mut reports = self.reports.lock();
        if reports.is_empty() {
            reports.push(report);
            drop(reports);
            self.cancel.cancel();
        }
    }

    /// Others have found something out.
    pub(crate) fn hear(&self, heard: Vec<FailureReport>) {
        if heard.is_empty() {
            return;
        }
        let mut reports = self.reports.lock();
        for report in heard {
            let is_new = reports.iter().all(|known| known.origin != report.origin);
            if is_new && reports.len() < MOST_NOTICES && report.is_of(self.world()) {
                reports.push(report);
            }
        }
        let completed = reports.iter().map(|report| report.completed).min();
        drop(reports);
        if completed.is_some() {
            self.cancel.cancel_after(completed);
        }
    }

    /// What to say to a rank that asks.
    fn answer(&self, from: Rank, query: Query) -> Reply {
        match query {
            Query::Doing(theirs) => self.tell(theirs),
            Query::Hear(reports) => {
                self.hear(reports);
                self.tell(None)
            }
            Query::Join => self.shrink.lock().join(from, &self.changed),
            Query::Prepare(ballot) => self.shrink.lock().prepare(from, ballot, &self.changed),
            Query::Decided(decision, ballot) if decision.is_of(self.world()) => {
                self.shrink.lock().decide(decision, ballot, &self.changed)
            }
            Query::Decided(..) => Reply::Unknown,
        }
    }

    /// For which rank of the job an operation waits here longest, and what it is, unless it is about to be given up.
    fn longest_wait(&self) -> Option<(Duration, Rank, Option<Descriptor>)> {
        let waits = self.cancel.waits().into_iter().min_by_key(|wait| wait.since);
        let (age, peer, call) = match waits {
            Some(wait) => (wait.since.elapsed(), wait.named(), Descriptor::decode(wait.words)),
            None => (Duration::ZERO, self.cancel.diagnosing()?.about?, None),
        };
        Some((age, *self.members.get(peer)?, call))
    }

    /// A rank of the job as one of this communicator.
    pub(super) fn rank_of(&self, job_rank: Rank) -> Option<Rank> {
        self.members.iter().position(|&member| member == job_rank)
    }

    /// What this rank does, to a rank that does `theirs`.
    fn tell(&self, theirs: Option<Descriptor>) -> Reply {
        let collective = theirs.filter(|theirs| !theirs.op.is_point_to_point());
        Reply::Doing {
            reports: self.reports(),
            diagnosing: self.cancel.diagnosing(),
            waits: self.cancel.waits().first().map(|wait| (wait.named(), wait.words)),
            elsewhere: None,
            at_your_seq: collective.and_then(|theirs| self.recording.history.collective(theirs.seq)),
            last_seq: self.recording.history.last_completed(),
        }
    }
}

/// The bulletins of a process, by communicator and rank in the job.
#[derive(Default)]
pub(crate) struct StatusBoard {
    posted: Arc<Mutex<Posted>>,
    watch: Mutex<Option<Watch>>,
}

#[derive(Default)]
pub(super) struct Posted {
    pub(super) bulletins: HashMap<(u64, Rank), Arc<CommStatus>>,
    /// Those that were taken down.
    taken_down: VecDeque<((u64, Rank), LastWords)>,
}

/// What is still said of a communicator that is gone.
struct LastWords {
    /// The last operation that was completed there.
    last_seq: u64,
    /// Who went on without the others: whoever comes too late asks when those have dropped the communicator that failed.
    decision: Option<Decision>,
}

/// How many communicators that are gone are remembered.
const REMEMBERED: usize = 256;

impl StatusBoard {
    pub(crate) fn post(&self, comm_id: u64, member: Rank, status: Arc<CommStatus>) {
        let is_alone = status.world() == 1;
        self.posted.lock().bulletins.insert((comm_id, member), status);
        let mut watch = self.watch.lock();
        if watch.is_none() && !is_alone {
            *watch = Watch::start(self.posted.clone());
        }
    }

    /// Without anybody who looks after it.
    #[cfg(test)]
    pub(crate) fn post_unwatched(&self, comm_id: u64, member: Rank, status: Arc<CommStatus>) {
        self.posted.lock().bulletins.insert((comm_id, member), status);
    }

    pub(crate) fn take_down(&self, comm_id: u64, member: Rank) {
        let mut posted = self.posted.lock();
        let taken = posted.bulletins.remove(&(comm_id, member));
        if let Some(status) = &taken {
            posted.taken_down.truncate(REMEMBERED - 1);
            let last_seq = status.last_seq.load(Ordering::Relaxed);
            let decision = status.shrink.lock().decision().cloned();
            posted.taken_down.push_front(((comm_id, member), LastWords { last_seq, decision }));
        }
        let is_last = posted.bulletins.is_empty();
        drop(posted);
        drop(taken.and_then(|status| status.control.lock().take()));
        if is_last {
            let watch = self.watch.lock().take();
            drop(watch);
        }
    }

    /// Answers a query of `from` to `to`, both ranks of the job.
    pub(crate) fn answer(&self, comm_id: u64, from: Rank, to: Rank, query: Query) -> Reply {
        let status = {
            let posted = self.posted.lock();
            match posted.bulletins.get(&(comm_id, to)) {
                Some(status) => status.clone(),
                None => {
                    let left = posted.taken_down.iter().find(|(name, _)| *name == (comm_id, to));
                    return match (left, query) {
                        (None, _) => Reply::Unknown,
                        (Some((_, LastWords { decision: Some(decision), .. })), Query::Join | Query::Prepare(_)) => {
                            Reply::Joins { shrinks: false, promised: 0, decision: Some(decision.clone()) }
                        }
                        (Some((_, words)), _) => Reply::Left { last_seq: words.last_seq },
                    };
                }
            }
        };
        let Some(from) = status.rank_of(from) else { return Reply::Unknown };
        let mut answer = status.answer(from, query);
        if let Reply::Doing { waits: None, diagnosing: None, elsewhere, .. } = &mut answer {
            *elsewhere = self.waits_elsewhere(comm_id, to);
        }
        answer
    }

    /// For whom a rank waits longest in other communicators than this.
    fn waits_elsewhere(&self, comm_id: u64, member: Rank) -> Option<(Rank, Option<Descriptor>)> {
        let posted = self.posted.lock();
        let others = posted.bulletins.iter().filter(|((other, rank), _)| *other != comm_id && *rank == member);
        let waits = others.filter_map(|(_, status)| status.longest_wait());
        waits.max_by_key(|(age, ..)| *age).map(|(_, peer, call)| (peer, call))
    }
}

/// Asks several ranks at once, and calls `heard` with what each of them says.
pub(crate) fn ask_all(
    control: &dyn ControlChannel,
    peers: &[Rank],
    query: &Query,
    patience: Duration,
    heard: impl Fn(Rank, Result<Reply, QueryError>) + Sync,
) {
    /// As many wait at once.
    const AT_ONCE: usize = 32;
    let next = AtomicUsize::new(0);
    let ask = || {
        while let Some(&peer) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            heard(peer, control.ask(peer, query, patience));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..peers.len().min(AT_ONCE) {
            // Without a thread, this one asks the more.
            if std::thread::Builder::new().name("kolo-ask".to_owned()).spawn_scoped(scope, ask).is_err() {
                break;
            }
        }
        ask();
    });
}
