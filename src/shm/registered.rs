//! Registered memory: user memory that all ranks of the host map, so that collectives on it need no
//! staging.
//!
//! A rank's part of an allocation is its own, except while an operation lends it to the peers
//! ([`State`]). When an operation fails, the rank takes back what that operation had lent. It
//! touches nothing else, because other threads may be using it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::sys::{PageSize, Region};

/// One collective allocation, with a part of equal size for every rank of the host.
pub(crate) struct Allocation {
    pub(crate) region: Arc<Region>,
    /// Bytes of one rank's part, which consists of whole pages.
    pub(crate) part: usize,
}

impl Allocation {
    /// Returns the address of a byte of a rank's part.
    pub(crate) fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        assert!(offset <= self.part);
        self.region.at(rank * self.part + offset)
    }

    /// Makes the pages that hold a range of a rank's part private to this process.
    fn make_private(&self, rank: usize, written: Range<usize>, page: PageSize) -> io::Result<()> {
        let pages = page.holding(written);
        assert!(pages.end <= self.part, "a part consists of whole pages");
        self.region.make_private(rank * self.part + pages.start..rank * self.part + pages.end)
    }
}

/// What peers may do with this rank's part of an allocation.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Peers may not access it.
    Free,
    /// Peers may read it, and write this range of it, in operation `seq`.
    Lent { seq: u64, written: Range<usize> },
    /// Peers may never access it again: the operation failed.
    Revoked,
}

struct Entry {
    allocation: Arc<Allocation>,
    state: State,
}

/// The allocations of one communicator and what this rank has lent of its parts. The order is that
/// in which the allocations were made, which is the same on all ranks.
pub(crate) struct Heap {
    /// This rank's number among those of the host.
    rank: usize,
    page: PageSize,
    all: Vec<Option<Entry>>,
}

/// Where memory lies: the number of an allocation and an offset in a rank's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) allocation: u32,
    pub(crate) offset: u64,
}

impl Heap {
    pub(crate) fn new(rank: usize, page: PageSize) -> Heap {
        Heap { rank, page, all: Vec::new() }
    }

    pub(crate) fn add(&mut self, allocation: Arc<Allocation>) {
        let entry = Some(Entry { allocation, state: State::Free });
        match self.all.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = entry,
            None => self.all.push(entry),
        }
    }

    /// Lends the buffers of operation `seq` to the peers, if both are registered, and returns their
    /// locations. Until [`Heap::give_back`] or [`Heap::revoke`], peers may read the input and write
    /// the output.
    pub(crate) fn lend(&mut self, seq: u64, input: RawSlice, output: RawSliceMut) -> Option<[Location; 2]> {
        let locations = [self.find(input)?, self.find(output.as_const())?];
        let written = locations[1].offset as usize..locations[1].offset as usize + output.len;
        for (location, written) in locations.into_iter().zip([0..0, written]) {
            let entry = self.all[location.allocation as usize].as_mut().expect("the location is that of an entry");
            entry.state = State::Lent { seq, written };
        }
        Some(locations)
    }

    /// Ends the loan: the peers have finished with what was lent.
    pub(crate) fn give_back(&mut self) {
        for entry in self.lent() {
            entry.state = State::Free;
        }
    }

    /// Returns the operation in which peers may be using a part of this rank, if there is one.
    pub(crate) fn lent_to(&mut self) -> Option<u64> {
        self.lent().find_map(|entry| if let State::Lent { seq, .. } = entry.state { Some(seq) } else { None })
    }

    /// Makes the memory that peers may be writing private to this process, so that they write
    /// elsewhere. Called once per failure.
    pub(crate) fn make_private(&mut self) -> io::Result<()> {
        let (rank, page) = (self.rank, self.page);
        for Entry { allocation, state } in self.lent() {
            match state {
                State::Lent { written, .. } if written.start < written.end => {
                    allocation.make_private(rank, written.clone(), page)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the loan after a failure: what was lent belongs to this rank alone and is never lent
    /// again.
    pub(crate) fn revoke(&mut self) {
        for entry in self.lent() {
            entry.state = State::Revoked;
        }
    }

    fn lent(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.all.iter_mut().flatten().filter(|entry| matches!(entry.state, State::Lent { .. }))
    }

    /// Returns the location of memory that lies in this rank's part of an allocation, if that part
    /// may be lent.
    fn find(&self, chunk: RawSlice) -> Option<Location> {
        self.all.iter().enumerate().find_map(|(number, entry)| {
            let Entry { allocation, state } = entry.as_ref()?;
            let offset = chunk.ptr.addr().checked_sub(allocation.at(self.rank, 0).addr())?;
            let fits = offset.checked_add(chunk.len).is_some_and(|end| end <= allocation.part);
            (fits && *state == State::Free).then_some(Location { allocation: number as u32, offset: offset as u64 })
        })
    }

    /// Returns the address of `len` bytes at a location in a rank's part. Returns `None` if the
    /// part does not have them: locations come from peers and are not trusted.
    pub(crate) fn resolve(&self, rank: usize, location: Location, len: usize) -> Option<*mut u8> {
        let allocation = &self.all.get(location.allocation as usize)?.as_ref()?.allocation;
        let offset = usize::try_from(location.offset).ok()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= allocation.part);
        fits.then(|| allocation.at(rank, offset))
    }

    /// Returns one bit for each allocation, set if the user on this rank has dropped it.
    pub(crate) fn dropped(&self) -> Vec<u64> {
        let mut bits = vec![0; self.all.len().div_ceil(64)];
        for (i, entry) in self.all.iter().enumerate() {
            if entry.as_ref().is_some_and(|entry| Arc::strong_count(&entry.allocation) == 1) {
                bits[i / 64] |= 1 << (i % 64);
            }
        }
        bits
    }

    /// Unmaps the allocations whose bits are set: all ranks have dropped them.
    pub(crate) fn forget(&mut self, bits: &[u64]) {
        for (i, entry) in self.all.iter_mut().enumerate() {
            if bits[i / 64] >> (i % 64) & 1 == 1 {
                *entry = None;
            }
        }
    }
}
