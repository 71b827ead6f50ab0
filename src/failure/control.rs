//! How a rank asks the others of its communicator, beside its operations.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::message::{Query, Reply};
use crate::types::Rank;

/// How long one rank may take to answer a query.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);

/// How a rank asks the others of its communicator.
pub(crate) trait ControlChannel: Send + Sync {
    /// Asks a rank. Takes at most `patience`.
    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError>;

    /// Whether a rank's process is known to be stopped.
    fn is_stopped(&self, _peer: Rank) -> bool {
        false
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryError {
    /// Nobody is at home any more: its process has ended, or has dropped all its communicators.
    Gone,
    /// No connection could be made.
    Unreachable { address: String, kind: std::io::ErrorKind },
    /// Its process took the connection and says nothing, or what no kolo says.
    Mute,
    /// Its process has ended, as the system says: even if one that it forked holds its connections open.
    Died,
    /// This process cannot ask: it has no descriptor or no memory left.
    Unasked,
}

/// Asks several ranks at once, and calls `heard` with what each of them says.
pub(crate) fn ask_all(
    control: &dyn ControlChannel,
    peers: &[Rank],
    query: &Query,
    patience: Duration,
    heard: impl Fn(Rank, Result<Reply, QueryError>) + Sync,
) {
    /// As many wait at once.
    const AT_ONCE: usize = 32;
    let next = AtomicUsize::new(0);
    let ask = || {
        while let Some(&peer) = peers.get(next.fetch_add(1, Ordering::Relaxed)) {
            heard(peer, control.ask(peer, query, patience));
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
