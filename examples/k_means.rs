//! Distributed k-means: each rank has its own points, and all ranks find the centres of all points.
//!
//! `cargo build --release --examples`, then `cargo run --release -- run -n 4 --
//! target/release/examples/k_means [POINTS]` with the number of points of each rank.

use kolo::{Communicator, ReduceOp};

type Point = [f64; 2];

/// The centres around which the points are drawn.
const TRUTH: [Point; 4] = [[0.0, 0.0], [8.0, 1.0], [3.0, 7.0], [9.0, 9.0]];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count = std::env::args().nth(1).map_or(Ok(100_000), |count| count.parse())?;
    let comm = Communicator::from_env()?;
    let points: Vec<Point> = draw(comm.rank() as u64).take(count).collect();

    // Rank 0 chooses the first centres: points of its own, far from each other (Gonzalez 1985).
    let mut centres = [0.0; 2 * TRUTH.len()];
    if comm.rank() == 0 {
        let mut chosen = vec![*points.first().ok_or("no points")?];
        while chosen.len() < TRUTH.len() {
            let far = |point: &Point| chosen.iter().map(|centre| distance(point, centre)).fold(f64::MAX, f64::min);
            chosen.extend(points.iter().copied().max_by(|one, other| far(one).total_cmp(&far(other))));
        }
        centres.copy_from_slice(chosen.as_flattened());
    }
    comm.broadcast(&mut centres, 0)?;

    for step in 1.. {
        // By centre: the sum of its points on this rank, and their number; then of all ranks.
        let mut sums = [0.0; 3 * TRUTH.len()];
        for point in &points {
            let sum = &mut sums[3 * nearest(point, centres.as_chunks().0)..][..3];
            (sum[0], sum[1], sum[2]) = (sum[0] + point[0], sum[1] + point[1], sum[2] + 1.0);
        }
        comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        let before = centres;
        for (centre, sum) in centres.chunks_mut(2).zip(sums.chunks(3)).filter(|(_, sum)| sum[2] > 0.0) {
            (centre[0], centre[1]) = (sum[0] / sum[2], sum[1] / sum[2]);
        }
        // All ranks have the same sums, so all of them stop at the same step.
        if centres.iter().zip(before).all(|(now, before)| (now - before).abs() < 1e-9) {
            if comm.rank() == 0 {
                println!("{} points, {step} steps: {:.2?}", count * comm.world_size(), centres.as_chunks::<2>().0);
            }
            break;
        }
    }
    assert!(TRUTH.iter().all(|truth| centres.as_chunks().0.iter().any(|centre| distance(truth, centre) < 0.1)));
    Ok(())
}

/// Points in squares around the true centres, with the generator xorshift64 (Marsaglia 2003).
fn draw(seed: u64) -> impl Iterator<Item = Point> {
    let mut state = seed + 0x9E37_79B9_7F4A_7C15;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as f64 / u64::MAX as f64
    };
    std::iter::repeat_with(move || TRUTH[(random() * 4.0) as usize % 4].map(|middle| middle + 4.0 * random() - 2.0))
}

fn distance(one: &Point, other: &Point) -> f64 {
    (one[0] - other[0]).hypot(one[1] - other[1])
}

fn nearest(point: &Point, centres: &[Point]) -> usize {
    (0..centres.len())
        .min_by(|&one, &other| distance(point, &centres[one]).total_cmp(&distance(point, &centres[other])))
        .unwrap_or(0)
}
