//! Receiving messages: into memory, or reduced with it.

use std::io::ErrorKind;
use std::time::Instant;

use super::frame::{Frame, HEADER, Kind};
use super::in_flight::InFlight;
use super::job::{Active, Job};
use super::state::{Engine, no_link};
use super::unexpected::Unexpected;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::failure::{OpContext, culprit_of};
use crate::reduce;
use crate::schedule::Span;
use crate::timeouts::UNHEARD_PEER;
use crate::transport::{ALIGN, Link, NoLink};
use crate::types::{Descriptor, Op, Rank};

/// Bytes of a step that are received or reduced at once, before what they make ready is sent on. They stay
/// in the cache meanwhile. A link whose peer keeps it full would show more without end.
const SLICE: usize = 128 << 10;

/// Where the payload of a step's message goes.
struct Target {
    dst: RawSliceMut,
    /// This rank's part, with which the payload is reduced, and whether that finishes the
    /// reduction.
    own: Option<(RawSlice, bool)>,
    /// Bytes from the front of `dst` that no message has still to read.
    free: usize,
    /// Whether this rank's part comes after the peer's in the order of ranks.
    is_after: bool,
}

impl Engine {
    /// Receives what has arrived of a step's message; with `reduce`, reduces it with that span and
    /// finishes the reduction if that is true. Returns whether the message is complete. Sets
    /// `moved` if anything was received. [`Engine::route`] has received the header of a send's message.
    pub(super) fn receive(
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
        // The buffers of messages side by side do not overlap.
        let free = if active.is_collective() { self.free(dst, active.forward) } else { dst.len };
        let target = Target { dst, own, free, is_after: from < active.job.rank };
        if !active.has_header && !self.receive_header(&active.job, peer, dst.len, moved)? {
            return Ok(false);
        }
        active.has_header = true;
        let no_link = |why| no_link(&active.job.context, peer, why);
        let Some(link) = self.mesh.link(peer).map_err(no_link)? else { return Ok(false) };
        receive_payload(link, active, peer, &target, moved)?;
        if active.done == dst.len {
            let fail = |cause| active.job.context.failed(peer, cause);
            receive_padding(link, &mut active.padding, dst.len, moved).map_err(fail)?;
        }
        if let Some((to, message)) = active.forward
            && let Some(out) = self.outbox.find(to, message)
        {
            out.ready = active.done;
        }
        let has_ended = active.done == dst.len && dst.len + active.padding == dst.len.next_multiple_of(ALIGN);
        if has_ended {
            self.inboxes[peer].end();
        }
        Ok(has_ended)
    }

    /// Receives the header of a collective's message. Returns false if it has not arrived completely.
    /// Messages with tags that come before it are kept.
    fn receive_header(&mut self, job: &Job<'_>, peer: Rank, len: usize, moved: &mut bool) -> Result<bool> {
        let fail = |cause| job.context.failed(peer, cause);
        loop {
            if self.inboxes[peer].is_taken() {
                let Some(message) = self.receive_unexpected(&job.context, peer, moved)? else { return Ok(false) };
                self.keep(peer, message);
            }
            let Some(link) = self.mesh.link(peer).map_err(|why| no_link(&job.context, peer, why))? else { return Ok(false) };
            let inbox = &mut self.inboxes[peer];
            let Some(header) = inbox.header(link, moved).map_err(fail)? else { return Ok(false) };
            self.heard[peer] = true;
            let Some((descriptor, len)) = tagged_message(header) else {
                check(header, &job.context, peer, len as u64)?;
                inbox.take();
                return Ok(true);
            };
            if !self.begin_unexpected(&job.context, peer, descriptor, len)? {
                return Ok(false);
            }
            *moved = true;
        }
    }

    /// Gives the next message of a peer to the receive that waits for it, or goes on with the message that
    /// comes in. Returns the receive; `None` if nothing has arrived for one. Messages for which none waits
    /// are kept, as far as there is room. Sets `moved` if anything was received.
    pub(super) fn route(&mut self, active: &mut InFlight<Active<'_>>, peer: Rank, moved: &mut bool) -> Result<Option<u64>> {
        if let Some(key) = self.receivers.current(peer) {
            return Ok(Some(key));
        }
        loop {
            let named = self.receivers.first_of(peer);
            let Some(first) = named.or_else(|| self.receivers.first_of_any()) else { return Ok(None) };
            let Some(first) = active.get_mut(first) else { return Ok(None) };
            if named.is_some() {
                first.job.context.number(self.received[peer] + 1);
            }
            if self.inboxes[peer].is_taken() {
                let Some(message) = self.receive_unexpected(&first.job.context, peer, moved)? else { return Ok(None) };
                let Some(key) = self.receivers.take(peer, message.descriptor.tag()) else {
                    self.keep(peer, message);
                    continue;
                };
                let Some(job) = active.get_mut(key) else { return Ok(None) };
                deliver(job, peer, &message)?;
                return Ok(Some(key));
            }
            let expected = first.job.call.recv.len as u64;
            let (descriptor, len) = match self.next_from(&first.job.context, peer, named.map(|_| expected), moved)? {
                Next::Message(descriptor, len) => (descriptor, len),
                Next::Nothing => return Ok(None),
                Next::Never(cause) => {
                    self.gone.push((peer, cause));
                    return Ok(None);
                }
            };
            let Some(key) = self.receivers.take(peer, descriptor.tag()) else {
                if !self.begin_unexpected(&first.job.context, peer, descriptor, len)? {
                    return Ok(None);
                }
                *moved = true;
                continue;
            };
            let Some(job) = active.get_mut(key) else { return Ok(None) };
            job.job.context.number(self.received[peer] + 1);
            compare(descriptor, len, &job.job.context, peer, job.job.call.recv.len as u64)?;
            self.inboxes[peer].take();
            self.unexpected.passed(peer);
            self.heard[peer] = true;
            self.received[peer] += 1;
            (job.sender, job.has_header) = (Some(peer), true);
            if let Some(source) = job.job.call.source {
                // No rank that sends without end keeps others from their turn.
                self.receivers.first_peer = (peer + 1) % self.world();
                // SAFETY: the caller handed this memory over together with the message's.
                unsafe { source.put(peer) };
            }
            *moved = true;
            return Ok(Some(key));
        }
    }

    /// Gives a receive that begins the message that was kept for it. Returns false if there is none.
    pub(super) fn take_unexpected(&mut self, job: &mut Active<'_>) -> Result<bool> {
        let Some((peer, message)) = self.unexpected.take(job.awaited(), job.tag()) else { return Ok(false) };
        self.inboxes[peer].has_unexpected = self.unexpected.of(peer).is_some_and(|queue| queue.count > 0);
        deliver(job, peer, &message)?;
        Ok(true)
    }

    fn keep(&mut self, peer: Rank, message: Unexpected) {
        self.unexpected.keep(peer, message);
        self.inboxes[peer].has_unexpected = true;
    }

    /// Begins to keep the next message of a peer, for which no receive waits. Returns false if there is no
    /// room for it.
    fn begin_unexpected(&mut self, context: &OpContext<'_>, peer: Rank, descriptor: Descriptor, len: u64) -> Result<bool> {
        if descriptor.seq != self.received[peer] + 1 {
            return Err(context.failed(peer, Cause::Corrupt("a message out of turn")));
        }
        let no_memory = |_| Error::os("keeping a message for which no receive waits")(ErrorKind::OutOfMemory.into());
        if !self.unexpected.begin(peer, descriptor, len).map_err(no_memory)? {
            return Ok(false);
        }
        self.inboxes[peer].take();
        self.heard[peer] = true;
        self.received[peer] += 1;
        Ok(true)
    }

    /// Receives what has arrived of a message that is kept. Returns it once it is complete.
    fn receive_unexpected(&mut self, context: &OpContext<'_>, peer: Rank, moved: &mut bool) -> Result<Option<Unexpected>> {
        let fail = |cause| context.failed(peer, cause);
        let Some(message) = self.unexpected.coming(peer) else { return Ok(None) };
        let Some(link) = self.mesh.link(peer).map_err(|why| no_link(context, peer, why))? else { return Ok(None) };
        let Unexpected { payload, len, padding, .. } = message;
        let start = payload.len();
        while payload.len() < *len && payload.len() - start < SLICE {
            let done = payload.len();
            let rest = RawSliceMut { ptr: payload.as_mut_ptr().wrapping_add(done), len: (*len - done).min(SLICE) };
            // SAFETY: the payload has room for `len` bytes, and stays where it is.
            let count = unsafe { link.receive(rest) }.map_err(fail)?;
            if count == 0 {
                break;
            }
            // SAFETY: the link has written these bytes.
            unsafe { payload.set_len(done + count) };
            *moved = true;
        }
        if payload.len() < *len {
            return Ok(None);
        }
        receive_padding(link, padding, *len, moved).map_err(fail)?;
        if *len + *padding < len.next_multiple_of(ALIGN) {
            return Ok(None);
        }
        self.inboxes[peer].end();
        *moved = true;
        Ok(self.unexpected.arrived(peer))
    }

    /// Receives the next message of a peer if all of it has arrived, and lies in one piece. Otherwise
    /// it does nothing.
    ///
    /// # Safety
    ///
    /// `into` is writable until this returns, and nothing else accesses it.
    pub(crate) unsafe fn receive_now(&mut self, context: &mut OpContext<'_>, peer: Rank, into: RawSliceMut) -> Now {
        let Ok(Some(link)) = self.mesh.link(peer) else { return Now::Never };
        let whole = HEADER + into.len.next_multiple_of(ALIGN);
        let arrived = match link.peek(whole) {
            Ok(arrived) if self.inboxes[peer].is_empty() => arrived,
            _ => return Now::Never,
        };
        if arrived.len == 0 {
            return Now::NotYet;
        }
        if arrived.len < whole {
            return Now::Never;
        }
        context.number(self.received[peer] + 1);
        // SAFETY: the link shows these bytes until they are consumed. A copy, because a peer could
        // change them.
        let header = unsafe { arrived.ptr.cast::<[u8; HEADER]>().read() };
        if check(&header, context, peer, into.len as u64).is_err() {
            return Now::Never;
        }
        // SAFETY: as above. The caller vouches for `into`.
        unsafe { reduce::copy(arrived.skip(HEADER).ptr, into.ptr, into.len) };
        link.consume(whole);
        self.heard[peer] = true;
        self.received[peer] += 1;
        Now::Received
    }

    /// Fails when all ranks that could send the message of a receive from any rank are gone.
    pub(super) fn check_senders(&self, context: &OpContext<'_>) -> Result<()> {
        let others = self.world() - 1;
        if others == 0 || self.gone.len() < others {
            return Ok(());
        }
        match culprit_of(&lost(&self.gone, context.info.cancel.missed())) {
            Some((peer, cause)) => Err(context.failed(*peer, cause.clone())),
            None => Ok(()),
        }
    }

    /// Looks at the next header from a peer. If a receive of `named` bytes waits for this peer and no other,
    /// it fails unless that is the header of a message.
    fn next_from(&mut self, context: &OpContext<'_>, peer: Rank, named: Option<u64>, moved: &mut bool) -> Result<Next> {
        let fail = |cause| context.failed(peer, cause);
        let link = match self.mesh.link(peer) {
            Ok(Some(link)) => link,
            Ok(None) => return Ok(Next::Nothing),
            // The peer has left or died, and other ranks detect which; or it advertises loopback on another host.
            // Another rank may still send.
            Err(NoLink::Peer(
                cause @ Cause::Unreachable { kind: ErrorKind::ConnectionRefused | ErrorKind::AddrNotAvailable, .. },
            )) if named.is_none() => return Ok(Next::Never(cause)),
            Err(why) => return Err(no_link(context, peer, why)),
        };
        let header = match self.inboxes[peer].header(link, moved) {
            Ok(Some(header)) => header,
            Ok(None) => return Ok(Next::Nothing),
            // A rank that leaves says so on the links that it knows, and it did not know this one.
            // Its process lives, so it has dropped the communicator. Another rank may still send.
            Err(Cause::Closed) if named.is_none() && !self.heard[peer] && self.mesh.is_alive(peer) == Some(true) => {
                let since = *self.closed[peer].get_or_insert_with(Instant::now);
                return Ok(if since.elapsed() >= UNHEARD_PEER { Next::Never(Cause::Gone) } else { Next::Nothing });
            }
            Err(cause) => return Err(fail(cause)),
        };
        if let Some(expected) = named {
            self.heard[peer] = true;
            return match message(header) {
                Some((descriptor, len)) => Ok(Next::Message(descriptor, len)),
                None => check(header, context, peer, expected).map(|()| Next::Nothing),
            };
        }
        let frame = Frame::decode(header);
        match frame.and_then(|frame| Some((frame.kind, Descriptor::decode(frame.descriptor)?, frame.len))) {
            None => Err(fail(Cause::Corrupt("a message without a header of this version"))),
            Some((Kind::Data, descriptor, len)) if descriptor.op == Op::Send => Ok(Next::Message(descriptor, len)),
            // The peer is ahead, in a collective.
            Some((Kind::Data, ..)) => Ok(Next::Nothing),
            Some((Kind::Goodbye, left, _)) => Ok(Next::Never(Cause::Left { last_seq: left.seq })),
            Some((Kind::Revoked, ..)) => Err(fail(Cause::Revoked)),
        }
    }
}

/// Returns the ranks that will send no message to a receive from any rank: `gone`, as their links say,
/// and `missed`, as the failure detector has found. The detector's cause counts, because it also asks
/// other ranks.
pub(super) fn lost(gone: &[(Rank, Cause)], missed: Vec<(Rank, Cause)>) -> Vec<(Rank, Cause)> {
    let is_missed = |peer: Rank| missed.iter().any(|(rank, _)| *rank == peer);
    let mut lost: Vec<_> = gone.iter().filter(|(peer, _)| !is_missed(*peer)).cloned().collect();
    lost.extend(missed);
    lost
}

/// What [`Engine::receive_now`] found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Now {
    Received,
    NotYet,
    /// [`Engine::run_together`] receives the message, or finds out why it does not come.
    Never,
}

/// What comes next from a peer.
enum Next {
    /// A message of a send, and its bytes.
    Message(Descriptor, u64),
    /// Nothing yet.
    Nothing,
    /// The peer will send none to a receive from any rank.
    Never(Cause),
}

/// Returns the descriptor and the bytes of the message of a send.
pub(super) fn message(header: &[u8; HEADER]) -> Option<(Descriptor, u64)> {
    let Frame { kind, len, descriptor } = Frame::decode(header)?;
    let descriptor = Descriptor::decode(descriptor)?;
    (kind == Kind::Data && descriptor.op == Op::Send).then_some((descriptor, len))
}

/// As [`message`], if it has a tag. Collectives are not made for it to wait for them.
#[inline]
fn tagged_message(header: &[u8; HEADER]) -> Option<(Descriptor, u64)> {
    /// Where a header has the operation.
    const OP: usize = 16;
    if header[OP] != Op::Send as u8 {
        return None;
    }
    message(header).filter(|(descriptor, _)| descriptor.tag() != 0)
}

/// Gives a receive a message that was kept, which ends it.
fn deliver(job: &mut Active<'_>, peer: Rank, message: &Unexpected) -> Result<()> {
    let Unexpected { descriptor, payload, .. } = message;
    let into = job.job.call.recv;
    job.job.context.number(descriptor.seq);
    compare(*descriptor, payload.len() as u64, &job.job.context, peer, into.len as u64)?;
    // SAFETY: the caller lends the memory until the job has ended. It is as long as the payload.
    unsafe { reduce::copy(payload.as_ptr(), into.ptr, payload.len()) };
    if let Some(source) = job.job.call.source {
        // SAFETY: the caller handed this memory over together with the message's.
        unsafe { source.put(peer) };
    }
    (job.sender, job.step, job.exhausted) = (Some(peer), None, true);
    Ok(())
}

/// Checks a message's header before any of its payload is received.
fn check(header: &[u8; HEADER], context: &OpContext<'_>, peer: Rank, expected: u64) -> Result<()> {
    let Some(frame) = Frame::decode(header) else {
        return Err(context.failed(peer, Cause::Corrupt("a message without a header of this version")));
    };
    if let Some(cause) = frame.parting() {
        return Err(context.failed(peer, cause));
    }
    match Descriptor::decode(frame.descriptor) {
        None => Err(context.failed(peer, Cause::Corrupt("a message of an unknown operation"))),
        Some(theirs) => compare(theirs, frame.len, context, peer, expected),
    }
}

/// Compares a message of a peer with the call that is to take it.
fn compare(theirs: Descriptor, len: u64, context: &OpContext<'_>, peer: Rank, expected: u64) -> Result<()> {
    match theirs {
        theirs if theirs != context.descriptor => Err(context.mismatch(peer, context.call(), theirs)),
        _ if len != expected => Err(context.counts_differ(peer, len, expected)),
        _ => Ok(()),
    }
}

/// Receives what has arrived of a payload, up to [`SLICE`] or a little more.
fn receive_payload(link: &mut dyn Link, active: &mut Active<'_>, peer: Rank, target: &Target, moved: &mut bool) -> Result<()> {
    let Active { job, done, .. } = active;
    let fail = |cause| job.context.failed(peer, cause);
    let Target { dst, own, free, .. } = *target;
    let start = *done;
    while *done < dst.len && *done - start < SLICE {
        let room = free.saturating_sub(*done);
        let received = match own {
            // SAFETY: `dst` lies in the job's output or in scratch, and no message has still to
            // read the first `room` bytes.
            None => unsafe { link.receive(dst.skip(*done).take(room.min(SLICE))) },
            Some((own, finish)) => reduce(link, job, target, own, finish, *done, room),
        };
        let count = received.map_err(fail)?;
        if count == 0 {
            break;
        }
        *done += count;
        *moved = true;
    }
    Ok(())
}

/// Reduces bytes that have arrived with this rank's part, from byte `done` of the payload on.
/// Returns how many.
fn reduce(
    link: &mut dyn Link,
    job: &Job<'_>,
    target: &Target,
    own: RawSlice,
    finish: bool,
    done: usize,
    room: usize,
) -> std::result::Result<usize, Cause> {
    let dst = target.dst;
    let arrived = link.peek(dst.len - done)?;
    let count = arrived.len.min(room).min(SLICE);
    let count = count - count % job.call.dtype.size();
    let mut parts = [own.skip(done).ptr, arrived.ptr];
    if target.is_after {
        parts.swap(0, 1);
    }
    let kernel = job.kernel.expect("a job that reduces has a kernel");
    // SAFETY: the link shows `count` aligned bytes, and `own` and `dst` lie in the job's buffers or
    // in scratch. The destination is this rank's part, or overlaps neither.
    unsafe { kernel.fold(&parts, dst.skip(done).ptr, count / job.call.dtype.size(), finish.then_some(job.parts())) };
    link.consume(count);
    Ok(count)
}

/// Receives what has arrived of the padding after a payload of `len` bytes, of which `received` bytes
/// have come before.
fn receive_padding(link: &mut dyn Link, received: &mut usize, len: usize, moved: &mut bool) -> Result<(), Cause> {
    let rest = len.next_multiple_of(ALIGN) - len - *received;
    if rest == 0 {
        return Ok(());
    }
    let mut zeros = [0u8; ALIGN];
    // SAFETY: `zeros` is borrowed for the call.
    let count = unsafe { link.receive(RawSliceMut::of(&mut zeros[..rest]))? };
    *received += count;
    *moved |= count > 0;
    Ok(())
}
