//! Communicators of some of the ranks.

use std::time::Instant;

use super::call::Call;
use super::core::Core;
use super::{Communicator, calls};
use crate::error::{Cause, Error, Result};
use crate::types::{Op, Rank, mix};

/// What failed in a part of the ranks, in the numbers of the whole.
fn of_the_whole(mut error: Error, ranks: &[Rank]) -> Error {
    if let Error::Peer { rank, cause, .. } = &mut error {
        *rank = ranks[*rank];
        if *cause == Cause::Aborted {
            // It gave up the part, and the whole may know why.
            *cause = Cause::Revoked;
        }
    }
    error
}

/// Words that ranks exchange: whether the rank takes part, its colour, its key, a random number.
const WORDS: usize = 4;

impl Communicator {
    /// Divides the ranks: those that give the same `color` become a communicator of their own, in the order of their `key`s,
    /// and of their ranks where these are equal. Communicators make progress independently of each other.
    ///
    /// A collective call.
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
    pub fn split(&self, color: usize, key: usize) -> Result<Communicator> {
        let part = self.split_or_leave(Some(color), key)?;
        Ok(part.expect("a rank with a colour has a communicator"))
    }

    /// As [`Communicator::split`], for ranks that may have no colour: they become part of nothing.
    pub fn split_or_leave(&self, color: Option<usize>, key: usize) -> Result<Option<Communicator>> {
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce).map_err(|error| crate::Error::os("reading random numbers")(std::io::Error::other(error)))?;
        let mine = [u64::from(color.is_some()), color.unwrap_or(0) as u64, key as u64, u64::from_le_bytes(nonce)];
        let mut all = vec![0u64; WORDS * self.world_size()];
        let call = Call { on_behalf_of: Some(Op::Split), ..calls::all_gather(&mine, &mut all) };
        // SAFETY: both buffers are this function's, which waits here.
        unsafe { self.run(call)? };
        if color.is_none() {
            return Ok(None);
        }
        let words = |rank: Rank| &all[WORDS * rank..WORDS * (rank + 1)];
        let mut ranks: Vec<Rank> = (0..self.world_size()).filter(|&rank| words(rank)[..2] == mine[..2]).collect();
        ranks.sort_by_key(|&rank| (words(rank)[2], rank));

        let began = Instant::now();
        let (fabric, settings) = {
            let core = self.shared.core.lock();
            let channel = mix(mix(core.fabric().channel(), words(ranks[0])[3]), mine[1]);
            (core.fabric().divide(channel, &ranks), core.settings())
        };
        let members = ranks.iter().map(|&rank| self.shared.terms.members[rank].clone()).collect();
        let terms = self.shared.terms.of(fabric.rank(), members, fabric.bulletin().alarm.clone());
        let rings = self.shared.terms.alarm.rings(&terms.alarm);
        let started = Core::start(fabric, settings, &terms, began);
        drop(rings);
        match started {
            // The part's alarm may have been rung, too, when it had just started.
            Ok(mut core) if self.shared.terms.alarm.is_rung() => {
                core.part(true);
                drop(core);
                let given_up = Error::Aborted { op: Op::Connect, seq: 0 };
                Err(self.shared.fail(&mut self.shared.core.lock(), given_up))
            }
            Ok(core) => Ok(Some(self.pass_devices_on(Communicator::new(core, terms)))),
            // The others may have got their part, and not come to the next call alone.
            Err(error) => Err(self.shared.fail(&mut self.shared.core.lock(), of_the_whole(error, &ranks))),
        }
    }
}
