//! The slots in which ranks stage data for their peers.

use super::flags::SLOTS;
use crate::host_group::stage::STAGE;

/// The most bytes that are staged in one slot. Larger data passes through in segments.
pub(super) const SLOT: usize = 128 << 10;

/// The memory of one slot.
const ROOM: usize = STAGE / SLOTS;

/// Data of more bytes is elsewhere in its slot each time. What a rank writes where its peers have read not
/// long ago is still in their caches, and takes two to three times as long as where it is not: on an AMD EPYC
/// whose cores have second-level caches of 1 MiB, an all-reduce of 64 KiB takes 10 us where each rank writes
/// the same 256 KiB in turn, 6 us where 1 MiB, and 4 us where 2 MiB or more.
const ROTATED: usize = 1 << 10;

/// Data of more segments goes through all caches anyway, and is in one place, which takes less of them.
const FEW: usize = 4;

/// Returns where in its stage a rank writes in a phase, and its peers read. The operation has `segments`
/// segments, of which a rank stages up to `bytes`. When the phase begins, no peer reads the slot, and so none
/// reads this place.
#[inline]
pub(super) fn place(phase: u32, segments: usize, bytes: usize) -> usize {
    debug_assert!(bytes <= ROOM);
    let slot = phase as usize % SLOTS * ROOM;
    if bytes <= ROTATED || bytes > ROOM / 2 || segments > FEW {
        return slot;
    }
    let (turn, part) = (phase as usize / SLOTS, bytes.next_power_of_two());
    slot + turn % (ROOM / part) * part
}

/// The most ranks of a host that share a window: each has a cache line of every slot to itself.
pub(crate) const MOST_RANKS: usize = SLOT / 64;

/// A slot with a block of up to `longest` bytes for each peer, side by side.
#[derive(Clone, Copy)]
pub(super) struct ForPeers {
    pub(super) longest: usize,
}

impl ForPeers {
    /// Where the block for a peer is in the slot of a rank, which has none for itself.
    pub(super) fn at(self, of: usize, peer: usize) -> usize {
        (peer - usize::from(peer > of)) * self.longest
    }

    /// The bytes of all blocks of a rank.
    pub(super) fn bytes(self, ranks: usize) -> usize {
        (ranks - 1) * self.longest
    }
}

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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Data stays in its slot, and goes through all of it before it is where it was.
    #[test]
    fn data_takes_turns_within_its_slot() {
        let many = (0..5 * ROOM as u32 / 1024).chain(u32::MAX - 99..=u32::MAX);
        for bytes in [1, 1024, 1025, 4096, 5000, 64 << 10, SLOT, SLOT + 1, ROOM] {
            for phase in many.clone() {
                let slot = phase as usize % SLOTS * ROOM;
                let at = place(phase, 1, bytes);
                assert!(slot <= at && at + bytes <= slot + ROOM && at.is_multiple_of(64), "{bytes} in phase {phase}: {at}");
            }
            let turns = if bytes <= ROTATED { 1 } else { (ROOM / bytes.next_power_of_two()).max(1) };
            let places = |segments, turns: usize| {
                (0..turns * SLOTS).map(|phase| place(phase as u32, segments, bytes)).collect::<HashSet<_>>().len()
            };
            assert_eq!((places(1, turns), places(FEW, 3 * turns)), (turns * SLOTS, turns * SLOTS), "{bytes}");
            assert_eq!(places(FEW + 1, turns), SLOTS, "{bytes}");
        }
    }

    /// Blocks for peers do not overlap, and none is for the rank itself.
    #[test]
    fn blocks_for_peers_are_side_by_side() {
        let blocks = ForPeers { longest: 96 };
        for of in 0..4 {
            let places: Vec<usize> = (0..4).filter(|&peer| peer != of).map(|peer| blocks.at(of, peer)).collect();
            assert_eq!((places, blocks.bytes(4)), (vec![0, 96, 192], 288));
        }
    }
}
