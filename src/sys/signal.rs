//! Reacts to SIGUSR1.

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
