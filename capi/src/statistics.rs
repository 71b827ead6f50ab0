//! What a communicator has done so far.

use crate::codes::kolo_result_t;
use crate::communicator::{kolo_comm_t, on};
use crate::sized::{self, Grows, end_of};

/// What a communicator has done so far, on this rank: how many operations on the memory of GPUs took
/// each path. Set `size` to `sizeof(kolo_comm_stats_t)` before kolo_comm_stats.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct kolo_comm_stats_t {
    /// In: the `sizeof` of this struct in the caller's header.
    pub size: usize,
    /// As a whole through host memory: short operations, and messages.
    pub device_whole: u64,
    /// In rounds through host memory.
    pub device_staged: u64,
    /// By kernels, with the buffers of all ranks where they are.
    pub device_in_place: u64,
    /// By kernels, with data of at least one rank in its area on the GPU.
    pub device_through_areas: u64,
    /// As a whole through host memory, copied while the call waits, because streams cannot wait for
    /// the host.
    pub device_copied: u64,
    /// By one kernel of each rank, which copies what the rank sends to a slot, and reduces the slots of
    /// all ranks.
    pub device_one_shot: u64,
}

// SAFETY: the struct begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_comm_stats_t {
    const NAMES: (&'static str, &'static str) = ("stats", "stats->size");
    const FIRST: usize = end_of!(kolo_comm_stats_t, device_copied: u64);
}

impl From<kolo::Stats> for kolo_comm_stats_t {
    fn from(stats: kolo::Stats) -> kolo_comm_stats_t {
        let device = stats.device;
        kolo_comm_stats_t {
            size: size_of::<kolo_comm_stats_t>(),
            device_whole: device.whole,
            device_staged: device.staged,
            device_in_place: device.in_place,
            device_through_areas: device.through_areas,
            device_copied: device.copied,
            device_one_shot: device.one_shot,
        }
    }
}

/// Fills in what the communicator has done so far. An operation counts when it has completed. Any
/// thread may call this, also while operations are in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_stats(comm: kolo_comm_t, stats: *mut kolo_comm_stats_t) -> kolo_result_t {
    // SAFETY: the caller has set the size of the struct.
    on(comm, |this| unsafe { sized::write(stats, &this.comm.stats().into()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_has_the_count_of_its_path() {
        let mut stats = kolo::Stats::default();
        stats.device.whole = 1;
        stats.device.staged = 2;
        stats.device.in_place = 3;
        stats.device.through_areas = 4;
        stats.device.copied = 5;
        stats.device.one_shot = 6;
        let expected = kolo_comm_stats_t {
            size: size_of::<kolo_comm_stats_t>(),
            device_whole: 1,
            device_staged: 2,
            device_in_place: 3,
            device_through_areas: 4,
            device_copied: 5,
            device_one_shot: 6,
        };
        assert_eq!(kolo_comm_stats_t::from(stats), expected);
    }
}
