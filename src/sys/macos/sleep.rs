//! Sleeping on a word of memory.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::sys::doze::doze;

type Wait = unsafe extern "C" fn(*mut c_void, u64, usize, u32, u32, u64) -> c_int;
type Wake = unsafe extern "C" fn(*mut c_void, usize, u32) -> c_int;

/// The functions of macOS 14.4 and newer. On older systems a program that names them does not
/// start, so they are looked up.
static FUNCTIONS: LazyLock<Option<(Wait, Wake)>> = LazyLock::new(|| {
    let find = |name: &std::ffi::CStr| {
        // SAFETY: the name ends with a zero.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!function.is_null()).then_some(function)
    };
    let wait = find(c"os_sync_wait_on_address_with_timeout")?;
    let wake = find(c"os_sync_wake_by_address_all")?;
    // SAFETY: these are the functions' types in the system's header.
    Some(unsafe { (std::mem::transmute::<*mut c_void, Wait>(wait), std::mem::transmute::<*mut c_void, Wake>(wake)) })
});

/// Sleeps until [`wake_all`] is called on `word`, at most for `timeout`. Returns at once if the
/// word does not hold `value`, and may return early. The word may be shared between processes.
/// Before macOS 14.4, it dozes.
pub(crate) fn sleep_on(word: &AtomicU32, value: u32, timeout: Duration) {
    let Some((wait, _)) = *FUNCTIONS else { return doze(word, value, timeout) };
    // The system refuses a timeout of zero, and long ones.
    let timeout = timeout.clamp(Duration::from_nanos(1), Duration::from_secs(1));
    // SAFETY: the word is four bytes, which live until the call returns.
    let result = unsafe {
        wait(
            word.as_ptr().cast(),
            value.into(),
            size_of::<u32>(),
            libc::OS_SYNC_WAIT_ON_ADDRESS_SHARED,
            libc::OS_CLOCK_MACH_ABSOLUTE_TIME,
            timeout.as_nanos() as u64,
        )
    };
    if result >= 0 {
        return;
    }
    let error = io::Error::last_os_error();
    // EFAULT: the page of the word was not in memory, and the system did not wait for it.
    if !matches!(error.raw_os_error(), Some(libc::ETIMEDOUT | libc::EINTR | libc::EFAULT)) {
        crate::log::warn!(%error, "cannot sleep on a word of memory");
        doze(word, value, timeout);
    }
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    let Some((_, wake)) = *FUNCTIONS else { return };
    // SAFETY: the word is four bytes, which live until the call returns.
    let result = unsafe { wake(word.as_ptr().cast(), size_of::<u32>(), libc::OS_SYNC_WAKE_BY_ADDRESS_SHARED) };
    if result < 0 {
        let error = io::Error::last_os_error();
        // ENOENT: no thread sleeps.
        if !matches!(error.raw_os_error(), Some(libc::ENOENT)) {
            crate::log::warn!(%error, "cannot wake the threads that sleep on a word of memory");
        }
    }
}
