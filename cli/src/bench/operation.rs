//! The operations that can be measured: their buffers, their calls and their bus bandwidth factors.

use clap::ValueEnum;
use kolo::{Communicator, Element, Op, ReduceOp, Result};

/// An operation that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Operation {
    /// Each rank gets the reduction of all buffers
    AllReduce,
    /// Each rank gets the root's buffer
    Broadcast,
    /// Each rank waits for all ranks
    Barrier,
    /// The root gets the reduction of all buffers
    Reduce,
    /// Each rank gets all blocks
    AllGather,
    /// Each rank gets its block of the reduction
    ReduceScatter,
    /// Each rank exchanges blocks with all ranks
    AllToAll,
    /// The root gets all blocks
    Gather,
    /// Each rank gets its block of the root's buffer
    Scatter,
    /// Each rank sends to the next rank and receives from the previous one
    SendRecv,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        self.collective().map_or("send_recv", Op::name)
    }

    /// Returns the collective, or `None` for messages between pairs of ranks.
    pub(crate) fn collective(self) -> Option<Op> {
        Some(match self {
            Operation::AllReduce => Op::AllReduce,
            Operation::Broadcast => Op::Broadcast,
            Operation::Barrier => Op::Barrier,
            Operation::Reduce => Op::Reduce,
            Operation::AllGather => Op::AllGather,
            Operation::ReduceScatter => Op::ReduceScatter,
            Operation::AllToAll => Op::AllToAll,
            Operation::Gather => Op::Gather,
            Operation::Scatter => Op::Scatter,
            Operation::SendRecv => return None,
        })
    }

    pub(crate) fn reduces(self) -> bool {
        matches!(self, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter)
    }

    pub(crate) fn has_root(self) -> bool {
        matches!(self, Operation::Broadcast | Operation::Reduce | Operation::Gather | Operation::Scatter)
    }

    pub(crate) fn has_in_place(self) -> bool {
        !matches!(self, Operation::Barrier | Operation::SendRecv)
    }

    /// Returns whether the buffer has a block for each rank.
    fn has_blocks(self) -> bool {
        use Operation::*;
        matches!(self, AllGather | ReduceScatter | AllToAll | Gather | Scatter)
    }

    /// Returns the elements of the whole buffer for a size in bytes: at least one for each block.
    pub(crate) fn elements(self, bytes: u64, element: usize, ranks: usize) -> usize {
        let unit = if self.has_blocks() { ranks } else { 1 };
        match (self, bytes) {
            (Operation::Barrier, _) | (_, 0) => 0,
            (_, bytes) => (bytes as usize / element / unit).max(1) * unit,
        }
    }

    /// Returns the elements that one rank sends and receives, for a whole buffer of `elements`.
    pub(crate) fn shares(self, elements: usize, ranks: usize) -> (usize, usize) {
        match self {
            Operation::AllGather | Operation::Gather => (elements / ranks, elements),
            Operation::ReduceScatter | Operation::Scatter => (elements, elements / ranks),
            _ => (elements, elements),
        }
    }

    /// Returns how many times its size an operation moves at least over the busiest link: the
    /// factors of nccl-tests.
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            _ if self.has_blocks() => (n - 1.0) / n,
            _ => 1.0,
        }
    }

    /// Calls the operation once, from `send` to `recv`. In place, `recv` holds the whole buffer.
    pub(crate) fn call<T: Element>(
        self,
        comm: &Communicator,
        (redop, root): (ReduceOp, usize),
        send: &[T],
        recv: &mut [T],
        in_place: bool,
    ) -> Result<()> {
        let is_root = comm.rank() == root;
        match (self, in_place) {
            (Operation::AllReduce, true) => comm.all_reduce(recv, redop),
            (Operation::AllReduce, false) => comm.all_reduce_into(send, recv, redop),
            (Operation::Broadcast, true) => comm.broadcast(recv, root),
            (Operation::Broadcast, false) => comm.broadcast_into(is_root.then_some(send), recv, root),
            (Operation::Barrier, _) => comm.barrier(),
            (Operation::Reduce, true) => comm.reduce(recv, redop, root),
            (Operation::Reduce, false) => comm.reduce_into(send, is_root.then_some(recv), redop, root),
            (Operation::AllGather, true) => comm.all_gather_in_place(recv),
            (Operation::AllGather, false) => comm.all_gather(send, recv),
            (Operation::ReduceScatter, true) => comm.reduce_scatter_in_place(recv, redop),
            (Operation::ReduceScatter, false) => comm.reduce_scatter(send, recv, redop),
            (Operation::AllToAll, true) => comm.all_to_all_in_place(recv),
            (Operation::AllToAll, false) => comm.all_to_all(send, recv),
            (Operation::Gather, true) => comm.gather_in_place(recv, root),
            (Operation::Gather, false) => comm.gather(send, is_root.then_some(recv), root),
            (Operation::Scatter, true) => comm.scatter_in_place(recv, root),
            (Operation::Scatter, false) => comm.scatter(is_root.then_some(send), recv, root),
            (Operation::SendRecv, _) if comm.world_size() == 1 => {
                recv.copy_from_slice(send);
                Ok(())
            }
            (Operation::SendRecv, _) => {
                let (rank, ranks) = (comm.rank(), comm.world_size());
                comm.send_recv(send, (rank + 1) % ranks, recv, (rank + ranks - 1) % ranks)
            }
        }
    }
}
