//! A collective where the buffers are, which every rank can reach.

use super::operation::OnDevices;
use crate::cuda::device::Reduction;
use crate::cuda::direct::{Move, Part, Plan};
use crate::error::Result;
use crate::exec::call::{Call, Counts};
use crate::exec::device_state::Lanes;
use crate::types::{DType, ReduceOp};

impl OnDevices<'_> {
    /// Does this rank's part where the buffers are.
    ///
    /// # Safety
    ///
    /// As for [`OnDevices::run`]. The buffers of all ranks are ready.
    pub(super) unsafe fn direct(&mut self, addresses: &[[u64; 2]]) -> Result<()> {
        let Call { op, dtype, redop, root, count, .. } = *self.call;
        let counts = self.call.recv_counts.as_ref().or(self.call.send_counts.as_ref());
        let offsets = counts.map(Counts::offsets);
        let moves = Plan { op, dtype, rank: self.rank, world: self.world, root, count, offsets }.moves();
        if !moves.is_empty() {
            self.check_not_cancelled()?;
            let world = self.world;
            let lanes = self.lanes()?;
            for one in &moves {
                // SAFETY: all parts are of buffers that their ranks have lent, and no two ranks
                // touch what one of them writes.
                unsafe { enqueue(lanes, one, addresses, (dtype, redop, world))? };
            }
            lanes.finish()?;
        }
        // No rank returns before all ranks have finished with its buffers.
        self.synchronise()
    }
}

/// Enqueues one move on a device.
///
/// # Safety
///
/// All parts are within buffers that this device can reach, and stay valid until the move is done.
unsafe fn enqueue(
    lanes: &Lanes,
    one: &Move,
    addresses: &[[u64; 2]],
    (dtype, redop, world): (DType, Option<ReduceOp>, usize),
) -> Result<()> {
    let address = |part: &Part| addresses[part.rank][part.buffer as usize] + part.offset;
    let sources: Vec<u64> = one.sources.iter().map(address).collect();
    let targets: Vec<u64> = one.targets.iter().map(address).collect();
    // SAFETY: passed on.
    unsafe {
        match redop {
            Some(redop) => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop, sources, targets, count: one.count, divisor: world };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            // Every byte becomes 0 or 1.
            None if dtype == DType::Bool => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop: ReduceOp::Max, sources, targets, count: one.count, divisor: 1 };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            None if sources == targets => Ok(()),
            None => lanes.device.copy(lanes.back.id, sources[0], targets[0], one.count * dtype.size()),
        }
    }
}
