//! Distributed k-means: each rank has its own points, and all ranks find the centres of all points.
//!
//! `cargo build --release --examples`, then `cargo run --release -- run -n 4 --
//! target/release/examples/k_means [POINTS]` with the number of points of each rank.

use std::process::ExitCode;

use kolo::{Communicator, ReduceOp};

type Point = [f64; 2];

/// The centres around which the points are drawn.
const TRUTH: [Point; 4] = [[0.0, 0.0], [8.0, 1.0], [3.0, 7.0], [9.0, 9.0]];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let count = std::env::args()
        .nth(1)
        .map_or(Ok(100_000), |count| count.parse().map_err(|_| format!("{count}: give a number of points")))?;
    let comm = Communicator::from_env()?;
    let points: Vec<Point> = draw(comm.rank() as u64).take(count).collect();

    // The first centres are points of rank 0, far from each other (Gonzalez 1985).
    let mut centres = [*points.first().ok_or("no points")?; TRUTH.len()];
    for chosen in 1..centres.len() {
        let far = |point: &Point| distance(point, &centres[nearest(point, &centres[..chosen])]);
        centres[chosen] = points.iter().copied().max_by(|one, other| far(one).total_cmp(&far(other))).unwrap_or_default();
    }
    comm.broadcast(centres.as_flattened_mut(), 0)?;

    let mut steps = 0;
    loop {
        // For each centre: the sums of its points' coordinates, and their number.
        let mut sums = [[0.0; 3]; TRUTH.len()];
        for point in &points {
            let [x, y, number] = &mut sums[nearest(point, &centres)];
            (*x, *y, *number) = (*x + point[0], *y + point[1], *number + 1.0);
        }
        comm.all_reduce(sums.as_flattened_mut(), ReduceOp::Sum)?;
        let before = centres;
        for (centre, [x, y, number]) in centres.iter_mut().zip(sums).filter(|(_, [.., number])| *number > 0.0) {
            *centre = [x / number, y / number];
        }
        steps += 1;
        // All ranks have the same sums, so they stop at the same step.
        if centres == before {
            break;
        }
    }
    if comm.rank() == 0 {
        println!("{} points, {steps} steps: {centres:.2?}", count * comm.world_size());
    }
    assert!(TRUTH.iter().all(|truth| distance(truth, &centres[nearest(truth, &centres)]) < 0.1));
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

/// Returns the number of the nearest centre.
fn nearest(point: &Point, centres: &[Point]) -> usize {
    (0..centres.len()).min_by(|&a, &b| distance(point, &centres[a]).total_cmp(&distance(point, &centres[b]))).unwrap_or(0)
}
