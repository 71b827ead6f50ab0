//! Groups of ranks: a grid in which each rank is in one row and one column, as in tensor and data
//! parallel training.

use kolo::{Communicator, ReduceOp};

fn main() -> kolo::Result<()> {
    let comm = Communicator::from_env()?;
    // The grid is as close to a square as possible.
    let world_size = comm.world_size();
    let columns = (1..=world_size).rev().find(|&columns| columns * columns <= world_size && world_size.is_multiple_of(columns));
    let columns = columns.unwrap_or(1);
    let (row, column) = (comm.rank() / columns, comm.rank() % columns);

    let row_comm = comm.split(row, column)?;
    let column_comm = comm.split(column, row)?;
    assert_eq!((row_comm.rank(), column_comm.rank()), (column, row));

    let mut sum = [comm.rank() as u64];
    row_comm.all_reduce(&mut sum, ReduceOp::Sum)?;
    column_comm.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum[0] as usize, world_size * (world_size - 1) / 2, "rows, then columns: all ranks");

    let mut rows = vec![0u64; world_size];
    comm.all_gather(&[row as u64], &mut rows)?;
    if comm.rank() == 0 {
        println!("{} rows of {columns}; the ranks' rows: {rows:?}", world_size / columns);
    }
    Ok(())
}
