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

use super::autotune;
use super::cma;
use super::exchange::Exchange;
use super::flags::{WORDS, Words};
use super::one_shot::{ONE_SHOT, OneShot};
use super::pipeline::{Collective, Memory, Sources, WindowCall};
use super::registered::Location;
use super::rooted::{Collect, Spread};
use super::tuning::{LARGE, Traffic};
use super::two_shot::TwoShot;
use super::window::Window;
use crate::config::CopyMode;
use crate::error::{Cause, Result};
use crate::failure::OpContext;
use crate::schedule::chunk;
use crate::types::{Descriptor, Op};

impl Window {
    /// Carries out one operation among the ranks of this host.
    ///
    /// # Safety
    ///
    /// `call.input` is readable and `call.output` writable until this returns, aligned to the element, and nobody else writes
    /// either or reads the output. They are apart or in place as [`crate::schedule`] says.
    pub(crate) unsafe fn run(&mut self, context: &OpContext<'_>, call: &WindowCall<'_>) -> Result<()> {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
        // A rank that failed may have got as far as this one needs it to, but its memory is its own again.
        self.check_nobody_failed(context)?;
        // SAFETY: passed on.
        let result = unsafe { run(self, context, call) };
        match &result {
            Ok(()) => context.rest(),
            Err(_) => {
                // Peers may read whatever has been published.
                self.staged = self.phases.next().wrapping_sub(1);
                context.give_up();
            }
        }
        result
    }
}

/// See [`Window::run`].
///
/// # Safety
///
/// As there.
unsafe fn run(window: &mut Window, context: &OpContext<'_>, call: &WindowCall<'_>) -> Result<()> {
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
    if copy_by_cma(window, context, memory)? {
        return Ok(());
    }
    // Bytes over all ranks up to which everybody reduces everything.
    let one_shot = match call.op {
        Op::AllReduce | Op::Reduce if ONE_SHOT.contains(&(bytes * ranks)) => autotune::one_shot(window, context)?,
        _ => ONE_SHOT.start,
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

/// Carries out an operation in which everybody gets data of everybody as it is; false, and nothing done, if it is not one, or
/// if it is better staged. (Where one rank has what the others want, it had better help them: staged, it copies, too.)
fn copy_by_cma(window: &mut Window, context: &OpContext<'_>, memory: Memory<'_>) -> Result<bool> {
    let call = memory.call;
    if !matches!(call.op, Op::AllGather | Op::AllGatherV | Op::AllToAll) {
        return Ok(false);
    }
    let bytes = call.blocks.range(memory.ranks - 1).end * call.element;
    if bytes < LARGE || autotune::copy_mode(window, context, Traffic::Copied, bytes)? != CopyMode::Cma {
        return Ok(false);
    }
    cma::copy(window, context, memory)
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
