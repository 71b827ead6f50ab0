//! Asynchronous operations that own their buffers: each returns a [`Work`] at once, which gives the buffers back.
//!
//! Any type that lends a slice of elements can be a buffer: `Vec`, `Box<[T]>`, arrays, [`crate::Registered`].

use super::{Communicator, calls};
use crate::error::Result;
use crate::exec::work::Work;
use crate::types::{Element, Rank, ReduceOp};

impl Communicator {
    /// Starts [`Communicator::all_reduce`].
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let work = comm.start_all_reduce(vec![1.0f32; 1000], kolo::ReduceOp::Sum)?;
    /// // compute something else
    /// let bucket = work.wait()?;
    /// # assert_eq!(bucket.len(), 1000);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn start_all_reduce<T: Element, B>(&self, buf: B, op: ReduceOp) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.exec.start(buf, |buf| Ok(calls::all_reduce(buf.as_mut(), op)))
    }

    /// Starts [`Communicator::all_reduce_into`].
    pub fn start_all_reduce_into<T: Element, S, R>(&self, send: S, recv: R, op: ReduceOp) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        self.exec.start((send, recv), |(send, recv)| Ok(calls::all_reduce_into(send.as_ref(), recv.as_mut(), op)))
    }

    /// Starts [`Communicator::broadcast`].
    pub fn start_broadcast<T: Element, B>(&self, buf: B, root: Rank) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.exec.start(buf, |buf| Ok(calls::broadcast(buf.as_mut(), root)))
    }

    /// Starts [`Communicator::broadcast_into`].
    pub fn start_broadcast_into<T: Element, S, R>(&self, send: Option<S>, recv: R, root: Rank) -> Result<Work<(Option<S>, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((send, recv), |(send, recv)| {
            calls::broadcast_into(send.as_ref().map(AsRef::as_ref), recv.as_mut(), root, rank)
        })
    }

    /// Starts [`Communicator::barrier`].
    pub fn start_barrier(&self) -> Result<Work<()>> {
        self.exec.start((), |()| Ok(calls::barrier()))
    }

    /// Starts [`Communicator::reduce`].
    pub fn start_reduce<T: Element, B>(&self, buf: B, op: ReduceOp, root: Rank) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.exec.start(buf, |buf| Ok(calls::reduce(buf.as_mut(), op, root)))
    }

    /// Starts [`Communicator::reduce_into`].
    pub fn start_reduce_into<T: Element, S, R>(
        &self,
        send: S,
        recv: Option<R>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<Work<(S, Option<R>)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((send, recv), |(send, recv)| {
            calls::reduce_into(send.as_ref(), recv.as_mut().map(AsMut::as_mut), op, root, rank)
        })
    }

    /// Starts [`Communicator::all_gather`].
    pub fn start_all_gather<T: Element, S, R>(&self, send: S, recv: R) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        self.exec.start((send, recv), |(send, recv)| Ok(calls::all_gather(send.as_ref(), recv.as_mut())))
    }

    /// Starts [`Communicator::all_gather_in_place`].
    pub fn start_all_gather_in_place<T: Element, B>(&self, buf: B) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::all_gather_in_place(buf.as_mut(), rank, world))
    }

    /// Starts [`Communicator::all_gather_v`].
    pub fn start_all_gather_v<T: Element, S, R>(&self, send: S, recv: R, counts: &[usize]) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let world = self.world_size();
        self.exec.start((send, recv), |(send, recv)| calls::all_gather_v(send.as_ref(), recv.as_mut(), counts, world))
    }

    /// Starts [`Communicator::all_gather_v_in_place`].
    pub fn start_all_gather_v_in_place<T: Element, B>(&self, buf: B, counts: &[usize]) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::all_gather_v_in_place(buf.as_mut(), counts, rank, world))
    }

    /// Starts [`Communicator::reduce_scatter`].
    pub fn start_reduce_scatter<T: Element, S, R>(&self, send: S, recv: R, op: ReduceOp) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        self.exec.start((send, recv), |(send, recv)| Ok(calls::reduce_scatter(send.as_ref(), recv.as_mut(), op)))
    }

    /// Starts [`Communicator::reduce_scatter_in_place`].
    pub fn start_reduce_scatter_in_place<T: Element, B>(&self, buf: B, op: ReduceOp) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::reduce_scatter_in_place(buf.as_mut(), op, rank, world))
    }

    /// Starts [`Communicator::reduce_scatter_v`].
    pub fn start_reduce_scatter_v<T: Element, S, R>(
        &self,
        send: S,
        recv: R,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let world = self.world_size();
        self.exec.start((send, recv), |(send, recv)| calls::reduce_scatter_v(send.as_ref(), recv.as_mut(), counts, op, world))
    }

    /// Starts [`Communicator::reduce_scatter_v_in_place`].
    pub fn start_reduce_scatter_v_in_place<T: Element, B>(&self, buf: B, counts: &[usize], op: ReduceOp) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::reduce_scatter_v_in_place(buf.as_mut(), counts, op, rank, world))
    }

    /// Starts [`Communicator::all_to_all`].
    pub fn start_all_to_all<T: Element, S, R>(&self, send: S, recv: R) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let world = self.world_size();
        self.exec.start((send, recv), |(send, recv)| calls::all_to_all(send.as_ref(), recv.as_mut(), world))
    }

    /// Starts [`Communicator::all_to_all_in_place`].
    pub fn start_all_to_all_in_place<T: Element, B>(&self, buf: B) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let world = self.world_size();
        self.exec.start(buf, |buf| calls::all_to_all_in_place(buf.as_mut(), world))
    }

    /// Starts [`Communicator::all_to_all_v`].
    pub fn start_all_to_all_v<T: Element, S, R>(
        &self,
        send: S,
        send_counts: &[usize],
        recv: R,
        recv_counts: &[usize],
    ) -> Result<Work<(S, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let world = self.world_size();
        self.exec.start((send, recv), |(send, recv)| {
            calls::all_to_all_v(send.as_ref(), send_counts, recv.as_mut(), recv_counts, world)
        })
    }

    /// Starts [`Communicator::gather`].
    pub fn start_gather<T: Element, S, R>(&self, send: S, recv: Option<R>, root: Rank) -> Result<Work<(S, Option<R>)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((send, recv), |(send, recv)| calls::gather(send.as_ref(), recv.as_mut().map(AsMut::as_mut), root, rank))
    }

    /// Starts [`Communicator::gather_in_place`].
    pub fn start_gather_in_place<T: Element, B>(&self, buf: B, root: Rank) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::gather_in_place(buf.as_mut(), root, rank, world))
    }

    /// Starts [`Communicator::scatter`].
    pub fn start_scatter<T: Element, S, R>(&self, send: Option<S>, recv: R, root: Rank) -> Result<Work<(Option<S>, R)>>
    where
        S: AsRef<[T]> + Send + 'static,
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((send, recv), |(send, recv)| calls::scatter(send.as_ref().map(AsRef::as_ref), recv.as_mut(), root, rank))
    }

    /// Starts [`Communicator::scatter_in_place`].
    pub fn start_scatter_in_place<T: Element, B>(&self, buf: B, root: Rank) -> Result<Work<B>>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (rank, world) = (self.rank(), self.world_size());
        self.exec.start(buf, |buf| calls::scatter_in_place(buf.as_mut(), root, rank, world))
    }

    /// Starts [`Communicator::send`]. Sends and receives that were started one after the other go on side by side.
    pub fn start_send<T: Element, S>(&self, buf: S, to: Rank) -> Result<Work<S>>
    where
        S: AsRef<[T]> + Send + 'static,
    {
        self.exec.start(buf, |buf| Ok(calls::send((*buf).as_ref(), to)))
    }

    /// Starts [`Communicator::recv`].
    pub fn start_recv<T: Element, R>(&self, buf: R, from: Rank) -> Result<Work<R>>
    where
        R: AsMut<[T]> + Send + 'static,
    {
        self.exec.start(buf, |buf| Ok(calls::recv(buf.as_mut(), from)))
    }

    /// Starts [`Communicator::recv_any`]. The handle gives the buffer back, and the rank whose message is in it.
    pub fn start_recv_any<T: Element, R>(&self, buf: R) -> Result<Work<(R, Rank)>>
    where
        R: AsMut<[T]> + Send + 'static,
    {
        let rank = self.rank();
        self.exec.start((buf, rank), move |(buf, source)| Ok(calls::recv_any(buf.as_mut(), source, rank)))
    }
}
