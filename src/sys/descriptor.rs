//! The numbers of this process's descriptors.
//!
//! A program may have closed its standard input, output or error. The next descriptor would get that
//! number, and what the program prints would go into a connection of kolo. Or it closes descriptors
//! that are not its own (`closefrom`), whose numbers its next files get.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use mio::event::Source;
use mio::{Interest, Registry, Token};

#[cfg(all(unix, not(miri)))]
pub(crate) use numbers::above_standard;

/// Calls `make`. Standard input, output and error have handles of their own on this system.
#[cfg(not(all(unix, not(miri))))]
pub(crate) fn above_standard<T>(make: impl FnOnce() -> T) -> T {
    make()
}

/// A connection over TCP.
pub(crate) type TcpStream = Guarded<mio::net::TcpStream>;

impl TcpStream {
    pub(crate) fn from_std(stream: std::net::TcpStream) -> TcpStream {
        Guarded::new(mio::net::TcpStream::from_std(stream))
    }
}

/// The owner of a descriptor. It closes the descriptor, unless the program has closed it: its number
/// may be that of a file of the program.
#[cfg_attr(test, derive(Debug))]
pub(crate) struct Guarded<T> {
    inner: ManuallyDrop<T>,
    #[cfg(all(unix, not(miri)))]
    number: numbers::Number,
}

impl<T> Guarded<T> {
    #[cfg(all(unix, not(miri)))]
    pub(crate) fn new(inner: T) -> Guarded<T>
    where
        T: std::os::fd::AsRawFd,
    {
        Guarded { number: numbers::Number::new(inner.as_raw_fd()), inner: ManuallyDrop::new(inner) }
    }

    #[cfg(not(all(unix, not(miri))))]
    pub(crate) fn new(inner: T) -> Guarded<T> {
        Guarded { inner: ManuallyDrop::new(inner) }
    }

    /// Makes another owner of the same descriptor. What is asked of the descriptor stays what it was when it
    /// was made: the program may have closed it meanwhile.
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Guarded<U> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the value is not dropped once more.
        let inner = change(unsafe { ManuallyDrop::take(&mut this.inner) });
        Guarded {
            inner: ManuallyDrop::new(inner),
            #[cfg(all(unix, not(miri)))]
            number: this.number,
        }
    }

    /// Returns whether the program has left the descriptor as it was made. To be asked before the
    /// descriptor is used at the end of what it is for, which may be after a `closefrom`.
    pub(crate) fn is_intact(&self) -> bool {
        #[cfg(all(unix, not(miri)))]
        return self.number.is_intact();
        #[cfg(not(all(unix, not(miri))))]
        true
    }

    /// Fails if the program has closed the descriptor.
    #[cfg(unix)]
    pub(super) fn check(&self) -> io::Result<()> {
        if self.is_intact() {
            return Ok(());
        }
        let closed = || io::Error::other("the program has closed a descriptor of kolo");
        Err(super::refusal().unwrap_or_else(closed))
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        if self.is_intact() {
            // SAFETY: the value is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[cfg(unix)]
impl<T: std::os::fd::AsFd> std::os::fd::AsFd for Guarded<T> {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

#[cfg(windows)]
impl<T: std::os::windows::io::AsSocket> std::os::windows::io::AsSocket for Guarded<T> {
    fn as_socket(&self) -> std::os::windows::io::BorrowedSocket<'_> {
        self.inner.as_socket()
    }
}

impl<T: Source> Source for Guarded<T> {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.inner.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.inner.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.inner.deregister(registry)
    }
}

#[cfg(all(unix, not(miri)))]
pub(super) mod numbers {
    use parking_lot::Mutex;

    use crate::sys::fork::{between_forks, forks};

    /// The first number that is not of standard input, output or error.
    const FIRST: i32 = 3;

    /// The numbers of closed standard descriptors that are occupied while descriptors are made.
    struct Occupied {
        /// The calls under way that make descriptors.
        calls: usize,
        /// Each number, with what occupies it.
        numbers: Vec<(i32, Identity)>,
        /// The forks that led to this process: a child has none of its parent's calls.
        forks: u32,
    }

    static OCCUPIED: Mutex<Occupied> = Mutex::new(Occupied { calls: 0, numbers: Vec::new(), forks: 0 });

    /// Calls `make`, in which all descriptors get numbers above those of standard input, output and
    /// error, also if the program has closed these. They stay closed for the program: meanwhile,
    /// reading and writing them fails with `EBADF`.
    pub(crate) fn above_standard<T>(make: impl FnOnce() -> T) -> T {
        /// Frees the numbers, also after a panic.
        struct Call;

        impl Drop for Call {
            fn drop(&mut self) {
                between_forks(|| OCCUPIED.lock().leave());
            }
        }

        between_forks(|| OCCUPIED.lock().enter());
        let _call = Call;
        make()
    }

    impl Occupied {
        fn enter(&mut self) {
            if self.forks != forks() {
                (self.forks, self.calls) = (forks(), 0);
            }
            self.calls += 1;
            while (0..FIRST).any(is_closed) {
                // Without a descriptor left, `make` fails for the same reason.
                let Some(number) = open_placeholder() else { break };
                match Identity::of(number) {
                    Some(identity) if number < FIRST => self.numbers.push((number, identity)),
                    // The program has opened the number meanwhile.
                    _ => {
                        // SAFETY: the descriptor was opened above, and nothing else has it.
                        unsafe { libc::close(number) };
                        break;
                    }
                }
            }
        }

        fn leave(&mut self) {
            self.calls = self.calls.saturating_sub(1);
            if self.calls > 0 {
                return;
            }
            for (number, identity) in self.numbers.drain(..) {
                // The program may have put a file of its own there (`dup2`).
                if Identity::of(number) == Some(identity) {
                    // SAFETY: this is the descriptor that `enter` opened.
                    unsafe { libc::close(number) };
                }
            }
        }
    }

    fn is_closed(number: i32) -> bool {
        // SAFETY: the call only looks the number up.
        unsafe { libc::fcntl(number, libc::F_GETFD) == -1 }
    }

    /// Opens what can be neither read nor written, under the lowest free number.
    fn open_placeholder() -> Option<i32> {
        #[cfg(target_os = "linux")]
        const FLAGS: i32 = libc::O_PATH | libc::O_CLOEXEC;
        // A folder cannot be read by `read`.
        #[cfg(not(target_os = "linux"))]
        const FLAGS: i32 = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: the path ends with a zero.
        let number = unsafe { libc::open(c"/".as_ptr(), FLAGS) };
        (number >= 0).then_some(number)
    }

    /// A number, and the file that it stood for when this was made.
    #[derive(Clone, Copy)]
    #[cfg_attr(test, derive(Debug))]
    pub(in crate::sys) struct Number {
        number: i32,
        identity: Option<Identity>,
    }

    impl Number {
        pub(in crate::sys) fn new(number: i32) -> Number {
            Number { number, identity: Identity::of(number) }
        }

        /// Returns whether the number still stands for that file. It is known by its device and inode:
        /// those of `epoll` and `eventfd` differ from those of files and sockets, but not from each
        /// other.
        pub(in crate::sys) fn is_intact(&self) -> bool {
            self.identity.is_some() && Identity::of(self.number) == self.identity
        }
    }

    /// Which file a descriptor stands for.
    #[derive(Clone, Copy, PartialEq)]
    #[cfg_attr(test, derive(Debug))]
    struct Identity {
        device: u64,
        inode: u64,
    }

    impl Identity {
        /// `None` if the number is not open.
        fn of(number: i32) -> Option<Identity> {
            // SAFETY: zeros are valid for all fields, and the system writes the struct or fails.
            let mut state: libc::stat = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let result = unsafe { libc::fstat(number, &mut state) };
            (result == 0).then_some(Identity { device: state.st_dev as u64, inode: state.st_ino as u64 })
        }
    }
}
