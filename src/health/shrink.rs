//! How the survivors of a failure agree on who they are.
//!
//! Everybody tells everybody else that it wants to go on ([`Question::Join`]); from what it hears back, or does not, it knows who
//! is there, who wants to go on, too, and who is gone. The lowest that is there and wants to decides, when it has heard of
//! everybody that he wants to go on or does not: that is the [`Decision`]. It tells the others, who keep asking it meanwhile.
//!
//! If the one who decides is lost, the next one does. It decides only when everybody who is left has told it that he has heard
//! of no decision; else it takes over that one. So two that count on each other never have different decisions. Who is not in
//! it learns that when it asks.

use std::time::{Duration, Instant};

use parking_lot::Condvar;

use super::bulletin::{Bulletin, Contact, Unheard, ask_all};
use super::message::{Answer, Question};
use crate::types::Rank;

/// Who goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Random: names the new communicator.
    pub(crate) nonce: u64,
    /// Their ranks in the communicator that failed, ascending.
    pub(crate) members: Vec<Rank>,
}

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the rank that failed may take to show that it wants to go on.
const GRACE: Duration = Duration::from_secs(1);

/// How long a rank that cannot be heard may be so.
const OUT_OF_REACH: Duration = Duration::from_secs(5);

/// How often the one who decides is asked, and those who have not joined yet.
const ASK_AGAIN: Duration = Duration::from_millis(5);
const CALL_AGAIN: Duration = Duration::from_millis(50);

/// What a rank knows of the agreement under way.
#[derive(Default)]
pub(super) struct Shrink {
    /// This rank is in [`agree`].
    shrinks: bool,
    /// The ranks that are known to be there, too.
    joined: Vec<Rank>,
    decision: Option<Decision>,
}

impl Shrink {
    pub(super) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    pub(super) fn join(&mut self, from: Rank, changed: &Condvar) -> Answer {
        if !self.joined.contains(&from) {
            self.joined.push(from);
            changed.notify_all();
        }
        Answer::Joins { shrinks: self.shrinks, decision: self.decision.clone() }
    }

    /// The first decision stays.
    pub(super) fn decide(&mut self, decision: Decision, changed: &Condvar) -> Answer {
        self.decision.get_or_insert(decision);
        changed.notify_all();
        Answer::Joins { shrinks: self.shrinks, decision: self.decision.clone() }
    }
}

/// What is known of a rank.
#[derive(Clone, Copy, PartialEq)]
enum View {
    /// Its door answers, but it has not come to [`agree`].
    Alive,
    /// It wants to go on.
    Joined,
    /// It cannot be heard, since then.
    Lost(Instant),
    /// It is gone, or too late.
    Out,
}

/// Agrees with the others. `culprits` are waited for less long than others that do not come, who have until the deadline.
pub(crate) fn agree(bulletin: &Bulletin, culprits: &[Rank], nonce: u64, deadline: Instant) -> Decision {
    let Some(contact) = bulletin.contact() else { return Decision { nonce, members: vec![bulletin.rank] } };
    let began = Instant::now();
    let me = bulletin.rank;
    bulletin.shrink.lock().shrinks = true;
    let mut views = vec![View::Alive; bulletin.world()];
    views[me] = View::Joined;
    // Everybody has to know of this rank; later on those are asked of whom it does not know enough.
    call(bulletin, &*contact, &bulletin.others(), &mut views);
    let mut called = Instant::now();
    loop {
        if let Some(decision) = &bulletin.shrink.lock().decision {
            return decision.clone();
        }
        if called.elapsed() >= CALL_AGAIN {
            let unclear: Vec<Rank> =
                (0..views.len()).filter(|&rank| matches!(views[rank], View::Alive | View::Lost(_))).collect();
            call(bulletin, &*contact, &unclear, &mut views);
            called = Instant::now();
        }
        for &rank in &bulletin.shrink.lock().joined {
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
            let decision = bulletin.shrink.lock().decision.get_or_insert(Decision { nonce, members }).clone();
            let others: Vec<Rank> = decision.members.iter().copied().filter(|&rank| rank != me).collect();
            // Who does not hear it asks.
            ask_all(&*contact, &others, &Question::Decided(decision.clone()), PATIENCE, |_, _| {});
            return decision;
        }
        if first != me {
            call(bulletin, &*contact, &[first], &mut views);
        }
        let mut state = bulletin.shrink.lock();
        if state.decision.is_none() {
            bulletin.changed.wait_for(&mut state, ASK_AGAIN);
        }
    }
}

/// Asks ranks whether they want to go on, and notes what they say.
fn call(bulletin: &Bulletin, contact: &dyn Contact, peers: &[Rank], views: &mut [View]) {
    let seen = parking_lot::Mutex::new(views);
    ask_all(contact, peers, &Question::Join, PATIENCE, |peer, heard| {
        let view = &mut seen.lock()[peer];
        *view = match (heard, *view) {
            (_, View::Out) => View::Out,
            (Ok(Answer::Joins { decision: Some(decision), .. }), _) => {
                bulletin.shrink.lock().decide(decision, &bulletin.changed);
                View::Joined
            }
            (Ok(Answer::Joins { shrinks: true, .. }), _) => View::Joined,
            (Ok(Answer::Joins { .. }), _) => View::Alive,
            // It has dropped the communicator, and gave up with it.
            (Ok(_) | Err(Unheard::Gone), _) => View::Out,
            (Err(_), View::Lost(since)) => View::Lost(since),
            (Err(_), _) => View::Lost(Instant::now()),
        };
    });
}
