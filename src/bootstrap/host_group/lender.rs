//! How the processes of a host map each other's segments.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::sys::Segment;
use crate::types::Rank;

/// Lends segments to the other ranks of this host, and maps theirs. Ranks are those of the job.
pub(crate) trait Lender: Send + Sync {
    /// Lets the other ranks of this host fetch a segment of this rank.
    fn lend(&self, id: u32, segment: &Arc<Segment>);

    /// Ends [`Lender::lend`]. Ranks that have fetched the segment keep it.
    fn withdraw(&self, id: u32);

    /// Maps a segment that another rank of this host lends. Fails with `TimedOut` at the deadline.
    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Segment>>;

    /// Returns the process of a rank, if this process can watch it.
    fn process(&self, rank: Rank) -> Option<u32>;
}
