//! Compression of gradients to matrices of low rank.

mod matrix;

use std::collections::HashMap;
use std::ops::Range;

use super::float::Float;
use super::hook::{Bucket, Hook};
use crate::communicator::{Communicator, Registered};
use crate::error::Result;
use crate::types::{DType, ReduceOp};

/// PowerSGD: sends the gradient of a matrix as a product of two matrices of low rank. What the
/// product lacks is added to the next step's gradient ("error feedback").
///
/// A gradient `M` of `n` x `m` (all dimensions but the first together) costs `(n + m) * rank`
/// numbers instead of `n * m`. If that is no fewer, as for biases, the gradient is averaged without
/// compression. With the factor `Q` of the step before ("warm start"):
///
/// 1. `M += error`; `P = M Q`, averaged over all ranks; its columns are made orthonormal;
/// 2. `Q = transpose(M) P`, averaged over all ranks;
/// 3. every rank's gradient becomes `P transpose(Q)`, and its `error` becomes the difference to its
///    own `M`.
///
/// Supports `f32`, `f16` and `bf16`, and computes in `f32`; gradients of `f64` are averaged. Every
/// rank holds one more `f32` for each gradient element.
///
/// Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
/// Optimization", NeurIPS 2019.
pub struct PowerSgd {
    rank: usize,
    start_after: u64,
    /// By the index of the parameter: factors survive when buckets are rebuilt.
    factors: HashMap<usize, Factor>,
    /// First the `P` of a bucket's matrices and the uncompressed gradients; second the `Q`.
    scratch: [Option<Registered<f32>>; 2],
}

/// What one matrix keeps from step to step.
struct Factor {
    /// `rank` rows with one number for each column of the matrix: transposed, so that all loops run
    /// along memory.
    q: Vec<f32>,
    /// What was not sent; during a step, what is to be sent.
    error: Vec<f32>,
}

/// A gradient of a bucket that is sent as a product.
struct Matrix {
    parameter: usize,
    rows: usize,
    columns: usize,
    /// Its range in the bucket, that of its `P` in the first scratch memory, and that of its `Q` in
    /// the second.
    elements: Range<usize>,
    p: Range<usize>,
    q: Range<usize>,
}

impl PowerSgd {
    /// Compresses to matrices of this rank: 1, 2 or 4 are usual. 0 counts as 1.
    pub fn new(rank: usize) -> PowerSgd {
        PowerSgd { rank: rank.max(1), start_after: 0, factors: HashMap::new(), scratch: [None, None] }
    }

    /// Averages without compression for this many steps first, in which gradients change most.
    /// Default: 0.
    pub fn start_after(mut self, steps: u64) -> PowerSgd {
        self.start_after = steps;
        self
    }

    /// Divides a bucket into the gradients that are sent as products and the ranges of the others.
    /// Returns the lengths of both scratch memories, too.
    fn divide(&self, bucket: &Bucket<'_>) -> (Vec<Matrix>, Vec<Range<usize>>, [usize; 2]) {
        let (mut matrices, mut rest) = (Vec::new(), Vec::new());
        let mut lengths = [0, 0];
        for (parameter, described, elements) in bucket.members() {
            let rows = described.shape.first().copied().unwrap_or(1).max(1);
            let columns = elements.len() / rows;
            if (rows + columns) * self.rank < elements.len() {
                let p = lengths[0]..lengths[0] + rows * self.rank;
                let q = lengths[1]..lengths[1] + columns * self.rank;
                lengths = [p.end, q.end];
                matrices.push(Matrix { parameter, rows, columns, elements, p, q });
            } else {
                rest.push(elements);
            }
        }
        lengths[0] += rest.iter().map(Range::len).sum::<usize>();
        (matrices, rest, lengths)
    }

    fn all_reduce<T: Float>(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        let (matrices, rest, lengths) = self.divide(bucket);
        for (scratch, length) in self.scratch.iter_mut().zip(lengths) {
            if scratch.as_ref().is_none_or(|scratch| scratch.len() < length) {
                *scratch = None;
                *scratch = Some(comm.alloc(length)?);
            }
        }
        let [Some(ps), Some(qs)] = &mut self.scratch else { unreachable!("both were allocated") };
        let (ps, qs) = (&mut ps[..lengths[0]], &mut qs[..lengths[1]]);
        let (factors, rank, step) = (&mut self.factors, self.rank, bucket.step());
        let values = bucket.elements::<T>()?;

        multiply(factors, &matrices, values, rank, step, ps);
        // The uncompressed gradients come after the `P`.
        let compressed = matrices.last().map_or(0, |matrix| matrix.p.end);
        copy_rest(&rest, &mut ps[compressed..], |range, numbers| {
            numbers.iter_mut().zip(&values[range]).for_each(|(number, value)| *number = value.to_single());
        });
        comm.all_reduce(ps, ReduceOp::Average)?;
        copy_rest(&rest, &mut ps[compressed..], |range, numbers| {
            values[range].iter_mut().zip(numbers).for_each(|(value, number)| *value = T::of_single(*number));
        });

        for matrix in &matrices {
            let (p, q) = (&mut ps[matrix.p.clone()], &mut qs[matrix.q.clone()]);
            matrix::orthonormalise(p, matrix.rows);
            matrix::transposed_times(&factors[&matrix.parameter].error, matrix.columns, p, q);
        }
        comm.all_reduce(qs, ReduceOp::Average)?;
        for matrix in &matrices {
            let factor = factors.get_mut(&matrix.parameter).expect("`multiply` made it");
            let (p, q) = (&ps[matrix.p.clone()], &qs[matrix.q.clone()]);
            decompress(factor, matrix, p, q, &mut values[matrix.elements.clone()]);
            redirect(factor, matrix, step);
        }
        Ok(())
    }
}

/// Adds the gradients to the errors, and computes every matrix's `P = M Q` into `ps`.
fn multiply<T: Float>(
    factors: &mut HashMap<usize, Factor>,
    matrices: &[Matrix],
    values: &[T],
    rank: usize,
    step: u64,
    ps: &mut [f32],
) {
    for matrix in matrices {
        let Matrix { parameter, rows, columns, .. } = *matrix;
        let fresh = || Factor { q: matrix::random(columns * rank, seed(parameter, step)), error: vec![0.0; rows * columns] };
        let factor = factors.entry(parameter).or_insert_with(fresh);
        for (error, value) in factor.error.iter_mut().zip(&values[matrix.elements.clone()]) {
            *error += value.to_single();
        }
        matrix::times(&factor.error, columns, &factor.q, &mut ps[matrix.p.clone()]);
    }
}

/// Calls `copy` for each range of uncompressed gradients, with its numbers.
fn copy_rest(rest: &[Range<usize>], mut numbers: &mut [f32], mut copy: impl FnMut(Range<usize>, &mut [f32])) {
    for range in rest {
        let (these, others) = numbers.split_at_mut(range.len());
        copy(range.clone(), these);
        numbers = others;
    }
}

/// Replaces a gradient by `P transpose(Q)`, and keeps what that lacks.
fn decompress<T: Float>(factor: &mut Factor, matrix: &Matrix, p: &[f32], q: &[f32], values: &mut [T]) {
    let mut is_finite = true;
    matrix::product(p, q, matrix.columns, |at, number| {
        let value = T::of_single(number);
        values[at] = value;
        // What rounding removes was not sent either.
        factor.error[at] -= value.to_single();
        is_finite &= value.to_single().is_finite();
    });
    if is_finite {
        factor.q.copy_from_slice(q);
    } else {
        // A rank's gradient was not finite, so no rank's is now, and the optimiser sees that. The
        // next step starts afresh.
        factor.error.fill(0.0);
        factor.q.fill(0.0);
    }
}

/// Power iteration never leaves zero: gives a new direction to a gradient that was zero, or of
/// lower rank.
fn redirect(factor: &mut Factor, matrix: &Matrix, step: u64) {
    for (row, direction) in factor.q.chunks_exact_mut(matrix.columns).enumerate() {
        if direction.iter().all(|&number| number == 0.0) {
            let seed = seed(matrix.parameter, step) ^ (row as u64 + 1) << 48;
            direction.copy_from_slice(&matrix::random(matrix.columns, seed));
        }
    }
}

/// Returns a seed that is the same on all ranks, and different for every matrix and step.
fn seed(parameter: usize, step: u64) -> u64 {
    (parameter as u64) << 32 ^ step
}

impl Hook for PowerSgd {
    fn name(&self) -> String {
        format!("PowerSGD of rank {} after {} steps", self.rank, self.start_after)
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        match bucket.dtype() {
            _ if bucket.step() < self.start_after => bucket.average(comm),
            DType::F32 => self.all_reduce::<f32>(bucket, comm),
            DType::F16 => self.all_reduce::<half::f16>(bucket, comm),
            DType::BF16 => self.all_reduce::<half::bf16>(bucket, comm),
            _ => bucket.average(comm),
        }
    }
}

impl std::fmt::Debug for PowerSgd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PowerSgd").field("rank", &self.rank).field("start_after", &self.start_after).finish_non_exhaustive()
    }
}
