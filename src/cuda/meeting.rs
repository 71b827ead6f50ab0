//! How the kernels of several devices wait for each other, so that ranks need not wait for each other
//! on the host. Each device has a flag for each rank in its memory. A kernel that has come to a point
//! writes its rank's flag on all devices, and waits until its own device has the flags of all ranks.
//! It waits for a limited time, and stops when the host says so.
//!
//! Kernels meet only when the work of all ranks has been enqueued: the host lets them begin when it
//! has heard of all ranks. So no kernel waits for a launch that is yet to come.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::device::{Address, MOST_PARTS};
use crate::types::Rank;

/// Bytes from one flag to the next, so that no two ranks write the same cache line.
const FLAG: usize = 64;

/// Bytes of a device's flags, and of the number of its blocks behind them.
pub(crate) const FLAGS: usize = (MOST_PARTS + 1) * FLAG;

/// Where and when a kernel meets those of the other ranks. As in `cuda-kernels/meeting.cu`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Meeting {
    /// Where this rank's flag is on the device of each rank.
    theirs: [Address; MOST_PARTS],
    /// The flags of all ranks on this rank's device.
    own: Address,
    /// How many blocks of a kernel have come, on this rank's device.
    blocks: Address,
    /// How many nanoseconds a kernel waits at most.
    limit: u64,
    /// What a flag has reached when its rank has come, before the kernel moves anything but its first
    /// moves. At the end of the kernel it is one more.
    value: u32,
    /// 0 if the kernel meets no other.
    ranks: u32,
    /// The host sets it: the kernel stops waiting.
    is_off: AtomicU32,
    /// The kernel writes it: 1 + the rank that did not come in time.
    missing: AtomicU32,
}

const _: () = assert!(size_of::<Meeting>() == 168);

impl Meeting {
    /// No meeting.
    pub(crate) fn none() -> Meeting {
        let (is_off, missing) = (AtomicU32::new(0), AtomicU32::new(0));
        Meeting { theirs: [0; MOST_PARTS], own: 0, blocks: 0, limit: 0, value: 0, ranks: 0, is_off, missing }
    }

    /// The meeting with this number of a rank. `flags` has where the flags on each rank's device are,
    /// as this rank reaches them.
    pub(crate) fn new(number: u32, rank: Rank, flags: &[Address], limit: Duration) -> Meeting {
        let at = |flags: Address, place: usize| flags + (place * FLAG) as Address;
        let mut theirs = [0; MOST_PARTS];
        theirs.iter_mut().zip(flags).for_each(|(theirs, &flags)| *theirs = at(flags, rank));
        let limit = limit.as_nanos().try_into().unwrap_or(u64::MAX);
        // Flags begin at 0. Each meeting takes two values, of which the second is at the end.
        let value = number.wrapping_mul(2).wrapping_add(1);
        let (own, ranks) = (flags[rank], flags.len() as u32);
        Meeting { theirs, own, blocks: at(own, MOST_PARTS), limit, value, ranks, ..Meeting::none() }
    }

    /// Has the kernel stop waiting.
    pub(crate) fn call_off(&self) {
        self.is_off.store(1, Ordering::Release);
    }

    /// The rank that did not come in time.
    pub(crate) fn missing(&self) -> Option<Rank> {
        (self.missing.load(Ordering::Acquire) as usize).checked_sub(1)
    }
}

/// For the kernels of a fake device, which run as one block.
#[cfg(test)]
impl Meeting {
    pub(crate) fn is_any(&self) -> bool {
        self.ranks > 0
    }

    /// Comes to the beginning, or to the end. Returns false if a rank does not. `at` returns where
    /// the host has a flag.
    pub(crate) fn meet(&self, is_end: bool, at: impl Fn(Address) -> *mut u8) -> bool {
        let value = self.value.wrapping_add(is_end.into());
        // SAFETY: it is the address of a flag, which only atomics access.
        let flag = |address: Address| unsafe { &*at(address).cast::<AtomicU32>() };
        let ranks = self.ranks as usize;
        self.theirs[..ranks].iter().for_each(|&theirs| flag(theirs).store(value, Ordering::Release));
        let began = std::time::Instant::now();
        for rank in 0..ranks {
            let own = flag(self.own + (rank * FLAG) as Address);
            while (own.load(Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
                if self.is_off.load(Ordering::Acquire) != 0 {
                    return false;
                }
                if began.elapsed().as_nanos() as u64 > self.limit {
                    self.missing.store(1 + rank as u32, Ordering::Release);
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }
}
