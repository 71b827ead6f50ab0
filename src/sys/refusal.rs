//! System calls that the system refuses to this process, as the seccomp profile of a container does.
//! Another attempt fails, too.

use std::fmt;
use std::io;

/// The error of a call that is refused.
#[derive(Debug)]
struct Refused {
    call: &'static str,
    error: io::Error,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { call, error } = self;
        write!(
            f,
            "the system refuses this process the call {call} ({error}); allow it, for example in the container's seccomp profile"
        )
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

fn refused(call: &'static str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), Refused { call, error })
}

/// Returns what adds the name of a system call to its error, if that says that the call is refused.
pub(crate) fn naming(call: &'static str) -> impl Fn(io::Error) -> io::Error {
    // A library makes several calls for what is one call to its users.
    move |error| if says_so(&error) { refusal().unwrap_or_else(|| refused(call, error)) } else { error }
}

/// Returns whether an error says that a call is refused, so that no other attempt succeeds.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Refused>()) || refusal_behind(error).is_some()
}

/// Returns the error that names the refused call, if one is refused and `error` may have come of it. A
/// file of another user gives the same error.
pub(crate) fn refusal_behind(error: &io::Error) -> Option<io::Error> {
    if says_so(error) { refusal() } else { None }
}

fn says_so(error: &io::Error) -> bool {
    #[cfg(unix)]
    return [libc::EPERM, libc::EACCES, libc::ENOSYS].map(Some).contains(&error.raw_os_error());
    #[cfg(not(unix))]
    {
        let _ = error;
        false
    }
}

/// Makes the calls that every connection needs. Fails if one is refused: the start would try again until
/// its deadline, and libraries do not say which call it was.
pub(crate) fn try_out() -> io::Result<()> {
    first_refused(calls::ALWAYS).map_or(Ok(()), Err)
}

/// Returns the error of a call for which kolo has no substitute, if the system refuses one at the moment.
pub(crate) fn refusal() -> Option<io::Error> {
    first_refused(calls::ALWAYS).or_else(|| first_refused(calls::SOMETIMES))
}

fn first_refused(calls: &[calls::Attempt]) -> Option<io::Error> {
    let errors = calls.iter().map(|(call, attempt)| (*call, if attempt() < 0 { Some(io::Error::last_os_error()) } else { None }));
    let mut errors = errors.filter_map(|(call, error)| Some((call, error.filter(says_so)?)));
    errors.next().map(|(call, error)| refused(call, error))
}

/// Calls that change nothing: their descriptor is not open, or another argument is wrong. The system
/// refuses a call before it looks at these.
#[cfg(all(target_os = "linux", not(miri)))]
mod calls {
    use std::ptr::{null, null_mut};

    /// The name of a call, and what makes it; the result is negative if it fails.
    pub(super) type Attempt = (&'static str, fn() -> i64);

    /// A number that no descriptor has. The C library does not look at it, as it may do at -1.
    const NONE: i32 = i32::MAX;

    /// Makes a table of calls.
    macro_rules! attempts {
        ($($name:expr => $call:expr,)*) => {
            // SAFETY: no call succeeds with these arguments, but a `poll` of nothing. The system checks the
            // descriptor, the family, the flags or the size before it uses a pointer.
            &[$(($name, || i64::from(unsafe { $call }))),*]
        };
    }

    /// Calls that each rank makes before it has connected, whatever its store and transport.
    pub(super) const ALWAYS: &[Attempt] = attempts! {
        "socket" => libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, -1),
        "bind" => libc::bind(NONE, null(), 0),
        "listen" => libc::listen(NONE, 0),
        "accept4" => libc::accept4(NONE, null_mut(), null_mut(), libc::SOCK_CLOEXEC),
        "connect" => libc::connect(NONE, null(), 0),
        "getsockname" => libc::getsockname(NONE, null_mut(), null_mut()),
        "setsockopt" => libc::setsockopt(NONE, libc::SOL_SOCKET, libc::SO_REUSEADDR, null(), 0),
        "sendto" => libc::send(NONE, null(), 0, 0) as i32,
        "recvfrom" => libc::recv(NONE, null_mut(), 0, 0) as i32,
        "ioctl" => libc::ioctl(NONE, libc::FIONBIO, null::<i32>()),
        "fcntl" => libc::fcntl(NONE, libc::F_GETFD),
        STAT => libc::fstat(NONE, null_mut()),
        "epoll_create1" => libc::epoll_create1(-1),
        "epoll_ctl" => libc::epoll_ctl(NONE, libc::EPOLL_CTL_DEL, NONE, null_mut()),
        EPOLL_WAIT => libc::epoll_wait(NONE, null_mut(), 1, 0),
        "eventfd2" => libc::eventfd(0, -1),
        "uname" => libc::uname(null_mut()),
    };

    /// Calls that some transports, stores and operations need.
    pub(super) const SOMETIMES: &[Attempt] = attempts! {
        "getpeername" => libc::getpeername(NONE, null_mut(), null_mut()),
        "getsockopt" => libc::getsockopt(NONE, libc::SOL_SOCKET, libc::SO_ERROR, null_mut(), null_mut()),
        "sendmsg" => libc::sendmsg(NONE, null(), 0) as i32,
        "recvmsg" => libc::recvmsg(NONE, null_mut(), 0) as i32,
        POLL => libc::poll(null_mut(), 0, 0),
        "ppoll" => libc::ppoll(null_mut(), 0, &libc::timespec { tv_sec: 0, tv_nsec: 0 }, null()),
        "fstat" => libc::syscall(libc::SYS_fstat, NONE, null_mut::<libc::stat>()) as i32,
        // Without it the C library uses `clone`, unless the error is another than ENOSYS.
        "clone3" => match libc::syscall(libc::SYS_clone3, null::<u8>(), 0usize) {
            -1 if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) => 0,
            result => result as i32,
        },
        "openat" => libc::openat(NONE, c"kolo".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC),
        "flock" => libc::flock(NONE, libc::LOCK_UN),
        "lseek" => libc::lseek(NONE, 0, libc::SEEK_SET) as i32,
        "ftruncate" => libc::ftruncate(NONE, 0),
        "faccessat" => libc::syscall(libc::SYS_faccessat, NONE, c"kolo".as_ptr(), libc::F_OK) as i32,
        "statfs" => libc::statfs(c"".as_ptr(), null_mut()),
        // Without it Rust's library uses an older call, unless the error is another than ENOSYS.
        "statx" => match libc::syscall(libc::SYS_statx, NONE, c"kolo".as_ptr(), 0, 0, null_mut::<u8>()) {
            -1 if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) => 0,
            result => result as i32,
        },
    };

    // The calls by which the C library does what these functions do.
    const EPOLL_WAIT: &str = if cfg!(target_arch = "x86_64") { "epoll_wait" } else { "epoll_pwait" };
    const POLL: &str = if cfg!(target_arch = "x86_64") { "poll" } else { "ppoll" };
    const STAT: &str = if cfg!(target_env = "gnu") { "newfstatat" } else { "fstat" };
}

/// Other systems refuse no single calls.
#[cfg(not(all(target_os = "linux", not(miri))))]
mod calls {
    pub(super) type Attempt = (&'static str, fn() -> i64);
    pub(super) const ALWAYS: &[Attempt] = &[];
    pub(super) const SOMETIMES: &[Attempt] = &[];
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    /// A call that fails for another reason, or takes its arguments, is not refused.
    #[test]
    fn no_call_is_refused_here() {
        assert!(try_out().is_ok(), "{:?}", try_out());
        assert!(refusal().is_none(), "{:?}", refusal());
        let passing = calls::ALWAYS.iter().chain(calls::SOMETIMES).filter(|(_, attempt)| attempt() >= 0);
        assert!(passing.map(|(call, _)| *call).all(|call| call.ends_with("poll")));
    }
}
