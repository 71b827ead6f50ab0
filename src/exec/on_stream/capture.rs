//! Calls that a CUDA graph captures. They run with each replay: see [`super::super::graphs`].

use std::sync::Arc;

use crate::cuda::peers::{BufferAt, Part, Peers, Said};
use crate::error::{ArgumentError, Error, Result};
use crate::exec::call::Call;
use crate::exec::device_state::Calling;
use crate::exec::host_area::{HostArea, area_len, private_area};
use crate::exec::lent::Lent;
use crate::exec::submit::Executor;

/// The exchanges after which all ranks have opened new allocations, and know it: one tells of them,
/// the next one tells that they are open, and in the third one all say that they are in place.
const EXCHANGES: usize = 3;

impl Executor {
    /// Has the replays of a graph run calls that were made for its capture.
    pub(super) fn add_to_graph(&self, calls: &[Call]) -> Result<()> {
        let lent = |call: &Call| call.lent.clone().filter(|lent| lent.gate().is_some());
        let calls: Vec<Call> = calls.iter().filter(|call| lent(call).is_some()).cloned().collect();
        let Some(first) = calls.first().and_then(lent) else { return Ok(()) };
        let Some(capture) = first.capture else { return Ok(()) };
        self.state.graphs.add(&first.device, (first.stream, capture), calls)?;
        if self.state.failure.get().is_some() {
            self.state.graphs.abandon();
        }
        self.queue.notice_graph();
        Ok(())
    }

    /// Opens the buffers of a direct call with the other ranks, which capture it, too. A replay cannot
    /// pass through the areas of the ranks, which other calls use meanwhile. Returns what this rank
    /// says of its buffers in each replay; `None` if those of some rank cannot be opened.
    pub(super) fn open_for_graph(
        &self,
        calling: &mut Calling,
        call: &Call,
        lent: &Lent,
        peers: &Arc<Peers>,
    ) -> Result<Option<Said>> {
        for _ in 0..EXCHANGES {
            let said = self.say(calling, call, lent, peers);
            let records = self.in_turn(call, |operation| operation.exchange_as(Part::Captures, said.clone()))?;
            peers.hear(&records);
            if records.iter().all(|record| !record.places.contains(&BufferAt::Device)) {
                peers.keep(&said);
                return Ok(Some(said));
            }
        }
        crate::log::info!(op = %call.op, "memory of a rank cannot be opened: in this graph it passes through the host");
        Ok(None)
    }

    /// Makes memory for the segments of one call in a graph.
    pub(super) fn area_of_graph(&self, call: &Call, lent: &Lent) -> Result<Arc<HostArea>> {
        let problem = ArgumentError::TooMany { count: call.count };
        let memory = private_area(area_len(self.state.layout.ranks)).ok_or(Error::Argument { op: call.op, problem })?;
        Ok(Arc::new(HostArea::new(&lent.device, memory, 0)?))
    }
}
