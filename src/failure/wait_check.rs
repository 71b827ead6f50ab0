//! What a thread asks while it waits for peers: whether to go on. A binding runs the signal handlers
//! of its language there.

use crate::timeouts::{LEAST_WAIT_CHECK, WAIT_CHECK};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

type Check = Rc<dyn Fn() -> bool>;

thread_local! {
    static CHECK: RefCell<Option<Check>> = const { RefCell::new(None) };
    static IS_SET: Cell<bool> = const { Cell::new(false) };
    static ASKED: Cell<Option<Instant>> = const { Cell::new(None) };
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    static HAS_STOPPED: Cell<bool> = const { Cell::new(false) };
}

/// Sets what this thread asks about 20 times a second while a call waits for other ranks: whether
/// the call goes on. If it says no, a start and an operation fail with
/// [`Error::Aborted`](crate::Error::Aborted). The operation ends its communicator, as
/// [`Communicator::abort`](crate::Communicator::abort) does. `None` ends the checks.
///
/// The check must not call the communicator of the call that waits, except
/// [`Communicator::abort`](crate::Communicator::abort). A wait for [`RawWork`](crate::raw::RawWork)
/// does not ask.
pub fn set_wait_check(check: Option<Box<dyn Fn() -> bool>>) {
    IS_SET.set(check.is_some());
    CHECK.with_borrow_mut(|set| *set = check.map(Rc::from));
}

/// Returns whether this thread has a wait check.
pub fn has_wait_check() -> bool {
    IS_SET.get()
}

/// Returns whether the wait check of this thread runs inside a call that waits on a communicator.
#[inline]
pub fn is_in_wait_check() -> bool {
    IS_INSIDE.get()
}

/// Asks this thread's check, unless it has been asked a moment ago. Returns whether the wait goes on.
/// For waits of a binding that hold nothing of kolo: the check may call everything.
pub fn asks_wait_check() -> bool {
    !IS_SET.get() || asks(false)
}

/// Fails if a wait inside kolo does not go on.
pub(crate) fn go_on() -> io::Result<()> {
    if !IS_SET.get() || asks(true) { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
}

/// Forgets earlier answers, before a wait.
pub(crate) fn begin() {
    HAS_STOPPED.set(false);
}

/// Returns whether the check has said no since [`begin`].
pub(crate) fn has_stopped() -> bool {
    HAS_STOPPED.get()
}

#[cold]
fn asks(is_inside: bool) -> bool {
    let is_due = ASKED.get().is_none_or(|at| at.elapsed() >= LEAST_WAIT_CHECK);
    if !is_due || IS_INSIDE.get() {
        return true;
    }
    let Some(check) = CHECK.with_borrow(Clone::clone) else { return true };
    let inside = is_inside.then(Inside::enter);
    let goes_on = check();
    drop(inside);
    ASKED.set(Some(Instant::now()));
    if !goes_on {
        HAS_STOPPED.set(true);
    }
    goes_on
}

/// Returns how long this thread may wait before it asks again.
pub(crate) fn longest_nap() -> Duration {
    if IS_SET.get() { WAIT_CHECK } else { Duration::MAX }
}

/// The check runs inside a call that waits.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        IS_INSIDE.set(true);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Communicator;
    use crate::error::{Cause, Error};

    /// Waits in vain for rank 1 until the check has been asked `asked` times; returns what the receive
    /// says, how often it was asked, and what rank 1 is told.
    fn receive_until(asked: u32) -> (crate::error::Result<()>, u32, crate::error::Result<()>) {
        let mut ranks = Communicator::in_process(2).unwrap();
        let (one, zero) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(move || {
                let count = Rc::new(Cell::new(0));
                let counted = count.clone();
                set_wait_check(Some(Box::new(move || {
                    assert!(is_in_wait_check());
                    counted.set(counted.get() + 1);
                    counted.get() < asked
                })));
                let received = zero.recv(&mut [0.0f32; 4], 1);
                assert!(has_wait_check() && !is_in_wait_check());
                (received, count.get())
            });
            let (received, count) = waits.join().unwrap();
            (received, count, one.barrier())
        })
    }

    #[test]
    fn a_wait_goes_on_until_the_check_says_no() {
        let (received, count, of_peer) = receive_until(3);
        assert!(matches!(received, Err(Error::Aborted { .. })), "{received:?}");
        assert_eq!(count, 3);
        // The peer learns why.
        assert!(matches!(of_peer, Err(Error::Peer { rank: 0, cause: Cause::Aborted, .. })), "{of_peer:?}");
    }

    /// Waits in vain for the operations that the communicator of rank 0 has in flight, and says no when
    /// it is asked for the second time. Returns what the wait says, and what rank 1 is told.
    fn wait_behind(waits: impl FnOnce(&Communicator) -> crate::error::Result<()> + Send) -> [crate::error::Result<()>; 2] {
        let mut ranks = Communicator::in_process(2).unwrap();
        let (one, zero) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        std::thread::scope(|scope| {
            let waits = scope.spawn(move || {
                let receive = zero.start_recv(vec![0.0f32; 4], 1).unwrap();
                let count = Cell::new(0);
                set_wait_check(Some(Box::new(move || {
                    assert!(is_in_wait_check());
                    count.set(count.get() + 1);
                    count.get() < 2
                })));
                let waited = waits(&zero);
                set_wait_check(None);
                assert!(receive.wait().is_err());
                waited
            });
            [waits.join().unwrap(), one.barrier()]
        })
    }

    #[test]
    fn a_wait_for_earlier_operations_goes_on_until_the_check_says_no() {
        let calls: [fn(&Communicator) -> crate::error::Result<()>; 4] = [
            |comm| comm.barrier(),
            |comm| comm.recv(&mut [0u8; 2], 1),
            |comm| comm.send_recv(&[0u8; 2], 1, &mut [0u8; 2], 1),
            |comm| comm.split(0, 0).map(drop),
        ];
        for call in calls {
            let [waited, of_peer] = wait_behind(call);
            assert!(matches!(waited, Err(Error::Aborted { .. })), "{waited:?}");
            assert!(matches!(of_peer, Err(Error::Peer { rank: 0, cause: Cause::Aborted, .. })), "{of_peer:?}");
        }
    }

    #[test]
    fn a_shrink_ends_when_the_check_says_no() {
        let ranks = Communicator::in_process(2).unwrap();
        ranks[1].abort();
        let count = Cell::new(0);
        set_wait_check(Some(Box::new(move || {
            count.set(count.get() + 1);
            count.get() < 2
        })));
        // Rank 1 lives, and does not shrink.
        let shrunk = ranks[0].shrink();
        set_wait_check(None);
        assert!(matches!(shrunk, Err(Error::Aborted { .. })), "{shrunk:?}");
    }

    /// A check may wait for the lock of an interpreter, so short waits do not ask.
    #[test]
    fn many_waits_ask_no_more_often_than_a_long_one() {
        let mut ranks = Communicator::in_process(2).unwrap();
        let (one, zero) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || (0..20_000).for_each(|_| one.barrier().unwrap()));
            let count = Rc::new(Cell::new(0));
            let counted = count.clone();
            set_wait_check(Some(Box::new(move || {
                counted.set(counted.get() + 1);
                true
            })));
            let began = Instant::now();
            (0..20_000).for_each(|_| zero.barrier().unwrap());
            set_wait_check(None);
            assert!(
                LEAST_WAIT_CHECK * count.get() <= began.elapsed() + LEAST_WAIT_CHECK,
                "{} checks in {:?}",
                count.get(),
                began.elapsed()
            );
        });
    }

    #[test]
    fn a_start_ends_when_the_check_says_no() {
        set_wait_check(Some(Box::new(|| false)));
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        for (rank, store) in
            [(0, "hash://checked".to_owned()), (1, "hash://checked".to_owned()), (1, format!("tcp://127.0.0.1:{port}"))]
        {
            let builder = Communicator::builder().rank(rank).world_size(2).store(&store).start_timeout(Duration::from_secs(3600));
            let started = builder.connect();
            assert!(matches!(started, Err(Error::Aborted { .. })), "rank {rank} with {store}: {started:?}");
        }
        set_wait_check(None);
        assert!(!has_wait_check());
    }
}
