//! From a call to who carries it out: the caller's thread if nothing is in its way, else the progress thread.

use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::core::Core;
use super::queue::Queue;
use super::state::CommState;
use super::work::{Work, begin};
use crate::error::{Error, Result};
use crate::failure::{self, CommInfo};
use crate::types::{Op, Rank};

/// Carries out the calls of one communicator, in their order.
pub(crate) struct Executor {
    pub(crate) state: Arc<CommState>,
    pub(super) queue: Queue,
}

/// Longer than anything holds the core but an operation.
const MOMENT: Duration = Duration::from_millis(20);

impl Executor {
    pub(crate) fn new(core: Core, info: CommInfo) -> Executor {
        Executor { queue: Queue::new(), state: CommState::new(core, info) }
    }

    pub(super) fn rank(&self) -> Rank {
        self.state.info.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.state.layout.ranks
    }

    /// Queues a call that is made of `buffers` where they will stay until it has ended. Nobody else can reach them there: that is what
    /// makes it valid for the queue.
    pub(crate) fn start<B: Send + 'static>(&self, buffers: B, call: impl FnOnce(&mut B) -> Result<Call>) -> Result<Work<B>> {
        let (work, call, completion) = begin(buffers, |buffers| call(buffers)?.check(self.rank(), self.world_size()))?;
        self.queue.push(&self.state, call, completion)?;
        Ok(work)
    }

    /// See [`crate::Communicator::abort`].
    pub(crate) fn abort(&self) {
        if self.state.check_process(Op::Connect).is_err() {
            return;
        }
        // A communicator that takes this one's stage holds the core for a moment.
        match self.state.core.try_lock_for(MOMENT) {
            Some(mut core) => _ = self.state.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 }),
            // The call that holds the core sees to the rest.
            None => failure::abort(&self.state.status),
        }
    }

    /// Carries out a call on this thread if nothing is in its way, else on the progress thread, after what is.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until this returns, and nobody else uses them.
    #[inline]
    pub(crate) unsafe fn submit(&self, mut call: Call) -> Result<()> {
        // In its place: it is large, and small operations are short.
        let op = call.op;
        call.check_in_place(self.rank(), self.world_size()).map_err(|problem| Error::Argument { op, problem })?;
        // SAFETY: passed on.
        unsafe { self.submit_checked(&call) }
    }

    /// # Safety
    ///
    /// As for [`Executor::submit`].
    #[inline]
    pub(crate) unsafe fn submit_checked(&self, call: &Call) -> Result<()> {
        self.state.check_process(call.op)?;
        if call.lent.is_some() {
            // SAFETY: passed on: a call that is lent ends when its stream has come behind it.
            return unsafe { self.enqueue(call) };
        }
        if self.queue.is_idle()
            && let Some(mut core) = self.state.core.try_lock()
        {
            // SAFETY: passed on.
            return unsafe { self.state.carry_out(&mut core, call) };
        }
        let (work, call, completion) = begin((), |()| Ok(call.clone()))?;
        self.queue.push(&self.state, call, completion)?;
        work.wait()
    }

    /// Carries out sends and receives side by side.
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit`], for all calls.
    pub(crate) unsafe fn submit_together<const N: usize>(&self, calls: [Call; N]) -> Result<()> {
        let check = |call: Call| call.check(self.rank(), self.world_size());
        let checked = calls.into_iter().map(check).collect::<Result<Vec<_>>>()?;
        // SAFETY: passed on.
        unsafe { self.submit_together_checked(checked) }
    }

    /// # Safety
    ///
    /// As for [`Executor::submit_together`].
    pub(crate) unsafe fn submit_together_checked(&self, checked: Vec<Call>) -> Result<()> {
        self.state.check_process(Op::Send)?;
        if checked.iter().all(|call| call.lent.is_none())
            && self.queue.is_idle()
            && let Some(mut core) = self.state.core.try_lock()
        {
            // SAFETY: passed on.
            return unsafe { self.state.point_to_point(&mut core, checked) };
        }
        let mut works = Vec::with_capacity(checked.len());
        let mut result = Ok(());
        // Before the first is queued, for then their buffers are in use.
        if checked.iter().any(|call| call.lent.is_some()) {
            self.check_not_failed()?;
        }
        let gated = checked.iter().map(|call| self.close(call)).collect::<Result<Vec<_>>>()?;
        for (call, is_gated) in checked.into_iter().zip(gated) {
            let (work, call, completion) = begin((), |()| Ok(call))?;
            result = result.and(self.queue.push(&self.state, call, completion));
            if !is_gated {
                works.push(work);
            }
        }
        // All have to end before their buffers are given back.
        works.into_iter().map(Work::wait).fold(result, Result::and)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if self.state.check_process(Op::Connect).is_err() {
            // Nothing of it is the child's to end.
            std::mem::forget(self.state.clone());
            return;
        }
        self.queue.close(&self.state);
        // Nobody else holds the lock now: calls borrow the communicator, and the progress thread has ended.
        let mut core = self.state.core.lock();
        match self.state.failure.get() {
            None => core.part(false),
            Some(_) => core.devices.abandon(),
        }
    }
}
