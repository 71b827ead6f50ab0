//! Host memory through which calls on devices pass, round by round.

use std::sync::Arc;

use crate::cuda::device::{Device, Pinned};
use crate::cuda::rounds::Cut;
use crate::error::Result;
use crate::shm::registered::Allocation;
use crate::sys::Region;

/// Bytes of a segment: enough that starting a copy does not count, and few enough that the first and
/// the last segment, which overlap with nothing, do not count either. Tests move fewer bytes through
/// as many segments.
pub(super) const SEGMENT: usize = if cfg!(test) { 512 << 10 } else { 2 << 20 };

/// Segments of a rank: one arrives, one is reduced, one leaves.
pub(super) const SLOTS: usize = 3;

/// Bytes of a rank's memory. A call on host memory has a segment of its own: a stream may bring the
/// first segments of a later call at any time.
pub(super) fn area_len(world: usize) -> usize {
    (SLOTS + 1) * slot_len(world)
}

/// Where the segment of a call on host memory is.
pub(super) fn segment_of_host(world: usize) -> usize {
    SLOTS * slot_len(world)
}

fn slot_len(world: usize) -> usize {
    (SEGMENT + Cut::slack(world)).next_multiple_of(4096)
}

/// This rank's part of the host memory for segments, pinned.
pub(super) struct HostArea {
    device: Arc<dyn Device>,
    pinned: Option<Pinned>,
    memory: Arc<Allocation>,
    place: usize,
}

impl Drop for HostArea {
    fn drop(&mut self) {
        let (pinned, memory) = (self.pinned.take(), self.memory.clone());
        self.device.held().later(move || {
            drop(pinned);
            drop(memory);
        });
    }
}

impl HostArea {
    /// Pins it.
    pub(super) fn new(device: &Arc<dyn Device>, memory: Arc<Allocation>, place: usize) -> Result<HostArea> {
        // SAFETY: `memory` is kept beside it, and dropped after it.
        let pinned = unsafe { Pinned::new(device, memory.at(place, 0), memory.part)? };
        Ok(HostArea { device: device.clone(), pinned: Some(pinned), memory, place })
    }

    /// The segment of a round.
    pub(super) fn segment(&self, world: usize, round: usize) -> *mut u8 {
        self.memory.at(self.place, round % SLOTS * slot_len(world))
    }
}

/// Memory for segments that no other rank shares.
pub(super) fn private_area(len: usize) -> Option<Arc<Allocation>> {
    let region = Arc::new(Region::create(len).ok()?);
    Some(Arc::new(Allocation { region, part: len }))
}
