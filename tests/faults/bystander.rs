//! Row 51: an operation uses a part of registered memory and other threads use the rest, when a
//! peer that writes there fails.

use std::ops::DerefMut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kolo::{Communicator, Error, ReduceOp};

use crate::job::Job;
use crate::rank::say;
use crate::runner::Outcome::{self, Passed};

/// The variable with the signal that a rank sends to itself.
const SIGNAL: &str = "KOLO_TEST_SIGNAL";

/// Set if each rank takes its buffers alone.
const POOLED: &str = "KOLO_TEST_POOLED";

/// Registered memory that the failed operation did not use belongs to other threads all the time.
/// The memory that it used belongs to the caller alone after the failure, even if the rank at fault
/// continues later.
pub(crate) fn registered_memory() -> Outcome {
    for (signal, deadline) in [(libc::SIGKILL, 600_000), (libc::SIGSTOP, 3000)] {
        for pooled in [false, true, false, true] {
            let mut job = Job::start("bystander", 3, deadline, |_, command| {
                command.env(SIGNAL, signal.to_string());
                if pooled {
                    command.env(POOLED, "1");
                }
            });
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

/// All-reduces a part of a registered buffer until that fails. Until the rank at fault has ended, a
/// thread writes and reads the rest of the buffer and another registered buffer. No peer may ever
/// access those, and after the failure no peer may access the part.
///
/// Rank 2 is at fault: it sends itself a signal while it writes into its peers' memory.
pub(crate) fn beside_an_operation(comm: &Communicator) -> Error {
    const USED: usize = 4_000_001;
    // The part does not end at a page boundary.
    let [mut buffer, mut apart] = [USED + 100_000, 100_000].map(|len| -> Box<dyn Buffer> {
        let pooled = std::env::var_os(POOLED).is_some();
        if pooled { Box::new(comm.alloc_pooled(len).unwrap()) } else { Box::new(comm.alloc(len).unwrap()) }
    });
    let is_over = AtomicBool::new(false);
    let (used, rest) = buffer.split_at_mut(USED);
    if comm.rank() == 2 {
        // The first word of its chunk, which it writes on all ranks before the rest of the chunk.
        let word = used.as_mut_ptr().wrapping_add(USED - USED / 3).expose_provenance();
        let signal = std::env::var(SIGNAL).unwrap().parse().unwrap();
        std::thread::spawn(move || {
            // SAFETY: the memory lives as long as the process. Reading it while it is lent is a
            // part of the fault.
            let seen = || unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(word)) }.load(Ordering::Relaxed);
            // Its own words are even, those of its peers odd.
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
        unreachable!("rank 2 ends the loop")
    })
}

trait Buffer: DerefMut<Target = [u64]> + Send {}
impl<B: DerefMut<Target = [u64]> + Send> Buffer for B {}

/// Writes memory and counts the words that have changed afterwards.
fn wrong_words(memory: &mut [u64]) -> usize {
    static ROUND: AtomicU64 = AtomicU64::new(1);
    let round = ROUND.fetch_add(1, Ordering::Relaxed);
    memory.fill(round);
    std::hint::black_box(&mut *memory).iter().filter(|&&word| word != round).count()
}

/// Whether a process of this machine has ended. It may be a zombie.
pub(crate) fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}
