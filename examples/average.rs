//! The smallest useful program: each rank computes a number, and all ranks get the average.
//!
//! Build it with `cargo build --release --examples`, and start it with `cargo run --release -- run
//! -n 4 -- target/release/examples/average`, or alone.

use kolo::{Communicator, ReduceOp};

fn main() -> kolo::Result<()> {
    let comm = Communicator::from_env()?;
    let mut gradients = vec![comm.rank() as f32; 1 << 20];
    comm.all_reduce(&mut gradients, ReduceOp::Average)?;

    let expected = (comm.world_size() - 1) as f32 / 2.0;
    assert!(gradients.iter().all(|&gradient| gradient == expected));
    if comm.rank() == 0 {
        println!("world size {}, transport {}: the average rank is {expected}", comm.world_size(), comm.transport_name());
    }
    Ok(())
}
