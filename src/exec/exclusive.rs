//! Calls of several operations, between which no other call of the communicator comes.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::call::Call;
use super::core::Core;
use super::submit::Executor;
use super::work::begin;
use crate::error::Result;

/// The turn of a queued call, which its caller takes on its own thread.
pub(super) struct Handover {
    turn: SyncSender<Done>,
}

/// The caller keeps its turn until it drops this.
struct Done {
    _sender: SyncSender<()>,
}

impl Handover {
    fn new() -> (Handover, Receiver<Done>) {
        let (turn, taken) = sync_channel(1);
        (Handover { turn }, taken)
    }

    /// Gives the caller its turn, and waits until it has had it. Meanwhile the call counts as
    /// pending, so no other thread takes the core between two of its operations.
    pub(super) fn give(self) {
        let (sender, done) = sync_channel(0);
        if self.turn.send(Done { _sender: sender }).is_ok() {
            // An error: the sender has been dropped, and nothing is ever sent.
            _ = done.recv();
        }
    }
}

impl Executor {
    /// Runs `operations`, which [`Executor::run_on`] runs one by one, after all calls that were made
    /// before, and before all that are made later. `call` stands for them in the queue.
    pub(crate) fn exclusively<R>(&self, call: Call, operations: impl FnOnce(&mut Core) -> Result<R>) -> Result<R> {
        self.state.check_process(call.op)?;
        if let Some(mut core) = self.claim() {
            return operations(&mut core);
        }
        let (handover, turn) = Handover::new();
        let (work, call, completion) = begin((), self.queue.helper(), |()| Ok(call))?;
        self.queue.push_handover(call, completion, handover)?;
        let result = turn.recv().ok().map(|_done| operations(&mut self.state.core.lock()));
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
        self.check(&mut call)?;
        // SAFETY: passed on.
        unsafe { self.state.dispatch(core, &call) }
    }
}
