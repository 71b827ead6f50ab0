//! Handles on operations that run on a communicator's progress thread.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;

/// An operation in flight, which owns its buffers: [`Work::wait`] gives them back.
///
/// Dropping it lets the operation go on; the buffers are freed when it ends. So no buffer can be freed, read or written
/// while it is in flight.
#[must_use = "the operation goes on, but its buffers and its outcome are lost"]
#[derive(Debug)]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
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
        let mut outcome = self.shared.outcome.lock();
        while outcome.is_none() {
            match deadline {
                Some(deadline) if self.shared.ended.wait_until(&mut outcome, deadline).timed_out() => break,
                Some(_) => {}
                None => self.shared.ended.wait(&mut outcome),
            }
        }
        outcome.clone()
    }

    /// Whether the operation has ended, so that [`Work::wait`] returns at once.
    pub fn is_finished(&self) -> bool {
        self.shared.has_ended.load(Ordering::Acquire)
    }

    fn take(self) -> Result<B> {
        let outcome = self.shared.outcome.lock().clone();
        outcome.expect("only called when the operation has ended")?;
        // SAFETY: the operation has ended, so the progress thread does not touch the buffers any more; this handle is the only
        // one, and it is used up here.
        let buffers = unsafe { (*self.shared.buffers.get()).take() };
        Ok(buffers.expect("buffers are taken once"))
    }
}

/// What the handle and the progress thread share. Lives until both are done with it.
#[derive(Debug)]
pub(crate) struct Shared<B> {
    buffers: UnsafeCell<Option<B>>,
    outcome: Mutex<Option<Result<()>>>,
    ended: Condvar,
    has_ended: AtomicBool,
}

// SAFETY: the buffers are reached by one side at a time: through addresses by the operation until it has ended, by the handle
// afterwards.
unsafe impl<B: Send> Sync for Shared<B> {}

/// What the progress thread sees of a handle.
pub(crate) trait Completion: Send + Sync {
    /// The operation has ended: it does not touch the buffers any more.
    fn complete(&self, outcome: Result<()>);
}

impl<B: Send> Completion for Shared<B> {
    fn complete(&self, outcome: Result<()>) {
        *self.outcome.lock() = Some(outcome);
        self.has_ended.store(true, Ordering::Release);
        self.ended.notify_all();
    }
}

/// A handle on an operation that is about to start. `describe` is shown the buffers where they will stay until it has ended.
pub(crate) fn begin<B: Send + 'static, C>(
    buffers: B,
    describe: impl FnOnce(&mut B) -> Result<C>,
) -> Result<(Work<B>, C, Arc<dyn Completion>)> {
    let shared = Arc::new(Shared {
        buffers: UnsafeCell::new(Some(buffers)),
        outcome: Mutex::new(None),
        ended: Condvar::new(),
        has_ended: AtomicBool::new(false),
    });
    // SAFETY: nobody else knows of the cell yet.
    let buffers = unsafe { (*shared.buffers.get()).as_mut() };
    let call = describe(buffers.expect("just put there"))?;
    Ok((Work { shared: shared.clone() }, call, shared))
}
