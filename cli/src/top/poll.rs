//! Asks all ranks of a job at once, again and again, on threads of its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo::observer::{Observer, Peer, Silence, Snapshot};

use super::view::View;

/// How long a rank may take to answer. A rank that takes longer is shown as one that does not
/// answer, until it does. A look every half second and this time together are less than two seconds.
const PATIENCE: Duration = Duration::from_millis(900);

/// The most ranks that are asked at the same time.
const AT_ONCE: usize = 32;

/// What is known of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Its last answer, and when it came.
    pub(super) last: Option<(Instant, Arc<Snapshot>)>,
    /// The answer before that one.
    pub(super) before: Option<(Instant, Arc<Snapshot>)>,
    /// Why it did not answer the last time, if it did not, and since when.
    pub(super) silence: Option<(Instant, Silence)>,
}

/// What is known of all ranks.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) job: String,
    pub(super) run: String,
    pub(super) peers: Vec<Peer>,
    pub(super) ranks: Vec<Known>,
    /// How many times all ranks have been asked.
    pub(super) rounds: u64,
}

impl State {
    pub(super) fn new(job: &str, run: &str, peers: Vec<Peer>) -> State {
        let ranks = vec![Known::default(); peers.len()];
        State { job: job.to_owned(), run: run.to_owned(), peers, ranks, rounds: 0 }
    }

    /// Takes in the answer of a rank, or its silence.
    pub(super) fn hear(&mut self, rank: usize, now: Instant, answer: Result<Snapshot, Silence>) {
        let known = &mut self.ranks[rank];
        match answer {
            Ok(snapshot) => {
                known.silence = None;
                known.before = known.last.replace((now, Arc::new(snapshot)));
            }
            Err(silence) => {
                let since = known.silence.as_ref().map_or(now, |(since, _)| *since);
                known.silence = Some((since, silence));
            }
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// The ranks of a job, which are asked as long as the program runs.
pub(super) struct Poll(Arc<Shared>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Poll {
    /// Begins to ask all ranks, at this interval.
    pub(super) fn start(observer: Observer, interval: Duration) -> Poll {
        let state = State::new(observer.job(), &observer.run(), observer.peers());
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let poll = Poll(shared.clone());
        std::thread::spawn(move || {
            let ranks = observer.peers().len();
            loop {
                let began = Instant::now();
                let next = AtomicUsize::new(0);
                let ask = || {
                    while let Some(rank) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|rank| *rank < ranks) {
                        let answer = observer.ask(rank, Instant::now() + PATIENCE);
                        shared.lock().hear(rank, Instant::now(), answer);
                    }
                };
                std::thread::scope(|scope| {
                    (1..ranks.min(AT_ONCE)).for_each(|_| drop(scope.spawn(ask)));
                    ask();
                });
                shared.lock().rounds += 1;
                shared.changed.notify_all();
                std::thread::sleep(interval.saturating_sub(began.elapsed()));
            }
        });
        poll
    }

    /// Waits until all ranks have been asked as often as this.
    pub(super) fn wait_for_rounds(&self, rounds: u64) {
        let state = self.0.lock();
        drop(self.0.changed.wait_while(state, |state| state.rounds < rounds));
    }

    /// Returns what is to be shown now.
    pub(super) fn view(&self) -> View {
        let state = self.0.lock().clone();
        View::new(&state, Instant::now())
    }
}
