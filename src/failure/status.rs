//! What others may know of one rank's communicator, and how they ask.
//!
//! Every communicator has a [`CommStatus`] on each of its ranks. Peers ask it [`Query`]s at any time: the process's listener answers
//! from there on its own thread, whatever the rank itself is busy with. So whoever does not answer is not there.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::ballot::Ballots;
use super::control::ControlChannel;
use super::message::{Decision, Query, Reply};
use super::report::FailureReport;

use super::cancel::CancelToken;
use crate::trace::Recording;
use crate::types::{Descriptor, Rank};

/// What others may know of one rank's communicator.
pub(crate) struct CommStatus {
    /// This rank.
    pub(crate) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    members: Arc<[Rank]>,
    pub(crate) cancel: Arc<CancelToken>,
    pub(crate) recording: Arc<Recording>,
    /// `None` for a rank alone, and when it is taken down: so that whoever answers is never the last to hold the network.
    pub(super) control: Mutex<Option<Arc<dyn ControlChannel>>>,
    /// The last operation, when the rank has left.
    pub(crate) last_seq: AtomicU64,
    /// Why the communicator ended: what this rank and others have found out.
    reports: Mutex<Vec<FailureReport>>,
    pub(super) shrink: Mutex<Ballots>,
    /// What is known of a shrink is another.
    pub(super) changed: Condvar,
}

/// As many reports are kept: a rank finds out at most one, so only large communicators in which many fail at once lose some.
const MOST_REPORTS: usize = 64;

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
    pub(crate) fn add_own_report(&self, report: FailureReport) {
        let mut reports = self.reports.lock();
        if reports.is_empty() {
            reports.push(report);
            drop(reports);
            self.cancel.cancel();
        }
    }

    /// Others have found something out.
    pub(crate) fn add_reports(&self, heard: Vec<FailureReport>) {
        if heard.is_empty() {
            return;
        }
        let mut reports = self.reports.lock();
        for report in heard {
            let is_new = reports.iter().all(|known| known.origin != report.origin);
            if is_new && reports.len() < MOST_REPORTS && report.is_of(self.world()) {
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
    pub(super) fn answer(&self, from: Rank, query: Query) -> Reply {
        match query {
            Query::Doing(theirs) => self.describe(theirs),
            Query::Reports(reports) => {
                self.add_reports(reports);
                self.describe(None)
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
    pub(super) fn longest_wait(&self) -> Option<(Duration, Rank, Option<Descriptor>)> {
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
    fn describe(&self, theirs: Option<Descriptor>) -> Reply {
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

/// The communicators of a process, by comm id and rank in the job.
#[derive(Default)]
pub(super) struct Posted {
    pub(super) statuses: HashMap<(u64, Rank), Arc<CommStatus>>,
    /// Those that were taken down.
    pub(super) taken_down: VecDeque<((u64, Rank), LastWords)>,
}

/// What is still said of a communicator that is gone.
pub(super) struct LastWords {
    /// The last operation that was completed there.
    pub(super) last_seq: u64,
    /// Who went on without the others: whoever comes too late asks when those have dropped the communicator that failed.
    pub(super) decision: Option<Decision>,
}
