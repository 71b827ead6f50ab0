//! The stream handshake of a call: the words by which its stream and the host tell each other how far
//! they are, and what its kernels move.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::cuda::barrier::Missing;
use crate::cuda::device::{Address, Device};
use crate::cuda::held::Hold;
use crate::cuda::moves::{KernelTask, Moves};
use crate::cuda::pinned::PinnedBuffer;
use crate::cuda::shared::shared;
use crate::cuda::words::Words;

/// The words of a call, and the memory of what its kernels and its stream move.
pub(super) struct Handshake {
    device: Arc<dyn Device>,
    /// `None` once they have been given back.
    words: Option<Words>,
    /// Memory for what a kernel moves.
    moves: Option<PinnedBuffer>,
    /// Memory that the stream copies to and from.
    memory: Option<PinnedBuffer>,
    /// Whether a graph has captured the call, so that the stream comes back to the words.
    is_replayed: bool,
    hold: Mutex<Option<Hold>>,
    /// Whether the stream has been let go. From then on nothing moves.
    is_released: Mutex<bool>,
    given: Mutex<Given>,
}

/// How much of a call the stream has been given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    Nothing,
    Part,
    /// Its last work says that the stream has left.
    All,
    /// A part, and nothing will say that the stream has left: its memory is never used again.
    Lost,
}

impl Handshake {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        words: Words,
        moves: Option<PinnedBuffer>,
        memory: Option<PinnedBuffer>,
    ) -> Handshake {
        let hold = Mutex::new(Some(device.held().hold()));
        Handshake {
            device: device.clone(),
            words: Some(words),
            moves,
            memory,
            is_replayed: false,
            hold,
            is_released: Mutex::new(false),
            given: Mutex::new(Given::Nothing),
        }
    }

    /// For a call that a graph captures. It holds the stream back only while a replay runs.
    pub(super) fn replayed(mut self) -> Handshake {
        self.is_replayed = true;
        self.hold.get_mut().take();
        self
    }

    /// Whether a replay has arrived that does not run yet.
    pub(super) fn has_replay(&self) -> bool {
        self.words().has_arrived(0) && self.hold.lock().is_none()
    }

    /// A replay runs from now on, until its stream has left.
    pub(super) fn begin_replay(&self) {
        self.hold.lock().get_or_insert_with(|| self.device.held().hold());
    }

    /// Ends a round.
    pub(super) fn end(&self, round: u32) {
        if self.is_replayed && self.words().is_last(round) {
            self.words().end_replay();
        } else {
            self.words().end(round);
        }
    }

    /// The graph is destroyed, so no stream comes to the call any more: a drop gives the words and the
    /// memory back at once.
    pub(super) fn take_back(&self) {
        self.set_given(Given::Nothing);
        self.hold.lock().take();
    }

    /// Lets a replay continue that began after the stream was let go.
    pub(super) fn release_replay(&self) {
        if self.words().is_own() {
            self.words().release();
            if self.words().has_left() {
                self.hold.lock().take();
            }
        }
    }

    /// Where the device finds what its kernels move.
    pub(super) fn moves(&self) -> Option<Address> {
        self.moves.as_ref().map(PinnedBuffer::address)
    }

    pub(super) fn set_given(&self, given: Given) {
        *self.given.lock() = given;
    }

    pub(super) fn is_given(&self, given: Given) -> bool {
        *self.given.lock() == given
    }

    pub(super) fn words(&self) -> &Words {
        self.words.as_ref().expect("the words are the handshake's as long as it lives")
    }

    /// Tells the stream's kernel what to do in a round. Returns false if the stream was
    /// released: then nothing moves.
    pub(super) fn go(&self, round: u32, task: KernelTask) -> bool {
        let is_released = self.is_released.lock();
        if !*is_released {
            let memory = self.moves.as_ref().expect("a call with kernels has memory for moves");
            // SAFETY: there is room for the most moves of the call. The kernel of an earlier round
            // is done, and the stream starts that of this one only after the word.
            unsafe { Moves::write(memory.at(0), task) };
            self.words().go(round);
        }
        !*is_released
    }

    /// Returns the rank that kept the last kernel from passing its barrier: it was late, or has given up.
    /// `None` also if the host has cancelled the barrier. To be called when the kernel is done.
    pub(super) fn missing(&self) -> Option<Missing> {
        // SAFETY: it is memory for moves, which `go` has written.
        self.moves.as_ref().and_then(|memory| unsafe { Moves::missing(memory.at(0)) })
    }

    /// The stream has left: it is not held back any more.
    pub(super) fn has_left(&self) -> bool {
        let has_left = self.words().has_left();
        if has_left {
            if self.is_replayed {
                self.words().rewind_left();
            }
            self.hold.lock().take();
        }
        has_left
    }

    /// Whether the stream was let go before the operation had ended.
    pub(super) fn is_released(&self) -> bool {
        *self.is_released.lock()
    }

    /// Lets the stream continue to the end. Kernels whose task was not copied yet move nothing more.
    pub(super) fn release(&self) {
        if !self.words().is_own() {
            return;
        }
        let mut is_released = self.is_released.lock();
        if *is_released {
            return;
        }
        *is_released = true;
        if let Some(memory) = &self.moves {
            // SAFETY: it is memory for moves.
            unsafe { Moves::take_back(memory.at(0)) };
        }
        self.words().release();
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.release();
        let Some(words) = self.words.take() else { return };
        let (memory, hold) = ([self.moves.take(), self.memory.take()], self.hold.get_mut().take());
        if !words.is_own() {
            // A forked child: the pages are its parent's.
            std::mem::forget((words, memory, hold));
            return;
        }
        let given = *self.given.get_mut();
        if given == Given::Lost {
            std::mem::forget((words, memory));
            return;
        }
        let mut parts = Some((words, memory, hold));
        let device = self.device.clone();
        let mut leaves = move || {
            if given != Given::Nothing && parts.as_ref().is_some_and(|(words, ..)| !words.has_left()) {
                return false;
            }
            if let Some((words, memory, hold)) = parts.take() {
                let shared = shared(&*device);
                shared.words.give_back(words);
                drop(hold);
                for memory in memory.into_iter().flatten() {
                    if let Some(too_much) = shared.pinned.give_back(memory) {
                        device.held().later(move || drop(too_much));
                    }
                }
            }
            true
        };
        if !leaves() {
            self.device.held().until_left(leaves);
        }
    }
}
