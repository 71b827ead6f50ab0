//! The segments that this process lends to the other ranks of its host.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::bootstrap::listener::Stream;
use crate::sys::Segment;

/// The segments that the other ranks of this host may map, by number.
#[derive(Default)]
pub(crate) struct LentSegments(Mutex<HashMap<u32, Arc<Segment>>>);

impl LentSegments {
    pub(super) fn insert(&self, id: u32, segment: Arc<Segment>) {
        self.0.lock().insert(id, segment);
    }

    pub(super) fn remove(&self, id: u32) {
        self.0.lock().remove(&id);
    }

    /// Hands a segment over: its length, then its descriptor. If the segment is not lent, the peer
    /// finds the connection closed.
    pub(super) fn hand_over(&self, id: u64, stream: &Stream) {
        let segment = u32::try_from(id).ok().and_then(|id| self.0.lock().get(&id).cloned());
        if let (Some(segment), Stream::Local(stream)) = (segment, stream) {
            // The connection is new: its buffer has room for both.
            let len = (segment.len() as u64).to_le_bytes();
            let sent = (&mut &*stream).write_all(&len).and_then(|()| segment.hand_over(stream));
            if let Err(error) = sent {
                tracing::debug!(%error, "cannot hand a segment over");
            }
        }
    }
}
