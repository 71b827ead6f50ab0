//! Recursive halving and doubling: ranks exchange halves, then quarters, until every rank owns the
//! sum of one part. Then they gather the parts in the reverse order.
//!
//! Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. With L = floor(log2
//! N):
//!
//! - `all_reduce`: 2 L a + 2(N-1)/N S b + (N-1)/N S g, and 2 (a + S b) + S g more if N is not a
//!   power of two. Between more than two hosts, four more a for each round in which an idle
//!   connection has to grow its window.
//! - `reduce_scatter`, powers of two only, S being the bytes of all blocks: L a + (N-1)/N (S b + S
//!   g)

use std::ops::Range;

use super::doubling::{Core, distances};
use super::problem::{Problem, chunk};
use super::step::{BufferRef, Step};

/// Neighbours exchange the largest halves, since they are probably on the same host.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let core = Core::of(&p);
    // The elements of a range of the core's parts.
    let elements =
        move |parts: &Range<usize>| chunk(p.count, core.size, parts.start).start..chunk(p.count, core.size, parts.end - 1).end;
    core.all_reduce(p.count, move |number, start| {
        let kept = std::iter::successors(Some((1, 0..core.size)), move |(distance, parts)| {
            Some((2 * distance, half(parts, number & distance != 0)))
        });
        let rounds: Vec<_> = kept.take_while(|(distance, _)| *distance < core.size).collect();
        let halve = rounds.clone().into_iter().flat_map(move |(distance, parts)| {
            let upper = number & distance != 0;
            let (keep, give) = (elements(&half(&parts, upper)), elements(&half(&parts, !upper)));
            let from = if distance == 1 { start } else { BufferRef::Output };
            let (peer, finish) = (core.rank_of(number ^ distance), 2 * distance == core.size);
            [
                Step::Send { to: peer, src: from.span(give) },
                Step::RecvReduce { from: peer, own: from.span(keep.clone()), dst: BufferRef::Output.span(keep), finish },
            ]
        });
        let double = rounds.into_iter().rev().flat_map(move |(distance, parts)| {
            let upper = number & distance != 0;
            let (mine, theirs) = (elements(&half(&parts, upper)), elements(&half(&parts, !upper)));
            let peer = core.rank_of(number ^ distance);
            [
                Step::Send { to: peer, src: BufferRef::Output.span(mine) },
                Step::Recv { from: peer, dst: BufferRef::Output.span(theirs) },
            ]
        });
        halve.chain(double)
    })
}

fn half(parts: &Range<usize>, upper: bool) -> Range<usize> {
    let middle = (parts.start + parts.end) / 2;
    if upper { middle..parts.end } else { parts.start..middle }
}

/// The ranks farthest apart exchange the largest halves, so that the part that remains is the
/// rank's own block. Partial sums lie in scratch, each at its distance from the start of the first
/// half that was kept.
pub(super) fn reduce_scatter(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let elements = move |blocks: &Range<usize>| p.sends.range(blocks.start).start..p.sends.range(blocks.end - 1).end;
    let base = elements(&half(&(0..p.world), p.rank & (p.world / 2) != 0)).start;
    distances(p.world).rev().flat_map(move |distance| {
        let upper = p.rank & distance != 0;
        let first = p.rank & !(2 * distance - 1);
        let blocks = first..first + 2 * distance;
        let (keep, give) = (elements(&half(&blocks, upper)), elements(&half(&blocks, !upper)));
        let scratch = |range: Range<usize>| BufferRef::Scratch.span(range.start - base..range.end - base);
        let from = |range: Range<usize>| if 2 * distance == p.world { BufferRef::Input.span(range) } else { scratch(range) };
        let dst = if distance == 1 { BufferRef::Output.span(0..keep.len()) } else { scratch(keep.clone()) };
        let peer = p.rank ^ distance;
        [Step::Send { to: peer, src: from(give) }, Step::RecvReduce { from: peer, own: from(keep), dst, finish: distance == 1 }]
    })
}
