//! Memory that a rank takes and gives back alone, without the others, and exports to them: the pool of
//! one communicator.
//!
//! A pool consists of extents, each a region of memory that peers map when they are first told of
//! it: see [`super::registered`]. A block that is given back stays in the pool with its pages, so the
//! next holder need not wait for the system to clear new ones.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::host_group::HostGroup;
use crate::sys::{self, PageSize, Region};

/// Bytes of an extent, unless one block is larger. Of these only what has been used at least once
/// takes memory.
const EXTENT: usize = if cfg!(miri) { 64 << 10 } else { 64 << 20 };

/// The most extents of one rank. Beyond them, [`Pool::take`] fails, and the caller takes ordinary
/// memory.
pub(super) const MOST_EXTENTS: usize = 1024;

pub(crate) struct Pool {
    host: Arc<HostGroup>,
    page: PageSize,
    extents: Mutex<Vec<Extent>>,
    /// The number of extents. Operations read it without the lock.
    count: AtomicUsize,
    /// Forks that led to the process that made the pool. A child may free blocks, but the pool is
    /// its parent's.
    forks: u32,
}

struct Extent {
    region: Arc<Region>,
    /// Bytes from the start that have been reserved.
    reserved: usize,
    /// The free ranges: their lengths by their starts. Neighbours are joined.
    free: BTreeMap<usize, usize>,
}

/// A range of an extent, which belongs to its holder.
pub(crate) struct Block {
    pool: Arc<Pool>,
    region: Arc<Region>,
    extent: usize,
    start: usize,
    len: usize,
}

impl Pool {
    pub(super) fn new(host: Arc<HostGroup>) -> Pool {
        let (extents, count) = (Mutex::default(), AtomicUsize::new(0));
        Pool { host, page: PageSize::system(), extents, count, forks: sys::forks() }
    }

    /// Takes at least `bytes` bytes, aligned to a page. They are zeros or what earlier holders have
    /// left.
    ///
    /// # Errors
    ///
    /// What the system says if there is no more memory to share.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> io::Result<Block> {
        let len = self.page.round_up(bytes.max(1)).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut extents = self.extents.lock();
        for (number, extent) in extents.iter_mut().enumerate() {
            if let Some(start) = extent.take(len)? {
                return Ok(self.block(extent, number, start, len));
            }
        }
        if extents.len() == MOST_EXTENTS {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let whole = self.page.round_up(len.max(EXTENT)).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = self.host.create(whole)?;
        let mut extent = Extent { region, reserved: 0, free: BTreeMap::from([(0, whole)]) };
        let start = extent.take(len)?.expect("a new extent has room for the block");
        let block = self.block(&extent, extents.len(), start, len);
        extents.push(extent);
        self.count.store(extents.len(), Ordering::Release);
        Ok(block)
    }

    fn block(self: &Arc<Self>, extent: &Extent, number: usize, start: usize, len: usize) -> Block {
        Block { pool: self.clone(), region: extent.region.clone(), extent: number, start, len }
    }

    /// How many extents there are.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The region of an extent, by its number in the order in which they were made. `None` while a
    /// thread takes or gives back memory, which may take long.
    pub(super) fn region(&self, number: usize) -> Option<Arc<Region>> {
        Some(self.extents.try_lock()?[number].region.clone())
    }
}

impl Extent {
    /// Takes the first range of this length; `None` if there is none.
    fn take(&mut self, len: usize) -> io::Result<Option<usize>> {
        let Some((&start, &room)) = self.free.iter().find(|(_, room)| **room >= len) else { return Ok(None) };
        let end = start + len;
        if end > self.reserved {
            self.region.reserve(self.reserved..end)?;
            self.reserved = end;
        }
        self.free.remove(&start);
        if room > len {
            self.free.insert(end, room - len);
        }
        Ok(Some(start))
    }

    fn give_back(&mut self, mut start: usize, mut len: usize) {
        if let Some(behind) = self.free.remove(&(start + len)) {
            len += behind;
        }
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            (start, len) = (before, room + len);
        }
        self.free.insert(start, len);
    }
}

impl Block {
    /// The address of the first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.region.at(self.start)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // In a forked child, another thread of the parent may have held the lock, and what the pool
        // owns is the parent's.
        if sys::forks() == self.pool.forks {
            self.pool.extents.lock()[self.extent].give_back(self.start, self.len);
        } else {
            std::mem::forget(self.pool.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_group;
    use crate::types::mix;

    fn pool() -> Arc<Pool> {
        Arc::new(Pool::new(host_group::fuzz::of_threads(1).remove(0)))
    }

    #[test]
    fn a_block_is_used_again_with_what_it_contains() {
        let pool = pool();
        let block = pool.take(1).unwrap();
        let start = block.start();
        // SAFETY: the block is this thread's.
        unsafe { start.write(7) };
        drop(block);
        let again = pool.take(1).unwrap();
        assert_eq!(again.start(), start);
        // SAFETY: as above.
        assert_eq!(unsafe { again.start().read() }, 7);
        assert_ne!(pool.take(1).unwrap().start(), start, "two holders of one block");
    }

    #[test]
    fn blocks_never_overlap_and_all_comes_back() {
        let pool = pool();
        let mut held: Vec<Block> = Vec::new();
        for round in 0..400 {
            let number = mix(round, 1) as usize;
            if number.is_multiple_of(3) && !held.is_empty() {
                held.swap_remove(number % held.len());
                continue;
            }
            let block = pool.take(1 + mix(round, 2) as usize % (EXTENT / 8)).unwrap();
            let range = |block: &Block| block.start().addr()..block.start().addr() + block.len;
            let (mine, page) = (range(&block), PageSize::system().bytes());
            assert!(mine.start.is_multiple_of(page) && mine.len().is_multiple_of(page));
            for other in &held {
                let other = range(other);
                assert!(mine.end <= other.start || other.end <= mine.start, "{mine:?} and {other:?}");
            }
            held.push(block);
        }
        assert!(pool.count() > 1, "the blocks did not need a second extent");
        held.clear();
        for extent in pool.extents.lock().iter() {
            assert_eq!(extent.free, BTreeMap::from([(0, extent.region.len())]));
        }
    }

    /// Taking memory may take long, and operations have a deadline.
    #[test]
    fn an_operation_does_not_wait_for_a_thread_that_takes_memory() {
        let pool = pool();
        let _block = pool.take(1).unwrap();
        let taking = pool.extents.lock();
        assert!(pool.region(0).is_none());
        drop(taking);
        assert!(pool.region(0).is_some());
    }

    #[test]
    fn a_block_may_be_larger_than_an_extent() {
        let pool = pool();
        let blocks = [pool.take(EXTENT + 1).unwrap(), pool.take(1).unwrap()];
        assert!(blocks[0].len > EXTENT);
        assert_eq!(pool.count(), 2);
        assert!(pool.take(usize::MAX).is_err());
    }
}
