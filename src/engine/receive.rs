//! Receiving messages: into memory, or reduced with it.

use std::io::ErrorKind;
use std::time::Instant;

use super::frame::{Frame, HEADER, Inbox, Kind};
use super::job::{Active, Job};
use super::state::{Engine, no_link};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Result};
use crate::failure::{OpContext, culprit_of};
use crate::reduce;
use crate::schedule::Span;
use crate::timeouts::UNHEARD_PEER;
use crate::transport::{ALIGN, Link, NoLink};
use crate::types::{Descriptor, Op, Rank};

/// Bytes of a step that are reduced at once, before what they make ready is sent on. They stay in
/// the cache meanwhile.
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
    /// `moved` if anything was received.
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
        let is_message = active.job.context.descriptor.op == Op::Send;
        let free = if is_message { dst.len } else { self.free(dst, active.forward) };
        let target = Target { dst, own, free, is_after: from < active.job.rank };
        if !active.has_header && is_message {
            active.job.context.number(self.received[peer] + 1);
        }
        let no_link = |why| no_link(&active.job.context, peer, why);
        let Some(link) = self.mesh.link(peer).map_err(no_link)? else { return Ok(false) };
        let inbox = &mut self.inboxes[peer];
        if !active.has_header {
            if !receive_header(inbox, &mut self.heard[peer], link, &active.job, peer, dst.len, moved)? {
                return Ok(false);
            }
            active.has_header = true;
            if is_message {
                self.received[peer] += 1;
                if let Some(source) = active.job.call.source {
                    // SAFETY: the caller handed this memory over together with the message's.
                    unsafe { source.put(peer) };
                }
            }
        }
        receive_payload(link, active, peer, &target, moved)?;
        if active.done == dst.len {
            receive_padding(link, active, peer, dst.len, moved)?;
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

    /// Returns a rank from which the header of a point-to-point message has arrived. Adds the ranks
    /// that will send none to `gone`, and fails when all are gone.
    pub(super) fn find_sender(
        &mut self,
        context: &OpContext<'_>,
        gone: &mut Vec<(Rank, Cause)>,
        is_next: impl Fn(Rank) -> bool,
    ) -> Result<Option<Rank>> {
        let others = (0..self.world()).filter(|&peer| peer != context.info.rank);
        for peer in others.clone().filter(|&peer| is_next(peer)) {
            if gone.iter().any(|(known, _)| *known == peer) {
                continue;
            }
            match self.next_from(context, peer)? {
                Next::Message => return Ok(Some(peer)),
                Next::Nothing => {}
                Next::Never(cause) => gone.push((peer, cause)),
            }
        }
        if gone.len() < others.count() {
            return Ok(None);
        }
        match culprit_of(&lost(gone, context.info.cancel.missed())) {
            Some((peer, cause)) => Err(context.failed(*peer, cause.clone())),
            None => Ok(None),
        }
    }

    /// Looks at the next header from a peer, while any peer may send the message.
    fn next_from(&mut self, context: &OpContext<'_>, peer: Rank) -> Result<Next> {
        let fail = |cause| context.failed(peer, cause);
        let link = match self.mesh.link(peer) {
            Ok(Some(link)) => link,
            Ok(None) => return Ok(Next::Nothing),
            // The peer has left or died, and other ranks detect which; or it advertises loopback on another host.
            // Another rank may still send.
            Err(NoLink::Peer(
                cause @ Cause::Unreachable { kind: ErrorKind::ConnectionRefused | ErrorKind::AddrNotAvailable, .. },
            )) => return Ok(Next::Never(cause)),
            Err(why) => return Err(no_link(context, peer, why)),
        };
        let header = match self.inboxes[peer].header(link, &mut false) {
            Ok(Some(header)) => header,
            Ok(None) => return Ok(Next::Nothing),
            // A rank that leaves says so on the links that it knows, and it did not know this one.
            // Its process lives, so it has dropped the communicator. Another rank may still send.
            Err(Cause::Closed) if !self.heard[peer] && self.mesh.is_alive(peer) == Some(true) => {
                let since = *self.closed[peer].get_or_insert_with(Instant::now);
                return Ok(if since.elapsed() >= UNHEARD_PEER { Next::Never(Cause::Gone) } else { Next::Nothing });
            }
            Err(cause) => return Err(fail(cause)),
        };
        let frame = Frame::decode(header);
        match frame.and_then(|frame| Some((frame.kind, Descriptor::decode(frame.descriptor)?))) {
            None => Err(fail(Cause::Corrupt("a message without a header of this version"))),
            Some((Kind::Data, descriptor)) if descriptor.op == Op::Send => Ok(Next::Message),
            // The peer is ahead, in a collective.
            Some((Kind::Data, _)) => Ok(Next::Nothing),
            Some((Kind::Goodbye, left)) => Ok(Next::Never(Cause::Left { last_seq: left.seq })),
            Some((Kind::Revoked, _)) => Err(fail(Cause::Revoked)),
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

/// What comes next from a peer, for a receive from any rank.
enum Next {
    /// A point-to-point message.
    Message,
    /// Nothing yet.
    Nothing,
    /// The peer will send none.
    Never(Cause),
}

/// Receives a message's header. Returns false if it has not arrived completely.
fn receive_header(
    inbox: &mut Inbox,
    heard: &mut bool,
    link: &mut dyn Link,
    job: &Job<'_>,
    peer: Rank,
    len: usize,
    moved: &mut bool,
) -> Result<bool> {
    let fail = |cause| job.context.failed(peer, cause);
    let Some(header) = inbox.header(link, moved).map_err(fail)? else { return Ok(false) };
    *heard = true;
    check(header, &job.context, peer, len as u64)?;
    inbox.take();
    Ok(true)
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
        Some(theirs) if theirs != context.descriptor => Err(context.mismatch(peer, context.call(), theirs)),
        Some(_) if frame.len != expected => Err(context.counts_differ(peer, frame.len, expected)),
        Some(_) => Ok(()),
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
            None => unsafe { link.receive(dst.skip(*done).take(room)) },
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

/// Receives what has arrived of the padding after a payload of `len` bytes.
fn receive_padding(link: &mut dyn Link, active: &mut Active<'_>, peer: Rank, len: usize, moved: &mut bool) -> Result<()> {
    let rest = len.next_multiple_of(ALIGN) - len - active.padding;
    if rest == 0 {
        return Ok(());
    }
    let mut zeros = [0u8; ALIGN];
    // SAFETY: `zeros` is borrowed for the call.
    let received = unsafe { link.receive(RawSliceMut::of(&mut zeros[..rest])) };
    let count = received.map_err(|cause| active.job.context.failed(peer, cause))?;
    active.padding += count;
    *moved |= count > 0;
    Ok(())
}
