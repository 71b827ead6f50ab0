//! Forks: how a copy of a process notices that it is one, and finds the data that it may use whole.

#[cfg(all(unix, not(miri)))]
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(all(unix, not(miri)))]
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
#[cfg(all(unix, not(miri)))]
use std::time::{Duration, Instant};

/// How often this process has come out of a fork since [`count_forks`]: a process that remembers another number is a copy.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// The same, also in a handler that runs in a child before kolo's own.
pub(crate) fn forks_seen() -> u32 {
    #[cfg(all(unix, not(miri)))]
    forking::is_this_thread();
    forks()
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Held by the thread that forks, or that runs [`between_forks`]. (One of the standard library's: it may be unlocked in the child,
/// for the threads that wait for it in the parent are known to the system only.)
#[cfg(all(unix, not(miri)))]
static LOCK: Mutex<()> = Mutex::new(());

/// The lock of the thread that forks.
#[cfg(all(unix, not(miri)))]
static HELD: Held = Held(UnsafeCell::new(None));

#[cfg(all(unix, not(miri)))]
struct Held(UnsafeCell<Option<MutexGuard<'static, ()>>>);

// SAFETY: only the thread that holds the lock touches it.
#[cfg(all(unix, not(miri)))]
unsafe impl Sync for Held {}

/// How long [`between_forks`] waits for a thread that forks. That one may wait for a lock of the program's which this one holds.
#[cfg(all(unix, not(miri)))]
const PATIENCE: Duration = Duration::from_millis(200);

/// Calls `f` while no other thread of this process forks. So a child finds what is locked only within `f` unlocked, and as it is
/// before or after `f`. In `f` no process forks.
///
/// It does not wait where that could last for ever: in the handlers of a fork, which run on the thread that forks, and for a fork
/// whose handlers wait for this thread.
pub(crate) fn between_forks<T>(f: impl FnOnce() -> T) -> T {
    count_forks();
    #[cfg(all(unix, not(miri)))]
    let _lock = if forking::is_this_thread() { None } else { lock() };
    f()
}

/// The lock, unless it does not open for [`PATIENCE`].
#[cfg(all(unix, not(miri)))]
fn lock() -> Option<MutexGuard<'static, ()>> {
    let mut until = None;
    loop {
        match LOCK.try_lock() {
            Ok(lock) => return Some(lock),
            Err(TryLockError::Poisoned(lock)) => return Some(lock.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + PATIENCE) {
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Has forks counted from now on.
pub(crate) fn count_forks() {
    // Miri does not fork.
    #[cfg(all(unix, not(miri)))]
    forking::register();
}

/// What the system calls before and after each fork.
#[cfg(all(unix, not(miri)))]
mod forking {
    use std::cell::Cell;
    use std::sync::Once;

    use super::{FORKS, HELD, LOCK, Ordering, PoisonError};

    thread_local! {
        /// This thread forks: the process that it forks from, until the handlers have run.
        static FORKS_FROM: Cell<Option<u32>> = const { Cell::new(None) };
    }

    pub(super) fn is_this_thread() -> bool {
        // In a child whose handler has not run yet, the fork is counted now.
        if FORKS_FROM.try_with(|from| from.get().is_some_and(|parent| parent != std::process::id())) == Ok(true) {
            in_the_child();
        }
        FORKS_FROM.try_with(|from| from.get().is_some()).unwrap_or(true)
    }

    extern "C" fn before() {
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this thread holds the lock.
        unsafe { *HELD.0.get() = Some(lock) };
        let _ = FORKS_FROM.try_with(|from| from.set(Some(std::process::id())));
    }

    fn open() -> bool {
        if FORKS_FROM.try_with(Cell::take).ok().flatten().is_none() {
            return false;
        }
        // SAFETY: this thread has taken the lock in `before`. It takes the guard out before the lock opens.
        drop(unsafe { (*HELD.0.get()).take() });
        true
    }

    extern "C" fn in_the_parent() {
        open();
    }

    extern "C" fn in_the_child() {
        if open() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// When the library is loaded, so that of a program's handlers and these, the lock is taken last and opened first.
    #[used]
    #[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
    #[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".init_array"))]
    static AT_LOAD: extern "C" fn() = register;

    pub(super) extern "C" fn register() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // A linker that takes this takes what stands beside it.
            std::hint::black_box(&AT_LOAD);
            // SAFETY: the handlers do what is allowed in a child of a process with threads: they add to a number, and open a lock
            // that the only thread of the child holds.
            if unsafe { libc::pthread_atfork(Some(before), Some(in_the_parent), Some(in_the_child)) } != 0 {
                tracing::warn!("a forked child will not be told that it cannot use its communicators");
            }
        });
    }
}
