//! The queue of operations, and the progress thread that runs them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;
use parking_lot::Mutex;

use super::call::Call;
use super::core::Core;
use super::device::Staged;
use super::state::CommState;
use super::work::Completion;
use crate::error::{Error, Result};
use crate::failure;

/// A queue of operations. Its thread is started with the first of them.
pub(crate) struct Queue {
    /// Operations that have been queued and have not ended.
    pending: Arc<AtomicUsize>,
    /// Those of them that only a stream waits for.
    unattended: Arc<AtomicUsize>,
    thread: Mutex<Option<Progress>>,
}

struct Progress {
    tasks: Sender<Task>,
    thread: JoinHandle<()>,
    /// Wakes the thread where it sleeps on links; set when it first uses links.
    waker: Arc<Mutex<Option<Arc<Waker>>>>,
}

/// An operation that has been queued. It completes in any case: if it is dropped, as aborted.
struct Task {
    call: Call,
    completion: Option<Arc<dyn Completion>>,
    pending: Arc<AtomicUsize>,
    /// The counter that includes it, if only a stream waits for it.
    unattended: Option<Arc<AtomicUsize>>,
}

impl Task {
    fn begin(&self) {
        if let Some(completion) = &self.completion {
            completion.begin();
        }
    }

    fn complete(mut self, result: Result<()>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<()>) {
        let Some(completion) = self.completion.take() else { return };
        if let Some(lent) = &self.call.lent {
            lent.open();
        }
        // Before the waiting caller continues, so that its next call finds the queue idle.
        self.pending.fetch_sub(1, Ordering::AcqRel);
        if let Some(unattended) = self.unattended.take() {
            unattended.fetch_sub(1, Ordering::AcqRel);
        }
        completion.complete(result);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // Its sequence number is not known here.
        self.end(Err(Error::Aborted { op: self.call.op, seq: 0 }));
    }
}

impl Queue {
    pub(crate) fn new() -> Queue {
        Queue { pending: Arc::default(), unattended: Arc::default(), thread: Mutex::new(None) }
    }

    /// Whether all operations that were queued have ended.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Queues a call that has been checked. The owner of the buffers keeps them valid until the
    /// completion, which comes in any case. If this fails, it has come when this returns.
    pub(crate) fn push(&self, shared: &Arc<CommState>, call: Call, completion: Arc<dyn Completion>) -> Result<()> {
        let forked = shared.check_process(call.op).err();
        self.pending.fetch_add(1, Ordering::AcqRel);
        let unattended = call.lent.as_ref().is_some_and(|lent| lent.is_closed()).then(|| self.unattended.clone());
        if let Some(unattended) = &unattended {
            unattended.fetch_add(1, Ordering::AcqRel);
        }
        let mut task = Task { call, completion: Some(completion), pending: self.pending.clone(), unattended };
        if let Some(forked) = forked {
            task.end(Err(forked.clone()));
            return Err(forked);
        }
        let mut thread = self.thread.lock();
        let progress = match &*thread {
            Some(progress) => progress,
            None => thread.insert(self.start(shared.clone())?),
        };
        // If the thread has ended, the task is returned here, and completes by being dropped.
        let _ = progress.tasks.send(task);
        if let Some(Err(error)) = progress.waker.lock().as_ref().map(|waker| waker.wake()) {
            // The task is queued, and starts a little later.
            tracing::warn!(%error, "the progress thread could not be woken");
        }
        Ok(())
    }

    fn start(&self, shared: Arc<CommState>) -> Result<Progress> {
        let (sender, receiver) = unbounded();
        let waker: Arc<Mutex<Option<Arc<Waker>>>> = Arc::default();
        let worker = Worker { shared, tasks: receiver, waker: waker.clone(), ahead: None };
        let thread = std::thread::Builder::new().name("kolo-progress".to_owned()).spawn(move || worker.work());
        let thread = thread.map_err(Error::os("starting the progress thread"))?;
        Ok(Progress { tasks: sender, thread, waker })
    }

    /// Aborts what has not ended, and ends the thread.
    pub(crate) fn close(&self, shared: &CommState) {
        let Some(Progress { tasks, thread, .. }) = self.thread.lock().take() else { return };
        // Their callers have continued already; each ends by its deadline.
        while self.unattended.load(Ordering::Acquire) > 0 && !shared.info.cancel.is_cancelled() {
            std::thread::sleep(CLOSING);
        }
        if !self.is_idle() {
            failure::abort(&shared.status);
        }
        drop(tasks);
        // This is the progress thread: without another thread, it freed the buffers of an abandoned
        // operation itself, and they held the last reference to the communicator. It ends on its
        // own.
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        // A panic there has been printed, and its operations have failed.
        let _ = thread.join();
    }
}

/// How often [`Queue::close`] checks whether the operations have ended that only streams wait for.
const CLOSING: Duration = Duration::from_micros(200);

/// The progress thread.
struct Worker {
    shared: Arc<CommState>,
    tasks: Receiver<Task>,
    waker: Arc<Mutex<Option<Arc<Waker>>>>,
    /// A task that was taken from the queue too early: a collective after messages, or a message
    /// that its stream has not reached.
    ahead: Option<Task>,
}

impl Worker {
    /// Runs tasks in order until the queue is closed and empty.
    fn work(mut self) {
        while let Some(task) = self.ahead.take().or_else(|| self.tasks.recv().ok()) {
            let shared = self.shared.clone();
            let mut core = shared.core.lock();
            let op = task.call.op;
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| {
                if op.is_point_to_point() {
                    self.run_messages(&mut core, task);
                } else {
                    task.begin();
                    // SAFETY: the caller that queued the call keeps its buffers until it completes.
                    let result = unsafe { shared.dispatch(&mut core, &task.call) };
                    task.complete(result);
                }
            }));
            if ran.is_err() {
                // A defect of this library. The operations in flight have been aborted, and nothing
                // of them is used again.
                _ = shared.fail(&mut core, Error::Aborted { op, seq: 0 });
            }
        }
    }

    /// Runs sends and receives side by side, so that none waits for one that was queued before it:
    /// this task and those after it up to the next collective, also those that are queued
    /// meanwhile.
    fn run_messages(&mut self, core: &mut Core, first: Task) {
        let shared = self.shared.clone();
        let op = first.call.op;
        match shared.check_not_revoked(core, &first.call).and_then(|()| core.waker()) {
            // From now on, a thread that queues a task wakes this one where it sleeps on links.
            Ok(waker) => *self.waker.lock() = Some(waker),
            Err(error) => return first.complete(Err(error)),
        }
        let in_flight: RefCell<VecDeque<(Task, Option<Staged>)>> = RefCell::default();
        let fail = |task: Task, error| {
            task.complete(Err(error));
            // The peer waits for this message.
            failure::abort(&shared.status);
        };
        self.ahead = Some(first);
        let next = || loop {
            let task = self.next_message(in_flight.borrow().is_empty())?;
            task.begin();
            let mut call = task.call.clone();
            // SAFETY: the caller that queued the call keeps its buffers until it completes.
            match unsafe { Staged::begin(&shared, &mut call) } {
                Ok(staged) => in_flight.borrow_mut().push_back((task, staged)),
                Err(error) => {
                    fail(task, error);
                    continue;
                }
            }
            return Some(call);
        };
        let finished = |index: usize| {
            let Some((task, staged)) = in_flight.borrow_mut().remove(index) else { return };
            // SAFETY: as above.
            match staged.map_or(Ok(()), |staged| unsafe { staged.finish() }) {
                Ok(()) => task.complete(Ok(())),
                Err(error) => fail(task, error),
            }
        };
        let run = |core: &mut Core| {
            // SAFETY: the caller that queued the calls keeps their buffers until they complete.
            unsafe { core.run_point_to_point(&shared.info, next, finished) }
        };
        let result = shared.unless_it_panics(core, op, run);
        if let Err(error) = result {
            let error = shared.fail(core, error);
            for (task, _) in in_flight.into_inner() {
                task.complete(Err(error.clone()));
            }
        }
    }

    /// The next task, if it is a message that can start now.
    fn next_message(&mut self, is_alone: bool) -> Option<Task> {
        let task = self.ahead.take().or_else(|| self.tasks.try_recv().ok())?;
        let Call { op, lent, .. } = &task.call;
        if !op.is_point_to_point() {
            self.ahead = Some(task);
            return None;
        }
        // What the stream was given before may wait for a message in flight.
        if !is_alone && lent.as_ref().is_some_and(|lent| !lent.is_ready()) {
            self.ahead = Some(task);
            // The stream is looked at again at once, instead of when a link is ready.
            if let Some(Err(error)) = self.waker.lock().as_ref().map(|waker| waker.wake()) {
                tracing::debug!(%error, "a message starts a little later");
            }
            return None;
        }
        Some(task)
    }
}
