//! What to do when somebody sends this process SIGUSR1.

use std::io;

/// Has `action` called, on a thread of its own, whenever the process gets SIGUSR1. Who handled the signal before still does.
///
/// To be called once in a process.
#[cfg(unix)]
pub(crate) fn on_user_signal(action: fn()) -> io::Result<()> {
    use std::io::Read;
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    let (mut heard, said) = UnixStream::pair()?;
    said.set_nonblocking(true)?;
    std::thread::Builder::new().name("kolo-trace".to_owned()).spawn(move || {
        let mut bytes = [0; 64];
        // Signals that come while it works are one.
        while let Ok(1..) = heard.read(&mut bytes) {
            action();
        }
    })?;
    unix::BELL.store(said.into_raw_fd(), Ordering::Release);
    // SAFETY: `unix::ring` calls nothing but what signal handlers may, and both structs are initialised by zeros.
    unsafe {
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        ours.sa_sigaction = unix::ring as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // Kept before the handler can need it.
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
    use std::os::fd::RawFd;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI32, Ordering};

    /// What the handler writes to.
    pub(super) static BELL: AtomicI32 = AtomicI32::new(-1);

    /// Who handled the signal before.
    pub(super) static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

    pub(super) extern "C" fn ring(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let bell: RawFd = BELL.load(Ordering::Acquire);
        let error = std::io::Error::last_os_error().raw_os_error();
        // SAFETY: one byte is read. If nobody has listened for long, the pipe is full, and enough has been said.
        unsafe { libc::write(bell, c"!".as_ptr().cast(), 1) };
        set_errno(error.unwrap_or(0));
        if let Some(before) = BEFORE.get()
            && ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction)
        {
            // SAFETY: it was installed as a handler of this signal, in the one form or the other as its flags say.
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

    /// What interrupted code may be about to look at stays as it was.
    fn set_errno(error: i32) {
        // SAFETY: the address is this thread's own.
        unsafe {
            #[cfg(any(target_os = "linux", target_os = "android"))]
            libc::__errno_location().write(error);
            #[cfg(target_vendor = "apple")]
            libc::__error().write(error);
        }
        let _ = error;
    }
}

/// There are no such signals here.
#[cfg(not(unix))]
pub(crate) fn on_user_signal(_: fn()) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "there is no SIGUSR1 on this system"))
}
