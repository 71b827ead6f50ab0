//! What peers may learn of one rank's communicator, and how they ask.
//!
//! Every communicator has a [`CommStatus`] on each of its ranks. Peers send it [`Query`]s at any
//! time. The process's listener answers them on its own thread, whatever the rank itself does. So a
//! rank that does not answer is gone or stopped.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::ballot::Ballots;
use super::cancel::CancelToken;
use super::control::{BesideMemory, ControlChannel, ReadWritten};
use super::message::{Decision, Query, Reply};
use super::report::FailureReport;
use crate::error::Cause;
use crate::trace::Recording;
use crate::types::{Descriptor, Rank};

/// What peers may learn of one rank's communicator.
pub(crate) struct CommStatus {
    /// This rank.
    pub(crate) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    members: Arc<[Rank]>,
    pub(crate) cancel: Arc<CancelToken>,
    pub(crate) recording: Arc<Recording>,
    /// `None` in a world of one, and once the status is taken down: the thread that answers must
    /// never be the last to hold the network.
    pub(super) control: Mutex<Option<Arc<dyn ControlChannel>>>,
    /// The last operation, once the rank has left.
    pub(crate) last_seq: AtomicU64,
    /// Why the communicator ended: this rank's own report, and those of others.
    reports: Mutex<Vec<FailureReport>>,
    pub(super) shrink: Mutex<Ballots>,
    /// Notified when `shrink` changes.
    pub(super) changed: Condvar,
}

/// The most reports that are kept. A rank makes at most one, so only large communicators in which
/// many ranks fail at once lose some.
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

    /// Sets how the others are reached. From then on they may be asked.
    pub(crate) fn reach(&self, control: Arc<dyn ControlChannel>) {
        *self.control.lock() = Some(control);
    }

    /// Sets how this rank reads what others have written about themselves.
    pub(crate) fn read_written(&self, written: ReadWritten) {
        let mut control = self.control.lock();
        if let Some(inner) = control.take() {
            *control = Some(Arc::new(BesideMemory { inner, written }));
        }
    }

    pub(crate) fn control(&self) -> Option<Arc<dyn ControlChannel>> {
        self.control.lock().clone()
    }

    /// Returns the communicator's ranks as ranks of the job.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Returns the peers for which operations wait, how long, and the operations. Never waits: if
    /// an operation changes its waits just now, returns none.
    pub(crate) fn waits_now(&self) -> Vec<(Rank, Duration, Option<Descriptor>)> {
        let waits = self.cancel.try_waits().into_iter();
        waits.map(|wait| (wait.named(), wait.since.elapsed(), Descriptor::decode(wait.words))).collect()
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// Returns all ranks but this one.
    pub(crate) fn others(&self) -> Vec<Rank> {
        (0..self.world()).filter(|&rank| rank != self.rank).collect()
    }

    pub(crate) fn reports(&self) -> Vec<FailureReport> {
        self.reports.lock().clone()
    }

    /// Returns the ranks of the job that cannot answer according to the reports, and why.
    pub(super) fn lost(&self) -> Vec<(Rank, Cause)> {
        let lost = |report: &FailureReport| report.absence().map(|(rank, cause)| (self.members[rank], cause.clone()));
        self.reports.lock().iter().filter_map(lost).collect()
    }

    /// Adds this rank's own report, unless it knows already why the communicator ended.
    pub(crate) fn add_own_report(&self, report: FailureReport) {
        let mut reports = self.reports.lock();
        if reports.is_empty() {
            reports.push(report);
            drop(reports);
            self.cancel.cancel();
        }
    }

    /// Adds reports of other ranks.
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

    /// Answers a query.
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

    /// Returns the longest wait: its age, the rank of the job that is awaited, and the operation.
    /// If an operation has failed and is being diagnosed, that counts as a wait for the rank that
    /// is asked.
    pub(super) fn longest_wait(&self) -> Option<(Duration, Rank, Option<Descriptor>)> {
        let waits = self.cancel.waits().into_iter().min_by_key(|wait| wait.since);
        let (age, peer, call) = match waits {
            Some(wait) => (wait.since.elapsed(), wait.named(), Descriptor::decode(wait.words)),
            None => (Duration::ZERO, self.cancel.diagnosing()?.about?, None),
        };
        Some((age, *self.members.get(peer)?, call))
    }

    /// Returns a rank of the job as a rank of this communicator.
    pub(super) fn rank_of(&self, job_rank: Rank) -> Option<Rank> {
        self.members.iter().position(|&member| member == job_rank)
    }

    /// Describes what this rank does, to a rank whose operation is `theirs`.
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

/// The communicators of a process, by comm id and rank of the job.
#[derive(Default)]
pub(super) struct Posted {
    pub(super) statuses: HashMap<(u64, Rank), Arc<CommStatus>>,
    /// The communicators that were taken down, the latest first.
    pub(super) taken_down: VecDeque<((u64, Rank), LastWords)>,
}

/// What is remembered of a communicator that is gone.
pub(super) struct LastWords {
    /// The last operation that was completed there.
    pub(super) last_seq: u64,
    /// The ranks that continued. A rank that asks late learns it even when those have dropped the
    /// failed communicator.
    pub(super) decision: Option<Decision>,
    /// The ranks of the job that could not answer.
    pub(super) lost: Vec<(Rank, Cause)>,
    /// Why the communicator ended. A rank may have made it when another had given it up already.
    pub(super) reports: Vec<FailureReport>,
}

impl LastWords {
    /// The answer to a rank that still waits in the communicator, which has failed.
    pub(super) fn reply(&self) -> Reply {
        let (reports, last_seq) = (self.reports.clone(), self.last_seq);
        Reply::Doing { reports, diagnosing: None, waits: None, elsewhere: None, at_your_seq: None, last_seq }
    }
}
