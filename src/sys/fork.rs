//! Forks: how a forked child detects that it is one, and how it finds shared data in a consistent
//! state.

#[cfg(all(unix, not(miri)))]
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(all(unix, not(miri)))]
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
#[cfg(all(unix, not(miri)))]
use std::time::{Duration, Instant};

/// Returns how often this process has been forked since [`count_forks`]. An object that remembers
/// another number belongs to the parent.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// As [`forks`], but also right in a fork handler that runs in the child before kolo's own.
pub(crate) fn forks_seen() -> u32 {
    #[cfg(all(unix, not(miri)))]
    forking::is_this_thread();
    forks()
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Held by the thread that forks, or that runs [`between_forks`]. It is the standard library's
/// mutex, which the child may unlock: only the system knows the threads that wait for it in the
/// parent.
#[cfg(all(unix, not(miri)))]
static LOCK: Mutex<()> = Mutex::new(());

/// The guard of the thread that forks.
#[cfg(all(unix, not(miri)))]
static HELD: Held = Held(UnsafeCell::new(None));

#[cfg(all(unix, not(miri)))]
struct Held(UnsafeCell<Option<MutexGuard<'static, ()>>>);

// SAFETY: only the thread that holds the lock accesses the guard.
#[cfg(all(unix, not(miri)))]
unsafe impl Sync for Held {}

/// How long [`between_forks`] waits for a thread that forks. That thread may wait for a lock of the
/// program that this one holds.
#[cfg(all(unix, not(miri)))]
const FORKING: Duration = Duration::from_millis(200);

/// Calls `f` while no other thread of this process forks. So a child finds every lock that is only
/// taken within `f` open, and the data behind it as before or after `f`. `f` must not fork.
///
/// The wait is bounded where it could be endless: in the handlers of a fork, which run on the
/// thread that forks, and for a fork whose handlers wait for this thread.
pub(crate) fn between_forks<T>(f: impl FnOnce() -> T) -> T {
    count_forks();
    #[cfg(all(unix, not(miri)))]
    let _lock = if forking::is_this_thread() { None } else { lock() };
    f()
}

/// Takes the lock; `None` if it stays locked for [`FORKING`].
#[cfg(all(unix, not(miri)))]
fn lock() -> Option<MutexGuard<'static, ()>> {
    let mut until = None;
    loop {
        match LOCK.try_lock() {
            Ok(lock) => return Some(lock),
            Err(TryLockError::Poisoned(lock)) => return Some(lock.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + FORKING) {
            return None;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Counts forks from now on.
pub(crate) fn count_forks() {
    // Miri does not fork.
    #[cfg(all(unix, not(miri)))]
    forking::register();
}

/// The handlers that the system calls before and after each fork.
#[cfg(all(unix, not(miri)))]
mod forking {
    use std::cell::Cell;
    use std::sync::Once;

    use super::{FORKS, HELD, LOCK, Ordering, PoisonError};

    thread_local! {
        /// Set while this thread forks, until the handlers have run: the parent process.
        static FORKS_FROM: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Returns whether this thread forks at the moment.
    pub(super) fn is_this_thread() -> bool {
        // In a child whose handler has not run yet, this counts the fork.
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
        // SAFETY: this thread has taken the lock in `before`, so only it accesses the guard, which
        // it takes out before the lock opens.
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

    /// Registers the handlers when the library is loaded, so that among all handlers of the
    /// program, these take the lock last and open it first.
    #[used]
    #[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
    #[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".init_array"))]
    static AT_LOAD: extern "C" fn() = register;

    pub(super) extern "C" fn register() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // This makes the linker keep `AT_LOAD`.
            std::hint::black_box(&AT_LOAD);
            // SAFETY: the handlers do only what is allowed in the child of a process with threads:
            // they add to a number, and open a lock that the only thread of the child holds.
            if unsafe { libc::pthread_atfork(Some(before), Some(in_the_parent), Some(in_the_child)) } != 0 {
                crate::log::warn!("cannot register fork handlers; a forked child that uses a communicator gets no error");
            }
        });
    }
}
