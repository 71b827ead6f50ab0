//! The all-reduce of large buffers, which are registered or private: each kind moves in its own
//! way.

use super::autotune;
use super::call::Memory;
use super::cma;
use super::flags::{WORDS, Words};
use super::pipeline::Collective;
use super::registered::Location;
use super::tuning::Traffic;
use super::two_shot::TwoShot;
use super::wait::Sources;
use super::window::Window;
use crate::config::CopyMode;
use crate::error::{Cause, Result};
use crate::failure::OpContext;
use crate::schedule::chunk;

/// Bytes that are reduced at once: they stay in the cache while they are stored to every rank.
const BLOCK: usize = 32 << 10;

/// Where a rank's input and output are registered.
#[derive(Clone, Copy)]
struct Buffers {
    input: Location,
    output: Location,
}

const REGISTERED: u64 = 1;

impl Buffers {
    /// The words for the first phase of an all-reduce. All zeros say that the buffers are not
    /// registered.
    fn words(buffers: Option<Buffers>) -> Words {
        buffers.map_or([0; WORDS], |Buffers { input, output }| {
            [REGISTERED, input.allocation.into(), input.offset, output.allocation.into(), output.offset, 0]
        })
    }

    fn from_words([kind, input, input_at, output, output_at, _]: Words) -> Option<Buffers> {
        let location = |number: u64, offset| Some(Location { allocation: number.try_into().ok()?, offset });
        (kind == REGISTERED)
            .then(|| Some(Buffers { input: location(input, input_at)?, output: location(output, output_at)? }))
            .flatten()
    }

    /// What a rank said in the first phase of an all-reduce.
    fn of(window: &Window, rank: usize, phase: u32, mine: Option<Buffers>) -> Option<Buffers> {
        if rank == window.rank { mine } else { Buffers::from_words(window.phases.line(rank, phase).words()) }
    }
}

/// Runs an all-reduce whose buffers may be registered.
///
/// In the first phase each rank says whether its buffers are registered. A rank whose buffers are
/// not stages its first segment in the same phase, if it is known already that buffers are staged.
/// If all ranks' buffers are registered, nothing is staged. If none are, the first phase was that
/// of the first segment. If some are, the first phase is wasted.
pub(super) fn all_reduce(window: &mut Window, context: &OpContext<'_>, two_shot: &mut TwoShot<'_>) -> Result<()> {
    let memory = two_shot.memory;
    let bytes = memory.call.count * memory.call.element;
    let lent = window.lend_memory(context, memory.call.input, memory.call.output);
    let mine = lent.map(|[input, output]| Buffers { input, output });
    let copy_mode = window.autotune.known(Traffic::Reduced, bytes);
    let stages = matches!(copy_mode, Some(CopyMode::Staged | CopyMode::Streamed));
    two_shot.streams = copy_mode == Some(CopyMode::Streamed);

    let phase = first_phase(window, context, two_shot, mine, stages)?;
    let registered = (0..memory.ranks).filter(|&rank| Buffers::of(window, rank, phase, mine).is_some()).count();
    if registered == memory.ranks {
        return reduce_registered(window, context, two_shot, phase, mine);
    }
    if registered == 0 && stages {
        return window.pipeline(context, Sources::All, 1, two_shot);
    }
    // All ranks take this branch, so no peer uses what this rank has lent.
    window.heap.give_back();
    if registered == 0 {
        let copy_mode = autotune::copy_mode(window, context, Traffic::Reduced, bytes)?;
        if copy_mode == CopyMode::Cma && cma::all_reduce(window, context, memory, two_shot.parts)? {
            return Ok(());
        }
        two_shot.streams = copy_mode == CopyMode::Streamed;
    }
    window.pipeline(context, Sources::All, 0, two_shot)
}

/// Tells the peers whether this rank's buffers are registered, and stages the first segment if they
/// are not and `stages`. Waits for the peers and returns the number of the phase.
fn first_phase(
    window: &mut Window,
    context: &OpContext<'_>,
    two_shot: &mut TwoShot<'_>,
    mine: Option<Buffers>,
    stages: bool,
) -> Result<u32> {
    if mine.is_none() && stages {
        window.hold_stage(context)?;
    }
    let phase = window.phases.next();
    window.begin_phase(context, Buffers::words(mine))?;
    if mine.is_none() && stages {
        two_shot.stage(0, window.slots(phase).of(window.rank));
    }
    window.phases.publish();
    window.wait_for(context, Sources::All, phase)?;
    Ok(phase)
}

/// Reduces this rank's chunk where it lies in all ranks' inputs, and writes the result to all
/// ranks' outputs.
fn reduce_registered(
    window: &mut Window,
    context: &OpContext<'_>,
    two_shot: &mut TwoShot<'_>,
    phase: u32,
    mine: Option<Buffers>,
) -> Result<()> {
    let memory = two_shot.memory;
    let bytes = memory.call.count * memory.call.element;
    let chunk = chunk(memory.call.count, memory.ranks, memory.rank);
    let at = chunk.start * memory.call.element;
    let mut outputs = Vec::with_capacity(memory.ranks);
    two_shot.parts.clear();
    for rank in 0..memory.ranks {
        let lent = Buffers::of(window, rank, phase, mine)
            .and_then(|buffers| window.lent_by(rank, [buffers.input, buffers.output], bytes));
        let aligned = |ptr: *mut u8| ptr.addr().is_multiple_of(memory.call.element);
        let Some([input, output]) = lent.filter(|lent| lent.iter().all(|&ptr| aligned(ptr))) else {
            return Err(context.failed(window.members[rank], Cause::Corrupt("a registered buffer that does not exist")));
        };
        two_shot.parts.push(input.wrapping_add(at));
        outputs.push(output.wrapping_add(at));
    }
    let borrowed = window.borrow_memory(context)?;
    // SAFETY: all addresses lie in registered memory that was resolved for the whole buffer. This
    // chunk of all ranks' buffers is this rank's to read and write until the next phase.
    unsafe { reduce_to_all(memory, two_shot.parts, &outputs, chunk.len()) };
    drop(borrowed);
    // No rank returns before all have written.
    window.barrier(context)?;
    window.heap.give_back();
    Ok(())
}

/// Reduces `count` elements of all inputs to this rank's output, and copies the result to the other
/// outputs, block by block. Moves the inputs to the last block.
///
/// # Safety
///
/// `inputs` and `outputs` have an address for each rank, aligned and valid for `count` elements. No
/// other thread accesses these elements.
unsafe fn reduce_to_all(memory: Memory<'_>, inputs: &mut [*const u8], outputs: &[*mut u8], count: usize) {
    let block = BLOCK / memory.call.element;
    for start in (0..count).step_by(block) {
        let len = block.min(count - start);
        let offset = start * memory.call.element;
        for input in inputs.iter_mut() {
            *input = input.wrapping_add(if start == 0 { 0 } else { block * memory.call.element });
        }
        let first = outputs[memory.rank].wrapping_add(offset);
        // SAFETY: the caller vouches for all addresses. `first` is one of the inputs in place, and
        // otherwise overlaps none.
        unsafe { memory.fold(inputs, first, len) };
        for rank in (0..memory.ranks).filter(|&rank| rank != memory.rank) {
            // SAFETY: the caller vouches for both addresses.
            unsafe { memory.copy(first, outputs[rank].wrapping_add(offset), len) };
        }
    }
}
