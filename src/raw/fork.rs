//! Forks: what tables need that a forked child uses, too.

use crate::sys;

/// Returns how many forks lie between the process that loaded the library and this one. A forked
/// child gets another number than its parent, also in handlers that run in the child. Always 0 on
/// systems without forks.
pub fn forks() -> u32 {
    sys::forks_seen()
}

/// Calls `f` while no other thread of this process forks. A lock that is only held inside `f` is
/// open in every forked child, and what it protects is as it was before or after `f`.
///
/// If the program's handlers of a fork wait for this thread, `f` is called nevertheless after 200
/// ms.
pub fn between_forks<T>(f: impl FnOnce() -> T) -> T {
    sys::between_forks(f)
}
