//! Stages: the memory through which large data passes from rank to rank.
//!
//! Every process has some stages. Only its own ranks write them; the other processes of the host map and read them. All lie in one
//! file, which every process of the host has open: so a process can also map a stage whose owner has left. A communicator that
//! stages data takes a stage, names it in its area, and keeps it for its next operation until another communicator of the process
//! needs one. So there are as many as the process has operations in flight, and a few more.
//!
//! A stage changes hands only when every reader has finished with what was staged last, has left the communicator, or has
//! ended: a peer that is stopped in the middle of reading keeps it.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::{AREA, HOME, HostGroup};
use crate::sys::Segment;
use crate::types::Rank;

/// Bytes of a stage.
pub(crate) const STAGE: usize = 1 << 20;

/// The number of a rank's first stage, which lies in the first segment of its host. The others extend that segment.
pub(crate) const FIRST: u32 = 1;

/// A process whose limit on the size of files leaves no room for so many stages of each rank shares no memory: with few stages,
/// communicators would wait for each other.
const ROOM: usize = 2 * KEPT;

/// Bytes that the memory file of a host must be able to grow to.
pub(crate) const fn room(ranks: usize) -> usize {
    ranks * (AREA + ROOM * STAGE)
}

/// So many stages are made before any changes hands: most programs alternate between a few communicators.
pub(crate) const KEPT: usize = 4;

/// Memory of this process in which one communicator at a time stages data.
pub(crate) struct Stage {
    /// Its number among those of the process.
    pub(crate) id: u32,
    pub(super) segment: Arc<Segment>,
    pub(super) offset: usize,
}

impl Stage {
    pub(crate) fn base(&self) -> *mut u8 {
        self.segment.at(self.offset)
    }
}

/// A communicator that holds a stage.
pub(crate) trait Holder: Send + Sync {
    /// Gives the stage up, unless an operation is in flight or a peer may still read there.
    fn give_up(&self) -> Option<Stage>;
}

/// Asks whether a stage's last readers have finished.
pub(crate) type Readers = Box<dyn Fn(&HostGroup) -> bool + Send>;

/// The stages of a process that are not held, and the holders of the others.
pub(super) struct Stages {
    free: Vec<Stage>,
    /// Of communicators that were dropped before their peers had read everything.
    parked: Vec<(Stage, Readers)>,
    holders: Vec<Weak<dyn Holder>>,
    /// How many there are.
    count: usize,
}

impl Stages {
    /// The first stage of the member of the host at `place`.
    pub(super) fn new(home: &Arc<Segment>, place: usize) -> Stages {
        let first = Stage { id: FIRST, segment: home.clone(), offset: place * HOME + AREA };
        Stages { free: vec![first], parked: Vec::new(), holders: Vec::new(), count: 1 }
    }
}

impl HostGroup {
    /// A stage for a communicator, which gives it up when `holder` is asked; none if all are in use. Makes one more if there are
    /// few, or if `more` says so.
    pub(crate) fn take_stage(&self, holder: &Weak<dyn Holder>, more: bool) -> io::Result<Option<Stage>> {
        // Dropped after the lock: the last to know a communicator parks its stage.
        let mut asked = Vec::new();
        let mut stages = self.stages.lock();
        let taken = self.find_stage(&mut stages, &mut asked, more);
        if let Ok(Some(_)) = taken {
            stages.holders.retain(|other| other.strong_count() > 0);
            stages.holders.push(holder.clone());
        }
        drop(stages);
        taken
    }

    fn find_stage(&self, stages: &mut Stages, asked: &mut Vec<Arc<dyn Holder>>, more: bool) -> io::Result<Option<Stage>> {
        let (done, parked) = std::mem::take(&mut stages.parked).into_iter().partition(|(_, readers)| readers(self));
        let done: Vec<(Stage, Readers)> = done;
        stages.parked = parked;
        stages.free.extend(done.into_iter().map(|(stage, _)| stage));
        if let Some(stage) = stages.free.pop() {
            return Ok(Some(stage));
        }
        if stages.count < KEPT
            && let Ok(stage) = self.new_stage(stages)
        {
            return Ok(Some(stage));
        }
        // Those that took theirs first are asked first.
        for at in 0..stages.holders.len() {
            let Some(holder) = stages.holders[at].upgrade() else { continue };
            let given_up = holder.give_up();
            asked.push(holder);
            if given_up.is_some() {
                stages.holders.remove(at);
                return Ok(given_up);
            }
        }
        if more { self.new_stage(stages).map(Some) } else { Ok(None) }
    }

    fn new_stage(&self, stages: &mut Stages) -> io::Result<Stage> {
        let id = FIRST + stages.count as u32;
        let segment = self.home.extend(self.extension(self.rank, id).ok_or(io::ErrorKind::OutOfMemory)?)?;
        stages.count += 1;
        tracing::debug!(rank = self.rank, stages = stages.count, "one more stage");
        Ok(Stage { id, segment, offset: 0 })
    }

    /// Takes a stage back from a communicator that ends; it is used again when its readers have finished.
    pub(crate) fn park_stage(&self, stage: Stage, readers: Readers) {
        self.stages.lock().parked.push((stage, readers));
    }

    /// The address of a peer's stage, which may have left; `NotFound` if there is none of this number. It stays valid as long as this
    /// lives.
    pub(crate) fn stage_of(&self, owner: Rank, id: u32) -> io::Result<*mut u8> {
        if id == FIRST {
            return Ok(self.home.at(self.place_of(owner).ok_or(io::ErrorKind::NotFound)? * HOME + AREA));
        }
        let mut mapped = self.mapped.lock();
        if let Some(stage) = mapped.get(&(owner, id)) {
            return Ok(stage.at(0));
        }
        let stage = self.home.extension(self.extension(owner, id).ok_or(io::ErrorKind::NotFound)?)?;
        Ok(mapped.entry((owner, id)).or_insert(stage).at(0))
    }

    /// Where behind the first segment a stage lies; `None` if its number, which may be a peer's, is none of a stage there.
    fn extension(&self, owner: Rank, id: u32) -> Option<Range<usize>> {
        let number = usize::try_from(id.checked_sub(FIRST + 1)?).ok()?;
        let before = number.checked_mul(self.members.len())?.checked_add(self.place_of(owner)?)?;
        // Pages may be larger than an area.
        let start = self.home.len().next_multiple_of(STAGE).checked_add(before.checked_mul(STAGE)?)?;
        Some(start..start.checked_add(STAGE)?)
    }

    /// How many stages this process has.
    #[cfg(test)]
    pub(crate) fn stages(&self) -> usize {
        self.stages.lock().count
    }
}
