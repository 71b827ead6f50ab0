//! What a kernel moves: reductions of several sources to several targets. The host writes them to
//! pinned memory. From there a kernel that was launched before copies them to the device for the kernel
//! that moves.

use std::sync::atomic::{AtomicU32, Ordering};

use super::barrier::{DeviceBarrier, Missing};
use super::device::{Address, MOST_PARTS};

/// One reduction, which is a copy if there is one source. As in `cuda-kernels/reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    sources: [Address; MOST_PARTS],
    targets: [Address; MOST_PARTS],
    /// Elements.
    pub(crate) count: u64,
    source_count: u32,
    target_count: u32,
    /// The divisor of an average; other reductions ignore it.
    pub(crate) divisor: u32,
    /// The source that is read first.
    first: u32,
}

const _: () = assert!(size_of::<Move>() == 280);

impl Move {
    /// # Panics
    ///
    /// Panics if there is no source, no target, or more than [`MOST_PARTS`] of either.
    pub(crate) fn new(sources: &[Address], targets: &[Address], count: usize, divisor: u32) -> Move {
        let list = |addresses: &[Address]| {
            assert!((1..=MOST_PARTS).contains(&addresses.len()), "{} buffers in one move", addresses.len());
            let mut list = [0; MOST_PARTS];
            list[..addresses.len()].copy_from_slice(addresses);
            list
        };
        Move {
            sources: list(sources),
            targets: list(targets),
            count: count as u64,
            source_count: sources.len() as u32,
            target_count: targets.len() as u32,
            divisor,
            first: 0,
        }
    }

    /// Returns the same, but this source is read first, and those before it last, if a kernel has room
    /// for all of them. They are combined in the same order, so the bits are the same. So the kernels of
    /// several devices do not all read from one of them at once.
    pub(crate) fn beginning_with(self, first: usize) -> Move {
        Move { first: (first % self.source_count as usize) as u32, ..self }
    }

    pub(crate) fn sources(&self) -> &[Address] {
        &self.sources[..self.source_count as usize]
    }

    pub(crate) fn targets(&self) -> &[Address] {
        &self.targets[..self.target_count as usize]
    }
}

/// What a kernel is to do.
pub(crate) struct KernelTask {
    pub(crate) moves: Vec<Move>,
    /// How many of them come before the kernel waits for those of other ranks.
    pub(crate) before: usize,
    pub(crate) barrier: DeviceBarrier,
}

impl KernelTask {
    /// Returns the task of a kernel that waits for no other.
    pub(crate) fn of(moves: Vec<Move>) -> KernelTask {
        KernelTask { moves, before: 0, barrier: DeviceBarrier::none() }
    }
}

/// A task in pinned memory: what is here, and then each move.
#[repr(C)]
pub(crate) struct Moves {
    count: AtomicU32,
    before: u32,
    barrier: DeviceBarrier,
}

const _: () = assert!(size_of::<Moves>() == 176);

impl Moves {
    /// Bytes for `most` moves.
    pub(crate) const fn bytes(most: usize) -> usize {
        size_of::<Moves>() + most * size_of::<Move>()
    }

    /// Tells a kernel what to move.
    ///
    /// # Safety
    ///
    /// `at` is memory for as many moves, aligned to words, and no kernel reads it.
    pub(crate) unsafe fn write(at: *mut u8, task: KernelTask) {
        let KernelTask { moves, before, barrier } = task;
        let list = at.wrapping_add(size_of::<Moves>()).cast::<Move>();
        for (i, one) in moves.iter().enumerate() {
            // SAFETY: there is room for it.
            unsafe { list.wrapping_add(i).write(*one) };
        }
        let header = at.cast::<Moves>();
        // SAFETY: the header is at the beginning, and no kernel reads it yet.
        unsafe {
            (&raw mut (*header).before).write(before as u32);
            (&raw mut (*header).barrier).write(barrier);
            (*header).count.store(moves.len() as u32, Ordering::Release);
        }
    }

    /// Takes back what has not been copied for a kernel yet.
    ///
    /// # Safety
    ///
    /// `at` is memory for moves.
    pub(crate) unsafe fn take_back(at: *mut u8) {
        // SAFETY: the header is at the beginning, and any bytes are a valid one. The number is read
        // once, so a kernel moves all or nothing, or stops where it waits for others.
        let header = unsafe { &*at.cast::<Moves>() };
        // First, so that a kernel which finds no moves also finds this: other ranks must not take it for
        // one that has done its part.
        header.barrier.cancel();
        header.count.store(0, Ordering::Release);
    }

    /// Returns the rank that kept a kernel, which is done, from passing its barrier.
    ///
    /// # Safety
    ///
    /// `at` is memory that was written by [`Moves::write`].
    pub(crate) unsafe fn missing(at: *const u8) -> Option<Missing> {
        // SAFETY: as promised by the caller.
        unsafe { (*at.cast::<Moves>()).barrier.missing() }
    }

    /// Reads what a kernel of a fake device is to do: the moves before the barrier, it, and those after
    /// it.
    ///
    /// # Safety
    ///
    /// `at` is memory that was written by [`Moves::write`], and stays as long as the barrier is used.
    #[cfg(test)]
    pub(crate) unsafe fn read<'a>(at: *const u8) -> (Vec<Move>, &'a DeviceBarrier, Vec<Move>) {
        // SAFETY: as promised by the caller.
        unsafe {
            let header = &*at.cast::<Moves>();
            let count = header.count.load(Ordering::Acquire) as usize;
            let list = at.wrapping_add(size_of::<Moves>()).cast::<Move>();
            let mut before: Vec<Move> = (0..count).map(|i| list.wrapping_add(i).read()).collect();
            let after = before.split_off(count.min(header.before as usize));
            (before, &header.barrier, after)
        }
    }
}
