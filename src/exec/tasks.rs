//! The operations of a queue, and the turn to run them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::call::Call;
use super::messages::Interrupted;
use super::work::Completion;
use crate::error::{Error, Result};

/// The operations that have been queued.
#[derive(Default)]
pub(super) struct Tasks {
    state: Mutex<State>,
    /// There is something for the progress thread to do.
    wanted: Condvar,
    /// Operations that have been queued and have not ended.
    pending: Arc<AtomicUsize>,
    /// Those of them that only a stream waits for.
    unattended: Arc<AtomicUsize>,
}

#[derive(Default)]
struct State {
    /// Operations that have not begun, in order.
    queued: VecDeque<Task>,
    /// Sends and receives that another thread began. They are continued before anything else.
    interrupted: VecDeque<(Task, Interrupted)>,
    /// Whether a thread runs operations of the queue: one at a time does, so that they keep their
    /// order.
    is_running: bool,
    is_closed: bool,
}

/// An operation that has been queued. It completes in any case: if it is dropped, as aborted.
pub(super) struct Task {
    pub(super) call: Call,
    completion: Option<Arc<dyn Completion>>,
    pending: Arc<AtomicUsize>,
    /// The counter that includes it, if only a stream waits for it.
    unattended: Option<Arc<AtomicUsize>>,
}

impl Task {
    pub(super) fn begin(&self) {
        if let Some(completion) = &self.completion {
            completion.begin();
        }
    }

    /// The operation has ended.
    pub(super) fn complete(mut self, result: Result<()>) {
        self.end(result);
    }

    pub(super) fn end(&mut self, result: Result<()>) {
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

impl State {
    fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.interrupted.is_empty()
    }
}

impl Tasks {
    /// Whether all operations that were queued have ended.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Whether there are operations for which only a stream waits.
    pub(super) fn has_unattended(&self) -> bool {
        self.unattended.load(Ordering::Acquire) > 0
    }

    /// Makes an operation, which counts as pending until it has ended.
    pub(super) fn task(&self, call: Call, completion: Arc<dyn Completion>) -> Task {
        self.pending.fetch_add(1, Ordering::AcqRel);
        let unattended = call.lent.as_ref().is_some_and(|lent| lent.is_closed()).then(|| self.unattended.clone());
        if let Some(unattended) = &unattended {
            unattended.fetch_add(1, Ordering::AcqRel);
        }
        Task { call, completion: Some(completion), pending: self.pending.clone(), unattended }
    }

    /// Queues an operation.
    pub(super) fn push(&self, task: Task) {
        let mut state = self.state.lock();
        state.queued.push_back(task);
        if !state.is_running {
            self.wanted.notify_one();
        }
    }

    /// Puts sends and receives that have begun before what is queued.
    pub(super) fn push_interrupted(&self, interrupted: impl IntoIterator<Item = (Task, Interrupted)>) {
        self.state.lock().interrupted.extend(interrupted);
        self.wanted.notify_one();
    }

    /// From now on [`Tasks::await_turn`] returns when there are no more operations.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.wanted.notify_one();
    }

    /// Waits until there is an operation, and takes the turn to run it. Returns `None` when the queue
    /// is closed and empty.
    pub(super) fn await_turn(&self) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        loop {
            match (state.is_running, state.is_empty()) {
                (false, false) => break,
                (false, true) if state.is_closed => return None,
                _ => self.wanted.wait(&mut state),
            }
        }
        state.is_running = true;
        Some(Turn { tasks: self })
    }

    /// Takes the turn if no other thread has it, and if it begins with an operation that has not
    /// begun, and that `suits`.
    pub(super) fn try_turn(&self, suits: impl Fn(&Call) -> bool) -> Option<Turn<'_>> {
        let mut state = self.state.try_lock()?;
        let is_free = !state.is_running && state.interrupted.is_empty();
        state.queued.front().filter(|first| is_free && suits(&first.call))?;
        state.is_running = true;
        Some(Turn { tasks: self })
    }
}

/// A turn to run operations. Only the thread that has it takes any from the queue.
pub(super) struct Turn<'a> {
    tasks: &'a Tasks,
}

impl Turn<'_> {
    /// Takes the sends and receives that another thread began.
    pub(super) fn take_interrupted(&self) -> VecDeque<(Task, Interrupted)> {
        std::mem::take(&mut self.tasks.state.lock().interrupted)
    }

    /// Takes the next operation.
    pub(super) fn take_next(&self) -> Option<Task> {
        self.tasks.state.lock().queued.pop_front()
    }

    /// Shows what [`Turn::take_next`] will take.
    pub(super) fn peek<R>(&self, look: impl FnOnce(&Call) -> R) -> Option<R> {
        self.tasks.state.lock().queued.front().map(|task| look(&task.call))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.tasks.state.lock();
        state.is_running = false;
        if !state.is_empty() || state.is_closed {
            self.tasks.wanted.notify_one();
        }
    }
}
