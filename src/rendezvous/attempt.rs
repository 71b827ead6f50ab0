//! The starts of this process. A store may still hold the values of a start that has ended, and a
//! rank that starts again must not take them for those of another process.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::network::identity::Run;
use crate::rendezvous::key_exchange::KeyPair;
use crate::rendezvous::start::Start;
use crate::types::Rank;

/// The most attempts that a process remembers. A rank that starts again meets one of its last.
const MOST: usize = 1024;

static ATTEMPTS: Mutex<Attempts> = Mutex::new(Attempts { last: 0, known: VecDeque::new() });

struct Attempts {
    /// The number of the last attempt.
    last: u64,
    /// The oldest first.
    known: VecDeque<Known>,
}

/// What a process remembers of an attempt.
struct Known {
    number: u64,
    /// A forked child inherits the attempts of its parent.
    pid: u32,
    store: String,
    run: Run,
    rank: Rank,
    /// The keys, until the rank has published its peer info.
    keys: Option<KeyPair>,
    has_ended: bool,
}

impl Attempts {
    fn of_rank(&mut self, start: &Start<'_>) -> impl Iterator<Item = &mut Known> {
        let (pid, rank) = (std::process::id(), start.rank);
        self.known.iter_mut().filter(move |known| known.pid == pid && known.rank == rank)
    }
}

/// An attempt of this process to join a run as one rank. It ends when this is dropped.
pub(super) struct Attempt {
    number: u64,
    pub(super) keys: KeyPair,
}

impl Attempt {
    /// Begins an attempt. It continues one that has ended before this process published its peer
    /// info, because rank 0 may have answered the keys of that one.
    ///
    /// Returns `None` if this process has been in the run as this rank: rank 0 will announce another
    /// run.
    pub(super) fn begin(start: &Start<'_>, run: Run) -> Option<Attempt> {
        let mut attempts = ATTEMPTS.lock();
        let former = attempts.of_rank(start).find(|known| known.run == run && known.has_ended);
        if let Some(former) = former {
            let keys = former.keys.clone()?;
            former.has_ended = false;
            return Some(Attempt { number: former.number, keys });
        }
        attempts.last += 1;
        let (number, keys) = (attempts.last, KeyPair::random());
        let (pid, store) = (std::process::id(), start.store.url());
        let known = Known { number, pid, store, run, rank: start.rank, keys: Some(keys.clone()), has_ended: false };
        attempts.known.push_back(known);
        if attempts.known.len() > MOST {
            attempts.known.pop_front();
        }
        Some(Attempt { number, keys })
    }

    /// Notes that this process publishes its peer info.
    pub(super) fn publishes(&self) {
        self.change(|known| known.keys = None);
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        if let Some(known) = ATTEMPTS.lock().known.iter_mut().find(|known| known.number == self.number) {
            change(known);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.change(|known| known.has_ended = true);
    }
}

/// Returns whether this process has been the rank before, with the same store. That store may be
/// about to close.
pub(super) fn comes_again(start: &Start<'_>) -> bool {
    let store = start.store.url();
    ATTEMPTS.lock().of_rank(start).any(|known| known.store == store && known.has_ended)
}
