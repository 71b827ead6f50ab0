//! The ring: every rank receives from the one before it and sends to the one after it.
//!
//! Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
//! Parallel Distrib. Comput. 69 (2009). With N ranks and S bytes, latency a, time per byte b and
//! reduction time per byte g:
//!
//! - `all_reduce`: 2(N-1) a + 2(N-1)/N S b + (N-1)/N S g
//! - `all_gather` and `reduce_scatter`, S being the bytes of all blocks: (N-1) a + (N-1)/N S b (+
//!   the same S g)
//! - `broadcast` and `reduce` go along the ring once, streaming: (N-1) a + S b (+ S g)

use super::problem::{Problem, chunk, segments};
use super::step::{BufferRef, Step};

/// Chunk `r` starts at rank `r` and collects every rank's part on its way to rank `r - 1`, which
/// holds its sum. Then the sums travel around the ring once more.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let n = p.world;
    let (from, to) = (p.prev(), p.next());
    let chunk = move |back: usize| chunk(p.count, n, (p.rank + n - back % n) % n);
    let input = move |back| BufferRef::Input.span(chunk(back));
    let output = move |back| BufferRef::Output.span(chunk(back));

    let start = Step::Send { to, src: input(0) };
    let sum = (1..n).map(move |k| Step::RecvReduceSend { from, own: input(k), dst: output(k), to, finish: k == n - 1 });
    let share = (0..n - 2).map(move |k| Step::RecvSend { from, dst: output(k), to });
    let end = Step::Recv { from, dst: output(n - 2) };
    std::iter::once(start).chain(sum).chain(share).chain([end])
}

/// Every block travels around the ring once.
pub(super) fn all_gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let n = p.world;
    let (from, to) = (p.prev(), p.next());
    let block = move |back: usize| BufferRef::Output.span(p.recvs.range(p.behind(back)));
    let own = BufferRef::Input.span(0..block(0).len);

    let start = [Step::Copy { src: own, dst: block(0) }, Step::Send { to, src: own }];
    let share = (1..n - 1).map(move |k| Step::RecvSend { from, dst: block(k), to });
    let end = Step::Recv { from, dst: block(n - 1) };
    start.into_iter().chain(share).chain([end])
}

/// Block `r` starts at rank `r + 1` and collects every rank's part on its way to rank `r`. Partial
/// sums alternate between two blocks of scratch, so that one is sent while the next arrives.
pub(super) fn reduce_scatter(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let n = p.world;
    let (from, to) = (p.prev(), p.next());
    let input = move |back: usize| BufferRef::Input.span(p.sends.range(p.behind(back)));
    let longest = p.sends.longest(n);

    let start = Step::Send { to, src: input(1) };
    let sum = (2..n).map(move |k| {
        let at = k % 2 * longest;
        let dst = BufferRef::Scratch.span(at..at + input(k).len);
        Step::RecvReduceSend { from, own: input(k), dst, to, finish: false }
    });
    let own = p.sends.range(p.rank);
    let end = Step::RecvReduce {
        from,
        own: BufferRef::Input.span(own.clone()),
        dst: BufferRef::Output.span(0..own.len()),
        finish: true,
    };
    std::iter::once(start).chain(sum).chain([end])
}

/// From the root along the ring, to the rank before the root.
pub(super) fn broadcast(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let (from, to) = (p.prev(), p.next());
    let all = BufferRef::Output.span(0..p.count);
    let input = BufferRef::Input.span(0..p.count);
    let steps = match p.relative() {
        0 => [Some(Step::Send { to, src: input }), Some(Step::Copy { src: input, dst: all })],
        last if last == p.world - 1 => [Some(Step::Recv { from, dst: all }), None],
        _ => [Some(Step::RecvSend { from, dst: all, to }), None],
    };
    steps.into_iter().flatten()
}

/// From the rank after the root along the ring to the root, in segments, so that the ranks between
/// need little scratch.
pub(super) fn reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let (from, to) = (p.prev(), p.next());
    let relative = p.relative();
    segments(0..p.count, p.segment).enumerate().map(move |(i, segment)| {
        let own = BufferRef::Input.span(segment.clone());
        let at = i % 2 * p.segment;
        match relative {
            1 => Step::Send { to, src: own },
            0 => Step::RecvReduce { from, own, dst: BufferRef::Output.span(segment), finish: true },
            _ => Step::RecvReduceSend { from, own, dst: BufferRef::Scratch.span(at..at + own.len), to, finish: false },
        }
    })
}
