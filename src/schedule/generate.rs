//! The generator of each algorithm for each operation.

use super::algorithm::Algorithm;
use super::problem::Problem;
use super::step::{BufferRef, Step};
use super::{barrier, direct, double_tree, doubling, halving, ring, tree, two_level};
use crate::types::{Op, Part};

/// Returns the steps of `problem.rank`.
///
/// # Panics
///
/// If `algorithm` is not in [`Algorithm::for_op`], and is not the one of two levels where
/// [`Algorithm::has_two_levels`].
pub(crate) fn steps(algorithm: Algorithm, problem: Problem<'_>) -> Box<dyn Iterator<Item = Step> + '_> {
    // A message goes to the rank itself then.
    if problem.world == 1 && !problem.op.is_point_to_point() {
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
        (Algorithm::TwoLevel, Op::AllReduce) => Box::new(two_level::all_reduce(problem).into_iter()),
        (Algorithm::TwoLevel, Op::Broadcast) => Box::new(two_level::broadcast(problem).into_iter()),
        (Algorithm::TwoLevel, Op::Reduce) => Box::new(two_level::reduce(problem)),
        (Algorithm::TwoLevel, Op::AllGather | Op::AllGatherV) => Box::new(two_level::all_gather(problem).into_iter()),
        (Algorithm::TwoLevel, Op::ReduceScatter | Op::ReduceScatterV) => Box::new(two_level::reduce_scatter(problem).into_iter()),
        (Algorithm::Dissemination, Op::Barrier) => return Box::new(barrier::dissemination(problem)),
        (algorithm, op) => unreachable!("{op} has no {algorithm}"),
    };
    // If a buffer has fewer elements than there are ranks, some chunks are empty. Both sides omit
    // their messages, except where the two sides may disagree on whether a message is empty.
    let sides_may_differ = matches!(problem.op, Op::AllToAllV | Op::Send | Op::Recv);
    Box::new(steps.filter(move |step| sides_may_differ || step.len() > 0))
}

/// In a world of one, copies the input to the output.
fn alone(p: Problem<'_>) -> Option<Step> {
    use Part::{All, AllAtRoot, AllOf, Nothing, One, OneAtRoot};
    let len = match p.op.form() {
        [Nothing, _] | [_, Nothing] => 0,
        [All | AllAtRoot | AllOf(_), _] => p.sends.range(0).len(),
        [_, All | AllAtRoot | AllOf(_)] => p.recvs.range(0).len(),
        [One | OneAtRoot, _] => p.count,
        [Part::OwnOf(_), _] => 0,
    };
    (len > 0).then(|| Step::Copy { src: BufferRef::Input.span(0..len), dst: BufferRef::Output.span(0..len) })
}
