//! Operations on numbers whose results are known.

use kolo::{Communicator, DType, ReduceOp, Result, bf16, f16};

use super::script::{Call, Collect, How};
use super::system;
use crate::bench::measure::{Plan, count_wrong};
use crate::bench::operation::Operation;
use crate::bench::pattern::{Pattern, STALE, fill, small};

/// Runs a call and returns how many elements of this rank's result are wrong.
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
        other => unreachable!("{other} is not checked"),
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
    let number = |place: usize| small(reduces, rank, place, salt, ranks);
    let mut send = vec![T::from_small(0); send_len];
    fill(&mut send, number);
    let prepare = |recv: &mut [T]| match in_place {
        true => fill(recv, number),
        false => recv.fill(T::from_small(STALE)),
    };
    let count = |recv: &[T]| count_wrong(op, reduces, comm, recv, &plan, salt, in_place, root);
    if call.how == How::Registered {
        let mut recv = comm.alloc::<T>(recv_len)?;
        prepare(&mut recv);
        op.call(comm, (redop, root), &send, &mut recv, in_place)?;
        return Ok(count(&recv));
    }
    let mut recv = vec![T::from_small(STALE); recv_len];
    prepare(&mut recv);
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
        // These have no form in place.
        Operation::Barrier | Operation::SendRecv => return Ok(recv),
    };
    // The second call, in the same order on all ranks.
    comm.barrier()?;
    Ok(work.wait()?)
}

/// Sends messages from the other ranks to the root, which receives from any. Returns how many bytes
/// are wrong on this rank.
pub(crate) fn collect(comm: &Communicator, collect: &Collect) -> Result<u64> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let Collect { messages, bytes, salt, .. } = *collect;
    let root = collect.root % ranks;
    let byte = |from: usize, message: usize, place: usize| small(None, from, place, salt ^ (message as u32) << 8, ranks) as u8;
    let mut wrong = 0;
    if rank == root {
        let mut received = vec![0; ranks];
        let mut buf = vec![0u8; bytes];
        for _ in 0..messages * (ranks - 1) {
            buf.fill(STALE as u8);
            let from = comm.recv_any(&mut buf)?;
            // Messages of one rank arrive in the order in which that rank sent them.
            let message = received[from];
            received[from] += 1;
            wrong += buf.iter().enumerate().filter(|&(place, &got)| got != byte(from, message, place)).count() as u64;
        }
        wrong +=
            received.iter().enumerate().filter(|&(from, &count)| count != if from == root { 0 } else { messages }).count() as u64;
    } else {
        for message in 0..messages {
            let buf: Vec<u8> = (0..bytes).map(|place| byte(rank, message, place)).collect();
            comm.send(&buf, root)?;
        }
    }
    // No rank sends the messages of a later step before all have received those of this step.
    comm.barrier()?;
    Ok(wrong)
}

/// Allocates registered words on each rank and forks a child that frees them. Returns how many
/// words are wrong in the parent then and after an all-reduce of them.
pub(crate) fn fork(comm: &Communicator, words: usize, salt: u32) -> Result<u64> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let word = |rank: usize, place: usize| u64::from(small(None, rank, place, salt, ranks));
    let mut memory = comm.alloc::<u64>(words)?;
    memory.iter_mut().enumerate().for_each(|(place, into)| *into = word(rank, place));
    system::free_in_a_child(&memory);
    let changed = memory.iter().enumerate().filter(|&(place, &got)| got != word(rank, place)).count();
    comm.all_reduce(&mut memory, ReduceOp::Sum)?;
    let sum = |place: usize| (0..ranks).map(|rank| word(rank, place)).sum::<u64>();
    let wrong = memory.iter().enumerate().filter(|&(place, &got)| got != sum(place)).count();
    Ok((changed + wrong) as u64)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// Every operation in every form computes the right result, and a wrong one is noticed.
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
                    // One rank contributes wrong numbers.
                    let salt = if comm.rank() == 1 { 8 } else { 9 };
                    let (redop, how) = (ReduceOp::Sum, How::InPlace);
                    let call = Call { op: Operation::AllReduce, dtype: DType::I32, redop, root: 0, bytes: 1000, how, salt };
                    assert!(carry_out(&comm, &call).unwrap() > 0);
                });
            }
        });
    }

    #[test]
    fn messages_from_any_rank_are_checked() {
        std::thread::scope(|scope| {
            for comm in Communicator::in_process(3).unwrap() {
                scope.spawn(move || {
                    for bytes in [1, 17, 6001] {
                        let as_planned = Collect { root: 4, messages: 20, bytes, salt: 3 };
                        assert_eq!(collect(&comm, &as_planned).unwrap(), 0, "{as_planned:?}");
                    }
                    // Rank 2 sends wrong bytes.
                    let salt = if comm.rank() == 2 { 4 } else { 3 };
                    let wrong = collect(&comm, &Collect { root: 4, messages: 20, bytes: 601, salt }).unwrap();
                    assert_eq!(wrong > 0, comm.rank() == 1);
                });
            }
        });
    }
}
