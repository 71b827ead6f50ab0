//! The memory that the ranks of one host share, seen from one of them: waiting, staging, lending.

use std::io;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::flags::{self, FlagLine, FlagLines, Phases, SLOTS, WORDS, Words};
use super::pipeline::{Collective, SLOT, Slots, Sources, StageAt};
use super::registered::{Heap, Location};
use super::tuning::Autotune;
use crate::bootstrap::host_group::HostGroup;
use crate::bootstrap::host_group::area::{Area, Parts, USABLE};
use crate::bootstrap::host_group::stage::{Holder, STAGE, Stage};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::sync::{self, AtomicU32, AtomicU64, Ordering};
use crate::sys::{self, PageSize, Patience, Segment, Waiting};
use crate::types::{Descriptor, Rank};

/// The most ranks of a host that share a window: each has a line of every slot to itself.
pub(crate) const MOST_RANKS: usize = SLOT / 64;

const _: () = assert!(LINES + SLOTS * size_of::<FlagLine>() <= USABLE, "a rank's flags fit its part of an area");
const _: () = assert!(SLOTS * SLOT == STAGE, "a stage has room for a rank's slots");

/// A piece of memory to read into, aligned for every element.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CacheLine(pub(super) [u8; 64]);

/// Where a rank's lines begin in its part of the area: after the state and the progress.
const LINES: usize = size_of::<RankState>() + size_of::<Progress>();

/// How long a rank that has failed waits for those that write into its registered buffers.
const PATIENCE_WITH_WRITERS: Duration = Duration::from_millis(100);

/// How long it waits beyond that, if its buffers cannot become private memory.
const LAST_PATIENCE_WITH_WRITERS: Duration = Duration::from_secs(10);

/// How long a rank waits for its peers to finish with a stage before it makes another one.
const PATIENCE_WITH_READERS: Duration = Duration::from_millis(1);

/// How long a rank tries to fetch another's segment before it is checked again whether to go on.
const LOOK: Duration = Duration::from_millis(500);

/// The longest sleep, after which it is checked again whether to go on.
const NAP: Duration = Duration::from_millis(50);

/// What a rank says of itself.
#[repr(C, align(128))]
pub(super) struct RankState {
    /// One of the states below.
    pub(super) state: AtomicU32,
    pub(super) pid: AtomicU32,
    /// The namespace in which `pid` means something; 0 if unknown.
    pub(super) namespace: AtomicU64,
    /// The last operation, when the rank has left.
    pub(super) last_seq: AtomicU64,
    /// 1 while the rank uses others' registered buffers.
    pub(super) borrows: AtomicU32,
    /// The number of the stage in which the rank stages data; 0 for none. Stays the same as long as a peer may read there.
    pub(super) stage: AtomicU32,
    /// The input and the output that the rank lends. For threads of its process: see [`Window::lent_by`].
    pub(super) lent: [AtomicPtr<u8>; 2],
}

/// How far a rank is with reading. Apart from the state, which all ranks read in every operation.
#[repr(C, align(128))]
struct Progress {
    /// The last phase of the last operation in which the rank has read others' slots: it reads those of earlier phases no more.
    finished: AtomicU32,
}

/// Not written yet.
const ABSENT: u32 = 0;
/// Takes part.
pub(super) const PRESENT: u32 = 1;
/// Has dropped its communicator.
const LEFT: u32 = 2;
/// An operation failed on it.
const REVOKED: u32 = 3;

/// The lines and cards in shared memory.
pub(super) struct FlagArea {
    pub(super) parts: Parts,
}

impl FlagArea {
    pub(super) fn rank_state(&self, rank: usize) -> &RankState {
        // SAFETY: an area has a part for every rank, aligned to more than a state. The memory started zeroed, which is a valid state,
        // and is touched only through its atomics.
        unsafe { &*self.parts.at(rank).cast::<RankState>() }
    }
}

impl FlagLines for FlagArea {
    #[inline]
    fn line(&self, rank: usize, slot: usize) -> &FlagLine {
        debug_assert!(slot < SLOTS);
        // SAFETY: as for `rank_state`; the lines follow state and progress, which are as aligned as they are.
        unsafe { &*self.parts.at(rank).add(LINES + slot * size_of::<FlagLine>()).cast::<FlagLine>() }
    }

    #[inline]
    fn finished(&self, rank: usize) -> &AtomicU32 {
        // SAFETY: as for `rank_state`, which the progress follows.
        unsafe { &(*self.parts.at(rank).add(size_of::<RankState>()).cast::<Progress>()).finished }
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
    pub(super) phases: Phases<FlagArea>,
    /// In which this process's number means something; 0 if unknown.
    pub(super) namespace: u64,
    /// This rank's number among those of the host.
    pub(super) rank: usize,
    /// The communicator's ranks of all on this host, in their order.
    pub(super) members: Arc<[Rank]>,
    /// The same as ranks of the job.
    pub(super) jobs: Arc<[Rank]>,
    pub(super) patience: Arc<Patience>,
    pub(super) host: Arc<HostGroup>,
    /// `None` once it is left to the readers of a stage.
    pub(super) area: Option<Area>,
    /// Where this rank stages data, if it holds a stage.
    pub(super) stage: Option<Stage>,
    /// The last phase in which it staged something.
    pub(super) staged: u32,
    /// Where the slots of every rank are, and the number of the stage that they are in, as last seen.
    pub(super) slots: Vec<StageAt>,
    /// The communicator that is asked to give up the stage.
    pub(super) holder: Weak<dyn Holder>,
    pub(super) heap: Heap,
    /// The fingerprint of all operations so far, in their order. Not every operation has every rank compare: a root of a
    /// broadcast reads nobody's flags. Chained, what it did not see shows in the next comparison, whoever makes it.
    pub(super) chain: u64,
    pub(super) autotune: Autotune,
    /// The addresses of a fold's parts, and what came inline; kept for their memory.
    pub(super) parts: Vec<*const u8>,
    pub(super) inline: Vec<Words>,
    /// What everybody told, and what was read from other processes; kept for its memory, too.
    pub(super) told: Vec<Words>,
    pub(super) rooms: Vec<CacheLine>,
    /// How often another process was read.
    #[cfg(test)]
    pub(super) reads: u64,
}

// SAFETY: `parts` is used only within a call, and `slots` are addresses in memory that the host group keeps mapped; the rest may be
// used by any one thread at a time.
unsafe impl Send for Window {}

/// A rank uses others' registered buffers until this is dropped, be it by a panic.
pub(super) struct Borrowed<'a>(&'a RankState);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.borrows.store(0, Ordering::Release);
    }
}

impl Window {
    /// The window in an area of these ranks, which are the ranks `jobs` of the job.
    pub(crate) fn new(
        mut area: Area,
        members: Arc<[Rank]>,
        jobs: Arc<[Rank]>,
        host: Arc<HostGroup>,
        patience: Arc<Patience>,
        autotune: Autotune,
    ) -> Window {
        let (rank, ranks) = (area.rank(), members.len());
        assert!(area.ranks() == ranks && jobs.len() == ranks);
        area.enter();
        let shared = FlagArea { parts: area.parts().clone() };
        let rank_state = shared.rank_state(rank);
        rank_state.pid.store(std::process::id(), Ordering::Relaxed);
        let namespace = sys::process_namespace().unwrap_or(0);
        rank_state.namespace.store(namespace, Ordering::Relaxed);
        rank_state.state.store(PRESENT, Ordering::Release);
        Window {
            phases: Phases::new(shared, rank, ranks),
            namespace,
            rank,
            members,
            jobs,
            patience,
            host,
            area: Some(area),
            stage: None,
            staged: 0,
            slots: vec![StageAt { stage: 0, base: std::ptr::null_mut() }; ranks],
            holder: Weak::<NoHolder>::new(),
            heap: Heap::new(rank, PageSize::system()),
            chain: 0,
            autotune,
            parts: Vec::with_capacity(ranks),
            inline: vec![[0; WORDS]; ranks],
            told: vec![[0; WORDS]; ranks],
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

    /// Ends the sleep of whoever waits in this window, in whatever process: for another thread.
    pub(crate) fn waker(&self) -> impl Fn() + Send + Sync + use<> {
        let shared = FlagArea { parts: self.phases.lines.parts.clone() };
        let ranks = self.members.len();
        move || {
            for (rank, slot) in (0..ranks).flat_map(|rank| (0..SLOTS).map(move |slot| (rank, slot))) {
                shared.wake(&shared.line(rank, slot).phase);
            }
        }
    }

    /// The other ranks will hear of it that this one has failed, or left after operation `last_seq`. If it has failed, nobody
    /// uses its registered buffers when this returns.
    pub(crate) fn part(&mut self, last_seq: u64, failed: bool) {
        let rank_state = self.phases.lines.rank_state(self.rank);
        rank_state.last_seq.store(last_seq, Ordering::Relaxed);
        rank_state.state.store(if failed { REVOKED } else { LEFT }, Ordering::SeqCst);
        self.phases.wake_everybody();
        if failed {
            self.take_back_memory();
        }
    }

    /// An error if a rank of this host has failed.
    #[inline]
    pub(super) fn check_nobody_failed(&self, context: &OpContext<'_>) -> Result<()> {
        for peer in self.peers() {
            if self.phases.lines.rank_state(peer).state.load(Ordering::SeqCst) == REVOKED {
                return Err(context.failed(self.members[peer], Cause::Revoked));
            }
        }
        Ok(())
    }

    /// Lends the buffers of an operation to the peers, if they are registered, and says where they lie.
    pub(super) fn lend_memory(&mut self, context: &OpContext<'_>, input: RawSlice, output: RawSliceMut) -> Option<[Location; 2]> {
        let locations = self.heap.lend(context.descriptor.seq, input, output)?;
        // Published with the phase in which the peers read the locations.
        let lent = &self.phases.lines.rank_state(self.rank).lent;
        lent[0].store(input.ptr.cast_mut(), Ordering::Relaxed);
        lent[1].store(output.ptr, Ordering::Relaxed);
        Some(locations)
    }

    /// Where a rank's buffers of an operation are here, input and output of `len` bytes. `None` if no such memory is registered:
    /// locations come from peers.
    ///
    /// To a rank that is a thread of this process its buffers are borrowed while it calls, so only what was derived from that borrow
    /// may be used: the addresses that it left on its state. Those of another process mean something here only if they are the same
    /// as where its memory is mapped here.
    pub(super) fn lent_by(&self, rank: usize, locations: [Location; 2], len: usize) -> Option<[*mut u8; 2]> {
        let mut found = [std::ptr::null_mut(); 2];
        for ((found, location), lent) in found.iter_mut().zip(locations).zip(&self.phases.lines.rank_state(rank).lent) {
            let (here, lent) = (self.heap.resolve(rank, location, len)?, lent.load(Ordering::Relaxed));
            *found = if lent.addr() == here.addr() { lent } else { here };
        }
        Some(found)
    }

    /// Before this rank uses others' registered buffers: says so, and makes sure that none of them has failed. Both sides store
    /// before they look at what the other has stored, sequentially consistent: either this rank sees the failure, or the one that
    /// failed sees the borrower. See [`Window::take_back_memory`].
    pub(super) fn borrow_memory(&self, context: &OpContext<'_>) -> Result<Borrowed<'_>> {
        let rank_state = self.phases.lines.rank_state(self.rank);
        rank_state.borrows.store(1, Ordering::SeqCst);
        let borrowed = Borrowed(rank_state);
        self.check_nobody_failed(context)?;
        Ok(borrowed)
    }

    /// Waits until no peer uses what the operation that failed has lent them. A process that has ended uses nothing; one that is
    /// stopped may go on whenever it likes, and then writes elsewhere.
    fn take_back_memory(&mut self) {
        let Some(seq) = self.heap.lent_to() else { return };
        let until = Instant::now() + PATIENCE_WITH_WRITERS;
        let mut private = None;
        for peer in self.peers() {
            while self.phases.lines.rank_state(peer).borrows.load(Ordering::SeqCst) != 0 && !self.has_ended(peer) {
                std::thread::yield_now();
                if Instant::now() < until {
                    continue;
                }
                match private.get_or_insert_with(|| self.heap.make_private()) {
                    Ok(()) => break,
                    // Threads of this process are not stopped alone: they come to the end of what they do.
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                    Err(error) if Instant::now() >= until + LAST_PATIENCE_WITH_WRITERS => {
                        let rank = self.members[peer];
                        tracing::error!(rank, seq, %error, "a rank may still write into a registered buffer of an operation that failed");
                        break;
                    }
                    Err(_) => {}
                }
            }
        }
        self.heap.revoke();
    }

    /// Has `holder` asked when another communicator of the process needs this one's stage.
    pub(crate) fn set_holder(&mut self, holder: Weak<dyn Holder>) {
        self.holder = holder;
    }

    /// Keeps what has been tried for other communicators of the same ranks.
    pub(super) fn keep_tuning(&self) {
        self.host.set_tuning(&self.jobs, self.autotune.encode());
    }

    /// Tells every rank of this host what each of them says. Returns all words, in the order of ranks.
    pub(crate) fn tell(&mut self, context: &OpContext<'_>, words: Words) -> Result<Vec<Words>> {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
        let told = self.check_nobody_failed(context).and_then(|()| self.exchange(context, words));
        match told {
            Ok(phase) => {
                context.rest();
                Ok((0..self.members.len()).map(|rank| self.phases.line(rank, phase).words()).collect())
            }
            Err(error) => {
                context.give_up();
                Err(error)
            }
        }
    }

    /// Gives the stage up, if every peer has finished with it.
    pub(crate) fn give_up_stage(&mut self) -> Option<Stage> {
        self.stage.take_if(|_| have_read(&self.phases.lines, self.rank, &self.jobs, self.staged, &self.host))
    }

    /// Makes sure that this rank has a stage before it stages anything in an operation.
    #[inline]
    pub(super) fn hold_stage(&mut self, context: &OpContext<'_>) -> Result<()> {
        if self.stage.is_some() { Ok(()) } else { self.take_stage(context) }
    }

    #[cold]
    fn take_stage(&mut self, context: &OpContext<'_>) -> Result<()> {
        let began = Instant::now();
        let stage = loop {
            // Peers are about to finish with what was staged last: that is sooner done than memory is made and mapped.
            let is_long = began.elapsed() >= PATIENCE_WITH_READERS;
            match self.host.take_stage(&self.holder, is_long) {
                Ok(Some(stage)) => break stage,
                Err(error) if context.left().is_zero() => {
                    return Err(Error::os("reserving shared memory to stage data: free some, or raise the limit")(error));
                }
                Ok(None) | Err(_) => {
                    if is_long {
                        context.check()?;
                        std::thread::sleep(PATIENCE_WITH_READERS);
                    }
                    std::thread::yield_now();
                }
            }
        };
        self.slots[self.rank] = StageAt { stage: stage.id, base: stage.base() };
        // Released with the phase in which something is staged there first.
        self.phases.lines.rank_state(self.rank).stage.store(stage.id, Ordering::Relaxed);
        self.stage = Some(stage);
        Ok(())
    }

    /// Finds the stages of those whose slots are read, after they have published the first phase of an operation.
    #[inline]
    fn find_stages(&mut self, context: &OpContext<'_>, sources: Sources) -> Result<()> {
        match sources {
            Sources::Everybody => self.peers().try_for_each(|peer| self.find_stage(context, peer)),
            Sources::One(peer) => self.find_stage(context, peer),
            Sources::Nobody => Ok(()),
        }
    }

    #[inline]
    fn find_stage(&mut self, context: &OpContext<'_>, peer: usize) -> Result<()> {
        let stage = self.phases.lines.rank_state(peer).stage.load(Ordering::Relaxed);
        if stage == self.slots[peer].stage && stage != 0 { Ok(()) } else { self.map_stage(context, peer, stage) }
    }

    #[cold]
    fn map_stage(&mut self, context: &OpContext<'_>, peer: usize, stage: u32) -> Result<()> {
        let member = self.members[peer];
        if stage == 0 {
            return Err(context.failed(member, Cause::Corrupt("no stage where data is staged")));
        }
        match self.host.stage_of(self.jobs[peer], stage) {
            Ok(base) => {
                self.slots[peer] = StageAt { stage, base };
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(context.failed(member, Cause::Corrupt("the number of a stage that is not there")))
            }
            Err(error) => Err(Error::os("mapping the memory in which a rank of this host stages data")(error)),
        }
    }

    /// A segment that a rank of this host lends, for which that rank is asked until the operation's deadline, as long as there is a
    /// chance; an error inside if this process cannot have it.
    pub(crate) fn fetch(&mut self, context: &OpContext<'_>, peer: usize, id: u32) -> Result<io::Result<Arc<Segment>>> {
        let found = loop {
            let until = Instant::now() + context.patience_with(self.members[peer])?.min(LOOK);
            let found = self.host.fetch_once(self.jobs[peer], id, until);
            if found.is_err()
                && let Some(cause) = self.why_gone(peer)
            {
                return Err(context.failed(self.members[peer], cause));
            }
            match found {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                found => break found,
            }
        };
        // What takes long from now on is not the peer's doing.
        context.rest();
        Ok(found)
    }

    /// Runs the phases of one operation.
    ///
    /// In iteration i a rank stages piece i, combines piece i-1 and takes what is complete: piece i-1, or i-2 if pieces are
    /// combined first. Each iteration publishes one phase, so ranks wait for each other once per piece, and then for what the
    /// others did an iteration ago.
    ///
    /// `from` is 1 if the first piece has been staged and its phase published, as operation `context`, 0 otherwise.
    pub(super) fn pipeline<D: Collective>(
        &mut self,
        context: &OpContext<'_>,
        sources: Sources,
        from: usize,
        direct: &mut D,
    ) -> Result<()> {
        let pieces = direct.pieces();
        let lag = 1 + usize::from(D::COMBINES);
        let first = self.phases.next().wrapping_sub(from as u32);
        let turn_of = |iteration: usize| first.wrapping_add(iteration as u32);
        if direct.stages() {
            self.hold_stage(context)?;
        }
        for i in from..pieces + lag {
            let publishes = i + 1 < pieces + lag;
            if publishes {
                self.begin_turn(context, [0; WORDS])?;
            }
            if i < pieces {
                direct.stage(i, self.slots(turn_of(i)).of(self.rank));
            }
            if publishes && !D::COMBINES {
                self.phases.publish();
                direct.prefetch(self.slots(turn_of(i + 1)).of(self.rank));
            }
            if i >= 1 {
                self.wait_for(context, sources, turn_of(i - 1))?;
            }
            if i == 1 {
                self.find_stages(context, sources)?;
            }
            if D::COMBINES && (1..=pieces).contains(&i) {
                direct.combine(i - 1, &self.slots(turn_of(i - 1)));
            }
            if publishes && D::COMBINES {
                self.phases.publish();
            }
            if i >= lag {
                direct.take(i - lag, &self.slots(turn_of(i - lag)));
            }
        }
        self.staged = self.phases.finish();
        Ok(())
    }

    /// All ranks of this host but this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.members.len());
        (0..ranks).filter(move |&peer| peer != rank)
    }

    pub(super) fn slots(&self, phase: u32) -> Slots<'_> {
        Slots { places: &self.slots, offset: Phases::<FlagArea>::slot(phase) * SLOT }
    }

    /// One phase with nothing in it: returns when everybody has come to it.
    #[inline]
    pub(super) fn meet(&mut self, context: &OpContext<'_>) -> Result<()> {
        self.exchange(context, [0; WORDS]).map(drop)
    }

    /// One phase with nothing but words in it; returns its number, with which everybody's can be read.
    #[inline]
    pub(super) fn exchange(&mut self, context: &OpContext<'_>, words: Words) -> Result<u32> {
        let phase = self.phases.next();
        self.begin_turn(context, words)?;
        self.phases.publish();
        self.wait_for(context, Sources::Everybody, phase)?;
        Ok(phase)
    }

    /// Waits until this rank's next slot may be written, and says whose phase it is.
    #[inline]
    pub(super) fn begin_turn(&mut self, context: &OpContext<'_>, words: Words) -> Result<()> {
        let phase = self.phases.next();
        for peer in self.peers() {
            self.wait(context, peer, Phases::<FlagArea>::retires(phase))?;
        }
        self.phases.announce(phase, self.chain, context.words, words);
        Ok(())
    }

    /// Waits until the sources have published a phase of this operation.
    #[inline]
    pub(super) fn wait_for(&mut self, context: &OpContext<'_>, sources: Sources, phase: u32) -> Result<()> {
        match sources {
            Sources::Everybody => self.peers().try_for_each(|peer| self.wait_and_compare(context, peer, phase)),
            Sources::One(peer) => self.wait_and_compare(context, peer, phase),
            Sources::Nobody => Ok(()),
        }
    }

    #[inline]
    fn wait_and_compare(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        self.wait(context, peer, phase)?;
        let line = self.phases.line(peer, phase);
        if line.fingerprint() == self.chain { Ok(()) } else { Err(self.mismatch(context, peer, phase)) }
    }

    /// What to say when a rank's phase belongs to something else.
    #[cold]
    fn mismatch(&self, context: &OpContext<'_>, peer: usize, phase: u32) -> Error {
        let rank = self.members[peer];
        match Descriptor::decode(self.phases.line(peer, phase).descriptor()) {
            None => return context.failed(rank, Cause::Corrupt("a flag line that describes no operation")),
            Some(theirs) if theirs != context.descriptor => return context.mismatch(rank, context.descriptor, theirs),
            Some(_) => {}
        }
        // They agree on this operation, so they did not on one before, of which the flags may still be there.
        for phase in (1..SLOTS as u32).rev().map(|ago| phase.wrapping_sub(ago)) {
            let described = |rank| {
                let line = self.phases.line(rank, phase);
                Descriptor::decode(line.descriptor()).filter(|_| line.holds(phase))
            };
            if let (Some(mine), Some(theirs)) = (described(self.rank), described(peer))
                && mine != theirs
            {
                return context.mismatch(rank, mine, theirs);
            }
        }
        context.failed(rank, Cause::Diverged)
    }

    /// Waits until a rank of this host has published a phase.
    #[inline]
    pub(super) fn wait(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        if self.phases.has_reached(peer, phase) {
            return Ok(());
        }
        self.wait_long(context, peer, phase)
    }

    fn wait_long(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        let mut waiting = Waiting::default();
        // While there is nothing else to do.
        context.note();
        while !self.phases.has_reached(peer, phase) {
            if self.patience.pause(&mut waiting) {
                let nap = context.patience_with(self.members[peer])?;
                self.look_after_peers(context, peer, phase)?;
                self.phases.sleep(peer, phase, nap.min(NAP));
            }
        }
        if waiting.is_long() {
            context.waits();
        }
        self.patience.done(waiting);
        Ok(())
    }

    /// An error if a rank can publish `phase` no more: then the operation, in which all take part, cannot end. If that is so of
    /// several, one that has died is named rather than one that has left, and `peer` rather than another.
    #[cold]
    pub(super) fn look_after_peers(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        let peer_first = std::iter::once(peer).chain(self.peers().filter(|&other| other != peer));
        // What a rank published before it ended still counts.
        let gone = peer_first.filter_map(|other| {
            let cause = self.why_gone(other)?;
            (!self.phases.has_reached(other, phase)).then_some((other, cause))
        });
        // A rank that has failed did so because of another.
        let named = gone.min_by_key(|(_, cause)| match cause {
            Cause::Died => 0,
            Cause::Left { .. } => 1,
            _ => 2,
        });
        named.map_or(Ok(()), |(other, cause)| Err(context.failed(self.members[other], cause)))
    }

    /// Why a rank publishes no more phases, if that is so.
    fn why_gone(&mut self, peer: usize) -> Option<Cause> {
        // A rank that has left in good order has not died, even if its process has ended.
        let has_ended = self.has_ended(peer);
        let rank_state = self.phases.lines.rank_state(peer);
        match rank_state.state.load(Ordering::SeqCst) {
            LEFT => Some(Cause::Left { last_seq: rank_state.last_seq.load(Ordering::Relaxed) }),
            REVOKED => Some(Cause::Revoked),
            _ => has_ended.then_some(Cause::Died),
        }
    }

    /// The process of a rank that has been here, if this one can see it.
    pub(super) fn process(&self, peer: usize) -> Option<u32> {
        let rank_state = self.phases.lines.rank_state(peer);
        let namespace = rank_state.namespace.load(Ordering::Relaxed);
        (namespace != 0 && namespace == self.namespace).then(|| rank_state.pid.load(Ordering::Relaxed))
    }

    /// Whether the process of a rank has ended.
    fn has_ended(&mut self, peer: usize) -> bool {
        let is_there = self.phases.lines.rank_state(peer).state.load(Ordering::Acquire) != ABSENT;
        is_there && self.process(peer).is_some_and(|process| self.host.process_has_ended(process))
    }
}

/// Whether every peer has finished with what `rank` staged up to a phase: has read it, or reads nothing in this area any more.
fn have_read(shared: &FlagArea, rank: usize, jobs: &[Rank], phase: u32, host: &HostGroup) -> bool {
    let is_done = |peer: usize| {
        flags::has_finished(shared, peer, phase)
            || matches!(shared.rank_state(peer).state.load(Ordering::Acquire), LEFT | REVOKED)
            || host.has_ended(jobs[peer])
    };
    (0..jobs.len()).filter(|&peer| peer != rank).all(is_done)
}

/// A communicator that keeps its stage.
struct NoHolder;

impl Holder for NoHolder {
    fn give_up(&self) -> Option<Stage> {
        None
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        let (rank, jobs, phase) = (self.rank, self.jobs.clone(), self.staged);
        let shared = FlagArea { parts: self.phases.lines.parts.clone() };
        // The area stays this rank's until its peers have read.
        let area = self.area.take();
        self.host.park_stage(
            stage,
            Box::new(move |host| {
                let _ = &area;
                have_read(&shared, rank, &jobs, phase, host)
            }),
        );
    }
}
