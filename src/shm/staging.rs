//! How a rank holds a stage for its slots, and finds the stages of its peers.

use std::io;
use std::time::Instant;

use super::flag_area::{FlagArea, LEFT, REVOKED};
use super::flags;
use super::slots::{Slots, StageAt, place};
use super::wait::Sources;
use super::window::Window;
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::host_group::HostGroup;
use crate::host_group::stage::Stage;
use crate::sync::Ordering;
use crate::timeouts::READERS;
use crate::types::Rank;

impl Window {
    /// The slots of all ranks in a phase. For `segments` and `bytes` see [`place`].
    #[inline]
    pub(super) fn slots(&self, phase: u32, segments: usize, bytes: usize) -> Slots<'_> {
        Slots { stages: &self.slots, offset: place(phase, segments, bytes) }
    }

    /// Makes sure that this rank has a stage before it stages anything in an operation.
    #[inline]
    pub(super) fn hold_stage(&mut self, context: &OpContext<'_>) -> Result<()> {
        if self.stage.is_some() { Ok(()) } else { self.take_stage(context) }
    }

    #[cold]
    fn take_stage(&mut self, context: &OpContext<'_>) -> Result<()> {
        let began = Instant::now();
        let mut stage = loop {
            // Peers usually finish with an old stage sooner than new memory is made and mapped.
            let is_long = began.elapsed() >= READERS;
            match self.host.take_stage(&self.holder, is_long) {
                Ok(Some(stage)) => break stage,
                Err(error) if context.left().is_zero() => {
                    return Err(Error::os("reserving shared memory to stage data: free some, or raise the limit")(error));
                }
                Ok(None) | Err(_) => {
                    if is_long {
                        context.check()?;
                        std::thread::sleep(READERS);
                    }
                    std::thread::yield_now();
                }
            }
        };
        stage.populate();
        self.slots[self.rank] = StageAt { stage: stage.id, base: stage.base() };
        // The first phase in which something is staged there releases this store.
        self.phases.lines.rank_state(self.rank).stage.store(stage.id, Ordering::Relaxed);
        self.stage = Some(stage);
        Ok(())
    }

    /// Finds the stages of the ranks whose slots this rank reads. They have published the first
    /// phase of an operation.
    #[inline]
    pub(super) fn find_stages(&mut self, context: &OpContext<'_>, sources: Sources) -> Result<()> {
        match sources {
            Sources::All | Sources::Each => self.peers().try_for_each(|peer| self.find_stage(context, peer)),
            Sources::One(peer) => self.find_stage(context, peer),
            Sources::None => Ok(()),
        }
    }

    #[inline]
    fn find_stage(&mut self, context: &OpContext<'_>, peer: usize) -> Result<()> {
        let stage = self.phases.lines.rank_state(peer).stage.load(Ordering::Relaxed);
        if stage == self.slots[peer].stage && stage != 0 { Ok(()) } else { self.map_stage(context, peer, stage) }
    }

    #[cold]
    fn map_stage(&mut self, context: &OpContext<'_>, peer: usize, stage: u32) -> Result<()> {
        let member = self.members[peer];
        if stage == 0 {
            return Err(context.failed(member, Cause::Corrupt("its stage does not exist")));
        }
        match self.host.stage_of(self.jobs[peer], stage) {
            Ok(base) => {
                self.slots[peer] = StageAt { stage, base };
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(context.failed(member, Cause::Corrupt("the number of a stage that does not exist")))
            }
            Err(error) => Err(Error::os("mapping the memory in which a rank of this host stages data")(error)),
        }
    }

    /// Gives up the stage and returns it, if every peer has finished with it.
    pub(crate) fn give_up_stage(&mut self) -> Option<Stage> {
        let phases = Staged { phase: self.staged, last: self.phases.last() };
        self.stage.take_if(|_| have_read(&self.phases.lines, self.rank, &self.jobs, phases, &self.host))
    }

    /// Leaves the stage to the host group, which uses it again when every peer has finished with
    /// it.
    pub(super) fn park_stage(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        let (rank, jobs) = (self.rank, self.jobs.clone());
        let phases = Staged { phase: self.staged, last: self.phases.last() };
        let flags = FlagArea { parts: self.phases.lines.parts.clone() };
        // The area remains this rank's until its peers have read.
        let area = self.area.take();
        self.host.park_stage(
            stage,
            Box::new(move |host| {
                let _ = &area;
                have_read(&flags, rank, &jobs, phases, host)
            }),
        );
    }
}

/// The last phase in which a rank staged something, and the last that it has published, counted since
/// the start.
#[derive(Clone, Copy)]
struct Staged {
    phase: i64,
    last: i64,
}

/// Whether every peer has finished with what `rank` staged: it has read that, or reads nothing in this
/// area any more.
fn have_read(flags: &FlagArea, rank: usize, jobs: &[Rank], staged: Staged, host: &HostGroup) -> bool {
    let is_done = |peer: usize| {
        flags::has_finished(flags, peer, staged.phase, staged.last)
            || matches!(flags.rank_state(peer).state.load(Ordering::Acquire), LEFT | REVOKED)
            || host.has_ended(jobs[peer])
    };
    (0..jobs.len()).filter(|&peer| peer != rank).all(is_done)
}
