//! How the survivors of a failure agree on who they are.
//!
//! Everybody tells everybody else that it wants to go on ([`Query::Join`]); from what it hears back, or does not, it knows who
//! is there, who wants to go on, too, and who is gone. When it has heard of everybody that he wants to go on or does not, the
//! lowest that does decides: that is the [`Decision`]. It tells the others, who keep asking it meanwhile.
//!
//! If the one who decides is lost, the next one does, who must not decide anything else if one that goes on has heard of what
//! the former decided. So before anybody decides he asks all others that go on ([`Query::Prepare`]): they tell of a decision that
//! they have heard of, which then counts, and else promise to accept none any more of those who asked with a lower *ballot*.
//! Whoever decides goes on with what he decided only when another has accepted it. That is the synod of Lamport, The Part-Time
//! Parliament (1998), but that all who are left take part instead of a majority: of two halves of a network that cannot reach each
//! other, each goes on by itself. Who is not in a decision learns that when it asks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::control::{ControlChannel, QueryError, ask_all};
use super::message::{Decision, Query, Reply};
use super::status::CommStatus;
use crate::types::{Rank, mix};

/// How long one query may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the rank that failed may take to show that it wants to go on.
const GRACE: Duration = Duration::from_secs(1);

/// How long a rank that cannot be heard may be so.
const OUT_OF_REACH: Duration = Duration::from_secs(5);

/// How long after the deadline they may take to agree: those who are there then have only to answer each other.
const LAST: Duration = Duration::from_secs(10);

/// How often the one who decides is asked, and those who have not joined yet.
const ASK_AGAIN: Duration = Duration::from_millis(5);
const CALL_AGAIN: Duration = Duration::from_millis(50);

/// What is known of a rank.
#[derive(Clone, Copy, PartialEq)]
enum View {
    /// Its listener answers, but it has not come to [`agree`].
    Alive,
    /// It wants to go on.
    Joined,
    /// It cannot be heard, since then.
    Lost(Instant),
    /// It is gone, or too late.
    Out,
}

/// Agrees with the others; on nobody if that cannot be done in time. `culprits` are waited for less long than others that do not
/// come, who have until the deadline.
pub(crate) fn agree(status: &CommStatus, culprits: &[Rank], nonce: u64, deadline: Instant) -> Decision {
    let Some(control) = status.control() else { return Decision { nonce, members: vec![status.rank] } };
    let began = Instant::now();
    let me = status.rank;
    status.shrink.lock().shrinks = true;
    let mut views = vec![View::Alive; status.world()];
    views[me] = View::Joined;
    // Everybody has to know of this rank; later on those are asked of whom it does not know enough.
    call(status, &*control, &status.others(), &Query::Join, &mut views);
    let mut called = Instant::now();
    loop {
        if let Some(decision) = &status.shrink.lock().decision {
            return decision.clone();
        }
        if Instant::now() >= deadline + LAST {
            return Decision { nonce, members: Vec::new() };
        }
        if called.elapsed() >= CALL_AGAIN {
            let unclear: Vec<Rank> =
                (0..views.len()).filter(|&rank| matches!(views[rank], View::Alive | View::Lost(_))).collect();
            call(status, &*control, &unclear, &Query::Join, &mut views);
            called = Instant::now();
        }
        for &rank in &status.shrink.lock().joined {
            if views[rank] == View::Alive {
                views[rank] = View::Joined;
            }
        }
        let now = Instant::now();
        for (rank, view) in views.iter_mut().enumerate() {
            let is_late = match *view {
                View::Alive => now >= if culprits.contains(&rank) { (began + GRACE).min(deadline) } else { deadline },
                View::Lost(since) => culprits.contains(&rank) || since.elapsed() >= OUT_OF_REACH || now >= deadline,
                View::Joined | View::Out => false,
            };
            if is_late {
                *view = View::Out;
            }
        }
        let is_settled = views.iter().all(|view| matches!(view, View::Joined | View::Out));
        let first = views.iter().position(|view| *view == View::Joined).unwrap_or(me);
        if first == me && is_settled {
            let members: Vec<Rank> = (0..views.len()).filter(|&rank| views[rank] == View::Joined).collect();
            let others: Vec<Rank> = members.iter().copied().filter(|&rank| rank != me).collect();
            // Higher than any that was promised, and nobody else's.
            let round = status.shrink.lock().promised / views.len() as u64 + 1;
            let ballot = round.saturating_mul(views.len() as u64).saturating_add(me as u64);
            status.shrink.lock().promised = ballot;
            call(status, &*control, &others, &Query::Prepare(ballot), &mut views);
            let has_changed = others.iter().any(|&rank| views[rank] != View::Joined);
            let is_passed_over = status.shrink.lock().promised != ballot;
            if !has_changed && !is_passed_over && status.shrink.lock().decision.is_none() {
                let decision = Decision { nonce: mix(nonce, ballot), members };
                let accepted = AtomicBool::new(others.is_empty());
                ask_all(&*control, &others, &Query::Decided(decision.clone(), ballot), PATIENCE, |_, heard| {
                    let Ok(Reply::Joins { decision: Some(theirs), .. }) = heard else { return };
                    if theirs == decision {
                        accepted.store(true, Ordering::Relaxed);
                    } else if theirs.is_of(status.world()) {
                        status.shrink.lock().adopt(theirs, &status.changed);
                    }
                });
                if accepted.into_inner() {
                    // Who has not heard it asks.
                    status.shrink.lock().adopt(decision, &status.changed);
                }
            }
        }
        if first != me {
            call(status, &*control, &[first], &Query::Join, &mut views);
        }
        let mut state = status.shrink.lock();
        if state.decision.is_none() {
            status.changed.wait_for(&mut state, ASK_AGAIN);
        }
    }
}

/// Asks ranks whether they want to go on, and notes what they say.
fn call(status: &CommStatus, control: &dyn ControlChannel, peers: &[Rank], query: &Query, views: &mut [View]) {
    let seen = parking_lot::Mutex::new(views);
    ask_all(control, peers, query, PATIENCE, |peer, heard| {
        let view = &mut seen.lock()[peer];
        let lost = |view| match view {
            View::Lost(since) => View::Lost(since),
            _ => View::Lost(Instant::now()),
        };
        *view = match (heard, *view) {
            (_, View::Out) => View::Out,
            (Ok(Reply::Joins { decision: Some(decision), .. }), _) if decision.is_of(status.world()) => {
                status.shrink.lock().adopt(decision, &status.changed);
                View::Joined
            }
            (Ok(Reply::Joins { shrinks, promised, .. }), _) => {
                let mut state = status.shrink.lock();
                state.promised = state.promised.max(promised);
                if shrinks { View::Joined } else { View::Alive }
            }
            // Of survivors that make a communicator, one may not have got so far.
            (Ok(Reply::Unknown), view) => lost(view),
            // It has dropped the communicator, and gave up with it; or is gone.
            (Ok(_) | Err(QueryError::Gone | QueryError::Died), _) => View::Out,
            (Err(_), view) => lost(view),
        };
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::super::board::StatusBoard;
    use super::*;
    use crate::trace::{RankOfJob, Recorder};

    const WORLD: usize = 5;

    /// Ranks of which some end after so many questions: from then on they neither ask nor answer.
    struct Mortal {
        board: Arc<StatusBoard>,
        rank: Rank,
        /// How many questions each has left.
        left: Arc<[AtomicU64; WORLD]>,
    }

    impl Mortal {
        fn is_dead(&self, rank: Rank) -> bool {
            self.left[rank].load(Ordering::SeqCst) == 0
        }
    }

    impl ControlChannel for Mortal {
        fn ask(&self, peer: Rank, query: &Query, _: Duration) -> Result<Reply, QueryError> {
            let take = |left: u64| left.checked_sub(1);
            let may = self.left[self.rank].fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok();
            if !may || self.is_dead(peer) {
                return Err(QueryError::Gone);
            }
            Ok(self.board.answer(0, self.rank, peer, query.clone()))
        }
    }

    /// Whoever was about to decide, or has told some and not others, may end at any query.
    #[test]
    fn whoever_is_left_agrees_whenever_others_end() {
        for seed in 0..300u64 {
            let lives = |rank: Rank| match mix(seed, rank as u64) % 3 {
                // The lowest decide, so they are those who end.
                0 if rank < 3 => 1 + mix(seed, 100 + rank as u64) % 24,
                _ => u64::MAX,
            };
            let board = Arc::new(StatusBoard::default());
            let left: Arc<[AtomicU64; WORLD]> = Arc::new(std::array::from_fn(|rank| AtomicU64::new(lives(rank))));
            let members: Arc<[Rank]> = (0..WORLD).collect();
            let who = RankOfJob { job: "shrink".to_owned(), run: seed, rank: 0, members: Vec::new() };
            let recorder = Recorder::new(who, None);
            let status = |rank| CommStatus::new(rank, members.clone(), recorder.open(0, rank, members.clone()));
            let bulletins: Vec<Arc<CommStatus>> = (0..WORLD).map(|rank| Arc::new(status(rank))).collect();
            for (rank, status) in bulletins.iter().enumerate() {
                board.post_unwatched(0, rank, status.clone());
                status.reach(Arc::new(Mortal { board: board.clone(), rank, left: left.clone() }));
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            let decisions: Vec<Decision> = std::thread::scope(|scope| {
                let ranks = bulletins.iter().enumerate();
                let threads: Vec<_> =
                    ranks.map(|(rank, status)| scope.spawn(move || agree(status, &[], 10 + rank as u64, deadline))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let living: Vec<Rank> = (0..WORLD).filter(|&rank| left[rank].load(Ordering::SeqCst) > 0).collect();
            for &rank in &living {
                assert_eq!(decisions[rank], decisions[living[0]], "seed {seed}: rank {rank} of {living:?}");
                assert!(decisions[rank].members.contains(&rank), "seed {seed}: rank {rank} is left out");
            }
        }
    }
}
