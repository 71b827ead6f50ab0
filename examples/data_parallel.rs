//! The reducer: averages gradients over all ranks while the backward pass computes further ones.

use std::time::{Duration, Instant};

use kolo::ddp::{Parameter, Reducer, StepStatistics};
use kolo::{Communicator, DType};

const LAYERS: usize = 12;
const WIDTH: usize = 1024;

fn main() -> kolo::Result<()> {
    let comm = Communicator::from_env()?;
    for overlap in [true, false] {
        let (took, statistics) = train(&comm, overlap)?;
        if comm.rank() == 0 {
            println!(
                "overlap {overlap}: a step took {took:.1?}, of which {:.1?} waiting; {} MiB in {} buckets took {:.1?}, {:.0} % of it hidden",
                statistics.waited,
                statistics.bytes() >> 20,
                statistics.buckets.len(),
                statistics.communicated(),
                100.0 * statistics.overlap()
            );
        }
    }
    Ok(())
}

/// Returns the shortest of a few steps on this rank.
fn train(comm: &Communicator, overlap: bool) -> kolo::Result<(Duration, StepStatistics)> {
    let parameters = (0..LAYERS).map(|layer| Parameter::new(format!("layer{layer}.weight"), [WIDTH, WIDTH], DType::F32));
    let mut reducer = Reducer::builder().parameters(parameters).overlap(overlap).build(comm)?;
    let mut best = (Duration::MAX, StepStatistics::default());
    for _ in 0..10 {
        comm.barrier()?;
        let began = Instant::now();
        let step = reducer.begin()?;
        for layer in (0..LAYERS).rev() {
            let mut gradient = step.view::<f32>(layer)?;
            backward(layer + comm.rank(), &mut gradient);
            gradient.ready()?;
        }
        step.finish()?;
        if began.elapsed() < best.0 {
            best = (began.elapsed(), reducer.statistics());
        }
        let expected = (0..comm.world_size()).map(|rank| value(rank, 0)).sum::<f32>() / comm.world_size() as f32;
        assert!((reducer.gradient::<f32>(0)?[0] - expected).abs() < 1e-3);
    }
    Ok(best)
}

fn value(seed: usize, element: usize) -> f32 {
    (seed + element % 7) as f32
}

/// Stands for a layer's backward pass: it takes some milliseconds and writes the gradient into its
/// bucket.
fn backward(seed: usize, gradient: &mut [f32]) {
    for (element, place) in gradient.iter_mut().enumerate() {
        *place = (0..4).fold(value(seed, element), |sum, _| sum * 0.5 * 2.0);
    }
}
