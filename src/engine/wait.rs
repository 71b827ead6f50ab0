//! Sleeping until a link moves.

use std::time::Duration;

use super::job::Active;
use super::receive::UNHEARD;
use super::state::Engine;
use crate::error::{Cause, Error, Result};
use crate::types::Rank;

/// The longest sleep. After it the engine checks deadlines and cancellation again.
const NAP: Duration = Duration::from_millis(500);

/// The links to sleep on: the peer, and whether to wake when the link can send and receive.
type Waits = Vec<(Rank, bool, bool)>;

impl Engine {
    /// Sleeps until something can move, or it is time to check whether to go on.
    pub(super) fn sleep(&mut self, active: &[Active<'_>]) -> Result<()> {
        let nap = self.look_after(active)?;
        let mut waits = std::mem::take(&mut self.waits);
        // A message whose next bytes are not ready waits for these bytes, not for its link.
        let ready = self.outgoing.iter().filter(|out| out.rest().iter().any(|part| part.len > 0));
        waits.extend(ready.map(|out| (out.to, true, false)));
        let result = self.mesh.sleep(waits.iter().copied(), nap).map_err(Error::os("waiting for peers"));
        self.waits = waits;
        result
    }

    /// Fails if a job has to end: at its deadline, or because the communicator is cancelled. Returns
    /// how long to sleep at most, and leaves the links from which jobs receive in `self.waits`.
    pub(super) fn look_after(&mut self, active: &[Active<'_>]) -> Result<Duration> {
        let mut waits = std::mem::take(&mut self.waits);
        waits.clear();
        let mut nap = NAP;
        // Of several jobs that receive from any rank, only the first looks at the links.
        let gone: &[(Rank, Cause)] = active.iter().find(|job| job.awaits_any()).map_or(&[], |job| &job.gone);
        for job in active {
            if job.awaits_any() {
                nap = nap.min(self.wait_for_any(job, gone, &mut waits)?);
                continue;
            }
            let stuck_to = self.outgoing.iter().find(|out| out.job == job.number).map(|out| out.to);
            let awaited = job.awaited();
            waits.extend(awaited.map(|peer| (peer, false, true)));
            if let Some(peer) = awaited.or(stuck_to) {
                nap = nap.min(job.job.context.patience_with(peer)?);
            }
        }
        self.waits = waits;
        Ok(nap)
    }

    /// Adds the links on which a job waits for the message of any rank. `gone` are the ranks that
    /// cannot send it. Returns how long to sleep at most.
    fn wait_for_any(&self, job: &Active<'_>, gone: &[(Rank, Cause)], waits: &mut Waits) -> Result<Duration> {
        let context = &job.job.context;
        let others = (0..self.world()).filter(|&peer| peer != context.info.rank);
        let has_closed = |peer: Rank| self.closed[peer].is_some() || gone.iter().any(|(rank, _)| *rank == peer);
        waits.extend(others.clone().filter(|&peer| !has_closed(peer)).map(|peer| (peer, false, true)));
        let nap = if self.closed.iter().any(Option::is_some) { UNHEARD / 10 } else { NAP };

        // Ranks that left without a link are found by the failure detector.
        let missed = context.info.cancel.missed();
        let is_gone = |peer: Rank| gone.iter().chain(&missed).any(|(rank, _)| *rank == peer);
        let present = others.clone().find(|&peer| !is_gone(peer));
        // At the deadline the error names a rank that is gone and never sent: it is the likeliest
        // sender. A rank that sent a message has done its part.
        let mut all_gone = gone.iter().chain(&missed);
        let culprit = if present.is_none() { all_gone.next() } else { all_gone.find(|(rank, _)| self.received[*rank] == 0) };
        let left = present.map(|peer| context.patience_with_any(peer, culprit.map(|(rank, _)| *rank)));
        match (left, culprit) {
            (Some(Err(Error::Peer { .. })) | None, Some((rank, cause))) => Err(context.failed(*rank, cause.clone())),
            (Some(left), _) => Ok(nap.min(left?)),
            (None, None) => Ok(nap),
        }
    }
}
