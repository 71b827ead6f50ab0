//! How the survivors of a failure agree on which ranks continue.
//!
//! Every rank tells all others that it wants to continue ([`Query::Join`]). Their answers, or the
//! lack of one, tell which ranks are alive, which want to continue, and which are gone. Once every
//! rank is known to continue or not, the lowest that continues decides: that is the [`Decision`].
//! It sends the decision to the others, which keep asking for it meanwhile.
//!
//! If the deciding rank is lost, the next lowest decides. It must decide nothing else if a rank
//! that continues has received the first decision. So before a rank decides, it asks all others
//! that continue ([`Query::Prepare`]). A rank that has received a decision returns it, and that
//! decision counts. Any other rank promises to accept no decision with a lower *ballot*. A decision
//! takes effect once another rank has accepted it. This is the synod of Lamport, "The Part-Time
//! Parliament" (1998), with one difference: all ranks that are left take part instead of a
//! majority. If a network splits into halves that cannot reach each other, each half continues by
//! itself. A rank that is not part of a decision learns that when it asks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::control::{ControlChannel, QueryError, ask_all};
use super::message::{Decision, Query, Reply};
use super::status::CommStatus;
use super::wait_check;
use crate::timeouts::{
    SHRINK_AFTER_DEADLINE, SHRINK_ASK_AGAIN, SHRINK_CALL_AGAIN, SHRINK_JOIN, SHRINK_OUT_OF_REACH, SHRINK_QUERY,
};
use crate::types::{Rank, mix};

/// What is known of a rank.
#[derive(Clone, Copy, PartialEq)]
enum View {
    /// Its listener answers, but it has not called [`agree`].
    Alive,
    /// It wants to continue.
    Joined,
    /// It has been out of reach since then.
    Lost(Instant),
    /// It is gone, or late.
    Out,
}

/// Agrees with the other ranks on those that continue. The decision is empty if the ranks do not
/// agree in time, or if the wait check says no. `culprits` get less time to join than other ranks, which have until the deadline.
pub(crate) fn agree(status: &CommStatus, culprits: &[Rank], nonce: u64, deadline: Instant) -> Decision {
    let Some(control) = status.control() else { return Decision { nonce, members: vec![status.rank] } };
    status.shrink.lock().shrinks = true;
    let mut survey = Survey::new(status, &*control);
    let began = Instant::now();
    // Every rank must learn of this one. Later queries go only to ranks of which too little is
    // known.
    survey.call(&status.others(), &Query::Join);
    let mut called = Instant::now();
    loop {
        if let Some(decision) = &status.shrink.lock().decision {
            return decision.clone();
        }
        if Instant::now() >= deadline + SHRINK_AFTER_DEADLINE || wait_check::go_on().is_err() {
            return Decision { nonce, members: Vec::new() };
        }
        if called.elapsed() >= SHRINK_CALL_AGAIN {
            survey.call(&survey.unclear(), &Query::Join);
            called = Instant::now();
        }
        survey.update(culprits, began, deadline);
        let first = survey.first();
        if first != status.rank {
            survey.call(&[first], &Query::Join);
        } else if survey.is_settled() {
            survey.decide(nonce);
        }
        let mut state = status.shrink.lock();
        if state.decision.is_none() {
            status.changed.wait_for(&mut state, SHRINK_ASK_AGAIN);
        }
    }
}

/// What this rank knows of all ranks.
struct Survey<'a> {
    status: &'a CommStatus,
    control: &'a dyn ControlChannel,
    views: Vec<View>,
}

impl<'a> Survey<'a> {
    fn new(status: &'a CommStatus, control: &'a dyn ControlChannel) -> Survey<'a> {
        let mut views = vec![View::Alive; status.world()];
        views[status.rank] = View::Joined;
        Survey { status, control, views }
    }

    /// The ranks that may still join or turn out to be gone.
    fn unclear(&self) -> Vec<Rank> {
        (0..self.views.len()).filter(|&rank| matches!(self.views[rank], View::Alive | View::Lost(_))).collect()
    }

    /// Notes the ranks that have joined of their own accord, and those that are late.
    fn update(&mut self, culprits: &[Rank], began: Instant, deadline: Instant) {
        for &rank in &self.status.shrink.lock().joined {
            if self.views[rank] == View::Alive {
                self.views[rank] = View::Joined;
            }
        }
        let now = Instant::now();
        for (rank, view) in self.views.iter_mut().enumerate() {
            let is_late = match *view {
                View::Alive => now >= if culprits.contains(&rank) { (began + SHRINK_JOIN).min(deadline) } else { deadline },
                View::Lost(since) => culprits.contains(&rank) || since.elapsed() >= SHRINK_OUT_OF_REACH || now >= deadline,
                View::Joined | View::Out => false,
            };
            if is_late {
                *view = View::Out;
            }
        }
    }

    /// The lowest rank that continues, which decides.
    fn first(&self) -> Rank {
        self.views.iter().position(|view| *view == View::Joined).unwrap_or(self.status.rank)
    }

    /// Whether each rank is known to continue or not.
    fn is_settled(&self) -> bool {
        self.views.iter().all(|view| matches!(view, View::Joined | View::Out))
    }

    /// Decides that the ranks continue that have joined, unless one of them knows of a decision,
    /// has promised to follow another rank, or turns out to be gone.
    fn decide(&mut self, nonce: u64) {
        let Survey { status, control, .. } = *self;
        let members: Vec<Rank> = (0..self.views.len()).filter(|&rank| self.views[rank] == View::Joined).collect();
        let others: Vec<Rank> = members.iter().copied().filter(|&rank| rank != status.rank).collect();
        let ballot = self.next_ballot();
        self.call(&others, &Query::Prepare(ballot));
        let has_changed = others.iter().any(|&rank| self.views[rank] != View::Joined);
        let is_passed_over = status.shrink.lock().promised != ballot;
        if has_changed || is_passed_over || status.shrink.lock().decision.is_some() {
            return;
        }
        let decision = Decision { nonce: mix(nonce, ballot), members };
        let accepted = AtomicBool::new(others.is_empty());
        ask_all(control, &others, &Query::Decided(decision.clone(), ballot), SHRINK_QUERY, |_, reply| {
            let Ok(Reply::Joins { decision: Some(theirs), .. }) = reply else { return };
            if theirs == decision {
                accepted.store(true, Ordering::Relaxed);
            } else if theirs.is_of(status.world()) {
                status.shrink.lock().adopt(theirs, &status.changed);
            }
        });
        if accepted.into_inner() {
            // Ranks that have not received the decision ask for it.
            status.shrink.lock().adopt(decision, &status.changed);
        }
    }

    /// Promises itself a ballot that is higher than all promised ones, and that no other rank uses.
    fn next_ballot(&self) -> u64 {
        let (world, me) = (self.views.len() as u64, self.status.rank as u64);
        let mut state = self.status.shrink.lock();
        let round = state.promised / world + 1;
        state.promised = round.saturating_mul(world).saturating_add(me);
        state.promised
    }

    /// Sends a query to ranks, and notes from the answers whether they want to continue.
    fn call(&mut self, peers: &[Rank], query: &Query) {
        let Survey { status, control, .. } = *self;
        let views = Mutex::new(&mut self.views);
        ask_all(control, peers, query, SHRINK_QUERY, |peer, reply| {
            let view = &mut views.lock()[peer];
            *view = next_view(status, *view, reply);
        });
    }
}

fn next_view(status: &CommStatus, view: View, reply: Result<Reply, QueryError>) -> View {
    let lost = match view {
        View::Lost(since) => View::Lost(since),
        _ => View::Lost(Instant::now()),
    };
    match reply {
        _ if view == View::Out => View::Out,
        Ok(Reply::Joins { decision: Some(decision), .. }) if decision.is_of(status.world()) => {
            status.shrink.lock().adopt(decision, &status.changed);
            View::Joined
        }
        Ok(Reply::Joins { shrinks, promised, .. }) => {
            let mut state = status.shrink.lock();
            state.promised = state.promised.max(promised);
            if shrinks { View::Joined } else { View::Alive }
        }
        // While survivors make a communicator, one of them may not have made it yet.
        Ok(Reply::Unknown) => lost,
        // The peer has dropped the communicator and does not continue, or it is gone.
        Ok(_) | Err(QueryError::Gone | QueryError::Died) => View::Out,
        Err(_) => lost,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use super::super::board::StatusBoard;
    use super::*;
    use crate::trace::{RankOfJob, Recorder};

    const WORLD: usize = 5;

    /// Ranks of which some end after a number of queries: from then on they neither ask nor answer.
    struct Mortal {
        board: Arc<StatusBoard>,
        rank: Rank,
        /// How many queries each rank has left.
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
            if !may {
                return Err(QueryError::Gone);
            }
            let reply = self.board.answer(0, self.rank, peer, query.clone());
            // Asked after the answer: an ended rank, which reaches no other, decides alone.
            if self.is_dead(peer) { Err(QueryError::Gone) } else { Ok(reply) }
        }
    }

    /// A rank that is about to decide, or has told only some of the others, may end at any query.
    #[test]
    fn survivors_agree_whenever_others_end() {
        for seed in 0..300u64 {
            let lives = |rank: Rank| match mix(seed, rank as u64) % 3 {
                // The lowest ranks decide, so they are the ones that end.
                0 if rank < 3 => 1 + mix(seed, 100 + rank as u64) % 24,
                _ => u64::MAX,
            };
            let board = Arc::new(StatusBoard::default());
            let left: Arc<[AtomicU64; WORLD]> = Arc::new(std::array::from_fn(|rank| AtomicU64::new(lives(rank))));
            let members: Arc<[Rank]> = (0..WORLD).collect();
            let who = RankOfJob { job: "shrink".to_owned(), run: seed, rank: 0, members: Vec::new() };
            let recorder = Recorder::new(who, None, None);
            let status = |rank| CommStatus::new(rank, members.clone(), recorder.open(0, rank, members.clone()));
            let statuses: Vec<Arc<CommStatus>> = (0..WORLD).map(|rank| Arc::new(status(rank))).collect();
            for (rank, status) in statuses.iter().enumerate() {
                board.post_unwatched(0, rank, status.clone());
                status.reach(Arc::new(Mortal { board: board.clone(), rank, left: left.clone() }));
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            let decisions: Vec<Decision> = std::thread::scope(|scope| {
                let ranks = statuses.iter().enumerate();
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
