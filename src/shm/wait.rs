//! How a rank begins a phase, waits for its peers and compares their calls with its own.

use super::flag_area::FlagArea;
use super::flags::{Phases, SLOTS, WORDS, Words};
use super::groups::{Groups, PhaseGroups};
use super::hierarchy::{self, Arrival, Waiter};
use super::window::{Layout, Window};
use crate::config::FlagLayout;
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::sys::{self, Domains, Processors, Waiting};
use crate::timeouts::SHM_NAP;
use crate::types::Descriptor;

/// The ranks whose phases a rank waits for.
#[derive(Clone, Copy)]
pub(crate) enum Sources {
    /// Every peer, in a phase in which every rank waits for every peer. Groups may do this.
    All,
    /// Every peer, by its own flag line. Other ranks may wait for fewer.
    Each,
    One(usize),
    None,
}

impl Window {
    /// Gives the words of every rank of this host to all of them, as one operation. Returns them in
    /// the order of ranks.
    pub(crate) fn all_gather_words(&mut self, context: &OpContext<'_>, words: Words) -> Result<Vec<Words>> {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
        let told = self.check_no_peer_failed(context).and_then(|()| self.exchange(context, &words));
        match told {
            Ok(phase) => {
                context.rest();
                Ok((0..self.members.len()).map(|rank| self.phases.line(rank, phase).words()).collect())
            }
            Err(error) => {
                context.give_up();
                Err(error)
            }
        }
    }

    /// Counts an operation that does not use shared memory among the calls that the next one compares.
    pub(crate) fn skip(&mut self, context: &OpContext<'_>) {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
    }

    /// Runs one empty phase: returns when all ranks have reached it.
    #[inline]
    pub(super) fn barrier(&mut self, context: &OpContext<'_>) -> Result<()> {
        self.one_phase(context, &[0; WORDS], Sources::All).map(drop)
    }

    /// Runs one phase that carries only words. Returns its number, with which the words of all
    /// ranks can be read.
    #[inline]
    pub(super) fn exchange(&mut self, context: &OpContext<'_>, words: &Words) -> Result<u32> {
        // Every rank reads the line of every other, so there is nothing that groups could spare.
        self.one_phase(context, words, Sources::Each)
    }

    #[inline]
    fn one_phase(&mut self, context: &OpContext<'_>, words: &Words, sources: Sources) -> Result<u32> {
        let phase = self.phases.next();
        self.begin_phase(context, words)?;
        self.phases.publish();
        self.wait_for(context, sources, phase)?;
        Ok(phase)
    }

    /// Returns whether `mine` is true on all ranks. All ranks get the same.
    pub(super) fn all(&mut self, context: &OpContext<'_>, mine: bool) -> Result<bool> {
        let mut words = [0; WORDS];
        words[0] = mine.into();
        let phase = self.exchange(context, &words)?;
        Ok((0..self.members.len()).all(|rank| self.phases.line(rank, phase).words()[0] == 1))
    }

    /// Waits until this rank may write its next slot, and announces the operation that the phase
    /// belongs to.
    #[inline]
    pub(super) fn begin_phase(&mut self, context: &OpContext<'_>, words: &Words) -> Result<()> {
        let phase = self.phases.next();
        if !self.phases.is_clear(phase) {
            for peer in self.peers() {
                if !self.phases.is_retired(peer, phase) {
                    self.wait(context, peer, Phases::<FlagArea>::retires(phase))?;
                }
            }
            self.phases.set_clear(phase);
        }
        self.phases.announce(phase, self.chain, &context.words, words);
        Ok(())
    }

    /// Waits until the sources have published a phase of this operation. Returns an error if theirs
    /// is another operation.
    #[inline]
    pub(super) fn wait_for(&mut self, context: &OpContext<'_>, sources: Sources, phase: u32) -> Result<()> {
        match sources {
            Sources::All => match self.layout {
                Layout::Groups(_) => self.wait_in_groups(context, phase),
                Layout::Flat => self.wait_for_each(context, phase),
                Layout::Undecided(setting) => {
                    self.wait_for_each(context, phase)?;
                    self.decide(setting);
                    Ok(())
                }
            },
            Sources::Each => self.wait_for_each(context, phase),
            Sources::One(peer) => self.wait_and_compare(context, peer, phase),
            Sources::None => Ok(()),
        }
    }

    /// Waits until every peer has published a phase of this operation.
    #[inline]
    fn wait_for_each(&mut self, context: &OpContext<'_>, phase: u32) -> Result<()> {
        self.peers().try_for_each(|peer| self.wait_and_compare(context, peer, phase))?;
        self.phases.all_have_reached(phase);
        Ok(())
    }

    /// Decides how ranks wait for all of them, and whether they spin, by what each told when it
    /// entered the window. All ranks do so at the end of the same phase, the first in which all
    /// wait for all, so all have told and decide the same.
    #[cold]
    fn decide(&mut self, setting: FlagLayout) {
        let affinities = (0..self.members.len()).map(|rank| self.phases.lines.rank_state(rank).affinity());
        let (processors, domains): (Vec<Processors>, Vec<Domains>) = affinities.unzip();
        let is_crowded = sys::is_crowded(&processors);
        self.patience.set_crowded(is_crowded);
        self.is_crowded = is_crowded;
        self.layout = match PhaseGroups::choose(&domains, is_crowded, setting) {
            Some(groups) => {
                crate::log::debug!(ranks = domains.len(), groups = groups.empty.count(), "ranks wait for each other in groups");
                Layout::Groups(Box::new(groups))
            }
            None => Layout::Flat,
        };
    }

    /// As [`Window::wait_for_each`], where ranks form groups.
    fn wait_in_groups(&mut self, context: &OpContext<'_>, phase: u32) -> Result<()> {
        self.wait_for_all(context, phase, 0, |window, groups, arrival| {
            if arrival == Arrival::Leads {
                hierarchy::release(&window.phases, groups, phase, window.chain, 0, [0; WORDS]);
            }
        })
    }

    /// Waits until all ranks have published a phase, in which leaders give each other `words` words
    /// of each. Then `arrived` runs, which releases the members if this rank leads a group.
    ///
    /// # Panics
    ///
    /// If ranks form no groups.
    pub(super) fn wait_for_all(
        &mut self,
        context: &OpContext<'_>,
        phase: u32,
        words: usize,
        arrived: impl FnOnce(&mut Window, &Groups, Arrival),
    ) -> Result<()> {
        let Layout::Groups(groups) = std::mem::replace(&mut self.layout, Layout::Flat) else {
            unreachable!("only ranks in groups wait in this way");
        };
        let chosen = groups.for_words(words);
        let result = hierarchy::wait_for_all(&mut WaitingRank { window: self, context }, chosen, phase, words);
        let result = result.map(|arrival| {
            self.phases.all_have_reached(phase);
            #[cfg(test)]
            {
                self.releases += u64::from(arrival == Arrival::Released);
            }
            arrived(self, chosen, arrival);
        });
        self.layout = Layout::Groups(groups);
        result
    }

    #[inline]
    fn wait_and_compare(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        self.wait(context, peer, phase)?;
        let line = self.phases.line(peer, phase);
        if line.fingerprint() == self.chain { Ok(()) } else { Err(self.mismatch(context, peer, phase)) }
    }

    /// The error for a phase that belongs to another operation on the peer than here.
    #[cold]
    fn mismatch(&self, context: &OpContext<'_>, peer: usize, phase: u32) -> Error {
        let rank = self.members[peer];
        match Descriptor::decode(self.phases.line(peer, phase).descriptor(phase)) {
            None => return context.failed(rank, Cause::Corrupt("a flag line that describes no operation")),
            Some(theirs) if theirs != context.descriptor => return context.mismatch(rank, context.descriptor, theirs),
            Some(_) => {}
        }
        // This operation is the same on both, so an earlier one was not. Its flag lines may not
        // have been reused yet.
        for phase in (1..SLOTS as u32).rev().map(|ago| phase.wrapping_sub(ago)) {
            let described = |rank| {
                let line = self.phases.line(rank, phase);
                Descriptor::decode(line.descriptor(phase)).filter(|_| line.holds(phase))
            };
            if let (Some(mine), Some(theirs)) = (described(self.rank), described(peer))
                && mine != theirs
            {
                return context.mismatch(rank, mine, theirs);
            }
        }
        context.failed(rank, Cause::Diverged)
    }

    /// Waits until a rank of this host has published a phase.
    #[inline]
    pub(super) fn wait(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        if self.phases.has_reached(peer, phase) {
            return Ok(());
        }
        self.wait_long(context, peer, phase)
    }

    fn wait_long(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        let mut waiting = Waiting::default();
        // Recorded here because this rank has nothing else to do while it waits.
        context.note();
        while !self.phases.has_reached(peer, phase) {
            if self.patience.pause(&mut waiting) {
                let nap = context.patience_with(self.members[peer], Some(phase.into()))?;
                self.check_peers_can_reach(context, peer, phase)?;
                self.phases.sleep(peer, phase, nap.min(SHM_NAP));
            }
        }
        if waiting.is_long() {
            context.waits();
        }
        if self.patience.done(waiting) {
            self.placement.gave_way(&self.phases, self.rank, self.members.len());
        }
        Ok(())
    }
}

/// A rank that waits in an operation.
struct WaitingRank<'a, 'b> {
    window: &'a mut Window,
    context: &'a OpContext<'b>,
}

impl Waiter for WaitingRank<'_, '_> {
    type Lines = FlagArea;
    type Error = Error;

    fn phases(&self) -> &Phases<FlagArea> {
        &self.window.phases
    }

    fn fingerprint(&self) -> u64 {
        self.window.chain
    }

    fn wait_for_rank(&mut self, rank: usize, phase: u32) -> Result<()> {
        self.window.wait_and_compare(self.context, rank, phase)
    }

    fn wait_for_each(&mut self, phase: u32) -> Result<()> {
        self.window.wait_for_each(self.context, phase)
    }

    fn wait_for_leader_line(&mut self, is_there: impl Fn(&FlagArea) -> Option<bool>) -> bool {
        let WaitingRank { window, context } = self;
        if let Some(agrees) = is_there(&window.phases.lines) {
            return agrees;
        }
        let mut waiting = Waiting::default();
        context.note();
        let agrees = loop {
            if let Some(agrees) = is_there(&window.phases.lines) {
                break agrees;
            }
            if window.patience.pause(&mut waiting) {
                // This wait is not over. The wait for the flag lines, with which it goes on, learns
                // what there is to learn.
                context.waits();
                return false;
            }
        };
        if waiting.is_long() {
            context.waits();
        }
        if window.patience.done(waiting) {
            window.placement.gave_way(&window.phases, window.rank, window.members.len());
        }
        agrees
    }
}
