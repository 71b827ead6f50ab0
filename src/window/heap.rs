//! Memory of the user that all ranks of the host map ("registered"), so that collectives on it need no staging.

use std::sync::Arc;

use crate::buffer::Chunk;
use crate::sys::Segment;

/// One collective allocation: a part of equal size for every rank of the host.
pub(crate) struct Allocation {
    pub(crate) segment: Arc<Segment>,
    /// Bytes of one rank's part.
    pub(crate) part: usize,
}

impl Allocation {
    /// The address of a byte of a rank's part.
    pub(crate) fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        assert!(offset <= self.part);
        self.segment.at(rank * self.part + offset)
    }
}

/// The allocations of one communicator, in the order in which they were made, which is the same on all ranks.
#[derive(Default)]
pub(crate) struct Heap {
    all: Vec<Option<Arc<Allocation>>>,
}

/// Where memory lies in an allocation: its number and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) allocation: u32,
    pub(crate) offset: u64,
}

impl Heap {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.iter().all(Option::is_none)
    }

    /// Makes a rank's parts its own: what others write from now on, it does not see. False if they are of this process.
    pub(crate) fn detach(&self, rank: usize) -> bool {
        self.all
            .iter()
            .flatten()
            .all(|registered| registered.segment.detach(rank * registered.part..(rank + 1) * registered.part))
    }

    pub(crate) fn add(&mut self, registered: Arc<Allocation>) {
        match self.all.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(registered),
            None => self.all.push(Some(registered)),
        }
    }

    /// Where a rank's memory lies, if it does in its part of an allocation.
    pub(crate) fn find(&self, rank: usize, chunk: Chunk) -> Option<Location> {
        self.all.iter().enumerate().find_map(|(number, registered)| {
            let registered = registered.as_ref()?;
            let offset = chunk.ptr.addr().checked_sub(registered.at(rank, 0).addr())?;
            let fits = offset.checked_add(chunk.len).is_some_and(|end| end <= registered.part);
            fits.then_some(Location { allocation: number as u32, offset: offset as u64 })
        })
    }

    /// The address of `len` bytes at a location in a rank's part, if there are so many: locations come from peers.
    pub(crate) fn resolve(&self, rank: usize, location: Location, len: usize) -> Option<*mut u8> {
        let registered = self.all.get(location.allocation as usize)?.as_ref()?;
        let offset = usize::try_from(location.offset).ok()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= registered.part);
        fits.then(|| registered.at(rank, offset))
    }

    /// One bit for each allocation that this rank's user has dropped.
    pub(crate) fn dropped(&self) -> Vec<u64> {
        let mut bits = vec![0; self.all.len().div_ceil(64)];
        for (i, registered) in self.all.iter().enumerate() {
            if registered.as_ref().is_some_and(|registered| Arc::strong_count(registered) == 1) {
                bits[i / 64] |= 1 << (i % 64);
            }
        }
        bits
    }

    /// Unmaps allocations that all ranks have dropped.
    pub(crate) fn forget(&mut self, bits: &[u64]) {
        for (i, registered) in self.all.iter_mut().enumerate() {
            if bits[i / 64] >> (i % 64) & 1 == 1 {
                *registered = None;
            }
        }
    }
}
