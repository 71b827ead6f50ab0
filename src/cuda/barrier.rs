//! A barrier of the kernels of several devices, so that ranks need not wait for each other on the host.
//! Each device has a flag for each rank in its memory. A kernel that arrives writes its rank's flag on
//! all devices, and waits until its own device has the flags of all ranks. It waits for a limited
//! time, and stops when the host cancels the barrier. It says so on all devices then, in the word behind
//! its flag: its stream goes on, and its buffers change. So a kernel that has found all flags also
//! looks whether a rank has given up. If none has, all buffers were intact until then.
//!
//! The host lets kernels begin when all ranks have made the call. So no kernel waits for a call that is
//! yet to come.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::device::{Address, MOST_PARTS};
use crate::types::Rank;

/// Bytes from one flag to the next, so that no two ranks write the same cache line.
const FLAG_BYTES: usize = 64;

/// Bytes of a device's flags, and of the number of its blocks behind them.
pub(crate) const FLAGS_BYTES: usize = (MOST_PARTS + 1) * FLAG_BYTES;

/// In [`DeviceBarrier::missing`]: the rank has given up.
const HAS_GIVEN_UP: u32 = 1 << 31;

/// A rank for which a kernel has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It did not arrive in time.
    Late(Rank),
    /// It has stopped waiting itself.
    GaveUp(Rank),
}

/// Where and how long a kernel waits for those of the other ranks. As in `cuda-kernels/barrier.cu`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DeviceBarrier {
    /// Where this rank's flag is on the device of each rank.
    theirs: [Address; MOST_PARTS],
    /// The flags of all ranks on this rank's device.
    own: Address,
    /// How many blocks of a kernel have arrived, on this rank's device.
    blocks: Address,
    /// How many nanoseconds a kernel waits at most, from its beginning.
    limit: u64,
    /// What a flag has reached when its rank has arrived at the first barrier of a kernel. At the second
    /// one, at its end, it is one more.
    value: u32,
    /// 0 if the kernel waits for no other.
    ranks: u32,
    /// The host sets it: the kernel stops waiting.
    is_cancelled: AtomicU32,
    /// The kernel writes it: 1 + the rank that did not arrive in time, or that has given up.
    missing: AtomicU32,
}

const _: () = assert!(size_of::<DeviceBarrier>() == 168);

impl DeviceBarrier {
    /// Returns one for a kernel that waits for no other.
    pub(crate) fn none() -> DeviceBarrier {
        let (is_cancelled, missing) = (AtomicU32::new(0), AtomicU32::new(0));
        DeviceBarrier { theirs: [0; MOST_PARTS], own: 0, blocks: 0, limit: 0, value: 0, ranks: 0, is_cancelled, missing }
    }

    /// Returns those of a rank's kernel with this number, of all that wait. `flags` has where the flags on
    /// each rank's device are, as this rank reaches them.
    pub(crate) fn new(number: u32, rank: Rank, flags: &[Address], limit: Duration) -> DeviceBarrier {
        let at = |flags: Address, place: usize| flags + (place * FLAG_BYTES) as Address;
        let mut theirs = [0; MOST_PARTS];
        theirs.iter_mut().zip(flags).for_each(|(theirs, &flags)| *theirs = at(flags, rank));
        let limit = limit.as_nanos().try_into().unwrap_or(u64::MAX);
        // Flags begin at 0, and each kernel takes two values.
        let value = number.wrapping_mul(2).wrapping_add(1);
        let (own, ranks) = (flags[rank], flags.len() as u32);
        DeviceBarrier { theirs, own, blocks: at(own, MOST_PARTS), limit, value, ranks, ..DeviceBarrier::none() }
    }

    /// Has the kernel stop waiting, or not begin.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(1, Ordering::Release);
    }

    /// Returns the rank that kept the kernel from passing the barrier; `None` also if the host has
    /// cancelled it.
    pub(crate) fn missing(&self) -> Option<Missing> {
        let missing = self.missing.load(Ordering::Acquire);
        let rank = ((missing & !HAS_GIVEN_UP) as usize).checked_sub(1)?;
        Some(if missing & HAS_GIVEN_UP == 0 { Missing::Late(rank) } else { Missing::GaveUp(rank) })
    }
}

/// For the kernels of a fake device, which run as one block.
#[cfg(test)]
impl DeviceBarrier {
    pub(crate) fn is_any(&self) -> bool {
        self.ranks > 0
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire) != 0
    }

    /// Arrives at the first barrier of a kernel, or at the second one. Gives up, and returns false, if a
    /// rank does not. `elapsed` is the time of the device since the kernel began, and `at` returns where
    /// the host has a flag.
    pub(crate) fn wait(&self, elapsed: &dyn Fn() -> Duration, is_second: bool, at: impl Fn(Address) -> *mut u8) -> bool {
        // Not in the second one: other ranks may have read what this rank has moved.
        if !is_second && self.is_cancelled() {
            return false;
        }
        let value = self.value.wrapping_add(is_second.into());
        // SAFETY: it is the address of a flag, which only atomics access.
        let flag = |address: Address| unsafe { &*at(address).cast::<AtomicU32>() };
        let ranks = self.ranks as usize;
        let give_up = || self.theirs[..ranks].iter().for_each(|&theirs| flag(theirs + 4).store(1, Ordering::Release));
        self.theirs[..ranks].iter().for_each(|&theirs| flag(theirs).store(value, Ordering::Release));
        for rank in 0..ranks {
            let own = flag(self.own + (rank * FLAG_BYTES) as Address);
            while (own.load(Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
                let is_late = elapsed().as_nanos() as u64 > self.limit;
                if is_late {
                    self.missing.store(1 + rank as u32, Ordering::Release);
                }
                if is_late || self.is_cancelled() {
                    give_up();
                    return false;
                }
                std::thread::yield_now();
            }
        }
        for rank in 0..ranks {
            let own = self.own + (rank * FLAG_BYTES) as Address;
            if own != self.theirs[rank] && flag(own + 4).load(Ordering::Acquire) != 0 {
                self.missing.store((1 + rank as u32) | HAS_GIVEN_UP, Ordering::Release);
                give_up();
                return false;
            }
        }
        true
    }
}
