//! Reductions in one phase: every rank that wants the result reduces everything.

use std::ops::Range;

use super::pipeline::{Collective, Memory, SLOT, Slots};
use crate::reduce;
use crate::sync;

/// Bytes over all ranks up to which everybody reduces everything in any case, and from which on nobody does. In between it is
/// tried, from size to size, twice as large each.
pub(super) const ONE_SHOT: Range<usize> = (8 << 10) + 1..(64 << 10) + 1;

const _: () = assert!(ONE_SHOT.end / 2 <= SLOT, "in one shot, two ranks stage half of it each");

/// Up to so many bytes, a rank fetches its next slot ahead. Of 16 KiB, where cores are far from each other, that takes longer than
/// it saves.
const PREFETCHED: usize = 8 << 10;

/// Everybody stages everything, and reduces it if it is to have the result.
pub(super) struct OneShot<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) takes: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl OneShot<'_> {
    fn bytes(&self) -> usize {
        self.memory.call.count * self.memory.call.element
    }
}

impl Collective for OneShot<'_> {
    const COMBINES: bool = false;

    fn pieces(&self) -> usize {
        1
    }

    fn stage(&mut self, _: usize, mine: *mut u8) {
        let all = 0..self.memory.call.count;
        let (input, bytes) = (self.memory.input(&all), self.bytes());
        // SAFETY: a slot holds what is reduced in one shot, and the caller of `run` vouches for the input.
        unsafe { reduce::copy_up_to(PREFETCHED, input, mine, bytes) };
    }

    /// The next operation is often as large as this one.
    fn prefetch(&self, next: *mut u8) {
        if self.takes && self.bytes() <= PREFETCHED {
            for line in (0..self.bytes()).step_by(64) {
                sync::prefetch_to_write(next.wrapping_add(line));
            }
        }
    }

    fn take(&mut self, _: usize, slots: &Slots<'_>) {
        if !self.takes {
            return;
        }
        let all = 0..self.memory.call.count;
        self.parts.clear();
        self.parts.extend((0..self.memory.ranks).map(|rank| slots.of(rank).cast_const()));
        // SAFETY: everybody has staged as much, and the caller of `run` vouches for the output.
        unsafe { self.memory.fold(self.parts, self.memory.output(&all), all.len()) };
    }
}
