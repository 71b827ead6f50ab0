//! Asynchronous operations on borrowed buffers.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::{Communicator, calls};
use crate::error::Result;
use crate::exec::call::Call;
use crate::exec::work::Work;
use crate::types::{Element, Rank, ReduceOp};

/// Starts operations that borrow their buffers until the scope ends; see [`Communicator::scope`].
///
/// Its methods are those of [`Communicator`], and return as soon as the operation has been queued. A `send_recv` is a
/// [`Scope::send`] and a [`Scope::recv`], which go on side by side.
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    comm: &'env Communicator,
    started: RefCell<Vec<Work<()>>>,
    // Invariant, as in std::thread::scope: else 'scope could be shortened, and a buffer be used before the scope has ended.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl Communicator {
    /// Runs `body`, which starts operations on buffers that outlive the scope, and waits for all of them before it returns.
    ///
    /// Operations take effect in the order in which they were started; sends and receives that follow each other go on side by
    /// side.
    ///
    /// # Errors
    ///
    /// What `body` returns, else the first error of its operations.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # use kolo::ReduceOp::Sum;
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let (mut a, mut b) = (vec![1.0f32; 8], vec![2u64; 8]);
    /// comm.scope(|s| {
    ///     s.all_reduce(&mut a, Sum)?;
    ///     s.broadcast(&mut b, 0)
    /// })?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scope<'env, R>(&'env self, body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R>) -> Result<R> {
        let scope = Scope { comm: self, started: RefCell::default(), scope: PhantomData, env: PhantomData };
        // Whatever happens in the body, no buffer is given back before its operation has ended.
        let wait = WaitOnDrop(&scope.started);
        let result = body(&scope)?;
        wait.wait().map(|()| result)
    }
}

struct WaitOnDrop<'a>(&'a RefCell<Vec<Work<()>>>);

impl WaitOnDrop<'_> {
    fn wait(&self) -> Result<()> {
        let outcomes: Vec<Result<()>> = self.0.take().into_iter().map(Work::wait).collect();
        outcomes.into_iter().collect()
    }
}

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        // The body has failed or panicked, and says why.
        let _ = self.wait();
    }
}

impl<'scope> Scope<'scope, '_> {
    fn start(&'scope self, call: Call) -> Result<()> {
        self.started.borrow_mut().push(self.comm.exec.start((), |()| Ok(call))?);
        Ok(())
    }

    /// See [`Communicator::all_reduce`].
    pub fn all_reduce<T: Element>(&'scope self, buf: &'scope mut [T], op: ReduceOp) -> Result<()> {
        self.start(calls::all_reduce(buf, op))
    }

    /// See [`Communicator::all_reduce_into`].
    pub fn all_reduce_into<T: Element>(&'scope self, send: &'scope [T], recv: &'scope mut [T], op: ReduceOp) -> Result<()> {
        self.start(calls::all_reduce_into(send, recv, op))
    }

    /// See [`Communicator::broadcast`].
    pub fn broadcast<T: Element>(&'scope self, buf: &'scope mut [T], root: Rank) -> Result<()> {
        self.start(calls::broadcast(buf, root))
    }

    /// See [`Communicator::broadcast_into`].
    pub fn broadcast_into<T: Element>(&'scope self, send: Option<&'scope [T]>, recv: &'scope mut [T], root: Rank) -> Result<()> {
        self.start(calls::broadcast_into(send, recv, root, self.comm.rank())?)
    }

    /// See [`Communicator::barrier`].
    pub fn barrier(&'scope self) -> Result<()> {
        self.start(calls::barrier())
    }

    /// See [`Communicator::reduce`].
    pub fn reduce<T: Element>(&'scope self, buf: &'scope mut [T], op: ReduceOp, root: Rank) -> Result<()> {
        self.start(calls::reduce(buf, op, root))
    }

    /// See [`Communicator::reduce_into`].
    pub fn reduce_into<T: Element>(
        &'scope self,
        send: &'scope [T],
        recv: Option<&'scope mut [T]>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<()> {
        self.start(calls::reduce_into(send, recv, op, root, self.comm.rank())?)
    }

    /// See [`Communicator::all_gather`].
    pub fn all_gather<T: Element>(&'scope self, send: &'scope [T], recv: &'scope mut [T]) -> Result<()> {
        self.start(calls::all_gather(send, recv))
    }

    /// See [`Communicator::all_gather_in_place`].
    pub fn all_gather_in_place<T: Element>(&'scope self, buf: &'scope mut [T]) -> Result<()> {
        self.start(calls::all_gather_in_place(buf, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::all_gather_v`].
    pub fn all_gather_v<T: Element>(&'scope self, send: &'scope [T], recv: &'scope mut [T], counts: &[usize]) -> Result<()> {
        self.start(calls::all_gather_v(send, recv, counts, self.comm.world_size())?)
    }

    /// See [`Communicator::all_gather_v_in_place`].
    pub fn all_gather_v_in_place<T: Element>(&'scope self, buf: &'scope mut [T], counts: &[usize]) -> Result<()> {
        self.start(calls::all_gather_v_in_place(buf, counts, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(&'scope self, send: &'scope [T], recv: &'scope mut [T], op: ReduceOp) -> Result<()> {
        self.start(calls::reduce_scatter(send, recv, op))
    }

    /// See [`Communicator::reduce_scatter_in_place`].
    pub fn reduce_scatter_in_place<T: Element>(&'scope self, buf: &'scope mut [T], op: ReduceOp) -> Result<()> {
        self.start(calls::reduce_scatter_in_place(buf, op, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::reduce_scatter_v`].
    pub fn reduce_scatter_v<T: Element>(
        &'scope self,
        send: &'scope [T],
        recv: &'scope mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.start(calls::reduce_scatter_v(send, recv, counts, op, self.comm.world_size())?)
    }

    /// See [`Communicator::reduce_scatter_v_in_place`].
    pub fn reduce_scatter_v_in_place<T: Element>(
        &'scope self,
        buf: &'scope mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.start(calls::reduce_scatter_v_in_place(buf, counts, op, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::all_to_all`].
    pub fn all_to_all<T: Element>(&'scope self, send: &'scope [T], recv: &'scope mut [T]) -> Result<()> {
        self.start(calls::all_to_all(send, recv, self.comm.world_size())?)
    }

    /// See [`Communicator::all_to_all_in_place`].
    pub fn all_to_all_in_place<T: Element>(&'scope self, buf: &'scope mut [T]) -> Result<()> {
        self.start(calls::all_to_all_in_place(buf, self.comm.world_size())?)
    }

    /// See [`Communicator::all_to_all_v`].
    pub fn all_to_all_v<T: Element>(
        &'scope self,
        send: &'scope [T],
        send_counts: &[usize],
        recv: &'scope mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        self.start(calls::all_to_all_v(send, send_counts, recv, recv_counts, self.comm.world_size())?)
    }

    /// See [`Communicator::gather`].
    pub fn gather<T: Element>(&'scope self, send: &'scope [T], recv: Option<&'scope mut [T]>, root: Rank) -> Result<()> {
        self.start(calls::gather(send, recv, root, self.comm.rank())?)
    }

    /// See [`Communicator::gather_in_place`].
    pub fn gather_in_place<T: Element>(&'scope self, buf: &'scope mut [T], root: Rank) -> Result<()> {
        self.start(calls::gather_in_place(buf, root, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::scatter`].
    pub fn scatter<T: Element>(&'scope self, send: Option<&'scope [T]>, recv: &'scope mut [T], root: Rank) -> Result<()> {
        self.start(calls::scatter(send, recv, root, self.comm.rank())?)
    }

    /// See [`Communicator::scatter_in_place`].
    pub fn scatter_in_place<T: Element>(&'scope self, buf: &'scope mut [T], root: Rank) -> Result<()> {
        self.start(calls::scatter_in_place(buf, root, self.comm.rank(), self.comm.world_size())?)
    }

    /// See [`Communicator::send`].
    pub fn send<T: Element>(&'scope self, buf: &'scope [T], to: Rank) -> Result<()> {
        self.start(calls::send(buf, to))
    }

    /// See [`Communicator::recv`].
    pub fn recv<T: Element>(&'scope self, buf: &'scope mut [T], from: Rank) -> Result<()> {
        self.start(calls::recv(buf, from))
    }
}
