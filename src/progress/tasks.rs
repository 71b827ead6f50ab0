//! The operations of a queue, and the turn to run them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::handover::Handover;
use super::state::Devices;
use super::work::Completion;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::exec::messages::Interrupted;

/// The operations that have been queued.
#[derive(Default)]
pub(super) struct Tasks {
    state: Mutex<State>,
    /// How many operations have not begun, for a look without the lock.
    queued: AtomicUsize,
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
    /// A thread that waited has taken a turn, which the progress thread has not noticed yet.
    was_taken: bool,
    /// The progress thread looks for operations by itself soon. It need not be woken for one that
    /// any thread can run.
    is_napping: bool,
    is_closed: bool,
}

/// An operation that has been queued. It completes in any case: if it is dropped, as aborted.
pub(super) struct Task {
    pub(super) call: Call,
    completion: Option<Arc<dyn Completion>>,
    /// Whether a thread that waits for another operation can run this one.
    is_for_any_thread: bool,
    /// Its caller runs it in its turn.
    pub(super) handover: Option<Handover>,
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
        if let Some(on_device) = &self.call.on_device {
            on_device.end(&result);
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

/// The end of a replayed call, of which no caller is told. A failure ends the communicator.
struct Replayed;

impl Completion for Replayed {
    fn begin(&self) {}
    fn complete(&self, _: Result<()>) {}
}

/// How the progress thread looks for replayed calls: at once after an operation, later from time to time.
struct Polling {
    since: Instant,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling { since: Instant::now() }
    }
}

impl Polling {
    /// Returns how long to sleep before the next look.
    fn pause(&self) -> Option<Duration> {
        match self.since.elapsed().as_micros() {
            0..200 => None,
            200..1_000_000 => Some(Duration::from_micros(50)),
            _ => Some(Duration::from_millis(1)),
        }
    }
}

/// How long the progress thread naps, and how often before it sleeps until it is woken.
const NAP: Duration = Duration::from_micros(100);
const NAPS: u32 = 20;

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
    pub(super) fn task(&self, call: Call, completion: Arc<dyn Completion>, is_for_any_thread: bool) -> Task {
        self.pending.fetch_add(1, Ordering::AcqRel);
        let unattended =
            call.on_device.as_ref().is_some_and(|on_device| on_device.is_unattended()).then(|| self.unattended.clone());
        if let Some(unattended) = &unattended {
            unattended.fetch_add(1, Ordering::AcqRel);
        }
        Task { call, completion: Some(completion), is_for_any_thread, handover: None, pending: self.pending.clone(), unattended }
    }

    /// Queues an operation.
    pub(super) fn push(&self, task: Task) {
        let mut state = self.state.lock();
        state.queued.push_back(task);
        self.count(&state);
        self.notify(&state);
    }

    /// Notes how many operations have not begun.
    fn count(&self, state: &State) {
        self.queued.store(state.queued.len(), Ordering::Release);
    }

    /// Wakes the progress thread if it has to run what is next.
    fn notify(&self, state: &State) {
        let is_for_any_thread = state.interrupted.is_empty() && state.queued.front().is_some_and(|task| task.is_for_any_thread);
        let comes_by_itself = state.is_napping && is_for_any_thread;
        if !state.is_running && !comes_by_itself {
            self.wanted.notify_one();
        }
    }

    /// Puts replayed calls before what is queued.
    pub(super) fn push_replayed(&self, calls: Vec<Call>) {
        let mut state = self.state.lock();
        self.add_replayed(&mut state, calls);
        self.notify(&state);
    }

    fn add_replayed(&self, state: &mut State, calls: Vec<Call>) {
        for call in calls.into_iter().rev() {
            state.queued.push_front(self.task(call, Arc::new(Replayed), false));
        }
        self.count(state);
    }

    /// Wakes the progress thread because calls may be replayed from now on.
    pub(super) fn notice_replays(&self) {
        // It looks whether they may while it has the lock.
        drop(self.state.lock());
        self.wanted.notify_one();
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

    /// Waits until there is an operation, and takes the turn to run it: what the progress thread
    /// does. Returns `None` when the queue is closed and empty.
    ///
    /// To wake this thread costs its waker a microsecond or two, and another thread its processor.
    /// If threads that wait took their turns before it was awake, they probably do so again: then it
    /// naps, and callers do not wake it.
    ///
    /// A replayed call wakes no thread, so this one polls `devices`.
    pub(super) fn await_turn(&self, devices: &dyn Devices) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        let mut naps = 0;
        let polling = Polling::default();
        loop {
            match (state.is_running, state.is_empty()) {
                (false, false) => break,
                (false, true) if state.is_closed => return None,
                (false, true) => {
                    if let Some(replayed) = devices.next_replay() {
                        self.add_replayed(&mut state, replayed);
                        break;
                    }
                }
                _ => {}
            }
            if devices.has_graphs() {
                match polling.pause() {
                    Some(pause) => _ = self.wanted.wait_for(&mut state, pause),
                    None => MutexGuard::unlocked(&mut state, std::thread::yield_now),
                }
                continue;
            }
            if std::mem::take(&mut state.was_taken) {
                naps = NAPS;
            }
            if naps == 0 {
                self.wanted.wait(&mut state);
                continue;
            }
            naps -= 1;
            state.is_napping = true;
            _ = self.wanted.wait_for(&mut state, NAP);
            state.is_napping = false;
        }
        state.is_running = true;
        Some(Turn { tasks: self })
    }

    /// Takes the turn if no other thread has it, and if it begins with an operation that any thread
    /// can run.
    pub(super) fn try_turn(&self) -> Option<Turn<'_>> {
        let mut state = self.state.try_lock()?;
        let is_free = !state.is_running && state.interrupted.is_empty();
        state.queued.front().filter(|first| is_free && first.is_for_any_thread)?;
        state.is_running = true;
        state.was_taken = true;
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
        let mut state = self.tasks.state.lock();
        let task = state.queued.pop_front();
        self.tasks.count(&state);
        task
    }

    /// Whether no operation is queued that has not begun.
    pub(super) fn is_empty(&self) -> bool {
        self.tasks.queued.load(Ordering::Acquire) == 0
    }

    /// Takes the messages on memory of the host that are next. Some at a time: threads that queue more
    /// need the same lock.
    pub(super) fn take_messages(&self, taken: &mut VecDeque<Task>) {
        const MOST: usize = 64;
        let mut state = self.tasks.state.lock();
        let is_one = |task: &Task| task.call.op.is_point_to_point() && task.call.on_device.is_none();
        let count = state.queued.iter().take(MOST).take_while(|task| is_one(task)).count();
        taken.extend(state.queued.drain(..count));
        self.tasks.count(&state);
    }

    /// Gives operations back that were taken and have not begun.
    pub(super) fn give_back(&self, taken: VecDeque<Task>) {
        let mut state = self.tasks.state.lock();
        taken.into_iter().rev().for_each(|task| state.queued.push_front(task));
        self.tasks.count(&state);
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
            self.tasks.notify(&state);
        }
    }
}
