//! Runs jobs: takes each step as far as links and memory allow.

use std::time::Instant;

use super::frame::{Frame, HEADER, Kind};
use super::in_flight::InFlight;
use super::job::{Active, Job, Paused};
use super::outgoing::Outgoing;
use super::state::{Engine, NotSent, no_link};
use crate::buffer::RawSlice;
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::schedule::{BufferRef, Span, Step};
use crate::sys::Waiting;
use crate::transport::ALIGN;
use crate::types::Rank;

/// How often something moves before the engine checks deadlines and cancellation again. Each time
/// moves some MiB at most, or [`MOST_STEPS`] steps of less.
const BUSY_ROUNDS: u32 = 16;

/// Steps of a job that the engine takes before it looks after the others.
const MOST_STEPS: usize = 64;

/// Sends that begin together before their messages go on their way, so that a call takes several.
const AT_ONCE: usize = 16;

/// Why a job does not advance.
enum Stop {
    Failed(Error),
    NotSent(NotSent),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

impl Engine {
    /// Runs one job.
    ///
    /// # Safety
    ///
    /// What the job's call sends is readable and what it receives writable until this returns, and both
    /// are aligned to the element. Nothing else writes either or reads the output. They do not overlap, or are
    /// in place as [`crate::schedule`] allows.
    pub(crate) unsafe fn run(&mut self, job: Job<'_>) -> Result<()> {
        let mut job = Some(job);
        // SAFETY: as promised by the caller.
        unsafe { self.run_together(|| Some((job.take()?, None)), |_| {}, || false) }.map(drop)
    }

    /// Runs jobs concurrently: those that `next` yields, including those that it yields while
    /// others run. Calls `finished` once for each job that ends, with its key: how many `next` has
    /// yielded before it. An error ends all jobs.
    ///
    /// If nothing moves, or has moved for long, and `is_wanted` says that another thread wants the
    /// engine, this returns the jobs in progress, all of which have to be sends or receives. That
    /// thread passes them to this function again, before anything else. The result is empty if all
    /// jobs have ended.
    ///
    /// A job that uses scratch memory must be the only one.
    ///
    /// # Safety
    ///
    /// As for [`Engine::run`], for each job until it has ended.
    pub(crate) unsafe fn run_together<'a>(
        &mut self,
        mut next: impl FnMut() -> Option<(Job<'a>, Option<Paused>)>,
        mut finished: impl FnMut(u64),
        is_wanted: impl Fn() -> bool,
    ) -> Result<Vec<Paused>> {
        let mut active: InFlight<Active<'a>> = InFlight::default();
        let mut fresh: Vec<u64> = Vec::with_capacity(1);
        let mut waiting = Waiting::default();
        let mut rounds = 0u32;
        self.soonest = None;
        self.gone.clear();
        let result = loop {
            while let Some((job, paused)) = next() {
                fresh.push(self.add(&mut active, job, paused));
            }
            if active.is_empty() {
                break Ok(Vec::new());
            }
            let moved = match self.progress(&mut active, &mut fresh, &mut finished) {
                Ok(moved) => moved,
                Err(error) => break Err(self.name_close(error)),
            };
            if moved {
                self.patience.done(std::mem::take(&mut waiting));
                rounds += 1;
                if !rounds.is_multiple_of(BUSY_ROUNDS) {
                    continue;
                }
                // One message may move all the time while another one, or another thread, waits.
                if let Err(error) = self.look_after(&active) {
                    break Err(error);
                }
            }
            if is_wanted() {
                self.receivers.clear();
                break Ok(active.take().map(Active::pause).collect());
            }
            if !moved
                && !active.is_empty()
                && self.patience.pause(&mut waiting)
                && let Err(error) = self.sleep(&active)
            {
                break Err(error);
            }
        };
        self.scratch.tidy();
        if result.is_err() {
            self.give_up(&active);
        }
        result
    }

    fn add<'a>(&mut self, active: &mut InFlight<Active<'a>>, job: Job<'a>, paused: Option<Paused>) -> u64 {
        let key = active.next_key();
        let job = match paused {
            Some(paused) => {
                let job = Active::resume(paused, job);
                self.outbox.resume(job.number, key);
                job
            }
            None => Active::new(self.outbox.begin(key), job),
        };
        // A job alone is behind no other. The one that was alone may be so from now on.
        if !active.is_empty() {
            let first = active.iter().next().filter(|_| self.soonest.is_none());
            let now = Instant::now();
            let ends = first.into_iter().chain([&job]).filter_map(|job| now.checked_add(job.job.context.left()));
            self.soonest = ends.chain(self.soonest).min();
        }
        active.push(job)
    }

    /// Names the cause of a link that closed before any message came. The peer may have left before
    /// the link opened: a rank says goodbye only on the links that it has.
    fn name_close(&self, mut error: Error) -> Error {
        if let Error::Peer { rank, cause, .. } = &mut error
            && *cause == Cause::Closed
            && !self.heard[*rank]
        {
            *cause = Cause::Gone;
        }
        error
    }

    /// Takes all jobs as far as they get without waiting. `fresh` are the keys of those that have not
    /// begun. Returns whether anything moved. Looks at no job that waits behind another one.
    fn progress(
        &mut self,
        active: &mut InFlight<Active<'_>>,
        fresh: &mut Vec<u64>,
        finished: &mut impl FnMut(u64),
    ) -> Result<bool> {
        let mut moved = false;
        let (count, mut begun) = (fresh.len(), 0);
        for key in fresh.drain(..) {
            begun += 1;
            self.holds = begun < count && !begun.is_multiple_of(AT_ONCE);
            let Some(job) = active.get_mut(key) else { continue };
            // A collective receives from every rank, and is alone.
            if job.is_collective() {
                self.receivers.collective = Some(key);
                continue;
            }
            let advanced = self.advance(job);
            moved |= self.explained(active, advanced)?;
            let Some(job) = active.get_mut(key) else { continue };
            if !job.exhausted && !job.has_header {
                moved |= self.take_unexpected(job)?;
            }
            match (job.exhausted, job.awaited()) {
                (true, _) => moved |= self.finish(active, key, finished),
                (false, Some(peer)) if job.has_header => self.receivers.resume(peer, key),
                (false, from) => self.receivers.push(from, job.tag(), key),
            }
        }
        if let Some(key) = self.receivers.collective
            && let Some(job) = active.get_mut(key)
        {
            let advanced = self.advance(job);
            moved |= self.explained(active, advanced)?;
            if active.get(key).is_some_and(|job| job.exhausted) {
                self.receivers.collective = None;
                moved |= self.finish(active, key, finished);
            }
        }
        if self.receivers.first_of_any().is_none() {
            for at in (0..self.receivers.peers().len()).rev() {
                moved |= self.receive_from(active, self.receivers.peers()[at], finished)?;
            }
        } else {
            let first = self.receivers.first_peer;
            for peer in (first..self.world()).chain(0..first) {
                let is_gone = self.gone.iter().any(|(gone, _)| *gone == peer);
                if !is_gone || self.receivers.first_of(peer).is_some() {
                    moved |= self.receive_from(active, peer, finished)?;
                }
            }
            if let Some(any) = self.receivers.first_of_any().and_then(|key| active.get(key)) {
                self.check_senders(&any.job.context)?;
            }
        }
        let drained = self.drain().map_err(Stop::NotSent);
        moved |= self.explained(active, drained)?;
        while let Some(number) = self.drained.pop() {
            // A job may have ended already: its last message was sent when it began.
            if let Some(key) = self.outbox.key_of(number) {
                moved |= self.finish(active, key, finished);
            }
        }
        Ok(moved)
    }

    /// Receives the messages of a peer that have arrived. Returns whether anything moved.
    fn receive_from(&mut self, active: &mut InFlight<Active<'_>>, peer: Rank, finished: &mut impl FnMut(u64)) -> Result<bool> {
        let mut moved = false;
        for _ in 0..MOST_STEPS {
            let Some(key) = self.route(active, peer, &mut moved)? else { break };
            let Some(job) = active.get_mut(key) else { break };
            let advanced = self.advance(job);
            moved |= self.explained(active, advanced)?;
            if active.get(key).is_some_and(|job| !job.exhausted) {
                break;
            }
            self.receivers.end(peer);
            moved |= self.finish(active, key, finished);
        }
        Ok(moved)
    }

    /// Ends a job that has taken all steps and sent all messages. Returns whether it has ended.
    fn finish(&mut self, active: &mut InFlight<Active<'_>>, key: u64, finished: &mut impl FnMut(u64)) -> bool {
        let Some(job) = active.get(key) else { return false };
        if !job.exhausted || !self.outbox.has_sent(job.number) {
            return false;
        }
        self.outbox.end(job.number);
        active.remove(key).into_iter().for_each(|job| job.job.context.rest());
        finished(key);
        true
    }

    /// Makes a message that was not sent the error of its job, which may be another one than the job
    /// that advanced.
    fn explained(&self, active: &InFlight<Active<'_>>, advanced: Result<bool, Stop>) -> Result<bool> {
        advanced.map_err(|stop| match stop {
            Stop::Failed(error) => error,
            Stop::NotSent(NotSent { job, peer, why }) => {
                let job = self.outbox.key_of(job).and_then(|key| active.get(key)).expect("a job that sends is in flight");
                no_link(&job.job.context, peer, why)
            }
        })
    }

    /// Takes one job as far as it gets without waiting. Returns whether anything moved. A receive waits
    /// until [`Engine::route`] has given it a message.
    fn advance(&mut self, active: &mut Active<'_>) -> Result<bool, Stop> {
        #[cfg(test)]
        (self.looks += 1);
        let mut moved = false;
        for _ in 0..MOST_STEPS {
            if active.exhausted {
                break;
            }
            let Some(step) = active.step else {
                active.step = active.job.steps.next();
                match active.step {
                    Some(step) => self.begin(active, step),
                    None => active.exhausted = true,
                }
                moved = true;
                continue;
            };
            let done = match step {
                Step::Send { to, .. } => {
                    let to = active.job.rank_of(to);
                    if !(self.holds && self.gathers(to)) {
                        self.drain_to(to).map_err(Stop::NotSent)?;
                    }
                    true
                }
                Step::Copy { src, dst } => self.copy(&active.job, src, dst),
                Step::Convert { src, dst } => self.convert(&active.job, src, dst),
                Step::Fold { own, parts, stride, dst } => self.fold(&active.job, own, (parts, stride), dst),
                Step::Recv { .. } if !active.has_header && !active.is_collective() => false,
                Step::Recv { from, dst } | Step::RecvSend { from, dst, .. } => {
                    self.receive(active, from, dst, None, &mut moved)?
                }
                Step::RecvReduce { from, own, dst, finish } | Step::RecvReduceSend { from, own, dst, finish, .. } => {
                    self.receive(active, from, dst, Some((own, finish)), &mut moved)?
                }
            };
            if !done {
                break;
            }
            active.step = None;
            moved = true;
        }
        Ok(moved)
    }

    /// Sends a whole message, and returns true, if nothing is on its way and the link has room.
    /// Otherwise it does nothing: [`Engine::run_together`] sends the message, or finds out why it
    /// cannot.
    ///
    /// # Safety
    ///
    /// `payload` is readable until this returns.
    pub(crate) unsafe fn send_now(&mut self, context: &OpContext<'_>, to: Rank, payload: RawSlice) -> bool {
        let Ok(Some(link)) = self.mesh.link(to) else { return false };
        if !self.outbox.is_empty() {
            return false;
        }
        let header = Frame { kind: Kind::Data, len: payload.len as u64, descriptor: context.words }.encode();
        if payload.len <= ALIGN {
            // One line, and one copy.
            let mut message = [0u8; HEADER + ALIGN];
            message[..HEADER].copy_from_slice(&header);
            // SAFETY: the caller vouches for the payload, which is no longer than the rest of the message.
            unsafe { std::ptr::copy_nonoverlapping(payload.ptr, message[HEADER..].as_mut_ptr(), payload.len) };
            let whole = &message[..HEADER + payload.len.next_multiple_of(ALIGN)];
            // SAFETY: it is borrowed for the call.
            return unsafe { link.send_whole(&[RawSlice::of(whole)]) }.unwrap_or(false);
        }
        let padding = payload.len.next_multiple_of(ALIGN) - payload.len;
        let zeros = [0u8; ALIGN];
        // SAFETY: the caller vouches for the payload; the others are borrowed for the call.
        unsafe { link.send_whole(&[RawSlice::of(&header), payload, RawSlice::of(&zeros[..padding])]) }.unwrap_or(false)
    }

    /// Queues the message of a step, and resets the state of the message that it receives.
    fn begin(&mut self, active: &mut Active<'_>, step: Step) {
        let job = &active.job;
        self.scratch.grow(job.bytes(BufferRef::Scratch, step.scratch(job.world)));
        let (to, span, ready) = match step {
            Step::Send { to, src } => (Some(to), src, src.len),
            Step::RecvSend { to, dst, .. } | Step::RecvReduceSend { to, dst, .. } => (Some(to), dst, 0),
            _ => (None, BufferRef::Scratch.span(0..0), 0),
        };
        (active.has_header, active.done, active.padding, active.forward) = (false, 0, 0, None);
        let Some(to) = to else { return };
        let payload = self.memory(job, span);
        let frame = Frame { kind: Kind::Data, len: payload.len as u64, descriptor: job.context.words };
        let (to, ready) = (job.rank_of(to), job.bytes(span.place, ready));
        self.messages += 1;
        let header = frame.encode();
        self.outbox.push(Outgoing { message: self.messages, job: active.number, to, header, payload, ready, sent: 0 });
        active.forward = (ready < payload.len).then_some((to, self.messages));
    }

    /// Copies, unless a message has still to read the destination.
    fn copy(&mut self, job: &Job<'_>, src: Span, dst: Span) -> bool {
        let (src, dst) = (self.memory(job, src), self.memory_mut(job, dst));
        if src.ptr == dst.ptr {
            return true;
        }
        if self.free(dst, None) < dst.len {
            return false;
        }
        // SAFETY: both lie in the job's buffers or in scratch, which the job's caller vouches for;
        // `copy` allows any overlap.
        unsafe { std::ptr::copy(src.ptr, dst.ptr, dst.len) };
        true
    }

    /// Converts between a buffer and scratch, unless a message has still to read the destination.
    fn convert(&mut self, job: &Job<'_>, from: Span, to: Span) -> bool {
        let (src, dst) = (self.memory(job, from), self.memory_mut(job, to));
        if self.free(dst, None) < dst.len {
            return false;
        }
        let packing = job.packing.expect("a job that converts has a packing");
        // SAFETY: one lies in a buffer of the job, whose elements the packing is for, and one in
        // scratch, with as many elements, so they do not overlap.
        unsafe {
            match to.place {
                BufferRef::Scratch => packing.pack(src.ptr, dst.ptr, to.len, job.run(from)),
                _ => packing.unpack(src.ptr, dst.ptr, to.len),
            }
        }
        true
    }

    /// Folds, unless a message has still to read the destination.
    fn fold(&mut self, job: &Job<'_>, own: Span, (parts, stride): (usize, usize), to: Span) -> bool {
        let dst = self.memory_mut(job, to);
        if self.free(dst, None) < dst.len {
            return false;
        }
        let (len, own) = (own.len, self.memory(job, own));
        let others = self.memory(job, BufferRef::Scratch.span(parts..parts + (job.world - 1) * stride));
        let stride = job.bytes(BufferRef::Scratch, stride);
        let mut addresses = std::mem::take(&mut self.parts);
        addresses.clear();
        addresses.extend((0..job.world).map(|rank| match rank.cmp(&job.rank) {
            std::cmp::Ordering::Equal => own.ptr,
            std::cmp::Ordering::Less => others.ptr.wrapping_add(rank * stride),
            std::cmp::Ordering::Greater => others.ptr.wrapping_add((rank - 1) * stride),
        }));
        // SAFETY: all parts and the destination lie in the job's buffers or in scratch, with `len`
        // elements each. The destination is this rank's part, or overlaps none.
        unsafe {
            match (job.packing, job.kernel) {
                (Some(packing), _) => packing.fold(&addresses, dst.ptr, len, job.divisor(), job.run(to)),
                (None, kernel) => {
                    let kernel = kernel.expect("a job that reduces has a kernel");
                    kernel.fold(&addresses, dst.ptr, len, Some(job.parts()));
                }
            }
        }
        self.parts = addresses;
        true
    }
}

/// Jobs that a simulation advances step by step, in an order of its own.
#[cfg(test)]
pub(crate) struct Stepped<'a>(InFlight<Active<'a>>, Vec<u64>);

#[cfg(test)]
impl Engine {
    /// # Safety
    ///
    /// As for [`Engine::run_together`], until the jobs have ended or failed.
    pub(crate) unsafe fn begin_stepped<'a>(&mut self, jobs: impl IntoIterator<Item = Job<'a>>) -> Stepped<'a> {
        let mut active = InFlight::default();
        let keys = jobs.into_iter().map(|job| self.add(&mut active, job, None)).collect();
        Stepped(active, keys)
    }

    /// Advances the jobs. Returns whether anything moved, or `None` if all have ended.
    pub(crate) fn step(&mut self, stepped: &mut Stepped<'_>) -> Result<Option<bool>> {
        let Stepped(active, fresh) = stepped;
        let moved = self.progress(active, fresh, &mut |_| {}).inspect_err(|_| self.give_up(active))?;
        Ok((!active.is_empty()).then_some(moved))
    }

    /// Returns the peer for which the job waits.
    pub(crate) fn stuck_to(&self, stepped: &Stepped<'_>) -> Option<Rank> {
        stepped.0.iter().next().and_then(Active::awaited).or_else(|| self.outbox.peers().first().copied())
    }
}
