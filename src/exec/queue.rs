//! Operations that wait for their turn, and the progress thread that carries them out.

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
use super::device::Staged;
use super::state::CommState;
use crate::error::{Error, Result};
use crate::exec::work::Completion;
use crate::failure;

/// A queue of operations. Its thread is started with the first of them.
pub(crate) struct Queue {
    /// Operations that have been queued and have not ended.
    pending: Arc<AtomicUsize>,
    /// Those of them for which only a stream waits.
    unattended: Arc<AtomicUsize>,
    thread: Mutex<Option<Progress>>,
}

struct Progress {
    tasks: Sender<Task>,
    thread: JoinHandle<()>,
    /// Ends the thread's sleep on links, once it has slept there.
    waker: Arc<Mutex<Option<Arc<Waker>>>>,
}

/// An operation that has been queued. It completes whatever happens: dropped, as given up.
struct Task {
    call: Call,
    completion: Option<Arc<dyn Completion>>,
    pending: Arc<AtomicUsize>,
    /// Counted there, if only a stream waits for it.
    unattended: Option<Arc<AtomicUsize>>,
}

impl Task {
    fn complete(mut self, result: Result<()>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<()>) {
        let Some(completion) = self.completion.take() else { return };
        if let Some(lent) = &self.call.lent {
            lent.open();
        }
        // Before the waiter goes on: its next call shall find the queue idle.
        self.pending.fetch_sub(1, Ordering::AcqRel);
        if let Some(unattended) = self.unattended.take() {
            unattended.fetch_sub(1, Ordering::AcqRel);
        }
        completion.complete(result);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // It has no number yet, or nobody who could tell it.
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

    /// Queues a call that has been checked. Whoever waits for the completion keeps its buffers valid until then; it comes in any
    /// case, also if this fails.
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
        // If the thread has ended, the task comes back, and completes by being dropped.
        let _ = progress.tasks.send(task);
        if let Some(Err(error)) = progress.waker.lock().as_ref().map(|waker| waker.wake()) {
            // The task is queued, and its buffers are lent: it starts a little later.
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

    /// Gives up what has not ended, and ends the thread.
    pub(crate) fn close(&self, shared: &CommState) {
        let Some(Progress { tasks, thread, .. }) = self.thread.lock().take() else { return };
        // To the caller these have returned; each ends by its deadline.
        while self.unattended.load(Ordering::Acquire) > 0 && !shared.info.cancel.is_cancelled() {
            std::thread::sleep(CLOSING);
        }
        if !self.is_idle() {
            failure::abort(&shared.status);
        }
        drop(tasks);
        // A panic there has been printed, and its operations are lost either way.
        let _ = thread.join();
    }
}

/// How often it is looked whether operations have ended for which only streams wait.
const CLOSING: Duration = Duration::from_micros(200);

/// What the progress thread works with.
struct Worker {
    shared: Arc<CommState>,
    tasks: Receiver<Task>,
    waker: Arc<Mutex<Option<Arc<Waker>>>>,
    /// A task that was taken from the queue too early: a collective behind messages, or a message whose stream has not come to it.
    ahead: Option<Task>,
}

impl Worker {
    /// Carries out tasks in order until the queue is closed and empty.
    fn work(mut self) {
        while let Some(task) = self.ahead.take().or_else(|| self.tasks.recv().ok()) {
            let shared = self.shared.clone();
            let mut core = shared.core.lock();
            let op = task.call.op;
            let carried_out = std::panic::catch_unwind(AssertUnwindSafe(|| {
                if op.is_point_to_point() {
                    self.point_to_point(&mut core, task);
                } else {
                    // SAFETY: whoever queued the call keeps its buffers until it completes.
                    let result = unsafe { shared.carry_out(&mut core, &task.call) };
                    task.complete(result);
                }
            }));
            if carried_out.is_err() {
                // A defect of this library. What was under way has been given up, and nothing of it is used again.
                _ = shared.fail(&mut core, Error::Aborted { op, seq: 0 });
            }
        }
    }

    /// Carries out sends and receives side by side, so that none waits for one that was queued before it: this task, and those
    /// behind it up to the next collective, also such as are queued meanwhile.
    fn point_to_point(&mut self, core: &mut super::core::Core, first: Task) {
        let shared = self.shared.clone();
        let op = first.call.op;
        match shared.check_not_revoked(core, &first.call).and_then(|()| core.waker()) {
            // From now on, whoever queues a task ends this thread's sleep on links.
            Ok(waker) => *self.waker.lock() = Some(waker),
            Err(error) => return first.complete(Err(error)),
        }
        let under_way: RefCell<VecDeque<(Task, Option<Staged>)>> = RefCell::default();
        let worker = RefCell::new(&mut *self);
        let mut first = Some(first);
        let give_up = |task: Task, error| {
            task.complete(Err(error));
            // The other side waits for it.
            failure::abort(&shared.status);
        };
        let next = || {
            let mut worker = worker.borrow_mut();
            loop {
                let is_message = |task: &Task| task.call.op.is_point_to_point();
                let task = first.take().or_else(|| worker.ahead.take_if(|task| is_message(task)));
                let task = task.or_else(|| if worker.ahead.is_some() { None } else { worker.tasks.try_recv().ok() })?;
                if !is_message(&task) {
                    worker.ahead = Some(task);
                    return None;
                }
                let mut call = task.call.clone();
                // What its stream was given before may wait for a message that is under way.
                let is_ready = || call.lent.as_ref().is_none_or(|lent| lent.is_ready());
                if !under_way.borrow().is_empty() && !is_ready() {
                    worker.ahead = Some(task);
                    // It is looked at again at once, and not when a link has something.
                    if let Some(Err(error)) = worker.waker.lock().as_ref().map(|waker| waker.wake()) {
                        tracing::debug!(%error, "a message starts a little later");
                    }
                    return None;
                }
                // SAFETY: whoever queued the call keeps its buffers until it completes.
                match unsafe { Staged::begin(&shared, &mut call) } {
                    Ok(staged) => under_way.borrow_mut().push_back((task, staged)),
                    Err(error) => {
                        give_up(task, error);
                        continue;
                    }
                }
                return Some(call);
            }
        };
        let finished = |place: usize| {
            let Some((task, staged)) = under_way.borrow_mut().remove(place) else { return };
            // SAFETY: as above.
            match staged.map_or(Ok(()), |staged| unsafe { staged.finish() }) {
                Ok(()) => task.complete(Ok(())),
                Err(error) => give_up(task, error),
            }
        };
        let run = |core: &mut super::core::Core| {
            // SAFETY: the caller that queued the calls keeps their buffers until they complete.
            unsafe { core.point_to_point(&shared.info, next, finished) }
        };
        let result = shared.unless_it_panics(core, op, run);
        if let Err(error) = result {
            let error = shared.fail(core, error);
            for (task, _) in under_way.into_inner() {
                task.complete(Err(error.clone()));
            }
        }
    }
}
