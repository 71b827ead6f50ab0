//! How a rank begins a phase, waits for its peers and compares their calls with its own.

use std::time::Duration;

use super::flag_area::FlagArea;
use super::flags::{Phases, SLOTS, WORDS, Words};
use super::window::Window;
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::sys::Waiting;
use crate::types::Descriptor;

/// The longest sleep. After it the rank checks again whether it can go on waiting.
const NAP: Duration = Duration::from_millis(50);

/// The ranks whose phases a rank waits for.
#[derive(Clone, Copy)]
pub(crate) enum Sources {
    All,
    One(usize),
    None,
}

impl Window {
    /// Gives the words of every rank of this host to all of them, as one operation. Returns them in
    /// the order of ranks.
    pub(crate) fn tell(&mut self, context: &OpContext<'_>, words: Words) -> Result<Vec<Words>> {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
        let told = self.check_no_peer_failed(context).and_then(|()| self.exchange(context, words));
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

    /// Counts an operation that exchanges nothing among the calls that the next one compares.
    pub(crate) fn skip(&mut self, context: &OpContext<'_>) {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
    }

    /// Runs one empty phase: returns when all ranks have reached it.
    #[inline]
    pub(super) fn barrier(&mut self, context: &OpContext<'_>) -> Result<()> {
        self.exchange(context, [0; WORDS]).map(drop)
    }

    /// Runs one phase that carries only words. Returns its number, with which the words of all
    /// ranks can be read.
    #[inline]
    pub(super) fn exchange(&mut self, context: &OpContext<'_>, words: Words) -> Result<u32> {
        let phase = self.phases.next();
        self.begin_phase(context, words)?;
        self.phases.publish();
        self.wait_for(context, Sources::All, phase)?;
        Ok(phase)
    }

    /// Returns whether `mine` is true on all ranks. All ranks get the same.
    pub(super) fn all(&mut self, context: &OpContext<'_>, mine: bool) -> Result<bool> {
        let mut words = [0; WORDS];
        words[0] = mine.into();
        let phase = self.exchange(context, words)?;
        Ok((0..self.members.len()).all(|rank| self.phases.line(rank, phase).words()[0] == 1))
    }

    /// Waits until this rank may write its next slot, and announces the operation that the phase
    /// belongs to.
    #[inline]
    pub(super) fn begin_phase(&mut self, context: &OpContext<'_>, words: Words) -> Result<()> {
        let phase = self.phases.next();
        for peer in self.peers() {
            if !self.phases.is_retired(peer, phase) {
                self.wait(context, peer, Phases::<FlagArea>::retires(phase))?;
            }
        }
        self.phases.announce(phase, self.chain, context.words, words);
        Ok(())
    }

    /// Waits until the sources have published a phase of this operation. Returns an error if theirs
    /// is another operation.
    #[inline]
    pub(super) fn wait_for(&mut self, context: &OpContext<'_>, sources: Sources, phase: u32) -> Result<()> {
        match sources {
            Sources::All => self.peers().try_for_each(|peer| self.wait_and_compare(context, peer, phase)),
            Sources::One(peer) => self.wait_and_compare(context, peer, phase),
            Sources::None => Ok(()),
        }
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
        match Descriptor::decode(self.phases.line(peer, phase).descriptor()) {
            None => return context.failed(rank, Cause::Corrupt("a flag line that describes no operation")),
            Some(theirs) if theirs != context.descriptor => return context.mismatch(rank, context.descriptor, theirs),
            Some(_) => {}
        }
        // This operation is the same on both, so an earlier one was not. Its flag lines may not
        // have been reused yet.
        for phase in (1..SLOTS as u32).rev().map(|ago| phase.wrapping_sub(ago)) {
            let described = |rank| {
                let line = self.phases.line(rank, phase);
                Descriptor::decode(line.descriptor()).filter(|_| line.holds(phase))
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
                let nap = context.patience_with(self.members[peer])?;
                self.check_peers_can_reach(context, peer, phase)?;
                self.phases.sleep(peer, phase, nap.min(NAP));
            }
        }
        if waiting.is_long() {
            context.waits();
        }
        if self.patience.done(waiting) {
            self.placement.yielded(&self.phases, self.rank, self.members.len());
        }
        Ok(())
    }
}
