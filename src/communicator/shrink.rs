//! How the survivors of a failure continue with a new communicator.

use std::time::Instant;

use super::Communicator;
use crate::error::{Cause, Error, Result, shown};
use crate::exec::Core;
use crate::failure::shrink::agree;
use crate::failure::{CommInfo, wait_check};
use crate::network::fabric::Fabric;
use crate::network::identity::random;
use crate::timeouts::LEAST_TO_CONNECT;
use crate::types::{Op, Rank, mix};

impl Communicator {
    /// Makes a communicator of the survivors of a failure, in the order of their ranks in this one.
    /// The survivors agree on the members. This communicator ends, if it has not failed already.
    ///
    /// This is a collective call of all ranks that want to continue. They do not wait for processes
    /// that have ended. They wait for other ranks until
    /// [`Builder::start_timeout`](crate::Builder::start_timeout), but only one second for the rank
    /// at fault. If more ranks fail meanwhile, the others agree again.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// # comm.abort();
    /// # let mut gradients = [1.0f32];
    /// let comm = match comm.all_reduce(&mut gradients, kolo::ReduceOp::Average) {
    ///     Err(error) if !error.leaves_communicator_usable() => comm.shrink()?,
    ///     other => other.map(|()| comm)?,
    /// };
    /// comm.barrier()?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Excluded`] if this rank called it too late, and the others continued without it.
    pub fn shrink(&self) -> Result<Communicator> {
        wait_check::begin();
        self.try_to_shrink().map_err(|error| match wait_check::has_stopped() {
            true => Error::Aborted { op: Op::Connect, seq: 0 },
            false => error,
        })
    }

    fn try_to_shrink(&self) -> Result<Communicator> {
        let began = Instant::now();
        self.exec.state.check_process(Op::Connect)?;
        let core = self.exec.state.end_by_shrink();
        let culprits: Vec<Rank> = match self.exec.failure() {
            // The peer runs, and may still be diagnosing the failure.
            Some(Error::Peer { cause: Cause::Broken(kind), .. }) if *kind != std::io::ErrorKind::TimedOut => Vec::new(),
            Some(Error::Peer { cause: Cause::Shrinks, .. }) => Vec::new(),
            failure => failure.and_then(Error::culprit).into_iter().collect(),
        };
        let info = &self.exec.state.info;
        let settings = core.settings();
        let (fabric, info) = survivors(core.fabric(), info, &culprits, began)?;
        let (mut next, mut info) = (Core::new(fabric, settings), info);
        loop {
            let left = (began + info.start_timeout).saturating_duration_since(Instant::now());
            let starting = CommInfo { timeout: left.max(LEAST_TO_CONNECT), ..info.clone() };
            match next.connect(&starting, Instant::now()) {
                Ok(()) => {
                    let next = self.of_same_process(next, info);
                    return Ok(match &self.job {
                        Some(of_job) => next.of_job(of_job.job.clone()),
                        None => next,
                    });
                }
                Err(error @ Error::Peer { .. }) if !left.is_zero() && !wait_check::has_stopped() => {
                    crate::log::info!(%error, "survivors of a failure have failed, too");
                    let culprits: Vec<Rank> = error.culprit().into_iter().collect();
                    let (fabric, fewer) = survivors(next.fabric(), &info, &culprits, began)?;
                    (next, info) = (Core::new(fabric, settings), fewer);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Agrees with the other ranks of `fabric` on the survivors, and returns their fabric and their
/// [`CommInfo`].
fn survivors(fabric: &Fabric, info: &CommInfo, culprits: &[Rank], began: Instant) -> Result<(Fabric, CommInfo)> {
    let nonce = u128::from_le_bytes(random()) as u64;
    let decision = agree(fabric.status(), culprits, nonce, began + info.start_timeout);
    let ranks = &decision.members;
    if *ranks == [info.rank] && culprits == [info.rank] {
        // All ranks had agreed that this one is at fault: it does not continue alone because the
        // others have ended since.
        return Err(Error::Excluded { survivors: Vec::new() });
    }
    let Some(rank) = ranks.iter().position(|&rank| rank == info.rank) else {
        return Err(Error::Excluded { survivors: ranks.clone() });
    };
    crate::log::info!(survivors = ranks.len(), of = info.members.len(), after = %shown::time(began.elapsed()), "survivors have agreed");
    let fabric = fabric.divide(mix(fabric.comm_id(), decision.nonce), ranks);
    let cancel = fabric.status().cancel.clone();
    Ok((fabric, info.of(rank, ranks.iter().map(|&rank| info.members[rank].clone()).collect(), cancel)))
}
