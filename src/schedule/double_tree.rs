//! Two binary trees over all ranks, each for half of the data. A rank that is an inner node of one
//! is a leaf of the other, so every rank sends and receives about as many bytes as the buffer has.
//!
//! Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
//! scan", Parallel Comput. 35 (2009). With segments of c bytes and D = ceil(log2 N) + 1:
//!
//! - `all_reduce`: about 2 D (a + c b) + 2 S b + S g
//! - `broadcast` and `reduce`: about D (a + c b) + S b (+ S g)
//!
//! # Order
//!
//! All ranks follow one imaginary clock. In `reduce`, a node at depth d handles segment k at tick
//! k + D - d; in `broadcast`, at tick k + d. A child's tick is always one before (or after) its
//! parent's, so every message is sent one tick before it is received. So no wait is circular, and
//! two messages of one link are received in the order in which they were sent. A rank's steps,
//! sorted by tick, form a pipeline.

use std::ops::Range;

use super::problem::{Problem, chunk, segments};
use super::step::{BufferRef, Span, Step};
use crate::types::Rank;

/// Returns a node's parent in the in-order binary tree. Odd numbers are leaves, a node with k
/// trailing zeros is k levels above them, and 0 is the root with a single child.
///
/// ```text
///     0
///      \______
///             8            N = 12
///        ____/ \__
///       4         10
///     /   \      /  \
///    2     6    9    11
///   / \   / \
///  1   3 5   7
/// ```
fn parent(node: usize, size: usize) -> Option<usize> {
    if node == 0 {
        return None;
    }
    let bit = node & node.wrapping_neg();
    let up = (node ^ bit) | (bit << 1);
    Some(if up < size { up } else { node ^ bit })
}

fn children(node: usize, size: usize) -> [Option<usize>; 2] {
    let highest = size.next_power_of_two() / 2;
    if node == 0 {
        return [(size > 1).then_some(highest), None];
    }
    // The right child is the full tree's, or the nearest number below it that exists.
    let level = node & node.wrapping_neg();
    let left = (level > 1).then(|| node - level / 2);
    let right =
        std::iter::successors(Some(level / 2), |half| Some(half / 2)).take_while(|&half| half > 0).map(|half| node + half);
    [left, right.into_iter().find(|&child| child < size)]
}

fn depth(node: usize, size: usize) -> usize {
    std::iter::successors(Some(node), |&node| parent(node, size)).count() - 1
}

/// One of the two trees, from the view of one rank.
struct Tree {
    parent: Option<Rank>,
    children: [Option<Rank>; 2],
    depth: usize,
    /// The elements that travel through this tree.
    range: Range<usize>,
}

/// Returns the node that a member is in the first or the second tree. In the second, numbers are
/// mirrored, or rotated by one for an odd size: that exchanges odd and even numbers, and so leaves
/// and inner nodes.
fn node_of(second: usize, member: usize, size: usize) -> usize {
    match (second, size % 2) {
        (0, _) => member,
        (_, 0) => size - 1 - member,
        _ => (member + size - 1) % size,
    }
}

/// The inverse of [`node_of`].
fn member_of(second: usize, node: usize, size: usize) -> usize {
    match (second, size % 2) {
        (0, _) => node,
        (_, 0) => size - 1 - node,
        _ => (node + 1) % size,
    }
}

/// Returns both trees over `size` members, from the view of `member`. `rank_of` maps members to
/// ranks.
fn trees(size: usize, member: usize, count: usize, rank_of: impl Fn(usize) -> Rank) -> [Tree; 2] {
    [0, 1].map(|second| {
        let node = node_of(second, member, size);
        let rank = |node: usize| rank_of(member_of(second, node, size));
        Tree {
            parent: parent(node, size).map(rank),
            children: children(node, size).map(|child| child.map(rank)),
            depth: depth(node, size),
            range: chunk(count, 2, second),
        }
    })
}

/// Returns a number above the depth of any node of a tree with `size` nodes.
fn height(size: usize) -> usize {
    size.next_power_of_two().ilog2() as usize + 1
}

/// The steps of one rank, with the tick of each.
#[derive(Default)]
struct Timeline {
    steps: Vec<(usize, Step)>,
}

impl Timeline {
    fn at(&mut self, tick: usize, step: Step) {
        self.steps.push((tick, step));
    }

    /// Returns the steps by tick. Steps of one tick stay in the order in which they were added: up
    /// before down, the first tree before the second, segments in order. Senders and receivers add
    /// them alike.
    fn in_order(mut self) -> impl Iterator<Item = Step> {
        self.steps.sort_by_key(|&(tick, _)| tick);
        self.steps.into_iter().map(|(_, step)| step)
    }

    /// Adds the steps that receive segments from the children, reduce them with this rank's, and
    /// send them to the parent. `sum` is where a segment is reduced.
    fn reduce(&mut self, tree: &Tree, height: usize, segment: usize, sum: impl Fn(usize, Range<usize>) -> Span) {
        let last = tree.children.iter().rposition(Option::is_some);
        for (k, range) in segments(tree.range.clone(), segment).enumerate() {
            let tick = k + height - tree.depth;
            let (input, sum) = (BufferRef::Input.span(range.clone()), sum(k, range));
            if let (None, Some(to)) = (last, tree.parent) {
                self.at(tick, Step::Send { to, src: input });
            }
            for (i, from) in tree.children.iter().enumerate().filter_map(|(i, child)| Some((i, (*child)?))) {
                let own = if tree.children[..i].iter().any(Option::is_some) { sum } else { input };
                self.at(
                    tick,
                    match tree.parent {
                        Some(to) if last == Some(i) => Step::RecvReduceSend { from, own, dst: sum, to, finish: false },
                        parent => Step::RecvReduce { from, own, dst: sum, finish: parent.is_none() && last == Some(i) },
                    },
                );
            }
        }
    }

    /// Adds the steps that receive segments from the parent and send them to the children. `start`
    /// is the tick of the root.
    fn broadcast(&mut self, tree: &Tree, start: usize, segment: usize) {
        for (k, range) in segments(tree.range.clone(), segment).enumerate() {
            let tick = start + k + tree.depth;
            let span = BufferRef::Output.span(range);
            let mut children = tree.children.into_iter().flatten();
            if let Some(from) = tree.parent {
                self.at(
                    tick,
                    match children.next() {
                        Some(to) => Step::RecvSend { from, dst: span, to },
                        None => Step::Recv { from, dst: span },
                    },
                );
            }
            for to in children {
                self.at(tick, Step::Send { to, src: span });
            }
        }
    }
}

/// Up both trees, and down again as soon as a segment has reached its root.
pub(super) fn all_reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let height = height(p.world);
    let trees = trees(p.world, p.rank, p.count, |member| member);
    let mut timeline = Timeline::default();
    for tree in &trees {
        timeline.reduce(tree, height, p.segment, |_, range| BufferRef::Output.span(range));
    }
    for tree in &trees {
        timeline.broadcast(tree, height + 1, p.segment);
    }
    timeline.in_order()
}

/// The trees span all ranks but the root, which sends to both.
pub(super) fn broadcast(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let mut timeline = Timeline::default();
    let input = BufferRef::Input.span(0..p.count);
    for tree in trees_without_root(&p) {
        if p.rank != p.root {
            timeline.broadcast(&tree, 1, p.segment);
            continue;
        }
        for (k, range) in segments(tree.range.clone(), p.segment).enumerate() {
            for to in tree.children.into_iter().flatten() {
                timeline.at(k, Step::Send { to, src: BufferRef::Input.span(range.clone()) });
            }
        }
    }
    let copy = (p.rank == p.root).then_some(Step::Copy { src: input, dst: BufferRef::Output.span(0..p.count) });
    timeline.in_order().chain(copy)
}

/// The trees span all ranks but the root, which receives from both.
pub(super) fn reduce(p: Problem<'_>) -> impl Iterator<Item = Step> {
    let height = height(p.world - 1);
    let mut timeline = Timeline::default();
    for (i, tree) in trees_without_root(&p).iter().enumerate() {
        if p.rank == p.root {
            timeline.reduce(tree, height + 1, p.segment, |_, range| BufferRef::Output.span(range));
        } else {
            timeline.reduce(tree, height, p.segment, |k, range| {
                let at = (2 * i + k % 2) * p.segment;
                BufferRef::Scratch.span(at..at + range.len())
            });
        }
    }
    timeline.in_order()
}

/// Returns the trees over the ranks other than the root. The root is above both, with the root of
/// each as its only child.
fn trees_without_root(p: &Problem<'_>) -> [Tree; 2] {
    let size = p.world - 1;
    let rank_of = |member: usize| p.absolute(member + 1);
    if p.rank == p.root {
        return [0, 1].map(|second| {
            let child = rank_of(member_of(second, 0, size));
            Tree { parent: None, children: [Some(child), None], depth: 0, range: chunk(p.count, 2, second) }
        });
    }
    trees(size, p.relative() - 1, p.count, rank_of).map(|tree| Tree { parent: tree.parent.or(Some(p.root)), ..tree })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_and_children_agree_and_inner_nodes_of_one_tree_are_leaves_of_the_other() {
        for size in 1..200 {
            for node in 0..size {
                for child in children(node, size).into_iter().flatten() {
                    assert_eq!(parent(child, size), Some(node), "child {child} of {node}, {size} nodes");
                }
                if let Some(up) = parent(node, size) {
                    assert!(children(up, size).contains(&Some(node)), "node {node} below {up}, {size} nodes");
                }
                assert!(depth(node, size) < height(size) + usize::from(size == 1), "node {node} of {size}");
                for second in [0, 1] {
                    assert_eq!(member_of(second, node_of(second, node, size), size), node);
                }
                let inner = |second| children(node_of(second, node, size), size).iter().flatten().count();
                assert!(inner(0) + inner(1) <= 3, "member {node} of {size} has {} children", inner(0) + inner(1));
            }
        }
    }
}
