//! Waiting for descriptors, and ending such a wait from another thread.

use crate::timeouts::THREAD_END;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Events, Registry, Token};

#[cfg(unix)]
use super::descriptor::Guarded;
use super::{above_standard, naming};

/// Waits for several descriptors at once.
pub(crate) struct Poll {
    #[cfg(unix)]
    inner: Guarded<mio::Poll>,
    #[cfg(not(unix))]
    inner: mio::Poll,
}

impl Poll {
    pub(crate) fn new() -> io::Result<Poll> {
        let inner = above_standard(mio::Poll::new).map_err(naming("epoll_create1"))?;
        #[cfg(unix)]
        let inner = Guarded::new(inner);
        Ok(Poll { inner })
    }

    pub(crate) fn registry(&self) -> &Registry {
        self.inner.registry()
    }

    /// Waits for an event, at most for `timeout`.
    pub(crate) fn poll(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        // The events of a poll of the program are the program's.
        #[cfg(unix)]
        self.inner.check()?;
        self.inner.poll(events, timeout)
    }
}

/// Ends the waits of a [`Poll`].
pub(crate) struct Waker {
    // mio's writes to its descriptor without asking whether the program has closed it. That of other
    // systems does not write to a file.
    #[cfg(all(target_os = "linux", not(miri)))]
    event: Guarded<std::os::fd::OwnedFd>,
    #[cfg(not(all(target_os = "linux", not(miri))))]
    inner: mio::Waker,
    /// A [`Waker::wake_once`] has not been noticed.
    is_woken: AtomicBool,
}

impl Waker {
    /// As [`Waker::wake`], but costs no system call until the waiting thread has noticed the last time.
    /// For a thread that looks for all that it may be woken for, each time after it has noticed.
    pub(crate) fn wake_once(&self) -> io::Result<()> {
        if self.is_woken.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.wake().inspect_err(|_| self.is_woken.store(false, Ordering::Release))
    }

    /// The waiting thread has got the event. It sees now what came before the calls of
    /// [`Waker::wake_once`] that did nothing.
    pub(crate) fn notice(&self) {
        self.is_woken.swap(false, Ordering::AcqRel);
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    pub(crate) fn new(poll: &Poll, token: Token) -> io::Result<Waker> {
        use std::os::fd::AsRawFd;

        use rustix::event::{EventfdFlags, eventfd};

        let event = above_standard(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK));
        let event = Guarded::new(event.map_err(|error| naming("eventfd2")(error.into()))?);
        let number = event.as_raw_fd();
        poll.registry().register(&mut mio::unix::SourceFd(&number), token, mio::Interest::READABLE)?;
        Ok(Waker { event, is_woken: AtomicBool::new(false) })
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    pub(crate) fn new(poll: &Poll, token: Token) -> io::Result<Waker> {
        Ok(Waker { inner: above_standard(|| mio::Waker::new(poll.registry(), token))?, is_woken: AtomicBool::new(false) })
    }

    /// Ends the wait that is under way, or else the next one. Fails if the program has closed the
    /// descriptor that does this.
    #[cfg(all(target_os = "linux", not(miri)))]
    pub(crate) fn wake(&self) -> io::Result<()> {
        use rustix::io::{Errno, read, write};

        self.event.check()?;
        loop {
            match write(&*self.event, &1u64.to_ne_bytes()) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                // The counter is full. Each write wakes, whatever it was before.
                Err(Errno::AGAIN) => _ = read(&*self.event, &mut [0; 8]),
                Err(error) => return Err(error.into()),
            }
        }
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    pub(crate) fn wake(&self) -> io::Result<()> {
        self.inner.wake()
    }
}

/// Waits until a thread has ended that was told to and has nothing left to do. Returns whether it has. If
/// it does not end in time, it is left behind: code of the program that it runs does not return, or the
/// program has closed what it waits for.
pub(crate) fn join(thread: JoinHandle<()>) -> bool {
    let deadline = Instant::now() + THREAD_END;
    let mut pause = Duration::from_micros(10);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            let name = thread.thread().name().unwrap_or_default();
            crate::log::warn!(name, "a thread does not end; it is left behind");
            return false;
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(5));
    }
    // A panic there has been printed, and needs no cleanup.
    let _ = thread.join();
    true
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_wake_that_was_noticed_is_not_the_last() {
        let mut poll = Poll::new().unwrap();
        let waker = Waker::new(&poll, Token(7)).unwrap();
        let mut events = Events::with_capacity(4);
        let mut wakes = |timeout| {
            poll.poll(&mut events, Some(timeout)).unwrap();
            events.iter().any(|event| event.token() == Token(7))
        };
        for _ in 0..3 {
            (0..3).for_each(|_| waker.wake_once().unwrap());
            assert!(wakes(Duration::from_secs(60)));
            // What does nothing more has been said: until it is noticed, nothing wakes once more.
            waker.wake_once().unwrap();
            assert!(!wakes(Duration::ZERO));
            waker.notice();
        }
        waker.wake_once().unwrap();
        assert!(wakes(Duration::from_secs(60)));
    }
}
