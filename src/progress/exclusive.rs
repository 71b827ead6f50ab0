//! Calls of several operations, between which no other call of the communicator comes.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::handover::Handover;
use super::submit::Executor;
use super::work::Work;
use crate::call::{Call, Lengths};
use crate::error::Result;
use crate::exec::Core;

impl Executor {
    /// Runs `operations`, which [`Executor::run_on`] runs one by one, after all calls that were made
    /// before, and before all that are made later. `call` stands for them in the queue.
    pub(crate) fn exclusively<R>(&self, call: Call, operations: impl FnOnce(&mut Core) -> Result<R>) -> Result<R> {
        self.state.check_process(call.op)?;
        if let Some(mut core) = self.claim() {
            return operations(&mut core);
        }
        let (handover, turn) = Handover::new();
        let op = call.op;
        let work = Work::new((), self.queue.helper());
        let completion = work.completion(call.op);
        self.queue.push_handover(call, completion, handover)?;
        let turn = self.in_pieces(op, |deadline| {
            let timeout = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            match turn.recv_timeout(timeout) {
                Ok(done) => Some(Some(done)),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(None),
            }
        })?;
        let result = turn.map(|_done| operations(&mut self.state.core.lock()));
        // If it never got its turn, the work has failed.
        work.wait()?;
        result.expect("a call that has ended well has had its turn")
    }

    /// Checks a call and runs it on this thread, which holds the core.
    ///
    /// # Safety
    ///
    /// As for [`Executor::submit`].
    pub(crate) unsafe fn run_on(&self, core: &mut Core, mut call: Call) -> Result<()> {
        self.check(&mut call, Lengths::Given)?;
        // SAFETY: passed on.
        unsafe { self.state.dispatch(core, &call) }
    }
}
