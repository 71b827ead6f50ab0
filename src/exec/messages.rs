//! Operations by messages: the engine executes a schedule over links.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::core::Core;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::engine::{InFlight, Job, Now, Paused};
use crate::error::{Error, Result};
use crate::failure::{CommInfo, OpContext};
use crate::reduce::{Packing, normalise_bools};
use crate::schedule::select::segment_bytes;
use crate::schedule::{Algorithm, Blocks, Problem, Racks, Step, compressed, segment_of_compressed, steps};
use crate::sys::Waiting;
use crate::trace::{self, LogEntry};
use crate::types::{DType, Descriptor, Op, Rank};

/// A send or a receive.
pub(crate) struct Message<'a> {
    pub(crate) call: Cow<'a, Call>,
    /// How far it has come on another thread.
    pub(crate) interrupted: Option<Interrupted>,
}

/// A send or a receive that another thread continues.
pub(crate) struct Interrupted {
    progress: Paused,
    recorded: Recorded,
}

/// What a message in flight needs at its end: its entry in the recording, and the buffer in which it
/// receives bools.
struct Recorded {
    entry: trace::EntryId,
    bools: Option<RawSliceMut>,
}

impl Recorded {
    /// Ends the record of a message, before its buffer is given back.
    fn end(self, history: &trace::OpLog, succeeded: bool) {
        history.end(self.entry, succeeded);
        // SAFETY: the buffer has not been given back yet, and the message has ended.
        unsafe { normalise_received(self.bools) };
    }
}

impl Core {
    /// Ends a send or a receive that nothing continues: the communicator is refused for the reason
    /// `refused`. Returns the call's error. It was in flight when the communicator failed, so it has
    /// failed itself.
    pub(crate) fn give_up(&self, call: &Call, interrupted: Interrupted, refused: &Error) -> Error {
        let Interrupted { progress, recorded } = interrupted;
        recorded.end(&self.recording.history, false);
        let failure = if let Error::Revoked { first } = refused { first } else { refused };
        match failure {
            Error::Aborted { .. } => Error::Aborted { op: call.op, seq: progress.seq() },
            failure => failure.clone(),
        }
    }

    /// Runs a collective of all ranks by messages.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    pub(super) unsafe fn run_by_messages(&mut self, context: OpContext<'_>, call: &Call, algorithm: Algorithm) -> Result<()> {
        let compression = self.compression(call);
        let Some(order) = self.order_of(call.op, algorithm) else {
            // SAFETY: passed on.
            return unsafe { self.run_in_order_of_ranks(context, call, algorithm, compression) };
        };
        let problem = call.problem(self.fabric.rank(), self.layout.ranks);
        // The root and the blocks in the order of the schedule.
        let placed = |blocks: Blocks<'_>| order.iter().map(|&rank| blocks.range(rank)).collect::<Vec<Range<usize>>>();
        let is_moved = moves_blocks(call.op);
        let (sends, recvs) = if is_moved { (placed(problem.sends), placed(problem.recvs)) } else { Default::default() };
        let in_order = |blocks, placed| if is_moved { Blocks::Placed(placed) } else { blocks };
        let place = |of: Rank| order.iter().position(|&rank| rank == of).expect("every rank is in the order");
        let (sends, recvs) = (in_order(problem.sends, &sends), in_order(problem.recvs, &recvs));
        let problem = Problem { rank: place(problem.rank), root: place(problem.root), sends, recvs, ..problem };
        // SAFETY: passed on.
        unsafe { self.run_schedule(context, call, problem, Some(&order), algorithm, compression) }
    }

    /// As [`Core::run_by_messages`], on whichever hosts the ranks are.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_by_messages`].
    pub(super) unsafe fn run_in_order_of_ranks(
        &mut self,
        context: OpContext<'_>,
        call: &Call,
        algorithm: Algorithm,
        compression: Option<Packing>,
    ) -> Result<()> {
        let problem = call.problem(self.fabric.rank(), self.layout.ranks);
        // SAFETY: passed on.
        unsafe { self.run_schedule(context, call, problem, None, algorithm, compression) }
    }

    /// Runs a collective of some ranks by messages. The call counts ranks among them.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_by_messages`].
    pub(super) unsafe fn run_among(
        &mut self,
        context: OpContext<'_>,
        call: &Call,
        ranks: &[Rank],
        algorithm: Algorithm,
        compression: Option<Packing>,
    ) -> Result<()> {
        let own = self.fabric.rank();
        let rank = ranks.iter().position(|&rank| rank == own).expect("this rank is one of them");
        // SAFETY: passed on.
        unsafe { self.run_schedule(context, call, call.problem(rank, ranks.len()), Some(ranks), algorithm, compression) }
    }

    /// The ranks in the order in which a schedule of all ranks visits them, if that is another one than theirs.
    fn order_of(&self, op: Op, algorithm: Algorithm) -> Option<Arc<[Rank]>> {
        self.order.clone().filter(|_| algorithm.follows_hosts(op))
    }

    /// Hands the engine a schedule. `ranks` are those of the problem, in its order; all if `None`.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_by_messages`].
    unsafe fn run_schedule<'c>(
        &mut self,
        context: OpContext<'c>,
        call: &'c Call,
        problem: Problem<'c>,
        ranks: Option<&'c [Rank]>,
        algorithm: Algorithm,
        compression: Option<Packing>,
    ) -> Result<()> {
        let Problem { rank, world, .. } = problem;
        if world == 1 {
            return Ok(());
        }
        let starts = self.racks.clone();
        // Schedules between hosts have one rank of each.
        let racks = if algorithm == Algorithm::TwoLevel { Racks::Listed(&starts) } else { Racks::ONE };
        let (steps, kernel): (Box<dyn Iterator<Item = Step>>, _) = match compression {
            Some(_) => {
                let segment = segment_of_compressed(world) / Packing::ALIGN * Packing::ALIGN;
                (Box::new(compressed(Problem { segment, ..problem }, Packing::ALIGN)), None)
            }
            None => {
                let segment = (segment_bytes(algorithm) / call.dtype.size()).max(1);
                (steps(algorithm, Problem { segment, racks, ..problem }), call.kernel())
            }
        };
        let job = Job { context, call: Cow::Borrowed(call), steps, ranks, rank, world, kernel, packing: compression };
        // SAFETY: passed on.
        unsafe { self.engine()?.run(job) }
    }

    /// Runs sends and receives side by side: those that `next` yields, also while others are in
    /// flight. `finished` is called for each that ends, with its key: how many `next` has yielded before.
    ///
    /// If they all wait for peers and `is_wanted` says that another thread has a call, this returns
    /// those that have not ended, in their order. The communicator's next operation continues them.
    ///
    /// # Safety
    ///
    /// Each call was checked. Its buffers are valid until it has ended, and nothing else uses them.
    pub(crate) unsafe fn run_point_to_point<'a>(
        &mut self,
        info: &'a CommInfo,
        mut next: impl FnMut() -> Option<Message<'a>>,
        mut finished: impl FnMut(u64),
        is_wanted: impl Fn() -> bool,
    ) -> Result<Vec<Interrupted>> {
        self.engine()?;
        let Core { engine: Some(engine), recording, sent, fabric, layout, .. } = self else {
            unreachable!("the engine was just made")
        };
        let in_flight: RefCell<InFlight<Recorded>> = RefCell::default();
        let next = || {
            let Message { call, interrupted } = next()?;
            let Call { op, root, send, recv, source, dtype, timeout, .. } = *call;
            let (rank, world) = (fabric.rank(), layout.ranks);
            if let Some(Interrupted { progress, recorded }) = interrupted {
                in_flight.borrow_mut().push(recorded);
                // Its progress has its number.
                let context = OpContext::new(call.descriptor(0), info).called(op).within(timeout);
                return Some((job(call, context, rank, world), Some(progress)));
            }
            // A receive gets its number when its message arrives.
            sent[root] += u64::from(op == Op::Send);
            let seq = if op == Op::Send { sent[root] } else { 0 };
            let context = OpContext::new(call.descriptor(seq), info).called(op).within(timeout);
            let peer = source.is_none().then_some(root as u32);
            let with_peer = Descriptor { op, root: peer, ..context.descriptor };
            let entry = recording.history.begin(&with_peer.encode(), (send.len + recv.len) as u64, 0);
            in_flight.borrow_mut().push(Recorded { entry, bools: (dtype == DType::Bool && op == Op::Recv).then_some(recv) });
            Some((job(call, context, rank, world), None))
        };
        let ended = |key: u64| {
            in_flight.borrow_mut().remove(key).into_iter().for_each(|recorded| recorded.end(&recording.history, true));
            finished(key);
        };
        // SAFETY: passed on.
        let result = unsafe { engine.run_together(next, ended, is_wanted) };
        let mut in_flight = in_flight.into_inner();
        match result {
            Ok(paused) => {
                debug_assert_eq!(paused.len(), in_flight.len());
                Ok(paused
                    .into_iter()
                    .zip(in_flight.take())
                    .map(|(progress, recorded)| Interrupted { progress, recorded })
                    .collect())
            }
            Err(error) => {
                in_flight.take().for_each(|recorded| recorded.end(&recording.history, false));
                Err(error)
            }
        }
    }
}

/// Bytes of the messages for which it pays to try [`Core::run_message_now`]. A ring shows such a message, with
/// its header, at once (`PORTION` and `SHORT_REST` there).
const SHORT: usize = 16 << 10;

impl Core {
    /// Runs one send or receive, and returns true, if it can end within the time for which a wait
    /// spins. Otherwise nothing has happened.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_point_to_point`].
    pub(crate) unsafe fn run_message_now(&mut self, info: &CommInfo, call: &Call, is_wanted: impl Fn() -> bool) -> bool {
        let Call { op, root, send, recv, dtype, timeout, .. } = *call;
        let Some(engine) = &mut self.engine else { return false };
        if send.len + recv.len > SHORT || call.source.is_some() || (dtype == DType::Bool && op == Op::Recv) {
            return false;
        }
        let seq = if op == Op::Send { self.sent[root] + 1 } else { engine.received_from(root) + 1 };
        let mut context = OpContext::new(call.descriptor(seq), info).called(op).within(timeout);
        if op == Op::Send {
            // SAFETY: passed on.
            if !unsafe { engine.send_now(&context, root, send) } {
                return false;
            }
            self.sent[root] = seq;
        } else {
            let mut waiting = Waiting::default();
            loop {
                // SAFETY: passed on.
                match unsafe { engine.receive_now(&mut context, root, recv) } {
                    Now::Received => break,
                    Now::NotYet if !is_wanted() && !self.patience.pause(&mut waiting) => {}
                    Now::NotYet | Now::Never => return false,
                }
            }
            self.patience.done(waiting);
        }
        let with_peer = Descriptor { op, root: Some(root as u32), ..context.descriptor };
        LogEntry::new(&self.recording.history, (send.len + recv.len) as u64, 0).end(&with_peer.encode(), true);
        context.rest();
        true
    }
}

/// Whether every rank gives or gets a block of its own, which schedules may move in any order.
fn moves_blocks(op: Op) -> bool {
    matches!(op, Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV)
}

/// The job of one send or receive.
fn job<'a>(call: Cow<'a, Call>, context: OpContext<'a>, rank: Rank, world: usize) -> Job<'a> {
    let Call { op, root, count, .. } = *call;
    let none = Blocks::Even(0);
    let problem = Problem { op, rank, world, root, count, sends: none, recvs: none, segment: 1, racks: Racks::ONE };
    let steps = steps(Algorithm::Direct, problem);
    Job { context, call, steps, ranks: None, rank, world, kernel: None, packing: None }
}

/// Makes every byte of received bools 0 or 1.
///
/// # Safety
///
/// The buffer is valid, and nothing else uses it.
unsafe fn normalise_received(bools: Option<RawSliceMut>) {
    if let Some(bools) = bools {
        // SAFETY: passed on.
        unsafe { normalise_bools(bools.ptr, bools.len) };
    }
}
