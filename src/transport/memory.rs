//! Links between ranks of one process: rings on the heap.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use mio::{Registry, Token};
use parking_lot::Mutex;

use super::ring;
use super::ring_link::{PeerWaker, RingLink};
use super::{Link, NoLink, Opener};
use crate::config::CopyMode;
use crate::sys::{Region, Waker};
use crate::types::Rank;

/// Bytes of one ring.
const CAPACITY: usize = 256 << 10;

/// Where the ranks of one process find each other's links and memory.
pub(crate) struct Hub {
    /// Bytes of one ring.
    capacity: usize,
    /// Regions for which not all users have come, by name, with the number of users still to come.
    regions: Mutex<HashMap<Name, (Arc<Region>, usize)>>,
    wakers: Mutex<HashMap<(u64, Rank), Arc<Waker>>>,
    /// Regions that ranks export each other, by owner and number.
    exported: Mutex<HashMap<(Rank, u32), Arc<Region>>>,
}

/// The comm id of a communicator, and the two ranks of a link in it. A pair with an impossible rank
/// names other memory.
type Name = (u64, [u64; 2]);

impl Default for Hub {
    fn default() -> Hub {
        Hub { capacity: CAPACITY, regions: Mutex::default(), wakers: Mutex::default(), exported: Mutex::default() }
    }
}

impl Hub {
    /// Makes a hub with rings of `capacity` bytes, so that a test soon reaches their end.
    #[cfg(test)]
    pub(crate) fn with_rings(capacity: usize) -> Hub {
        Hub { capacity, ..Hub::default() }
    }

    /// Returns memory of `len` bytes that `users` ranks share under a name.
    pub(crate) fn region(&self, name: Name, len: usize, users: usize) -> Arc<Region> {
        let mut regions = self.regions.lock();
        let entry = regions.entry(name).or_insert_with(|| (Arc::new(Region::heap(len)), users));
        entry.1 -= 1;
        let (region, left) = (entry.0.clone(), entry.1);
        if left == 0 {
            regions.remove(&name);
        }
        region
    }

    pub(crate) fn export(&self, name: (Rank, u32), region: Arc<Region>) {
        self.exported.lock().insert(name, region);
    }

    pub(crate) fn withdraw(&self, name: (Rank, u32)) {
        self.exported.lock().remove(&name);
    }

    pub(crate) fn exported(&self, name: (Rank, u32)) -> Option<Arc<Region>> {
        self.exported.lock().get(&name).cloned()
    }

    fn wake(&self, comm_id: u64, rank: Rank) {
        // A rank without a waker has never slept.
        if let Some(Err(error)) = self.wakers.lock().get(&(comm_id, rank)).map(|waker| waker.wake()) {
            crate::log::warn!(%error, "cannot wake a rank of this process");
        }
    }
}

/// Opens links between ranks of one process.
pub(crate) struct MemoryOpener {
    pub(crate) hub: Arc<Hub>,
    /// The number of the communicator in the process.
    pub(crate) comm_id: u64,
    pub(crate) rank: Rank,
    pub(crate) copy_mode: CopyMode,
}

impl MemoryOpener {
    pub(crate) fn link(&self, peer: Rank) -> Box<dyn Link> {
        let (low, high) = (self.rank.min(peer), self.rank.max(peer));
        let region = self.hub.region((self.comm_id, [low as u64, high as u64]), ring::pair_size(self.hub.capacity), 2);
        let waker = Peer { hub: self.hub.clone(), comm_id: self.comm_id, peer };
        Box::new(RingLink::new(region, usize::from(self.rank > peer), self.copy_mode, waker))
    }
}

impl Opener for MemoryOpener {
    fn open(&mut self, peer: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        Ok(Some(self.link(peer)))
    }

    fn delivers_at_once(&self) -> bool {
        true
    }

    fn attach(&mut self, waker: Arc<Waker>) {
        self.hub.wakers.lock().insert((self.comm_id, self.rank), waker);
    }
}

impl Drop for MemoryOpener {
    fn drop(&mut self) {
        self.hub.wakers.lock().remove(&(self.comm_id, self.rank));
    }
}

/// Wakes a rank of this process.
struct Peer {
    hub: Arc<Hub>,
    comm_id: u64,
    peer: Rank,
}

impl PeerWaker for Peer {
    fn wake(&mut self) {
        self.hub.wake(self.comm_id, self.peer);
    }

    fn kind(&self) -> &'static str {
        "memory"
    }

    fn drain(&mut self) {}

    fn is_gone(&self) -> bool {
        false
    }

    fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        // The peer wakes this rank's mesh through the hub.
        Ok(())
    }
}
