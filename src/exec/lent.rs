//! What a call needs whose buffers are on a device, or that takes its turn in a stream.

use std::fmt;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::host_area::HostArea;
use crate::buffer::RawSliceMut;
use crate::cuda::barrier::Missing;
use crate::cuda::device::{Address, Device, Event, StreamId};
use crate::cuda::held::Hold;
use crate::cuda::lanes::Lane;
use crate::cuda::moves::{KernelTask, Moves};
use crate::cuda::peers::{Peers, Said};
use crate::cuda::pinned::PinnedBuffer;
use crate::cuda::rounds::Cut;
use crate::cuda::shared::shared;
use crate::cuda::words::Words;
use crate::error::{Error, Result};
use crate::sys::Region;

/// A call on a device or in a stream. All of its work is enqueued when it is called. The host then
/// runs it by reading and writing memory.
pub(crate) struct Lent {
    pub(super) device: Arc<dyn Device>,
    /// Whether the send and the receive buffer are the device's.
    pub(super) on_device: [bool; 2],
    /// The caller's stream.
    pub(super) stream: StreamId,
    /// Whether the device can reduce.
    pub(super) has_kernels: bool,
    /// The number of the capture, if a CUDA graph captures the work of the caller's stream. The call
    /// runs each time that the graph is replayed.
    pub(super) capture: Option<u64>,
    /// Set when the call is enqueued.
    pub(super) enqueued: OnceLock<Enqueued>,
    /// Whether only the caller's stream waits for the call's end.
    is_unattended: AtomicBool,
}

/// The work of a call in a stream, and how the host runs it.
pub(super) struct Enqueued {
    pub(super) path: Path,
    /// The stream that does the work: the caller's, or kolo's own.
    pub(super) stream: StreamId,
    /// Recorded on kolo's own stream after the call, if a graph captures it.
    pub(super) captured_end: Option<Event>,
    /// `None` where the host copies, because streams cannot wait for it.
    pub(super) gate: Option<Gate>,
}

/// The words of a call, and what its kernels move.
pub(super) struct Gate {
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

/// How a call's data passes.
pub(super) enum Path {
    /// It has no data on the device: it has its turn in the stream.
    Turn,
    /// Nothing is left to do for the host: the stream copies from one buffer to the other.
    Alone,
    /// As a whole through pinned memory: where what is sent is, where what is received comes, and whether
    /// kernels copy it. If not, copy engines do.
    Whole { send: Option<PinnedAt>, recv: Option<PinnedAt>, by_kernel: bool },
    /// In rounds through host memory.
    Staged { cut: Cut, area: Arc<HostArea> },
    /// In rounds, where the buffers are or through areas on the device.
    Direct { cut: Cut, peers: Arc<Peers>, said: Box<Said> },
    /// By one kernel, which copies what its rank sends to a slot, and reduces the slots of all ranks.
    OneShot { peers: Arc<Peers> },
    /// As a whole through host memory that the host copies, because streams cannot wait for it.
    Copied { memory: Arc<Region>, send: Option<usize>, recv: Option<usize>, lane: Arc<Lane>, to: RawSliceMut },
}

/// A place in pinned memory.
#[derive(Clone, Copy)]
pub(super) struct PinnedAt {
    /// Where the host finds it.
    pub(super) host: *mut u8,
    /// Where the device finds it.
    pub(super) device: Address,
}

impl PinnedAt {
    pub(super) fn of(memory: &PinnedBuffer, offset: usize) -> PinnedAt {
        PinnedAt { host: memory.at(offset), device: memory.address() + offset as Address }
    }
}

// SAFETY: the pointers are addresses, into the gate's memory and the caller's buffer, which both live
// until the stream has left. The host and the stream take turns to use them, by the words.
unsafe impl Send for Path {}
// SAFETY: as above.
unsafe impl Sync for Path {}

impl Path {
    /// Whether the kernels of the ranks may wait for each other. Then the host does not wait for the
    /// stream before it tells the other ranks of the call.
    pub(super) fn have_barrier(&self) -> bool {
        match self {
            Path::OneShot { .. } => true,
            Path::Direct { peers, .. } => peers.have_barrier(),
            _ => false,
        }
    }
}

impl Lent {
    pub(super) fn new(
        device: Arc<dyn Device>,
        on_device: [bool; 2],
        (stream, capture): (StreamId, Option<u64>),
        has_kernels: bool,
    ) -> Lent {
        let (enqueued, is_unattended) = (OnceLock::new(), AtomicBool::new(false));
        Lent { device, on_device, stream, capture, has_kernels, enqueued, is_unattended }
    }

    /// Whether a graph has captured the call.
    pub(crate) fn is_captured(&self) -> bool {
        self.capture.is_some()
    }

    pub(super) fn gate(&self) -> Option<&Gate> {
        self.enqueued.get()?.gate.as_ref()
    }

    pub(super) fn path(&self) -> Option<&Path> {
        Some(&self.enqueued.get()?.path)
    }

    /// Whether only a stream waits for the end of the call.
    pub(crate) fn is_unattended(&self) -> bool {
        self.is_unattended.load(Ordering::Relaxed)
    }

    pub(super) fn set_unattended(&self) {
        self.is_unattended.store(true, Ordering::Relaxed);
    }

    /// Whether the stream has reached the call.
    pub(crate) fn has_arrived(&self) -> bool {
        self.gate().is_none_or(|gate| gate.words().has_arrived(0))
    }

    /// Whether the call only receives, into pinned memory, which no earlier work of the stream uses.
    pub(super) fn receives_into_pinned(&self) -> bool {
        matches!(self.path(), Some(Path::Whole { send: None, recv: Some(_), .. }))
    }

    /// Has a stream wait for the end of the call. Returns false if it cannot.
    pub(crate) fn hold_stream(&self, stream: StreamId) -> Result<bool> {
        if self.is_captured() {
            return self.hold_captured(stream).map(|()| true);
        }
        let Some(gate) = self.gate() else { return Ok(false) };
        let _enqueueing = self.device.held().enqueueing();
        gate.words().enqueue_until_over(&*self.device, stream).map(|()| true)
    }

    /// As [`Lent::hold_stream`], in the capture that the call belongs to.
    fn hold_captured(&self, stream: StreamId) -> Result<()> {
        if self.device.capture(stream)? != self.capture {
            let why = "a CUDA graph has captured it; wait on a stream of that capture, before the capture ends".to_owned();
            return Err(Error::Unsupported { what: "waiting for this operation", why });
        }
        match self.enqueued.get().and_then(|enqueued| enqueued.captured_end.as_ref()) {
            Some(end) => self.device.wait_for_event(stream, end.id),
            None => Ok(()),
        }
    }

    /// A run of the call has ended. The streams that wait for it continue, unless a graph will replay the
    /// call.
    pub(super) fn end(&self, result: &Result<()>) {
        if result.is_err() || !self.is_captured() {
            self.release();
        }
    }

    /// The call has ended: the streams that wait for it continue.
    pub(crate) fn release(&self) {
        if let Some(gate) = self.gate() {
            gate.release();
        }
    }
}

impl Gate {
    pub(super) fn new(device: &Arc<dyn Device>, words: Words, moves: Option<PinnedBuffer>, memory: Option<PinnedBuffer>) -> Gate {
        let hold = Mutex::new(Some(device.held().hold()));
        Gate {
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
    pub(super) fn replayed(mut self) -> Gate {
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

    /// No stream comes to the call any more.
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
        self.words.as_ref().expect("the words are the gate's as long as it lives")
    }

    /// Tells the stream's kernel what to do in a round. Returns false if the stream has been let
    /// go: then nothing moves.
    pub(super) fn go(&self, round: u32, task: KernelTask) -> bool {
        let is_released = self.is_released.lock();
        if !*is_released {
            let memory = self.moves.as_ref().expect("a call with kernels has memory for moves");
            // SAFETY: there is room for the most moves of the call. The kernel of an earlier round
            // is done, and that of this one waits for the word.
            unsafe { Moves::write(memory.at(0), task) };
            self.words().go(round);
        }
        !*is_released
    }

    /// Returns the rank for which the last kernel has waited in its barrier and then not any more. To be
    /// called when the kernel is done.
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

impl Drop for Gate {
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

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("device", &self.device.name()).field("on_device", &self.on_device).finish_non_exhaustive()
    }
}
