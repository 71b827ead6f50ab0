//! The queue of operations, and the progress thread that runs them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

use super::call::Call;
use super::core::Core;
use super::device::Staged;
use super::messages::{Interrupted, Message};
use super::state::CommState;
use super::work::{Completion, Work, begin};
use crate::error::{Error, Result};
use crate::failure;

/// A queue of operations. Its thread is started with the first of them.
pub(crate) struct Queue {
    /// Operations that have been queued and have not ended.
    pending: Arc<AtomicUsize>,
    /// Those of them that only a stream waits for.
    unattended: Arc<AtomicUsize>,
    /// Sends and receives that another thread began. The progress thread continues them before
    /// anything else.
    interrupted: Arc<Mutex<VecDeque<(Task, Interrupted)>>>,
    thread: Mutex<Option<Progress>>,
}

struct Progress {
    /// `None` tells the thread to look at what is interrupted.
    tasks: Sender<Option<Task>>,
    thread: JoinHandle<()>,
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
        Queue { pending: Arc::default(), unattended: Arc::default(), interrupted: Arc::default(), thread: Mutex::new(None) }
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
        let _ = progress.tasks.send(Some(task));
        // After the task counts as pending, and in `Core::engine` before a thread looks whether one
        // is: either that thread sees it, or this one its waker.
        fence(Ordering::SeqCst);
        shared.wake_on_links();
        Ok(())
    }

    /// Passes sends and receives that have not ended on to the progress thread, which runs. The
    /// caller holds the core, and keeps the buffers valid until they have ended.
    pub(super) fn pass_on(&self, messages: Vec<(Call, Interrupted)>) -> Vec<Work<()>> {
        let mut works = Vec::with_capacity(messages.len());
        let mut interrupted = self.interrupted.lock();
        for (call, progress) in messages {
            let Ok((work, call, completion)) = begin((), |()| Ok(call)) else { unreachable!("the call is there") };
            completion.begin();
            self.pending.fetch_add(1, Ordering::AcqRel);
            let task = Task { call, completion: Some(completion), pending: self.pending.clone(), unattended: None };
            interrupted.push_back((task, progress));
            works.push(work);
        }
        drop(interrupted);
        if let Some(progress) = &*self.thread.lock() {
            let _ = progress.tasks.send(None);
        }
        works
    }

    /// Starts the progress thread if it does not run. Returns whether it runs.
    pub(super) fn has_thread(&self, shared: &Arc<CommState>) -> bool {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            match self.start(shared.clone()) {
                Ok(progress) => *thread = Some(progress),
                Err(error) => tracing::warn!(%error, "a call of another thread waits for the end of this one"),
            }
        }
        thread.is_some()
    }

    fn start(&self, shared: Arc<CommState>) -> Result<Progress> {
        let (sender, receiver) = unbounded();
        let worker = Worker { shared, tasks: receiver, interrupted: self.interrupted.clone(), ahead: None };
        let thread = std::thread::Builder::new().name("kolo-progress".to_owned()).spawn(move || worker.work());
        let thread = thread.map_err(Error::os("starting the progress thread"))?;
        Ok(Progress { tasks: sender, thread })
    }

    /// Aborts what has not ended, and ends the thread.
    pub(crate) fn close(&self, shared: &CommState) {
        let Some(Progress { tasks, thread }) = self.thread.lock().take() else { return };
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
    tasks: Receiver<Option<Task>>,
    interrupted: Arc<Mutex<VecDeque<(Task, Interrupted)>>>,
    /// A task that was taken from the queue too early: a collective after messages, or a message
    /// that its stream has not reached.
    ahead: Option<Task>,
}

impl Worker {
    /// Runs tasks in order until the queue is closed and empty.
    fn work(mut self) {
        while let Some(task) = self.ahead.take().map(Some).or_else(|| self.tasks.recv().ok()) {
            let shared = self.shared.clone();
            let mut core = shared.core.lock();
            let interrupted = std::mem::take(&mut *self.interrupted.lock());
            let mut first: VecDeque<_> = interrupted.into_iter().map(|(task, progress)| (task, Some(progress))).collect();
            let collective = match task {
                Some(task) if first.is_empty() && task.call.op.is_point_to_point() => {
                    first.push_back((task, None));
                    None
                }
                Some(task) if first.is_empty() => Some(task),
                task => {
                    self.ahead = task;
                    None
                }
            };
            // None if what was interrupted has been continued with a task before this one.
            let Some(op) = first.front().map(|(task, _)| task).or(collective.as_ref()).map(|task| task.call.op) else { continue };
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| {
                let Some(task) = collective else { return self.run_messages(&mut core, first) };
                task.begin();
                // SAFETY: the caller that queued the call keeps its buffers until it completes.
                let result = unsafe { shared.dispatch(&mut core, &task.call) };
                task.complete(result);
            }));
            if ran.is_err() {
                // A defect of this library. The operations in flight have been aborted, and nothing
                // of them is used again.
                _ = shared.fail(&mut core, Error::Aborted { op, seq: 0 });
            }
        }
    }

    /// Runs sends and receives side by side, so that none waits for one that was queued before it:
    /// `first`, and the tasks up to the next collective, also those that are queued meanwhile.
    fn run_messages(&mut self, core: &mut Core, mut first: VecDeque<(Task, Option<Interrupted>)>) {
        let shared = self.shared.clone();
        let Some(call) = first.front().map(|(task, _)| task.call.clone()) else { return };
        if let Err(error) = shared.check_not_revoked(core, &call).and_then(|()| core.engine().map(drop)) {
            return first.into_iter().for_each(|(task, _)| task.complete(Err(error.clone())));
        }
        let in_flight: RefCell<VecDeque<(Task, Option<Staged>)>> = RefCell::default();
        let fail = |task: Task, error| {
            task.complete(Err(error));
            // The peer waits for this message.
            failure::abort(&shared.status);
        };
        let next = || loop {
            let (task, interrupted) = match first.pop_front() {
                Some(first) => first,
                None => (self.next_message(in_flight.borrow().is_empty())?, None),
            };
            let mut call = task.call.clone();
            let staged = if interrupted.is_some() {
                // It has begun where it was called, on memory of the host.
                Ok(None)
            } else {
                task.begin();
                // SAFETY: the caller that queued the call keeps its buffers until it completes.
                unsafe { Staged::begin(&shared, &mut call) }
            };
            match staged {
                Ok(staged) => in_flight.borrow_mut().push_back((task, staged)),
                Err(error) => {
                    fail(task, error);
                    continue;
                }
            }
            return Some(Message { call, interrupted });
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
            unsafe { core.run_point_to_point(&shared.info, next, finished, || false) }
        };
        let result = shared.unless_it_panics(core, call.op, run);
        if let Err(error) = result {
            let error = shared.fail(core, error);
            for (task, _) in in_flight.into_inner() {
                task.complete(Err(error.clone()));
            }
        }
    }

    /// The next task, if it is a message that can start now.
    fn next_message(&mut self, is_alone: bool) -> Option<Task> {
        let task = match self.ahead.take() {
            Some(task) => task,
            // What was interrupted came before the core was taken, so there is no more of it.
            None => loop {
                if let Some(task) = self.tasks.try_recv().ok()? {
                    break task;
                }
            },
        };
        let Call { op, lent, .. } = &task.call;
        if !op.is_point_to_point() {
            self.ahead = Some(task);
            return None;
        }
        // What the stream was given before may wait for a message in flight.
        if !is_alone && lent.as_ref().is_some_and(|lent| !lent.is_ready()) {
            self.ahead = Some(task);
            // The stream is looked at again at once, instead of when a link is ready.
            self.shared.wake_on_links();
            return None;
        }
        Some(task)
    }
}
