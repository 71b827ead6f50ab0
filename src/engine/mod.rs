//! Executes schedules over links.
//!
//! One thread at a time drives an [`Engine`]: it sends from, receives into and reduces in user memory, on all links at once,
//! and sleeps only when none of them moves.

pub(crate) mod frame;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::Waker;

use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::reduce::Kernel;
use crate::schedule::{BufferRef, Span, Step};
use crate::sys::{Patience, Waiting};
use crate::transport::{ALIGN, Link, Mesh, NoLink};
use crate::types::{Descriptor, Op, Rank};
use frame::{Frame, HEADER, Inbox, Kind};

/// Bytes of a step that are reduced at once, before what they make ready is sent on: they stay in the cache meanwhile.
const SLICE: usize = 128 << 10;

/// The longest sleep, after which it is checked again whether to go on.
const NAP: Duration = Duration::from_millis(500);

/// How long a rank that leaves waits for room in the sockets of links to say so.
const PARTING: Duration = Duration::from_millis(100);

/// How long a link may have been closed by a peer that said nothing before that rank counts as one that has left: the process of a
/// rank that was killed ends a little after its links.
const UNHEARD: Duration = Duration::from_millis(500);

/// One rank's part of an operation.
pub(crate) struct Job<'a> {
    pub(crate) context: OpContext<'a>,
    /// What to do. Ranks in it count as `ranks` says.
    pub(crate) steps: Box<dyn Iterator<Item = Step> + 'a>,
    /// The ranks that take part, in the order of the schedule; all if `None`.
    pub(crate) ranks: Option<&'a [Rank]>,
    /// This rank's place among them, and how many they are.
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) input: RawSlice,
    pub(crate) output: RawSliceMut,
    /// Bytes of an element.
    pub(crate) element: usize,
    pub(crate) kernel: Option<Kernel>,
    /// How many ranks' parts are in a finished reduction.
    pub(crate) parts: usize,
    /// Of a job that receives one message, of whoever sends first: where to put who that was.
    pub(crate) source: Option<Source>,
}

impl Job<'_> {
    /// The communicator's rank of a rank in the schedule.
    fn rank_of(&self, rank: Rank) -> Rank {
        self.ranks.map_or(rank, |ranks| ranks[rank])
    }
}

/// What a rank needs to take part in schedules: its links, and what is on its way through them.
pub(crate) struct Engine {
    mesh: Mesh,
    patience: Arc<Patience>,
    /// Messages that have not drained, in the order in which they were sent.
    outgoing: Vec<Outgoing>,
    /// Counts the messages sent, and the jobs begun.
    messages: u64,
    jobs: u64,
    scratch: Scratch,
    /// The addresses of a fold's parts; kept for its memory.
    parts: Vec<*const u8>,
    /// What comes from each peer.
    inboxes: Vec<Inbox>,
    /// Messages received from each peer that were no part of a collective.
    received: Vec<u64>,
    /// From whom any message has come.
    heard: Vec<bool>,
    /// Since when the link to a peer that said nothing is seen to be closed.
    closed: Vec<Option<Instant>>,
    /// For each peer, the last `drain` that sent to it; and the number of that drain.
    drained: Vec<u64>,
    drains: u64,
    /// What to sleep on; kept for its memory.
    waits: Vec<(Rank, bool, bool)>,
}

// SAFETY: the addresses in `outgoing` and `parts` are used only while the job that lent the memory runs, on whichever
// thread drives the engine then.
unsafe impl Send for Engine {}

/// A message on its way out.
struct Outgoing {
    /// Its number, and that of the job that sent it.
    message: u64,
    job: u64,
    to: Rank,
    header: [u8; HEADER],
    payload: RawSlice,
    /// Bytes of the payload that may leave; fewer than there are while the step that forwards them goes on.
    ready: usize,
    /// Bytes that have left, of header, payload and padding.
    sent: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        HEADER + self.payload.len.next_multiple_of(ALIGN)
    }

    /// What may leave now.
    fn rest(&self) -> [RawSlice; 3] {
        static ZEROS: [u8; ALIGN] = [0; ALIGN];
        let of_header = self.sent.min(HEADER);
        let of_payload = (self.sent - of_header).min(self.payload.len);
        let of_padding = self.sent - of_header - of_payload;
        let padding =
            if self.ready == self.payload.len { self.payload.len.next_multiple_of(ALIGN) - self.payload.len } else { 0 };
        [
            RawSlice::of(&self.header[of_header..]),
            self.payload.take(self.ready).skip(of_payload.min(self.ready)),
            RawSlice::of(&ZEROS[..padding - of_padding.min(padding)]),
        ]
    }

    /// The memory that is still to be read.
    fn unread(&self) -> RawSlice {
        self.payload.skip(self.sent.saturating_sub(HEADER).min(self.payload.len))
    }
}

/// A job under way.
struct Active<'a> {
    number: u64,
    job: Job<'a>,
    step: Option<Step>,
    /// Whether the step has taken its message's header, so that the payload is next.
    has_header: bool,
    /// Bytes of the payload that have been taken in.
    done: usize,
    /// Bytes of the padding that have been taken in.
    padding: usize,
    /// The message with which the step forwards.
    forward: Option<u64>,
    /// Of a job that receives from any rank: the sender, once it is known.
    sender: Option<Rank>,
    /// Until then: the ranks that cannot be the sender, because they have left or nothing listens at their address, and why.
    gone: Vec<(Rank, Cause)>,
    /// No steps are left.
    exhausted: bool,
}

impl<'a> Active<'a> {
    fn new(number: u64, job: Job<'a>) -> Active<'a> {
        Active {
            number,
            job,
            step: None,
            has_header: false,
            done: 0,
            padding: 0,
            forward: None,
            sender: None,
            gone: Vec::new(),
            exhausted: false,
        }
    }

    /// Whether any rank's message would do.
    fn awaits_anybody(&self) -> bool {
        self.job.source.is_some() && self.sender.is_none()
    }

    /// The communicator's rank of one from which a step receives.
    fn sender(&self, from: Rank) -> Rank {
        self.sender.unwrap_or_else(|| self.job.rank_of(from))
    }

    /// The rank whose message the job waits for.
    fn awaited(&self) -> Option<Rank> {
        match self.step? {
            _ if self.awaits_anybody() => None,
            Step::Recv { from, .. }
            | Step::RecvSend { from, .. }
            | Step::RecvReduce { from, .. }
            | Step::RecvReduceSend { from, .. } => Some(self.sender(from)),
            Step::Send { .. } | Step::Copy { .. } | Step::Fold { .. } => None,
        }
    }
}

impl Engine {
    pub(crate) fn new(mesh: Mesh, world: usize, patience: Arc<Patience>) -> Engine {
        Engine {
            mesh,
            patience,
            outgoing: Vec::new(),
            messages: 0,
            jobs: 0,
            scratch: Scratch::default(),
            parts: Vec::new(),
            inboxes: (0..world).map(|_| Inbox::EMPTY).collect(),
            received: vec![0; world],
            heard: vec![false; world],
            closed: vec![None; world],
            drained: vec![0; world],
            drains: 0,
            waits: Vec::new(),
        }
    }

    /// Ends a sleep from another thread.
    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.mesh.waker()
    }

    /// Carries out one job.
    ///
    /// # Safety
    ///
    /// `job.input` is readable and `job.output` writable until this returns, aligned to the element, and nobody else writes
    /// either or reads the output. They are apart or in place as [`crate::schedule`] says.
    pub(crate) unsafe fn run(&mut self, job: Job<'_>) -> Result<()> {
        let mut job = Some(job);
        // SAFETY: passed on.
        unsafe { self.run_together(|| job.take(), |_| {}) }
    }

    /// Carries out jobs side by side: those that `next` yields, also those that it comes to yield while others run. `finished`
    /// is called once for each job that ends, with its place in the order of those that are under way. An error ends all.
    ///
    /// Only for jobs that do not use scratch, unless there is just one.
    ///
    /// # Safety
    ///
    /// As for [`Engine::run`], for each job until it has ended.
    pub(crate) unsafe fn run_together<'a>(
        &mut self,
        mut next: impl FnMut() -> Option<Job<'a>>,
        mut finished: impl FnMut(usize),
    ) -> Result<()> {
        let mut active: Vec<Active<'a>> = Vec::with_capacity(1);
        let mut waiting = Waiting::default();
        let result = loop {
            while let Some(job) = next() {
                self.jobs += 1;
                active.push(Active::new(self.jobs, job));
            }
            if active.is_empty() {
                break Ok(());
            }
            match self.turn(&mut active, &mut finished) {
                Ok(true) => {
                    self.patience.done(std::mem::take(&mut waiting));
                    continue;
                }
                Ok(false) => {}
                Err(error) => break Err(self.without_a_word(error)),
            }
            if !active.is_empty()
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

    /// A peer whose link closes after it has opened may have left meanwhile: its goodbye is for those with whom it has a link.
    fn without_a_word(&self, mut error: Error) -> Error {
        if let Error::Peer { rank, cause, .. } = &mut error
            && *cause == Cause::Closed
            && !self.heard[*rank]
        {
            *cause = Cause::Gone;
        }
        error
    }

    /// Something has failed. Whoever lent memory takes it back now.
    fn give_up(&mut self, active: &[Active<'_>]) {
        for active in active {
            active.job.context.give_up();
        }
        // Nothing can follow a message that was cut off in the middle: the peer sees the link close.
        for out in self.outgoing.drain(..) {
            if out.sent > 0 || self.mesh.has_begun(out.to) {
                self.mesh.close(out.to);
            }
        }
    }

    /// Forgets the messages whose memory callers take back. How much of each has left is unknown, so their links close.
    pub(crate) fn forget_messages(&mut self) {
        for out in self.outgoing.drain(..) {
            self.mesh.close(out.to);
        }
    }

    /// How many messages have been received from a peer that were no part of a collective.
    pub(crate) fn received_from(&self, peer: Rank) -> u64 {
        self.received[peer]
    }

    #[cfg(test)]
    pub(crate) fn has_messages(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Does what can be done now, on all jobs; whether that was anything.
    fn turn(&mut self, active: &mut Vec<Active<'_>>, finished: &mut impl FnMut(usize)) -> Result<bool> {
        let mut moved = false;
        for i in 0..active.len() {
            // Messages of one peer are for the jobs in their order.
            let (earlier, this) = active.split_at_mut(i);
            let is_next = |peer| !earlier.iter().any(|other| other.awaits_anybody() || other.awaited() == Some(peer));
            moved |= self.advance(&mut this[0], is_next)?;
        }
        if let Some(any) = active.first() {
            moved |= self.drain(&any.job.context)?;
        }
        let mut i = 0;
        while i < active.len() {
            if active[i].exhausted && !self.outgoing.iter().any(|out| out.job == active[i].number) {
                active.remove(i).job.context.rest();
                finished(i);
                moved = true;
            } else {
                i += 1;
            }
        }
        Ok(moved)
    }

    /// Sends what may leave, to each peer in order; whether anything did. A peer's failure fails `context`.
    fn drain(&mut self, context: &OpContext<'_>) -> Result<bool> {
        let mut moved = false;
        self.drains += 1;
        for out in &mut self.outgoing {
            if std::mem::replace(&mut self.drained[out.to], self.drains) == self.drains {
                continue;
            }
            let fail = |cause| context.failed(out.to, cause);
            let no_link = |why| no_link(context, out.to, why);
            let Some(link) = self.mesh.link(out.to).map_err(no_link)? else { continue };
            let inbox = &mut self.inboxes[out.to];
            let mut fail = |link: &mut dyn Link, cause| fail(inbox.farewell(link).unwrap_or(cause));
            let rest = out.rest();
            if rest.iter().all(|part| part.len == 0) {
                continue;
            }
            // SAFETY: the header is the message's own; the payload is lent until its job ends, when the message is gone.
            let count = unsafe { link.send(&rest) }.map_err(|cause| fail(link, cause))?;
            out.sent += count;
            moved |= count > 0;
        }
        if moved {
            self.outgoing.retain(|out| out.sent < out.len());
        }
        Ok(moved)
    }

    /// Sleeps until something can move.
    fn sleep(&mut self, active: &[Active<'_>]) -> Result<()> {
        let mut waits = std::mem::take(&mut self.waits);
        waits.clear();
        let mut nap = NAP;
        // Of several jobs that receive from any rank, only the first looks at the links.
        let left: &[(Rank, Cause)] = active.iter().find(|job| job.awaits_anybody()).map_or(&[], |job| &job.gone);
        for job in active {
            if job.awaits_anybody() {
                let rank = job.job.context.info.rank;
                let others = (0..self.drained.len()).filter(|&peer| peer != rank);
                // A link that has closed has nothing to wait for.
                let has_closed = |peer: Rank| self.closed[peer].is_some() || left.iter().any(|(gone, _)| *gone == peer);
                waits.extend(others.clone().filter(|&peer| !has_closed(peer)).map(|peer| (peer, false, true)));
                if self.closed.iter().any(Option::is_some) {
                    nap = nap.min(UNHEARD / 10);
                }
                let context = &job.job.context;
                // Some left without a link, which the failure detector finds out.
                let missed = context.info.cancel.missed();
                let is_gone = |peer: Rank| left.iter().chain(&missed).any(|(gone, _)| *gone == peer);
                let present = others.clone().find(|&peer| !is_gone(peer));
                // At the deadline a rank that left and never sent is the likeliest to be missed. One that sent has done its part.
                let mut all_gone = left.iter().chain(&missed);
                let gone = if present.is_none() { all_gone.next() } else { all_gone.find(|(gone, _)| self.received[*gone] == 0) };
                let left = present.map(|peer| context.patience_with_any(peer, gone.map(|(gone, _)| *gone)));
                let left = match (left, gone) {
                    (Some(Err(Error::Peer { .. })) | None, Some((gone, cause))) => {
                        return Err(context.failed(*gone, cause.clone()));
                    }
                    (Some(left), _) => left?,
                    (None, None) => nap,
                };
                nap = nap.min(left);
                continue;
            }
            let stuck_to = self.outgoing.iter().find(|out| out.job == job.number).map(|out| out.to);
            let awaited = job.awaited();
            waits.extend(awaited.map(|peer| (peer, false, true)));
            if let Some(peer) = awaited.or(stuck_to) {
                nap = nap.min(job.job.context.patience_with(peer)?);
            }
        }
        // A message whose next bytes are not there yet waits for them, not for its link.
        let ready = self.outgoing.iter().filter(|out| out.rest().iter().any(|part| part.len > 0));
        waits.extend(ready.map(|out| (out.to, true, false)));
        let result = self.mesh.sleep(waits.iter().copied(), nap).map_err(Error::os("waiting for peers"));
        self.waits = waits;
        result
    }

    /// Does what can be done of a job now; whether that was anything. It takes messages of a peer only if `is_next`.
    fn advance(&mut self, active: &mut Active<'_>, is_next: impl Fn(Rank) -> bool) -> Result<bool> {
        let mut moved = false;
        while !active.exhausted {
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
                Step::Send { .. } => {
                    self.drain(&active.job.context)?;
                    true
                }
                Step::Copy { src, dst } => self.copy(&active.job, src, dst),
                Step::Fold { own, parts, dst } => self.fold(&active.job, own, parts, dst),
                Step::Recv { .. } if active.awaits_anybody() => {
                    active.sender = self.find_sender(&active.job.context, &mut active.gone, &is_next)?;
                    if active.sender.is_none() {
                        break;
                    }
                    continue;
                }
                Step::Recv { from, dst } | Step::RecvSend { from, dst, .. } => {
                    is_next(active.sender(from)) && self.receive(active, from, dst, None, &mut moved)?
                }
                Step::RecvReduce { from, own, dst, finish } | Step::RecvReduceSend { from, own, dst, finish, .. } => {
                    is_next(active.sender(from)) && self.receive(active, from, dst, Some((own, finish)), &mut moved)?
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

    /// Queues what a step sends, and clears what is known of its message.
    fn begin(&mut self, active: &mut Active<'_>, step: Step) {
        let job = &active.job;
        let scratch = step.scratch(job.world) * job.element;
        self.scratch.grow(scratch);
        let (to, span, ready) = match step {
            Step::Send { to, src } => (Some(to), src, src.len),
            Step::RecvSend { to, dst, .. } | Step::RecvReduceSend { to, dst, .. } => (Some(to), dst, 0),
            _ => (None, BufferRef::Scratch.span(0..0), 0),
        };
        (active.has_header, active.done, active.padding, active.forward) = (false, 0, 0, None);
        let Some(to) = to else { return };
        let payload = self.memory(job, span);
        let frame = Frame { kind: Kind::Data, len: payload.len as u64, descriptor: job.context.words };
        let (to, ready) = (job.rank_of(to), ready * job.element);
        self.messages += 1;
        let header = frame.encode();
        self.outgoing.push(Outgoing { message: self.messages, job: active.number, to, header, payload, ready, sent: 0 });
        active.forward = (ready < payload.len).then_some(self.messages);
    }

    fn memory(&mut self, job: &Job<'_>, span: Span) -> RawSlice {
        let (at, len) = (span.at * job.element, span.len * job.element);
        let whole = match span.place {
            BufferRef::Input => job.input,
            BufferRef::Output => job.output.as_const(),
            BufferRef::Scratch => self.scratch.chunk().as_const(),
        };
        assert!(at + len <= whole.len, "a step reaches beyond its buffer");
        whole.skip(at).take(len)
    }

    fn memory_mut(&mut self, job: &Job<'_>, span: Span) -> RawSliceMut {
        debug_assert_ne!(span.place, BufferRef::Input);
        let chunk = self.memory(job, span);
        RawSliceMut { ptr: chunk.ptr.cast_mut(), len: chunk.len }
    }

    /// How many bytes from the front of a destination no message has still to read, not counting the message with which the
    /// step itself forwards.
    fn free(&self, dst: RawSliceMut, forward: Option<u64>) -> usize {
        let (start, end) = (dst.ptr.addr(), dst.ptr.addr() + dst.len);
        let others = self.outgoing.iter().filter(|out| Some(out.message) != forward);
        let unread = others.map(Outgoing::unread).filter(|chunk| chunk.len > 0);
        let overlapping = unread.filter(|chunk| chunk.ptr.addr() < end && start < chunk.ptr.addr() + chunk.len);
        overlapping.map(|chunk| chunk.ptr.addr().saturating_sub(start)).min().unwrap_or(dst.len)
    }

    /// Copies, if nothing is in the way.
    fn copy(&mut self, job: &Job<'_>, src: Span, dst: Span) -> bool {
        let (src, dst) = (self.memory(job, src), self.memory_mut(job, dst));
        if src.ptr == dst.ptr {
            return true;
        }
        if self.free(dst, None) < dst.len {
            return false;
        }
        // SAFETY: both lie in the job's buffers or in scratch, whose owners vouched for them; `copy` bears any overlap.
        unsafe { std::ptr::copy(src.ptr, dst.ptr, dst.len) };
        true
    }

    /// Folds, if nothing is in the way.
    fn fold(&mut self, job: &Job<'_>, own: Span, parts: usize, dst: Span) -> bool {
        let dst = self.memory_mut(job, dst);
        if self.free(dst, None) < dst.len {
            return false;
        }
        let len = own.len;
        let own = self.memory(job, own);
        let others = self.memory(job, BufferRef::Scratch.span(parts..parts + (job.world - 1) * len));
        let mut addresses = std::mem::take(&mut self.parts);
        addresses.clear();
        addresses.extend((0..job.world).map(|rank| match rank.cmp(&job.rank) {
            std::cmp::Ordering::Equal => own.ptr,
            std::cmp::Ordering::Less => others.ptr.wrapping_add(rank * own.len),
            std::cmp::Ordering::Greater => others.ptr.wrapping_add((rank - 1) * own.len),
        }));
        let kernel = job.kernel.expect("a job that reduces has a kernel");
        // SAFETY: all parts and the destination lie in the job's buffers or in scratch, `len` elements each; the destination is
        // the own part or apart.
        unsafe { kernel.fold(&addresses, dst.ptr, len, Some(job.parts)) };
        self.parts = addresses;
        true
    }

    /// A rank of which the first bytes of a message have come that is not part of a collective. Ranks that will send none are
    /// added to `gone`.
    fn find_sender(
        &mut self,
        context: &OpContext<'_>,
        gone: &mut Vec<(Rank, Cause)>,
        is_next: impl Fn(Rank) -> bool,
    ) -> Result<Option<Rank>> {
        let others = (0..self.drained.len()).filter(|&peer| peer != context.info.rank);
        for peer in others.clone().filter(|&peer| is_next(peer)) {
            if gone.iter().any(|(known, _)| *known == peer) {
                continue;
            }
            let fail = |cause| context.failed(peer, cause);
            let link = match self.mesh.link(peer) {
                Ok(Some(link)) => link,
                Ok(None) => continue,
                // It has left, or has died, which others find out. Somebody else may still send.
                Err(NoLink::Peer(cause @ Cause::Unreachable { kind: std::io::ErrorKind::ConnectionRefused, .. })) => {
                    gone.push((peer, cause));
                    continue;
                }
                Err(why) => return Err(no_link(context, peer, why)),
            };
            let header = match self.inboxes[peer].header(link, &mut false) {
                Ok(Some(header)) => header,
                Ok(None) => continue,
                // A rank that leaves says so on the links that it knows; of this one it has not heard. Its process lives: it has
                // dropped the communicator, and somebody else may still send.
                Err(Cause::Closed) if !self.heard[peer] && self.mesh.is_alive(peer) == Some(true) => {
                    let since = *self.closed[peer].get_or_insert_with(Instant::now);
                    if since.elapsed() >= UNHEARD {
                        gone.push((peer, Cause::Gone));
                    }
                    continue;
                }
                Err(cause) => return Err(fail(cause)),
            };
            let frame = Frame::decode(header);
            match frame.and_then(|frame| Some((frame.kind, Descriptor::decode(frame.descriptor)?))) {
                None => return Err(fail(Cause::Corrupt("a message without a header of this version"))),
                Some((Kind::Data, descriptor)) if descriptor.op == Op::Send => return Ok(Some(peer)),
                // It is ahead, in a collective.
                Some((Kind::Data, _)) => {}
                // The others may still send.
                Some((Kind::Goodbye, left)) => gone.push((peer, Cause::Left { last_seq: left.seq })),
                Some((Kind::Revoked, _)) => return Err(fail(Cause::Revoked)),
            }
        }
        match gone.last() {
            Some((peer, cause)) if gone.len() == others.count() => Err(context.failed(*peer, cause.clone())),
            _ => Ok(None),
        }
    }

    /// Takes in what has come of a step's message; true when all has. Sets `moved` if anything has.
    fn receive(
        &mut self,
        active: &mut Active<'_>,
        from: Rank,
        dst: Span,
        reduce: Option<(Span, bool)>,
        moved: &mut bool,
    ) -> Result<bool> {
        let peer = active.sender(from);
        let dst = self.memory_mut(&active.job, dst);
        let own = reduce.map(|(own, finish)| (self.memory(&active.job, own), finish));
        let free = self.free(dst, active.forward);
        let Active { job, has_header, done, padding, .. } = active;
        if !*has_header && job.context.descriptor.op == Op::Send {
            job.context.number(self.received[peer] + 1);
        }
        let fail = |cause| job.context.failed(peer, cause);
        let no_link = |why| no_link(&job.context, peer, why);
        let Some(link) = self.mesh.link(peer).map_err(no_link)? else { return Ok(false) };
        let inbox = &mut self.inboxes[peer];
        if !*has_header {
            let Some(header) = inbox.header(link, moved).map_err(fail)? else { return Ok(false) };
            self.heard[peer] = true;
            check(header, &job.context, peer, dst.len as u64)?;
            inbox.take();
            *has_header = true;
            if job.context.descriptor.op == Op::Send {
                self.received[peer] += 1;
                if let Some(source) = job.source {
                    // SAFETY: whoever lent the memory for the message lent this with it.
                    unsafe { source.put(peer) };
                }
            }
        }
        let start = *done;
        // What has come is taken in; when the step forwards or reduces, in slices.
        while *done < dst.len && *done - start < SLICE {
            let room = free.saturating_sub(*done);
            let count = match own {
                // SAFETY: `dst` lies in the job's output or in scratch, and no message has still to read the `room`.
                None => unsafe { link.receive(dst.skip(*done).take(room)) }.map_err(fail)?,
                Some((own, finish)) => {
                    let arrived = link.peek(dst.len - *done).map_err(fail)?;
                    let count = arrived.len.min(room).min(SLICE);
                    let count = count - count % job.element;
                    let mut parts = [own.skip(*done).ptr, arrived.ptr];
                    if from < job.rank {
                        parts.swap(0, 1);
                    }
                    let kernel = job.kernel.expect("a job that reduces has a kernel");
                    // SAFETY: the link shows `count` aligned bytes, `own` and `dst` lie in the job's buffers or in scratch;
                    // the destination is the own part or apart.
                    unsafe {
                        kernel.fold(&parts, dst.skip(*done).ptr, count / job.element, finish.then_some(job.parts));
                    }
                    link.consume(count);
                    count
                }
            };
            if count == 0 {
                break;
            }
            *done += count;
            *moved = true;
        }
        if *done == dst.len {
            let rest = dst.len.next_multiple_of(ALIGN) - dst.len - *padding;
            let mut zeros = [0u8; ALIGN];
            // SAFETY: `zeros` is borrowed for the call.
            let count = if rest > 0 { unsafe { link.receive(RawSliceMut::of(&mut zeros[..rest])) }.map_err(fail)? } else { 0 };
            *padding += count;
            *moved |= count > 0;
        }
        if let Some(message) = active.forward
            && let Some(out) = self.outgoing.iter_mut().find(|out| out.message == message)
        {
            out.ready = active.done;
        }
        let has_ended = active.done == dst.len && dst.len + active.padding == dst.len.next_multiple_of(ALIGN);
        if has_ended {
            self.inboxes[peer].end();
        }
        Ok(has_ended)
    }

    /// Tells all peers with which there is a link, and the `callers` that have just opened one, that this rank takes part no more:
    /// because it leaves in good order after operation `last_seq`, or because an operation failed. A rank that leaves waits up to
    /// [`PARTING`] for room to say so.
    pub(crate) fn part(&mut self, last_seq: u64, failed: bool, callers: &[Rank]) {
        let descriptor = Descriptor { seq: last_seq, ..Descriptor::nothing() };
        let kind = if failed { Kind::Revoked } else { Kind::Goodbye };
        let bytes = Frame { kind, len: 0, descriptor: descriptor.encode() }.encode();
        for &caller in callers {
            if let Err(why) = self.mesh.link(caller) {
                tracing::debug!(?why, caller, "a rank that has just connected is not told that this one leaves");
            }
        }
        // What has left of the message to each peer that has not got all of it.
        let mut rest: Vec<(Rank, usize)> = self.mesh.open_links().map(|(peer, _)| (peer, 0)).collect();
        let until = Instant::now() + PARTING;
        loop {
            rest.retain_mut(|(peer, sent)| {
                let Ok(Some(link)) = self.mesh.link(*peer) else { return false };
                // SAFETY: `bytes` is borrowed for the call.
                match unsafe { link.send_last(RawSlice::of(&bytes[*sent..])) } {
                    Ok(count) => {
                        *sent += count;
                        *sent < bytes.len()
                    }
                    Err(_) => false,
                }
            });
            let left = until.saturating_duration_since(Instant::now());
            if failed || rest.is_empty() || left.is_zero() {
                return;
            }
            let waits: Vec<_> = rest.iter().map(|&(peer, _)| (peer, true, false)).collect();
            if self.mesh.sleep(waits.iter().copied(), left).is_err() {
                return;
            }
        }
    }
}

/// What an operation reports that has no link to a peer.
fn no_link(context: &OpContext<'_>, peer: Rank, why: NoLink) -> Error {
    match why {
        NoLink::Peer(cause) => context.failed(peer, cause),
        NoLink::Own(error) => Error::os(format!("connecting with rank {peer}"))(error),
    }
}

/// Checks the header of a message before any of it is taken in.
fn check(header: &[u8; HEADER], context: &OpContext<'_>, peer: Rank, expected: u64) -> Result<()> {
    let Some(frame) = Frame::decode(header) else {
        return Err(context.failed(peer, Cause::Corrupt("a message without a header of this version")));
    };
    if let Some(cause) = frame.parting() {
        return Err(context.failed(peer, cause));
    }
    match Descriptor::decode(frame.descriptor) {
        None => Err(context.failed(peer, Cause::Corrupt("a message of an unknown operation"))),
        Some(theirs) if theirs != context.descriptor => Err(context.mismatch(peer, context.descriptor, theirs)),
        Some(_) if frame.len != expected => Err(context.counts_differ(peer, frame.len, expected)),
        Some(_) => Ok(()),
    }
}

/// Bytes of scratch that are kept between operations.
const KEPT: usize = 16 << 20;

/// Memory for partial results, aligned for every element.
#[derive(Default)]
struct Scratch {
    memory: Vec<Aligned>,
    /// Outgrown memory that messages of the operation under way may still have to read.
    outgrown: Vec<Vec<Aligned>>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

impl Scratch {
    fn len(&self) -> usize {
        self.memory.len() * size_of::<Aligned>()
    }

    fn grow(&mut self, len: usize) {
        if len > self.len() {
            let enough = if len <= KEPT { len.next_power_of_two() } else { len };
            let mut grown = vec![Aligned([0; 64]); enough.div_ceil(size_of::<Aligned>())];
            grown[..self.memory.len()].copy_from_slice(&self.memory);
            self.outgrown.push(std::mem::replace(&mut self.memory, grown));
        }
    }

    /// When nothing is under way: gives back what small operations do not need.
    fn tidy(&mut self) {
        self.outgrown.clear();
        if self.len() > KEPT {
            self.memory = Vec::new();
        }
    }

    fn chunk(&mut self) -> RawSliceMut {
        RawSliceMut { ptr: self.memory.as_mut_ptr().cast(), len: self.len() }
    }
}

/// A job that a simulation carries out turn by turn, in an order of its own.
#[cfg(test)]
pub(crate) struct Stepped<'a>(Vec<Active<'a>>);

#[cfg(test)]
impl Engine {
    /// # Safety
    ///
    /// As for [`Engine::run`], until the job has ended or failed.
    pub(crate) unsafe fn begin_stepped<'a>(&mut self, job: Job<'a>) -> Stepped<'a> {
        self.jobs += 1;
        Stepped(vec![Active::new(self.jobs, job)])
    }

    /// One turn: whether anything moved, or `None` if the job has ended.
    pub(crate) fn step(&mut self, stepped: &mut Stepped<'_>) -> Result<Option<bool>> {
        let moved = self.turn(&mut stepped.0, &mut |_| {}).inspect_err(|_| self.give_up(&stepped.0))?;
        Ok((!stepped.0.is_empty()).then_some(moved))
    }

    /// The peer that keeps the job from going on.
    pub(crate) fn stuck_to(&self, stepped: &Stepped<'_>) -> Option<Rank> {
        stepped.0.first().and_then(Active::awaited).or_else(|| self.outgoing.first().map(|out| out.to))
    }
}
