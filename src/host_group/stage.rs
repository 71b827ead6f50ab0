//! Stages: the memory through which large data passes from rank to rank.
//!
//! Every process has some stages. Only its own ranks write them; the other processes of the host
//! map and read them. All stages lie in one file, which every process of the host has open, so a
//! process can also map a stage whose owner has left. A communicator that stages data takes a
//! stage, names it in its area, and keeps it for its next operation until another communicator of
//! the process needs one. So a process has about as many stages as operations in flight.
//!
//! A stage changes hands only when every reader has finished with what was staged last, has left
//! the communicator, or has ended: a peer that is stopped in the middle of reading keeps it.

use std::io;
use std::sync::{Arc, Weak};

use super::area::AREA;
use crate::sys::Region;

/// Bytes of a stage.
pub(crate) const STAGE: usize = 2 << 20;

/// Bytes that each rank has in the first region of a host: an area for the communicator of all
/// ranks, and a first stage.
pub(crate) const HOME: usize = AREA + STAGE;

/// The number of a rank's first stage, which lies in the first region of its host. The other stages
/// extend that region.
pub(crate) const FIRST: u32 = 1;

/// How many stages of each rank the limit on the size of files must allow. Otherwise the process
/// shares no memory: with few stages, communicators would wait for each other.
const ROOM: usize = 2 * KEPT;

/// Returns the bytes that the memory file of a host must be able to grow to.
pub(crate) const fn room(ranks: usize) -> usize {
    ranks * (AREA + ROOM * STAGE)
}

/// How many stages are made before any changes hands: most programs alternate between a few
/// communicators.
pub(crate) const KEPT: usize = 4;

/// Memory of this process in which one communicator at a time stages data.
pub(crate) struct Stage {
    /// Its number among the stages of the process.
    pub(crate) id: u32,
    pub(super) region: Arc<Region>,
    pub(super) offset: usize,
    is_populated: bool,
}

impl Stage {
    pub(crate) fn base(&self) -> *mut u8 {
        self.region.at(self.offset)
    }

    /// Maps its pages, which will be written in turn, before the first operation instead of within the first
    /// hundreds.
    pub(crate) fn populate(&mut self) {
        if !std::mem::replace(&mut self.is_populated, true) {
            self.region.populate(self.offset..self.offset + STAGE);
        }
    }
}

/// A communicator that holds a stage.
pub(crate) trait Holder: Send + Sync {
    /// Gives the stage up, unless an operation is in flight or a peer may still read it.
    fn give_up(&self) -> Option<Stage>;
}

/// The stages of a process that are not held, and the holders of the others. `R` tells whether the
/// last readers of a stage have finished.
pub(super) struct Stages<R> {
    free: Vec<Stage>,
    /// Stages of communicators that were dropped before their peers had read everything.
    parked: Vec<(Stage, R)>,
    holders: Vec<Weak<dyn Holder>>,
    /// How many stages there are.
    count: usize,
}

impl<R> Stages<R> {
    /// Begins with the first stage of the member of the host at `index`.
    pub(super) fn new(home: &Arc<Region>, index: usize) -> Stages<R> {
        let first = Stage { id: FIRST, region: home.clone(), offset: index * HOME + AREA, is_populated: false };
        Stages { free: vec![first], parked: Vec::new(), holders: Vec::new(), count: 1 }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn park(&mut self, stage: Stage, readers: R) {
        self.parked.push((stage, readers));
    }

    /// Remembers the holder of a stage that it has just taken.
    pub(super) fn held_by(&mut self, holder: &Weak<dyn Holder>) {
        self.holders.retain(|other| other.strong_count() > 0);
        self.holders.push(holder.clone());
    }

    /// Frees the parked stages whose readers have finished, and takes a free stage.
    pub(super) fn take_free(&mut self, have_finished: impl Fn(&R) -> bool) -> Option<Stage> {
        let (done, parked) = std::mem::take(&mut self.parked).into_iter().partition(|(_, readers)| have_finished(readers));
        let done: Vec<(Stage, R)> = done;
        self.parked = parked;
        self.free.extend(done.into_iter().map(|(stage, _)| stage));
        self.free.pop()
    }

    /// Makes a stage of the region that `create` returns for its number.
    pub(super) fn add(&mut self, create: impl FnOnce(u32) -> io::Result<Arc<Region>>) -> io::Result<Stage> {
        let id = FIRST + self.count as u32;
        let region = create(id)?;
        self.count += 1;
        Ok(Stage { id, region, offset: 0, is_populated: false })
    }

    /// Takes a stage from a holder that gives it up. Asks the holders in the order in which they
    /// took their stages, and adds them to `asked`: the caller drops them after it has released the
    /// lock, because the last owner of a communicator parks its stage.
    pub(super) fn take_from_holder(&mut self, asked: &mut Vec<Arc<dyn Holder>>) -> Option<Stage> {
        for at in 0..self.holders.len() {
            let Some(holder) = self.holders[at].upgrade() else { continue };
            let given_up = holder.give_up();
            asked.push(holder);
            if given_up.is_some() {
                self.holders.remove(at);
                return given_up;
            }
        }
        None
    }
}
