//! The words by which a stream and the host run an operation together. They are in pinned host
//! memory. The stream writes and waits for them as a part of its work; the host only reads and
//! writes memory. So the host can always let a stream continue, whatever the driver waits for.
//!
//! In each round of an operation:
//!
//! | the stream | the host |
//! |---|---|
//! | writes `arrived` | waits for it, and for the other ranks |
//! | waits for `go` | says what to move, then writes `go` |
//! | moves it, then writes `done` | waits for it, and for the other ranks |
//! | waits for `end` | writes `end` |
//!
//! Where kernels [wait for each other](super::barrier), the host writes `go` before the stream arrives,
//! and waits for no other rank then, nor after `done`.
//!
//! After the last round the stream writes `over`, for which other streams may wait, and `left`: it
//! will not come back to these words. If the operation fails, the host takes back what to move and
//! writes `go`, `end` and `over` for all rounds ([`Words::release`]).
//!
//! The stream comes back if a CUDA graph has captured the call: each replay writes and awaits the
//! same values. So each side rewinds the words that the other one writes, while the other one cannot
//! write them. A replay begins by rewinding `go` and `end`, which the host writes only after
//! `arrived`. The host rewinds `arrived` and `done` before it ends the last round, for which the
//! stream waits, and `left` when it has seen it: before the next replay can pass its end.

use super::device::{Address, Device, StreamId};
use crate::error::Result;
use crate::sync::{AtomicU32, Ordering};
use crate::sys;

/// The words of one operation. What the stream writes and what the host writes are in cache lines
/// of their own.
#[repr(C, align(128))]
#[derive(Default)]
pub(super) struct Lines {
    stream: StreamLine,
    host: HostLine,
}

#[repr(C, align(64))]
#[derive(Default)]
struct StreamLine {
    arrived: AtomicU32,
    done: AtomicU32,
    left: AtomicU32,
}

#[repr(C, align(64))]
#[derive(Default)]
struct HostLine {
    go: AtomicU32,
    end: AtomicU32,
    /// Other streams wait for it. Both sides write it: the stream when it leaves, and the host when it
    /// lets the stream go, because the stream may never come.
    over: AtomicU32,
}

/// Whether a word has reached a value. Words count up and wrap around.
fn has_reached(word: &AtomicU32, value: u32) -> bool {
    word.load(Ordering::Acquire).wrapping_sub(value) as i32 >= 0
}

impl Lines {
    fn open(&self, value: u32) {
        self.host.go.store(value, Ordering::Release);
        self.host.end.store(value, Ordering::Release);
        self.host.over.store(value, Ordering::Release);
    }
}

/// The words of one operation.
pub(crate) struct Words {
    lines: &'static Lines,
    /// Where the device finds them.
    address: Address,
    /// The value that all words had reached before.
    before: u32,
    rounds: u32,
    forks: u32,
}

/// One of the words, by its offset.
#[derive(Clone, Copy)]
enum Word {
    Arrived = std::mem::offset_of!(Lines, stream.arrived) as isize,
    Done = std::mem::offset_of!(Lines, stream.done) as isize,
    Left = std::mem::offset_of!(Lines, stream.left) as isize,
    Go = std::mem::offset_of!(Lines, host.go) as isize,
    End = std::mem::offset_of!(Lines, host.end) as isize,
    Over = std::mem::offset_of!(Lines, host.over) as isize,
}

impl Words {
    /// Words that have all reached `before`, for an operation of `rounds` rounds.
    pub(super) fn new(lines: &'static Lines, address: Address, before: u32, rounds: u32) -> Words {
        Words { lines, address, before, rounds, forks: sys::forks() }
    }

    /// Has all words reach the last value, also those that no round needed: after half of all numbers such
    /// a word would seem to be ahead. Returns the memory, its address, and the value.
    pub(super) fn settle(self) -> (&'static Lines, Address, u32) {
        let Lines { stream, host } = self.lines;
        for word in [&stream.arrived, &stream.done, &stream.left, &host.go, &host.end, &host.over] {
            word.store(self.last(), Ordering::Release);
        }
        (self.lines, self.address, self.last())
    }
}

/// For the stream: work that is enqueued now.
impl Words {
    pub(crate) fn enqueue_arrived(&self, device: &dyn Device, stream: StreamId, round: u32) -> Result<()> {
        self.write(device, stream, Word::Arrived, self.value(round))
    }

    pub(crate) fn enqueue_until_go(&self, device: &dyn Device, stream: StreamId, round: u32) -> Result<()> {
        self.wait(device, stream, Word::Go, self.value(round))
    }

    pub(crate) fn enqueue_done(&self, device: &dyn Device, stream: StreamId, round: u32) -> Result<()> {
        self.write(device, stream, Word::Done, self.value(round))
    }

    pub(crate) fn enqueue_until_end(&self, device: &dyn Device, stream: StreamId, round: u32) -> Result<()> {
        self.wait(device, stream, Word::End, self.value(round))
    }

    pub(crate) fn enqueue_left(&self, device: &dyn Device, stream: StreamId) -> Result<()> {
        self.write(device, stream, Word::Over, self.last())?;
        self.write(device, stream, Word::Left, self.last())
    }

    /// Has the stream rewind the host's words, at the beginning of each replay of a graph.
    pub(crate) fn enqueue_rewind(&self, device: &dyn Device, stream: StreamId) -> Result<()> {
        self.write(device, stream, Word::Go, self.before)?;
        self.write(device, stream, Word::End, self.before)
    }

    /// Has another stream wait until this operation's stream has left, or is let go.
    pub(crate) fn enqueue_until_over(&self, device: &dyn Device, stream: StreamId) -> Result<()> {
        self.wait(device, stream, Word::Over, self.last())
    }

    fn write(&self, device: &dyn Device, stream: StreamId, word: Word, value: u32) -> Result<()> {
        // SAFETY: the words are pinned and never freed.
        unsafe { device.write_word(stream, self.address + word as u64, value) }
    }

    fn wait(&self, device: &dyn Device, stream: StreamId, word: Word, value: u32) -> Result<()> {
        // SAFETY: the words are pinned and never freed.
        unsafe { device.wait_for_word(stream, self.address + word as u64, value) }
    }

    /// The value of a word in a round.
    fn value(&self, round: u32) -> u32 {
        debug_assert!(round < self.rounds);
        self.before.wrapping_add(round + 1)
    }

    /// The value of all words after the last round.
    fn last(&self) -> u32 {
        self.before.wrapping_add(self.rounds)
    }
}

/// For the host.
impl Words {
    pub(crate) fn has_arrived(&self, round: u32) -> bool {
        has_reached(&self.lines.stream.arrived, self.value(round))
    }

    pub(crate) fn is_done(&self, round: u32) -> bool {
        has_reached(&self.lines.stream.done, self.value(round))
    }

    pub(crate) fn has_left(&self) -> bool {
        has_reached(&self.lines.stream.left, self.last())
    }

    /// Lets the stream move what it is told to. A stream that sees the word also sees what the host
    /// wrote before.
    pub(crate) fn go(&self, round: u32) {
        self.lines.host.go.store(self.value(round), Ordering::Release);
    }

    /// Ends a round. Later rounds do not wait for `go`, if all has been moved.
    pub(crate) fn end(&self, round: u32) {
        self.lines.host.end.store(self.value(round), Ordering::Release);
    }

    /// Lets the stream continue to the end.
    pub(crate) fn release(&self) {
        self.lines.open(self.last());
    }

    /// Ends the last round of a replay, after which the next replay may begin at any time.
    pub(crate) fn end_replay(&self) {
        self.lines.stream.arrived.store(self.before, Ordering::Relaxed);
        self.lines.stream.done.store(self.before, Ordering::Relaxed);
        self.end(self.rounds - 1);
    }

    /// Rewinds `left`. To be called once for each replay, when the stream has left.
    pub(crate) fn rewind_left(&self) {
        self.lines.stream.left.store(self.before, Ordering::Relaxed);
    }

    pub(crate) fn is_last(&self, round: u32) -> bool {
        round + 1 == self.rounds
    }

    #[cfg(test)]
    pub(crate) fn is_ended(&self, round: u32) -> bool {
        has_reached(&self.lines.host.end, self.value(round))
    }

    /// Whether this process made them. In a forked child they are its parent's.
    pub(crate) fn is_own(&self) -> bool {
        self.forks == sys::forks()
    }
}

/// The stream and the host in every order of memory accesses that loom finds.
#[cfg(all(test, kolo_loom))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    fn words(rounds: u32, before: u32) -> Words {
        let lines = Box::leak(Box::new(Lines::default()));
        [&lines.stream.arrived, &lines.stream.done, &lines.stream.left, &lines.host.go, &lines.host.end, &lines.host.over]
            .into_iter()
            .for_each(|word| word.store(before, Ordering::Relaxed));
        Words::new(lines, 0, before, rounds)
    }

    fn until(is_so: impl Fn() -> bool) {
        while !is_so() {
            thread::yield_now();
        }
    }

    /// What a stream does of one round: `work` is its kernel.
    fn round_of_stream(words: &Words, round: u32, work: impl FnOnce()) {
        let Lines { stream, host } = words.lines;
        stream.arrived.store(words.value(round), Ordering::Release);
        until(|| has_reached(&host.go, words.value(round)));
        work();
        stream.done.store(words.value(round), Ordering::Release);
        until(|| has_reached(&host.end, words.value(round)));
    }

    /// Memory that one side writes and the other reads.
    struct Shared(UnsafeCell<[u32; 3]>);

    // SAFETY: the words order the accesses, which loom checks.
    unsafe impl Send for Shared {}
    // SAFETY: the words order the accesses, which loom checks.
    unsafe impl Sync for Shared {}

    impl Shared {
        fn put(&self, place: usize, value: u32) {
            // SAFETY: loom fails if another thread accesses it meanwhile.
            self.0.with_mut(|memory| unsafe { (*memory)[place] = value });
        }

        fn get(&self, place: usize) -> u32 {
            // SAFETY: as above.
            self.0.with(|memory| unsafe { (*memory)[place] })
        }
    }

    /// Each side sees what the other has written: the stream's input, the host's moves, the kernel's
    /// result, and what peers have written before the end. The words wrap around.
    #[test]
    fn each_side_sees_what_the_other_has_written() {
        for before in [0, u32::MAX] {
            loom::model(move || {
                let words = Arc::new(words(1, before));
                let shared = Arc::new(Shared(UnsafeCell::new([0; 3])));
                let stream = {
                    let (words, shared) = (words.clone(), shared.clone());
                    thread::spawn(move || {
                        shared.put(0, 1);
                        round_of_stream(&words, 0, || {
                            assert_eq!(shared.get(1), 2);
                            shared.put(2, 3);
                        });
                        assert_eq!(shared.get(0), 4);
                        words.lines.stream.left.store(words.last(), Ordering::Release);
                    })
                };
                until(|| words.has_arrived(0));
                assert_eq!(shared.get(0), 1);
                shared.put(1, 2);
                words.go(0);
                until(|| words.is_done(0));
                assert_eq!(shared.get(2), 3);
                shared.put(0, 4);
                words.end(0);
                until(|| words.has_left());
                shared.put(0, 5);
                stream.join().unwrap();
            });
        }
    }

    /// Each replay of a graph uses the same values. No side takes a word of an earlier replay for one of
    /// this.
    #[test]
    fn replays_do_not_meet_words_of_earlier_ones() {
        // All orders of two replays would take hours. Most defects show with two preemptions.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let words = Arc::new(words(1, u32::MAX));
            let shared = Arc::new(Shared(UnsafeCell::new([0; 3])));
            let stream = {
                let (words, shared) = (words.clone(), shared.clone());
                thread::spawn(move || {
                    let Lines { stream, host } = words.lines;
                    for replay in 0..2 {
                        host.go.store(words.before, Ordering::Release);
                        host.end.store(words.before, Ordering::Release);
                        round_of_stream(&words, 0, || {
                            assert_eq!(shared.get(1), replay);
                            shared.put(2, replay);
                        });
                        stream.left.store(words.last(), Ordering::Release);
                    }
                })
            };
            for replay in 0..2 {
                until(|| words.has_arrived(0));
                shared.put(1, replay);
                words.go(0);
                until(|| words.is_done(0));
                assert_eq!(shared.get(2), replay);
                words.end_replay();
                until(|| words.has_left());
                words.rewind_left();
            }
            stream.join().unwrap();
        });
    }

    /// Another thread lets the stream go at any time. Its kernel moves only what the host told it
    /// before, and the stream leaves.
    #[test]
    fn a_stream_that_is_let_go_moves_nothing_more() {
        loom::model(|| {
            let words = Arc::new(words(1, 0));
            // Whether it was let go, and the number of moves, as in `device::handshake`.
            let (is_released, moves) = (Arc::new(Mutex::new(false)), Arc::new(AtomicU32::new(0)));
            let stream = {
                let (words, moves) = (words.clone(), moves.clone());
                thread::spawn(move || {
                    let mut moved = 0;
                    round_of_stream(&words, 0, || moved = moves.load(Ordering::Acquire));
                    words.lines.stream.left.store(words.last(), Ordering::Release);
                    moved
                })
            };
            let other = {
                let (words, is_released, moves) = (words.clone(), is_released.clone(), moves.clone());
                thread::spawn(move || {
                    let mut is_released = is_released.lock().unwrap();
                    *is_released = true;
                    moves.store(0, Ordering::Release);
                    words.release();
                })
            };
            let went = {
                let is_released = is_released.lock().unwrap();
                if !*is_released {
                    moves.store(1, Ordering::Release);
                    words.go(0);
                }
                !*is_released
            };
            let moved = stream.join().unwrap();
            other.join().unwrap();
            assert!(words.has_left());
            assert!(went || moved == 0, "it moved what the host had not told it");
        });
    }
}
