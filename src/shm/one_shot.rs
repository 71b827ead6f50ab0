//! Reductions in one phase: every rank that takes the result reduces everything.

use super::part::Part;
use super::pipeline::Collective;
use super::slots::{SLOT, Slots};
use crate::reduce;
use crate::sync;

/// Returns up to how many bytes over all ranks each rank reduces everything. With more, it takes less time
/// to move less in two phases: 0.9 instead of 1.4 us for 8 KiB on each of two ranks. Ranks that share
/// processors pay for a phase with switches from one to another: 8.6 instead of 5.9 us on four ranks and two
/// processors.
#[inline]
pub(super) const fn one_shot(is_crowded: bool) -> usize {
    if is_crowded { 64 << 10 } else { 8 << 10 }
}

const _: () = assert!(one_shot(true) / 2 <= SLOT, "two ranks of a one-shot reduction stage half of the bytes each");

/// Up to this many bytes, a rank prefetches its next slot. For 16 KiB, where cores are far from
/// each other, prefetching takes longer than it saves.
const PREFETCHED: usize = 8 << 10;

/// Every rank stages its whole buffer, and reduces all of them if it takes the result.
pub(super) struct OneShot<'a> {
    pub(super) part: Part<'a>,
    pub(super) takes: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl OneShot<'_> {
    fn bytes(&self) -> usize {
        self.part.call.count * self.part.element
    }
}

impl Collective for OneShot<'_> {
    const COMBINES: bool = false;

    fn segments(&self) -> usize {
        1
    }

    fn staged(&self) -> usize {
        self.bytes()
    }

    fn stage(&mut self, _: usize, mine: *mut u8) {
        let all = 0..self.part.call.count;
        let (input, bytes) = (self.part.input(&all), self.bytes());
        // SAFETY: a slot has room for what is reduced in one shot, and the caller of `run` vouches
        // for the input.
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
        let all = 0..self.part.call.count;
        self.parts.clear();
        self.parts.extend((0..self.part.ranks).map(|rank| slots.of(rank).cast_const()));
        // SAFETY: every rank has staged as many elements, and the caller of `run` vouches for the
        // output.
        unsafe { self.part.fold(self.parts, self.part.output(&all), all.len()) };
    }
}
