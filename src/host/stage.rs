//! Stages: the memory through which large data passes from rank to rank.
//!
//! Every process has some stages. Only its own ranks write them; the other processes of the host map and read them. A
//! communicator that stages data takes one, names it in its area, and keeps it for its next operation until another
//! communicator of the process needs one. So there are as many as the process has operations in flight, and a few more.
//!
//! A stage changes hands only when every reader has finished with what was staged last, has left the communicator, or has
//! ended: a peer that is stopped in the middle of reading keeps it.

use std::io;
use std::sync::{Arc, Weak};

use super::{HostGroup, home};
use crate::sys::Segment;
use crate::types::Rank;

/// Bytes of a stage.
pub(crate) const STAGE: usize = 1 << 20;

/// The number of a rank's first stage.
pub(crate) const FIRST: u32 = 1;

/// Stages up to this number lie in the first segment of a host of processes: all have mapped them from the beginning, so that what a
/// rank staged there can be read when it has left. The others have to be fetched from their owner.
pub(crate) const NEAR: u32 = 8;

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
#[derive(Default)]
pub(super) struct Stages {
    free: Vec<Stage>,
    /// Of communicators that were dropped before their peers had read everything.
    parked: Vec<(Stage, Readers)>,
    holders: Vec<Weak<dyn Holder>>,
    /// How many there are.
    count: usize,
}

impl Stages {
    pub(super) fn new(first: Stage) -> Stages {
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
        let next = stages.count as u32 + 1;
        let (id, segment, offset) = match self.stage_at_home(self.rank, next) {
            Some(offset) => {
                self.home.reserve(offset..offset + STAGE)?;
                (next, self.home.clone(), offset)
            }
            None => {
                let segment = Segment::create_like(&self.home, STAGE)?;
                segment.reserve(0..STAGE)?;
                let segment = Arc::new(segment);
                (self.lend(&segment), segment, 0)
            }
        };
        stages.count += 1;
        tracing::debug!(rank = self.rank, stages = stages.count, "one more stage");
        Ok(Stage { id, segment, offset })
    }

    /// Takes a stage back from a communicator that ends; it is used again when its readers have finished.
    pub(crate) fn park_stage(&self, stage: Stage, readers: Readers) {
        self.stages.lock().parked.push((stage, readers));
    }

    /// The address of a peer's stage. It stays valid as long as this lives.
    pub(crate) fn stage_of(&self, owner: Rank, id: u32, until: std::time::Instant) -> io::Result<*mut u8> {
        if let Some(offset) = self.stage_at_home(owner, id) {
            return Ok(self.home.at(offset));
        }
        let segment = self.fetch(owner, id, until)?;
        // The number is a peer's.
        if segment.len() < STAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Only read from now on.
        segment.close();
        Ok(segment.at(0))
    }

    /// Where in the first segment a stage lies, if it is there.
    pub(super) fn stage_at_home(&self, owner: Rank, id: u32) -> Option<usize> {
        let part = self.home.len() / self.members.len();
        let place = self.members.iter().position(|&member| member == owner)?;
        let number = id.checked_sub(FIRST)? as usize;
        // The number is a peer's.
        (number < (part - home(0)) / STAGE).then(|| place * part + home(number))
    }

    /// How many stages this process has.
    #[cfg(test)]
    pub(crate) fn stages(&self) -> usize {
        self.stages.lock().count
    }
}
