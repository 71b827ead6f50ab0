//! Collectives that read their peers' registered inputs: each rank takes what it needs from where
//! it lies. Every byte is read once and written once.
//!
//! Only inputs need to be registered. A rank that has failed waits until no peer reads its input,
//! as it does where peers write its output: see [`super::lend`].

use std::ops::Range;

use super::choreography::Choreography;
use super::cma;
use super::part::Part;
use super::pipeline::Collective;
use super::registered::Loan;
use super::tuning::{LARGE, Traffic};
use super::wait::Sources;
use super::window::Window;
use crate::config::CopyMode;
use crate::error::Result;
use crate::failure::OpContext;
use crate::schedule::chunk;
use crate::types::Op;

/// Runs an operation whose inputs may be registered: all ranks' inputs, or the root's alone if only
/// the root has one.
pub(super) fn pull<D: Collective>(window: &mut Window, context: &OpContext<'_>, part: Part<'_>, direct: &mut D) -> Result<()> {
    let sources = part.sources();
    // In one phase instead of two.
    if bytes(part) < LARGE {
        direct.set_streams(window.autotune.known(Traffic::of(part.call.op), bytes(part)) == Some(CopyMode::Streamed));
        return window.pipeline(context, sources, 0, direct);
    }
    let Part { call, rank, ranks, .. } = part;
    let lenders = if has_root(call.op) { call.root..call.root + 1 } else { 0..ranks };
    let lends = lenders.contains(&rank) && !part.overwrites_what_peers_read();
    let mine = if lends {
        window.lend_memory(context, call.send, None)
    } else if call.op == Op::Broadcast {
        window.lend_memory(context, call.recv.as_const(), Some(call.recv))
    } else {
        None
    };
    let choreography = Choreography {
        call,
        bytes: bytes(part),
        // The root looks where its peers want the broadcast.
        sources: if lends && mine.is_some() && call.op == Op::Broadcast { Sources::Each } else { sources },
        lenders: lenders.clone(),
        mine,
        // The system cannot reduce what it reads.
        has_cma: !call.op.reduces(),
        all_see: !has_root(call.op),
    };
    choreography.run(
        window,
        context,
        direct,
        |window, _, phase| read(window, context, part, lenders, phase, mine),
        |window, _| cma::copy(window, context, part),
    )
}

fn has_root(op: Op) -> bool {
    matches!(op, Op::Broadcast | Op::Scatter)
}

/// The bytes of all blocks, or of the buffer if it has no blocks.
fn bytes(part: Part<'_>) -> usize {
    let Part { call, ranks, .. } = part;
    let elements = if call.op == Op::Broadcast { call.count } else { call.blocks().range(ranks - 1).end };
    elements * part.element
}

/// The first elements of a broadcast, which the root writes to the ranks whose outputs are
/// registered while they read the others. So all ranks copy the same number of bytes.
fn given(part: Part<'_>) -> Range<usize> {
    chunk(part.call.count, part.ranks, 0)
}

/// What this rank takes of a peer's input, and where its output has it, in elements. `mine` is what
/// this rank has lent.
fn taken(part: Part<'_>, peer: usize, mine: Option<Loan>) -> (Range<usize>, Range<usize>) {
    if part.call.op == Op::Broadcast && part.rank != part.call.root && mine.is_some() {
        let rest = given(part).end..part.call.count;
        return (rest.clone(), rest);
    }
    part.taken(peer)
}

/// Reads from the inputs of the ranks that lend theirs.
fn read(
    window: &mut Window,
    context: &OpContext<'_>,
    part: Part<'_>,
    lenders: Range<usize>,
    phase: u32,
    mine: Option<Loan>,
) -> Result<()> {
    let Part { call, rank, .. } = part;
    let mut inputs = Vec::with_capacity(lenders.len());
    for peer in lenders.clone() {
        let (from, _) = taken(part, peer, mine);
        let input = if peer == rank {
            Some(part.input(&from))
        } else {
            let loan = window.loan_of(peer, phase, mine);
            let lent = loan.and_then(|loan| window.lent_input(peer, loan, from.end, part.element));
            lent.map(|lent| lent.wrapping_add(from.start * part.element))
        };
        inputs.push(input.ok_or_else(|| window.no_such_buffer(context, peer))?);
    }

    let outputs = outputs(window, context, part, phase)?;

    #[cfg(test)]
    {
        window.loans += 1;
    }
    let borrowed = window.borrow_memory(context)?;
    if call.op.reduces() {
        let (_, to) = taken(part, rank, mine);
        // SAFETY: every input is this rank's, or lies in registered memory that was resolved for
        // these elements and that its rank lends until the next phase. In place, the output is this
        // rank's own block, which no peer reads. The caller of `run` vouches for the output.
        unsafe { part.fold(&inputs, part.output(&to), to.len()) };
    } else {
        // Each rank begins at its own number, so that not all read from the same rank.
        for step in 0..inputs.len() {
            let peer = (rank + step) % inputs.len();
            let (_, to) = taken(part, lenders.start + peer, mine);
            // SAFETY: as above. In place, peers read only this rank's own block of the output,
            // which is not copied.
            unsafe { part.copy_out(inputs[peer], part.output(&to), to.len()) };
        }
    }
    let given = given(part);
    for output in outputs {
        // SAFETY: the address lies in registered memory that was resolved for the whole buffer. Its
        // rank does not touch these elements until the next phase.
        unsafe { part.copy(part.input(&given), output, given.len()) };
    }
    drop(borrowed);
    // No rank returns before all have read.
    window.barrier(context)?;
    window.heap.give_back();
    Ok(())
}

/// Where the root of a broadcast writes to its peers. Empty on other ranks, and in other operations.
fn outputs(window: &Window, context: &OpContext<'_>, part: Part<'_>, phase: u32) -> Result<Vec<*mut u8>> {
    let Part { call, rank, .. } = part;
    let mut outputs = Vec::new();
    if call.op != Op::Broadcast || rank != call.root {
        return Ok(outputs);
    }
    for peer in window.peers() {
        let Some(loan) = window.loan_of(peer, phase, None) else { continue };
        let lent = window.lent_output(peer, loan, call.count, part.element);
        outputs.push(lent.ok_or_else(|| window.no_such_buffer(context, peer))?);
    }
    Ok(outputs)
}
