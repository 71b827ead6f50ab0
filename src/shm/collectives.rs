//! The collectives themselves: what each rank copies and reduces, and between which of the others' phases.
//!
//! Let N be the ranks of the host and S the bytes of the buffer (or of all blocks). What a rank loads and stores, in bytes:
//!
//! | form | bytes | phases |
//! |---|---|---|
//! | [`inline`]: up to 48 bytes in the flag line | none but the line | 1 |
//! | [`OneShot`]: stage all, reduce everybody's | (N + 3) S | 1 |
//! | [`TwoShot`]: stage the others' slices, reduce mine, read theirs | (5 - 2/N) S | 2 |
//! | [`cma`], all-reduce: read the others' input for my slice, then their slices | (5 - 3/N) S | 3 |
//! | [`cma`], all-gather and all-to-all: read the others' blocks | 2 S | 2 |
//! | registered: reduce my slice where it lies, write it where it belongs | 2 S | 2 |
//! | [`Spread`], [`Collect`], [`Exchange`]: stage, read | at most 4 S | 1 |
//!
//! In place is no special case anywhere: a piece is staged before it is overwritten.

use std::ops::Range;

use super::autotune::{self, Traffic};
use super::flags::{WORDS, Words};
use super::registered::Location;
use super::{Collective, SLOT, Slots, Sources, Window, WindowCall, cma};
use crate::config::CopyMode;
use crate::error::{Cause, Result};
use crate::failure::OpContext;
use crate::reduce::{self, copy_streaming};
use crate::schedule::chunk;
use crate::sync;
use crate::types::Op;

const _: () = assert!(autotune::ONE_SHOT.end / 2 <= SLOT, "in one shot, two ranks stage half of it each");

/// From so many bytes of output on, what is copied there goes past the caches, which could not keep it anyhow. Measured on
/// two cores with 2 MiB of second-level cache each: out of place, 64 MiB then take 0.8 of the time.
const STREAM: usize = 32 << 20;

/// Up to so many bytes, a rank fetches its next slot ahead. Of 16 KiB, where cores are far from each other, that takes longer than
/// it saves.
const PREFETCHED: usize = 8 << 10;

/// See [`Window::run`].
///
/// # Safety
///
/// As there.
pub(super) unsafe fn run(window: &mut Window, context: &OpContext<'_>, call: &WindowCall<'_>) -> Result<()> {
    let (rank, ranks) = (window.rank, window.members.len());
    let is_root = rank == call.root;
    let bytes = call.count * call.element;
    let from_root = if is_root { Sources::Nobody } else { Sources::One(call.root) };
    let to_root = if is_root { Sources::Everybody } else { Sources::Nobody };
    let memory = Memory { call, rank, ranks };
    // What is short comes first: there, every test counts.
    match call.op {
        Op::Barrier => return window.meet(context),
        Op::AllReduce | Op::Reduce if bytes <= size_of::<Words>() => {
            return inline(window, context, memory, call.op == Op::AllReduce || is_root);
        }
        _ => {}
    }
    if cma::copy(window, context, memory)? {
        return Ok(());
    }
    // Bytes over all ranks up to which everybody reduces everything.
    let one_shot = match call.op {
        Op::AllReduce | Op::Reduce if autotune::ONE_SHOT.contains(&(bytes * ranks)) => autotune::one_shot(window, context)?,
        _ => autotune::ONE_SHOT.start,
    };
    let mut parts = std::mem::take(&mut window.parts);
    let result = match call.op {
        Op::AllReduce | Op::Reduce if bytes * ranks <= one_shot => {
            let takes = call.op == Op::AllReduce || is_root;
            let sources = if takes { Sources::Everybody } else { Sources::Nobody };
            window.pipeline(context, sources, 0, &mut OneShot { memory, takes, parts: &mut parts })
        }
        Op::AllReduce => {
            let mut two_shot = TwoShot { memory, root: None, streams: false, parts: &mut parts };
            all_reduce(window, context, &mut two_shot)
        }
        Op::Reduce => {
            let mut two_shot = TwoShot { memory, root: Some(call.root), streams: false, parts: &mut parts };
            window.pipeline(context, Sources::Everybody, 0, &mut two_shot)
        }
        Op::Broadcast => window.pipeline(context, from_root, 0, &mut Spread { memory, blocks: false }),
        Op::Scatter => window.pipeline(context, from_root, 0, &mut Spread { memory, blocks: true }),
        Op::Gather => window.pipeline(context, to_root, 0, &mut Collect { memory, takes: is_root }),
        Op::AllGather | Op::AllGatherV => window.pipeline(context, Sources::Everybody, 0, &mut Collect { memory, takes: true }),
        Op::ReduceScatter | Op::ReduceScatterV => {
            let mut exchange = Exchange { memory, reduces: true, parts: &mut parts };
            window.pipeline(context, Sources::Everybody, 0, &mut exchange)
        }
        Op::AllToAll => {
            let mut exchange = Exchange { memory, reduces: false, parts: &mut parts };
            window.pipeline(context, Sources::Everybody, 0, &mut exchange)
        }
        op => unreachable!("{op} has no window"),
    };
    window.parts = parts;
    result
}

/// The call's buffers, by element.
#[derive(Clone, Copy)]
pub(super) struct Memory<'a> {
    pub(super) call: &'a WindowCall<'a>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Memory<'_> {
    pub(super) fn input(&self, elements: &Range<usize>) -> *const u8 {
        let bytes = elements.len() * self.call.element;
        self.call.input.skip(elements.start * self.call.element).take(bytes).ptr
    }

    pub(super) fn output(&self, elements: &Range<usize>) -> *mut u8 {
        let bytes = elements.len() * self.call.element;
        let chunk = self.call.output.skip(elements.start * self.call.element);
        assert!(bytes <= chunk.len, "a piece reaches beyond the output");
        chunk.ptr
    }

    /// Copies elements between a buffer and a slot, or within the buffers.
    ///
    /// # Safety
    ///
    /// Both are valid for so many elements.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, elements: usize) {
        if from != to {
            // SAFETY: the caller vouches for both; buffers and slots are apart, and within the buffers only whole blocks are
            // copied, which are the same or apart.
            unsafe { reduce::copy(from, to, elements * self.call.element) }
        }
    }

    /// Whether a place in the output is best written past the caches. In place it has just been read, and is in them.
    fn streams(&self, to: *const u8) -> bool {
        let input = self.call.input;
        self.call.output.len >= STREAM && !(input.ptr.addr()..input.ptr.addr() + input.len).contains(&to.addr())
    }

    /// Copies elements from a slot to the output.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy`].
    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, elements: usize) {
        if self.streams(to) {
            // SAFETY: passed on.
            unsafe { copy_streaming(from, to, elements * self.call.element) }
        } else {
            // SAFETY: passed on.
            unsafe { self.copy(from, to, elements) }
        }
    }

    /// Reduces everybody's parts, in the order of ranks.
    ///
    /// # Safety
    ///
    /// All parts and the destination are valid for so many elements, and the destination is one of them or apart.
    pub(super) unsafe fn fold(&self, parts: &[*const u8], to: *mut u8, elements: usize) {
        let kernel = self.call.kernel.expect("an operation that reduces has a kernel");
        // SAFETY: passed on.
        unsafe { kernel.fold(parts, to, elements, self.call.finish) }
    }

    /// Elements that fit a slot.
    fn slot(&self) -> usize {
        SLOT / self.call.element
    }

    /// Elements of each rank's share of a slot that has one for every rank. A multiple of the cache line.
    fn share(&self) -> usize {
        let bytes = SLOT / self.ranks / 64 * 64;
        assert!(bytes > 0, "a host of {} ranks needs larger slots", self.ranks);
        bytes / self.call.element
    }

    /// The `piece`-th piece of a range; empty beyond its end.
    fn piece(range: Range<usize>, size: usize, piece: usize) -> Range<usize> {
        let at = (range.start + piece * size).min(range.end);
        at..(at + size).min(range.end)
    }
}

/// Everybody says everything in its flag line, which the others read anyhow: one cache line from each.
fn inline(window: &mut Window, context: &OpContext<'_>, memory: Memory<'_>, takes: bool) -> Result<()> {
    let all = 0..memory.call.count;
    let bytes = all.len() * memory.call.element;
    let mut words: Words = [0; WORDS];
    // SAFETY: words have room for `bytes`, and the caller of `run` vouches for the input.
    unsafe { std::ptr::copy_nonoverlapping(memory.input(&all), words.as_mut_ptr().cast(), bytes) };
    let phase = window.phases.next();
    window.begin_turn(context, words)?;
    window.phases.publish();
    if !takes {
        return Ok(());
    }
    window.wait_for(context, Sources::Everybody, phase)?;
    let Window { inline, phases, parts, .. } = window;
    parts.clear();
    for (rank, place) in inline.iter_mut().enumerate() {
        *place = if rank == memory.rank { words } else { phases.line(rank, phase).words() };
        parts.push(place.as_ptr().cast());
    }
    // SAFETY: the parts are words, which hold so many elements; the caller of `run` vouches for the output.
    unsafe { memory.fold(parts, memory.output(&all), all.len()) };
    Ok(())
}

/// Everybody stages everything, and reduces it if it is to have the result.
pub(super) struct OneShot<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) takes: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl OneShot<'_> {
    fn bytes(&self) -> usize {
        self.memory.call.count * self.memory.call.element
    }
}

impl Collective for OneShot<'_> {
    const COMBINES: bool = false;

    fn pieces(&self) -> usize {
        1
    }

    fn stage(&mut self, _: usize, mine: *mut u8) {
        let all = 0..self.memory.call.count;
        let (input, bytes) = (self.memory.input(&all), self.bytes());
        // SAFETY: a slot holds what is reduced in one shot, and the caller of `run` vouches for the input.
        unsafe { reduce::copy_up_to(PREFETCHED, input, mine, bytes) };
    }

    /// The next operation is often as large as this one.
    fn prefetch(&self, next: *mut u8) {
        if self.takes && self.bytes() <= PREFETCHED {
            for line in (0..self.bytes()).step_by(64) {
                sync::prefetch_to_write(next.wrapping_add(line));
            }
        }
    }

    fn take(&mut self, _: usize, slots: &Slots<'_>) {
        if !self.takes {
            return;
        }
        let all = 0..self.memory.call.count;
        self.parts.clear();
        self.parts.extend((0..self.memory.ranks).map(|rank| slots.of(rank).cast_const()));
        // SAFETY: everybody has staged as much, and the caller of `run` vouches for the output.
        unsafe { self.memory.fold(self.parts, self.memory.output(&all), all.len()) };
    }
}

/// Each rank reduces its slice of every piece. The slot mirrors the piece: the others' slices hold this rank's input for them,
/// its own slice holds the result.
pub(super) struct TwoShot<'a> {
    pub(super) memory: Memory<'a>,
    /// Who takes the result; everybody if `None`.
    pub(super) root: Option<usize>,
    /// Whether slots are written past the caches.
    pub(super) streams: bool,
    pub(super) parts: &'a mut Vec<*const u8>,
}

impl TwoShot<'_> {
    fn piece(&self, piece: usize) -> Range<usize> {
        Memory::piece(0..self.memory.call.count, self.memory.slot(), piece)
    }

    /// A rank's slice of a piece: in the slot, and in the buffers.
    fn slice(&self, piece: &Range<usize>, rank: usize) -> (usize, Range<usize>) {
        let slice = chunk(piece.len(), self.memory.ranks, rank);
        (slice.start * self.memory.call.element, piece.start + slice.start..piece.start + slice.end)
    }

    fn takes(&self) -> bool {
        self.root.is_none_or(|root| root == self.memory.rank)
    }

    /// Copies elements to this rank's slot.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy`].
    unsafe fn share(&self, from: *const u8, slot: *mut u8, elements: usize) {
        if self.streams {
            // SAFETY: passed on.
            unsafe { copy_streaming(from, slot, elements * self.memory.call.element) }
        } else {
            // SAFETY: passed on.
            unsafe { self.memory.copy(from, slot, elements) }
        }
    }
}

impl Collective for TwoShot<'_> {
    const COMBINES: bool = true;

    fn pieces(&self) -> usize {
        self.memory.call.count.div_ceil(self.memory.slot())
    }

    fn stage(&mut self, piece: usize, mine: *mut u8) {
        let piece = self.piece(piece);
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let (at, slice) = self.slice(&piece, rank);
            // SAFETY: a piece fits a slot, and the caller of `run` vouches for the input.
            unsafe { self.share(self.memory.input(&slice), mine.add(at), slice.len()) };
        }
    }

    fn combine(&mut self, piece: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        let piece = self.piece(piece);
        let (at, slice) = self.slice(&piece, memory.rank);
        let own = memory.input(&slice);
        self.parts.clear();
        let part = |rank| if rank == memory.rank { own } else { slots.of(rank).wrapping_add(at).cast_const() };
        self.parts.extend((0..memory.ranks).map(part));
        let shared = slots.of(memory.rank).wrapping_add(at);
        if self.takes() {
            let output = memory.output(&slice);
            let (first, second) = if memory.streams(output) { (shared, output) } else { (output, shared) };
            // SAFETY: everybody has staged this rank's slice; the caller of `run` vouches for both buffers, and this rank's slice
            // of its own slot is its own until the next phase. What comes first is in the cache when it is copied.
            unsafe {
                memory.fold(self.parts, first, slice.len());
                if second == output {
                    memory.copy_out(first, output, slice.len());
                } else if self.root.is_none() {
                    self.share(output, shared, slice.len());
                }
            }
        } else {
            // SAFETY: as above.
            unsafe { memory.fold(self.parts, shared, slice.len()) };
        }
    }

    fn take(&mut self, piece: usize, slots: &Slots<'_>) {
        if !self.takes() {
            return;
        }
        let piece = self.piece(piece);
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let (at, slice) = self.slice(&piece, rank);
            // SAFETY: that rank has put its slice of the result there; the caller of `run` vouches for the output.
            unsafe { self.memory.copy_out(slots.of(rank).add(at), self.memory.output(&slice), slice.len()) };
        }
    }
}

/// The root stages: everything for everybody (broadcast), or a block for each (scatter).
struct Spread<'a> {
    memory: Memory<'a>,
    blocks: bool,
}

impl Spread<'_> {
    /// The root's elements of a piece that are for a rank, and where in the slot they are, in elements.
    fn piece(&self, piece: usize, rank: usize) -> (usize, Range<usize>) {
        if self.blocks {
            let share = self.memory.share();
            (rank * share, Memory::piece(self.memory.call.blocks.range(rank), share, piece))
        } else {
            (0, Memory::piece(0..self.memory.call.count, self.memory.slot(), piece))
        }
    }
}

impl Collective for Spread<'_> {
    const COMBINES: bool = false;

    fn stages(&self) -> bool {
        self.memory.rank == self.memory.call.root
    }

    fn pieces(&self) -> usize {
        if self.blocks {
            self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.share())
        } else {
            self.memory.call.count.div_ceil(self.memory.slot())
        }
    }

    fn stage(&mut self, piece: usize, mine: *mut u8) {
        let memory = self.memory;
        if !self.stages() {
            return;
        }
        for rank in 0..if self.blocks { memory.ranks } else { 1 } {
            let (at, elements) = self.piece(piece, rank);
            let input = memory.input(&elements);
            if self.blocks && rank == memory.rank {
                let start = elements.start - memory.call.blocks.range(rank).start;
                let output = memory.output(&(start..start + elements.len()));
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { memory.copy(input, output, elements.len()) };
            } else {
                // SAFETY: a piece fits its share of the slot, and the caller of `run` vouches for the input.
                unsafe { memory.copy(input, mine.add(at * memory.call.element), elements.len()) };
            }
        }
        if !self.blocks {
            let (_, elements) = self.piece(piece, memory.rank);
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { memory.copy(memory.input(&elements), memory.output(&elements), elements.len()) };
        }
    }

    fn take(&mut self, piece: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        if memory.rank == memory.call.root {
            return;
        }
        let (at, elements) = self.piece(piece, memory.rank);
        let start = if self.blocks { memory.call.blocks.range(memory.rank).start } else { 0 };
        let output = memory.output(&(elements.start - start..elements.end - start));
        // SAFETY: the root has staged so many elements there; the caller of `run` vouches for the output.
        unsafe { memory.copy_out(slots.of(memory.call.root).add(at * memory.call.element), output, elements.len()) };
    }
}

/// Everybody stages its block; whoever is to have them takes the others'.
pub(super) struct Collect<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) takes: bool,
}

impl Collect<'_> {
    /// A rank's elements of a piece, in the output.
    fn piece(&self, piece: usize, rank: usize) -> Range<usize> {
        Memory::piece(self.memory.call.blocks.range(rank), self.memory.slot(), piece)
    }
}

impl Collective for Collect<'_> {
    const COMBINES: bool = false;

    fn stages(&self) -> bool {
        self.memory.call.op != Op::Gather || !self.takes
    }

    fn pieces(&self) -> usize {
        self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.slot())
    }

    fn stage(&mut self, piece: usize, mine: *mut u8) {
        let memory = self.memory;
        let elements = self.piece(piece, memory.rank);
        let start = memory.call.blocks.range(memory.rank).start;
        let input = memory.input(&(elements.start - start..elements.end - start));
        if self.takes {
            // SAFETY: the caller of `run` vouches for both buffers.
            unsafe { memory.copy(input, memory.output(&elements), elements.len()) };
        }
        if self.stages() {
            // SAFETY: a piece fits a slot, and the caller of `run` vouches for the input.
            unsafe { memory.copy(input, mine, elements.len()) };
        }
    }

    fn take(&mut self, piece: usize, slots: &Slots<'_>) {
        if !self.takes {
            return;
        }
        for rank in (0..self.memory.ranks).filter(|&rank| rank != self.memory.rank) {
            let elements = self.piece(piece, rank);
            // SAFETY: that rank has staged so many elements; the caller of `run` vouches for the output.
            unsafe { self.memory.copy_out(slots.of(rank), self.memory.output(&elements), elements.len()) };
        }
    }
}

/// Everybody stages a block for each of the others; each takes the blocks that are for it, and reduces them (reduce-scatter)
/// or puts them side by side (all-to-all).
struct Exchange<'a> {
    memory: Memory<'a>,
    reduces: bool,
    parts: &'a mut Vec<*const u8>,
}

impl Exchange<'_> {
    fn piece(&self, piece: usize, rank: usize) -> Range<usize> {
        Memory::piece(self.memory.call.blocks.range(rank), self.memory.share(), piece)
    }
}

impl Collective for Exchange<'_> {
    const COMBINES: bool = false;

    fn pieces(&self) -> usize {
        self.memory.call.blocks.longest(self.memory.ranks).div_ceil(self.memory.share())
    }

    fn stage(&mut self, piece: usize, mine: *mut u8) {
        let memory = self.memory;
        let share = memory.share() * memory.call.element;
        for rank in 0..memory.ranks {
            let elements = self.piece(piece, rank);
            let input = memory.input(&elements);
            if rank != memory.rank {
                // SAFETY: a piece fits its share of the slot, and the caller of `run` vouches for the input.
                unsafe { memory.copy(input, mine.add(rank * share), elements.len()) };
            } else if !self.reduces {
                // SAFETY: the caller of `run` vouches for both buffers.
                unsafe { memory.copy(input, memory.output(&elements), elements.len()) };
            }
        }
    }

    fn take(&mut self, piece: usize, slots: &Slots<'_>) {
        let memory = self.memory;
        let share = memory.share() * memory.call.element;
        let for_me = |rank: usize| slots.of(rank).wrapping_add(memory.rank * share).cast_const();
        if self.reduces {
            let elements = self.piece(piece, memory.rank);
            let start = memory.call.blocks.range(memory.rank).start;
            let own = memory.input(&elements);
            self.parts.clear();
            self.parts.extend((0..memory.ranks).map(|rank| if rank == memory.rank { own } else { for_me(rank) }));
            let output = memory.output(&(elements.start - start..elements.end - start));
            // SAFETY: everybody has staged so many elements for this rank; the caller of `run` vouches for both buffers.
            unsafe { memory.fold(self.parts, output, elements.len()) };
        } else {
            for rank in (0..memory.ranks).filter(|&rank| rank != memory.rank) {
                let elements = self.piece(piece, rank);
                // SAFETY: that rank has staged so many elements for this one; the caller of `run` vouches for the output.
                unsafe { memory.copy_out(for_me(rank), memory.output(&elements), elements.len()) };
            }
        }
    }
}

/// What a rank says of its buffers in the first phase of an all-reduce: where the input and the output are registered, or
/// that they are not.
#[derive(Clone, Copy)]
struct Places {
    input: Location,
    output: Location,
}

const REGISTERED: u64 = 1;

impl Places {
    fn words(places: Option<Places>) -> Words {
        places.map_or([0; WORDS], |Places { input, output }| {
            [REGISTERED, input.allocation.into(), input.offset, output.allocation.into(), output.offset, 0]
        })
    }

    fn from_notes([kind, input, input_at, output, output_at, _]: Words) -> Option<Places> {
        let location = |number: u64, offset| Some(Location { allocation: number.try_into().ok()?, offset });
        (kind == REGISTERED)
            .then(|| Some(Places { input: location(input, input_at)?, output: location(output, output_at)? }))
            .flatten()
    }
}

/// An all-reduce that is worth asking whether its buffers are registered. In the first phase everybody says so; those whose
/// buffers are not stage their first piece in the same phase, if it is known that it is to be staged. If all are, nothing need be staged. If none are, the first phase
/// was that of the first piece. If some are, the phase was for nothing.
fn all_reduce(window: &mut Window, context: &OpContext<'_>, two_shot: &mut TwoShot<'_>) -> Result<()> {
    let memory = two_shot.memory;
    let bytes = memory.call.count * memory.call.element;
    let lent = window.lend_memory(context, memory.call.input, memory.call.output);
    let mine = lent.map(|[input, output]| Places { input, output });

    // If the copy_mode is known already, the first piece need not wait until it is known what the others have.
    let copy_mode = window.autotune.known(Traffic::Reduced, bytes);
    let stages = matches!(copy_mode, Some(CopyMode::Staged | CopyMode::Streamed));
    two_shot.streams = copy_mode == Some(CopyMode::Streamed);
    if mine.is_none() && stages {
        window.hold_stage(context)?;
    }
    let phase = window.phases.next();
    window.begin_turn(context, Places::words(mine))?;
    if mine.is_none() && stages {
        two_shot.stage(0, window.slots(phase).of(memory.rank));
    }
    window.phases.publish();
    window.wait_for(context, Sources::Everybody, phase)?;
    let places = |rank: usize| match rank == memory.rank {
        true => mine,
        false => Places::from_notes(window.phases.line(rank, phase).words()),
    };
    let registered = (0..memory.ranks).filter(|&rank| places(rank).is_some()).count();
    if registered == 0 && stages {
        return window.pipeline(context, Sources::Everybody, 1, two_shot);
    }
    if registered < memory.ranks {
        // All have come to the same, so no peer uses what was lent.
        window.heap.give_back();
        if registered == 0 {
            let copy_mode = autotune::copy_mode(window, context, Traffic::Reduced, bytes)?;
            if copy_mode == CopyMode::Cma && cma::all_reduce(window, context, memory, two_shot.parts)? {
                return Ok(());
            }
            two_shot.streams = copy_mode == CopyMode::Streamed;
        }
        return window.pipeline(context, Sources::Everybody, 0, two_shot);
    }

    let slice = chunk(memory.call.count, memory.ranks, memory.rank);
    let at = slice.start * memory.call.element;
    let mut outputs = Vec::with_capacity(memory.ranks);
    two_shot.parts.clear();
    for rank in 0..memory.ranks {
        let lent = places(rank).and_then(|places| window.lent_by(rank, [places.input, places.output], bytes));
        let aligned = |ptr: *mut u8| ptr.addr().is_multiple_of(memory.call.element);
        let Some([input, output]) = lent.filter(|lent| lent.iter().all(|&ptr| aligned(ptr))) else {
            return Err(context.failed(window.members[rank], Cause::Corrupt("a registered buffer that is not there")));
        };
        two_shot.parts.push(input.wrapping_add(at));
        outputs.push(output.wrapping_add(at));
    }
    let borrowed = window.borrow_memory(context)?;
    // In blocks that stay in the cache while they are stored to every rank.
    let block = (32 << 10) / memory.call.element;
    for start in (0..slice.len()).step_by(block) {
        let len = block.min(slice.len() - start);
        let offset = start * memory.call.element;
        for part in two_shot.parts.iter_mut() {
            *part = part.wrapping_add(if start == 0 { 0 } else { block * memory.call.element });
        }
        let first = outputs[memory.rank].wrapping_add(offset);
        // SAFETY: all parts lie in registered memory that was resolved for the whole buffer. This slice of all ranks' buffers is
        // this rank's to read and write until the next phase.
        unsafe { memory.fold(two_shot.parts, first, len) };
        for rank in (0..memory.ranks).filter(|&rank| rank != memory.rank) {
            // SAFETY: as above.
            unsafe { memory.copy(first, outputs[rank].wrapping_add(offset), len) };
        }
    }
    drop(borrowed);
    // Nobody returns before everybody has written.
    window.meet(context)?;
    window.heap.give_back();
    Ok(())
}
