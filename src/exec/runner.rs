//! What runs the operations of the queue: the progress thread, or a thread that waits for one of
//! them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::call::Call;
use super::core::Core;
use super::device::Staged;
use super::messages::{Interrupted, Message};
use super::state::CommState;
use super::tasks::{Task, Tasks, Turn};
use super::work::Helper;
use crate::error::Error;
use crate::failure;
use crate::sys::{Patience, Waiting};

/// Runs operations of the queue, in order. A thread does so in its turn: see [`Tasks`].
pub(super) struct Runner {
    pub(super) shared: Arc<CommState>,
    pub(super) tasks: Tasks,
    /// That of threads that wait for operations. They and the progress threads want processors.
    patience: Patience,
    /// How many collectives waiting threads have run.
    #[cfg(test)]
    helped: std::sync::atomic::AtomicU64,
}

impl Runner {
    pub(super) fn new(shared: Arc<CommState>) -> Runner {
        let patience = Patience::new(2 * shared.neighbours);
        Runner {
            shared,
            tasks: Tasks::default(),
            patience,
            #[cfg(test)]
            helped: Default::default(),
        }
    }

    /// The progress thread: runs operations until the queue is closed and empty.
    pub(super) fn work(&self) {
        while let Some(turn) = self.tasks.await_turn() {
            self.run_next(turn);
        }
    }

    /// Runs what is next: a collective, or messages side by side.
    fn run_next(&self, turn: Turn<'_>) {
        let shared = &self.shared;
        let mut core = shared.core.lock();
        // After the core was taken: the thread that had it may have been interrupted.
        let interrupted = turn.take_interrupted();
        let Some(op) = interrupted.front().map(|(task, _)| task.call.op).or_else(|| turn.peek(|next| next.op)) else { return };
        // A panic is a defect of this library. The operations in flight have been aborted, and
        // nothing of them is used again.
        let panicked = Error::Aborted { op, seq: 0 };
        if op.is_point_to_point() {
            if catch_unwind(AssertUnwindSafe(|| self.run_messages(&mut core, &turn, interrupted))).is_err() {
                _ = shared.fail(&mut core, panicked);
            }
            return;
        }
        let Some(task) = turn.take_next() else { return };
        task.begin();
        // SAFETY: the caller that queued the call keeps its buffers until it completes.
        let ran = catch_unwind(AssertUnwindSafe(|| unsafe { shared.dispatch(&mut core, &task.call) }));
        let result = ran.unwrap_or_else(|_| Err(shared.fail(&mut core, panicked)));
        // Without either, the thread that is told can go on at once.
        drop(core);
        drop(turn);
        task.complete(result);
    }

    /// Runs sends and receives side by side, so that none waits for one that was queued before it:
    /// those that were interrupted, and the tasks up to the next collective, also those that are
    /// queued meanwhile.
    fn run_messages(&self, core: &mut Core, turn: &Turn<'_>, mut interrupted: VecDeque<(Task, Interrupted)>) {
        let shared = &self.shared;
        let first = interrupted.front().map(|(task, _)| task.call.clone()).or_else(|| turn.peek(Call::clone));
        let Some(first) = first else { return };
        if let Err(error) = shared.check_not_revoked(core, &first).and_then(|()| core.engine().map(drop)) {
            match interrupted.is_empty() {
                true => turn.take_next().into_iter().for_each(|task| task.complete(Err(error.clone()))),
                false => interrupted.into_iter().for_each(|(task, _)| task.complete(Err(error.clone()))),
            }
            return;
        }
        let in_flight: RefCell<VecDeque<(Task, Option<Staged>)>> = RefCell::default();
        let fail = |task: Task, error| {
            task.complete(Err(error));
            // The peer waits for this message.
            failure::abort(&shared.status);
        };
        let next = || loop {
            let (task, interrupted) = match interrupted.pop_front() {
                Some((task, progress)) => (task, Some(progress)),
                None => (self.next_message(turn, in_flight.borrow().is_empty())?, None),
            };
            let mut call = task.call.clone();
            let staged = if interrupted.is_some() {
                // It has begun where it was called, on memory of the host.
                Ok(None)
            } else {
                task.begin();
                // SAFETY: the caller that queued the call keeps its buffers until it completes.
                unsafe { Staged::begin(shared, &mut call) }
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
        let result = shared.unless_it_panics(core, first.op, run);
        if let Err(error) = result {
            let error = shared.fail(core, error);
            for (task, _) in in_flight.into_inner() {
                task.complete(Err(error.clone()));
            }
        }
    }

    /// Takes the next task, if it is a message that can start now. `is_alone`: none is in flight.
    fn next_message(&self, turn: &Turn<'_>, is_alone: bool) -> Option<Task> {
        let lent = turn.peek(|next| next.op.is_point_to_point().then(|| next.lent.clone()))??;
        // What the stream was given before may wait for a message in flight.
        if !is_alone && lent.is_some_and(|lent| !lent.is_ready()) {
            // The stream is looked at again at once, instead of when a link is ready.
            self.shared.wake_on_links();
            return None;
        }
        turn.take_next()
    }
}

impl Helper for Runner {
    fn help(&self, has_ended: &dyn Fn() -> bool) -> Waiting {
        let mut waiting = Waiting::default();
        while !has_ended() {
            if let Some(turn) = self.tasks.try_turn() {
                self.run_next(turn);
                #[cfg(test)]
                self.helped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            } else if self.patience.pause(&mut waiting) {
                break;
            }
        }
        waiting
    }

    fn has_waited(&self, waiting: Waiting) {
        self.patience.done(waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use crate::communicator::Communicator;
    use crate::types::ReduceOp;

    /// Whichever thread runs an operation, all take effect in the order of the calls.
    #[test]
    fn a_thread_that_waits_runs_what_is_queued() {
        let ranks = Communicator::in_process(2).unwrap();
        std::thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || {
                    for round in 0..10_000u64 {
                        let works: Vec<_> =
                            (0..10).map(|i| comm.start_all_reduce(vec![round + i], ReduceOp::Sum).unwrap()).collect();
                        for (i, work) in (0..).zip(works) {
                            assert_eq!(work.wait().unwrap(), [2 * (round + i)]);
                        }
                        // How soon the progress thread wakes depends on the machine.
                        let mut helped = [comm.exec.queue.runner.helped.load(Ordering::Relaxed)];
                        comm.all_reduce(&mut helped, ReduceOp::Min).unwrap();
                        if helped[0] >= 10 {
                            return;
                        }
                    }
                    panic!("no thread that waited has run an operation");
                });
            }
        });
    }
}
