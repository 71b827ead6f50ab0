//! Row 51: registered memory of which an operation uses a part, and other threads the rest, when a peer fails that writes there.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kolo::{Communicator, Error, ReduceOp};

use crate::job::Job;
use crate::rank::say;
use crate::runner::Outcome::{self, Passed};

/// The signal of a rank that sends itself one.
const SIGNAL: &str = "KOLO_TEST_SIGNAL";

/// Registered memory that the failed operation did not use is other threads' all the time; what it used is the caller's alone when it
/// has failed, be it that the rank at fault goes on later.
pub(crate) fn registered_memory() -> Outcome {
    for (signal, deadline) in [(libc::SIGKILL, 600_000), (libc::SIGSTOP, 3000)] {
        for _ in 0..3 {
            let mut job = Job::start("bystander", 3, deadline, |_, command| _ = command.env(SIGNAL, signal.to_string()));
            for rank in [0, 1] {
                assert_eq!(job.hear(rank, "given back"), "2");
            }
            job.signal(2, libc::SIGCONT);
            for rank in [0, 1] {
                assert_eq!(job.hear(rank, "wrong words:"), "0", "rank {rank}, signal {signal}");
                job.ends_clean(rank);
            }
        }
    }
    Passed(String::new())
}

/// All-reduces a part of a registered buffer until that fails. Meanwhile, and until the rank at fault has ended, a thread writes and
/// reads the rest of it, and another registered buffer: whatever happens to the operation, nobody else touches those. When the
/// operation has failed, nobody else touches the part, either.
///
/// Rank 2 is at fault: it sends itself a signal while it writes into the others' memory.
pub(crate) fn beside_an_operation(comm: &Communicator) -> Error {
    const USED: usize = 4_000_001;
    // No border of a page.
    let mut buffer = comm.alloc::<u64>(USED + 100_000).unwrap();
    let mut apart = comm.alloc::<u64>(100_000).unwrap();
    let is_over = AtomicBool::new(false);
    let (used, rest) = buffer.split_at_mut(USED);
    if comm.rank() == 2 {
        // The first word of its slice, which it writes everywhere before the rest of the slice.
        let word = used.as_mut_ptr().wrapping_add(USED - USED / 3).expose_provenance();
        let signal = std::env::var(SIGNAL).unwrap().parse().unwrap();
        std::thread::spawn(move || {
            // SAFETY: the process lives no longer than the memory. Looking at it while it is lent is a part of the fault.
            let seen = || unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(word)) }.load(Ordering::Relaxed);
            // Its own words are even, the others' odd.
            while seen() < 16 || seen().is_multiple_of(2) {
                std::hint::spin_loop();
            }
            // SAFETY: a system call with a number.
            unsafe { libc::raise(signal) };
        });
    }
    std::thread::scope(|scope| {
        let bystander = scope.spawn(|| {
            let mut wrong = 0;
            while comm.rank() != 2 && !is_over.load(Ordering::Relaxed) {
                wrong += wrong_words(rest) + wrong_words(&mut apart);
            }
            wrong
        });
        for round in 1.. {
            used.fill(2 * round + u64::from(comm.rank() != 2));
            let Err(failure) = comm.all_reduce(used, ReduceOp::Max) else { continue };
            say(&format!("given back {}", failure.culprit().unwrap()));
            let Error::Peer { pid, .. } = failure else { panic!("{failure}") };
            let mut wrong = 0;
            while comm.rank() != 2 && !has_ended(pid) {
                wrong += wrong_words(used);
            }
            is_over.store(true, Ordering::Relaxed);
            wrong += bystander.join().unwrap();
            say(&format!("wrong words: {wrong}"));
            return failure;
        }
        unreachable!("rank 2 ends it")
    })
}

/// Writes memory and counts the words that are something else afterwards.
fn wrong_words(memory: &mut [u64]) -> usize {
    static ROUND: AtomicU64 = AtomicU64::new(1);
    let round = ROUND.fetch_add(1, Ordering::Relaxed);
    memory.fill(round);
    std::hint::black_box(&mut *memory).iter().filter(|&&word| word != round).count()
}

/// Whether a process of this machine has ended, be it that nobody has asked how.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}
