//! The collectives, blocking: each returns when this rank's part is done.
//!
//! Inside a host they run on the calling thread. What all have in common is said at [`Communicator`]; below, N is the world
//! size.

use super::{Communicator, calls};
use crate::error::Result;
use crate::exec::call::Call;
use crate::types::{Element, Rank, ReduceOp};

impl Communicator {
    fn run_safely(&self, call: Call) -> Result<()> {
        // SAFETY: `call` was made from slices that the caller of the public method lends until it returns: those that are
        // written are borrowed mutably, and those that are read cannot be written meanwhile.
        unsafe { self.exec.submit(call) }
    }

    /// Reduces all ranks' `buf`, element by element, into everybody's `buf`.
    ///
    /// All ranks give the same number of elements. Every rank gets the same bits.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let mut buf = [comm.rank() as f32; 4];
    /// comm.all_reduce(&mut buf, kolo::ReduceOp::Sum)?; // 0 + 1 + ... + N-1
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::all_reduce(buf, op))
    }

    /// As [`Communicator::all_reduce`], out of place: `recv` has as many elements as `send`.
    pub fn all_reduce_into<T: Element>(&self, send: &[T], recv: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::all_reduce_into(send, recv, op))
    }

    /// Copies the root's `buf` to everybody's.
    ///
    /// All ranks give the same number of elements.
    pub fn broadcast<T: Element>(&self, buf: &mut [T], root: Rank) -> Result<()> {
        self.run_safely(calls::broadcast(buf, root))
    }

    /// As [`Communicator::broadcast`], out of place: the root gives `send` as well, with as many elements as `recv`.
    pub fn broadcast_into<T: Element>(&self, send: Option<&[T]>, recv: &mut [T], root: Rank) -> Result<()> {
        self.run_safely(calls::broadcast_into(send, recv, root, self.rank())?)
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.run_safely(calls::barrier())
    }

    /// Reduces all ranks' `buf`, element by element, into the root's `buf`. Those of other ranks stay as they are.
    ///
    /// All ranks give the same number of elements.
    pub fn reduce<T: Element>(&self, buf: &mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        self.run_safely(calls::reduce(buf, op, root))
    }

    /// As [`Communicator::reduce`], out of place: the root gives `recv`, with as many elements as `send`.
    pub fn reduce_into<T: Element>(&self, send: &[T], recv: Option<&mut [T]>, op: ReduceOp, root: Rank) -> Result<()> {
        self.run_safely(calls::reduce_into(send, recv, op, root, self.rank())?)
    }

    /// Puts all ranks' `send` one after the other, in the order of ranks, into everybody's `recv`.
    ///
    /// All ranks give the same number of elements; `recv` has N times as many.
    pub fn all_gather<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        self.run_safely(calls::all_gather(send, recv))
    }

    /// As [`Communicator::all_gather`], in place: block `rank` of `buf`, of N equal ones, is what this rank gives.
    pub fn all_gather_in_place<T: Element>(&self, buf: &mut [T]) -> Result<()> {
        self.run_safely(calls::all_gather_in_place(buf, self.rank(), self.world_size())?)
    }

    /// As [`Communicator::all_gather`], where rank `i` gives `counts[i]` elements.
    ///
    /// `send` has `counts[rank]` elements, `recv` the sum. All ranks give the same counts.
    pub fn all_gather_v<T: Element>(&self, send: &[T], recv: &mut [T], counts: &[usize]) -> Result<()> {
        self.run_safely(calls::all_gather_v(send, recv, counts, self.world_size())?)
    }

    /// As [`Communicator::all_gather_v`], in place: this rank's block of `buf` is what it gives.
    pub fn all_gather_v_in_place<T: Element>(&self, buf: &mut [T], counts: &[usize]) -> Result<()> {
        self.run_safely(calls::all_gather_v_in_place(buf, counts, self.rank(), self.world_size())?)
    }

    /// Reduces all ranks' `send`, element by element, and gives rank `i` block `i` of the result, of N equal ones.
    ///
    /// All ranks give the same number of elements; `recv` has the N-th part.
    pub fn reduce_scatter<T: Element>(&self, send: &[T], recv: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::reduce_scatter(send, recv, op))
    }

    /// As [`Communicator::reduce_scatter`], in place: the result replaces block `rank` of `buf`. The other blocks may hold
    /// anything afterwards.
    pub fn reduce_scatter_in_place<T: Element>(&self, buf: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::reduce_scatter_in_place(buf, op, self.rank(), self.world_size())?)
    }

    /// As [`Communicator::reduce_scatter`], where block `i` has `counts[i]` elements.
    ///
    /// `send` has the sum of them, `recv` has `counts[rank]`. All ranks give the same counts.
    pub fn reduce_scatter_v<T: Element>(&self, send: &[T], recv: &mut [T], counts: &[usize], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::reduce_scatter_v(send, recv, counts, op, self.world_size())?)
    }

    /// As [`Communicator::reduce_scatter_v`], in place: the result replaces this rank's block of `buf`. The other blocks may
    /// hold anything afterwards.
    pub fn reduce_scatter_v_in_place<T: Element>(&self, buf: &mut [T], counts: &[usize], op: ReduceOp) -> Result<()> {
        self.run_safely(calls::reduce_scatter_v_in_place(buf, counts, op, self.rank(), self.world_size())?)
    }

    /// Block `j` of rank `i`'s `send` becomes block `i` of rank `j`'s `recv`, of N equal ones.
    ///
    /// All ranks give the same number of elements, a multiple of N, and as many to receive.
    pub fn all_to_all<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        self.run_safely(calls::all_to_all(send, recv, self.world_size())?)
    }

    /// As [`Communicator::all_to_all`], in place.
    pub fn all_to_all_in_place<T: Element>(&self, buf: &mut [T]) -> Result<()> {
        self.run_safely(calls::all_to_all_in_place(buf, self.world_size())?)
    }

    /// As [`Communicator::all_to_all`], where this rank sends `send_counts[j]` elements to rank `j` and receives
    /// `recv_counts[i]` from rank `i`.
    ///
    /// Both buffers have the sum of their counts. What one rank sends to another, that one must expect.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Counts`] if it does not.
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        self.run_safely(calls::all_to_all_v(send, send_counts, recv, recv_counts, self.world_size())?)
    }

    /// Puts all ranks' `send` one after the other, in the order of ranks, into the root's `recv`.
    ///
    /// All ranks give the same number of elements; the root gives `recv`, with N times as many.
    pub fn gather<T: Element>(&self, send: &[T], recv: Option<&mut [T]>, root: Rank) -> Result<()> {
        self.run_safely(calls::gather(send, recv, root, self.rank())?)
    }

    /// As [`Communicator::gather`], in place: block `rank` of `buf`, of N equal ones, is what this rank gives. Only the root's
    /// `buf` is written.
    pub fn gather_in_place<T: Element>(&self, buf: &mut [T], root: Rank) -> Result<()> {
        self.run_safely(calls::gather_in_place(buf, root, self.rank(), self.world_size())?)
    }

    /// Gives rank `i` block `i` of the root's `send`, of N equal ones.
    ///
    /// All ranks give the same number of elements to receive; the root gives `send`, with N times as many.
    pub fn scatter<T: Element>(&self, send: Option<&[T]>, recv: &mut [T], root: Rank) -> Result<()> {
        self.run_safely(calls::scatter(send, recv, root, self.rank())?)
    }

    /// As [`Communicator::scatter`], in place: what this rank receives replaces block `rank` of its `buf`, of N equal ones.
    pub fn scatter_in_place<T: Element>(&self, buf: &mut [T], root: Rank) -> Result<()> {
        self.run_safely(calls::scatter_in_place(buf, root, self.rank(), self.world_size())?)
    }

    /// Sends `buf` to a peer, which calls [`Communicator::recv`] with as many elements of the same type.
    ///
    /// May return before the peer has called it, or not: two ranks that both send first and receive then may wait for each
    /// other until the deadline. Use [`Communicator::send_recv`] or [`Communicator::scope`] for that.
    pub fn send<T: Element>(&self, buf: &[T], to: Rank) -> Result<()> {
        self.run_safely(calls::send(buf, to))
    }

    /// Receives what a peer sends. Messages of one peer come in the order in which it sent them.
    pub fn recv<T: Element>(&self, buf: &mut [T], from: Rank) -> Result<()> {
        self.run_safely(calls::recv(buf, from))
    }

    /// Receives what any peer sends, and returns which: the message that comes first, of those that no earlier receive waits for.
    ///
    /// Every rank that sends gives as many elements of the same type.
    ///
    /// # Errors
    ///
    /// If nobody sends until the deadline, it names the lowest of the other ranks, silent as all of them.
    pub fn recv_any<T: Element>(&self, buf: &mut [T]) -> Result<Rank> {
        let mut source = self.rank();
        let call = calls::recv_any(buf, &mut source, self.rank());
        self.run_safely(call)?;
        Ok(source)
    }

    /// Sends to one peer and receives from another (or the same) at once.
    pub fn send_recv<T: Element, U: Element>(&self, send: &[T], to: Rank, recv: &mut [U], from: Rank) -> Result<()> {
        let calls = [calls::send(send, to), calls::recv(recv, from)];
        // SAFETY: as in `run_safely`.
        unsafe { self.exec.submit_together(calls) }
    }
}
