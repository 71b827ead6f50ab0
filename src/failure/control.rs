//! How a rank asks the others of its communicator, apart from its operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::message::{Query, Reply};
use crate::error::Cause;
use crate::types::Rank;

/// How a rank asks the others of its communicator.
pub(crate) trait ControlChannel: Send + Sync {
    /// Asks a rank, and waits for the answer for at most `patience`.
    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError>;

    /// Returns the ranks of this communicator that cannot answer, and why, as far as another communicator
    /// of this process knows.
    fn lost(&self) -> Vec<(Rank, Cause)> {
        Vec::new()
    }

    /// Whether a rank's process is known to be stopped.
    fn is_stopped(&self, _peer: Rank) -> bool {
        false
    }

    /// Whether a rank's process is known to have ended. The rank may have left before.
    fn has_ended(&self, _peer: Rank) -> bool {
        false
    }

    /// Whether a rank's process is known to have ended before the rank left or failed.
    fn was_killed(&self, _peer: Rank) -> bool {
        false
    }
}

/// What a rank has written about itself into memory that this process maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    TakesPart,
    Left { last_seq: u64 },
    Revoked,
}

/// Returns what a rank of the communicator has written; `None` if this process does not see it.
pub(crate) type ReadWritten = Box<dyn Fn(Rank) -> Option<Written> + Send + Sync>;

/// A channel to ranks some of which share memory with this one. What they have written there counts
/// where they do not answer, also after their processes have ended.
pub(super) struct BesideMemory {
    pub(super) inner: Arc<dyn ControlChannel>,
    pub(super) written: ReadWritten,
}

impl ControlChannel for BesideMemory {
    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError> {
        let error = match self.inner.ask(peer, query, patience) {
            Err(error) => error,
            answer => return answer,
        };
        match ((self.written)(peer), &error) {
            (Some(Written::Left { last_seq }), _) => Ok(Reply::Left { last_seq }),
            (Some(Written::Revoked), QueryError::Mute | QueryError::Unasked) => Err(QueryError::Revoked),
            _ => Err(error),
        }
    }

    fn lost(&self) -> Vec<(Rank, Cause)> {
        self.inner.lost()
    }

    fn is_stopped(&self, peer: Rank) -> bool {
        self.inner.is_stopped(peer)
    }

    fn has_ended(&self, peer: Rank) -> bool {
        self.inner.has_ended(peer)
    }

    fn was_killed(&self, peer: Rank) -> bool {
        // In this order: a rank that leaves writes so before its process ends.
        self.has_ended(peer) && (self.written)(peer) == Some(Written::TakesPart)
    }
}

/// Why a query has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryError {
    /// Its process has ended, or has dropped all its communicators.
    Gone,
    /// No connection could be made.
    Unreachable { address: String, kind: std::io::ErrorKind },
    /// Its process accepted the connection and sends nothing, or no valid answer.
    Mute,
    /// The operating system reports that its process has ended, even if a forked child holds its
    /// connections open.
    Died,
    /// This process has no file descriptor or no memory left for the query.
    Unasked,
    /// Its communicator has failed, and it does not say why.
    Revoked,
}

/// Asks several ranks at once, and calls `heard` with each answer.
pub(crate) fn ask_all(
    control: &dyn ControlChannel,
    peers: &[Rank],
    query: &Query,
    patience: Duration,
    heard: impl Fn(Rank, Result<Reply, QueryError>) + Sync,
) {
    /// The most queries in flight.
    const AT_ONCE: usize = 32;
    let next = AtomicUsize::new(0);
    let ask = || {
        while let Some(&peer) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            heard(peer, control.ask(peer, query, patience));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..peers.len().min(AT_ONCE) {
            // If no thread can start, this one sends the remaining queries.
            if std::thread::Builder::new().name("kolo-ask".to_owned()).spawn_scoped(scope, ask).is_err() {
                break;
            }
        }
        ask();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeouts::QUERY;

    /// Ranks that do not answer, for this reason. Their processes have ended.
    struct Silent(QueryError);

    impl ControlChannel for Silent {
        fn ask(&self, _: Rank, _: &Query, _: Duration) -> Result<Reply, QueryError> {
            Err(self.0.clone())
        }

        fn has_ended(&self, _: Rank) -> bool {
            true
        }
    }

    #[test]
    fn what_a_rank_has_written_counts_if_it_does_not_answer() {
        let unreachable = QueryError::Unreachable { address: String::new(), kind: std::io::ErrorKind::TimedOut };
        for error in [QueryError::Died, QueryError::Gone, QueryError::Mute, QueryError::Unasked, unreachable] {
            // The shrink after a failure tells a rank that has died from one that is slow.
            let is_slow = matches!(error, QueryError::Mute | QueryError::Unasked);
            let revoked = if is_slow { QueryError::Revoked } else { error.clone() };
            let cases = [
                (None, Err(error.clone()), false),
                (Some(Written::TakesPart), Err(error.clone()), true),
                (Some(Written::Left { last_seq: 7 }), Ok(Reply::Left { last_seq: 7 }), false),
                (Some(Written::Revoked), Err(revoked), false),
            ];
            for (written, answer, was_killed) in cases {
                let inner = Arc::new(Silent(error.clone()));
                let control = BesideMemory { inner, written: Box::new(move |_| written) };
                assert_eq!(control.ask(1, &Query::Doing(None), QUERY), answer);
                assert_eq!(control.was_killed(1), was_killed);
            }
        }
    }
}
