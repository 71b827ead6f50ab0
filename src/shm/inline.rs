//! Collectives whose data fit the flag lines, which the ranks read anyway: one phase, and one cache
//! line from each peer.

use std::ops::Range;

use super::flags::{WORDS, Words};
use super::hierarchy::{self, Arrival};
use super::part::Part;
use super::wait::Sources;
use super::window::{Layout, Window};
use crate::error::Result;
use crate::failure::OpContext;
use crate::sync;
use crate::types::Op;

/// Whether what each rank gives its peers fits a flag line. The same on all ranks.
#[inline]
pub(super) fn fits(part: Part<'_>) -> bool {
    most_given(part) <= size_of::<Words>()
}

/// Returns the most bytes that a rank gives. The same on all ranks.
#[inline]
fn most_given(part: Part<'_>) -> usize {
    let Part { call, ranks, .. } = part;
    let elements = match call.op {
        Op::AllReduce | Op::Reduce | Op::Broadcast => call.count,
        Op::AllGather | Op::AllGatherV | Op::Gather => call.blocks().longest(ranks),
        _ => call.blocks().range(ranks - 1).end,
    };
    elements * part.element
}

/// Runs an operation that [`fits`]. A rank that takes nothing, such as the root of a broadcast,
/// does not wait for this phase of its peers: it may be ahead of them by as many operations as it
/// has slots.
pub(super) fn run(window: &mut Window, context: &OpContext<'_>, part: Part<'_>) -> Result<()> {
    let Part { call, rank, .. } = part;
    if call.op == Op::Broadcast {
        return broadcast(window, context, part);
    }
    let given = part.given();
    // SAFETY: the caller of `Window::run` vouches for the input.
    let words = unsafe { load_words(part.input(&given), given.len() * part.element) };
    let phase = window.phases.next();
    window.begin_phase(context, &words)?;
    window.phases.publish();
    let mut sources = part.sources();
    if let (Sources::All, Layout::Groups(groups)) = (sources, &window.layout) {
        let carried = most_given(part).div_ceil(size_of::<u64>());
        if matches!(call.op, Op::AllReduce | Op::AllGather | Op::AllGatherV) && groups.carrying.carries(carried) {
            return run_in_groups(window, context, part, phase, carried);
        }
        // Every rank reads the line of every other, so there is nothing that groups could spare.
        sources = Sources::Each;
    }
    window.wait_for(context, sources, phase)?;

    let Window { inline, phases, .. } = window;
    for input in part.inputs() {
        inline[input] = if input == rank { words } else { phases.line(input, phase).words() };
    }
    take(window, part);
    Ok(())
}

/// Returns what [`fits`] as words, followed by zeros.
///
/// Loads and stores each word whole. A copy of variable length stores pieces, and a wider load of them
/// waits until those stores, and the earlier ones to the flag line, have reached the cache.
///
/// # Safety
///
/// `from` is readable for `bytes` bytes.
#[inline(always)]
unsafe fn load_words(from: *const u8, bytes: usize) -> Words {
    std::array::from_fn(|word| {
        let at = word * size_of::<u64>();
        let left = bytes.saturating_sub(at);
        // SAFETY: the caller vouches for `left` bytes from `at` on.
        unsafe {
            match left {
                0 => 0,
                // One f32 or i32, the commonest rest.
                4 => {
                    let [a, b, c, d] = from.add(at).cast::<[u8; 4]>().read();
                    u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
                }
                1..8 => {
                    let mut piece = [0; size_of::<u64>()];
                    std::ptr::copy_nonoverlapping(from.add(at), piece.as_mut_ptr(), left);
                    u64::from_ne_bytes(piece)
                }
                _ => from.add(at).cast::<u64>().read_unaligned(),
            }
        }
    })
}

/// A broadcast that [`fits`]. As the others, with fewer instructions.
fn broadcast(window: &mut Window, context: &OpContext<'_>, part: Part<'_>) -> Result<()> {
    let Part { call, rank, .. } = part;
    let bytes = call.count * part.element;
    let given = if rank == call.root { bytes } else { 0 };
    // SAFETY: the caller of `Window::run` vouches for the input.
    let mut words = unsafe { load_words(call.send.ptr, given) };
    let phase = window.phases.next();
    window.begin_phase(context, &words)?;
    window.phases.publish();
    if rank != call.root {
        let root_is_ahead = window.phases.has_reached(call.root, phase);
        window.wait_for(context, Sources::One(call.root), phase)?;
        if root_is_ahead {
            // Then it has probably written the next line, too.
            sync::prefetch_to_read(window.phases.line(call.root, phase.wrapping_add(1)));
        }
        words = window.phases.line(call.root, phase).words();
    } else if call.send.ptr == call.recv.ptr.cast_const() {
        return Ok(());
    }
    // SAFETY: the words hold what `fits`, and the caller of `Window::run` vouches for the output.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast(), part.output(&(0..call.count)), bytes) };
    Ok(())
}

/// Runs an operation in which leaders give each other `carried` words of each rank. In an
/// all-reduce only leaders reduce, in the order of ranks as every rank does without groups, and
/// give their members the result.
fn run_in_groups(window: &mut Window, context: &OpContext<'_>, part: Part<'_>, phase: u32, carried: usize) -> Result<()> {
    let reduces = part.call.op.reduces();
    let (_, to) = part.taken(part.rank);
    let bytes = to.len() * part.element;
    window.wait_for_all(context, phase, carried, |window, groups, arrival| {
        let mut result: Words = [0; WORDS];
        if reduces && arrival == Arrival::Released {
            result = hierarchy::result(&window.phases, groups, phase);
            // SAFETY: `fits` bounds `bytes` to the size of `Words`; the caller of `Window::run`
            // vouches for the output.
            unsafe { std::ptr::copy_nonoverlapping(result.as_ptr().cast(), part.output(&to), bytes) };
            return;
        }
        if !reduces && arrival == Arrival::Leads {
            hierarchy::release(&window.phases, groups, phase, window.chain, carried, result);
        }
        hierarchy::collect(&window.phases, groups, phase, window.chain, carried, &mut window.inline);
        take(window, part);
        if reduces && arrival == Arrival::Leads {
            // SAFETY: `take` has just written the output, which the caller of `Window::run` vouches
            // for; `bytes` fit `Words`.
            unsafe { std::ptr::copy_nonoverlapping(part.output(&to).cast_const(), result.as_mut_ptr().cast(), bytes) };
            hierarchy::release(&window.phases, groups, phase, window.chain, carried, result);
        }
    })
}

/// Reduces or copies what came inline to the output.
fn take(window: &mut Window, part: Part<'_>) {
    let Part { call, rank, .. } = part;
    let inputs = part.inputs();
    let Window { inline, parts, .. } = window;
    let given =
        |input: usize, elements: &Range<usize>| inline[input].as_ptr().cast::<u8>().wrapping_add(elements.start * part.element);
    if !call.op.reduces() {
        for input in inputs {
            let (from, to) = part.taken(input);
            // SAFETY: the words of a rank hold what `fits`, and the caller of `Window::run` vouches
            // for the output.
            unsafe { std::ptr::copy_nonoverlapping(given(input, &from), part.output(&to), to.len() * part.element) };
        }
    } else if !inputs.is_empty() {
        let (from, to) = part.taken(rank);
        parts.clear();
        parts.extend(inputs.map(|input| given(input, &from)));
        // SAFETY: as above.
        unsafe { part.fold(parts, part.output(&to), to.len()) };
    }
}
