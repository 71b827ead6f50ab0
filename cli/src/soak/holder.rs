//! A thread that uses a registered buffer while other threads of its process communicate and other
//! ranks die.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kolo::{Communicator, Registered, Result};

/// Writes and checks a registered buffer that no operation uses, until it is dropped or
/// [finished](Holder::finish).
pub(crate) struct Holder {
    is_over: Arc<AtomicBool>,
    /// Returns the number of wrong words.
    thread: JoinHandle<u64>,
}

/// The words of the buffer: several pages, and a pass takes a fraction of a millisecond.
const WORDS: usize = 20_000;

impl Holder {
    /// Allocates the buffer, which is a collective call, and starts the thread.
    pub(crate) fn start(comm: &Communicator) -> Result<Holder> {
        let buffer = comm.alloc::<u64>(WORDS)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let told = is_over.clone();
        let thread = std::thread::spawn(move || write_and_check(buffer, || told.load(Ordering::Relaxed)));
        Ok(Holder { is_over, thread })
    }

    /// Ends the thread. An error says how many words were wrong.
    pub(crate) fn finish(self) -> std::result::Result<(), String> {
        self.is_over.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(0) => Ok(()),
            Ok(wrong) => Err(format!("{wrong} wrong words in a registered buffer that no operation used")),
            Err(_) => Err("the thread that holds a registered buffer panicked".to_owned()),
        }
    }
}

/// Checks in each pass the numbers of the previous one, then fills the buffer with new ones.
fn write_and_check(mut buffer: Registered<u64>, is_over: impl Fn() -> bool) -> u64 {
    let word = |pass: u64, place: usize| pass.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place as u64;
    let mut wrong = 0;
    for pass in 0.. {
        for (place, into) in buffer.iter_mut().enumerate() {
            if pass > 0 && *into != word(pass - 1, place) {
                wrong += 1;
            }
            *into = word(pass, place);
        }
        if is_over() {
            break;
        }
        // Leave the processor to the ranks.
        std::thread::yield_now();
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_no_one_else_writes_is_right() {
        let comm = Communicator::in_process(1).unwrap().remove(0);
        Holder::start(&comm).unwrap().finish().unwrap();
    }

    #[test]
    fn words_that_change_are_counted() {
        let comm = Communicator::in_process(1).unwrap().remove(0);
        let mut buffer = comm.alloc::<u64>(10).unwrap();
        let inside = buffer.as_mut_ptr() as usize + 8 * 3;
        let passes = std::cell::Cell::new(0);
        let wrong = write_and_check(buffer, || {
            // SAFETY: the buffer lives longer than this closure, and this thread alone uses it.
            unsafe { (inside as *mut u64).write_volatile(7) };
            passes.set(passes.get() + 1);
            passes.get() == 4
        });
        assert_eq!(wrong, 3);
    }
}
