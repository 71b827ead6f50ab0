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

/// Returns what adds the name of a system call to its error, if that says that the call is refused.
pub(crate) fn naming(call: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| if says_so(&error) { io::Error::new(error.kind(), Refused { call, error }) } else { error }
}

/// Returns whether an error of a call that has been named says that the call is refused.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Refused>())
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
