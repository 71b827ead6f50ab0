//! The ranks of one host: how they find out that they can share memory (by doing it), and how they share more of it later.
//!
//! The lowest of them, the leader, has a connection to each of the others. Whatever they share, the leader makes, and hands
//! over; everybody maps it, makes sure of its own part, and the leader tells all whether all could.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::network::{LOOK, Network};
use crate::bootstrap::listener::Stream;
use crate::bootstrap::listener::handshake::{Purpose, random};
use crate::error::Cause;
use crate::failure::CancelToken;
use crate::sys::{self, LocalStream, Segment};
use crate::types::Rank;

/// The connections between a host's ranks, seen from one of them.
pub(crate) struct HostConnections {
    /// The communicator's ranks on this host, in their order.
    members: Vec<Rank>,
    /// This rank's place among them.
    place: usize,
    /// The leader has one to each of the others, in their order; the others have one to the leader.
    streams: Vec<LocalStream>,
}

/// A peer failed while memory was shared.
pub(crate) struct Failed {
    pub(crate) rank: Rank,
    pub(crate) cause: Cause,
}

const YES: u8 = 1;
const NO: u8 = 0;

impl HostConnections {
    /// Forms the connections of those of `candidates` that can reach their leader on this host. A rank that cannot is alone.
    ///
    /// All in `rank`s of the communicator; `members` says which ranks of the job they are. Nobody is waited for any more when the
    /// communicator's `cancel` token is cancelled, if it has one yet.
    pub(crate) fn form(
        network: &Network,
        comm_id: u64,
        rank: Rank,
        members: &[Rank],
        candidates: &[Rank],
        cancel: Option<&CancelToken>,
        deadline: Instant,
    ) -> Result<HostConnections, Failed> {
        if candidates[0] == rank {
            HostConnections::lead(network, comm_id, rank, members, candidates, cancel, deadline)
        } else {
            HostConnections::join(network, comm_id, rank, members, candidates[0], cancel, deadline)
        }
    }

    fn lead(
        network: &Network,
        comm_id: u64,
        rank: Rank,
        members: &[Rank],
        candidates: &[Rank],
        cancel: Option<&CancelToken>,
        deadline: Instant,
    ) -> Result<HostConnections, Failed> {
        let mut connections = HostConnections { members: vec![rank], place: 0, streams: Vec::new() };
        for &candidate in &candidates[1..] {
            let to = members[candidate];
            let arrival = network.mailbox().wait_for_neighbour(comm_id, to, deadline, || absence(network, to, cancel));
            match arrival {
                Ok((_, Stream::Local(stream))) => {
                    connections.members.push(candidate);
                    connections.streams.push(stream);
                }
                Ok((_, Stream::Tcp(_))) => tracing::info!(rank = candidate, "a rank on this machine cannot share memory"),
                Err(cause) => return Err(Failed { rank: candidate, cause }),
            }
        }
        let list: Vec<u8> = connections.members.iter().flat_map(|&member| (member as u32).to_le_bytes()).collect();
        let message = [&(connections.members.len() as u32).to_le_bytes()[..], &list].concat();
        for (stream, &member) in connections.streams.iter().zip(&connections.members[1..]) {
            stream.until(deadline).write_all(&message).map_err(|error| failed(member, &error))?;
        }
        Ok(connections)
    }

    fn join(
        network: &Network,
        comm_id: u64,
        rank: Rank,
        members: &[Rank],
        leader: Rank,
        cancel: Option<&CancelToken>,
        deadline: Instant,
    ) -> Result<HostConnections, Failed> {
        let alone = HostConnections { members: vec![rank], place: 0, streams: Vec::new() };
        let to = members[leader];
        let look = || absence(network, to, cancel);
        let stream = match network.call_locally(Purpose::Window, comm_id, to, deadline, look) {
            Ok(stream) => stream,
            Err(cause) => {
                tracing::info!(leader, %cause, "this rank cannot share memory with others on its machine");
                let told = network.call(Purpose::Apart, comm_id, to, deadline, look);
                return told.map(|_| alone).map_err(|cause| Failed { rank: leader, cause });
            }
        };
        let read = |bytes: &mut [u8]| stream.until(deadline).read_exact(bytes).map_err(|error| failed(leader, &error));
        let mut word = [0; 4];
        // The leader writes all at once, when everybody has come; or has failed elsewhere and does not.
        while let Err(error) = stream.until(deadline.min(Instant::now() + LOOK)).read_exact(&mut word) {
            if error.kind() != io::ErrorKind::TimedOut || Instant::now() >= deadline {
                return Err(failed(leader, &error));
            }
            if let Some(cause) = absence(network, members[leader], cancel) {
                return Err(Failed { rank: leader, cause });
            }
        }
        let count = u32::from_le_bytes(word) as usize;
        let corrupt = Failed { rank: leader, cause: Cause::Corrupt("a list of a host's ranks that cannot be") };
        if count > members.len() {
            return Err(corrupt);
        }
        let mut together = Vec::with_capacity(count);
        for _ in 0..count {
            read(&mut word)?;
            together.push(u32::from_le_bytes(word) as Rank);
        }
        match together.iter().position(|&member| member == rank) {
            Some(place) if together.is_sorted() && together.last().is_some_and(|&last| last < members.len()) => {
                Ok(HostConnections { members: together, place, streams: vec![stream] })
            }
            _ => Err(corrupt),
        }
    }

    /// The ranks of this host.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Makes memory with a part of `part` bytes for each rank of the host, in their order, which each of them may extend to `room`
    /// bytes; `None`, on all of them, if one of them cannot have it. All call this together.
    pub(crate) fn share(&self, part: usize, room: usize, deadline: Instant) -> Result<Option<Arc<Segment>>, Failed> {
        let len = part * self.members.len();
        let may_extend = Segment::check_size(room.max(len));
        if self.place == 0 { self.give(part, len, may_extend, deadline) } else { self.take(part, len, may_extend, deadline) }
    }

    fn give(
        &self,
        part: usize,
        len: usize,
        may_extend: io::Result<()>,
        deadline: Instant,
    ) -> Result<Option<Arc<Segment>>, Failed> {
        let peers = || self.streams.iter().zip(&self.members[1..]);
        let segment = may_extend.and_then(|()| Segment::create(len));
        let segment = segment.and_then(|segment| segment.reserve(0..part).map(|()| segment));
        if let Err(error) = &segment {
            tracing::warn!(%error, bytes = len, "no shared memory");
        }
        let mut segment = segment.ok();
        // Each finds a number in its part of the memory that it can only know from there, and puts another in its place.
        let secrets: Vec<u64> = peers().map(|_| u128::from_le_bytes(random()) as u64).collect();
        for (place, ((stream, &member), &secret)) in peers().zip(&secrets).enumerate() {
            let at = (place + 1) * part;
            if let Some(Err(error)) = segment.as_ref().map(|shared| shared.reserve(at..at + size_of::<u64>())) {
                tracing::warn!(%error, bytes = len, "no shared memory");
                segment = None;
            }
            match &segment {
                Some(shared) => {
                    proof(shared, part, place + 1).store(secret, Ordering::Release);
                    shared.hand_over(stream)
                }
                None => stream.until(deadline).write_all(&[NO]),
            }
            .map_err(|error| failed(member, &error))?;
        }
        for (place, ((stream, &member), &secret)) in peers().zip(&secrets).enumerate() {
            let mut answer = [0; 9];
            stream.until(deadline).read_exact(&mut answer).map_err(|error| failed(member, &error))?;
            let has_it = segment.as_ref().is_some_and(|shared| {
                let word = proof(shared, part, place + 1);
                answer[0] == YES && answer[1..] == secret.to_le_bytes() && word.load(Ordering::Acquire) == !secret
            });
            match segment.as_ref().filter(|_| has_it) {
                Some(shared) => proof(shared, part, place + 1).store(0, Ordering::Release),
                None => segment = None,
            }
        }
        for (stream, &member) in peers() {
            let verdict = if segment.is_some() { YES } else { NO };
            stream.until(deadline).write_all(&[verdict]).map_err(|error| failed(member, &error))?;
        }
        Ok(segment.map(Arc::new))
    }

    fn take(
        &self,
        part: usize,
        len: usize,
        may_extend: io::Result<()>,
        deadline: Instant,
    ) -> Result<Option<Arc<Segment>>, Failed> {
        let (stream, leader) = (&self.streams[0], self.members[0]);
        let lost = |error: io::Error| failed(leader, &error);
        let segment = match Segment::take_over(stream, len, deadline).and_then(|segment| may_extend.map(|()| segment)) {
            Ok(segment) => Some(segment),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(lost(error)),
            Err(error) => {
                tracing::warn!(%error, bytes = len, "no shared memory");
                None
            }
        };
        let segment = segment.filter(|segment| segment.reserve(self.place * part..(self.place + 1) * part).is_ok());
        let mut answer = [NO; 9];
        if let Some(shared) = &segment {
            let word = proof(shared, part, self.place);
            let secret = word.load(Ordering::Acquire);
            word.store(!secret, Ordering::Release);
            answer[0] = YES;
            answer[1..].copy_from_slice(&secret.to_le_bytes());
        }
        stream.until(deadline).write_all(&answer).map_err(lost)?;
        let mut verdict = [NO];
        stream.until(deadline).read_exact(&mut verdict).map_err(lost)?;
        Ok(segment.filter(|_| verdict[0] == YES).map(Arc::new))
    }
}

/// Why a rank of the job will not come, if that is known.
fn absence(network: &Network, member: Rank, cancel: Option<&CancelToken>) -> Option<Cause> {
    match network.peers[network.rank].sees(&network.peers[member]) {
        Some(process) if sys::has_ended(process) => Some(Cause::Died),
        // Its own error says why.
        _ => cancel.filter(|cancel| cancel.is_cancelled()).map(|_| Cause::Revoked),
    }
}

/// The first word of a rank's part.
fn proof(segment: &Segment, part: usize, place: usize) -> &AtomicU64 {
    assert!(part >= size_of::<u64>() && (place + 1) * part <= segment.len());
    // SAFETY: within the segment, which lives as long as the reference; parts are multiples of a page. Both ends use atomics.
    unsafe { &*segment.at(place * part).cast() }
}

fn failed(rank: Rank, error: &io::Error) -> Failed {
    let cause = match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Cause::Closed,
        kind => Cause::Broken(kind),
    };
    Failed { rank, cause }
}
