//! The [`HostGroup`] of a process.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::area::{AREA, Area, Offer, Slabs};
use super::region_exchange::RegionExchange;
use super::stage::{FIRST, HOME, Holder, KEPT, STAGE, Stage, Stages};
use crate::sys::{Process, ProcessWatch, Region};
use crate::types::Rank;

/// With more ranks, the pages of their stages are mapped when they are touched, each with its neighbours: all
/// at once they would be mapped as often as there are pairs of ranks, and most are never read.
const POPULATED: usize = 8;

/// Asks whether a stage's last readers have finished.
pub(crate) type Readers = Box<dyn Fn(&HostGroup) -> bool + Send>;

/// The ranks of one host, seen from one of them. Ranks are those of the job.
pub(crate) struct HostGroup {
    rank: Rank,
    /// The id of this process. A forked child cannot use its parent's communicators.
    process: u32,
    members: Vec<Rank>,
    /// The first region, with [`HOME`] bytes for each member. It stays open, because stages extend
    /// it.
    home: Arc<Region>,
    exchange: Arc<dyn RegionExchange>,
    /// Regions of other ranks, by owner and number.
    fetched: Mutex<HashMap<(Rank, u32), Arc<Region>>>,
    slabs: Mutex<Slabs>,
    stages: Mutex<Stages<Readers>>,
    /// Stages of other ranks, by owner and number.
    mapped: Mutex<HashMap<(Rank, u32), Arc<Region>>>,
    watches: Mutex<HashMap<Process, Arc<Watch>>>,
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
    /// Makes the host group of `members`, which share `home`. This rank has reserved its part of
    /// it.
    pub(crate) fn new(rank: Rank, members: Vec<Rank>, home: Arc<Region>, exchange: Arc<dyn RegionExchange>) -> HostGroup {
        assert!(home.len() >= members.len() * HOME);
        let index = members.iter().position(|&member| member == rank).expect("the rank is a member of its host group");
        let stages = Mutex::new(Stages::new(&home, index));
        HostGroup {
            rank,
            process: std::process::id(),
            members,
            home,
            exchange,
            fetched: Mutex::default(),
            slabs: Mutex::default(),
            stages,
            mapped: Mutex::default(),
            watches: Mutex::default(),
            tuning: Mutex::default(),
        }
    }

    /// Returns a rank's number among the members.
    fn index_of(&self, rank: Rank) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Creates memory for the ranks of this host.
    pub(crate) fn create(&self, len: usize) -> io::Result<Arc<Region>> {
        Region::create_like(&self.home, len).map(Arc::new)
    }

    /// Lets the other ranks of this host fetch a region; returns its number.
    pub(crate) fn export(&self, region: &Arc<Region>) -> u32 {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        self.exchange.export(id, region);
        id
    }

    pub(crate) fn withdraw(&self, id: u32) {
        self.exchange.withdraw(id);
    }

    /// Maps a region of another rank for the caller alone.
    pub(crate) fn fetch_once(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Region>> {
        self.exchange.fetch(owner, id, deadline)
    }

    /// Maps a region of another rank. It stays mapped as long as this host group lives.
    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Region>> {
        if let Some(region) = self.fetched.lock().get(&(owner, id)) {
            return Ok(region.clone());
        }
        let region = self.exchange.fetch(owner, id, deadline)?;
        // If two threads fetch the region at the same time, both get the mapping that is kept.
        Ok(self.fetched.lock().entry((owner, id)).or_insert(region).clone())
    }

    /// Returns whether the process of a rank is known to have ended.
    pub(crate) fn has_ended(&self, rank: Rank) -> bool {
        self.exchange.process(rank).is_some_and(|process| self.process_has_ended(process))
    }

    /// Returns whether a process of this host has ended. All communicators share one descriptor for
    /// each process.
    pub(crate) fn process_has_ended(&self, process: Process) -> bool {
        if process.id == self.process {
            return false;
        }
        let watch = self.watches.lock().entry(process).or_insert_with(|| Arc::new(Watch::open(process))).clone();
        match &*watch {
            Watch::Open(watch) => watch.has_ended(),
            Watch::Ended => true,
            Watch::Blind => false,
        }
    }

    /// Returns what these ranks have measured together, if this process knows it.
    pub(crate) fn tuning(&self, ranks: &[Rank]) -> Option<u64> {
        self.tuning.lock().get(ranks).copied()
    }

    pub(crate) fn set_tuning(&self, ranks: &[Rank], tuning: u64) {
        self.tuning.lock().insert(ranks.into(), tuning);
    }
}

/// Areas.
impl HostGroup {
    /// Sets parts for `ranks` aside in a slab of this process, until [`HostGroup::confirm`].
    /// Returns [`Offer::NONE`] if there is no memory.
    pub(crate) fn offer(&self, ranks: usize) -> Offer {
        let mut slabs = self.slabs.lock();
        slabs.reclaim(|member| member != self.rank && self.has_ended(member));
        slabs.offer(ranks, |len| match Region::create_like(&self.home, len) {
            Ok(region) => {
                let region = Arc::new(region);
                Some((self.export(&region), region))
            }
            Err(error) => {
                crate::log::warn!(%error, bytes = len, "cannot create shared memory for communicators");
                None
            }
        })
    }

    /// Ends an offer of parts for `ranks`: they become an area of these ranks of the job, or are
    /// free if there are none.
    pub(crate) fn confirm(&self, offer: Offer, ranks: usize, members: &[Rank]) {
        self.slabs.lock().confirm(offer, ranks, members);
    }

    /// Returns the area that `owner` offers, and reserves this rank's part of it.
    pub(crate) fn accept(&self, owner: Rank, offer: Offer, rank: usize, ranks: usize, until: Instant) -> io::Result<Area> {
        let region = match owner == self.rank {
            true => self.slabs.lock().region(offer.slab).ok_or(io::ErrorKind::NotFound)?,
            false => self.fetch(owner, offer.slab, until)?,
        };
        let base = offer.first as usize * AREA;
        // The offer comes from a peer, and is untrusted.
        if ranks.checked_mul(AREA).and_then(|len| len.checked_add(base)).is_none_or(|end| end > region.len()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        region.reserve(base + rank * AREA..base + (rank + 1) * AREA)?;
        Ok(Area::within(region, base, AREA, rank, ranks))
    }
}

/// Stages.
impl HostGroup {
    /// Takes a stage for a communicator, which gives it up when `holder` is asked. Makes another
    /// stage if there are few, or if all are in use and `more` says so. Returns `None` if all are
    /// in use.
    pub(crate) fn take_stage(&self, holder: &Weak<dyn Holder>, more: bool) -> io::Result<Option<Stage>> {
        // Dropped after the lock: the last owner of a communicator parks its stage.
        let mut asked = Vec::new();
        let mut stages = self.stages.lock();
        let taken = self.find_stage(&mut stages, &mut asked, more);
        if let Ok(Some(_)) = taken {
            stages.held_by(holder);
        }
        drop(stages);
        taken
    }

    fn find_stage(
        &self,
        stages: &mut Stages<Readers>,
        asked: &mut Vec<Arc<dyn Holder>>,
        more: bool,
    ) -> io::Result<Option<Stage>> {
        if let Some(stage) = stages.take_free(|readers| readers(self)) {
            return Ok(Some(stage));
        }
        if stages.count() < KEPT
            && let Ok(stage) = self.new_stage(stages)
        {
            return Ok(Some(stage));
        }
        match stages.take_from_holder(asked) {
            Some(stage) => Ok(Some(stage)),
            None if more => self.new_stage(stages).map(Some),
            None => Ok(None),
        }
    }

    fn new_stage(&self, stages: &mut Stages<Readers>) -> io::Result<Stage> {
        let stage = stages.add(|id| self.home.extend(self.extension(self.rank, id).ok_or(io::ErrorKind::OutOfMemory)?))?;
        crate::log::debug!(rank = self.rank, stages = stages.count(), "added a stage");
        Ok(stage)
    }

    /// Takes a stage back from a communicator that ends. The stage is used again when its readers
    /// have finished.
    pub(crate) fn park_stage(&self, stage: Stage, readers: Readers) {
        self.stages.lock().park(stage, readers);
    }

    /// Returns the address of a peer's stage, which stays valid as long as this host group lives.
    /// The peer may have left.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no stage of this number.
    pub(crate) fn stage_of(&self, owner: Rank, id: u32) -> io::Result<*mut u8> {
        let index = self.index_of(owner).ok_or(io::ErrorKind::NotFound)?;
        let offset = if id == FIRST { index * HOME + AREA } else { 0 };
        let mut mapped = self.mapped.lock();
        if let Some(region) = mapped.get(&(owner, id)) {
            return Ok(region.at(offset));
        }
        let region = match id {
            FIRST => self.home.clone(),
            _ => self.home.extension(self.extension(owner, id).ok_or(io::ErrorKind::NotFound)?)?,
        };
        if self.members.len() <= POPULATED {
            region.populate(offset..offset + STAGE);
        }
        Ok(mapped.entry((owner, id)).or_insert(region).at(offset))
    }

    /// Returns where behind the first region a stage lies. The number may come from a peer; `None`
    /// if no stage has it.
    fn extension(&self, owner: Rank, id: u32) -> Option<Range<usize>> {
        let number = usize::try_from(id.checked_sub(FIRST + 1)?).ok()?;
        let before = number.checked_mul(self.members.len())?.checked_add(self.index_of(owner)?)?;
        // Pages may be larger than an area.
        let start = self.home.len().next_multiple_of(STAGE).checked_add(before.checked_mul(STAGE)?)?;
        Some(start..start.checked_add(STAGE)?)
    }

    /// Returns how many stages this process has.
    #[cfg(test)]
    pub(crate) fn stages(&self) -> usize {
        self.stages.lock().count()
    }
}

impl Watch {
    fn open(process: Process) -> Watch {
        match ProcessWatch::open(process) {
            Ok(Some(watch)) => Watch::Open(watch),
            Ok(None) => Watch::Ended,
            Err(error) => {
                crate::log::debug!(%error, process = process.id, "cannot watch a process of this host");
                Watch::Blind
            }
        }
    }
}
