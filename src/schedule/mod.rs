//! What one rank does, in order, to take part in a collective over messages. Pure: no clock, no socket, no memory.
//!
//! A generator is a function from a [`Problem`] to an iterator of [`Step`]s; there is one file per family. The engine
//! executes the steps over links, and `simulate` executes those of all ranks with no network at all.
//!
//! # What a step means
//!
//! - Steps take effect in order. A `Send` only queues its bytes, and later steps go on while they drain; a step that
//!   would write memory which an earlier send has still to read waits for that send, element by element. So two ranks
//!   may send each other the very range into which they receive, and no order of sends can deadlock.
//! - A step with a `to` forwards: what has arrived (and been reduced) leaves while the rest of the step is on its way.
//! - Messages between two ranks arrive in the order in which they were sent, and both sides know their lengths.
//! - `finish` marks the step after which a range holds the whole reduction: the engine divides there for an average.
//! - The operands of a reduction are taken in the order of their ranks, so that both sides of an exchange compute the
//!   same bits.

mod barrier;
mod direct;
mod double_tree;
mod doubling;
mod halving;
mod ring;
pub(crate) mod select;
#[cfg(test)]
mod simulate;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

use crate::types::{Op, Rank, numbered};

numbered! {
    /// How a collective is carried out.
    #[non_exhaustive]
    pub enum Algorithm {
        /// Chunks go round a ring of all ranks: fewest bytes, latency grows with the number of ranks.
        Ring = 0, "ring";
        /// A binomial tree: latency grows with the logarithm, every hop carries everything.
        Binomial = 1, "binomial";
        /// Two binary trees, each for half of the data, in pieces: logarithmic latency at nearly full bandwidth.
        DoubleTree = 2, "double-tree";
        /// Exchange everything with partners at distance 1, 2, 4: lowest latency.
        RecursiveDoubling = 3, "recursive-doubling";
        /// Exchange halves, quarters and so on, then the way back (Rabenseifner): the ring's bytes in logarithmic rounds.
        HalvingDoubling = 4, "halving-doubling";
        /// Every pair of ranks exchanges what concerns it: one round; the owner of a slice sums in the order of ranks.
        Direct = 5, "direct";
        /// Signals at distance 1, 2, 4: barriers only.
        Dissemination = 6, "dissemination";
        /// Ranks of one host read each other's memory: no messages at all.
        Window = 7, "window";
        /// Windows inside each host, one of the above between hosts.
        Hierarchical = 8, "hierarchical";
    }
}

/// Which of a call's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRef {
    /// The send buffer. Never written, unless it is the output as well (in place).
    Input,
    /// The receive buffer.
    Output,
    /// Memory of the engine.
    Scratch,
}

/// A range of elements of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) place: BufferRef,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl BufferRef {
    pub(crate) fn span(self, range: Range<usize>) -> Span {
        Span { place: self, at: range.start, len: range.len() }
    }
}

/// One thing that a rank does. The spans of one step have the same length, but for `Fold`'s parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Queue `src` for `to`.
    Send { to: Rank, src: Span },
    /// Wait for a message and put it to `dst`.
    Recv { from: Rank, dst: Span },
    /// `Recv`, forwarding what arrives.
    RecvSend { from: Rank, dst: Span, to: Rank },
    /// Wait for a message, and put its reduction with `own` to `dst`.
    RecvReduce { from: Rank, own: Span, dst: Span, finish: bool },
    /// `RecvReduce`, forwarding the result.
    RecvReduceSend { from: Rank, own: Span, dst: Span, to: Rank, finish: bool },
    /// Copy, unless both are the same memory.
    Copy { src: Span, dst: Span },
    /// Put to `dst` the reduction, in the order of ranks, of `own` and of the other ranks' parts, which lie one after the
    /// other in scratch from `parts` on. Always finishes.
    Fold { own: Span, parts: usize, dst: Span },
}

impl Step {
    /// Elements that the step moves.
    pub(crate) fn len(&self) -> usize {
        match self {
            Step::Send { src, .. } => src.len,
            Step::Recv { dst, .. }
            | Step::RecvSend { dst, .. }
            | Step::RecvReduce { dst, .. }
            | Step::RecvReduceSend { dst, .. }
            | Step::Copy { dst, .. }
            | Step::Fold { dst, .. } => dst.len,
        }
    }

    /// Elements of scratch that the step needs to be there.
    pub(crate) fn scratch(&self, world: usize) -> usize {
        let end = |span: &Span| if span.place == BufferRef::Scratch { span.at + span.len } else { 0 };
        match self {
            Step::Send { src, .. } => end(src),
            Step::Recv { dst, .. } | Step::RecvSend { dst, .. } => end(dst),
            Step::RecvReduce { own, dst, .. } | Step::RecvReduceSend { own, dst, .. } => end(own).max(end(dst)),
            Step::Copy { src, dst } => end(src).max(end(dst)),
            Step::Fold { own, parts, dst } => end(own).max(end(dst)).max(parts + (world - 1) * own.len),
        }
    }
}

/// Where each rank's block lies in a buffer that holds one for every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Blocks<'a> {
    /// Every block has this many elements.
    Even(usize),
    /// Block `i` reaches from entry `i` to entry `i + 1`.
    Listed(&'a [usize]),
}

impl Blocks<'_> {
    pub(crate) fn range(&self, block: usize) -> Range<usize> {
        match self {
            Blocks::Even(count) => block * count..(block + 1) * count,
            Blocks::Listed(offsets) => offsets[block]..offsets[block + 1],
        }
    }

    pub(crate) fn longest(&self, world: usize) -> usize {
        match self {
            Blocks::Even(count) => *count,
            Blocks::Listed(_) => (0..world).map(|block| self.range(block).len()).max().unwrap_or(0),
        }
    }
}

/// What a generator has to solve, seen from one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) op: Op,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The root; for `Send` and `Recv` the peer.
    pub(crate) root: Rank,
    /// Elements of the whole buffer, where it is not made of blocks.
    pub(crate) count: usize,
    /// The blocks of the input, where it has one for each rank.
    pub(crate) sends: Blocks<'a>,
    /// The blocks of the output, where it has one for each rank.
    pub(crate) recvs: Blocks<'a>,
    /// Elements of one piece, for the algorithms that overlap pieces.
    pub(crate) piece: usize,
}

impl Problem<'_> {
    /// The rank after this one in the ring.
    fn next(&self) -> Rank {
        self.ahead(1)
    }

    /// The rank before this one in the ring.
    fn prev(&self) -> Rank {
        self.behind(1)
    }

    fn ahead(&self, by: usize) -> Rank {
        (self.rank + by) % self.world
    }

    fn behind(&self, by: usize) -> Rank {
        (self.rank + self.world - by) % self.world
    }

    /// Ranks counted from the root.
    fn relative(&self) -> usize {
        (self.rank + self.world - self.root) % self.world
    }

    /// The rank that is `relative` from the root.
    fn absolute(&self, relative: usize) -> Rank {
        (self.root + relative) % self.world
    }
}

/// The `part`-th of `parts` nearly equal ranges of `count` elements; the first ones are longer by one where it does not
/// divide.
pub(crate) fn chunk(count: usize, parts: usize, part: usize) -> Range<usize> {
    let (base, longer) = (count / parts, count % parts);
    let at = part * base + part.min(longer);
    at..at + base + usize::from(part < longer)
}

/// A range in pieces of at most `piece` elements.
pub(crate) fn pieces(range: Range<usize>, piece: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let piece = piece.max(1);
    (0..range.len().div_ceil(piece)).map(move |i| {
        let at = range.start + i * piece;
        at..range.end.min(at + piece)
    })
}

impl Algorithm {
    /// The algorithms over messages that carry out `op` among `world` ranks.
    pub(crate) fn for_op(op: Op, world: usize) -> &'static [Algorithm] {
        use Algorithm::*;
        let power_of_two = world.is_power_of_two();
        match op {
            Op::AllReduce => &[Direct, RecursiveDoubling, HalvingDoubling, Ring, DoubleTree, Binomial],
            Op::Broadcast => &[Binomial, DoubleTree, Ring],
            Op::Reduce => &[Binomial, DoubleTree, Ring, Direct],
            Op::AllGather | Op::AllGatherV if power_of_two => &[Direct, RecursiveDoubling, Ring],
            Op::ReduceScatter | Op::ReduceScatterV if power_of_two => &[Direct, HalvingDoubling, Ring],
            Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV => &[Direct, Ring],
            Op::Gather | Op::Scatter => &[Binomial, Direct],
            Op::AllToAll | Op::AllToAllV | Op::Send | Op::Recv => &[Direct],
            Op::Barrier => &[Dissemination],
            Op::Split | Op::Alloc | Op::Connect => &[],
        }
    }
}

/// The steps of `problem.rank`.
///
/// # Panics
///
/// If `algorithm` is not in [`Algorithm::for_op`].
pub(crate) fn steps(algorithm: Algorithm, problem: Problem<'_>) -> Box<dyn Iterator<Item = Step> + '_> {
    if problem.world == 1 {
        return Box::new(alone(problem).into_iter());
    }
    let steps: Box<dyn Iterator<Item = Step> + '_> = match (algorithm, problem.op) {
        (Algorithm::Ring, Op::AllReduce) => Box::new(ring::all_reduce(problem)),
        (Algorithm::Ring, Op::Broadcast) => Box::new(ring::broadcast(problem)),
        (Algorithm::Ring, Op::Reduce) => Box::new(ring::reduce(problem)),
        (Algorithm::Ring, Op::AllGather | Op::AllGatherV) => Box::new(ring::all_gather(problem)),
        (Algorithm::Ring, Op::ReduceScatter | Op::ReduceScatterV) => Box::new(ring::reduce_scatter(problem)),
        (Algorithm::Binomial, Op::AllReduce) => Box::new(tree::all_reduce(problem)),
        (Algorithm::Binomial, Op::Broadcast) => Box::new(tree::broadcast(problem)),
        (Algorithm::Binomial, Op::Reduce) => Box::new(tree::reduce(problem)),
        (Algorithm::Binomial, Op::Gather) => Box::new(tree::gather(problem)),
        (Algorithm::Binomial, Op::Scatter) => Box::new(tree::scatter(problem)),
        (Algorithm::DoubleTree, Op::AllReduce) => Box::new(double_tree::all_reduce(problem)),
        (Algorithm::DoubleTree, Op::Broadcast) => Box::new(double_tree::broadcast(problem)),
        (Algorithm::DoubleTree, Op::Reduce) => Box::new(double_tree::reduce(problem)),
        (Algorithm::RecursiveDoubling, Op::AllReduce) => Box::new(doubling::all_reduce(problem)),
        (Algorithm::RecursiveDoubling, Op::AllGather | Op::AllGatherV) => Box::new(doubling::all_gather(problem)),
        (Algorithm::HalvingDoubling, Op::AllReduce) => Box::new(halving::all_reduce(problem)),
        (Algorithm::HalvingDoubling, Op::ReduceScatter | Op::ReduceScatterV) => Box::new(halving::reduce_scatter(problem)),
        (Algorithm::Direct, Op::AllReduce) => Box::new(direct::all_reduce(problem)),
        (Algorithm::Direct, Op::Reduce) => Box::new(direct::reduce(problem)),
        (Algorithm::Direct, Op::AllGather | Op::AllGatherV) => Box::new(direct::all_gather(problem)),
        (Algorithm::Direct, Op::ReduceScatter | Op::ReduceScatterV) => Box::new(direct::reduce_scatter(problem)),
        (Algorithm::Direct, Op::AllToAll | Op::AllToAllV) => Box::new(direct::all_to_all(problem)),
        (Algorithm::Direct, Op::Gather) => Box::new(direct::gather(problem)),
        (Algorithm::Direct, Op::Scatter) => Box::new(direct::scatter(problem)),
        (Algorithm::Direct, Op::Send) => Box::new(direct::send(problem)),
        (Algorithm::Direct, Op::Recv) => Box::new(direct::recv(problem)),
        (Algorithm::Dissemination, Op::Barrier) => return Box::new(barrier::dissemination(problem)),
        (algorithm, op) => unreachable!("{op} has no {algorithm}"),
    };
    // Where a buffer has fewer elements than there are ranks, some chunks are empty. Both sides leave their messages out, unless
    // one may think that there is something to send where the other does not.
    let sides_may_differ = matches!(problem.op, Op::AllToAllV | Op::Send | Op::Recv);
    Box::new(steps.filter(move |step| sides_may_differ || step.len() > 0))
}

/// A world of one: what goes in comes out.
fn alone(p: Problem<'_>) -> Option<Step> {
    let len = match p.op {
        Op::AllReduce | Op::Broadcast | Op::Reduce => p.count,
        Op::AllGather | Op::AllGatherV | Op::Gather => p.recvs.range(0).len(),
        Op::ReduceScatter | Op::ReduceScatterV | Op::Scatter | Op::AllToAll | Op::AllToAllV => p.sends.range(0).len(),
        Op::Barrier | Op::Send | Op::Recv | Op::Split | Op::Alloc | Op::Connect => 0,
    };
    (len > 0).then(|| Step::Copy { src: BufferRef::Input.span(0..len), dst: BufferRef::Output.span(0..len) })
}
