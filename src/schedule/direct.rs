//! Direct exchange: each pair of ranks exchanges its blocks, and no third rank forwards anything.
//!
//! N-1 messages per rank, several at once, with the bytes of the ring. The owner of a chunk has all
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
use crate::types::Rank;

/// For each segment: a direct reduce-scatter, then a direct all-gather.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let n = p.world;
    let longest = chunk(p.count, n, 0).len();
    let owned = move |rank: usize, number: usize| segment(chunk(p.count, n, rank), p.segment, number);
    (0..longest.div_ceil(p.segment)).flat_map(move |number| {
        let mine = owned(p.rank, number);
        let scatter = exchange_parts(p, move |rank| BufferRef::Input.span(owned(rank, number)));
        let fold = fold(BufferRef::Input.span(mine.clone()), BufferRef::Output.span(mine.clone()));
        let (src, result) = (BufferRef::Output.span(mine), move |rank| BufferRef::Output.span(owned(rank, number)));
        let gather = exchange(p, src.len, move |to| Step::Send { to, src }, move |from| Step::Recv { from, dst: result(from) });
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
        scatter.chain([fold(BufferRef::Input.span(mine), dst)])
    })
}

/// Returns the `number`-th segment of a range. All ranges have the same number of segments; those
/// beyond a range's end are empty.
fn segment(range: Range<usize>, segment: usize, number: usize) -> Range<usize> {
    let at = (range.start + number * segment).min(range.end);
    at..(at + segment).min(range.end)
}

/// Folds this rank's part and those of the others, which lie one after the other in scratch.
fn fold(own: Span, dst: Span) -> Step {
    Step::Fold { own, parts: 0, stride: own.len, dst }
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
        let fold = is_root.then(|| fold(input, BufferRef::Output.span(segment)));
        send.into_iter().chain(receive).chain(fold)
    })
}

/// Sends every other rank the part that it owns, and receives the others' parts of what this rank
/// owns into scratch, in the order of ranks.
fn exchange_parts(p: Problem<'_>, owned: impl Fn(usize) -> Span + Copy) -> impl Iterator<Item = Step> {
    let len = owned(p.rank).len;
    let receive = move |from| {
        let at = (from - usize::from(from > p.rank)) * len;
        Step::Recv { from, dst: BufferRef::Scratch.span(at..at + len) }
    };
    exchange(p, len, move |to| Step::Send { to, src: owned(to) }, receive)
}

/// Sends to and receives from every other rank, about `len` elements each.
fn exchange(
    p: Problem<'_>,
    len: usize,
    send: impl Fn(Rank) -> Step,
    receive: impl Fn(Rank) -> Step,
) -> impl Iterator<Item = Step> {
    in_flight(p, len, p.world - 1, move |i| send(p.ahead(i + 1)), move |i| receive(p.behind(i + 1)))
}

/// Short messages that a rank sends before it waits for the first that it receives. They take one
/// latency together.
pub(super) const IN_FLIGHT: usize = 16;

/// Sends and receives `count` messages of about `len` elements each. A rank sends [`IN_FLIGHT`] short
/// messages before it waits. Of long ones it sends two: the link is busy while an answer is on its way,
/// and each receiver has few senders at a time.
fn in_flight(
    p: Problem<'_>,
    len: usize,
    count: usize,
    send: impl Fn(usize) -> Step,
    receive: impl Fn(usize) -> Step,
) -> impl Iterator<Item = Step> {
    let before = if len <= p.segment / IN_FLIGHT { IN_FLIGHT } else { 2 };
    let before = before.min(count);
    (0..(count + before).saturating_sub(1)).flat_map(move |i| {
        let sent = (i < count).then(|| send(i));
        let received = (i + 1).checked_sub(before).map(&receive);
        sent.into_iter().chain(received)
    })
}

/// Every rank sends its block to every other.
pub(super) fn all_gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let block = move |rank: usize| BufferRef::Output.span(p.recvs.range(rank));
    let own = BufferRef::Input.span(0..block(p.rank).len);
    let longest = p.recvs.longest(p.world);
    let exchange = exchange(p, longest, move |to| Step::Send { to, src: own }, move |from| Step::Recv { from, dst: block(from) });
    std::iter::once(Step::Copy { src: own, dst: block(p.rank) }).chain(exchange)
}

/// In round k, ranks i and j with i + j = k (mod N) exchange their blocks. Partners are the same
/// both ways, which lets an exchange in place overwrite each block with what its receiver sends
/// back.
pub(super) fn all_to_all(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let src = move |rank: usize| BufferRef::Input.span(p.sends.range(rank));
    let dst = move |rank: usize| BufferRef::Output.span(p.recvs.range(rank));
    // In the round of twice its number, a rank is its own partner.
    let alone = 2 * p.rank % p.world;
    let partner = move |i: usize| (i + usize::from(i >= alone) + p.world - p.rank) % p.world;
    let send = move |i| Step::Send { to: partner(i), src: src(partner(i)) };
    let receive = move |i| Step::Recv { from: partner(i), dst: dst(partner(i)) };
    let exchange = in_flight(p, p.sends.longest(p.world), p.world - 1, send, receive);
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
