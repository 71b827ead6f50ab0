//! Reacts to SIGUSR1, and keeps SIGPIPE from the program.

use std::io;

/// Calls `action`, on a thread of its own, whenever the process receives SIGUSR1. The previous
/// handler of the signal still runs.
///
/// To be called once in a process.
#[cfg(unix)]
pub(crate) fn on_user_signal(action: fn()) -> io::Result<()> {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::descriptor::Guarded;

    let (receiver, sender) = super::above_standard(UnixStream::pair)?;
    let mut receiver = Guarded::new(receiver);
    sender.set_nonblocking(true)?;
    std::thread::Builder::new().name("kolo-trace".to_owned()).spawn(move || {
        let mut bytes = [0; 64];
        // Signals that come while the action runs count as one.
        while receiver.is_intact()
            && let Ok(1..) = receiver.read(&mut bytes)
        {
            action();
        }
    })?;
    let _ = unix::PIPE.set(Guarded::new(sender));
    // SAFETY: `unix::handle` calls only functions that signal handlers may call, and zeros are
    // valid for both structs.
    unsafe {
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        ours.sa_sigaction = unix::handle as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // Kept before the handler can use it.
        if libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut before) != 0 {
            return Err(io::Error::last_os_error());
        }
        let _ = unix::BEFORE.set(before);
        if libc::sigaction(libc::SIGUSR1, &ours, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(unix)]
mod unix {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::OnceLock;

    use crate::sys::descriptor::Guarded;

    /// What the handler writes to.
    pub(super) static PIPE: OnceLock<Guarded<UnixStream>> = OnceLock::new();

    /// The previous handler of the signal.
    pub(super) static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

    pub(super) extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let error = std::io::Error::last_os_error().raw_os_error();
        // A signal handler may ask for the state of a descriptor.
        if let Some(pipe) = PIPE.get().filter(|pipe| pipe.is_intact()) {
            // SAFETY: the call reads one byte of a constant. If the pipe is full, the thread has not
            // yet read earlier signals, and this one need not be written.
            unsafe { libc::write(pipe.as_raw_fd(), c"!".as_ptr().cast(), 1) };
        }
        set_errno(error.unwrap_or(0));
        if let Some(before) = BEFORE.get()
            && ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction)
        {
            // SAFETY: the program installed this handler for this signal, and the flags say which
            // of the two types it has.
            unsafe {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(before.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(i32) = std::mem::transmute(before.sa_sigaction);
                    handler(signal);
                }
            }
        }
    }

    /// Restores errno, which the interrupted code may be about to read.
    fn set_errno(error: i32) {
        // SAFETY: the address belongs to this thread.
        unsafe {
            #[cfg(any(target_os = "linux", target_os = "android"))]
            libc::__errno_location().write(error);
            #[cfg(target_vendor = "apple")]
            libc::__error().write(error);
        }
        let _ = error;
    }
}

/// Fails, because the system has no such signal.
#[cfg(not(unix))]
pub(crate) fn on_user_signal(_: fn()) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this system has no SIGUSR1"))
}

/// Makes calls of a library that writes to sockets by `writev`, which knows no MSG_NOSIGNAL. If the peer
/// has closed one, the write fails, and the program gets no SIGPIPE, which it may not ignore.
#[cfg(all(feature = "redis", unix, not(target_vendor = "apple")))]
pub(crate) fn without_sigpipe<T>(calls: impl FnOnce() -> T) -> T {
    /// What this thread's signals were before.
    struct Blocked {
        mask: libc::sigset_t,
        is_pending: bool,
    }

    impl Drop for Blocked {
        fn drop(&mut self) {
            let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the sets are valid, and those of this thread are as they were afterwards.
            unsafe {
                if !self.is_pending {
                    while libc::sigtimedwait(&sigpipe(), std::ptr::null_mut(), &none) == -1
                        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
                    {}
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut());
            }
        }
    }

    fn sigpipe() -> libc::sigset_t {
        // SAFETY: zeros are valid for a set, which the calls write.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGPIPE);
            set
        }
    }

    // SAFETY: the sets are valid, zeros included, and the calls write them. A write raises the signal in its own thread, where it stays pending.
    let _blocked = unsafe {
        let (mut pending, mut mask): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigpending(&mut pending);
        libc::pthread_sigmask(libc::SIG_BLOCK, &sigpipe(), &mut mask);
        Blocked { mask, is_pending: libc::sigismember(&pending, libc::SIGPIPE) == 1 }
    };
    calls()
}

/// As elsewhere. Rust's library sets an option of each socket on Apple's systems, and other systems have
/// no such signal.
#[cfg(all(feature = "redis", not(all(unix, not(target_vendor = "apple")))))]
pub(crate) fn without_sigpipe<T>(calls: impl FnOnce() -> T) -> T {
    calls()
}

/// Gives SIGPIPE its default action, as it has in a program in C: it ends the process.
#[cfg(all(feature = "redis", test))]
pub(crate) fn end_by_sigpipe() {
    // SAFETY: the default action calls no code of this program.
    #[cfg(unix)]
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
