//! Handles on operations that run on a communicator's progress thread.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::call::Call;
use crate::error::{Error, Result};
use crate::sys;
use crate::types::Op;

/// An operation in flight, which owns its buffers: [`Work::wait`] gives them back.
///
/// Dropping it lets the operation go on; the buffers are freed when it ends, on a thread of their own. So no buffer can be freed,
/// read or written while it is in flight.
#[must_use = "the operation goes on, but its buffers and its outcome are lost"]
#[derive(Debug)]
pub struct Work<B> {
    shared: Arc<WorkState<B>>,
}

impl<B> Work<B> {
    /// Waits until the operation has ended, and returns its buffers. Every operation has a deadline, so this ends.
    pub fn wait(self) -> Result<B> {
        self.outcome(None);
        self.take()
    }

    /// Waits at most for `timeout`: gives the handle back if the operation has not ended by then.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<B>, Work<B>> {
        match self.outcome(Instant::now().checked_add(timeout)) {
            Some(_) => Ok(self.take()),
            None => Err(self),
        }
    }

    /// Waits until the operation has ended, or until a deadline, and says how it ended; leaves the buffers where they are.
    pub(crate) fn outcome(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        if let Err(forked) = self.shared.check_process() {
            return Some(Err(forked));
        }
        let mut state = self.shared.state.lock();
        while state.outcome.is_none() {
            match deadline {
                Some(deadline) if self.shared.ended.wait_until(&mut state, deadline).timed_out() => break,
                Some(_) => {}
                None => self.shared.ended.wait(&mut state),
            }
        }
        state.outcome.clone()
    }

    /// Whether the operation has ended, so that [`Work::wait`] returns at once.
    pub fn is_finished(&self) -> bool {
        self.shared.has_ended.load(Ordering::Acquire)
    }

    fn take(self) -> Result<B> {
        self.shared.check_process()?;
        let outcome = self.shared.state.lock().outcome.clone();
        outcome.expect("only called when the operation has ended")?;
        // SAFETY: the operation has ended, so the progress thread does not touch the buffers any more; this handle is the only
        // one, and it is used up here.
        let buffers = unsafe { (*self.shared.buffers.get()).take() };
        Ok(buffers.expect("buffers are taken once"))
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        if self.shared.check_process().is_err() {
            // The thread that ends the operation is the parent's, and may have held the lock at the fork: nothing is touched.
            return;
        }
        let mut state = self.shared.state.lock();
        if state.outcome.is_none() {
            state.is_abandoned = true;
            return;
        }
        drop(state);
        // SAFETY: the operation has ended, so the progress thread does not touch the buffers any more; this handle is the only
        // one. It was not abandoned before the end, so the operation has left the buffers where they are.
        drop(unsafe { (*self.shared.buffers.get()).take() });
    }
}

/// What the handle and the progress thread share. Lives until both are done with it.
#[derive(Debug)]
pub(crate) struct WorkState<B> {
    buffers: UnsafeCell<Option<B>>,
    state: Mutex<Progress>,
    ended: Condvar,
    has_ended: AtomicBool,
    op: OnceLock<Op>,
    /// Of the process that started the operation.
    forks: u32,
}

impl<B> WorkState<B> {
    /// A forked child has none of the threads that end its parent's operations.
    fn check_process(&self) -> Result<()> {
        let op = || self.op.get().copied().unwrap_or(Op::Connect);
        if self.forks == sys::forks() { Ok(()) } else { Err(Error::Forked { op: op() }) }
    }
}

#[derive(Debug, Default)]
struct Progress {
    /// How the operation ended.
    outcome: Option<Result<()>>,
    /// The handle was dropped before that.
    is_abandoned: bool,
}

// SAFETY: the buffers are reached by one side at a time: through addresses by the operation until it has ended, by the handle
// afterwards.
unsafe impl<B: Send> Sync for WorkState<B> {}

/// What the progress thread sees of a handle.
pub(crate) trait Completion: Send + Sync {
    /// The operation has ended: it does not touch the buffers any more.
    fn complete(&self, outcome: Result<()>);
}

impl<B: Send + 'static> Completion for WorkState<B> {
    fn complete(&self, outcome: Result<()>) {
        let mut state = self.state.lock();
        state.outcome = Some(outcome);
        self.has_ended.store(true, Ordering::Release);
        self.ended.notify_all();
        if state.is_abandoned && std::mem::needs_drop::<B>() {
            // SAFETY: the operation has ended, and there is no handle any more.
            free_elsewhere(unsafe { (*self.buffers.get()).take() });
        }
    }
}

/// Frees the buffers of an abandoned operation. That runs code of the user, which may wait for the thread that ends operations: a
/// buffer may hold the last reference to a communicator, whose end waits for its progress thread. So a thread of its own does it.
fn free_elsewhere(buffers: impl Send + 'static) {
    let spawned = std::thread::Builder::new().name("kolo-free".to_owned()).spawn(move || drop(buffers));
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread could be started that frees the buffers of an operation");
    }
}

/// A handle on an operation that is about to start. `describe` is shown the buffers where they will stay until it has ended.
pub(crate) fn begin<B: Send + 'static>(
    buffers: B,
    describe: impl FnOnce(&mut B) -> Result<Call>,
) -> Result<(Work<B>, Call, Arc<dyn Completion>)> {
    let shared = Arc::new(WorkState {
        buffers: UnsafeCell::new(Some(buffers)),
        state: Mutex::default(),
        ended: Condvar::new(),
        has_ended: AtomicBool::new(false),
        op: OnceLock::new(),
        forks: sys::forks(),
    });
    // SAFETY: nobody else knows of the cell yet.
    let buffers = unsafe { (*shared.buffers.get()).as_mut() };
    let call = describe(buffers.expect("just put there"))?;
    let _ = shared.op.set(call.op);
    Ok((Work { shared: shared.clone() }, call, shared))
}
