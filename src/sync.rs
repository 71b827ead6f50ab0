//! Atomics and sleeping on them, so that loom and production share the code of the protocols.
//!
//! Where one side stores a word and then looks at another, while the other side does the same the other way round, at least
//! one must see the other. That takes sequentially consistent accesses ([`announce`], [`look`]). loom knows sequential
//! consistency only of fences, so there each access has one beside it, which is the same or stronger.

#[cfg(not(kolo_loom))]
mod shim {
    pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    pub(crate) use crate::sys::{sleep_on, wake_all};

    /// Stores a word; later looks come after it, and what was written before is released with it.
    #[inline]
    pub(crate) fn announce(word: &AtomicU32, value: u32) {
        word.store(value, Ordering::SeqCst);
    }

    /// Adds to a word; later looks come after it.
    #[inline]
    pub(crate) fn announce_add(word: &AtomicU32, value: u32) {
        word.fetch_add(value, Ordering::SeqCst);
    }

    /// Has a cache line brought here that will be written soon: those who have read it give it up meanwhile, and the write does not
    /// wait for them.
    #[inline]
    pub(crate) fn prefetch_to_write<T>(_line: *const T) {
        // SAFETY: a hint, which changes neither memory nor registers and fails on no address. AMD's 64-bit processors have it from
        // the first one on; Intel's have it or take it for nothing.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            core::arch::asm!("prefetchw [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
        }
        // SAFETY: a hint, too, of which the architecture says that it never ends in an abort.
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        unsafe {
            core::arch::asm!("prfm pstl1keep, [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
        }
    }

    /// Looks at a word after what was announced before; acquires what was written before it was announced.
    #[inline]
    pub(crate) fn look(word: &AtomicU32) -> u32 {
        word.load(Ordering::SeqCst)
    }
}

#[cfg(kolo_loom)]
mod shim {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    pub(crate) fn announce(word: &AtomicU32, value: u32) {
        word.store(value, Ordering::Release);
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn prefetch_to_write<T>(_: *const T) {}

    pub(crate) fn announce_add(word: &AtomicU32, value: u32) {
        word.fetch_add(value, Ordering::AcqRel);
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn look(word: &AtomicU32) -> u32 {
        loom::sync::atomic::fence(Ordering::SeqCst);
        word.load(Ordering::Acquire)
    }

    pub(crate) fn sleep_on(_: &AtomicU32, _: u32, _: std::time::Duration) {
        unreachable!("models bring their own way to sleep");
    }

    pub(crate) fn wake_all(_: &AtomicU32) {
        unreachable!("models bring their own way to sleep");
    }
}

pub(crate) use shim::*;
