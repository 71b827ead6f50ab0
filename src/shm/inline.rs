//! Collectives whose data fit the flag lines, which the ranks read anyway: one phase, and one cache
//! line from each peer.

use super::call::Memory;
use super::flags::{WORDS, Words};
use super::window::Window;
use crate::error::Result;
use crate::failure::OpContext;
use crate::types::Op;

/// Whether what each rank gives its peers fits a flag line. The same on all ranks.
#[inline]
pub(super) fn fits(memory: Memory<'_>) -> bool {
    let Memory { call, ranks, .. } = memory;
    let elements = match call.op {
        Op::AllReduce | Op::Reduce | Op::Broadcast => call.count,
        Op::AllGather | Op::AllGatherV | Op::Gather => call.blocks.longest(ranks),
        _ => call.blocks.range(ranks - 1).end,
    };
    elements * call.element <= size_of::<Words>()
}

/// Runs an operation that [`fits`]. A rank that takes nothing, such as the root of a broadcast, does
/// not wait for this phase of its peers: it may be ahead of them by as many operations as it has
/// slots.
pub(super) fn run(window: &mut Window, context: &OpContext<'_>, memory: Memory<'_>) -> Result<()> {
    let Memory { call, rank, .. } = memory;
    let given = memory.given();
    let mut words: Words = [0; WORDS];
    // SAFETY: what `fits` has room in the words, and the caller of `Window::run` vouches for the
    // input.
    unsafe {
        std::ptr::copy_nonoverlapping(memory.input(&given), words.as_mut_ptr().cast(), given.len() * call.element);
    }
    let phase = window.phases.next();
    window.begin_phase(context, words)?;
    window.phases.publish();
    window.wait_for(context, memory.sources(), phase)?;

    let inputs = memory.inputs();
    let Window { inline, phases, parts, .. } = window;
    for input in inputs.clone() {
        inline[input] = if input == rank { words } else { phases.line(input, phase).words() };
    }
    parts.clear();
    // After the last write: a write through the vector ends the pointers taken before it.
    parts.extend(inputs.clone().map(|input| {
        let (elements, _) = memory.taken(input);
        inline[input].as_ptr().cast::<u8>().wrapping_add(elements.start * call.element)
    }));
    if call.op.reduces() {
        if !inputs.is_empty() {
            let (_, to) = memory.taken(rank);
            // SAFETY: each part is in an array of words, which holds what `fits`; the caller of
            // `Window::run` vouches for the output.
            unsafe { memory.fold(parts, memory.output(&to), to.len()) };
        }
        return Ok(());
    }
    for (input, &from) in inputs.zip(parts.iter()) {
        let (_, to) = memory.taken(input);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, memory.output(&to), to.len() * call.element) };
    }
    Ok(())
}
