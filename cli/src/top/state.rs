//! What is known of the ranks of a job.

use std::sync::Arc;
use std::time::Instant;

use kolo::observer::{Peer, Silence, Snapshot};

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
