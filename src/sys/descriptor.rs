//! The numbers of this process's descriptors.
//!
//! A program may have closed its standard input, output or error. The next descriptor would get that
//! number, and what the program prints would go into a connection of kolo.

#[cfg(all(unix, not(miri)))]
pub(crate) use numbers::above_standard;

/// Calls `make`. Standard input, output and error have handles of their own on this system.
#[cfg(not(all(unix, not(miri))))]
pub(crate) fn above_standard<T>(make: impl FnOnce() -> T) -> T {
    make()
}

#[cfg(all(unix, not(miri)))]
mod numbers {
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

    /// Which file a descriptor stands for.
    #[derive(Clone, Copy, PartialEq)]
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
