//! Sleeping until a link moves.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::in_flight::InFlight;
use super::job::Active;
use super::receive::lost;
use super::state::Engine;
use super::unexpected::Queue;
use crate::error::{Cause, Error, Result, Unmatched};
use crate::failure::culprit_of;
use crate::timeouts::{ENGINE_NAP, UNHEARD_PEER};
use crate::types::{Rank, Tag};

/// The links to sleep on: the peer, and whether to wake when the link can send and receive.
type Waits = Vec<(Rank, bool, bool)>;

impl Engine {
    /// Sleeps until something can move, or it is time to check whether to go on.
    pub(super) fn sleep(&mut self, active: &InFlight<Active<'_>>) -> Result<()> {
        let nap = self.look_after(active)?;
        let mut waits = std::mem::take(&mut self.waits);
        // A message whose next bytes are not ready waits for these bytes, not for its link.
        let ready = self.outbox.fronts().filter(|out| out.rest().iter().any(|part| part.len > 0));
        waits.extend(ready.map(|out| (out.to, true, false)));
        let result = self.mesh.sleep(waits.iter().copied(), nap).map_err(Error::os("waiting for peers"));
        let is_awaited = |closing: &Rank| waits.iter().any(|(peer, ..)| peer == closing);
        let others: SmallVec<[Rank; 4]> = self.mesh.closing().iter().copied().filter(|closing| !is_awaited(closing)).collect();
        self.waits = waits;
        if let Some(job) = active.iter().next() {
            others
                .into_iter()
                .filter(|&peer| self.has_closed(peer))
                .for_each(|peer| job.job.context.info.cancel.note_closed(peer));
        }
        result
    }

    /// Whether a peer has closed its link without a goodbye. A link on which it has sent nothing does not
    /// tell: it may not have known that link when it left.
    fn has_closed(&mut self, peer: Rank) -> bool {
        let Ok(Some(link)) = self.mesh.link(peer) else { return false };
        self.heard[peer] && self.inboxes[peer].header(link, &mut false).is_err()
    }

    /// Fails if a job has to end: at its deadline, or because the communicator is cancelled. Returns
    /// how long to sleep at most, and leaves the links from which jobs receive in `self.waits`.
    ///
    /// Only the first job that waits for a peer tells other ranks that it does.
    pub(super) fn look_after(&mut self, active: &InFlight<Active<'_>>) -> Result<Duration> {
        let mut waits = std::mem::take(&mut self.waits);
        waits.clear();
        let mut nap = ENGINE_NAP;
        if let Some(job) = self.receivers.collective.and_then(|key| active.get(key))
            && let Some(peer) = job.awaited()
        {
            self.add_wait(peer, &mut waits);
            nap = nap.min(self.patience_with(job, peer)?);
        }
        let any = self.receivers.first_of_any().and_then(|key| active.get(key));
        if let Some(job) = any {
            nap = nap.min(self.wait_for_any(job, &mut waits)?);
        }
        for &peer in self.receivers.peers() {
            let Some(job) = self.receivers.first_of(peer).and_then(|key| active.get(key)) else { continue };
            // A receive from any rank waits for it already.
            if any.is_none() || !self.may_send_to_any(peer) {
                self.add_wait(peer, &mut waits);
            }
            nap = nap.min(self.patience_with(job, peer)?);
        }
        for out in self.outbox.fronts() {
            let job = self.outbox.key_of(out.job).and_then(|key| active.get(key));
            // A collective that receives waits for that peer.
            if let Some(job) = job.filter(|job| job.awaited().is_none()) {
                nap = nap.min(self.patience_with(job, out.to)?);
            }
        }
        self.waits = waits;
        Ok(nap.min(self.check_deadlines(active)?))
    }

    /// Fails if a job behind others is past its deadline. Looks at all of them when the first deadline may
    /// have passed. Returns how long to sleep at most.
    fn check_deadlines(&mut self, active: &InFlight<Active<'_>>) -> Result<Duration> {
        let Some(soonest) = self.soonest else { return Ok(ENGINE_NAP) };
        let now = Instant::now();
        if soonest > now {
            return Ok(ENGINE_NAP.min(soonest - now));
        }
        let mut nap = ENGINE_NAP;
        for job in active.iter() {
            let context = &job.job.context;
            nap = nap.min(context.left());
            if !context.left().is_zero() {
                continue;
            }
            let stuck_to = || self.outbox.iter().find(|out| out.job == job.number).map(|out| out.to);
            match job.awaited().or_else(stuck_to) {
                Some(peer) => _ = self.patience_with(job, peer)?,
                None => _ = self.wait_for_any(job, &mut Waits::new())?,
            }
        }
        self.soonest = active.iter().filter_map(|job| now.checked_add(job.job.context.left())).min();
        Ok(nap)
    }

    /// Returns how long a job may wait for a peer before this is called again.
    fn patience_with(&self, job: &Active<'_>, peer: Rank) -> Result<Duration> {
        let moved = self.mesh.moved(peer);
        job.job.context.patience_with(peer, moved).map_err(|error| self.name_unmatched(job, peer, error))
    }

    /// Names the messages for which no receive waits in the error of a receive whose deadline has passed,
    /// and of a collective that is behind them.
    fn name_unmatched(&self, job: &Active<'_>, peer: Rank, mut error: Error) -> Error {
        /// As many tags are listed.
        const LISTED: usize = 8;
        let Error::Peer { cause, .. } = &mut error else { return error };
        let Cause::Silent { deadline } = *cause else { return error };
        let is_itself = peer == job.job.context.info.rank;
        let receives = !job.has_header && (job.awaited().is_some() || job.awaits_any());
        let senders = if job.awaits_any() { 0..self.world() } else { peer..peer + 1 };
        let queues: Vec<&Queue> = senders.filter_map(|sender| self.unexpected.of(sender)).collect();
        let refused = queues.iter().find_map(|queue| queue.refused);
        let waiting = queues.iter().map(|queue| queue.count as u64).sum();
        let is_behind = if job.is_collective() { refused.is_some() } else { waiting > 0 || refused.is_some() };
        let is_named = is_itself || receives && is_behind;
        if !is_named {
            return error;
        }
        let mut tags: Vec<Tag> = queues.iter().flat_map(|queue| queue.tags()).collect();
        tags.sort_unstable();
        tags.dedup();
        tags.truncate(LISTED);
        let tag = (!job.is_collective()).then(|| job.tag());
        let unmatched = Unmatched { tag, is_itself, waiting, tags, refused };
        *cause = Cause::Unmatched { deadline, unmatched: Box::new(unmatched) };
        error
    }

    /// Adds the link on which a job waits for a peer, unless nothing more can come there: messages for which
    /// none waits fill their room, or the next message is of a later collective.
    fn add_wait(&self, peer: Rank, waits: &mut Waits) {
        if !self.unexpected.is_full(peer) && !self.inboxes[peer].is_held() {
            waits.push((peer, false, true));
        }
    }

    /// Whether a peer may still send a message to a receive from any rank.
    fn may_send_to_any(&self, peer: Rank) -> bool {
        self.closed[peer].is_none() && self.gone.iter().all(|(rank, _)| *rank != peer)
    }

    /// Adds the links on which a job waits for the message of any rank. Returns how long to sleep at most.
    fn wait_for_any(&self, job: &Active<'_>, waits: &mut Waits) -> Result<Duration> {
        let context = &job.job.context;
        let own = context.info.rank;
        let others = (0..self.world()).filter(|&peer| peer != own);
        others.clone().filter(|&peer| self.may_send_to_any(peer)).for_each(|peer| self.add_wait(peer, waits));
        let nap = if self.closed.iter().any(Option::is_some) { UNHEARD_PEER / 10 } else { ENGINE_NAP };

        // Ranks that left without a link are found by the failure detector.
        let lost = lost(&self.gone, context.info.cancel.missed());
        let is_gone = |peer: Rank| lost.iter().any(|(rank, _)| *rank == peer);
        let present = others.clone().find(|&peer| !is_gone(peer)).or((self.world() == 1).then_some(own));
        // At the deadline the error names a rank that is gone: it is the likeliest sender. But one that
        // sent a message before it left has done its part.
        let has_done = |(rank, cause): &&(Rank, Cause)| {
            present.is_some() && self.received[*rank] > 0 && matches!(cause, Cause::Left { .. } | Cause::Gone)
        };
        let culprit = culprit_of(lost.iter().filter(|lost| !has_done(lost)));
        let left = present.map(|peer| {
            let missed = culprit.map(|(rank, _)| *rank);
            let left = context.patience_with_any(peer, self.mesh.moved(peer), missed);
            left.map_err(|error| self.name_unmatched(job, peer, error))
        });
        match (left, culprit) {
            (Some(Err(Error::Peer { .. })) | None, Some((rank, cause))) => Err(context.failed(*rank, cause.clone())),
            (Some(left), _) => Ok(nap.min(left?)),
            (None, None) => Ok(nap),
        }
    }
}
