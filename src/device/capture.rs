//! Calls that a CUDA graph captures. They run with each replay: see [`super::graphs`].

use std::sync::Arc;

use super::call::{DeviceCall, device_call_to_keep};
use super::caller::Caller;
use super::host_area::{HostArea, area_len, private_area};
use super::state::Calling;
use crate::call::Call;
use crate::cuda::peers::{Announcement, BufferAt, Participation, Peers};
use crate::error::{ArgumentError, Error, Result};

/// The exchanges after which all ranks have opened new allocations, and know it: one tells of them,
/// the next one tells that they are open, and in the third one all say that they are in place.
const EXCHANGES: usize = 3;

impl Caller<'_> {
    /// Has the replays of a graph run calls that were made for its capture.
    pub(super) fn add_to_graph(&self, calls: &[Call]) -> Result<()> {
        let with_handshake = |call: &Call| device_call_to_keep(call).filter(|bound| bound.handshake().is_some());
        let calls: Vec<Call> = calls.iter().filter(|call| with_handshake(call).is_some()).cloned().collect();
        let Some(first) = calls.first().and_then(with_handshake) else { return Ok(()) };
        let Some(capture) = first.capture else { return Ok(()) };
        self.devices.graphs.add(&first.device, (first.stream, capture), calls)?;
        if self.state.failure.get().is_some() {
            self.devices.graphs.abandon();
        }
        Ok(())
    }

    /// Opens the buffers of a direct call with the other ranks, which capture it, too. A replay cannot
    /// pass through the areas of the ranks, which other calls use meanwhile. Returns what this rank
    /// says of its buffers in each replay; `None` if those of some rank cannot be opened.
    pub(super) fn open_for_graph(
        &self,
        calling: &mut Calling,
        call: &Call,
        bound: &DeviceCall,
        peers: &Arc<Peers>,
    ) -> Result<Option<Announcement>> {
        for _ in 0..EXCHANGES {
            let announced = self.announce(calling, call, bound, peers);
            let records = self.in_turn(call, |operation| operation.exchange_as(Participation::Captures, announced.clone()))?;
            peers.apply(&records);
            if records.iter().all(|record| !record.places.contains(&BufferAt::Device)) {
                peers.keep(&announced);
                return Ok(Some(announced));
            }
        }
        crate::log::info!(op = %call.op, "memory of a rank cannot be opened: in this graph it passes through the host");
        Ok(None)
    }

    /// Makes memory for the segments of one call in a graph.
    pub(super) fn area_of_graph(&self, call: &Call, bound: &DeviceCall) -> Result<Arc<HostArea>> {
        let problem = ArgumentError::TooMany { count: call.count };
        let memory = private_area(area_len(self.state.layout.ranks)).ok_or(Error::Argument { op: call.op, problem })?;
        Ok(Arc::new(HostArea::new(&bound.device, memory, 0)?))
    }
}
