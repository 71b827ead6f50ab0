//! How ranks that are threads of one process reach each other.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Cause;
use crate::failure::{ControlChannel, Query, QueryError, Reply, StatusBoard};
use crate::host_group::RegionExchange;
use crate::sys::{Process, Region};
use crate::transport::memory::Hub;
use crate::types::Rank;

/// Answers queries from the status board that all threads share.
pub(super) struct ProcessControl {
    pub(super) board: Arc<StatusBoard>,
    pub(super) comm_id: u64,
    pub(super) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    pub(super) members: Arc<[Rank]>,
}

impl ControlChannel for ProcessControl {
    fn ask(&self, peer: Rank, query: &Query, _: Duration) -> Result<Reply, QueryError> {
        Ok(self.board.answer(self.comm_id, self.members[self.rank], self.members[peer], query.clone()))
    }

    fn lost(&self) -> Vec<(Rank, Cause)> {
        self.board.lost(self.members[self.rank], &self.members)
    }
}

/// Exports regions between threads.
pub(super) struct ProcessRegions {
    pub(super) hub: Arc<Hub>,
    /// This rank in the job.
    pub(super) rank: Rank,
}

impl RegionExchange for ProcessRegions {
    fn export(&self, id: u32, region: &Arc<Region>) {
        self.hub.export((self.rank, id), region.clone());
    }

    fn withdraw(&self, id: u32) {
        self.hub.withdraw((self.rank, id));
    }

    fn fetch(&self, owner: Rank, id: u32, _: Instant) -> io::Result<Arc<Region>> {
        self.hub.exported((owner, id)).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn process(&self, _: Rank) -> Option<Process> {
        None
    }
}
