//! Collectives on device memory that leaders' kernels can reach: where the buffers are, or in the
//! areas of the ranks.

use std::sync::Arc;

use super::operation::OnDevices;
use crate::cuda::direct::{Place, Plan};
use crate::cuda::moves::Move;
use crate::cuda::peers::{BufferAt, Part, Peers, Record, Said};
use crate::cuda::rounds::Cut;
use crate::error::{Cause, Error, Result};
use crate::exec::lent::Lent;
use crate::trace::PathTaken;
use crate::types::DType;

impl OnDevices<'_> {
    /// # Safety
    ///
    /// As for [`OnDevices::run`]. The stream has arrived in the first round.
    pub(super) unsafe fn direct(&mut self, lent: &Lent, cut: &Cut, peers: &Arc<Peers>, said: &Said) -> Result<()> {
        // No rank's kernel begins before all streams have arrived and all ranks have said so.
        let mine = if lent.is_captured() { Part::Replays } else { Part::Direct };
        let records = self.exchange_as(mine, said.clone())?;
        // A replay says what was said at the capture.
        if mine == Part::Direct {
            peers.hear(&records);
        }
        let passes = |record: &Record| record.places.contains(&BufferAt::Device);
        let is_in_place = !records.iter().any(passes);
        self.path = Some(if is_in_place { PathTaken::InPlace } else { PathTaken::ThroughAreas });
        if is_in_place {
            // All rounds at once, in the first kernel. Those of the other rounds find nothing.
            self.launch(lent, cut, peers, &records, None)?;
            self.synchronise()?;
            self.end(lent, cut.rounds - 1);
            return Ok(());
        }
        for round in 0..cut.rounds {
            if round > 0 {
                if passes(&records[self.rank]) {
                    self.until_arrived(lent, round)?;
                }
                self.synchronise()?;
            }
            self.launch(lent, cut, peers, &records, Some(round))?;
            // No rank takes its data, or returns, before all kernels have finished.
            self.synchronise()?;
            self.end(lent, round);
        }
        Ok(())
    }

    /// Has this rank's kernel do its moves, if it has one, and waits for it.
    fn launch(&self, lent: &Lent, cut: &Cut, peers: &Peers, records: &[Record], round: Option<usize>) -> Result<()> {
        if !peers.is_leader() {
            return Ok(());
        }
        let places = records.iter().enumerate().map(|(rank, record)| {
            let needed = self.call.lengths(rank, self.world).map_err(|problem| Error::Argument { op: self.call.op, problem })?;
            let segment = peers.segment(round.unwrap_or(0));
            let place = peers.place(rank, record, segment, needed.map(|len| len as u64));
            place.ok_or_else(|| self.failed(rank, Cause::Corrupt("what says where a buffer is")))
        });
        let places = places.collect::<Result<Vec<Place>>>()?;
        let changes = self.call.dtype == DType::Bool;
        let plan = Plan { cut, leaders: &peers.leaders, round, changes };
        self.check_not_cancelled()?;
        let moves = plan.moves(self.rank, &places);
        self.go(lent, round.unwrap_or(0), &moves)?;
        if round.is_none() && cut.rounds > 1 {
            self.go(lent, cut.rounds - 1, &[])?;
        }
        Ok(())
    }

    fn go(&self, lent: &Lent, round: usize, moves: &[Move]) -> Result<()> {
        let gate = lent.gate().expect("a direct call has words");
        if !gate.go(round as u32, moves) {
            return Err(Error::Aborted { op: self.call.op, seq: self.core.next_seq() - 1 });
        }
        self.shared.until_stream(self.call, lent, Some(self.core.next_seq()), |gate| gate.words().is_done(round as u32))
    }
}
