//! Handles: numbers that look like pointers and are never followed, so that a wrong one is an error and nothing worse.
//!
//! A handle names a slot of a table and the slot's generation, which changes whenever what was there is taken out. So a handle
//! of something that is gone stays dead, whatever takes its place. To look one up costs a read lock, which is held for as long as
//! the call lasts; what takes something out waits until all calls have left it.

use std::sync::OnceLock;

use parking_lot::{MappedRecursiveRwLockReadGuard, Mutex, RecursiveRwLock, RecursiveRwLockReadGuard};

/// What a handle is for. It is part of the handle: one of a communicator is none of an operation.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Communicator = 5,
    Work = 10,
    Reducer = 15,
}

// 24, 8 and 32 bits where a pointer has 64.
const INDEX_BITS: u32 = usize::BITS * 3 / 8;
const KIND_BITS: u32 = usize::BITS / 8;
const LAST_GENERATION: usize = usize::MAX >> (INDEX_BITS + KIND_BITS);

/// Slots are never moved or freed: each block has as many as all before it together, and the first has this many.
const FIRST_BLOCK: usize = 64;
const BLOCKS: usize = (INDEX_BITS - FIRST_BLOCK.trailing_zeros() + 1) as usize;

pub(super) struct Registry<T> {
    kind: Kind,
    blocks: [OnceLock<Block<T>>; BLOCKS],
    free: Mutex<Free>,
}

type Block<T> = Box<[RecursiveRwLock<Slot<T>>]>;

struct Slot<T> {
    generation: usize,
    value: Option<T>,
}

struct Free {
    /// Slots that were used before.
    indices: Vec<usize>,
    /// The first that was never used.
    next: usize,
}

pub(super) type Guard<'a, T> = MappedRecursiveRwLockReadGuard<'a, T>;

impl<T> Registry<T> {
    pub(super) const fn new(kind: Kind) -> Registry<T> {
        let free = Mutex::new(Free { indices: Vec::new(), next: 0 });
        Registry { kind, blocks: [const { OnceLock::new() }; BLOCKS], free }
    }

    /// Puts something in, and returns its handle; gives it back if there is no room.
    pub(super) fn insert(&self, value: T) -> Result<usize, T> {
        let index = {
            let mut free = self.free.lock();
            match free.indices.pop() {
                Some(index) => index,
                None if free.next >> INDEX_BITS == 0 => {
                    free.next += 1;
                    free.next - 1
                }
                None => return Err(value),
            }
        };
        let (block, place) = locate(index);
        let slots = self.blocks[block].get_or_init(|| {
            let len = if block == 0 { FIRST_BLOCK } else { FIRST_BLOCK << (block - 1) };
            // Generations start with 1, so that no handle is null.
            (0..len).map(|_| RecursiveRwLock::new(Slot { generation: 1, value: None })).collect()
        });
        let mut slot = slots[place].write();
        slot.value = Some(value);
        Ok((slot.generation << KIND_BITS | self.kind as usize) << INDEX_BITS | index)
    }

    /// What a handle stands for, if anything; it stays there for as long as the guard lives.
    #[inline]
    pub(super) fn get(&self, handle: usize) -> Option<Guard<'_, T>> {
        let (slot, generation) = self.slot(handle)?;
        // The lock is recursive: whoever waits to take it out keeps no call from looking, such as one that gives up the others.
        let slot = slot.read();
        if slot.generation != generation {
            return None;
        }
        RecursiveRwLockReadGuard::try_map(slot, |slot| slot.value.as_ref()).ok()
    }

    /// Whether calls use what a handle stands for.
    pub(super) fn is_in_use(&self, handle: usize) -> bool {
        self.slot(handle).is_some_and(|(slot, _)| slot.try_write().is_none())
    }

    /// Takes out what a handle stands for, when nobody uses it any more. The handle is dead from then on.
    pub(super) fn take(&self, handle: usize) -> Option<T> {
        let (slot, generation) = self.slot(handle)?;
        let mut slot = slot.write();
        if slot.generation != generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation += 1;
        // A slot whose generations are used up is used no more.
        let is_worn = slot.generation > LAST_GENERATION;
        drop(slot);
        if !is_worn {
            self.free.lock().indices.push(handle & !(usize::MAX << INDEX_BITS));
        }
        Some(value)
    }

    #[inline]
    fn slot(&self, handle: usize) -> Option<(&RecursiveRwLock<Slot<T>>, usize)> {
        let (above, index) = (handle >> INDEX_BITS, handle & !(usize::MAX << INDEX_BITS));
        if above & !(usize::MAX << KIND_BITS) != self.kind as usize {
            return None;
        }
        let (block, place) = locate(index);
        Some((&self.blocks[block].get()?[place], above >> KIND_BITS))
    }
}

/// The block in which a slot is, and its place there.
#[inline]
fn locate(index: usize) -> (usize, usize) {
    let doublings = (index / FIRST_BLOCK).checked_ilog2();
    match doublings {
        None => (0, index),
        Some(doublings) => (doublings as usize + 1, index - (FIRST_BLOCK << doublings)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_die_with_what_they_stand_for() {
        let registry: Registry<u32> = Registry::new(Kind::Communicator);
        let first = registry.insert(7).unwrap();
        assert_eq!(registry.get(first).as_deref(), Some(&7));
        assert_eq!(registry.take(first), Some(7));
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
            assert_eq!(registry.take(handle), Some(value));
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
        registry.blocks[0].get().unwrap()[0].write().generation = LAST_GENERATION;
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
            assert_eq!(taker.join().unwrap(), Some(5));
        });
        assert!(registry.get(handle).is_none());
    }
}
