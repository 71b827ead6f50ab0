//! The slots in which ranks stage data for their peers.

/// Bytes of one slot. Larger data passes through in segments.
pub(super) const SLOT: usize = 128 << 10;

/// The most ranks of a host that share a window: each has a cache line of every slot to itself.
pub(crate) const MOST_RANKS: usize = SLOT / 64;

/// Where a rank's slots are.
#[derive(Clone, Copy)]
pub(super) struct StageAt {
    pub(super) stage: u32,
    pub(super) base: *mut u8,
}

/// The slots of all ranks in one phase.
pub(crate) struct Slots<'a> {
    pub(super) stages: &'a [StageAt],
    pub(super) offset: usize,
}

impl Slots<'_> {
    #[inline]
    pub(crate) fn of(&self, rank: usize) -> *mut u8 {
        self.stages[rank].base.wrapping_add(self.offset)
    }
}
