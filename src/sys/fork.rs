//! Forks: how a copy of a process notices that it is one, and finds the data that it may use whole.

#[cfg(all(unix, not(miri)))]
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
#[cfg(all(unix, not(miri)))]
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How often this process has come out of a fork since [`count_forks`]: a process that remembers another number is a copy.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
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

/// Calls `f` while no other thread of this process forks. So a child finds what is locked only within `f` unlocked, and as it is
/// before or after `f`. In `f` no process forks.
pub(crate) fn between_forks<T>(f: impl FnOnce() -> T) -> T {
    count_forks();
    #[cfg(all(unix, not(miri)))]
    let _lock = lock();
    f()
}

#[cfg(all(unix, not(miri)))]
fn lock() -> MutexGuard<'static, ()> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has forks counted from now on.
pub(crate) fn count_forks() {
    // Miri does not fork.
    #[cfg(all(unix, not(miri)))]
    {
        extern "C" fn before() {
            let lock = lock();
            // SAFETY: this thread holds the lock.
            unsafe { *HELD.0.get() = Some(lock) };
        }
        extern "C" fn in_the_parent() {
            // SAFETY: this thread has taken the lock in `before`. It takes the guard out before the lock opens.
            drop(unsafe { (*HELD.0.get()).take() });
        }
        extern "C" fn in_the_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
            in_the_parent();
        }
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            // SAFETY: the handlers do what is allowed in a child of a process with threads: they add to a number, and open a lock
            // that the only thread of the child holds.
            if unsafe { libc::pthread_atfork(Some(before), Some(in_the_parent), Some(in_the_child)) } != 0 {
                tracing::warn!("a forked child will not be told that it cannot use its communicators");
            }
        });
    }
}

/// What `f` says in a forked child, unless the child never ends.
#[cfg(all(test, unix, not(miri)))]
pub(crate) fn is_so_in_a_child(f: impl Fn() -> bool) -> Option<bool> {
    // SAFETY: the child does what is tested, and ends without running anything of its parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_so = f();
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(!is_so)) };
    }
    assert!(child > 0, "no fork");
    let late = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut status = 0;
    // SAFETY: the child is this process's, and `status` lives.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if std::time::Instant::now() > late {
            // SAFETY: as above; it has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &mut status, 0) };
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Some(status == 0)
}
