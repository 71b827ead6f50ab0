//! Asks all ranks of a job at once, again and again, on threads of its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kolo::observer::Observer;

use super::state::State;

/// How long a rank may take to answer. A rank that takes longer is shown as one that does not
/// answer, until it does. A look every half second and this time together are less than two seconds.
const PATIENCE: Duration = Duration::from_millis(900);

/// The most ranks that are asked at the same time.
const AT_ONCE: usize = 32;

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

    /// Returns what is known now.
    pub(super) fn state(&self) -> State {
        self.0.lock().clone()
    }
}
