//! Collectives of ranks that share memory: no messages, one or two synchronisations, every byte moved as rarely as can be.
//!
//! A [`Window`] is memory that all ranks of one host map. Each rank has a part of it: flags, and slots through which its
//! data passes. [`flags`] is how ranks wait for each other, [`direct`] what they do in between.
//!
//! Everything here runs on the caller's thread. The short path of a small collective takes no lock, allocates nothing and calls
//! nothing in the system.

mod direct;
pub(crate) mod flags;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
pub(crate) mod heap;
mod reading;
#[cfg(test)]
mod tests;
mod trial;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::attempt::Attempt;
use crate::buffer::{Chunk, ChunkMut};
use crate::config::Passage;
use crate::error::{Cause, Error, Result};
use crate::reduce::Kernel;
use crate::schedule::Blocks;
use crate::sync::{self, AtomicU32, AtomicU64, Ordering};
use crate::sys::{self, Patience, ProcessWatch, Segment, Waiting};
use crate::types::{Descriptor, Op, Rank};
use flags::{Line, Lines, NOTES, Notes, SLOTS, Turns};
use heap::Heap;
use trial::Passages;

/// Bytes of one slot. Larger data goes through in pieces.
const SLOT: usize = 128 << 10;

/// The most ranks of a host that share a window: each has a line of every slot to itself.
pub(crate) const MOST_RANKS: usize = SLOT / 64;

/// Bytes before the slots: the card and the lines, up to the next page.
const FLAGS: usize = (size_of::<Card>() + SLOTS * size_of::<Line>()).next_multiple_of(Segment::PAGE);

/// Bytes of one rank's part.
pub(crate) const PART: usize = FLAGS + SLOTS * SLOT;

/// How long a rank that has failed waits for those that write into its registered buffers.
const PATIENCE_WITH_WRITERS: Duration = Duration::from_millis(100);

/// How long it waits beyond that, if its buffers cannot become private memory.
const LAST_PATIENCE_WITH_WRITERS: Duration = Duration::from_secs(10);

/// The longest sleep, after which it is checked again whether to go on.
const NAP: Duration = Duration::from_millis(50);

/// What a rank says of itself.
#[repr(C, align(128))]
struct Card {
    /// One of the states below.
    state: AtomicU32,
    pid: AtomicU32,
    /// The namespace in which `pid` means something; 0 if unknown.
    namespace: AtomicU64,
    /// The last operation, when the rank has left.
    last_seq: AtomicU64,
    /// 1 while the rank writes into others' registered buffers.
    borrows: AtomicU32,
}

/// Not written yet.
const ABSENT: u32 = 0;
/// Takes part.
const PRESENT: u32 = 1;
/// Has dropped its communicator.
const LEFT: u32 = 2;
/// An operation failed on it.
const REVOKED: u32 = 3;

/// The lines and cards in shared memory.
struct Shared {
    segment: Arc<Segment>,
}

impl Shared {
    fn card(&self, rank: usize) -> &Card {
        // SAFETY: `Window::new` checked that the segment has a part for every rank. Parts start at multiples of the page; the
        // memory started zeroed, which is a valid card, and is touched only through its atomics.
        unsafe { &*self.segment.at(rank * PART).cast::<Card>() }
    }

    fn slot(&self, rank: usize, slot: usize) -> *mut u8 {
        self.segment.at(rank * PART + FLAGS + slot * SLOT)
    }
}

impl Lines for Shared {
    #[inline]
    fn line(&self, rank: usize, slot: usize) -> &Line {
        debug_assert!(slot < SLOTS);
        // SAFETY: as for `card`; the lines follow the card, which is as aligned as they are.
        unsafe { &*self.segment.at(rank * PART + size_of::<Card>() + slot * size_of::<Line>()).cast::<Line>() }
    }

    fn sleep(&self, word: &AtomicU32, value: u32, nap: Duration) {
        sync::sleep_on(word, value, nap);
    }

    fn wake(&self, word: &AtomicU32) {
        sync::wake_all(word);
    }
}

/// The memory that the ranks of one host share, seen from one of them.
pub(crate) struct Window {
    turns: Turns<Shared>,
    /// In which this process's number means something; 0 if unknown.
    namespace: u64,
    /// This rank's number among those of the host.
    rank: usize,
    /// The communicator's ranks of all on this host, in their order.
    members: Arc<[Rank]>,
    patience: Arc<Patience>,
    /// Watches over the processes of the others, opened when a wait gets long.
    watches: Vec<Watch>,
    heap: Heap,
    /// The fingerprint of all operations so far, in their order. Not every operation has every rank compare: a root of a
    /// broadcast reads nobody's flags. Chained, what it did not see shows in the next comparison, whoever makes it.
    chain: u64,
    passages: Passages,
    /// The addresses of a fold's parts, and what came inline; kept for their memory.
    parts: Vec<*const u8>,
    inline: Vec<Notes>,
    /// What everybody noted, and what was read from other processes; kept for its memory, too.
    noted: Vec<Notes>,
    rooms: Vec<reading::Line>,
    /// How often another process was read.
    #[cfg(test)]
    reads: u64,
}

// SAFETY: `parts` is used only within a call; the rest may be used by any one thread at a time.
unsafe impl Send for Window {}

enum Watch {
    NotOpened,
    /// The process cannot be watched: it is this one, or its number means nothing here.
    Blind,
    Open(ProcessWatch),
    /// It had ended before it could be watched.
    Ended,
}

/// Whose turns a rank waits for.
#[derive(Clone, Copy)]
pub(crate) enum Sources {
    Everybody,
    One(usize),
    Nobody,
}

/// What an operation does between the turns; see [`direct`].
pub(crate) trait Direct {
    /// Whether pieces are combined between being staged and being taken.
    const COMBINES: bool;

    /// How many pieces there are.
    fn pieces(&self) -> usize;

    /// Writes a piece of this rank's input to its slot.
    fn stage(&mut self, piece: usize, mine: *mut u8);

    /// Fetches the lines of the next turn's slot that will probably be written, while this rank waits for the others.
    fn foresee(&self, _next: *mut u8) {}

    /// Reduces this rank's share of a piece that everybody has staged, into its slot or its output.
    fn combine(&mut self, _piece: usize, _slots: &Slots<'_>) {}

    /// Reads a piece from the slots of those that staged or combined it to the output.
    fn take(&mut self, piece: usize, slots: &Slots<'_>);
}

/// Everybody's slots of one turn.
pub(crate) struct Slots<'a> {
    turns: &'a Turns<Shared>,
    slot: usize,
}

impl Slots<'_> {
    pub(crate) fn of(&self, rank: usize) -> *mut u8 {
        self.turns.lines.slot(rank, self.slot)
    }
}

/// An operation as the windows see it: ranks count within the host.
pub(crate) struct WindowCall<'a> {
    pub(crate) op: Op,
    pub(crate) input: Chunk,
    pub(crate) output: ChunkMut,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// Elements of the buffer, where it is not made of blocks.
    pub(crate) count: usize,
    /// The blocks of the buffer that has one for each rank.
    pub(crate) blocks: Blocks<'a>,
    pub(crate) root: usize,
    pub(crate) kernel: Option<Kernel>,
    /// How many ranks' parts are in the result, if it is finished here.
    pub(crate) finish: Option<usize>,
}

impl WindowCall<'_> {
    /// An operation on these buffers, of no elements, blocks, root or kernel yet.
    pub(crate) fn new(op: Op, input: Chunk, output: ChunkMut, element: usize) -> Self {
        WindowCall { op, input, output, element, count: 0, blocks: Blocks::Even(0), root: 0, kernel: None, finish: None }
    }
}

impl Window {
    /// The window in a segment of `members.len()` parts, of which this rank's has been reserved.
    pub(crate) fn new(
        segment: Arc<Segment>,
        rank: usize,
        members: Arc<[Rank]>,
        patience: Arc<Patience>,
        passage: Passage,
    ) -> Window {
        let ranks = members.len();
        assert!(segment.len() >= ranks * PART && rank < ranks);
        let shared = Shared { segment };
        let card = shared.card(rank);
        card.pid.store(std::process::id(), Ordering::Relaxed);
        let namespace = sys::process_namespace().unwrap_or(0);
        card.namespace.store(namespace, Ordering::Relaxed);
        card.state.store(PRESENT, Ordering::Release);
        Window {
            turns: Turns::new(shared, rank, ranks),
            namespace,
            rank,
            members,
            patience,
            watches: std::iter::repeat_with(|| Watch::NotOpened).take(ranks).collect(),
            heap: Heap::default(),
            chain: 0,
            passages: Passages::new(passage),
            parts: Vec::with_capacity(ranks),
            inline: vec![[0; NOTES]; ranks],
            noted: vec![[0; NOTES]; ranks],
            rooms: Vec::new(),
            #[cfg(test)]
            reads: 0,
        }
    }

    pub(crate) fn heap(&mut self) -> &mut Heap {
        &mut self.heap
    }

    /// This rank's number among those of the host.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The communicator's ranks of all on this host.
    pub(crate) fn members(&self) -> &Arc<[Rank]> {
        &self.members
    }

    /// Carries out one operation among the ranks of this host.
    ///
    /// # Safety
    ///
    /// `call.input` is readable and `call.output` writable until this returns, aligned to the element, and nobody else writes
    /// either or reads the output. They are apart or in place as [`crate::schedule`] says.
    pub(crate) unsafe fn run(&mut self, attempt: &Attempt<'_>, call: &WindowCall<'_>) -> Result<()> {
        self.chain = Descriptor::chained(self.chain, attempt.fingerprint);
        // A rank that failed may have got as far as this one needs it to, but its memory is its own again.
        self.check_nobody_failed(attempt)?;
        // SAFETY: passed on.
        let result = unsafe { direct::run(self, attempt, call) };
        match &result {
            Ok(()) => attempt.rest(),
            Err(_) => attempt.give_up(),
        }
        result
    }

    /// Ends the sleep of whoever waits in this window, in whatever process: for another thread.
    pub(crate) fn waker(&self) -> impl Fn() + Send + Sync + use<> {
        let shared = Shared { segment: self.turns.lines.segment.clone() };
        let ranks = self.members.len();
        move || {
            for (rank, slot) in (0..ranks).flat_map(|rank| (0..SLOTS).map(move |slot| (rank, slot))) {
                shared.wake(&shared.line(rank, slot).turn);
            }
        }
    }

    /// The other ranks will hear of it that this one has failed, or left after operation `last_seq`. If it has failed, nobody
    /// writes into its registered buffers when this returns.
    pub(crate) fn part(&mut self, last_seq: u64, failed: bool) {
        let card = self.turns.lines.card(self.rank);
        card.last_seq.store(last_seq, Ordering::Relaxed);
        card.state.store(if failed { REVOKED } else { LEFT }, Ordering::SeqCst);
        self.turns.wake_everybody();
        if failed {
            self.take_back_memory();
        }
    }

    /// An error if a rank of this host has failed.
    #[inline]
    fn check_nobody_failed(&self, attempt: &Attempt<'_>) -> Result<()> {
        for peer in self.peers() {
            if self.turns.lines.card(peer).state.load(Ordering::SeqCst) == REVOKED {
                return Err(attempt.failed(self.members[peer], Cause::Revoked));
            }
        }
        Ok(())
    }

    /// Before this rank writes into others' registered buffers: says so, and makes sure that none of them has failed. Both
    /// sides store before they look at what the other has stored, sequentially consistent: either this rank sees the failure,
    /// or the one that failed sees the writer. See [`Window::take_back_memory`].
    fn borrow_memory(&self, attempt: &Attempt<'_>) -> Result<()> {
        self.turns.lines.card(self.rank).borrows.store(1, Ordering::SeqCst);
        self.check_nobody_failed(attempt).inspect_err(|_| self.return_memory())
    }

    /// This rank has written.
    fn return_memory(&self) {
        self.turns.lines.card(self.rank).borrows.store(0, Ordering::Release);
    }

    /// Waits until nobody writes into this rank's registered buffers. A process that is stopped meanwhile may do so whenever it
    /// goes on: then this rank's buffers become private memory.
    fn take_back_memory(&mut self) {
        if self.heap.is_empty() {
            return;
        }
        let until = Instant::now() + PATIENCE_WITH_WRITERS;
        for peer in self.peers() {
            while self.turns.lines.card(peer).borrows.load(Ordering::SeqCst) != 0 {
                let now = Instant::now();
                // Threads of this process cannot be stopped alone: they do finish.
                if now >= until && self.heap.detach(self.rank) {
                    return;
                }
                if now >= until + LAST_PATIENCE_WITH_WRITERS {
                    tracing::error!(rank = self.members[peer], "a rank may still write into registered buffers");
                    return;
                }
                std::thread::yield_now();
            }
        }
    }

    /// Runs the turns of one operation.
    ///
    /// In iteration i a rank stages piece i, combines piece i-1 and takes what is complete: piece i-1, or i-2 if pieces are
    /// combined first. Each iteration publishes one turn, so ranks wait for each other once per piece, and then for what the
    /// others did an iteration ago.
    ///
    /// `from` is 1 if the first piece has been staged and its turn published, as operation `attempt`, 0 otherwise.
    fn pipeline<D: Direct>(&mut self, attempt: &Attempt<'_>, sources: Sources, from: usize, direct: &mut D) -> Result<()> {
        let pieces = direct.pieces();
        let lag = 1 + usize::from(D::COMBINES);
        let first = self.turns.next().wrapping_sub(from as u32);
        let turn_of = |iteration: usize| first.wrapping_add(iteration as u32);
        for i in from..pieces + lag {
            let publishes = i + 1 < pieces + lag;
            if publishes {
                self.begin_turn(attempt, [0; NOTES])?;
            }
            if i < pieces {
                direct.stage(i, self.turns.lines.slot(self.rank, Turns::<Shared>::slot(turn_of(i))));
            }
            if publishes && !D::COMBINES {
                self.turns.publish();
                direct.foresee(self.turns.lines.slot(self.rank, Turns::<Shared>::slot(turn_of(i + 1))));
            }
            if i >= 1 {
                // Nothing is taken before all have agreed, those from which nothing comes included.
                let sources = if i == 1 && matches!(sources, Sources::One(_)) { Sources::Everybody } else { sources };
                self.wait_for(attempt, sources, turn_of(i - 1))?;
            }
            if D::COMBINES && (1..=pieces).contains(&i) {
                direct.combine(i - 1, &self.slots(turn_of(i - 1)));
            }
            if publishes && D::COMBINES {
                self.turns.publish();
            }
            if i >= lag {
                direct.take(i - lag, &self.slots(turn_of(i - lag)));
            }
        }
        Ok(())
    }

    /// All ranks of this host but this one.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.members.len());
        (0..ranks).filter(move |&peer| peer != rank)
    }

    fn slots(&self, turn: u32) -> Slots<'_> {
        Slots { turns: &self.turns, slot: Turns::<Shared>::slot(turn) }
    }

    /// One turn with nothing in it: returns when everybody has come to it.
    #[inline]
    fn meet(&mut self, attempt: &Attempt<'_>) -> Result<()> {
        self.exchange(attempt, [0; NOTES]).map(drop)
    }

    /// One turn with nothing but notes in it; returns its number, with which everybody's can be read.
    #[inline]
    fn exchange(&mut self, attempt: &Attempt<'_>, notes: Notes) -> Result<u32> {
        let turn = self.turns.next();
        self.begin_turn(attempt, notes)?;
        self.turns.publish();
        self.wait_for(attempt, Sources::Everybody, turn)?;
        Ok(turn)
    }

    /// Waits until this rank's next slot may be written, and says whose turn it is.
    #[inline]
    fn begin_turn(&mut self, attempt: &Attempt<'_>, notes: Notes) -> Result<()> {
        let turn = self.turns.next();
        for peer in self.peers() {
            self.wait(attempt, peer, Turns::<Shared>::retires(turn))?;
        }
        self.turns.announce(turn, self.chain, attempt.words, notes);
        Ok(())
    }

    /// Waits until the sources have published a turn of this operation.
    #[inline]
    fn wait_for(&mut self, attempt: &Attempt<'_>, sources: Sources, turn: u32) -> Result<()> {
        match sources {
            Sources::Everybody => self.peers().try_for_each(|peer| self.wait_and_compare(attempt, peer, turn)),
            Sources::One(peer) => self.wait_and_compare(attempt, peer, turn),
            Sources::Nobody => Ok(()),
        }
    }

    #[inline]
    fn wait_and_compare(&mut self, attempt: &Attempt<'_>, peer: usize, turn: u32) -> Result<()> {
        self.wait(attempt, peer, turn)?;
        let line = self.turns.line(peer, turn);
        if line.fingerprint() == self.chain { Ok(()) } else { Err(self.mismatch(attempt, peer, turn)) }
    }

    /// What to say when a rank's turn belongs to something else.
    #[cold]
    fn mismatch(&self, attempt: &Attempt<'_>, peer: usize, turn: u32) -> Error {
        let rank = self.members[peer];
        match Descriptor::decode(self.turns.line(peer, turn).descriptor()) {
            None => return attempt.failed(rank, Cause::Corrupt("a flag line that describes no operation")),
            Some(theirs) if theirs != attempt.descriptor => return attempt.mismatch(rank, attempt.descriptor, theirs),
            Some(_) => {}
        }
        // They agree on this operation, so they did not on one before, of which the flags may still be there.
        for turn in (1..SLOTS as u32).rev().map(|ago| turn.wrapping_sub(ago)) {
            let described = |rank| {
                let line = self.turns.line(rank, turn);
                Descriptor::decode(line.descriptor()).filter(|_| line.holds(turn))
            };
            if let (Some(mine), Some(theirs)) = (described(self.rank), described(peer))
                && mine != theirs
            {
                return attempt.mismatch(rank, mine, theirs);
            }
        }
        attempt.failed(rank, Cause::Diverged)
    }

    /// Waits until a rank of this host has published a turn.
    #[inline]
    fn wait(&mut self, attempt: &Attempt<'_>, peer: usize, turn: u32) -> Result<()> {
        if self.turns.has_reached(peer, turn) {
            return Ok(());
        }
        self.wait_long(attempt, peer, turn)
    }

    fn wait_long(&mut self, attempt: &Attempt<'_>, peer: usize, turn: u32) -> Result<()> {
        let mut waiting = Waiting::default();
        // While there is nothing else to do.
        attempt.note();
        while !self.turns.has_reached(peer, turn) {
            if self.patience.pause(&mut waiting) {
                let nap = attempt.patience_with(self.members[peer])?;
                self.look_after_peers(attempt, peer, turn)?;
                self.turns.sleep(peer, turn, nap.min(NAP));
            }
        }
        if waiting.is_long() {
            attempt.waits();
        }
        self.patience.done(waiting);
        Ok(())
    }

    /// An error if `peer` cannot publish `turn` any more, or somebody has died: then nobody can count on anything.
    #[cold]
    fn look_after_peers(&mut self, attempt: &Attempt<'_>, peer: usize, turn: u32) -> Result<()> {
        for other in self.peers() {
            // What it published before it ended still counts, and whoever left in good order did not die.
            if self.has_ended(other)
                && !self.turns.has_reached(other, turn)
                && self.turns.lines.card(other).state.load(Ordering::Acquire) == PRESENT
            {
                return Err(attempt.failed(self.members[other], Cause::Died));
            }
        }
        let card = self.turns.lines.card(peer);
        let cause = match card.state.load(Ordering::SeqCst) {
            LEFT => Cause::Left { last_seq: card.last_seq.load(Ordering::Relaxed) },
            REVOKED => Cause::Revoked,
            _ => return Ok(()),
        };
        if self.turns.has_reached(peer, turn) { Ok(()) } else { Err(attempt.failed(self.members[peer], cause)) }
    }

    /// The process of a rank that has been here, if this one can see it.
    fn process(&self, peer: usize) -> Option<u32> {
        let card = self.turns.lines.card(peer);
        let namespace = card.namespace.load(Ordering::Relaxed);
        (namespace != 0 && namespace == self.namespace).then(|| card.pid.load(Ordering::Relaxed))
    }

    /// Whether the process of a rank has ended.
    fn has_ended(&mut self, peer: usize) -> bool {
        let card = self.turns.lines.card(peer);
        if matches!(self.watches[peer], Watch::NotOpened) && card.state.load(Ordering::Acquire) != ABSENT {
            self.watches[peer] = match self.process(peer).filter(|&pid| pid != std::process::id()) {
                None => Watch::Blind,
                Some(pid) => match ProcessWatch::open(pid) {
                    Ok(Some(watch)) => Watch::Open(watch),
                    Ok(None) => Watch::Ended,
                    Err(error) => {
                        tracing::debug!(%error, pid, "a process cannot be watched");
                        Watch::Blind
                    }
                },
            };
        }
        match &self.watches[peer] {
            Watch::Open(watch) => watch.has_ended(),
            Watch::Ended => true,
            Watch::NotOpened | Watch::Blind => false,
        }
    }
}
