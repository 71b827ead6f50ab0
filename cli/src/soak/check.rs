//! One collective with numbers of which it is known what must come out.

use kolo::{Communicator, DType, ReduceOp, Result, bf16, f16};

use super::script::{Call, How};
use crate::bench::measure::{Plan, count_wrong};
use crate::bench::operation::Operation;
use crate::bench::pattern::{Pattern, STALE, small};

/// Carries a call out; how many elements of this rank's result are wrong.
pub(crate) fn carry_out(comm: &Communicator, call: &Call) -> Result<u64> {
    match call.dtype {
        DType::F32 => typed::<f32>(comm, call),
        DType::F64 => typed::<f64>(comm, call),
        DType::F16 => typed::<f16>(comm, call),
        DType::BF16 => typed::<bf16>(comm, call),
        DType::I8 => typed::<i8>(comm, call),
        DType::U8 | DType::Bool => typed::<u8>(comm, call),
        DType::I16 => typed::<i16>(comm, call),
        DType::U16 => typed::<u16>(comm, call),
        DType::I32 => typed::<i32>(comm, call),
        DType::U32 => typed::<u32>(comm, call),
        DType::I64 => typed::<i64>(comm, call),
        DType::U64 => typed::<u64>(comm, call),
    }
}

fn typed<T: Pattern>(comm: &Communicator, call: &Call) -> Result<u64> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let Call { op, redop, bytes, salt, .. } = *call;
    let root = call.root % ranks;
    let plan = Plan::once::<T>(op, ranks, bytes);
    let in_place = call.how != How::OutOfPlace && op.has_in_place();
    let reduces = op.reduces().then_some(redop);
    let (send_len, recv_len) = if in_place { (0, plan.elements) } else { plan.lengths() };
    let number = |place: usize| T::from_small(small(reduces, rank, place, salt, ranks));
    let send: Vec<T> = (0..send_len).map(number).collect();
    let fill = |recv: &mut [T]| {
        for (place, element) in recv.iter_mut().enumerate() {
            *element = if in_place { number(place) } else { T::from_small(STALE) };
        }
    };
    let count = |recv: &[T]| count_wrong(op, reduces, comm, recv, &plan, 0, salt, in_place, root);
    if call.how == How::Registered {
        let mut recv = comm.alloc::<T>(recv_len)?;
        fill(&mut recv);
        op.call(comm, (redop, root), &send, &mut recv, in_place)?;
        return Ok(count(&recv));
    }
    let mut recv = vec![T::from_small(STALE); recv_len];
    fill(&mut recv);
    if call.how == How::Asynchronous && in_place {
        recv = start(comm, op, redop, root, recv)?;
    } else {
        op.call(comm, (redop, root), &send, &mut recv, in_place)?;
    }
    Ok(count(&recv))
}

/// In place, in the background, while this rank asks for something else.
fn start<T: Pattern>(comm: &Communicator, op: Operation, redop: ReduceOp, root: usize, recv: Vec<T>) -> Result<Vec<T>> {
    let work = match op {
        Operation::AllReduce => comm.start_all_reduce(recv, redop)?,
        Operation::Broadcast => comm.start_broadcast(recv, root)?,
        Operation::Reduce => comm.start_reduce(recv, redop, root)?,
        Operation::AllGather => comm.start_all_gather_in_place(recv)?,
        Operation::ReduceScatter => comm.start_reduce_scatter_in_place(recv, redop)?,
        Operation::AllToAll => comm.start_all_to_all_in_place(recv)?,
        Operation::Gather => comm.start_gather_in_place(recv, root)?,
        Operation::Scatter => comm.start_scatter_in_place(recv, root)?,
        // These are never in place.
        Operation::Barrier | Operation::SendRecv => return Ok(recv),
    };
    // Behind it, in the same order on all ranks.
    comm.barrier()?;
    work.wait()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// Every operation in every way computes what it should, and something else is noticed.
    #[test]
    fn results_are_checked() {
        std::thread::scope(|scope| {
            for comm in Communicator::in_process(3).unwrap() {
                scope.spawn(move || {
                    for op in Operation::value_variants() {
                        for how in [How::OutOfPlace, How::InPlace, How::Registered, How::Asynchronous] {
                            let call =
                                Call { op: *op, dtype: DType::I32, redop: ReduceOp::Sum, root: 5, bytes: 1000, how, salt: 9 };
                            assert_eq!(carry_out(&comm, &call).unwrap(), 0, "{call:?}");
                        }
                    }
                    // One rank's numbers are others than they should be.
                    let salt = if comm.rank() == 1 { 8 } else { 9 };
                    let (redop, how) = (ReduceOp::Sum, How::InPlace);
                    let call = Call { op: Operation::AllReduce, dtype: DType::I32, redop, root: 0, bytes: 1000, how, salt };
                    assert!(carry_out(&comm, &call).unwrap() > 0);
                });
            }
        });
    }
}
