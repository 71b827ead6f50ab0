//! The dissemination barrier: in round k, a rank signals the rank 2^k ahead and waits for the one
//! 2^k behind.
//!
//! Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
//! Program. 17 (1988). Cost: ceil(log2 N) a.

use super::problem::Problem;
use super::step::{BufferRef, Step};

pub(super) fn dissemination(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let nothing = BufferRef::Scratch.span(0..0);
    std::iter::successors(Some(1), |distance| Some(distance * 2)).take_while(move |&distance| distance < p.world).flat_map(
        move |distance| {
            [Step::Send { to: p.ahead(distance), src: nothing }, Step::Recv { from: p.behind(distance), dst: nothing }]
        },
    )
}
