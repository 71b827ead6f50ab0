//! A host group of threads, for tests and fuzzing.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::{HOME, HostGroup, RegionExchange};
use crate::sys::{Process, Region};
use crate::types::Rank;

#[derive(Default)]
struct Registry(Mutex<HashMap<(Rank, u32), Arc<Region>>>);

struct Thread(Arc<Registry>, Rank);

impl RegionExchange for Thread {
    fn export(&self, id: u32, region: &Arc<Region>) {
        self.0.0.lock().insert((self.1, id), region.clone());
    }

    fn withdraw(&self, id: u32) {
        self.0.0.lock().remove(&(self.1, id));
    }

    fn fetch(&self, owner: Rank, id: u32, _: Instant) -> io::Result<Arc<Region>> {
        self.0.0.lock().get(&(owner, id)).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn process(&self, _: Rank) -> Option<Process> {
        None
    }
}

/// Returns the host group of each of `ranks` threads.
pub(crate) fn of_threads(ranks: usize) -> Vec<Arc<HostGroup>> {
    let (registry, home) = (Arc::<Registry>::default(), Arc::new(Region::heap(ranks * HOME)));
    let seen_from =
        |rank| Arc::new(HostGroup::new(rank, (0..ranks).collect(), home.clone(), Arc::new(Thread(registry.clone(), rank))));
    (0..ranks).map(seen_from).collect()
}
