//! Buffers that the ranks of a host share: collectives on them need no staging.

use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp};

const LEN: usize = 1 << 22;

fn main() -> kolo::Result<()> {
    let comm = Communicator::from_env()?;
    let mut private = vec![1.0f32; LEN];
    // Allocating is a collective call. The buffer is used as a slice.
    let mut registered = comm.alloc::<f32>(LEN)?;

    let private = best(&comm, &mut private)?;
    let registered = best(&comm, &mut registered)?;
    if comm.rank() == 0 {
        println!("16 MiB in private memory: {private:.1?}, registered: {registered:.1?}");
    }
    Ok(())
}

/// Returns the shortest of a few all-reduces on this rank.
fn best(comm: &Communicator, buf: &mut [f32]) -> kolo::Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..10 {
        buf.fill(1.0);
        comm.barrier()?;
        let began = Instant::now();
        comm.all_reduce(buf, ReduceOp::Sum)?;
        best = best.min(began.elapsed());
        assert!(buf.iter().all(|&sum| sum == comm.world_size() as f32));
    }
    Ok(best)
}
