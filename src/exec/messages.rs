//! Operations by messages: the engine executes a schedule over links.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::compression::Compression;
use super::core::Core;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Counts};
use crate::engine::{InFlight, Job, Now, Paused};
use crate::error::{Error, Result};
use crate::failure::{CommInfo, OpContext};
use crate::reduce::{Kernel, normalise_bools};
use crate::schedule::select::segment_bytes;
use crate::schedule::{Algorithm, Blocks, Problem, Racks, Step, compressed, segment_of_compressed, steps};
use crate::sys::Waiting;
use crate::trace;
use crate::types::{DType, Descriptor, Op, Rank};

/// A collective over messages, of all ranks or of some.
pub(super) struct Messages<'a> {
    pub(super) op: Op,
    pub(super) algorithm: Algorithm,
    /// The ranks that take part, in the order of the schedule; all if `None`.
    pub(super) ranks: Option<&'a [Rank]>,
    /// The root's index among them.
    pub(super) root: Rank,
    /// Elements of the whole buffer, where it is not made of blocks.
    pub(super) count: usize,
    pub(super) sends: Blocks<'a>,
    pub(super) recvs: Blocks<'a>,
    pub(super) input: RawSlice,
    pub(super) output: RawSliceMut,
    /// Bytes of an element.
    pub(super) element: usize,
    pub(super) kernel: Option<Kernel>,
    /// How the messages are compressed, if they are: then by direct exchange.
    pub(super) compression: Option<Compression>,
}

impl Messages<'_> {
    /// All ranks, in place in a buffer that is not made of blocks. The root is the first.
    pub(super) fn in_place(op: Op, algorithm: Algorithm, memory: RawSliceMut, element: usize, kernel: Option<Kernel>) -> Self {
        let (count, none) = (memory.len / element, Blocks::Even(0));
        let (input, output) = (memory.as_const(), memory);
        Messages {
            op,
            algorithm,
            ranks: None,
            root: 0,
            count,
            sends: none,
            recvs: none,
            input,
            output,
            element,
            kernel,
            compression: None,
        }
    }
}

/// A send or a receive.
pub(crate) struct Message {
    pub(crate) call: Call,
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
    pub(super) unsafe fn run_by_messages<'c>(
        &mut self,
        context: OpContext<'c>,
        call: &'c Call,
        algorithm: Algorithm,
    ) -> Result<()> {
        let blocks = |counts: &'c Option<Counts>| counts.as_ref().map_or(Blocks::Even(call.count), Counts::blocks);
        let (sends, recvs) = (blocks(&call.send_counts), blocks(&call.recv_counts));
        let order = self.order_of(call.op, algorithm);
        // The blocks in the order of the schedule.
        let placed = |blocks: Blocks<'_>| -> Vec<Range<usize>> {
            let order = order.as_deref().filter(|_| moves_blocks(call.op));
            order.map_or_else(Vec::new, |order| order.iter().map(|&rank| blocks.range(rank)).collect())
        };
        let (placed_sends, placed_recvs) = (placed(sends), placed(recvs));
        let in_order = |blocks, placed| if order.is_some() && moves_blocks(call.op) { Blocks::Placed(placed) } else { blocks };
        let index = |order: &[Rank]| order.iter().position(|&rank| rank == call.root);
        let messages = Messages {
            op: call.op,
            algorithm,
            ranks: order.as_deref(),
            root: order.as_deref().and_then(index).unwrap_or(call.root),
            count: call.count,
            sends: in_order(sends, &placed_sends),
            recvs: in_order(recvs, &placed_recvs),
            input: call.send,
            output: call.recv,
            element: call.dtype.size(),
            kernel: call.kernel(),
            compression: self.compression(call),
        };
        // SAFETY: passed on.
        unsafe { self.run_schedule(context, messages) }
    }

    /// The ranks in the order in which a schedule of all ranks visits them, if that is another one than
    /// theirs. Schedules that move runs of consecutive blocks keep the order of ranks, and so do direct
    /// ones, which reduce in that order.
    fn order_of(&self, op: Op, algorithm: Algorithm) -> Option<Arc<[Rank]>> {
        let follows_hosts = match op {
            Op::AllReduce | Op::Reduce | Op::Broadcast | Op::Barrier => algorithm != Algorithm::Direct,
            _ => moves_blocks(op) && matches!(algorithm, Algorithm::Ring | Algorithm::TwoLevel),
        };
        self.order.clone().filter(|_| follows_hosts)
    }

    /// Hands the engine a schedule.
    ///
    /// # Safety
    ///
    /// The buffers are valid until this returns, and nothing else uses them.
    pub(super) unsafe fn run_schedule<'c>(&mut self, context: OpContext<'c>, messages: Messages<'c>) -> Result<()> {
        let Messages { op, algorithm, ranks, root, count, sends, recvs, input, output, element, kernel, compression } = messages;
        let (all, own) = (self.layout.ranks, self.fabric.rank());
        let rank = ranks.map_or(own, |ranks| ranks.iter().position(|&rank| rank == own).expect("this rank is one of them"));
        let world = ranks.map_or(all, <[Rank]>::len);
        if world == 1 {
            return Ok(());
        }
        let segment = (segment_bytes(algorithm) / element).max(1);
        let starts = self.racks.clone();
        // Schedules between hosts have one rank of each.
        let racks = if algorithm == Algorithm::TwoLevel { Racks::Listed(&starts) } else { Racks::ONE };
        let problem = Problem { op, rank, world, root, count, sends, recvs, segment, racks };
        let (steps, kernel): (Box<dyn Iterator<Item = Step>>, _) = match compression {
            Some(Compression { kernel, .. }) => {
                (Box::new(compressed(Problem { segment: segment_of_compressed(world), ..problem })), Some(kernel))
            }
            None => (steps(algorithm, problem), kernel),
        };
        let narrowed = compression.map(|compression| compression.dtype);
        let job = Job { context, steps, ranks, rank, world, input, output, element, kernel, narrowed, parts: all, source: None };
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
    pub(crate) unsafe fn run_point_to_point(
        &mut self,
        info: &CommInfo,
        mut next: impl FnMut() -> Option<Message>,
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
            let Call { op, root, send, recv, source, dtype, timeout, .. } = call;
            let (rank, world) = (fabric.rank(), layout.ranks);
            if let Some(Interrupted { progress, recorded }) = interrupted {
                in_flight.borrow_mut().push(recorded);
                // Its progress has its number.
                let context = OpContext::new(call.descriptor(0), info).called(op).within(timeout);
                return Some((job(&call, context, rank, world), Some(progress)));
            }
            // A receive gets its number when its message arrives.
            sent[root] += u64::from(op == Op::Send);
            let seq = if op == Op::Send { sent[root] } else { 0 };
            let context = OpContext::new(call.descriptor(seq), info).called(op).within(timeout);
            let peer = source.is_none().then_some(root as u32);
            let with_peer = Descriptor { op, root: peer, ..context.descriptor };
            let entry = recording.history.begin(&with_peer.encode(), (send.len + recv.len) as u64, 0);
            in_flight.borrow_mut().push(Recorded { entry, bools: (dtype == DType::Bool && op == Op::Recv).then_some(recv) });
            Some((job(&call, context, rank, world), None))
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

/// Bytes of the messages for which it pays to try [`Core::run_message_now`].
const SHORT: usize = 8 << 10;

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
        let seq = if op == Op::Send { self.sent[root] + 1 } else { 0 };
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
        let entry = self.recording.history.begin(&with_peer.encode(), (send.len + recv.len) as u64, 0);
        self.recording.history.end(entry, true);
        context.rest();
        true
    }
}

/// Whether every rank gives or gets a block of its own, which schedules may move in any order.
fn moves_blocks(op: Op) -> bool {
    matches!(op, Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV)
}

/// The job of one send or receive.
fn job<'c>(call: &Call, context: OpContext<'c>, rank: Rank, world: usize) -> Job<'c> {
    let Call { op, root, count, send, recv, source, dtype, .. } = *call;
    let none = Blocks::Even(0);
    let problem = Problem { op, rank, world, root, count, sends: none, recvs: none, segment: 1, racks: Racks::ONE };
    Job {
        context,
        steps: steps(Algorithm::Direct, problem),
        ranks: None,
        rank,
        world,
        input: send,
        output: recv,
        element: dtype.size(),
        kernel: None,
        narrowed: None,
        parts: 1,
        source,
    }
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
