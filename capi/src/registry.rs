//! Handles: numbers in the form of pointers that are never dereferenced, so that a wrong one is an
//! error and does no harm.
//!
//! A handle names a slot of a table and the slot's generation, which changes when the object is
//! taken out. So a handle stays invalid after its object is gone, whatever takes the slot. A call
//! that looks up a handle holds a read lock until it returns; a call that takes the object out
//! waits for all of these.
//!
//! A forked child has its parent's tables, but not the threads whose calls were in progress at the
//! fork: it does not wait for those.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kolo::raw::{between_forks, forks};

/// The kind of object. It is part of the handle: that of a communicator is never valid for an
/// operation.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Communicator = 5,
    Work = 10,
    Reducer = 15,
}

// The bits of index, kind and generation: 24, 8 and 32 if a pointer has 64.
const INDEX_BITS: u32 = usize::BITS * 3 / 8;
const KIND_BITS: u32 = usize::BITS / 8;
const LAST_GENERATION: usize = usize::MAX >> (INDEX_BITS + KIND_BITS);

/// Slots are never moved or freed. The first block has this many slots, and each further block as
/// many as all blocks before it.
const FIRST_BLOCK: usize = 64;
const BLOCKS: usize = (INDEX_BITS - FIRST_BLOCK.trailing_zeros() + 1) as usize;

pub(crate) struct Registry<T> {
    kind: Kind,
    blocks: [OnceLock<Block<T>>; BLOCKS],
    free: Mutex<Free>,
}

type Block<T> = Box<[Entry<T>]>;

struct Entry<T> {
    /// The value of [`forks`] when the slot was filled. A forked child has another value.
    forks: AtomicU32,
    slot: RwLock<Slot<T>>,
}

impl<T> Entry<T> {
    // Generations start at 1, so that no handle is null.
    const fn new() -> Entry<T> {
        Entry { forks: AtomicU32::new(0), slot: RwLock::new(Slot { generation: 1, value: None }) }
    }

    /// Returns whether the process from which this one was forked filled the slot.
    fn is_of_parent(&self) -> bool {
        self.forks.load(Ordering::Relaxed) != forks()
    }
}

struct Slot<T> {
    generation: usize,
    value: Option<T>,
}

struct Free {
    /// Slots that were used before.
    indices: Vec<usize>,
    /// The first slot that was never used.
    next: usize,
}

pub(crate) type Guard<'a, T> = MappedRwLockReadGuard<'a, T>;

impl<T> Registry<T> {
    pub(crate) const fn new(kind: Kind) -> Registry<T> {
        let free = Mutex::new(Free { indices: Vec::new(), next: 0 });
        Registry { kind, blocks: [const { OnceLock::new() }; BLOCKS], free }
    }

    /// Puts an object in, and returns its handle. Gives the object back if the table is full.
    pub(crate) fn insert(&self, value: T) -> Result<usize, T> {
        let index = self.free(|free| {
            let never_used = (free.next >> INDEX_BITS == 0).then_some(free.next);
            let index = free.indices.pop().or(never_used);
            free.next += usize::from(index == Some(free.next));
            index
        });
        let Some(index) = index else { return Err(value) };
        let (block, place) = locate(index);
        let slots = self.blocks[block].get_or_init(|| {
            let len = if block == 0 { FIRST_BLOCK } else { FIRST_BLOCK << (block - 1) };
            (0..len).map(|_| Entry::new()).collect()
        });
        let mut slot = slots[place].slot.write();
        slots[place].forks.store(forks(), Ordering::Relaxed);
        slot.value = Some(value);
        Ok((slot.generation << KIND_BITS | self.kind as usize) << INDEX_BITS | index)
    }

    /// Returns what a handle stands for, if it is valid. The object stays as long as the guard
    /// lives.
    #[inline(always)]
    pub(crate) fn get(&self, handle: usize) -> Option<Guard<'_, T>> {
        let (entry, generation) = self.entry(handle)?;
        // The lock is recursive: a call that waits to take the object out does not block one that
        // looks it up, such as the call that cancels the others.
        let slot = entry.slot.read_recursive();
        if slot.generation != generation {
            return None;
        }
        RwLockReadGuard::try_map(slot, |slot| slot.value.as_ref()).ok()
    }

    /// Waits until no call uses the handle, and returns the object; the handle is invalid from then
    /// on. `None` if the handle is not valid. `Some(None)` in a forked child if a thread of its
    /// parent used the handle at the fork: that object stays with the parent.
    pub(crate) fn take(&self, handle: usize) -> Option<Option<T>> {
        let (entry, generation) = self.entry(handle)?;
        if entry.is_of_parent() {
            return self.take_from_parent(entry, handle, generation);
        }
        self.empty(entry.slot.write(), handle, generation).map(Some)
    }

    /// As [`Registry::take`], but cancels the calls that use the object, also those that begin
    /// meanwhile.
    pub(crate) fn end(&self, handle: usize, give_up: impl Fn(&T)) -> Option<Option<T>> {
        let (entry, generation) = self.entry(handle)?;
        if entry.is_of_parent() {
            return self.take_from_parent(entry, handle, generation);
        }
        let mut patience = Duration::ZERO;
        loop {
            if let Some(slot) = entry.slot.try_write_for(patience) {
                return self.empty(slot, handle, generation).map(Some);
            }
            // None if another thread has taken the object out.
            give_up(&*self.get(handle)?);
            patience = Duration::from_millis(10);
        }
    }

    #[cold]
    fn take_from_parent(&self, entry: &Entry<T>, handle: usize, generation: usize) -> Option<Option<T>> {
        entry.slot.try_write().map_or(Some(None), |slot| self.empty(slot, handle, generation).map(Some))
    }

    fn empty(&self, mut slot: RwLockWriteGuard<'_, Slot<T>>, handle: usize, generation: usize) -> Option<T> {
        if slot.generation != generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation += 1;
        // A slot is not used again after its last generation.
        let is_worn = slot.generation > LAST_GENERATION;
        drop(slot);
        if !is_worn {
            self.free(|free| free.indices.push(handle & !(usize::MAX << INDEX_BITS)));
        }
        Some(value)
    }

    /// Uses the list of free slots. No fork finds it locked: a child makes handles, too.
    fn free<R>(&self, f: impl FnOnce(&mut Free) -> R) -> R {
        between_forks(|| f(&mut self.free.lock()))
    }

    #[inline(always)]
    fn entry(&self, handle: usize) -> Option<(&Entry<T>, usize)> {
        let (above, index) = (handle >> INDEX_BITS, handle & !(usize::MAX << INDEX_BITS));
        if above & !(usize::MAX << KIND_BITS) != self.kind as usize {
            return None;
        }
        let (block, place) = locate(index);
        Some((&self.blocks[block].get()?[place], above >> KIND_BITS))
    }
}

/// Returns the block of a slot, and its place there.
#[inline(always)]
fn locate(index: usize) -> (usize, usize) {
    let doublings = (index / FIRST_BLOCK).checked_ilog2();
    match doublings {
        None => (0, index),
        Some(doublings) => (doublings as usize + 1, index - (FIRST_BLOCK << doublings)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn handles_die_with_what_they_stand_for() {
        let registry: Registry<u32> = Registry::new(Kind::Communicator);
        let first = registry.insert(7).unwrap();
        assert_eq!(registry.get(first).as_deref(), Some(&7));
        assert_eq!(registry.take(first), Some(Some(7)));
        let second = registry.insert(8).unwrap();
        assert_ne!(first, second);
        assert!(registry.get(first).is_none(), "the slot was taken again");
        assert_eq!(registry.take(first), None);
        assert_eq!(registry.get(second).as_deref(), Some(&8));
    }

    #[test]
    fn foreign_numbers_are_no_handles() {
        let (communicators, works) = (Registry::new(Kind::Communicator), Registry::new(Kind::Work));
        let (communicator, work) = (communicators.insert(1).unwrap(), works.insert(2).unwrap());
        let local = 0;
        for foreign in [0, 1, usize::MAX, work, communicator + 1, communicator | 1 << 20, &raw const local as usize] {
            assert!(communicators.get(foreign).is_none(), "{foreign:#x}");
            assert!(communicators.take(foreign).is_none(), "{foreign:#x}");
        }
        assert!(works.get(communicator).is_none());
    }

    #[test]
    fn slots_do_not_overlap() {
        let registry = Registry::new(Kind::Work);
        let handles: Vec<usize> = (0..1000).map(|value| registry.insert(value).unwrap()).collect();
        for (value, &handle) in handles.iter().enumerate() {
            assert_eq!(registry.take(handle), Some(Some(value)));
        }
        let last = usize::MAX >> (usize::BITS - INDEX_BITS);
        assert_eq!(locate(last).0, BLOCKS - 1);
        for index in [0, 63, 64, 127, 128, 255, 256, last] {
            let (block, place) = locate(index);
            let len = if block == 0 { FIRST_BLOCK } else { FIRST_BLOCK << (block - 1) };
            assert!(place < len, "{index}");
        }
    }

    #[test]
    fn worn_slots_are_not_used_again() {
        let registry = Registry::new(Kind::Work);
        let first = registry.insert(()).unwrap();
        registry.blocks[0].get().unwrap()[0].slot.write().generation = LAST_GENERATION;
        let last = first | LAST_GENERATION << (INDEX_BITS + KIND_BITS);
        registry.take(last).unwrap();
        assert_eq!(registry.insert(()).unwrap() & 1, 1, "another slot");
    }

    #[test]
    fn taking_waits_for_those_who_use_it_and_lets_others_look() {
        let registry = Registry::new(Kind::Work);
        let handle = registry.insert(5).unwrap();
        let guard = registry.get(handle).unwrap();
        std::thread::scope(|scope| {
            let taker = scope.spawn(|| registry.take(handle));
            for _ in 0..1000 {
                assert_eq!(registry.get(handle).as_deref(), Some(&5));
                std::thread::yield_now();
            }
            assert!(!taker.is_finished());
            drop(guard);
            assert_eq!(taker.join().unwrap(), Some(Some(5)));
        });
        assert!(registry.get(handle).is_none());
    }

    #[test]
    fn ending_gives_up_whoever_uses_it_also_those_who_come_later() {
        let registry = Registry::new(Kind::Reducer);
        let handle = registry.insert(AtomicUsize::new(0)).unwrap();
        let enters = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let first = registry.get(handle).unwrap();
                enters.wait();
                while first.load(Relaxed) == 0 {
                    std::thread::yield_now();
                }
                let second = registry.get(handle).unwrap();
                let heard = second.load(Relaxed);
                drop(first);
                while second.load(Relaxed) <= heard {
                    std::thread::yield_now();
                }
            });
            enters.wait();
            let ended = registry.end(handle, |value| {
                value.fetch_add(1, Relaxed);
            });
            assert!(ended.flatten().unwrap().into_inner() > 1);
        });
        assert!(registry.end(handle, |_| panic!("nobody uses it")).is_none());
    }

    /// A thread of the parent uses the object at the fork, and does not exist in the child.
    #[cfg(all(unix, not(miri)))]
    #[test]
    fn a_forked_child_does_not_wait_for_its_parents_threads() {
        let registry = Registry::new(Kind::Work);
        let (ended, taken, free) = (registry.insert(5).unwrap(), registry.insert(6).unwrap(), registry.insert(7).unwrap());
        let _used = [registry.get(ended).unwrap(), registry.get(taken).unwrap()];
        let child = || {
            let left = (registry.end(ended, |_| {}), registry.take(taken), registry.take(free));
            let own = registry.insert(8).unwrap();
            left == (Some(None), Some(None), Some(Some(7)))
                && registry.take(own) == Some(Some(8))
                && registry.take(free).is_none()
        };
        assert_eq!(crate::child::is_so_in_a_child(child), Some(true), "none if it does not end");
    }
}
