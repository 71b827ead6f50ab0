//! Row 51: an operation uses a part of registered memory and other threads use the rest, when a
//! peer that writes there fails.

use std::ops::DerefMut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kolo::{Communicator, Error, ReduceOp};

use crate::job::Job;
use crate::rank::say;
use crate::runner;
use crate::runner::Outcome::{self, NotRun, Passed};
use crate::system::{self, has_ended};

/// The variable that tells rank 2 whether to stop itself; otherwise it kills itself.
const STOPS: &str = "KOLO_TEST_STOPS";

/// Set if each rank takes its buffers alone.
const POOLED: &str = "KOLO_TEST_POOLED";

/// Registered memory that the failed operation did not use belongs to other threads all the time.
/// The memory that it used belongs to the caller alone after the failure.
pub(crate) fn registered_memory() -> Outcome {
    fail_beside_others(false);
    Passed(String::new())
}

/// The same if the rank at fault is stopped and continues later.
pub(crate) fn registered_memory_of_stopped() -> Outcome {
    if let Some(why) = system::shares_private_pages() {
        return NotRun(why.to_owned());
    }
    fail_beside_others(true);
    Passed(String::new())
}

fn fail_beside_others(stops: bool) {
    let fail = |pooled: bool| {
        // Operations that end take a small part of it, also on a busy machine.
        let deadline = if stops { 15_000 } else { 600_000 };
        let mut job = Job::start("bystander", 3, deadline, |_, command| {
            for (name, _) in [(STOPS, stops), (POOLED, pooled)].iter().filter(|(_, is_set)| *is_set) {
                command.env(name, "1");
            }
        });
        for rank in [0, 1] {
            assert_eq!(job.hear(rank, "given back"), "2");
        }
        if stops {
            job.go_on(2);
        }
        for rank in [0, 1] {
            assert_eq!(job.hear(rank, "wrong words:"), "0", "rank {rank}");
            job.ends_clean(rank);
        }
    };
    for _ in 0..if runner::all() { 2 } else { 1 } {
        std::thread::scope(|scope| {
            scope.spawn(|| fail(false));
            fail(true);
        });
    }
}

/// All-reduces a part of a registered buffer until that fails. Until the rank at fault has ended, a
/// thread writes and reads the rest of the buffer and another registered buffer. No peer may ever
/// access those, and after the failure no peer may access the part.
///
/// Rank 2 is at fault: it ends or stops itself while it writes into its peers' memory.
pub(crate) fn beside_an_operation(comm: &Communicator) -> Error {
    let stops = std::env::var_os(STOPS).is_some();
    // The part does not end at a page boundary.
    let len = if runner::all() { 4_000_001 } else { 250_001 };
    let [mut buffer, mut apart] = [len + 100_000, 100_000].map(|len| -> Box<dyn Buffer> {
        let pooled = std::env::var_os(POOLED).is_some();
        if pooled { Box::new(comm.alloc_pooled(len).unwrap()) } else { Box::new(comm.alloc(len).unwrap()) }
    });
    let is_over = AtomicBool::new(false);
    let (used, rest) = buffer.split_at_mut(len);
    if comm.rank() == 2 {
        // The first word of its chunk, which it writes on all ranks before the rest of the chunk.
        let word = used.as_mut_ptr().wrapping_add(len - len / 3).expose_provenance();
        let end = if stops { system::stop } else { system::kill };
        std::thread::spawn(move || {
            // SAFETY: the memory lives as long as the process. Reading it while it is lent is a
            // part of the fault.
            let seen = || unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(word)) }.load(Ordering::Relaxed);
            // Its own words are even, those of its peers odd.
            while seen() < 16 || seen().is_multiple_of(2) {
                std::hint::spin_loop();
            }
            end(std::process::id());
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

/// Writes memory and counts the words that have changed a moment later. Most of the time is in the
/// moment: nothing is written unseen, and the processors are left to others.
fn wrong_words(memory: &mut [u64]) -> usize {
    static ROUND: AtomicU64 = AtomicU64::new(1);
    let round = ROUND.fetch_add(1, Ordering::Relaxed);
    memory.fill(round);
    std::thread::sleep(Duration::from_millis(40));
    std::hint::black_box(&mut *memory).iter().filter(|&&word| word != round).count()
}
