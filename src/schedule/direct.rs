//! Direct exchange: each pair of ranks exchanges its blocks, and no third rank forwards anything.
//!
//! One round of N-1 messages per rank, with the bytes of the ring. The owner of a chunk has all
//! parts at once and sums them in the order of ranks, 16-bit floats in `f32`, so the result does
//! not depend on the placement of ranks. Chan, Heimlich, Purkayastha and van de Geijn, "Collective
//! communication: theory, practice, and experience", Concurr. Comput. 19 (2007), section 4. With o
//! the processor time of one message, and P the segments of a chunk, of which each waits for the
//! one before:
//!
//! - `all_reduce`: P (2 a + 2(N-1) o) + 2(N-1)/N S b + (N-1)/N S g
//! - `reduce_scatter`: P (a + (N-1) o) + (N-1)/N S (b + g)
//! - `reduce`: a + (N-1) (o + S b + S g), for small worlds, and if the order of summation matters
//! - the others: a + (N-1) o + the bytes that the busiest rank sends or receives

use std::ops::Range;

use super::problem::{Problem, chunk, segments};
use super::step::{BufferRef, Span, Step};

/// For each segment: a direct reduce-scatter, then a direct all-gather.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let n = p.world;
    let longest = chunk(p.count, n, 0).len();
    let owned = move |rank: usize, number: usize| segment(chunk(p.count, n, rank), p.segment, number);
    (0..longest.div_ceil(p.segment)).flat_map(move |number| {
        let mine = owned(p.rank, number);
        let scatter = exchange_parts(p, move |rank| BufferRef::Input.span(owned(rank, number)));
        let fold = Step::Fold { own: BufferRef::Input.span(mine.clone()), parts: 0, dst: BufferRef::Output.span(mine.clone()) };
        let gather = (1..n).flat_map(move |k| {
            let (to, from) = (p.ahead(k), p.behind(k));
            [
                Step::Send { to, src: BufferRef::Output.span(mine.clone()) },
                Step::Recv { from, dst: BufferRef::Output.span(owned(from, number)) },
            ]
        });
        scatter.chain([fold]).chain(gather)
    })
}

/// Every rank sends each owner its part, and the owner folds the parts.
pub(super) fn reduce_scatter(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let longest = p.sends.longest(p.world);
    let owned = move |rank: usize, number: usize| segment(p.sends.range(rank), p.segment, number);
    (0..longest.div_ceil(p.segment)).flat_map(move |number| {
        let mine = owned(p.rank, number);
        let start = p.sends.range(p.rank).start;
        let dst = BufferRef::Output.span(mine.start - start..mine.end - start);
        let scatter = exchange_parts(p, move |rank| BufferRef::Input.span(owned(rank, number)));
        scatter.chain([Step::Fold { own: BufferRef::Input.span(mine), parts: 0, dst }])
    })
}

/// Returns the `number`-th segment of a range. All ranges have the same number of segments; those
/// beyond a range's end are empty.
fn segment(range: Range<usize>, segment: usize, number: usize) -> Range<usize> {
    let at = (range.start + number * segment).min(range.end);
    at..(at + segment).min(range.end)
}

/// Every rank sends its whole input to the root, in segments, and the root folds them.
pub(super) fn reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    segments(0..p.count, p.segment).flat_map(move |segment| {
        let input = BufferRef::Input.span(segment.clone());
        let is_root = p.rank == p.root;
        let send = (!is_root).then_some(Step::Send { to: p.root, src: input });
        let others = (1..p.world).map(move |k| p.absolute(k)).take_while(move |_| is_root);
        let receive = others.map(move |from| {
            let at = (from - usize::from(from > p.rank)) * input.len;
            Step::Recv { from, dst: BufferRef::Scratch.span(at..at + input.len) }
        });
        let fold = is_root.then_some(Step::Fold { own: input, parts: 0, dst: BufferRef::Output.span(segment) });
        send.into_iter().chain(receive).chain(fold)
    })
}

/// Sends every other rank the part that it owns, and receives the others' parts of what this rank
/// owns into scratch, in the order of ranks.
fn exchange_parts(p: Problem<'_>, owned: impl Fn(usize) -> Span + Copy) -> impl Iterator<Item = Step> {
    let len = owned(p.rank).len;
    (1..p.world).flat_map(move |k| {
        let (to, from) = (p.ahead(k), p.behind(k));
        let at = (from - usize::from(from > p.rank)) * len;
        [Step::Send { to, src: owned(to) }, Step::Recv { from, dst: BufferRef::Scratch.span(at..at + len) }]
    })
}

/// Every rank sends its block to every other.
pub(super) fn all_gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let block = move |rank: usize| BufferRef::Output.span(p.recvs.range(rank));
    let own = BufferRef::Input.span(0..block(p.rank).len);
    let exchange = (1..p.world).flat_map(move |k| {
        let (to, from) = (p.ahead(k), p.behind(k));
        [Step::Send { to, src: own }, Step::Recv { from, dst: block(from) }]
    });
    std::iter::once(Step::Copy { src: own, dst: block(p.rank) }).chain(exchange)
}

/// In round k, ranks i and j with i + j = k (mod N) exchange their blocks. Partners are the same
/// both ways, which lets an exchange in place overwrite each block with what its receiver sends
/// back.
pub(super) fn all_to_all(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let src = move |rank: usize| BufferRef::Input.span(p.sends.range(rank));
    let dst = move |rank: usize| BufferRef::Output.span(p.recvs.range(rank));
    let exchange = (0..p.world)
        .map(move |k| (k + p.world - p.rank) % p.world)
        .filter(move |&peer| peer != p.rank)
        .flat_map(move |peer| [Step::Send { to: peer, src: src(peer) }, Step::Recv { from: peer, dst: dst(peer) }]);
    std::iter::once(Step::Copy { src: src(p.rank), dst: dst(p.rank) }).chain(exchange)
}

/// Every rank sends its block to the root.
pub(super) fn gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let own = BufferRef::Input.span(0..p.recvs.range(p.rank).len());
    let block = move |rank: usize| BufferRef::Output.span(p.recvs.range(rank));
    let is_root = p.rank == p.root;
    let first = if is_root { Step::Copy { src: own, dst: block(p.rank) } } else { Step::Send { to: p.root, src: own } };
    let rest = (1..p.world).map(move |k| p.absolute(k)).take_while(move |_| is_root);
    std::iter::once(first).chain(rest.map(move |from| Step::Recv { from, dst: block(from) }))
}

/// The root sends every rank its block.
pub(super) fn scatter(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let own = BufferRef::Output.span(0..p.sends.range(p.rank).len());
    let block = move |rank: usize| BufferRef::Input.span(p.sends.range(rank));
    let is_root = p.rank == p.root;
    let last = if is_root { Step::Copy { src: block(p.rank), dst: own } } else { Step::Recv { from: p.root, dst: own } };
    let rest = (1..p.world).map(move |k| p.absolute(k)).take_while(move |_| is_root);
    rest.map(move |to| Step::Send { to, src: block(to) }).chain([last])
}

/// One message to `p.root`.
pub(super) fn send(p: Problem<'_>) -> impl Iterator<Item = Step> {
    std::iter::once(Step::Send { to: p.root, src: BufferRef::Input.span(0..p.count) })
}

/// One message from `p.root`.
pub(super) fn recv(p: Problem<'_>) -> impl Iterator<Item = Step> {
    std::iter::once(Step::Recv { from: p.root, dst: BufferRef::Output.span(0..p.count) })
}
