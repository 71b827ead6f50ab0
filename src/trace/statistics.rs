//! How many operations took each path on devices.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a communicator has done so far, on this rank; see
/// [`Communicator::stats`](crate::Communicator::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Its operations on the memory of devices.
    pub device: DeviceStats,
}

/// How many operations on the memory of devices took each path. The documentation of devices says
/// when which is taken. An operation counts when it has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// As a whole through host memory: short ones, and messages.
    pub whole: u64,
    /// In rounds through host memory.
    pub staged: u64,
    /// By kernels, with the buffers of all ranks where they are.
    pub in_place: u64,
    /// By kernels, with data of at least one rank in its area on the device.
    pub through_areas: u64,
    /// By one kernel of each rank, which copies what the rank sends to a slot, and reduces the slots of all
    /// ranks.
    pub one_shot: u64,
    /// As a whole through host memory, copied while the call waits, because streams cannot wait for
    /// the host.
    pub copied: u64,
}

/// A path on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathTaken {
    Whole,
    Staged,
    InPlace,
    ThroughAreas,
    OneShot,
    Copied,
}

#[derive(Default)]
pub(crate) struct Counters([AtomicU64; 6]);

impl Counters {
    #[cfg(feature = "cuda")]
    pub(crate) fn count(&self, path: PathTaken) {
        self.0[path as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn device(&self) -> DeviceStats {
        let of = |path: PathTaken| self.0[path as usize].load(Ordering::Relaxed);
        DeviceStats {
            whole: of(PathTaken::Whole),
            staged: of(PathTaken::Staged),
            in_place: of(PathTaken::InPlace),
            through_areas: of(PathTaken::ThroughAreas),
            one_shot: of(PathTaken::OneShot),
            copied: of(PathTaken::Copied),
        }
    }
}
