//! Ranks that are threads of one process: for tests, and for programs that use threads where others
//! use processes.

use kolo::{Communicator, ReduceOp};

fn main() -> kolo::Result<()> {
    let comms = Communicator::in_process(4)?;
    let sums = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.iter().map(|comm| scope.spawn(|| sum_of_ranks(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect::<kolo::Result<Vec<_>>>()
    })?;
    assert_eq!(sums, [6, 6, 6, 6]);
    println!("every thread has the sum: {sums:?}");
    Ok(())
}

fn sum_of_ranks(comm: &Communicator) -> kolo::Result<u64> {
    let mut sum = [comm.rank() as u64];
    comm.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}
