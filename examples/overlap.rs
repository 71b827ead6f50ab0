//! Communication while the program computes. Training does this: it sends the gradients of the last
//! layers while it computes those of the first.

use kolo::{Communicator, ReduceOp};

const LAYERS: usize = 8;
const WEIGHTS: usize = 1 << 18;

fn main() -> kolo::Result<()> {
    let comm = Communicator::from_env()?;

    // A nonblocking operation takes its buffer and gives it back when it is done.
    let mut under_way = Vec::new();
    for layer in (0..LAYERS).rev() {
        let gradients = backward(layer);
        under_way.push((layer, comm.start_all_reduce(gradients, ReduceOp::Average)?));
    }
    for (layer, work) in under_way {
        assert_eq!(work.wait()?, backward(layer), "all ranks have the same gradients, so has their average");
    }

    // Or it borrows a buffer that the program keeps: all operations of a scope end with the scope.
    let mut weights = vec![comm.rank() as f32; WEIGHTS];
    let mut slowest = [comm.rank() as u64];
    let checksum = comm.scope(|scope| {
        scope.broadcast(&mut weights, 0)?;
        scope.all_reduce(&mut slowest, ReduceOp::Max)?;
        Ok((0..1_000_000u64).fold(0, |sum, number| sum ^ number.wrapping_mul(31)))
    })?;
    assert!(weights.iter().all(|&weight| weight == 0.0));
    if comm.rank() == 0 {
        println!("computed {checksum} meanwhile; the last of the ranks is {}", slowest[0]);
    }
    Ok(())
}

/// Stands for the backward pass of one layer.
fn backward(layer: usize) -> Vec<f32> {
    (0..WEIGHTS).map(|weight| ((layer * 31 + weight * 17) % 64) as f32).collect()
}
