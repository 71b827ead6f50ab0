//! The queue of operations, and the progress thread that runs them.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::handover::Handover;
use super::runner::Runner;
use super::state::CommState;
use super::tasks::{Task, Tasks};
use super::work::{Completion, Helper, Work};
use crate::call::Call;
use crate::error::{Error, Result};
use crate::exec::messages::Interrupted;
use crate::timeouts::CLOSING_CHECK;
use crate::{failure, sys};

/// A queue of operations. Its thread is started with the first of them.
pub(crate) struct Queue {
    pub(super) runner: Arc<Runner>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The system has refused the thread to a call that would do with it, and has not been asked
    /// again.
    is_refused: AtomicBool,
}

impl Queue {
    pub(crate) fn new(shared: &Arc<CommState>) -> Queue {
        Queue { runner: Arc::new(Runner::new(shared.clone())), thread: Mutex::new(None), is_refused: AtomicBool::new(false) }
    }

    /// What helps a thread that waits for an operation.
    pub(super) fn helper(&self) -> Weak<dyn Helper> {
        let runner: Weak<Runner> = Arc::downgrade(&self.runner);
        runner
    }

    fn tasks(&self) -> &Tasks {
        &self.runner.tasks
    }

    /// Whether all operations that were queued have ended.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.tasks().is_idle()
    }

    /// Queues a call that has been checked. The owner of the buffers keeps them valid until the
    /// completion, which comes in any case. If this fails, it has come when this returns.
    pub(crate) fn push(&self, call: Call, completion: Arc<dyn Completion>) -> Result<()> {
        if call.on_device.as_ref().is_some_and(|on_device| on_device.is_captured()) {
            // The progress thread runs it each time that it is replayed.
            let started = self.start_or_fail();
            completion.complete(started.clone());
            return started;
        }
        // Messages run side by side, and a thread that ran them would have to wait for all of them.
        let is_for_any_thread = !call.op.is_point_to_point() && !self.runner.shared.concerns_devices(&call);
        self.push_task(self.tasks().task(call, completion, is_for_any_thread))
    }

    /// The progress thread looks for replayed calls from now on.
    pub(super) fn notice_replays(&self) {
        self.tasks().notice_replays();
    }

    /// As [`Queue::push`], for a call that its caller runs in its turn.
    pub(super) fn push_handover(&self, call: Call, completion: Arc<dyn Completion>, handover: Handover) -> Result<()> {
        let mut task = self.tasks().task(call, completion, false);
        task.handover = Some(handover);
        self.push_task(task)
    }

    fn push_task(&self, mut task: Task) -> Result<()> {
        let shared = &self.runner.shared;
        if let Err(forked) = shared.check_process(task.call.op) {
            task.end(Err(forked.clone()));
            return Err(forked);
        }
        if let Err(error) = self.start_or_fail() {
            task.end(Err(error.clone()));
            return Err(error);
        }
        self.tasks().push(task);
        // After the task counts as pending, and in `Core::engine` before a thread looks whether one
        // is: either that thread sees it, or this one its waker.
        fence(Ordering::SeqCst);
        shared.wake_on_links();
        Ok(())
    }

    /// Passes sends and receives that have not ended on to the progress thread, which runs. The
    /// caller holds the core, and keeps the buffers valid until they have ended.
    pub(super) fn pass_on(&self, messages: Vec<(Call, Interrupted)>) -> Vec<Work<()>> {
        let pass = |(call, progress): (Call, Interrupted)| {
            let work = Work::new((), self.helper());
            let completion = work.completion(call.op);
            completion.begin();
            (work, (self.tasks().task(call, completion, false), progress))
        };
        let (works, interrupted): (Vec<_>, Vec<_>) = messages.into_iter().map(pass).unzip();
        self.tasks().push_interrupted(interrupted);
        works
    }

    /// Starts the progress thread if it does not run, unless the system has refused it. Returns whether
    /// it runs.
    pub(super) fn has_thread(&self) -> bool {
        if self.is_refused.load(Ordering::Relaxed) {
            return false;
        }
        let warn = |error: &Error| {
            self.is_refused.store(true, Ordering::Relaxed);
            crate::log::warn!(%error, "a call of another thread waits for the end of this one");
        };
        self.start().inspect_err(warn).is_ok()
    }

    /// Starts the progress thread for a call that needs it. The other ranks make the call, too, so
    /// the communicator ends if the system refuses the thread.
    fn start_or_fail(&self) -> Result<()> {
        self.start().map_err(|error| self.runner.shared.fail_outside(error))
    }

    fn start(&self) -> Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let runner = self.runner.clone();
            let started = std::thread::Builder::new().name("kolo-progress".to_owned()).spawn(move || runner.work());
            *thread = Some(
                started
                    .map_err(Error::os("starting the progress thread; end other threads or processes, or raise their limit"))?,
            );
            self.is_refused.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Aborts what has not ended, and ends the thread. Returns false if the thread does not end in time,
    /// because a call of a driver does not return, for example. Nothing that it uses is freed then: it
    /// shares the state, and buffers belong to work that has not ended.
    pub(crate) fn close(&self) -> bool {
        let Some(thread) = self.thread.lock().take() else { return true };
        let Runner { shared, tasks, .. } = &*self.runner;
        // Their callers have continued already; each ends by its deadline.
        while tasks.has_unattended() && !shared.info.cancel.is_cancelled() {
            std::thread::sleep(CLOSING_CHECK);
        }
        if !self.is_idle() {
            failure::abort(&shared.status);
        }
        tasks.close();
        // This is the progress thread: without another thread, it freed the buffers of an abandoned
        // operation itself, and they held the last reference to the communicator. It ends on its
        // own.
        if thread.thread().id() == std::thread::current().id() {
            return true;
        }
        // If the thread panics, its operations have failed.
        let has_ended = sys::join(thread);
        if !has_ended {
            // This rank leaves without its goodbye.
            failure::abort(&shared.status);
        }
        has_ended
    }
}
