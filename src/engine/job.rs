//! A job for the engine, and how far it has come.

use std::borrow::Cow;
use std::time::Instant;

use crate::call::Call;
use crate::failure::OpContext;
use crate::reduce::{Kernel, Packing};
use crate::schedule::{BufferRef, Span, Step};
use crate::types::{Rank, ReduceOp, Tag, mix};

/// One rank's part of an operation.
pub(crate) struct Job<'a> {
    pub(crate) context: OpContext<'a>,
    /// Sends and receives may own theirs: the next may come while they are in flight.
    pub(crate) call: Cow<'a, Call>,
    /// The steps of the schedule. Its ranks are indices into `ranks`.
    pub(crate) steps: Box<dyn Iterator<Item = Step> + 'a>,
    /// The ranks that take part, in the order of the schedule; all if `None`.
    pub(crate) ranks: Option<&'a [Rank]>,
    /// This rank in the schedule.
    pub(crate) rank: Rank,
    /// The number of ranks in the schedule.
    pub(crate) world: usize,
    pub(crate) kernel: Option<Kernel>,
    /// How elements are packed in scratch and in messages, if the steps convert. Its folds take the
    /// place of the kernel's.
    pub(crate) packing: Option<Packing>,
}

impl Job<'_> {
    /// Returns the bytes of a run of elements in one of the job's buffers.
    #[inline]
    pub(super) fn bytes(&self, place: BufferRef, count: usize) -> usize {
        match self.packing {
            Some(packing) if place == BufferRef::Scratch => packing.bytes(count),
            _ => count * self.call.dtype.size(),
        }
    }

    /// Returns how many ranks' parts a finished reduction holds: those of all ranks of the communicator.
    #[inline]
    pub(super) fn parts(&self) -> usize {
        self.context.info.members.len()
    }

    /// Returns the divisor of a finished sum of packed elements; 1 for none.
    pub(super) fn divisor(&self) -> usize {
        if self.call.redop == Some(ReduceOp::Average) { self.parts() } else { 1 }
    }

    /// Returns a number for a run of elements that this rank packs.
    pub(super) fn run(&self, span: Span) -> u64 {
        mix(mix(self.context.descriptor.seq, self.rank as u64), mix(span.place as u64, span.at as u64))
    }

    /// Returns the communicator's rank of a rank in the schedule.
    #[inline]
    pub(super) fn rank_of(&self, rank: Rank) -> Rank {
        self.ranks.map_or(rank, |ranks| ranks[rank])
    }
}

/// A job in progress.
pub(super) struct Active<'a> {
    pub(super) number: u64,
    pub(super) job: Job<'a>,
    pub(super) step: Option<Step>,
    /// Whether the header of the step's message has been received, so that the payload is next.
    pub(super) has_header: bool,
    /// Bytes of the payload received so far.
    pub(super) done: usize,
    /// Bytes of the padding received so far.
    pub(super) padding: usize,
    /// The message with which the step forwards, and the peer that gets it.
    pub(super) forward: Option<(Rank, u64)>,
    /// For a job that receives from any rank: the sender, once it is known.
    pub(super) sender: Option<Rank>,
    /// Whether no steps are left.
    pub(super) exhausted: bool,
}

impl<'a> Active<'a> {
    pub(super) fn new(number: u64, job: Job<'a>) -> Active<'a> {
        Active { number, job, step: None, has_header: false, done: 0, padding: 0, forward: None, sender: None, exhausted: false }
    }

    /// Stops a send or a receive. What it was sending stays with the engine.
    pub(super) fn pause(self) -> Paused {
        let Active { number, job, step, has_header, done, padding, forward, sender, exhausted } = self;
        debug_assert!(forward.is_none(), "only a collective forwards");
        let (seq, started) = (job.context.descriptor.seq, job.context.started_at());
        Paused { number, seq, started, step, has_header, done, padding, sender, exhausted }
    }

    /// Continues a send or a receive. `job` is made of the same call.
    pub(super) fn resume(paused: Paused, mut job: Job<'a>) -> Active<'a> {
        let Paused { number, seq, started, step, has_header, done, padding, sender, exhausted } = paused;
        if step.is_some() || exhausted {
            job.steps.next();
        }
        job.context.resume(seq, started);
        Active { number, job, step, has_header, done, padding, forward: None, sender, exhausted }
    }

    /// Whether the job is a collective, which is the only one in progress.
    #[inline]
    pub(super) fn is_collective(&self) -> bool {
        !self.job.context.descriptor.op.is_point_to_point()
    }

    /// Returns the tag of the message that the job sends or receives.
    #[inline]
    pub(super) fn tag(&self) -> Tag {
        self.job.call.tag
    }

    /// Whether the job waits for a message of any rank.
    #[inline]
    pub(super) fn awaits_any(&self) -> bool {
        self.job.call.source.is_some() && self.sender.is_none()
    }

    /// Returns the communicator's rank from which a step receives.
    #[inline]
    pub(super) fn sender(&self, from: Rank) -> Rank {
        self.sender.unwrap_or_else(|| self.job.rank_of(from))
    }

    /// Returns the rank whose message the job waits for.
    #[inline]
    pub(super) fn awaited(&self) -> Option<Rank> {
        match self.step? {
            _ if self.awaits_any() => None,
            Step::Recv { from, .. }
            | Step::RecvSend { from, .. }
            | Step::RecvReduce { from, .. }
            | Step::RecvReduceSend { from, .. } => Some(self.sender(from)),
            Step::Send { .. } | Step::Copy { .. } | Step::Convert { .. } | Step::Fold { .. } => None,
        }
    }
}

/// How far a send or a receive has come that another thread will continue. It borrows nothing.
pub(crate) struct Paused {
    number: u64,
    /// Its sequence number, and when it first had to wait.
    seq: u64,
    started: Option<Instant>,
    step: Option<Step>,
    has_header: bool,
    done: usize,
    padding: usize,
    sender: Option<Rank>,
    exhausted: bool,
}

impl Paused {
    /// The message's sequence number; 0 for a receive that has no message yet.
    pub(crate) fn seq(&self) -> u64 {
        self.seq
    }
}
