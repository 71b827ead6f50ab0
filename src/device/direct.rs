//! Collectives on device memory that leaders' kernels can reach: where the buffers are, or in the
//! areas of the ranks.
//!
//! Ranks wait for each other on the host, before and after the kernels run. Where each rank has a GPU
//! of its own, the kernels [wait for each other](crate::cuda::barrier) instead, if they use the buffers
//! where they are: the ranks tell each other of their buffers before the streams arrive, so a kernel can
//! begin as soon as its stream does.

use std::sync::Arc;
use std::time::Duration;

use super::call::DeviceCall;
use super::handshake::Handshake;
use super::operation::DeviceOperation;
use crate::cuda::barrier::{DeviceBarrier, Missing};
use crate::cuda::device::Address;
use crate::cuda::direct::{Place, Plan, one_shot};
use crate::cuda::moves::{KernelTask, Move};
use crate::cuda::peers::{Announcement, BufferAt, Participation, Peers, Record};
use crate::cuda::rounds::Cut;
use crate::error::{Cause, Error, Result};
use crate::trace::PathTaken;
use crate::types::DType;

impl DeviceOperation<'_> {
    /// # Safety
    ///
    /// As for [`DeviceOperation::run`]. The stream has arrived in the first round, unless kernels wait for
    /// each other.
    pub(super) unsafe fn direct(
        &mut self,
        bound: &DeviceCall,
        cut: &Cut,
        peers: &Arc<Peers>,
        announced: &Announcement,
    ) -> Result<()> {
        // Unless kernels wait for each other, none begins before all streams have arrived and all ranks have
        // said so.
        let mine = participation(bound);
        let records = self.exchange_as(mine, announced.clone())?;
        // A replay says what was announced at the capture.
        if mine == Participation::Direct {
            peers.apply(&records);
        }
        let passes = |record: &Record| record.places.contains(&BufferAt::Device);
        let is_in_place = !records.iter().any(passes);
        self.path = Some(if is_in_place { PathTaken::InPlace } else { PathTaken::ThroughAreas });
        if is_in_place {
            // All rounds at once, in the first kernel. Those of the other rounds find nothing.
            self.launch(bound, cut, peers, &records, None)?;
            if !peers.have_barrier() {
                self.synchronise()?;
            }
            self.end(bound, cut.rounds - 1);
            return Ok(());
        }
        for round in 0..cut.rounds {
            // The exchange came after the arrival of all streams in the first round, or before it.
            let have_arrived = round == 0 && !peers.have_barrier();
            if !have_arrived {
                // Only streams that pass data arrive in each round.
                if passes(&records[self.rank]) || round == 0 {
                    self.until_arrived(bound, round)?;
                }
                self.synchronise()?;
            }
            self.launch(bound, cut, peers, &records, Some(round))?;
            // No rank takes its data, or returns, before all kernels have finished.
            self.synchronise()?;
            self.end(bound, round);
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`DeviceOperation::run`].
    pub(super) unsafe fn one_shot(&mut self, bound: &DeviceCall, peers: &Arc<Peers>) -> Result<()> {
        // Where the other ranks' buffers are does not matter, if they are on their GPUs.
        self.exchange_as(participation(bound), Announcement::nothing([BufferAt::Device; 2]))?;
        self.path = Some(PathTaken::OneShot);
        let call = self.call;
        let buffers = (call.send.ptr.addr() as Address, call.recv.ptr.addr() as Address);
        let moves = one_shot(self.rank, &peers.slots(), buffers, call.count).to_vec();
        self.check_not_cancelled()?;
        self.go(bound, 0, KernelTask { moves, before: 1, barrier: peers.barrier(self.limit()) })?;
        self.end(bound, 0);
        Ok(())
    }

    /// Has this rank's kernel do its moves in a round, or in all rounds at once, if it has a kernel, and
    /// waits for it.
    fn launch(&self, bound: &DeviceCall, cut: &Cut, peers: &Peers, records: &[Record], round: Option<usize>) -> Result<()> {
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
        let moves: Vec<Move> = plan.moves(self.rank, &places);
        let barrier = if round.is_none() && peers.have_barrier() { peers.barrier(self.limit()) } else { DeviceBarrier::none() };
        self.go(bound, round.unwrap_or(0), KernelTask { moves, before: 0, barrier })?;
        if round.is_none() && cut.rounds > 1 {
            self.go(bound, cut.rounds - 1, KernelTask::of(Vec::new()))?;
        }
        Ok(())
    }

    fn go(&self, bound: &DeviceCall, round: usize, task: KernelTask) -> Result<()> {
        let handshake = bound.handshake().expect("a direct call has words");
        if !handshake.go(round as u32, task) {
            return Err(Error::Aborted { op: self.call.op, seq: self.core.next_seq() - 1 });
        }
        let until = |is_there: fn(&Handshake, u32) -> bool| {
            self.step();
            self.shared.until_stream(self.call, bound, Some(self.core.next_seq()), |handshake| is_there(handshake, round as u32))
        };
        // The deadline of the kernel begins when its stream arrives.
        until(|handshake, _| handshake.words().has_arrived(0))?;
        until(|handshake, round| handshake.words().is_done(round))?;
        match handshake.missing() {
            None => Ok(()),
            Some(Missing::Late(rank)) => Err(self.failed(rank, Cause::Silent { deadline: self.timeout() })),
            Some(Missing::GaveUp(rank)) => Err(self.failed(rank, Cause::Revoked)),
        }
    }

    /// How long a kernel waits for others, from its beginning. The host waits longer for the kernel, so that
    /// this can name the rank that did not arrive.
    fn limit(&self) -> Duration {
        self.timeout() / 8 * 7
    }

    fn timeout(&self) -> Duration {
        self.call.timeout.unwrap_or(self.shared.info.timeout)
    }
}

/// How this rank takes part in a direct call.
fn participation(bound: &DeviceCall) -> Participation {
    if bound.is_captured() { Participation::Replays } else { Participation::Direct }
}
