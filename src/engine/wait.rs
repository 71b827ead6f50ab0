//! Sleeping until a link moves.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::in_flight::InFlight;
use super::job::Active;
use super::receive::lost;
use super::state::Engine;
use crate::error::{Cause, Error, Result};
use crate::failure::culprit_of;
use crate::timeouts::{ENGINE_NAP, UNHEARD_PEER};
use crate::types::Rank;

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
        if let Some(job) = self.receivers.next_of_any().and_then(|key| active.get(key)) {
            if job.awaits_any() {
                nap = nap.min(self.wait_for_any(job, &job.gone, &mut waits)?);
            } else if let Some(peer) = job.awaited() {
                waits.push((peer, false, true));
                nap = nap.min(job.job.context.patience_with(peer, self.mesh.moved(peer))?);
            }
        }
        for &peer in self.receivers.peers() {
            let Some(job) = self.receivers.first_of(peer).and_then(|key| active.get(key)) else { continue };
            // A receive from any rank may come before it. The failure detector asks the peer all the same.
            if self.receivers.next_of(peer).is_some() {
                waits.push((peer, false, true));
            }
            nap = nap.min(job.job.context.patience_with(peer, self.mesh.moved(peer))?);
        }
        for out in self.outbox.fronts() {
            let job = self.outbox.key_of(out.job).and_then(|key| active.get(key));
            // A collective that receives waits for that peer.
            if let Some(job) = job.filter(|job| job.awaited().is_none()) {
                nap = nap.min(job.job.context.patience_with(out.to, self.mesh.moved(out.to))?);
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
        let gone = self.receivers.next_of_any().and_then(|key| active.get(key)).map_or(&[][..], |job| &job.gone);
        let mut nap = ENGINE_NAP;
        for job in active.iter() {
            let context = &job.job.context;
            nap = nap.min(context.left());
            if !context.left().is_zero() {
                continue;
            }
            let stuck_to = || self.outbox.iter().find(|out| out.job == job.number).map(|out| out.to);
            match job.awaited().or_else(stuck_to) {
                Some(peer) => _ = context.patience_with(peer, self.mesh.moved(peer))?,
                None => _ = self.wait_for_any(job, gone, &mut Waits::new())?,
            }
        }
        self.soonest = active.iter().filter_map(|job| now.checked_add(job.job.context.left())).min();
        Ok(nap)
    }

    /// Adds the links on which a job waits for the message of any rank. `gone` are the ranks that
    /// cannot send it. Returns how long to sleep at most.
    fn wait_for_any(&self, job: &Active<'_>, gone: &[(Rank, Cause)], waits: &mut Waits) -> Result<Duration> {
        let context = &job.job.context;
        let others = (0..self.world()).filter(|&peer| peer != context.info.rank);
        let has_closed = |peer: Rank| self.closed[peer].is_some() || gone.iter().any(|(rank, _)| *rank == peer);
        waits.extend(others.clone().filter(|&peer| !has_closed(peer)).map(|peer| (peer, false, true)));
        let nap = if self.closed.iter().any(Option::is_some) { UNHEARD_PEER / 10 } else { ENGINE_NAP };

        // Ranks that left without a link are found by the failure detector.
        let lost = lost(gone, context.info.cancel.missed());
        let is_gone = |peer: Rank| lost.iter().any(|(rank, _)| *rank == peer);
        let present = others.clone().find(|&peer| !is_gone(peer));
        // At the deadline the error names a rank that is gone: it is the likeliest sender. But one that
        // sent a message before it left has done its part.
        let has_done = |(rank, cause): &&(Rank, Cause)| {
            present.is_some() && self.received[*rank] > 0 && matches!(cause, Cause::Left { .. } | Cause::Gone)
        };
        let culprit = culprit_of(lost.iter().filter(|lost| !has_done(lost)));
        let left = present.map(|peer| {
            let missed = culprit.map(|(rank, _)| *rank);
            context.patience_with_any(peer, self.mesh.moved(peer), missed)
        });
        match (left, culprit) {
            (Some(Err(Error::Peer { .. })) | None, Some((rank, cause))) => Err(context.failed(*rank, cause.clone())),
            (Some(left), _) => Ok(nap.min(left?)),
            (None, None) => Ok(nap),
        }
    }
}
