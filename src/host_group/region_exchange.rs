//! How the processes of a host map each other's regions of memory.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::sys::{Process, Region};
use crate::types::Rank;

/// Exports regions to the other ranks of this host, and maps theirs. Ranks are those of the job.
pub(crate) trait RegionExchange: Send + Sync {
    /// Lets the other ranks of this host fetch a region of this rank.
    fn export(&self, id: u32, region: &Arc<Region>);

    /// Ends [`RegionExchange::export`]. Ranks that have fetched the region keep it.
    fn withdraw(&self, id: u32);

    /// Maps a region that another rank of this host exports. Fails with `TimedOut` at the deadline.
    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Region>>;

    /// Returns the process of a rank, if this process can watch it.
    fn process(&self, rank: Rank) -> Option<Process>;
}
