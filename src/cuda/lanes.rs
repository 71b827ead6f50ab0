//! kolo's own streams on a device.

use std::sync::Arc;

use parking_lot::Mutex;

use super::device::{Device, Event, Stream, StreamId};
use crate::error::Result;

/// A stream of kolo's own, for calls that the caller's stream does not wait for.
pub(crate) struct Lane {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) stream: Stream,
    /// Recorded on callers' streams, by callers.
    fork: Event,
    /// Recorded on the lane's own stream, by one thread at a time.
    join: Mutex<Event>,
}

impl Lane {
    fn new(device: &Arc<dyn Device>) -> Result<Lane> {
        let join = Mutex::new(Event::new(device)?);
        Ok(Lane { stream: Stream::new(device)?, fork: Event::new(device)?, join, device: device.clone() })
    }

    /// Has the stream wait for the earlier work of another one.
    pub(crate) fn follow(&self, stream: StreamId) -> Result<()> {
        self.fork.record(stream)?;
        self.device.wait_for_event(self.stream.id, self.fork.id)
    }

    /// Records an event that is done when the stream has done all its work, and waits by `wait`.
    pub(crate) fn join(&self, wait: impl FnOnce(&Event) -> Result<()>) -> Result<()> {
        let join = self.join.lock();
        join.record(self.stream.id)?;
        wait(&join)
    }

    /// Notes what the stream has been given so far, for [`Lane::has_done_it`].
    pub(crate) fn mark(&self) -> Result<()> {
        self.join.lock().record(self.stream.id)
    }

    /// Whether the stream has done what it had been given at the last mark.
    pub(crate) fn has_done_it(&self) -> bool {
        self.join.lock().is_done().unwrap_or(false)
    }
}

/// Lanes that no communicator uses. Several are made at once: making a stream waits for all streams,
/// one of which may wait for a call of another rank of this process.
#[derive(Default)]
pub(crate) struct LanePool {
    free: Mutex<Vec<Arc<Lane>>>,
}

/// Lanes that are made at once.
const LANES: usize = 8;

impl LanePool {
    pub(crate) fn take(&self, device: &Arc<dyn Device>) -> Result<Arc<Lane>> {
        let mut free = self.free.lock();
        if free.is_empty() {
            for _ in 0..LANES {
                free.push(Arc::new(Lane::new(device)?));
            }
        }
        Ok(free.pop().expect("some were made"))
    }

    /// Takes a lane back whose stream has done all its work.
    pub(crate) fn give_back(&self, lane: Arc<Lane>) {
        self.free.lock().push(lane);
    }
}
