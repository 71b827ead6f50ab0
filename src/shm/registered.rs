//! Registered memory: user memory that all ranks of the host map, so that collectives on it need no
//! staging.
//!
//! The ranks allocate it together, or each has a [`Pool`] from which it takes memory alone. Peers
//! learn of the extents of a pool in the words of phases, and map them.
//!
//! A rank's part of an allocation is its own, except while an operation lends it to the peers
//! ([`State`]). When an operation fails, the rank takes back what that operation had lent. It
//! touches nothing else, because other threads may be using it.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::flags::Words;
use super::pool::Pool;
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

    /// Frees the pages of a rank's part. Its address stays reserved.
    pub(crate) fn release(&self, rank: usize) {
        self.region.release(rank * self.part..(rank + 1) * self.part);
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
    /// The rank whose memory it is, if it is an extent of a [`Pool`]. Otherwise every rank has a
    /// part.
    owner: Option<usize>,
    state: State,
}

impl Entry {
    /// Where a rank's part lies among the parts; `None` if it has none.
    fn place(&self, rank: usize) -> Option<usize> {
        match self.owner {
            None => Some(rank),
            Some(owner) => (owner == rank).then_some(0),
        }
    }
}

/// The registered memory of one communicator, and what this rank has lent of it.
pub(crate) struct Heap {
    /// This rank's number among those of the host.
    rank: usize,
    page: PageSize,
    /// What the ranks have allocated together, in the order in which they did, which is the same on
    /// all ranks.
    all: Vec<Option<Entry>>,
    pool: Arc<Pool>,
    /// The extents that ranks have announced. Ranks announce them in the words of phases in which
    /// all ranks see the words of all, so the order is the same on all ranks. `None` if this process
    /// has not mapped the extent.
    extents: Vec<Option<Entry>>,
    /// The numbers under which this rank exports its extents, in the order of the pool.
    announced: Vec<u32>,
    /// The extent that was announced last, until this rank adds it itself.
    announcing: Option<Arc<Region>>,
    /// How many of the extents this process has mapped, from the first on. Once it cannot map one,
    /// the number stays as it is.
    mapped: usize,
    /// How many of the extents all ranks have mapped, from the first on. This rank lends these.
    usable: usize,
    /// How many of this rank's announced extents all ranks have mapped.
    fetched: usize,
}

/// Where memory lies: the number of an allocation and an offset in a rank's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// With [`EXTENT`], the number of an extent.
    pub(crate) allocation: u32,
    pub(crate) offset: u64,
}

/// Set in the number of an extent.
const EXTENT: u32 = 1 << 31;

/// An extent that a rank announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announced {
    /// The number under which its owner exports it; not 0.
    pub(crate) id: u32,
    pub(crate) len: u64,
}

/// What each rank says in the first phase of an operation whose buffers may be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) loan: Option<Loan>,
    /// How many of the announced extents the rank has mapped.
    pub(crate) mapped: u32,
    pub(crate) announced: Option<Announced>,
    /// Whether the rank wants the copy mode measured again.
    pub(crate) doubts: bool,
}

/// The buffers that a rank lends to its peers for one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loan {
    pub(crate) input: Location,
    /// The same as the input if peers write nothing.
    pub(crate) output: Location,
}

/// In the first word, says that the next three describe a [`Loan`].
const LENT: u64 = 1;
/// In the first word: the rank doubts the copy mode.
const DOUBTS: u64 = 2;

impl Notice {
    pub(crate) fn words(self) -> Words {
        let mut words = [u64::from(self.mapped) << 32, 0, 0, 0, 0, 0];
        if self.doubts {
            words[0] |= DOUBTS;
        }
        if let Some(Loan { input, output }) = self.loan {
            words[0] |= LENT;
            words[1] = u64::from(output.allocation) << 32 | u64::from(input.allocation);
            (words[2], words[3]) = (input.offset, output.offset);
        }
        if let Some(Announced { id, len }) = self.announced {
            (words[4], words[5]) = (id.into(), len);
        }
        words
    }

    pub(crate) fn from_words([first, allocations, input, output, id, len]: Words) -> Notice {
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        let loan = Loan {
            input: Location { allocation: low(allocations), offset: input },
            output: Location { allocation: high(allocations), offset: output },
        };
        Notice {
            loan: (first & LENT != 0).then_some(loan),
            mapped: high(first),
            announced: (id != 0).then_some(Announced { id: low(id), len }),
            doubts: first & DOUBTS != 0,
        }
    }
}

impl Heap {
    pub(crate) fn new(rank: usize, page: PageSize, pool: Pool) -> Heap {
        let (all, extents, announced) = (Vec::new(), Vec::new(), Vec::new());
        Heap { rank, page, all, pool: Arc::new(pool), extents, announced, announcing: None, mapped: 0, usable: 0, fetched: 0 }
    }

    /// The memory that this rank takes alone.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn add(&mut self, allocation: Arc<Allocation>) {
        let entry = Some(Entry { allocation, owner: None, state: State::Free });
        match self.all.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = entry,
            None => self.all.push(entry),
        }
    }

    /// Lends the input of operation `seq` to the peers, and the output that they write, if there is
    /// one. `None` if these are not registered. Until [`Heap::give_back`] or [`Heap::revoke`], peers
    /// may read the input and write the output.
    pub(crate) fn lend(&mut self, seq: u64, input: RawSlice, output: Option<RawSliceMut>) -> Option<Loan> {
        let input = self.find(input)?;
        let mut loan = Loan { input, output: input };
        let mut written = 0..0;
        if let Some(memory) = output {
            loan.output = self.find(memory.as_const())?;
            written = loan.output.offset as usize..loan.output.offset as usize + memory.len;
        }
        // The output comes last: both may lie in one allocation.
        for (location, written) in [(loan.input, 0..0), (loan.output, written)] {
            self.entry_mut(location).expect("the location is that of an entry").state = State::Lent { seq, written };
        }
        Some(loan)
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
        for entry in self.lent() {
            match (&entry.state, entry.place(rank)) {
                (State::Lent { written, .. }, Some(place)) if written.start < written.end => {
                    entry.allocation.make_private(place, written.clone(), page)?;
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
        let all = self.all.iter_mut().chain(&mut self.extents);
        all.flatten().filter(|entry| matches!(entry.state, State::Lent { .. }))
    }

    /// Returns the location of memory that lies in this rank's part of an allocation, if that part
    /// may be lent.
    fn find(&self, chunk: RawSlice) -> Option<Location> {
        let all = (0..).zip(&self.all);
        let extents = (EXTENT..).zip(&self.extents[..self.usable]);
        all.chain(extents).find_map(|(number, entry)| {
            let entry = entry.as_ref()?;
            let start = entry.allocation.at(entry.place(self.rank)?, 0);
            let offset = chunk.ptr.addr().checked_sub(start.addr())?;
            let fits = offset.checked_add(chunk.len).is_some_and(|end| end <= entry.allocation.part);
            (fits && entry.state == State::Free).then_some(Location { allocation: number, offset: offset as u64 })
        })
    }

    fn entry_mut(&mut self, location: Location) -> Option<&mut Entry> {
        let number = (location.allocation & !EXTENT) as usize;
        let entries = if location.allocation & EXTENT == 0 { &mut self.all } else { &mut self.extents };
        entries.get_mut(number)?.as_mut()
    }

    /// Returns the address of `len` bytes at a location in a rank's part. Returns `None` if the
    /// part does not have them: locations come from peers and are not trusted.
    pub(crate) fn resolve(&self, rank: usize, location: Location, len: usize) -> Option<*mut u8> {
        let number = (location.allocation & !EXTENT) as usize;
        let entries = if location.allocation & EXTENT == 0 { &self.all } else { &self.extents };
        let entry = entries.get(number)?.as_ref()?;
        let (place, offset) = (entry.place(rank)?, usize::try_from(location.offset).ok()?);
        let fits = offset.checked_add(len).is_some_and(|end| end <= entry.allocation.part);
        fits.then(|| entry.allocation.at(place, offset))
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

/// Extents.
impl Heap {
    /// What this rank says to its peers, with this loan. Announces an extent that is new, if all ranks
    /// see the words of all. `export` is how a region gets a number for peers to fetch it.
    pub(crate) fn notice(&mut self, loan: Option<Loan>, all_see: bool, export: impl FnOnce(&Arc<Region>) -> u32) -> Notice {
        let mut announced = None;
        if all_see
            && self.announced.len() < self.pool.count()
            && let Some(region) = self.pool.region(self.announced.len())
        {
            let id = export(&region);
            self.announced.push(id);
            announced = Some(Announced { id, len: region.len() as u64 });
            self.announcing = Some(region);
        }
        Notice { loan, mapped: self.mapped as u32, announced, doubts: false }
    }

    /// Takes note that all ranks have mapped this many extents. Returns the numbers of this rank's
    /// extents that no peer needs to fetch any more.
    pub(crate) fn mapped_by_all(&mut self, mapped: usize) -> Vec<u32> {
        // What peers say is not trusted.
        self.usable = mapped.min(self.mapped);
        let of_this_rank = |entry: &&Option<Entry>| entry.as_ref().is_some_and(|entry| entry.owner == Some(self.rank));
        let fetched = self.extents[..self.usable].iter().filter(of_this_rank).count();
        let ids = self.announced[self.fetched..fetched].to_vec();
        self.fetched = fetched;
        ids
    }

    /// How many extents have been announced.
    pub(crate) fn extents(&self) -> usize {
        self.extents.len()
    }

    /// Adds an extent that a rank has announced. `region` is `None` if this process cannot map it.
    pub(crate) fn add_extent(&mut self, owner: usize, region: Option<Arc<Region>>) {
        let entry = region.map(|region| {
            let allocation = Arc::new(Allocation { part: region.len(), region });
            Entry { allocation, owner: Some(owner), state: State::Free }
        });
        if entry.is_some() && self.mapped == self.extents.len() {
            self.mapped += 1;
        }
        self.extents.push(entry);
    }

    /// The region that [`Heap::notice`] has announced, once.
    pub(crate) fn take_announced(&mut self) -> Option<Arc<Region>> {
        self.announcing.take()
    }

    /// The numbers of this rank's extents that some peer may not have fetched yet.
    pub(crate) fn not_fetched(&self) -> &[u32] {
        &self.announced[self.fetched..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_group;

    fn notice(mapped: u32) -> Notice {
        Notice { loan: None, mapped, announced: None, doubts: false }
    }

    #[test]
    fn words_hold_a_notice() {
        let at = |allocation, offset| Location { allocation, offset };
        let loan = Loan { input: at(EXTENT | 3, 1 << 40), output: at(2, 64) };
        for loan in [None, Some(loan)] {
            for announced in [None, Some(Announced { id: 7, len: 1 << 35 })] {
                for doubts in [false, true] {
                    let notice = Notice { loan, mapped: 5, announced, doubts };
                    assert_eq!(Notice::from_words(notice.words()), notice);
                }
            }
        }
        assert_eq!(Notice::from_words([0; 6]), notice(0));
    }

    /// Peers must have an extent before they are told that a buffer lies in it.
    #[test]
    fn an_extent_is_lent_once_all_ranks_have_mapped_it() {
        let host = host_group::fuzz::of_threads(1).remove(0);
        let mut heap = Heap::new(0, PageSize::system(), Pool::new(host));
        let block = heap.pool().clone().take(1000).unwrap();
        let memory = RawSlice { ptr: block.start(), len: 1000 };
        let lend = |heap: &mut Heap| heap.lend(1, memory, None).inspect(|_| heap.give_back()).is_some();

        assert_eq!(heap.notice(None, false, |_| unreachable!()).announced, None, "not all ranks would see it");
        let first = heap.notice(None, true, |_| 5);
        assert_eq!(first.announced.map(|announced| announced.id), Some(5));
        assert_eq!(heap.not_fetched(), [5]);
        assert!(heap.mapped_by_all(0).is_empty());
        let announced = heap.take_announced();
        heap.add_extent(0, announced);
        assert_eq!(heap.notice(None, true, |_| unreachable!()), notice(1));
        assert!(!lend(&mut heap), "no peer has mapped it");
        assert!(heap.mapped_by_all(0).is_empty());
        assert!(!lend(&mut heap), "one peer has not mapped it");
        assert_eq!(heap.mapped_by_all(1), [5]);
        assert!(heap.not_fetched().is_empty());
        assert!(lend(&mut heap));
        assert!(heap.mapped_by_all(1).is_empty(), "the number was given twice");

        // This process cannot map an extent of a peer: nothing from there on is used.
        heap.add_extent(1, None);
        heap.add_extent(1, Some(Arc::new(Region::heap(100))));
        assert_eq!(heap.notice(None, true, |_| unreachable!()), notice(1));
        heap.mapped_by_all(9);
        assert!(lend(&mut heap));
        assert_eq!(heap.usable, 1, "a peer's word counts more than what this process has mapped");
    }
}
