//! Answers peers' queries about the communicators of this process, and runs its failure detector.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::detector::DetectorThread;
use super::message::{Query, Reply};
use super::report::FailureReport;
use super::status::{CommStatus, LastWords, Posted};
use crate::error::Cause;
use crate::types::{Descriptor, Rank};

/// How many communicators are remembered after they are gone.
const REMEMBERED: usize = 256;

/// Answers queries about the communicators of a process.
#[derive(Default)]
pub(crate) struct StatusBoard {
    posted: Arc<Mutex<Posted>>,
    watch: Mutex<Option<DetectorThread>>,
}

impl StatusBoard {
    pub(crate) fn post(&self, comm_id: u64, member: Rank, status: Arc<CommStatus>) {
        let is_alone = status.world() == 1;
        self.posted.lock().statuses.insert((comm_id, member), status);
        let mut watch = self.watch.lock();
        if watch.is_none() && !is_alone {
            *watch = DetectorThread::start(self.posted.clone());
        }
    }

    /// As [`StatusBoard::post`], without the failure detector.
    #[cfg(test)]
    pub(crate) fn post_unwatched(&self, comm_id: u64, member: Rank, status: Arc<CommStatus>) {
        self.posted.lock().statuses.insert((comm_id, member), status);
    }

    pub(crate) fn take_down(&self, comm_id: u64, member: Rank) {
        let mut posted = self.posted.lock();
        let taken = posted.statuses.remove(&(comm_id, member));
        if let Some(status) = &taken {
            posted.taken_down.truncate(REMEMBERED - 1);
            let last_seq = status.last_seq.load(Ordering::Relaxed);
            let decision = status.shrink.lock().decision().cloned();
            let words = LastWords { last_seq, decision, lost: status.lost(), reports: status.reports() };
            posted.taken_down.push_front(((comm_id, member), words));
        }
        let is_last = posted.statuses.is_empty();
        drop(posted);
        drop(taken.and_then(|status| status.control.lock().take()));
        if is_last {
            let watch = self.watch.lock().take();
            drop(watch);
        }
    }

    /// Adds a rank's report to what is remembered of a communicator that it has dropped.
    pub(crate) fn amend(&self, comm_id: u64, member: Rank, report: FailureReport) {
        let mut posted = self.posted.lock();
        let words = posted.taken_down.iter_mut().find(|(name, _)| *name == (comm_id, member));
        if let Some((_, words)) = words.filter(|(_, words)| words.reports.is_empty()) {
            words.reports.push(report);
        }
    }

    /// Returns the communicators of a rank of the job, with their comm ids, in the order of these.
    pub(crate) fn statuses(&self, member: Rank) -> Vec<(u64, Arc<CommStatus>)> {
        let posted = self.posted.lock();
        let own = posted.statuses.iter().filter(|((_, rank), _)| *rank == member);
        let mut statuses: Vec<_> = own.map(|(&(comm_id, _), status)| (comm_id, status.clone())).collect();
        drop(posted);
        statuses.sort_by_key(|(comm_id, _)| *comm_id);
        statuses
    }

    /// Returns whether a rank of the job has a communicator.
    pub(crate) fn has(&self, comm_id: u64, member: Rank) -> bool {
        self.posted.lock().statuses.contains_key(&(comm_id, member))
    }

    /// Returns which of `members`, ranks of the job, cannot answer according to the reports of all
    /// communicators of a rank, and why; as places among `members`.
    pub(crate) fn lost(&self, rank: Rank, members: &[Rank]) -> Vec<(Rank, Cause)> {
        let posted = self.posted.lock();
        let of_rank = |of: &(u64, Rank)| of.1 == rank;
        let living = posted.statuses.iter().filter(|(of, _)| of_rank(of)).flat_map(|(_, status)| status.lost());
        let former = posted.taken_down.iter().filter(|(of, _)| of_rank(of)).flat_map(|(_, words)| words.lost.clone());
        let place = |(lost, cause)| Some((members.iter().position(|&member| member == lost)?, cause));
        living.chain(former).filter_map(place).collect()
    }

    /// Answers a query of `from` to `to`, both ranks of the job.
    pub(crate) fn answer(&self, comm_id: u64, from: Rank, to: Rank, query: Query) -> Reply {
        let status = {
            let posted = self.posted.lock();
            match posted.statuses.get(&(comm_id, to)) {
                Some(status) => status.clone(),
                None => {
                    let left = posted.taken_down.iter().find(|(name, _)| *name == (comm_id, to));
                    return match (left, query) {
                        (None, _) => Reply::Unknown,
                        (Some((_, LastWords { decision: Some(decision), .. })), Query::Join | Query::Prepare(_)) => {
                            Reply::Joins { shrinks: false, promised: 0, decision: Some(decision.clone()) }
                        }
                        (Some((_, words)), Query::Doing(_) | Query::Reports(_)) if !words.reports.is_empty() => words.reply(),
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

    /// Returns the rank for which `member` waits longest in another communicator than this, and the
    /// operation.
    fn waits_elsewhere(&self, comm_id: u64, member: Rank) -> Option<(Rank, Option<Descriptor>)> {
        let posted = self.posted.lock();
        let others = posted.statuses.iter().filter(|((other, rank), _)| *other != comm_id && *rank == member);
        let waits = others.filter_map(|(_, status)| status.longest_wait());
        waits.max_by_key(|(age, ..)| *age).map(|(_, peer, call)| (peer, call))
    }
}
