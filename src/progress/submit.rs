//! From a call to the thread that runs it: the caller's if no other call is queued, otherwise the
//! progress thread.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::MutexGuard;

use super::queue::Queue;
use super::state::{CommState, Devices};
use super::together::keep_apart;
use super::work::{Completion, Work, WorkError};
use crate::call::{Call, Lengths};
use crate::error::{Error, Result};
use crate::exec::Core;
use crate::exec::repeated::CallKey;
use crate::failure::{self, CommInfo, wait_check};
use crate::timeouts::WAIT_CHECK;
use crate::types::{Op, Rank};

/// Runs the calls of one communicator in the order in which they were made.
pub(crate) struct Executor {
    pub(crate) state: Arc<CommState>,
    pub(super) queue: Queue,
}

impl Executor {
    pub(crate) fn new(core: Core, info: CommInfo, devices: Box<dyn Devices>) -> Executor {
        let state = CommState::new(core, info, devices);
        Executor { queue: Queue::new(&state), state }
    }

    pub(super) fn rank(&self) -> Rank {
        self.state.info.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.state.layout.ranks
    }

    /// Queues a call on buffers that the [`Work`] owns. `call` is shown the buffers where they stay
    /// until the operation has ended. Nothing else can reach them there, which makes the call valid
    /// for the queue. If the call is refused, the error has the buffers.
    pub(crate) fn start<B: Send + 'static>(
        &self,
        buffers: B,
        call: impl FnOnce(&mut B) -> Result<Call>,
    ) -> Result<Work<B>, WorkError<B>> {
        let mut work = Work::new(buffers, self.queue.helper());
        let started = call(work.buffers()).and_then(|call| {
            let completion = work.completion(call.op);
            self.queue_unchecked(call, completion)
        });
        match started {
            Ok(()) => Ok(work),
            Err(error) => Err(work.refused(error)),
        }
    }

    fn queue_unchecked(&self, call: Call, completion: Arc<dyn Completion>) -> Result<()> {
        self.queue.push(call.check(self.rank(), self.world_size())?, completion)
    }

    /// See [`CommState::fail_outside`].
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.state.fail_outside(error)
    }

    /// Checks a call and runs it: on this thread if no other call is queued, otherwise on the
    /// progress thread, in its turn.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until this returns, and nothing else uses them.
    #[inline]
    pub(crate) unsafe fn submit(&self, mut call: Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.submit_in_place(&mut call, Lengths::Given) }
    }

    /// As [`Executor::submit`], for a call that stays where it is. Its buffers are on the host, or it has its
    /// device call. A collective that equals the last one of its operation is not checked again.
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit`].
    #[inline(always)]
    pub(crate) unsafe fn submit_in_place(&self, call: &mut Call, lengths: Lengths) -> Result<()> {
        if let Some(key) = CallKey::of(call, lengths) {
            self.state.check_process(call.op)?;
            if let Some(mut core) = self.claim() {
                let mut is_kept = core.is_repeated(call.op, &key);
                if !is_kept {
                    self.check(call, lengths)?;
                    is_kept = core.keep(key, call);
                }
                // SAFETY: the caller vouches for the buffers. `call` was checked above, or equals the kept call, which
                // was checked.
                return unsafe {
                    match is_kept {
                        true => self.state.dispatch_again(&mut core, call),
                        false => self.state.dispatch(&mut core, call),
                    }
                };
            }
        }
        self.check(call, lengths)?;
        // SAFETY: the caller vouches for the buffers, and the call was checked.
        unsafe { self.submit_checked(call) }
    }

    /// Checks a call in place: it is large, and small operations would notice a copy.
    #[inline(always)]
    pub(crate) fn check(&self, call: &mut Call, lengths: Lengths) -> Result<()> {
        let (op, rank, world) = (call.op, self.rank(), self.world_size());
        let checked = match lengths {
            Lengths::Given => call.check_in_place(rank, world),
            Lengths::Counted => call.check_raw(rank, world),
        };
        checked.map_err(|problem| Error::Argument { op, problem })
    }

    /// Runs a call that was checked, as [`Executor::submit`].
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit`]. The buffers of a call on a device are valid until its
    /// stream has passed the call.
    #[inline(always)]
    pub(crate) unsafe fn submit_checked(&self, call: &Call) -> Result<()> {
        self.state.check_process(call.op)?;
        if call.on_device.is_some() {
            return self.submit_on_device(call.clone());
        }
        if let Some(mut core) = self.claim() {
            // SAFETY: passed on.
            return unsafe {
                match call.op.is_point_to_point() {
                    true => self.run_or_pass_on(core, std::slice::from_ref(call)),
                    false => self.state.dispatch(&mut core, call),
                }
            };
        }
        self.wait_for(call.op, &self.queue_call(call.clone())?)
    }

    /// The core, if no call holds it and none is queued.
    #[inline(always)]
    pub(super) fn claim(&self) -> Option<MutexGuard<'_, Core>> {
        // In this order: a call that is interrupted is queued before it gives the core up.
        let core = self.state.core.try_lock()?;
        self.queue.is_idle().then_some(core)
    }

    /// Starts a call that was checked.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until the operation has ended, and nothing else uses them.
    pub(crate) unsafe fn start_checked(&self, call: Call) -> Result<Work<()>> {
        if call.on_device.is_none() {
            return self.queue_call(call);
        }
        self.check_not_failed()?;
        let work = self.enqueue_one(&call, true, false)?;
        Ok(work.expect("its end is not left to its stream"))
    }

    /// Queues a call that was checked. The caller keeps its buffers until the call has ended.
    pub(crate) fn queue_call(&self, call: Call) -> Result<Work<()>> {
        let work = Work::new((), self.queue.helper());
        let completion = work.completion(call.op);
        self.queue.push(call, completion)?;
        Ok(work)
    }

    /// Waits until a queued call has ended, and returns how.
    pub(crate) fn wait_for(&self, op: Op, work: &Work<()>) -> Result<()> {
        self.in_pieces(op, |deadline| {
            if deadline.is_some() {
                // A wait until a deadline runs nothing that is queued.
                work.help();
            }
            work.outcome(deadline)
        })?
    }

    /// Waits by `wait`, which returns `None` if it has waited in vain until a deadline. If the wait
    /// check of this thread says no, the communicator ends, and with it what this waits for.
    pub(super) fn in_pieces<T>(&self, op: Op, wait: impl Fn(Option<Instant>) -> Option<T>) -> Result<T> {
        let has_check = wait_check::has_wait_check();
        wait_check::begin();
        loop {
            match wait(has_check.then(|| Instant::now() + WAIT_CHECK)) {
                Some(_) if wait_check::has_stopped() => return Err(Error::Aborted { op, seq: 0 }),
                Some(found) => return Ok(found),
                None if wait_check::go_on().is_err() => failure::abort(&self.state.status),
                None => {}
            }
        }
    }

    /// Enqueues a call on a device, and waits for its end unless its stream does.
    fn submit_on_device(&self, call: Call) -> Result<()> {
        self.check_not_failed()?;
        let op = call.op;
        match self.enqueue_one(&call, false, true)? {
            Some(work) => self.wait_for(op, &work),
            None => Ok(()),
        }
    }

    /// Enqueues a call on a device, and queues the host's part of it. Returns `None` if the end of the
    /// call is left to its stream, which `may_be_left` allows.
    pub(crate) fn enqueue_one(&self, call: &Call, is_apart: bool, may_be_left: bool) -> Result<Option<Work<()>>> {
        let mut work = None;
        self.enqueue(std::slice::from_ref(call), is_apart, &mut || {
            let is_left = may_be_left && is_left_to_its_stream(call);
            work = Some(self.queue_call(call.clone())?).filter(|_| !is_left);
            Ok(())
        })?;
        Ok(work)
    }

    /// See [`Devices::enqueue`].
    fn enqueue(&self, calls: &[Call], is_apart: bool, queue: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let exclusively = |call: &Call, part: &mut dyn FnMut(&mut Core) -> Result<()>| self.exclusively(call.clone(), part);
        let state = &*self.state;
        state.devices.enqueue(state, &exclusively, calls, is_apart, queue)?;
        if calls.iter().any(|call| call.on_device.as_ref().is_some_and(|on_device| on_device.is_captured())) {
            self.queue.notice_replays();
        }
        Ok(())
    }

    /// Checks and runs sends and receives side by side.
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

    /// Runs sends and receives that were checked, as [`Executor::submit_together`].
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit_checked`], for all calls.
    pub(crate) unsafe fn submit_together_checked(&self, mut checked: Vec<Call>) -> Result<()> {
        self.state.check_process(Op::Send)?;
        let _copies = keep_apart(&mut checked).map_err(|error| match error {
            Error::Argument { .. } => error,
            // The peers wait for the messages.
            error => self.fail(error),
        })?;
        if checked.iter().all(|call| call.on_device.is_none())
            && let Some(core) = self.claim()
        {
            // SAFETY: passed on.
            return unsafe { self.run_or_pass_on(core, &checked) };
        }
        if checked.iter().any(|call| call.on_device.is_some()) {
            self.check_not_failed()?;
        }
        let mut works = Vec::with_capacity(checked.len());
        let mut result = Ok(());
        self.enqueue(&checked, false, &mut || {
            for call in &checked {
                let is_left = is_left_to_its_stream(call);
                let work = Work::new((), self.queue.helper());
                let pushed = self.queue.push(call.clone(), work.completion(call.op));
                result = std::mem::replace(&mut result, Ok(())).and(pushed);
                if !is_left {
                    works.push(work);
                }
            }
            Ok(())
        })?;
        // All calls end before the caller gets its buffers back.
        works.iter().map(|work| self.wait_for(Op::Send, work)).fold(result, Result::and)
    }

    /// Runs sends and receives side by side on this thread. If another thread calls meanwhile, they
    /// go on beside its call, on the progress thread: the peer may wait for that call.
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit`], for all calls.
    unsafe fn run_or_pass_on(&self, mut core: MutexGuard<'_, Core>, calls: &[Call]) -> Result<()> {
        let is_wanted = || !self.queue.is_idle() && self.queue.has_thread();
        // SAFETY: passed on: this waits for those that are returned.
        let interrupted = unsafe { self.state.dispatch_together(&mut core, calls, is_wanted)? };
        if interrupted.is_empty() {
            return Ok(());
        }
        let works = self.queue.pass_on(interrupted);
        drop(core);
        works.iter().map(|work| self.wait_for(calls[0].op, work)).fold(Ok(()), Result::and)
    }

    /// Returns the failure that ended the communicator.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.state.failure.get().map(|failure| &**failure)
    }

    /// Reports the failure of an earlier call, which may have had no caller that waited for it.
    fn check_not_failed(&self) -> Result<()> {
        match self.state.failure.get() {
            Some(first) => Err(Error::Revoked { first: first.clone() }),
            None => Ok(()),
        }
    }
}

/// Whether the caller of a call that is enqueued need not wait for it, because its stream does.
fn is_left_to_its_stream(call: &Call) -> bool {
    // The place for the source is the caller's only until the call returns.
    call.source.is_none() && call.on_device.as_ref().is_some_and(|on_device| on_device.leave_to_stream())
}

impl Drop for Executor {
    fn drop(&mut self) {
        if self.state.check_process(Op::Connect).is_err() {
            // The child ends nothing of its parent's.
            std::mem::forget(self.state.clone());
            return;
        }
        // A program that fails does not leave: its peers must not take a panic for its end.
        let panics = std::thread::panicking() && self.state.failure.get().is_none();
        if panics {
            failure::end_by_panic(&self.state.status);
        }
        let has_ended = self.queue.close();
        self.state.devices.abandon();
        if !has_ended {
            // The thread may hold the core.
            return;
        }
        // Nothing else holds the lock now: calls borrow the communicator, and the progress thread
        // has ended.
        let mut core = self.state.core.lock();
        match self.state.failure.get() {
            None => core.leave(panics),
            Some(_) => self.state.devices.abandon_memory(),
        }
    }
}
