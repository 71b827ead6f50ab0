//! What a process shares with the other ranks of its host: one object for each process and job, which all communicators use.
//!
//! - [`area`]: the flag lines of each communicator, cut from few segments.
//! - [`stage`]: the memory through which large data passes, which communicators take turns to use.
//! - Watches over the other processes, and what the ranks have measured.
//!
//! So descriptors grow with the ranks of the host, and memory with the operations in flight; a further communicator costs
//! [`area::AREA`] bytes a rank.

pub(crate) mod area;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
pub(crate) mod stage;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::sys::{ProcessWatch, Segment};
use crate::types::Rank;
use area::{AREA, Slabs};
use stage::{STAGE, Stages};

/// Bytes that each rank has in the first segment of a host: an area for the communicator of all ranks, and a first stage.
pub(crate) const HOME: usize = AREA + STAGE;

/// How the processes of a host reach each other's segments.
pub(crate) trait Lender: Send + Sync {
    /// Lets the other ranks of this host fetch a segment of this rank.
    fn lend(&self, id: u32, segment: &Arc<Segment>);

    /// Ends [`Lender::lend`]. Ranks that have fetched the segment keep it.
    fn withdraw(&self, id: u32);

    /// Maps a segment that another rank of this host lends. Fails with `TimedOut` at the deadline.
    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Segment>>;

    /// The process of a rank, if this one can watch it.
    fn process(&self, rank: Rank) -> Option<u32>;
}

/// The ranks of one host, seen from one of them.
pub(crate) struct HostGroup {
    /// This rank. Ranks are those of the job.
    rank: Rank,
    members: Vec<Rank>,
    /// The first segment, with [`HOME`] bytes for each member. It stays open, for [`stage`] extends it.
    home: Arc<Segment>,
    lender: Arc<dyn Lender>,
    /// Segments of other ranks, by owner and number.
    fetched: Mutex<HashMap<(Rank, u32), Arc<Segment>>>,
    slabs: Mutex<Slabs>,
    stages: Mutex<Stages>,
    /// Stages of other ranks, by owner and number.
    mapped: Mutex<HashMap<(Rank, u32), Arc<Segment>>>,
    watches: Mutex<HashMap<u32, Arc<Watch>>>,
    /// What ranks have measured together, encoded by the module that measures.
    tuning: Mutex<HashMap<Box<[Rank]>, u64>>,
}

/// A watch over a process.
enum Watch {
    Open(ProcessWatch),
    /// The process had ended before it could be watched.
    Ended,
    /// The system does not let this process watch it.
    Blind,
}

impl HostGroup {
    /// `members` share `home`, of which this rank has reserved its part.
    pub(crate) fn new(rank: Rank, members: Vec<Rank>, home: Arc<Segment>, lender: Arc<dyn Lender>) -> HostGroup {
        assert!(home.len() >= members.len() * HOME);
        let place = members.iter().position(|&member| member == rank).expect("a rank is a member of its host");
        let stages = Mutex::new(Stages::new(&home, place));
        HostGroup {
            rank,
            members,
            home,
            lender,
            fetched: Mutex::default(),
            slabs: Mutex::default(),
            stages,
            mapped: Mutex::default(),
            watches: Mutex::default(),
            tuning: Mutex::default(),
        }
    }

    /// A rank's number among those of the host.
    fn place_of(&self, rank: Rank) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Memory for the ranks of this host.
    pub(crate) fn create(&self, len: usize) -> io::Result<Arc<Segment>> {
        Segment::create_like(&self.home, len).map(Arc::new)
    }

    /// Lets the other ranks of this host fetch a segment; returns its number.
    pub(crate) fn lend(&self, segment: &Arc<Segment>) -> u32 {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        self.lender.lend(id, segment);
        id
    }

    pub(crate) fn withdraw(&self, id: u32) {
        self.lender.withdraw(id);
    }

    /// A segment of another rank that this process has not mapped yet, and does not keep mapped.
    pub(crate) fn fetch_once(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Segment>> {
        self.lender.fetch(owner, id, deadline)
    }

    /// A segment of another rank. It stays mapped as long as this process takes part in the job.
    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Segment>> {
        if let Some(segment) = self.fetched.lock().get(&(owner, id)) {
            return Ok(segment.clone());
        }
        let segment = self.lender.fetch(owner, id, deadline)?;
        // Of two threads that fetch it at the same time, both get the mapping that is kept.
        Ok(self.fetched.lock().entry((owner, id)).or_insert(segment).clone())
    }

    /// Whether the process of a rank has ended, as far as this one can see.
    pub(crate) fn has_ended(&self, rank: Rank) -> bool {
        self.lender.process(rank).is_some_and(|process| self.process_has_ended(process))
    }

    /// Whether a process of this host has ended. All communicators share one descriptor for each process.
    pub(crate) fn process_has_ended(&self, process: u32) -> bool {
        if process == std::process::id() {
            return false;
        }
        let watch = self.watches.lock().entry(process).or_insert_with(|| Arc::new(Watch::open(process))).clone();
        match &*watch {
            Watch::Open(watch) => watch.has_ended(),
            Watch::Ended => true,
            Watch::Blind => false,
        }
    }

    /// What these ranks have measured together, as far as this one knows.
    pub(crate) fn tuning(&self, ranks: &[Rank]) -> Option<u64> {
        self.tuning.lock().get(ranks).copied()
    }

    pub(crate) fn set_tuning(&self, ranks: &[Rank], tuning: u64) {
        self.tuning.lock().insert(ranks.into(), tuning);
    }
}

impl Watch {
    fn open(process: u32) -> Watch {
        match ProcessWatch::open(process) {
            Ok(Some(watch)) => Watch::Open(watch),
            Ok(None) => Watch::Ended,
            Err(error) => {
                tracing::debug!(%error, process, "a process cannot be watched");
                Watch::Blind
            }
        }
    }
}
