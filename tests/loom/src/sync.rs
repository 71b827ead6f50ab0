//! What `src/sync.rs` has, of loom. loom models sequential consistency of fences only, so a fence is
//! beside each access, which is at least as strong.

pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(crate) fn announce(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
    loom::sync::atomic::fence(Ordering::SeqCst);
}

pub(crate) fn prefetch_to_read<T>(_: *const T) {}

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
    unreachable!("loom models have their own way to sleep");
}

pub(crate) fn wake_all(_: &AtomicU32) {
    unreachable!("loom models have their own way to sleep");
}
