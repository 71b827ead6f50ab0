//! What ranks tell each other beside their operations: who goes on after a failure.
//!
//! Every communicator has a [`Bulletin`] on each of its ranks. Peers ask it [`Question`]s at any time: the process's door answers
//! from there on its own thread, whatever the rank itself is busy with. So whoever does not answer is not there.

mod message;
pub(crate) mod shrink;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::types::Rank;
pub(crate) use message::{Answer, Question};
use shrink::Decision;

/// How a rank reaches the bulletins of the others of its communicator.
pub(crate) trait Contact: Send + Sync {
    /// Asks a rank. Takes at most `patience`.
    fn ask(&self, peer: Rank, question: &Question, patience: Duration) -> Result<Answer, Unheard>;
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unheard {
    /// Nobody is at home any more: its process has ended, or has dropped all its communicators.
    Gone,
    /// No connection could be made.
    Unreachable { address: String, kind: std::io::ErrorKind },
    /// Its process took the connection and says nothing, or what no kolo says.
    Mute,
}

/// What others may know of one rank's communicator.
pub(crate) struct Bulletin {
    /// This rank.
    pub(crate) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    members: Arc<[Rank]>,
    /// The last operation, when the rank has left.
    pub(crate) last_seq: AtomicU64,
    state: Mutex<State>,
    /// The state is another.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// This rank is in [`shrink::agree`].
    shrinks: bool,
    /// The ranks that are known to be there, too.
    joined: Vec<Rank>,
    decision: Option<Decision>,
}

impl Bulletin {
    pub(crate) fn new(rank: Rank, members: Arc<[Rank]>) -> Bulletin {
        Bulletin { rank, members, last_seq: AtomicU64::new(0), state: Mutex::default(), changed: Condvar::new() }
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    /// What to say to a rank that asks.
    fn answer(&self, from: Rank, question: Question) -> Answer {
        match question {
            Question::Join => self.state.lock().join(from, &self.changed),
            Question::Decided(decision) => self.state.lock().decide(decision, &self.changed),
        }
    }
}

/// The bulletins of a process, by communicator and rank in the job.
#[derive(Default)]
pub(crate) struct Boards(Mutex<Posted>);

#[derive(Default)]
struct Posted {
    bulletins: HashMap<(u64, Rank), Arc<Bulletin>>,
    /// Those that were taken down: with the last operation that was completed there.
    taken_down: VecDeque<((u64, Rank), u64)>,
}

/// How many communicators that are gone are remembered.
const REMEMBERED: usize = 256;

impl Boards {
    pub(crate) fn post(&self, channel: u64, member: Rank, bulletin: Arc<Bulletin>) {
        self.0.lock().bulletins.insert((channel, member), bulletin);
    }

    pub(crate) fn take_down(&self, channel: u64, member: Rank) {
        let mut posted = self.0.lock();
        if let Some(bulletin) = posted.bulletins.remove(&(channel, member)) {
            let last_seq = bulletin.last_seq.load(Ordering::Relaxed);
            posted.taken_down.truncate(REMEMBERED - 1);
            posted.taken_down.push_front(((channel, member), last_seq));
        }
    }

    /// Answers a question of `from` to `to`, both ranks of the job.
    pub(crate) fn answer(&self, channel: u64, from: Rank, to: Rank, question: Question) -> Answer {
        let bulletin = {
            let posted = self.0.lock();
            match posted.bulletins.get(&(channel, to)) {
                Some(bulletin) => bulletin.clone(),
                None => {
                    let left = posted.taken_down.iter().find(|(name, _)| *name == (channel, to));
                    return left.map_or(Answer::Unknown, |&(_, last_seq)| Answer::Left { last_seq });
                }
            }
        };
        match bulletin.members.iter().position(|&member| member == from) {
            Some(from) => bulletin.answer(from, question),
            None => Answer::Unknown,
        }
    }
}

/// Asks several ranks at once, and calls `heard` with what each of them says.
pub(crate) fn ask_all(
    contact: &dyn Contact,
    peers: &[Rank],
    question: &Question,
    patience: Duration,
    heard: impl Fn(Rank, Result<Answer, Unheard>) + Sync,
) {
    /// As many wait at once.
    const AT_ONCE: usize = 32;
    let next = AtomicUsize::new(0);
    let ask = || {
        while let Some(&peer) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            heard(peer, contact.ask(peer, question, patience));
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
