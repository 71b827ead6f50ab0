//! The binomial tree, numbered from the root: the parent of v is v without its lowest set bit.
//!
//! ```text
//!         0            children of 0: 1, 2, 4   (N = 8)
//!       / | \          children of 2: 3
//!      4  2  1         children of 4: 5, 6
//!     /|  |            children of 6: 7
//!    6 5  3
//!    |
//!    7
//! ```
//!
//! Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! Int. J. High Perform. Comput. Appl. 19 (2005). With L = ceil(log2 N):
//!
//! - `broadcast`: L (a + S b), `reduce`: L (a + S b + S g), `all_reduce`: the sum of both
//! - `gather` and `scatter`, S being the bytes of all blocks: L a + (N-1)/N S b

use std::ops::Range;

use super::problem::{Problem, segments};
use super::step::{BufferRef, Span, Step};
use crate::types::Rank;

/// A rank's place in the tree.
#[derive(Clone, Copy)]
struct Node {
    /// This rank, counted from the root.
    relative: usize,
    /// Twice the distance to the farthest possible child: the lowest set bit, or for the root the
    /// next power of two.
    reach: usize,
    world: usize,
}

impl Node {
    fn of(p: &Problem<'_>) -> Node {
        let relative = p.relative();
        let reach = if relative == 0 { p.world.next_power_of_two() } else { 1 << relative.trailing_zeros() };
        Node { relative, reach, world: p.world }
    }

    /// The parent's relative number.
    fn parent(&self) -> Option<usize> {
        (self.relative != 0).then(|| self.relative - self.reach)
    }

    /// The distances to the children, nearest (with the smallest subtree) first.
    fn children(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let Node { relative, reach, world } = *self;
        (0..reach.trailing_zeros()).map(|bit| 1 << bit).filter(move |distance| relative + distance < world)
    }
}

/// Down the tree, the largest subtree first.
pub(super) fn broadcast(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let input = BufferRef::Input.span(0..p.count);
    let output = BufferRef::Output.span(0..p.count);
    let copy = (p.rank == p.root).then_some(Step::Copy { src: input, dst: output });
    down(p, p.root, if p.rank == p.root { input } else { output }).chain(copy)
}

/// Up the tree, the smallest subtree first, in segments: a rank sends one segment up while it
/// receives the next from below.
pub(super) fn reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let is_root = p.rank == p.root;
    segments(0..p.count, p.segment).enumerate().flat_map(move |(i, segment)| {
        let scratch = i % 2 * p.segment;
        let sum = if is_root {
            BufferRef::Output.span(segment.clone())
        } else {
            BufferRef::Scratch.span(scratch..scratch + segment.len())
        };
        up(p, p.root, BufferRef::Input.span(segment), sum)
    })
}

/// Up to rank 0 and down again.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let p = Problem { root: 0, ..p };
    let output = BufferRef::Output.span(0..p.count);
    up(p, 0, BufferRef::Input.span(0..p.count), output).chain(down(p, 0, output))
}

/// Receives `span` from the parent, unless this is the root, and sends it to the children.
fn down(p: Problem<'_>, root: Rank, span: Span) -> impl Iterator<Item = Step> + use<> {
    let node = Node::of(&Problem { root, ..p });
    let rank = move |relative: usize| (root + relative) % p.world;
    let mut children = node.children().rev().map(move |distance| rank(node.relative + distance));
    let first = node.parent().map(|parent| match children.next() {
        Some(to) => Step::RecvSend { from: rank(parent), dst: span, to },
        None => Step::Recv { from: rank(parent), dst: span },
    });
    first.into_iter().chain(children.map(move |to| Step::Send { to, src: span }))
}

/// Reduces `input` with what the children send into `sum`, and sends it to the parent, unless this
/// is the root.
pub(super) fn up(p: Problem<'_>, root: Rank, input: Span, sum: Span) -> impl Iterator<Item = Step> + use<> {
    let node = Node::of(&Problem { root, ..p });
    let rank = move |relative: usize| (root + relative) % p.world;
    let parent = node.parent().map(rank);
    let last = node.children().next_back();
    let leaf = parent.filter(|_| last.is_none()).map(|to| Step::Send { to, src: input });
    let reduce = node.children().enumerate().map(move |(i, distance)| {
        let (from, own) = (rank(node.relative + distance), if i == 0 { input } else { sum });
        match parent {
            Some(to) if last == Some(distance) => Step::RecvReduceSend { from, own, dst: sum, to, finish: false },
            _ => Step::RecvReduce { from, own, dst: sum, finish: parent.is_none() && last == Some(distance) },
        }
    });
    leaf.into_iter().chain(reduce)
}

/// Blocks travel up the tree. Those of a subtree lie together in scratch, in relative order, until
/// they reach the root.
pub(super) fn gather(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let tree = BlockTree { node: Node::of(&p), own: BufferRef::Input.span(0..p.recvs.range(0).len()), all: BufferRef::Output, p };
    let copy = tree.inner().map(|dst| Step::Copy { src: tree.own, dst });
    let from_children = tree.children(tree.node.children()).map(|(from, dst)| Step::Recv { from, dst });
    let to_parent = tree.parent().into_iter().map(|(to, src)| Step::Send { to, src });
    copy.into_iter().chain(from_children).chain(to_parent).collect::<Vec<_>>().into_iter()
}

/// The reverse of `gather`, the largest subtree first.
pub(super) fn scatter(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let tree = BlockTree { node: Node::of(&p), own: BufferRef::Output.span(0..p.sends.range(0).len()), all: BufferRef::Input, p };
    let from_parent = tree.parent().into_iter().map(|(from, dst)| Step::Recv { from, dst });
    let to_children = tree.children(tree.node.children().rev()).map(|(to, src)| Step::Send { to, src });
    let copy = tree.inner().map(|src| Step::Copy { src, dst: tree.own });
    from_parent.chain(to_children).chain(copy).collect::<Vec<_>>().into_iter()
}

/// The tree of `gather` and `scatter`, with the place of every subtree's blocks.
struct BlockTree<'a> {
    p: Problem<'a>,
    node: Node,
    /// This rank's own block, in its own buffer.
    own: Span,
    /// The root's buffer, with the blocks of all ranks.
    all: BufferRef,
}

impl BlockTree<'_> {
    /// Returns where this rank's own block lies among those of its subtree. A leaf has no others,
    /// and uses its own buffer.
    fn inner(&self) -> Option<Span> {
        let relative = self.node.relative;
        self.node.children().next().map(|_| self.span(relative..relative + 1))
    }

    /// Returns the messages from or to the children at these distances.
    fn children(&self, distances: impl Iterator<Item = usize>) -> impl Iterator<Item = (Rank, Span)> {
        let relative = self.node.relative;
        distances.flat_map(move |distance| self.messages(relative, relative + distance, relative + distance))
    }

    /// Returns the messages to or from the parent.
    fn parent(&self) -> Vec<(Rank, Span)> {
        let relative = self.node.relative;
        self.node.parent().map_or_else(Vec::new, |parent| self.messages(parent, relative, parent))
    }

    /// Returns the messages with `peer` that carry the subtree of `child` between it and `parent`
    /// (all in relative numbers): one, or two if the root's buffer wraps around in the middle.
    fn messages(&self, parent: usize, child: usize, peer: usize) -> Vec<(Rank, Span)> {
        let blocks = child..self.p.world.min(child + (child - parent));
        let wrap = if parent == 0 { self.p.world - self.p.root } else { blocks.end };
        let wrap = wrap.clamp(blocks.start, blocks.end);
        let parts = [blocks.start..wrap, wrap..blocks.end];
        parts.into_iter().filter(|part| !part.is_empty()).map(|part| (self.p.absolute(peer), self.span(part))).collect()
    }

    /// Returns where this rank stores a range of relative blocks.
    fn span(&self, blocks: Range<usize>) -> Span {
        let len = blocks.len() * self.own.len;
        if self.node.relative == 0 {
            let at = self.p.absolute(blocks.start) * self.own.len;
            self.all.span(at..at + len)
        } else if self.node.children().next().is_none() {
            self.own
        } else {
            let at = (blocks.start - self.node.relative) * self.own.len;
            BufferRef::Scratch.span(at..at + len)
        }
    }
}
