//! The shared-memory regions that this process exports to the other ranks of its host.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::network::listener::Stream;
use crate::sys::Region;

/// The regions that the other ranks of this host may map, by number.
#[derive(Default)]
pub(crate) struct ExportedRegions(Mutex<HashMap<u32, Arc<Region>>>);

impl ExportedRegions {
    pub(super) fn insert(&self, id: u32, region: Arc<Region>) {
        self.0.lock().insert(id, region);
    }

    pub(super) fn remove(&self, id: u32) {
        self.0.lock().remove(&id);
    }

    /// Hands a region over: its length, then its descriptor. If the region is not exported, the peer
    /// finds the connection closed.
    pub(super) fn hand_over(&self, id: u64, stream: &Stream) {
        let region = u32::try_from(id).ok().and_then(|id| self.0.lock().get(&id).cloned());
        if let (Some(region), Stream::Local(stream)) = (region, stream) {
            // The connection is new: its buffer has room for both.
            let len = (region.len() as u64).to_le_bytes();
            let sent = (&mut &*stream).write_all(&len).and_then(|()| region.hand_over(stream));
            if let Err(error) = sent {
                crate::log::debug!(%error, "cannot hand shared memory over");
            }
        }
    }
}
