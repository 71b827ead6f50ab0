//! The collectives: what each rank copies and reduces, and between which phases of its peers.
//!
//! Let N be the ranks of the host and S the bytes of the buffer (or of all blocks). A rank loads
//! and stores, in bytes:
//!
//! | form | bytes | phases |
//! |---|---|---|
//! | [`inline`](mod@inline): up to 48 bytes of each rank, in the flag line | only the line | 1 |
//! | [`OneShot`]: stage all, reduce all ranks' input | (N + 3) S | 1 |
//! | [`TwoShot`]: stage the peers' chunks, reduce its own, read theirs | (5 - 1/N) S | 2 |
//! | [`cma`], all-reduce: read the inputs for its chunk, then the other chunks | (5 - 3/N) S | 4 |
//! | [`cma`], without reductions: read the peers' inputs | 2 S | 3 |
//! | [`all_reduce`], registered: reduce its chunk where it lies, write it to all | (3 - 1/N) S | 2 |
//! | [`pull`], registered: read the peers' inputs where they lie | 2 S | 2 |
//! | [`Spread`], [`Collect`], [`Exchange`]: stage, read | at most 4 S | 1 |
//!
//! In place is no special case: a segment is staged before it is overwritten.

use super::all_reduce::all_reduce;
use super::exchange::Exchange;
use super::inline;
use super::one_shot::{OneShot, one_shot};
use super::part::Part;
use super::pull::pull;
use super::rooted::{Collect, Spread};
use super::two_shot::TwoShot;
use super::wait::Sources;
use super::window::Window;
use crate::call::Call;
use crate::error::Result;
use crate::failure::OpContext;
use crate::types::{Descriptor, Op};

impl Window {
    /// Runs one operation among the ranks of this host.
    ///
    /// # Safety
    ///
    /// Until this returns, `call.send` is readable and `call.recv` writable, both aligned to the
    /// element. No other thread writes either or reads the output. They do not overlap, or they are
    /// in place as [`crate::schedule`] says.
    pub(crate) unsafe fn run(&mut self, context: &OpContext<'_>, call: &Call) -> Result<()> {
        self.chain = Descriptor::chained(self.chain, context.fingerprint);
        // A rank that failed may have published all that this one needs, but its memory belongs to
        // its caller again.
        self.check_no_peer_failed(context)?;
        // SAFETY: the caller keeps the same contract.
        match unsafe { run(self, context, call) } {
            Ok(()) => {
                self.phases.finish();
                context.rest();
                Ok(())
            }
            Err(error) => {
                // Peers may read whatever has been published.
                self.staged = self.phases.last();
                context.give_up();
                Err(error)
            }
        }
    }
}

/// Runs one operation, in the form that suits its size.
///
/// # Safety
///
/// As for [`Window::run`].
unsafe fn run(window: &mut Window, context: &OpContext<'_>, call: &Call) -> Result<()> {
    let (rank, ranks) = (window.rank, window.members.len());
    let part = Part::new(call, rank, ranks);
    let bytes = call.count * part.element;
    // The short operations come first: for them, every test counts.
    if call.op == Op::Barrier {
        return window.barrier(context);
    }
    if inline::fits(part) {
        return inline::run(window, context, part);
    }
    let mut parts = std::mem::take(&mut window.parts);
    let result = if bytes * ranks <= one_shot(window.is_crowded) && matches!(call.op, Op::AllReduce | Op::Reduce) {
        let takes = call.op == Op::AllReduce || rank == call.root;
        window.pipeline(context, part.sources(), 0, &mut OneShot { part, takes, parts: &mut parts })
    } else {
        run_in_segments(window, context, part, &mut parts)
    };
    window.parts = parts;
    result
}

/// Runs an operation of any size, segment by segment.
fn run_in_segments(window: &mut Window, context: &OpContext<'_>, part: Part<'_>, parts: &mut Vec<*const u8>) -> Result<()> {
    let call = part.call;
    match call.op {
        Op::AllReduce => all_reduce(window, context, &mut TwoShot { part, root: None, parts }),
        Op::Reduce => {
            let mut two_shot = TwoShot { part, root: Some(call.root), parts };
            window.pipeline(context, Sources::All, 0, &mut two_shot)
        }
        Op::Broadcast => pull(window, context, part, &mut Spread { part, blocks: false }),
        Op::Scatter => pull(window, context, part, &mut Spread { part, blocks: true }),
        Op::Gather => window.pipeline(context, part.sources(), 0, &mut Collect { part, takes: part.rank == call.root }),
        Op::AllGather | Op::AllGatherV => pull(window, context, part, &mut Collect { part, takes: true }),
        Op::ReduceScatter | Op::ReduceScatterV => pull(window, context, part, &mut Exchange { part, reduces: true, parts }),
        Op::AllToAll => pull(window, context, part, &mut Exchange { part, reduces: false, parts }),
        op => unreachable!("{op} does not run in a window"),
    }
}
