//! Recursive doubling: a rank exchanges all that it has with the partner at distance 1, 2, 4 and so
//! on.
//!
//! Thakur, Rabenseifner and Gropp (2005), see `tree`. With L = floor(log2 N):
//!
//! - `all_reduce`: L (a + S b + S g), and 2 (a + S b) + S g more if N is not a power of two
//! - `all_gather`, powers of two only, S being the bytes of all blocks: L a + (N-1)/N S b

use super::problem::Problem;
use super::step::{BufferRef, Span, Step};
use crate::types::Rank;

/// The ranks that take part in the rounds: a power of two. If there are r ranks too many, the first
/// 2r ranks form pairs. In each pair the odd rank takes part for both.
#[derive(Clone, Copy)]
pub(super) struct Core {
    /// The number of ranks that take part.
    pub(super) size: usize,
    extra: usize,
    rank: Rank,
}

impl Core {
    pub(super) fn of(p: &Problem<'_>) -> Core {
        let size = 1 << p.world.ilog2();
        Core { size, extra: p.world - size, rank: p.rank }
    }

    /// Returns this rank's number among those that take part.
    pub(super) fn number(&self) -> Option<usize> {
        match self.rank {
            rank if rank >= 2 * self.extra => Some(rank - self.extra),
            rank if rank % 2 == 1 => Some(rank / 2),
            _ => None,
        }
    }

    /// Returns the rank with a number.
    pub(super) fn rank_of(&self, number: usize) -> Rank {
        if number < self.extra { 2 * number + 1 } else { number + self.extra }
    }

    /// Returns the rank for which this one takes part as well.
    fn ward(&self) -> Option<Rank> {
        (self.rank < 2 * self.extra && self.rank % 2 == 1).then(|| self.rank - 1)
    }

    /// Adds what the pairs do before and after the rounds. `rounds` gets the buffer that holds this
    /// rank's part when the rounds start.
    pub(super) fn all_reduce<I>(self, count: usize, rounds: impl FnOnce(usize, BufferRef) -> I) -> impl Iterator<Item = Step>
    where
        I: Iterator<Item = Step>,
    {
        let input = BufferRef::Input.span(0..count);
        let output = BufferRef::Output.span(0..count);
        let before = match (self.number(), self.ward()) {
            (None, _) => Some(Step::Send { to: self.rank + 1, src: input }),
            (_, Some(ward)) => Some(Step::RecvReduce { from: ward, own: input, dst: output, finish: false }),
            _ => None,
        };
        let after = match (self.number(), self.ward()) {
            (None, _) => Some(Step::Recv { from: self.rank + 1, dst: output }),
            (_, Some(ward)) => Some(Step::Send { to: ward, src: output }),
            _ => None,
        };
        let start = if self.ward().is_some() { BufferRef::Output } else { BufferRef::Input };
        let rounds = self.number().map(|number| rounds(number, start));
        before.into_iter().chain(rounds.into_iter().flatten()).chain(after)
    }
}

/// Returns the distances 1, 2, 4 and so on, below `size`.
pub(super) fn distances(size: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..size.ilog2()).map(|bit| 1 << bit)
}

pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let core = Core::of(&p);
    core.all_reduce(p.count, move |number, start| {
        distances(core.size).flat_map(move |distance| {
            let peer = core.rank_of(number ^ distance);
            let output = BufferRef::Output.span(0..p.count);
            let own = if distance == 1 { start.span(0..p.count) } else { output };
            let finish = 2 * distance == core.size;
            [Step::Send { to: peer, src: own }, Step::RecvReduce { from: peer, own, dst: output, finish }]
        })
    })
}

pub(super) fn all_gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let blocks = move |first: usize, blocks: usize| -> Span {
        BufferRef::Output.span(p.recvs.range(first).start..p.recvs.range(first + blocks - 1).end)
    };
    let own = blocks(p.rank, 1);
    let exchange = distances(p.world).flat_map(move |distance| {
        let (peer, known) = (p.rank ^ distance, p.rank & !(distance - 1));
        [
            Step::Send { to: peer, src: blocks(known, distance) },
            Step::Recv { from: peer, dst: blocks(known ^ distance, distance) },
        ]
    });
    std::iter::once(Step::Copy { src: BufferRef::Input.span(0..own.len), dst: own }).chain(exchange)
}
