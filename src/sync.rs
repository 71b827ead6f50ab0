//! Atomics, and sleeping on them. The crate in `tests/loom` has those of loom in their place, so that
//! loom and production share the code of the protocols.
//!
//! Where each of two sides stores its own word and then loads the other's, at least one side must
//! see the other's store. That takes sequentially consistent accesses ([`announce`], [`look`]).

pub(crate) use core::sync::atomic::Ordering;
#[cfg(not(test))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(test)]
pub(crate) use watched::{AtomicU32, AtomicU64};

pub(crate) use crate::sys::{sleep_on, wake_all};

/// Stores a word. Later looks come after the store, and earlier writes are released with it.
#[inline]
pub(crate) fn announce(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::SeqCst);
}

/// Adds to a word. Later looks come after the addition.
#[inline]
pub(crate) fn announce_add(word: &AtomicU32, value: u32) {
    word.fetch_add(value, Ordering::SeqCst);
}

/// Fetches a cache line that this thread will soon read.
#[inline]
pub(crate) fn prefetch_to_read<T>(_line: *const T) {
    // SAFETY: the instruction is a hint. It changes neither memory nor registers, and fails on
    // no address.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        core::arch::asm!("prefetcht0 [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: the instruction is a hint, too, which by the architecture never aborts.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
}

/// Fetches a cache line that this thread will soon write. Other caches give the line up
/// meanwhile, so the write does not wait for them.
#[inline]
pub(crate) fn prefetch_to_write<T>(_line: *const T) {
    #[cfg(test)]
    watched::tell(_line, watched::Access::Prefetch);
    // SAFETY: the instruction is a hint. It changes neither memory nor registers, and fails on
    // no address. All 64-bit processors of AMD have it; those of Intel have it or ignore it.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: the instruction is a hint, too, which by the architecture never aborts.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
}

/// Loads a word, after all earlier announcements of this thread. Acquires the writes before the
/// word was announced.
#[inline]
pub(crate) fn look(word: &AtomicU32) -> u32 {
    word.load(Ordering::SeqCst)
}

/// Atomics that tell a test of each load and store, so that it can count what the protocols cost.
/// Other accesses pass through `Deref` and are not told.
#[cfg(test)]
pub(crate) mod watched {
    use std::cell::{Cell, RefCell};
    use std::ops::Deref;
    use std::sync::atomic::{self, Ordering};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Access {
        Load,
        Store,
        Prefetch,
    }

    type Watcher = Box<dyn FnMut(usize, Access)>;

    thread_local! {
        static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
        static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
    }

    /// Calls `watcher` with the address of each access of this thread, until the next call.
    pub(crate) fn watch(watcher: Option<Watcher>) {
        IS_WATCHED.set(watcher.is_some());
        WATCHER.set(watcher);
    }

    /// Leaves out the accesses that `body` makes.
    pub(crate) fn unwatched<R>(body: impl FnOnce() -> R) -> R {
        let before = IS_WATCHED.replace(false);
        let result = body();
        IS_WATCHED.set(before);
        result
    }

    #[inline]
    pub(super) fn tell<T>(at: *const T, access: Access) {
        if IS_WATCHED.get() {
            WATCHER.with_borrow_mut(|watcher| watcher.iter_mut().for_each(|watcher| watcher(at.addr(), access)));
        }
    }

    macro_rules! atomic {
        ($name:ident, $word:ty) => {
            #[repr(transparent)]
            #[derive(Debug, Default)]
            pub(crate) struct $name(atomic::$name);

            impl $name {
                #[inline]
                pub(crate) fn load(&self, order: Ordering) -> $word {
                    tell(self, Access::Load);
                    self.0.load(order)
                }

                #[inline]
                pub(crate) fn store(&self, value: $word, order: Ordering) {
                    tell(self, Access::Store);
                    self.0.store(value, order);
                }
            }

            /// For all other accesses.
            impl Deref for $name {
                type Target = atomic::$name;

                fn deref(&self) -> &atomic::$name {
                    &self.0
                }
            }
        };
    }

    atomic!(AtomicU32, u32);
    atomic!(AtomicU64, u64);
}
