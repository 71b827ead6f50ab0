//! The all-reduce of large buffers, which are registered or private: each kind moves in its own
//! way.

use super::choreography::Choreography;
use super::cma;
use super::part::Part;
use super::registered::Loan;
use super::two_shot::TwoShot;
use super::wait::Sources;
use super::window::Window;
use crate::error::Result;
use crate::failure::OpContext;
use crate::schedule::chunk;

/// Bytes that are reduced at once: they stay in the cache while they are stored to every rank.
const BLOCK: usize = 32 << 10;

/// Runs an all-reduce whose buffers may be registered.
pub(super) fn all_reduce(window: &mut Window, context: &OpContext<'_>, two_shot: &mut TwoShot<'_>) -> Result<()> {
    let part = two_shot.part;
    let mine = window.lend_memory(context, part.call.send, Some(part.call.recv));
    let choreography = Choreography {
        call: part.call,
        bytes: part.call.count * part.element,
        sources: Sources::All,
        lenders: 0..part.ranks,
        mine,
        has_cma: true,
        all_see: true,
    };
    choreography.run(
        window,
        context,
        two_shot,
        |window, two_shot, phase| reduce_registered(window, context, two_shot, phase, mine),
        |window, two_shot| cma::all_reduce(window, context, part, two_shot.parts),
    )
}

/// Reduces this rank's chunk where it lies in all ranks' inputs, and writes the result to all
/// ranks' outputs.
fn reduce_registered(
    window: &mut Window,
    context: &OpContext<'_>,
    two_shot: &mut TwoShot<'_>,
    phase: u32,
    mine: Option<Loan>,
) -> Result<()> {
    let part = two_shot.part;
    let chunk = chunk(part.call.count, part.ranks, part.rank);
    let at = chunk.start * part.element;
    let mut outputs = Vec::with_capacity(part.ranks);
    two_shot.parts.clear();
    for rank in 0..part.ranks {
        let lent = window.loan_of(rank, phase, mine);
        let input = lent.and_then(|loan| window.lent_input(rank, loan, part.call.count, part.element));
        let output = lent.and_then(|loan| window.lent_output(rank, loan, part.call.count, part.element));
        match (input, output) {
            (Some(input), Some(output)) => {
                two_shot.parts.push(input.wrapping_add(at));
                outputs.push(output.wrapping_add(at));
            }
            _ => return Err(window.no_such_buffer(context, rank)),
        }
    }
    #[cfg(test)]
    {
        window.loans += 1;
    }
    let borrowed = window.borrow_memory(context)?;
    // SAFETY: all addresses lie in registered memory that was resolved for the whole buffer. This
    // chunk of all ranks' buffers is this rank's to read and write until the next phase.
    unsafe { reduce_to_all(part, two_shot.parts, &outputs, chunk.len()) };
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
unsafe fn reduce_to_all(part: Part<'_>, inputs: &mut [*const u8], outputs: &[*mut u8], count: usize) {
    let block = BLOCK / part.element;
    for start in (0..count).step_by(block) {
        let len = block.min(count - start);
        let offset = start * part.element;
        for input in inputs.iter_mut() {
            *input = input.wrapping_add(if start == 0 { 0 } else { block * part.element });
        }
        let first = outputs[part.rank].wrapping_add(offset);
        // SAFETY: the caller vouches for all addresses. `first` is one of the inputs in place, and
        // otherwise overlaps none.
        unsafe { part.fold(inputs, first, len) };
        for rank in (0..part.ranks).filter(|&rank| rank != part.rank) {
            // SAFETY: the caller vouches for both addresses.
            unsafe { part.copy(first, outputs[rank].wrapping_add(offset), len) };
        }
    }
}
