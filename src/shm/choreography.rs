//! The phases of a collective on large buffers, which are registered or private.
//!
//! In the first phase the ranks that may lend their buffers say whether these are registered. The
//! others stage their first segment in the same phase, if it is known already that buffers are
//! staged. If all are registered, nothing is staged. If none is, the first phase was that of the first
//! segment. If some are, the first phase is wasted.

use std::ops::Range;
use std::time::Instant;

use super::autotune;
use super::pipeline::Collective;
use super::registered::Loan;
use super::tuning::{Alike, Traffic};
use super::wait::Sources;
use super::window::Window;
use crate::call::Call;
use crate::config::CopyMode;
use crate::error::Result;
use crate::failure::OpContext;

/// What the phases depend on. All ranks have the same, but for `sources` and `mine`.
pub(super) struct Choreography<'a> {
    pub(super) call: &'a Call,
    pub(super) bytes: usize,
    /// The ranks for which this rank waits.
    pub(super) sources: Sources,
    /// The ranks whose buffers the others use where they are.
    pub(super) lenders: Range<usize>,
    /// What this rank lends.
    pub(super) mine: Option<Loan>,
    /// Whether the system can do it with private buffers.
    pub(super) has_cma: bool,
    /// Whether all ranks see the words of all in the first phase.
    pub(super) all_see: bool,
}

impl Choreography<'_> {
    /// Runs the collective. `in_place` runs it where all lenders' buffers are registered, and gets the
    /// number of the first phase. `cma` runs it by the system, and returns whether it could.
    pub(super) fn run<D: Collective>(
        self,
        window: &mut Window,
        context: &OpContext<'_>,
        direct: &mut D,
        in_place: impl FnOnce(&mut Window, &mut D, u32) -> Result<()>,
        cma: impl FnOnce(&mut Window, &mut D) -> Result<bool>,
    ) -> Result<()> {
        let Choreography { call, bytes, sources, lenders, mine, has_cma, all_see } = self;
        let traffic = Traffic::of(call.op);
        let known = window.autotune.count(traffic, bytes);
        let stages = known.is_some_and(|mode| mode != CopyMode::Cma || !has_cma);
        direct.set_streams(window.autotune.last(traffic, bytes) == CopyMode::Streamed);
        let phase = window.first_phase(context, sources, direct, mine, stages, all_see)?;
        let is_timed = window.autotune.is_timed(bytes);
        if all_see && is_timed && window.is_doubted(phase) {
            window.autotune.expire(traffic, bytes);
        }
        let registered = lenders.clone().filter(|&rank| window.loan_of(rank, phase, mine).is_some()).count();
        if registered == lenders.len() {
            return in_place(window, direct, phase);
        }
        // All ranks come here, so no peer uses what this rank has lent.
        window.heap.give_back();
        // All ranks have come, so this is not the time of a late one.
        let began = known.filter(|_| is_timed && registered == 0).map(|_| Instant::now());
        if registered == 0 && stages {
            window.pipeline(context, sources, 1, direct)?;
            window.autotune.took(Alike::new(call, bytes), began);
            return Ok(());
        }
        if registered == 0 {
            let copy_mode = autotune::copy_mode(window, context, traffic, bytes)?;
            if copy_mode == CopyMode::Cma && has_cma && cma(window, direct)? {
                window.autotune.took(Alike::new(call, bytes), began);
                return Ok(());
            }
            direct.set_streams(copy_mode == CopyMode::Streamed);
        }
        window.pipeline(context, sources, 0, direct)
    }
}
