//! What a kernel moves: reductions of several sources to several targets. The host writes them to
//! pinned memory, and a kernel that was launched before reads them there.

use std::sync::atomic::{AtomicU64, Ordering};

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
    unused: u32,
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
            unused: 0,
        }
    }

    pub(crate) fn sources(&self) -> &[Address] {
        &self.sources[..self.source_count as usize]
    }

    pub(crate) fn targets(&self) -> &[Address] {
        &self.targets[..self.target_count as usize]
    }
}

/// Moves in pinned memory: their number, and then each.
#[repr(C)]
pub(crate) struct Moves {
    count: AtomicU64,
}

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
    pub(crate) unsafe fn write(at: *mut u8, moves: &[Move]) {
        let list = at.wrapping_add(size_of::<Moves>()).cast::<Move>();
        for (i, one) in moves.iter().enumerate() {
            // SAFETY: there is room for it.
            unsafe { list.wrapping_add(i).write(*one) };
        }
        // SAFETY: the number is at the beginning.
        unsafe { (*at.cast::<Moves>()).count.store(moves.len() as u64, Ordering::Release) };
    }

    /// Takes back what a kernel has not read yet.
    ///
    /// # Safety
    ///
    /// `at` is memory for moves.
    pub(crate) unsafe fn take_back(at: *mut u8) {
        // SAFETY: the number is at the beginning. Each block of a kernel reads it once, so a block moves
        // all or nothing.
        unsafe { (*at.cast::<Moves>()).count.store(0, Ordering::Release) };
    }

    /// Reads what a kernel of a fake device is to move.
    ///
    /// # Safety
    ///
    /// `at` is memory that was written by [`Moves::write`].
    #[cfg(test)]
    pub(crate) unsafe fn read(at: *const u8) -> Vec<Move> {
        // SAFETY: as promised by the caller.
        unsafe {
            let count = (*at.cast::<Moves>()).count.load(Ordering::Acquire) as usize;
            let list = at.wrapping_add(size_of::<Moves>()).cast::<Move>();
            (0..count).map(|i| list.wrapping_add(i).read()).collect()
        }
    }
}
