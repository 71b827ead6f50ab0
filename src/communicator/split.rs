//! Splitting a communicator into parts.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{Communicator, calls};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::error::{Cause, Error, Result};
use crate::exec::{Agreed, Core};
use crate::failure;
use crate::host_group::HostGroup;
use crate::host_group::area::{Area, Offer};
use crate::network::fabric::Fabric;
use crate::timeouts::MAPPING_CHECK;
use crate::types::{Op, Rank, mix};

/// Converts the error of a part to the ranks of the whole communicator.
fn of_the_whole(mut error: Error, ranks: &[Rank]) -> Error {
    if let Error::Peer { rank, cause, .. } = &mut error {
        *rank = ranks[*rank];
        if *cause == Cause::Aborted {
            // It aborted the part; the whole communicator may know the cause.
            *cause = Cause::Revoked;
        }
    }
    error
}

/// Words that each rank gives: whether it takes part, its colour, its key, a random number, and the
/// area that it offers.
const WORDS: usize = 5;

/// Words that each rank gives then: whether it can share memory in its part, and what it has
/// measured with its neighbours.
const ANSWERS: usize = 2;

/// An area that this rank offers to the part that it may lead.
struct Offered {
    host: Arc<HostGroup>,
    offer: Offer,
    ranks: usize,
}

impl Offered {
    /// The area belongs to these ranks of the job.
    fn keep(mut self, members: &[Rank]) {
        self.host.confirm(std::mem::replace(&mut self.offer, Offer::NONE), self.ranks, members);
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        self.host.confirm(self.offer, self.ranks, &[]);
    }
}

impl Communicator {
    /// Splits the communicator: the ranks that give the same `color` form a new one, in the order
    /// of their `key`s, and of their ranks where keys are equal. Communicators progress
    /// independently of each other.
    ///
    /// This is a collective call.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let row = comm.split(comm.rank() / 4, comm.rank() % 4)?;
    /// # assert_eq!(row.world_size(), 1);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every operation: see [`Communicator`](Communicator#errors).
    pub fn split(&self, color: usize, key: usize) -> Result<Communicator> {
        let part = self.split_or_leave(Some(color), key)?;
        Ok(part.expect("a rank with a colour has a communicator"))
    }

    /// Splits the communicator as [`Communicator::split`]. A rank without a colour joins no part
    /// and gets `None`.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// // Rank 0 writes checkpoints, the other ranks train.
    /// match comm.split_or_leave((comm.rank() > 0).then_some(0), comm.rank())? {
    ///     Some(trainers) => trainers.barrier()?,
    ///     None => println!("this rank writes checkpoints"),
    /// }
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every operation: see [`Communicator`](Communicator#errors).
    pub fn split_or_leave(&self, color: Option<usize>, key: usize) -> Result<Option<Communicator>> {
        let mut nonce = [0; 8];
        let random = getrandom::fill(&mut nonce).map_err(|error| Error::os("reading random numbers")(io::Error::other(error)));
        random.map_err(|error| self.exec.fail(error))?;
        let nonce = u64::from_le_bytes(nonce);
        // This rank may become the leader of its part on this host.
        let host = self.exec.state.host.as_ref().filter(|(_, neighbours)| color.is_some() && *neighbours > 1);
        let offered = host.map(|(host, ranks)| Offered { host: host.clone(), offer: host.offer(*ranks), ranks: *ranks });
        let offer = offered.as_ref().map_or(Offer::NONE, |offered| offered.offer);
        let mine = [u64::from(color.is_some()), color.unwrap_or(0) as u64, key as u64, nonce, offer.encode()];
        // It stands for all of the operations.
        let call = Call { on_behalf_of: Some(Op::Split), ..Call::new::<u64>(Op::AllGather) };
        let (part, ranks, began, agreed) = self.exec.exclusively(call, |core| {
            let all = self.gather_words(core, Op::Split, &mine)?;
            let words = |rank: Rank| &all[WORDS * rank..WORDS * (rank + 1)];
            let in_part = |&rank: &Rank| color.is_some() && words(rank)[..2] == mine[..2];
            let mut ranks: Vec<Rank> = (0..self.world_size()).filter(in_part).collect();
            ranks.sort_by_key(|&rank| (words(rank)[2], rank));

            let began = Instant::now();
            let part = color.map(|_| {
                let comm_id = mix(mix(core.fabric().comm_id(), words(ranks[0])[3]), mine[1]);
                (core.fabric().divide(comm_id, &ranks), core.settings())
            });
            let offers = |rank| Offer::decode(words(rank)[WORDS - 1]);
            let fabric = part.as_ref().map(|(fabric, _)| fabric);
            let agreed = match self.exec.state.layout.windows {
                true => {
                    let agreed = self.agree_on_memory(core, fabric, &ranks, offered, offers);
                    Some(agreed.inspect_err(|error| fabric.iter().for_each(|part| failure::give_up_part(part.status(), error)))?)
                }
                false => None,
            };
            Ok((part, ranks, began, agreed))
        })?;
        let Some((fabric, settings)) = part else { return Ok(None) };
        let members = ranks.iter().map(|&rank| self.exec.state.info.members[rank].clone()).collect();
        let info = self.exec.state.info.of(fabric.rank(), members, fabric.status().cancel.clone());
        let (comm_id, place) = (fabric.comm_id(), (fabric.rank(), fabric.members()[fabric.rank()]));
        let rings = self.exec.state.info.cancel.link(&info.cancel);
        let started = match agreed {
            Some(agreed) => Core::start_part(fabric, settings, &info, agreed),
            None => Core::start(fabric, settings, &info, began),
        };
        drop(rings);
        match started {
            // The cancellation may have reached the part when it had just started.
            Ok(mut core) if self.exec.state.info.cancel.is_cancelled() => {
                let error = self.exec.fail(Error::Aborted { op: Op::Connect, seq: 0 });
                failure::give_up_part(core.fabric().status(), &error);
                core.leave(true);
                drop(core);
                Err(error)
            }
            Ok(core) => Ok(Some(self.of_same_process(core, info))),
            // Other ranks may have got their part, and would wait for this one in their next call.
            Err(error) => {
                let error = self.exec.fail(of_the_whole(error, &ranks));
                if let Some(board) = self.exec.state.core.lock().fabric().board() {
                    failure::give_up_former_part(board, comm_id, place, &error);
                }
                Err(error)
            }
        }
    }

    /// Gathers the words of all ranks, in an operation that the caller knows as `op`.
    pub(super) fn gather_words(&self, core: &mut Core, op: Op, mine: &[u64]) -> Result<Vec<u64>> {
        let mut all = vec![0; mine.len() * self.world_size()];
        let call = Call { on_behalf_of: Some(op), ..calls::all_gather::<u64>(RawSlice::of(mine), RawSliceMut::of(&mut all)) };
        // SAFETY: both buffers are borrowed until this returns.
        unsafe { self.exec.run_on(core, call)? };
        Ok(all)
    }

    /// Agrees with the ranks of this part on whether they share memory. All ranks call it, also
    /// those of no part.
    fn agree_on_memory(
        &self,
        core: &mut Core,
        part: Option<&Fabric>,
        ranks: &[Rank],
        offered: Option<Offered>,
        offers: impl Fn(Rank) -> Offer,
    ) -> Result<Agreed> {
        let neighbours = part.map_or(Arc::default(), Fabric::neighbours);
        let jobs: Vec<Rank> = part.map_or(Vec::new(), |part| neighbours.iter().map(|&rank| part.members()[rank]).collect());
        let place = part.and_then(|part| neighbours.iter().position(|&rank| rank == part.rank()));
        // The offers that are not used are free again before any rank splits again.
        let offered = offered.filter(|_| place == Some(0) && neighbours.len() > 1);
        let area = match (&self.exec.state.host, place) {
            (Some((host, _)), Some(place)) if neighbours.len() > 1 => {
                Some(self.accept(host, jobs[0], offers(ranks[neighbours[0]]), place, neighbours.len()))
            }
            _ => None,
        };
        let can_share = !matches!(area, Some(None));
        let tuning = self.exec.state.host.as_ref().and_then(|(host, _)| host.tuning(&jobs)).unwrap_or(0);
        let answers = self.gather_words(core, Op::Split, &[can_share.into(), tuning]);
        let all_can = answers.as_ref().is_ok_and(|all| ranks.iter().all(|rank| all[ANSWERS * rank] != 0));
        if let Some(offered) = offered {
            // A failure on this rank need not be one on the others.
            offered.keep(if all_can || answers.is_err() { &jobs } else { &[] });
        }
        let answers = answers?;
        if !all_can {
            return Ok(Agreed::Messages);
        }
        let agrees = |&rank: &Rank| answers[ANSWERS * ranks[rank] + 1] == tuning;
        Ok(Agreed::Windows(area.flatten(), neighbours.iter().all(agrees).then_some(tuning)))
    }

    /// Maps the area that the leader of a part offers; `None` if this rank cannot.
    fn accept(&self, host: &HostGroup, leader: Rank, offer: Offer, place: usize, ranks: usize) -> Option<Area> {
        let until = Instant::now() + self.exec.state.info.timeout;
        loop {
            let error = match host.accept(leader, offer, place, ranks, until.min(Instant::now() + MAPPING_CHECK)) {
                Ok(area) => return Some(area),
                Err(error) => error,
            };
            let goes_on = !self.exec.state.info.cancel.is_cancelled() && !host.has_ended(leader) && Instant::now() < until;
            if error.kind() != io::ErrorKind::TimedOut || !goes_on {
                crate::log::warn!(%error, leader, "no shared memory");
                return None;
            }
        }
    }
}
