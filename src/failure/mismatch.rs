//! Finds the rank at fault when ranks have made different calls.
//!
//! A rank that sees another call sees two of them, and cannot tell which is wrong. So it asks the
//! other ranks for their calls with the same sequence number: the call that most ranks made counts
//! as right. If several calls were made by equally many ranks, the one of the lowest rank counts.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::control::{ControlChannel, QueryError, ask_all};
use super::message::{Query, Reply};
use super::report::Failure;
use super::status::CommStatus;
use crate::timeouts::{LONGEST_MISMATCH_PAUSE, MISMATCH_PAUSE, MISMATCH_TOTAL, MISMATCH_UNDECIDED, QUERY};
use crate::types::{Descriptor, Op, Rank};

/// How many earlier calls are compared to find the one that was not the same.
const EARLIER: u64 = 64;

/// Asks ranks until a deadline, or until the communicator ends.
struct UntilDeadline<'a> {
    status: &'a CommStatus,
    control: &'a dyn ControlChannel,
    deadline: Instant,
}

impl UntilDeadline<'_> {
    fn is_over(&self) -> bool {
        self.status.cancel.is_cancelled() || Instant::now() >= self.deadline
    }
}

impl ControlChannel for UntilDeadline<'_> {
    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError> {
        if self.is_over() {
            return Err(QueryError::Unasked);
        }
        self.control.ask(peer, query, patience.min(self.deadline.saturating_duration_since(Instant::now())))
    }

    fn is_stopped(&self, peer: Rank) -> bool {
        self.control.is_stopped(peer)
    }
}

/// Returns the failure of two ranks that made different calls. Returns `None` if a report arrives
/// meanwhile.
pub(super) fn compare_calls(
    status: &CommStatus,
    control: &dyn ControlChannel,
    ranks: [Rank; 2],
    calls: [Descriptor; 2],
) -> Option<Failure> {
    let pair = Failure::Mismatch { ranks, calls, known: ranks.len(), is_tie: false };
    if calls.iter().any(|call| call.op.is_point_to_point() || call.op == Op::Connect) {
        return Some(pair);
    }
    // A rank that skipped a call is ahead with its next ones.
    let seq = calls[0].seq.min(calls[1].seq);
    let mut known: BTreeMap<Rank, Descriptor> = ranks.into_iter().zip(calls).filter(|(_, call)| call.seq == seq).collect();
    if let Some(mine) = status.recording.history.collective(seq) {
        known.entry(status.rank).or_insert(mine);
    }
    let query = Query::Doing(Some(Descriptor { seq, ..calls[0] }));
    let mut unknown: Vec<Rank> = status.others();
    let began = Instant::now();
    let control = UntilDeadline { status, control, deadline: began + MISMATCH_TOTAL };
    let mut pause = MISMATCH_PAUSE;
    loop {
        unknown.retain(|rank| !known.contains_key(rank) && !control.is_stopped(*rank));
        let (made, late) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        ask_all(&control, &unknown, &query, QUERY, |rank, reply| {
            if let Ok(Reply::Doing { reports, at_your_seq, .. }) = reply {
                status.add_reports(reports);
                match at_your_seq {
                    Some(call) => made.lock().push((rank, call)),
                    None => late.lock().push(rank),
                }
            }
        });
        if !status.reports().is_empty() {
            return None;
        }
        known.extend(made.into_inner());
        unknown = late.into_inner();
        let is_decided = most_frequent(&known).is_some_and(|(_, count)| 2 * count > status.world());
        if unknown.is_empty() || is_decided || began.elapsed() >= MISMATCH_UNDECIDED || control.is_over() {
            return Some(name_culprit(&known).unwrap_or(pair));
        }
        thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_MISMATCH_PAUSE);
    }
}

/// Finds the latest earlier call that differs between this rank and a peer. Returns `None` if that
/// call is not recorded any more, or if a report arrives meanwhile.
pub(super) fn compare_earlier_calls(
    status: &CommStatus,
    control: &dyn ControlChannel,
    peer: Rank,
    before: u64,
) -> Option<Failure> {
    for seq in (1..before).rev().take(EARLIER as usize) {
        let mine = status.recording.history.collective(seq)?;
        let Ok(Reply::Doing { reports, at_your_seq, .. }) = control.ask(peer, &Query::Doing(Some(mine)), QUERY) else {
            return None;
        };
        if !reports.is_empty() {
            status.add_reports(reports);
            return None;
        }
        if let Some(theirs) = at_your_seq.filter(|theirs| *theirs != mine) {
            return compare_calls(status, control, [status.rank, peer], [mine, theirs]);
        }
    }
    None
}

/// Returns the call that most ranks made, and how many. Of several, that of the lowest rank.
fn most_frequent(known: &BTreeMap<Rank, Descriptor>) -> Option<(Descriptor, usize)> {
    known.values().map(|call| (*call, count(known, call))).reduce(|most, next| if next.1 > most.1 { next } else { most })
}

/// Returns how many ranks made a call.
fn count(known: &BTreeMap<Rank, Descriptor>, call: &Descriptor) -> usize {
    known.values().filter(|other| *other == call).count()
}

/// Names the lowest rank whose call is not that of most ranks, and the lowest rank that made that.
fn name_culprit(known: &BTreeMap<Rank, Descriptor>) -> Option<Failure> {
    let (right, most) = most_frequent(known)?;
    let (witness, _) = known.iter().find(|(_, call)| **call == right)?;
    let (culprit, wrong) = known.iter().find(|(_, call)| **call != right)?;
    let is_tie = count(known, wrong) == most;
    Some(Failure::Mismatch { ranks: [*witness, *culprit], calls: [right, *wrong], known: known.len(), is_tie })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::trace::{RankOfJob, Recorder};
    use crate::types::Member;

    /// Peers that answer no query, and how often they were asked.
    struct Mute(AtomicUsize);

    impl ControlChannel for Mute {
        fn ask(&self, _: Rank, _: &Query, patience: Duration) -> Result<Reply, QueryError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            thread::sleep(patience);
            Err(QueryError::Mute)
        }
    }

    /// The failure detector's thread must be free again soon, however many ranks do not answer.
    #[test]
    fn asking_ranks_that_do_not_answer_has_an_end() {
        const WORLD: usize = 1000;
        let members = vec![Member { host: "here".into(), pid: 1 }; WORLD];
        let job_rank = RankOfJob { job: "test".to_owned(), run: 1, rank: 0, members };
        let recording = Recorder::new(job_rank, None, None).open(1, 0, (0..WORLD).collect());
        let status = CommStatus::new(0, (0..WORLD).collect(), recording);
        let calls = [4, 5].map(|count| Descriptor { op: Op::AllReduce, count, seq: 1, ..Descriptor::nothing() });
        let mute = Mute(AtomicUsize::new(0));
        let began = Instant::now();
        let found = compare_calls(&status, &mute, [0, 1], calls);
        assert!(matches!(found, Some(Failure::Mismatch { ranks: [0, 1], is_tie: true, .. })), "{found:?}");
        // Without the total deadline it takes about 16 s.
        assert!(began.elapsed() < 8 * MISMATCH_TOTAL, "{:?}", began.elapsed());
        let asked = mute.0.load(Ordering::Relaxed);
        status.cancel.cancel();
        compare_calls(&status, &mute, [0, 1], calls);
        assert_eq!(mute.0.load(Ordering::Relaxed), asked, "ranks are asked on behalf of a communicator that has ended");
    }

    /// Returns the ranks and their counts, and whether it is a tie.
    fn named(counts: &[u64]) -> Option<([Rank; 2], [u64; 2], bool)> {
        let call = |&count: &u64| Descriptor { op: Op::AllReduce, count, seq: 1, ..Descriptor::nothing() };
        match name_culprit(&counts.iter().map(call).enumerate().collect()) {
            Some(Failure::Mismatch { ranks, calls, known, is_tie }) => {
                assert_eq!(known, counts.len());
                Some((ranks, calls.map(|call| call.count), is_tie))
            }
            other => {
                assert_eq!(other, None);
                None
            }
        }
    }

    #[test]
    fn the_rank_that_differs_from_most_is_named() {
        assert_eq!(named(&[4, 4, 4, 4, 4, 5, 4, 4]), Some(([0, 5], [4, 5], false)));
        assert_eq!(named(&[5, 4, 4]), Some(([1, 0], [4, 5], false)));
        // Of two ranks that differ, the lower one.
        assert_eq!(named(&[4, 6, 4, 5]), Some(([0, 1], [4, 6], false)));
        // No majority: the call of the lowest rank counts.
        assert_eq!(named(&[4, 5]), Some(([0, 1], [4, 5], true)));
        assert_eq!(named(&[4, 5, 5, 4]), Some(([0, 1], [4, 5], true)));
        assert_eq!(named(&[4, 4]), None);
        assert_eq!(named(&[]), None);
    }
}
