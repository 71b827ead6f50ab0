//! The matrix products of PowerSGD. All loops run along memory. Ranks with the same numbers get the
//! same bits.
//!
//! A matrix `M` is row-major. A factor is transposed: one row for each of its few columns
//! ("vectors").

/// Partial sums of a dot product, which the compiler keeps in vector registers.
const LANES: usize = 16;

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks_a, chunks_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = chunks_a.remainder().iter().zip(chunks_b.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in chunks_a.zip(chunks_b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `to += factor * from`
fn add(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// `P = M Q`
pub(super) fn times(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]) {
    let rows = m.len() / columns;
    for (row, values) in m.chunks_exact(columns).enumerate() {
        for (vector, q) in q.chunks_exact(columns).enumerate() {
            p[vector * rows + row] = dot(values, q);
        }
    }
}

/// `Q = transpose(M) P`
pub(super) fn transposed_times(m: &[f32], columns: usize, p: &[f32], q: &mut [f32]) {
    let rows = m.len() / columns;
    q.fill(0.0);
    for (row, values) in m.chunks_exact(columns).enumerate() {
        for (vector, q) in q.chunks_exact_mut(columns).enumerate() {
            add(q, p[vector * rows + row], values);
        }
    }
}

/// Calls `hand_over` with the index and value of every element of `P transpose(Q)`.
pub(super) fn product(p: &[f32], q: &[f32], columns: usize, mut hand_over: impl FnMut(usize, f32)) {
    let rank = q.len() / columns;
    let rows = p.len() / rank;
    let mut line = vec![0.0; columns];
    for row in 0..rows {
        line.fill(0.0);
        for (vector, q) in q.chunks_exact(columns).enumerate() {
            add(&mut line, p[vector * rows + row], q);
        }
        line.iter().enumerate().for_each(|(column, &number)| hand_over(row * columns + column, number));
    }
}

/// Makes the vectors orthonormal (modified Gram-Schmidt, twice: once is not enough in `f32`). A
/// vector that depends on those before it becomes zero.
pub(super) fn orthonormalise(p: &mut [f32], rows: usize) {
    /// The remainder of a dependent vector is noise below this share of its length.
    const NOISE: f32 = 1e-5;
    for vector in 0..p.len() / rows {
        let (before, rest) = p.split_at_mut(vector * rows);
        let current = &mut rest[..rows];
        let length = dot(current, current).sqrt();
        for _ in 0..2 {
            for other in before.chunks_exact(rows) {
                add(current, -dot(current, other), other);
            }
        }
        let left = dot(current, current).sqrt();
        if left.is_nan() || left > NOISE * length {
            current.iter_mut().for_each(|number| *number /= left);
        } else {
            current.fill(0.0);
        }
    }
}

/// Returns normally distributed numbers (Box-Muller) from a seed (SplitMix64).
pub(super) fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // In (0, 1]: its logarithm is finite.
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON
    };
    let mut normal = || (-2.0 * uniform().ln()).max(0.0).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..count).map(|_| normal() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_definition() {
        let (rows, columns, rank) = (5, 37, 3);
        let (m, q) = (random(rows * columns, 1), random(rank * columns, 2));
        let mut p = vec![0.0; rank * rows];
        times(&m, columns, &q, &mut p);
        let mut back = vec![0.0; rank * columns];
        transposed_times(&m, columns, &p, &mut back);
        for vector in 0..rank {
            for row in 0..rows {
                let sum: f64 = (0..columns).map(|c| f64::from(m[row * columns + c]) * f64::from(q[vector * columns + c])).sum();
                assert!((f64::from(p[vector * rows + row]) - sum).abs() < 1e-4);
            }
            for column in 0..columns {
                let sum: f64 = (0..rows).map(|r| f64::from(m[r * columns + column]) * f64::from(p[vector * rows + r])).sum();
                assert!((f64::from(back[vector * columns + column]) - sum).abs() < 1e-3);
            }
        }
        product(&p, &q, columns, |at, number| {
            let (row, column) = (at / columns, at % columns);
            let sum: f32 = (0..rank).map(|v| p[v * rows + row] * q[v * columns + column]).sum();
            assert!((number - sum).abs() < 1e-3);
        });
    }

    #[test]
    fn vectors_become_orthonormal_or_zeros() {
        let rows = 50;
        let mut p = random(4 * rows, 3);
        // The third is a combination of the first two.
        for row in 0..rows {
            p[2 * rows + row] = p[row] - 3.0 * p[rows + row];
        }
        orthonormalise(&mut p, rows);
        let vectors: Vec<&[f32]> = p.chunks_exact(rows).collect();
        assert!(vectors[2].iter().all(|&number| number == 0.0));
        for (i, one) in vectors.iter().enumerate() {
            for (j, other) in vectors.iter().enumerate() {
                let expected = if i == j && i != 2 { 1.0 } else { 0.0 };
                assert!((dot(one, other) - expected).abs() < 1e-5, "{i} {j}: {}", dot(one, other));
            }
        }
        let mut zeros = vec![0.0; 2 * rows];
        orthonormalise(&mut zeros, rows);
        assert_eq!(zeros, vec![0.0; 2 * rows]);
    }

    #[test]
    fn random_numbers_are_normal() {
        let numbers = random(10_000, 7);
        let mean = numbers.iter().sum::<f32>() / 1e4;
        let variance = numbers.iter().map(|number| (number - mean).powi(2)).sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
