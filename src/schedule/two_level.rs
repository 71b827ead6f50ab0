//! Two levels: schedules inside each rack and schedules between racks, composed so that few bytes
//! cross the uplinks of racks.
//!
//! With N ranks in R racks of m, latency A and time per byte B of an uplink, and the other names as
//! in `ring`:
//!
//! - `all_reduce`: 2(m-1) a + 2(R-1) A + 2(m-1)/m S b + 2(R-1)/R S B, of which the last two terms
//!   overlap if S is large. A ring crosses each uplink with
//!   2(N-1)/N S.
//! - `all_gather` and `reduce_scatter`, racks of one size only, S being the bytes of all blocks:
//!   R(m-1) a + (R-1) A + (m-1)/m S b + (R-1)/R S B
//! - `broadcast` and `reduce`: ceil(log2 m) (a + S b) + ceil(log2 R) (A + S B)
//!
//! Each is what Karonis, de Supinski, Foster, Gropp, Lusk and Bresnahan, "Exploiting hierarchy in
//! parallel computer networks to optimize collective operation performance", IPDPS 2000, do with
//! the levels of a network, with rings in place of trees where bytes count.

use std::ops::Range;

use super::problem::{Blocks, Problem, Racks, chunk, segments};
use super::step::{BufferRef, Span, Step};
use super::{doubling, ring, tree};
use crate::types::{Op, Rank};

/// Where a rank is.
struct Place<'a> {
    p: Problem<'a>,
    racks: usize,
    rack: usize,
    /// The ranks of this rack.
    members: Range<Rank>,
}

impl<'a> Place<'a> {
    fn of(p: Problem<'a>) -> Place<'a> {
        let rack = p.racks.of(p.world, p.rank);
        Place { racks: p.racks.count(), rack, members: p.racks.range(p.world, rack), p }
    }

    /// This rank's index in its rack.
    fn index(&self) -> usize {
        self.p.rank - self.members.start
    }

    /// The rank with the same index in another rack.
    fn counterpart(&self, rack: usize) -> Rank {
        self.p.racks.range(self.p.world, rack).start + self.index()
    }

    /// The rank that exchanges with other racks for a whole rack: the root, or the first.
    fn leader(&self, rack: usize) -> Rank {
        let members = self.p.racks.range(self.p.world, rack);
        if members.contains(&self.p.root) { self.p.root } else { members.start }
    }

    /// The problem among the ranks of this rack.
    fn inside(&self, op: Op) -> Problem<'a> {
        let root = self.leader(self.rack) - self.members.start;
        Problem { op, rank: self.index(), world: self.members.len(), root, racks: Racks::ONE, ..self.p }
    }

    /// The problem among one rank of each rack.
    fn between(&self, op: Op) -> Problem<'a> {
        let root = self.p.racks.of(self.p.world, self.p.root);
        Problem { op, rank: self.rack, world: self.racks, root, racks: Racks::ONE, ..self.p }
    }

    fn is_alone(&self) -> bool {
        self.members.len() == 1
    }
}

/// Returns a step of a schedule of some ranks as one of all ranks. `rank` says which rank has a number in
/// that schedule, and `span` where its memory lies. `finishes`: the schedule completes the reduction.
fn moved(step: Step, rank: impl Fn(usize) -> Rank, span: impl Fn(Span) -> Span, finishes: bool) -> Step {
    match step {
        Step::Send { to, src } => Step::Send { to: rank(to), src: span(src) },
        Step::Recv { from, dst } => Step::Recv { from: rank(from), dst: span(dst) },
        Step::RecvSend { from, dst, to } => Step::RecvSend { from: rank(from), dst: span(dst), to: rank(to) },
        Step::RecvReduce { from, own, dst, finish } => {
            Step::RecvReduce { from: rank(from), own: span(own), dst: span(dst), finish: finish && finishes }
        }
        Step::RecvReduceSend { from, own, dst, to, finish } => {
            Step::RecvReduceSend { from: rank(from), own: span(own), dst: span(dst), to: rank(to), finish: finish && finishes }
        }
        Step::Copy { src, dst } => Step::Copy { src: span(src), dst: span(dst) },
        Step::Convert { .. } | Step::Fold { .. } => unreachable!("rings and trees neither convert nor fold"),
    }
}

fn is_copy(step: &Step) -> bool {
    matches!(step, Step::Copy { .. })
}

fn later(span: Span, by: usize) -> Span {
    Span { at: span.at + by, ..span }
}

/// Pieces of a large all-reduce, of which one crosses uplinks while racks reduce the next one and gather the
/// one before.
const MOST_PIECES: usize = 16;
const SEGMENTS_OF_A_PIECE: usize = 4;

/// Returns how many pieces an all-reduce of `count` elements has.
pub(super) fn pieces(count: usize, segment: usize) -> usize {
    (count / (SEGMENTS_OF_A_PIECE * segment)).clamp(1, MOST_PIECES)
}

/// Each rack reduce-scatters, so that each of its ranks has a part of the rack's sum; the ranks with the
/// same part all-reduce it between racks; each rack all-gathers. If racks differ in size, ranks
/// beyond the smallest rack's have no part.
pub(super) fn all_reduce(p: Problem<'_>) -> Vec<Step> {
    let place = Place::of(p);
    let pieces = pieces(p.count, p.segment);
    let mut all = Vec::new();
    // What the piece before still does, and at last the one before that.
    let (mut between, mut gathering, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for piece in (0..pieces).map(Some).chain([None]) {
        let of_piece = |piece| place.all_reduce_piece(chunk(p.count, pieces, piece));
        let [scatter, crossing, gather] = piece.map(of_piece).unwrap_or_default();
        merge(&mut all, std::mem::replace(&mut between, crossing), [after, scatter].concat());
        after = std::mem::replace(&mut gathering, gather);
    }
    all.extend(after);
    all
}

/// Adds two lists of steps evenly to a schedule. Each list stays in order.
fn merge(all: &mut Vec<Step>, between: Vec<Step>, inside: Vec<Step>) {
    let lengths = [between.len(), inside.len()];
    let (mut between, mut inside) = (between.into_iter(), inside.into_iter());
    for _ in 0..lengths[0] + lengths[1] {
        // The list of which the smaller part was added.
        let is_between = between.len() * lengths[1] >= inside.len() * lengths[0] && between.len() > 0;
        all.extend(if is_between { between.next() } else { inside.next() });
    }
}

impl Place<'_> {
    /// The phases of an all-reduce of some elements: inside the rack, between racks, and inside the rack.
    fn all_reduce_piece(&self, piece: Range<usize>) -> [Vec<Step>; 3] {
        let p = self.p;
        let parts = (0..self.racks).map(|rack| p.racks.range(p.world, rack).len()).min().unwrap_or(1);
        let starts: Vec<usize> = (0..=self.members.len())
            .map(|index| if index < parts { piece.start + chunk(piece.len(), parts, index).start } else { piece.end })
            .collect();
        let blocks = Blocks::Listed(&starts);
        let own = starts[self.index()]..starts[self.index() + 1];
        let member = |index| self.members.start + index;
        let in_output = |span: Span| Span { place: BufferRef::Output, ..later(span, own.start) };
        let [mut scatters, mut crosses, mut gathers] = [const { Vec::new() }; 3];
        if !self.is_alone() {
            let scatter = Problem { sends: blocks, ..self.inside(Op::ReduceScatterV) };
            let span = |span: Span| if span.place == BufferRef::Output { in_output(span) } else { span };
            scatters.extend(ring::reduce_scatter(scatter).map(|step| moved(step, member, span, false)));
        }
        if self.index() < parts {
            let reduce = Problem { count: own.len(), ..self.between(Op::AllReduce) };
            let span = |span: Span| match span.place {
                BufferRef::Input if self.is_alone() => later(span, own.start),
                BufferRef::Scratch => span,
                _ => in_output(span),
            };
            let of_racks = |step| moved(step, |rack| self.counterpart(rack), span, true);
            // Two racks exchange their parts at once.
            match self.racks {
                2 => crosses.extend(doubling::all_reduce(reduce).map(of_racks)),
                _ => crosses.extend(ring::all_reduce(reduce).map(of_racks)),
            }
        }
        if !self.is_alone() {
            let gather = Problem { recvs: blocks, ..self.inside(Op::AllGatherV) };
            let span = |span: Span| if span.place == BufferRef::Input { in_output(span) } else { span };
            let steps = ring::all_gather(gather).filter(|step| !is_copy(step));
            gathers.extend(steps.map(|step| moved(step, member, span, false)));
        }
        [scatters, crosses, gathers]
    }
}

/// Ranks with the same index pass their blocks around a ring of racks. As soon as a rack has a block of
/// another rack at each of its ranks, it passes these around a ring of its own.
pub(super) fn all_gather(p: Problem<'_>) -> Vec<Step> {
    let place = Place::of(p);
    let blocks: Vec<Range<usize>> = (0..p.world).map(|rank| p.recvs.range(rank)).collect();
    let output = |rank: Rank| BufferRef::Output.span(blocks[rank].clone());
    let own = BufferRef::Input.span(0..blocks[p.rank].len());
    let behind = |by: usize| (place.rack + place.racks - by) % place.racks;
    let (from, to) = (place.counterpart(behind(1)), place.counterpart((place.rack + 1) % place.racks));
    let mut all = vec![Step::Copy { src: own, dst: output(p.rank) }, Step::Send { to, src: own }];
    for round in 0..place.racks {
        let rack = behind(round);
        let dst = output(place.counterpart(rack));
        match round {
            0 => {}
            last if last + 1 == place.racks => all.push(Step::Recv { from, dst }),
            _ => all.push(Step::RecvSend { from, dst, to }),
        }
        if !place.is_alone() {
            let src = if round == 0 { own } else { dst };
            let of_rack = &blocks[p.racks.range(p.world, rack)];
            let gather = Problem { recvs: Blocks::Placed(of_rack), ..place.inside(Op::AllGatherV) };
            let span = |span: Span| if span.place == BufferRef::Input { src } else { span };
            let steps = ring::all_gather(gather).filter(|step| !is_copy(step));
            all.extend(steps.map(|step| moved(step, |index| place.members.start + index, span, false)));
        }
    }
    all
}

/// The reverse of `all_gather`: for one rack after the other, its own last, the ranks of a rack
/// reduce-scatter what they have for that rack, and ranks with the same index add it up around a ring of
/// racks. Sums of a rack alternate between two blocks of scratch, and its ring has two more.
pub(super) fn reduce_scatter(p: Problem<'_>) -> Vec<Step> {
    let place = Place::of(p);
    let blocks: Vec<Range<usize>> = (0..p.world).map(|rank| p.sends.range(rank)).collect();
    let longest = p.sends.longest(p.world);
    let behind = |by: usize| (place.rack + place.racks - by) % place.racks;
    let (from, to) = (place.counterpart(behind(1)), place.counterpart((place.rack + 1) % place.racks));
    let mut all = Vec::new();
    for round in 1..=place.racks {
        let rack = behind(round);
        let block = blocks[place.counterpart(rack)].clone();
        let at = round % 2 * longest;
        let sum = BufferRef::Scratch.span(at..at + block.len());
        let own = if place.is_alone() { BufferRef::Input.span(block) } else { sum };
        if !place.is_alone() {
            let of_rack = &blocks[p.racks.range(p.world, rack)];
            let scatter = Problem { sends: Blocks::Placed(of_rack), ..place.inside(Op::ReduceScatterV) };
            let span = |span: Span| match span.place {
                BufferRef::Input => span,
                BufferRef::Output => sum,
                BufferRef::Scratch => later(span, 2 * longest),
            };
            all.extend(ring::reduce_scatter(scatter).map(|step| moved(step, |index| place.members.start + index, span, false)));
        }
        all.push(match round {
            1 => Step::Send { to, src: own },
            last if last == place.racks => Step::RecvReduce { from, own, dst: BufferRef::Output.span(0..own.len), finish: true },
            _ => Step::RecvReduceSend { from, own, dst: sum, to, finish: false },
        });
    }
    all
}

/// From the root to the leader of each rack, and from each leader to its rack.
pub(super) fn broadcast(p: Problem<'_>) -> Vec<Step> {
    let place = Place::of(p);
    let is_leader = p.rank == place.leader(place.rack);
    let mut all = Vec::new();
    if is_leader {
        let steps = tree::broadcast(place.between(Op::Broadcast));
        all.extend(steps.map(|step| moved(step, |rack| place.leader(rack), |span| span, true)));
    }
    if !place.is_alone() {
        let place_of = if p.rank == p.root { BufferRef::Input } else { BufferRef::Output };
        let steps = tree::broadcast(place.inside(Op::Broadcast)).filter(|step| !is_copy(step));
        let span = |span: Span| Span { place: place_of, ..span };
        all.extend(steps.map(|step| moved(step, |index| place.members.start + index, span, true)));
    }
    all
}

/// From each rack to its leader, and from the leaders to the root, in segments.
pub(super) fn reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    segments(0..p.count, p.segment).enumerate().flat_map(move |(i, segment)| {
        let place = Place::of(p);
        let at = i % 2 * p.segment;
        let input = BufferRef::Input.span(segment.clone());
        let sum = match p.rank == p.root {
            true => BufferRef::Output.span(segment),
            false => BufferRef::Scratch.span(at..at + input.len),
        };
        let mut all = Vec::new();
        if !place.is_alone() {
            let problem = place.inside(Op::Reduce);
            let up = tree::up(problem, problem.root, input, sum);
            all.extend(up.map(|step| moved(step, |index| place.members.start + index, |span| span, false)));
        }
        if p.rank == place.leader(place.rack) {
            let problem = place.between(Op::Reduce);
            let up = tree::up(problem, problem.root, if place.is_alone() { input } else { sum }, sum);
            all.extend(up.map(|step| moved(step, |rack| place.leader(rack), |span| span, true)));
        }
        all
    })
}
