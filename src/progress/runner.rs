//! What runs the operations of the queue: the progress thread, or a thread that waits for one of
//! them.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::state::{CommState, DeviceMessage};
use super::tasks::{Task, Tasks, Turn};
use super::work::Helper;
use crate::call::Call;
use crate::engine::InFlight;
use crate::error::Error;
use crate::exec::Core;
use crate::exec::messages::{Interrupted, Message};
use crate::failure;
use crate::sys::{Backoff, Patience, Waiting};

/// A message in flight, and its part on a device.
type Begun = (Task, Option<Box<dyn DeviceMessage>>);

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
        while let Some(turn) = self.tasks.await_turn(&*self.shared.devices) {
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
        if interrupted.is_empty() && !self.is_next_ready(&mut core, &turn) {
            return;
        }
        if op.is_point_to_point() {
            if catch_unwind(AssertUnwindSafe(|| self.run_side_by_side(&mut core, &turn, interrupted))).is_err() {
                _ = shared.fail(&mut core, panicked);
            }
            return;
        }
        let Some(mut task) = turn.take_next() else { return };
        task.begin();
        if let Some(handover) = task.handover.take() {
            drop(core);
            handover.give();
            drop(turn);
            task.complete(Ok(()));
            return;
        }
        // SAFETY: the caller that queued the call keeps its buffers until it completes.
        let ran = catch_unwind(AssertUnwindSafe(|| unsafe { shared.dispatch(&mut core, &task.call) }));
        let result = ran.unwrap_or_else(|_| Err(shared.fail(&mut core, panicked)));
        // Without either, the thread that is told can go on at once.
        drop(core);
        drop(turn);
        task.complete(result);
    }

    /// Waits until the next task can begin, if replayed ones may come before. Returns false if there is
    /// another next task then, or none.
    fn is_next_ready(&self, core: &mut Core, turn: &Turn<'_>) -> bool {
        let shared = &self.shared;
        if !shared.devices.has_graphs() {
            return true;
        }
        let next = turn.peek(|call| call.on_device.is_some().then(|| call.clone())).flatten();
        let Some(call) = next else { return true };
        let seq = (!call.op.is_point_to_point()).then(|| core.next_seq());
        match shared.devices.wait_to_begin(shared, &call, seq) {
            Ok(None) => true,
            Ok(Some(replayed)) => {
                self.tasks.push_replayed(replayed);
                false
            }
            Err(error) => {
                let error = shared.fail(core, error);
                turn.take_next().into_iter().for_each(|task| task.complete(Err(error.clone())));
                false
            }
        }
    }

    /// Runs sends and receives side by side, so that none waits for one that was queued before it:
    /// those that were interrupted, and the tasks up to the next collective, also those that are
    /// queued meanwhile.
    fn run_side_by_side(&self, core: &mut Core, turn: &Turn<'_>, mut interrupted: VecDeque<(Task, Interrupted)>) {
        let shared = &self.shared;
        let first = interrupted.front().map(|(task, _)| task.call.clone()).or_else(|| turn.peek(Call::clone));
        let Some(first) = first else { return };
        let is_ready = shared.check_not_revoked(core, &first);
        // The peers wait for the messages.
        let is_ready = is_ready.and_then(|()| core.engine().map(drop).map_err(|error| shared.fail(core, error)));
        if let Err(error) = is_ready {
            if interrupted.is_empty() {
                turn.take_next().into_iter().for_each(|task| task.complete(Err(error.clone())));
            }
            for (task, interrupted) in interrupted {
                let error = core.give_up(&task.call, interrupted, &error);
                task.complete(Err(error));
            }
            return;
        }
        let in_flight: RefCell<InFlight<Begun>> = RefCell::default();
        let fail = |task: Task, error| {
            // The peer waits for this message.
            failure::end_by_error(&shared.status, &error);
            task.complete(Err(error));
        };
        // Messages that have ended, and that their streams have not left. A stream takes its
        // messages in the order in which they were called, and one of these may wait for one in flight.
        let leaving: RefCell<Vec<(Task, Box<dyn DeviceMessage>)>> = RefCell::default();
        let backoff = Backoff::default();
        let complete = |task: Task, message: &dyn DeviceMessage| {
            message.count(shared);
            task.complete(Ok(()));
        };
        let complete_left = || {
            let left: Vec<_> = leaving.borrow_mut().extract_if(.., |(_, message)| message.has_left()).collect();
            left.into_iter().for_each(|(task, message)| complete(task, &*message));
            if leaving.borrow().is_empty() {
                backoff.reset();
            } else {
                // They are looked at again soon, instead of when a link is ready.
                backoff.wait();
                shared.wake_on_links();
            }
        };
        // Messages that are next. All of them have begun before the first one goes on.
        let taken: RefCell<VecDeque<Task>> = RefCell::default();
        let next = || loop {
            complete_left();
            let (task, interrupted) = match interrupted.pop_front() {
                Some((task, progress)) => (task, Some(progress)),
                None => {
                    let mut taken = taken.borrow_mut();
                    if taken.is_empty() {
                        if turn.is_empty() {
                            return None;
                        }
                        turn.take_messages(&mut taken);
                    }
                    let first = taken.pop_front();
                    (first.or_else(|| self.next_message(turn, in_flight.borrow().is_empty()))?, None)
                }
            };
            let mut call = task.call.clone();
            let staged = if interrupted.is_some() {
                // It has begun where it was called, on memory of the host.
                Ok(None)
            } else {
                task.begin();
                shared.devices.begin_message(shared, &mut call)
            };
            match staged {
                Ok(staged) => _ = in_flight.borrow_mut().push((task, staged)),
                Err(error) => {
                    fail(task, error);
                    continue;
                }
            }
            return Some(Message { call: Cow::Owned(call), interrupted });
        };
        let finished = |key: u64| {
            let Some((task, staged)) = in_flight.borrow_mut().remove(key) else { return };
            let Some(staged) = staged else { return task.complete(Ok(())) };
            match staged.end(shared) {
                Ok(()) => leaving.borrow_mut().push((task, staged)),
                Err(error) => fail(task, error),
            }
        };
        let run = |core: &mut Core| {
            // SAFETY: the caller that queued the calls keeps their buffers until they complete.
            unsafe { core.run_point_to_point(&shared.info, next, finished, || false) }
        };
        let result = shared.unless_it_panics(core, first.op, run);
        let leaving = leaving.into_inner();
        // Empty, unless the communicator has failed.
        turn.give_back(taken.into_inner());
        if let Err(error) = result {
            let error = shared.fail(core, error);
            let in_flight = in_flight.into_inner().take().map(|(task, _)| task);
            in_flight.chain(leaving.into_iter().map(|(task, _)| task)).for_each(|task| task.complete(Err(error.clone())));
            return;
        }
        for (task, message) in leaving {
            match message.until_left(shared) {
                Ok(()) => complete(task, &*message),
                Err(error) => fail(task, error),
            }
        }
    }

    /// Takes the next task, if it is a message that can start now. `is_alone`: none is in flight.
    fn next_message(&self, turn: &Turn<'_>, is_alone: bool) -> Option<Task> {
        let devices = &self.shared.devices;
        let can_begin = turn.peek(|next| next.op.is_point_to_point().then(|| devices.can_begin(next)))??;
        // A replayed call may have to run before.
        if !can_begin && is_alone && devices.has_graphs() {
            return None;
        }
        // It may come only after the end of a message in flight.
        if !can_begin && !is_alone {
            // It is looked at again at once, instead of when a link is ready.
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
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use crate::communicator::Communicator;
    use crate::error::{Error, Result};
    use crate::raw::RawCall;
    use crate::sys::Timeline;
    use crate::types::{DType, Op, ReduceOp};

    /// Receives bools from rank 1.
    fn receive(comm: &Communicator, into: &mut [u8], timeout: Duration) -> Result<()> {
        let mut call = RawCall::new(Op::Recv, DType::Bool);
        call.peer(1).timeout(timeout);
        // SAFETY: `into` is borrowed until the call has ended.
        unsafe { call.buffers(std::ptr::null(), into.as_mut_ptr(), into.len()).run(comm) }
    }

    /// The call of the thread that was interrupted fails as if nothing had interrupted it.
    #[test]
    fn a_receive_that_is_interrupted_when_the_communicator_ends_is_ended_in_full() {
        let ranks = Communicator::in_process(2).unwrap();
        let comm = &ranks[0];
        std::thread::scope(|scope| {
            let interrupted = scope.spawn(|| {
                let mut bools = [7u8; 100];
                (receive(comm, &mut bools, Duration::from_secs(100)), bools)
            });
            // It has begun, and has seen no failure.
            let history = &comm.exec.state.recording.history;
            while !history.operations(&Timeline::up_to_now()).iter().any(|begun| begun.descriptor.op == Op::Recv) {
                std::thread::yield_now();
            }
            // As if another thread had aborted it while no thread held the core.
            let aborted = Error::Aborted { op: Op::Connect, seq: 0 };
            comm.exec.state.failure.set(Arc::new(aborted)).unwrap();
            let refused = receive(comm, &mut [0], Duration::from_secs(100));
            assert!(matches!(refused, Err(Error::Revoked { .. })), "{refused:?}");
            let (result, bools) = interrupted.join().unwrap();
            assert!(matches!(result, Err(Error::Aborted { op: Op::Recv, seq: 1 })), "{result:?}");
            assert!(bools.iter().all(|&byte| byte <= 1), "{bools:?}");
        });
        let recorded = comm.exec.state.recording.history.operations(&Timeline::up_to_now());
        assert!(recorded.last().is_some_and(|last| last.descriptor.op == Op::Recv && last.failed), "{recorded:?}");
        assert!(recorded.iter().all(|operation| operation.end.is_some()), "{recorded:?}");
    }

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
