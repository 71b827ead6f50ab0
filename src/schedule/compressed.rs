//! Reductions whose messages have elements of fewer bits than the buffers.
//!
//! As in a direct exchange, each pair of ranks exchanges its parts, and the owner of a chunk folds
//! all parts at once. So every contribution is rounded once, the sum is accumulated in f32 in the
//! order of ranks, and the result is rounded once. A ring would round at every hop. The owner takes
//! its own result from the rounded elements, so all ranks have the same bits.
//!
//! Buffers are converted segment by segment, into one of two sets of scratch memory. While the
//! results of a segment are on their way, so are the parts of the next.
//!
//! With o the processor time of one message, and P the segments of a chunk:
//!
//! - `all_reduce`: (P + 1) (a + 2(N-1) o) + (N-1)/N S b + (N-1)/N S g
//! - `reduce_scatter`: P (a + (N-1) o) + (N-1)/N S (b/2 + g)
//! - `reduce`: as `all_reduce`, with all results to the root. A tree that rounds once cannot exist.

use std::ops::Range;

use super::problem::{Problem, chunk};
use super::step::{BufferRef, Span, Step};
use crate::types::{Op, Rank};

/// Elements of scratch of one rank, at most: 16 MiB, which the engine keeps between operations.
const SCRATCH: usize = 8 << 20;

/// Elements of a segment.
pub(crate) fn segment_of_compressed(world: usize) -> usize {
    (SCRATCH / (2 * (2 * world - 1))).clamp(4 << 10, 512 << 10)
}

/// Returns the steps of `problem.rank`, for an operation that reduces. In scratch, each run of elements
/// begins at a multiple of `align`.
pub(crate) fn compressed(problem: Problem<'_>, align: usize) -> impl Iterator<Item = Step> + '_ {
    let exchange = Exchange::new(problem, align);
    let segments = exchange.longest.div_ceil(problem.segment.max(1));
    let first = (0..segments.min(1)).flat_map(move |number| exchange.scatter(number).chain(exchange.collect(number)));
    // A rank receives from each peer in the order in which the peer sends.
    let rest = (0..segments).flat_map(move |number| {
        let next = (number + 1..segments).take(1);
        let scatter = next.clone().flat_map(move |next| exchange.scatter(next));
        let collect = next.flat_map(move |next| exchange.collect(next));
        scatter.chain(exchange.fold(number)).chain(collect).chain(exchange.finish(number))
    });
    // Both sides omit empty messages.
    first.chain(rest).filter(|step| step.len() > 0)
}

/// The exchange of one rank, and where it keeps a segment in scratch: what it sends to each peer,
/// then what comes from each peer, then its own part, which becomes the result.
#[derive(Clone, Copy)]
struct Exchange<'a> {
    p: Problem<'a>,
    align: usize,
    /// Elements of the longest chunk, and of scratch for a segment.
    longest: usize,
    room: usize,
}

impl<'a> Exchange<'a> {
    fn new(p: Problem<'a>, align: usize) -> Exchange<'a> {
        let longest = match p.op {
            Op::ReduceScatter | Op::ReduceScatterV => p.sends.longest(p.world),
            _ => chunk(p.count, p.world, 0).len(),
        };
        Exchange { p, align, longest, room: p.segment.min(longest).next_multiple_of(align) }
    }

    /// The elements of the input that a rank owns.
    fn chunk(&self, rank: Rank) -> Range<usize> {
        match self.p.op {
            Op::ReduceScatter | Op::ReduceScatterV => self.p.sends.range(rank),
            _ => chunk(self.p.count, self.p.world, rank),
        }
    }

    /// The `number`-th segment of it. All ranks have the same number of segments; those beyond the
    /// end of a chunk are empty.
    fn owned(&self, rank: Rank, number: usize) -> Range<usize> {
        let chunk = self.chunk(rank);
        let at = (chunk.start + number * self.p.segment).min(chunk.end);
        at..(at + self.p.segment).min(chunk.end)
    }

    /// Where the set of scratch memory of a segment starts.
    fn set(&self, number: usize) -> usize {
        number % 2 * (2 * self.p.world - 1) * self.room
    }

    /// The index of a peer among the peers.
    fn index(&self, peer: Rank) -> usize {
        peer - usize::from(peer > self.p.rank)
    }

    fn outgoing(&self, to: Rank, number: usize) -> Span {
        let at = self.set(number) + self.index(to) * self.room;
        BufferRef::Scratch.span(at..at + self.owned(to, number).len())
    }

    fn incoming(&self, number: usize) -> usize {
        self.set(number) + (self.p.world - 1) * self.room
    }

    fn result(&self, number: usize) -> Span {
        let at = self.set(number) + 2 * (self.p.world - 1) * self.room;
        BufferRef::Scratch.span(at..at + self.owned(self.p.rank, number).len())
    }

    fn behind(self) -> impl Iterator<Item = Rank> + use<'a> {
        (1..self.p.world).map(move |k| self.p.behind(k))
    }

    fn ahead(self) -> impl Iterator<Item = Rank> + use<'a> {
        (1..self.p.world).map(move |k| self.p.ahead(k))
    }

    /// Sends each owner this rank's part.
    fn scatter(self, number: usize) -> impl Iterator<Item = Step> + use<'a> {
        self.ahead().flat_map(move |to| {
            let (input, src) = (BufferRef::Input.span(self.owned(to, number)), self.outgoing(to, number));
            [Step::Convert { src: input, dst: src }, Step::Send { to, src }]
        })
    }

    /// Receives the parts of what this rank owns, one after the other, as a fold needs them.
    fn collect(self, number: usize) -> impl Iterator<Item = Step> + use<'a> {
        let len = self.owned(self.p.rank, number).len();
        self.behind().map(move |from| {
            let at = self.incoming(number) + self.index(from) * len.next_multiple_of(self.align);
            Step::Recv { from, dst: BufferRef::Scratch.span(at..at + len) }
        })
    }

    /// Folds the parts, and sends the result to the ranks that need it.
    fn fold(self, number: usize) -> impl Iterator<Item = Step> + use<'a> {
        let own = self.result(number);
        let input = BufferRef::Input.span(self.owned(self.p.rank, number));
        let (parts, stride) = (self.incoming(number), own.len.next_multiple_of(self.align));
        let fold = [Step::Convert { src: input, dst: own }, Step::Fold { own, parts, stride, dst: own }];
        let needs = move |to: &Rank| self.has_all(*to);
        fold.into_iter().chain(self.ahead().filter(needs).map(move |to| Step::Send { to, src: own }))
    }

    /// Whether a rank gets the results of all owners.
    fn has_all(&self, rank: Rank) -> bool {
        match self.p.op {
            Op::ReduceScatter | Op::ReduceScatterV => false,
            Op::Reduce => rank == self.p.root,
            _ => true,
        }
    }

    /// Converts the results, after those of other owners have been received.
    fn finish(self, number: usize) -> impl Iterator<Item = Step> + use<'a> {
        let has_all = self.has_all(self.p.rank);
        let others = self.behind().filter(move |_| has_all).flat_map(move |from| {
            let owned = self.owned(from, number);
            let at = self.incoming(number) + self.index(from) * self.room;
            let dst = BufferRef::Scratch.span(at..at + owned.len());
            [Step::Recv { from, dst }, Step::Convert { src: dst, dst: BufferRef::Output.span(owned) }]
        });
        let mine = self.owned(self.p.rank, number);
        let is_block = matches!(self.p.op, Op::ReduceScatter | Op::ReduceScatterV);
        let start = if is_block { self.chunk(self.p.rank).start } else { 0 };
        let output = BufferRef::Output.span(mine.start - start..mine.end - start);
        let own = Step::Convert { src: self.result(number), dst: output };
        others.chain((has_all || is_block).then_some(own))
    }
}
