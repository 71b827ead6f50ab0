//! How the ranks of a host find out that they can share memory, by sharing some, and how they share
//! more later.
//!
//! The leader, their lowest rank, has a connection to each of the others. The leader makes the
//! memory and hands it over. Every rank maps it and reserves its own part. Then the leader tells
//! all ranks whether all of them succeeded.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Network;
use super::identity::random_number;
use super::listener::Stream;
use super::listener::handshake::Purpose;
use crate::error::Cause;
use crate::failure::{CancelToken, wait_check};
use crate::sys::{self, LocalStream, Region};
use crate::timeouts::{NO_DESCRIPTOR, WAIT_CHECK};
use crate::transport::{NoLink, cause_of};
use crate::types::Rank;

/// What a rank needs to connect with the ranks of its host. Ranks are those of the communicator.
pub(crate) struct HostSetup<'a> {
    pub(crate) network: &'a Network,
    pub(crate) comm_id: u64,
    pub(crate) rank: Rank,
    /// The communicator's ranks as ranks of the job.
    pub(crate) members: &'a [Rank],
    /// The communicator's token. When it is cancelled, the rank waits no longer.
    pub(crate) cancel: &'a CancelToken,
    pub(crate) deadline: Instant,
}

/// The connections between a host's ranks, seen from one of them.
pub(crate) struct HostConnections {
    /// The communicator's ranks on this host, in their order.
    members: Vec<Rank>,
    /// This rank's index among them.
    index: usize,
    /// The leader has one to each of the others, in their order. The others have one to the leader.
    streams: Vec<LocalStream>,
}

/// Why ranks of a host could not connect.
pub(crate) enum Failed {
    /// A peer failed.
    Peer { rank: Rank, cause: Cause },
    /// This process has no descriptor or no memory left.
    Own { doing: String, error: io::Error },
}

impl Failed {
    /// Returns the failure of a rank to which there is no connection.
    fn no_link(rank: Rank, why: NoLink) -> Failed {
        match why {
            NoLink::Peer(cause) => Failed::Peer { rank, cause },
            NoLink::Own(error) => Failed::Own { doing: format!("connecting to rank {rank}"), error },
        }
    }
}

const YES: u8 = 1;
const NO: u8 = 0;

impl HostSetup<'_> {
    /// Connects those of `candidates` that can reach their leader on this host. A rank that cannot
    /// is alone.
    pub(crate) fn connect(&self, candidates: &[Rank]) -> Result<HostConnections, Failed> {
        let result = if candidates[0] == self.rank { self.lead(&candidates[1..]) } else { self.join(candidates[0]) };
        self.cancel.end_connecting(result.is_err());
        result
    }

    /// Waits for the others, and tells them which ranks have come.
    fn lead(&self, others: &[Rank]) -> Result<HostConnections, Failed> {
        let mut connections = self.alone();
        // The listener cannot accept a connection without a descriptor.
        let short_since = Cell::new(None);
        let shortage = || {
            let error = sys::resource_shortage();
            short_since.set(error.as_ref().map(|_| short_since.get().unwrap_or_else(Instant::now)));
            error.filter(|_| short_since.get().is_some_and(|since: Instant| since.elapsed() >= NO_DESCRIPTOR))
        };
        for &other in others {
            let to = self.members[other];
            let mailbox = &self.network.mailbox;
            let absence = || {
                self.cancel.note_connecting(other);
                self.absence(other).map(NoLink::Peer).or_else(|| shortage().map(NoLink::Own))
            };
            match mailbox.wait_for_host_member(self.comm_id, to, self.deadline, absence) {
                Ok(Stream::Local(stream)) => {
                    connections.members.push(other);
                    connections.streams.push(stream);
                }
                Ok(Stream::Tcp(_)) => crate::log::info!(rank = other, "a rank on this machine cannot share memory; it uses TCP"),
                Err(NoLink::Own(error)) => {
                    return Err(Failed::Own { doing: format!("accepting a connection of rank {other}"), error });
                }
                Err(why) => return Err(Failed::no_link(other, why)),
            }
        }
        let list: Vec<u8> = connections.members.iter().flat_map(|&member| (member as u32).to_le_bytes()).collect();
        let message = [&(connections.members.len() as u32).to_le_bytes()[..], &list].concat();
        for (stream, &member) in connections.streams.iter().zip(&connections.members[1..]) {
            stream.until(self.deadline).write_all(&message).map_err(|error| failed(member, error))?;
        }
        Ok(connections)
    }

    /// Connects to the leader inside the host. If that fails, tells it so through the network.
    fn join(&self, leader: Rank) -> Result<HostConnections, Failed> {
        let to = self.members[leader];
        let absence = || self.absence(leader).map(NoLink::Peer);
        match self.network.connect_locally(Purpose::HostGroup, self.comm_id, to, self.deadline, absence) {
            Ok(stream) => self.read_members(leader, stream),
            Err(why @ NoLink::Own(_)) => Err(Failed::no_link(leader, why)),
            Err(NoLink::Peer(cause)) => {
                crate::log::info!(leader, %cause, "this rank cannot share memory with the other ranks on its machine; it uses TCP");
                let told = self.network.connect(Purpose::NoHostGroup, self.comm_id, to, self.deadline, absence);
                told.map(|_| self.alone()).map_err(|why| Failed::no_link(leader, why))
            }
        }
    }

    /// Reads which ranks have come, once the leader says so.
    fn read_members(&self, leader: Rank, stream: LocalStream) -> Result<HostConnections, Failed> {
        let mut word = [0; 4];
        // The leader writes the whole list when all ranks have come. If it has failed elsewhere, it
        // writes nothing.
        read(&stream, leader, &mut word, self.deadline, || self.absence(leader))?;
        let count = u32::from_le_bytes(word) as usize;
        let corrupt = Failed::Peer { rank: leader, cause: Cause::Corrupt("an impossible list of the ranks of a host") };
        if count > self.members.len() {
            return Err(corrupt);
        }
        let mut members = Vec::with_capacity(count);
        for _ in 0..count {
            read(&stream, leader, &mut word, self.deadline, || self.absence(leader))?;
            members.push(u32::from_le_bytes(word) as Rank);
        }
        match members.iter().position(|&member| member == self.rank) {
            Some(index) if members.is_sorted() && members.last().is_some_and(|&last| last < self.members.len()) => {
                Ok(HostConnections { members, index, streams: vec![stream] })
            }
            _ => Err(corrupt),
        }
    }

    fn alone(&self) -> HostConnections {
        HostConnections { members: vec![self.rank], index: 0, streams: Vec::new() }
    }

    /// Returns why a rank will not come, if that is known.
    fn absence(&self, rank: Rank) -> Option<Cause> {
        match self.network.visible_process(self.members[rank]) {
            Some(process) if sys::has_ended(process) => Some(Cause::Died),
            // The error of the rank that cancelled says why.
            _ => self.cancel.is_cancelled().then_some(Cause::Revoked),
        }
    }
}

impl HostConnections {
    /// Returns the ranks of this host.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Makes memory with a part of `part` bytes for each rank of the host, in their order, which
    /// each rank may extend to `room` bytes. Returns `None` on all ranks if one of them cannot map
    /// or reserve it. All ranks of the host call this together. When the communicator's token is
    /// cancelled, a rank waits no longer.
    pub(crate) fn share(
        &self,
        part: usize,
        room: usize,
        deadline: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<Region>>, Failed> {
        let len = part * self.members.len();
        let room = room.max(len);
        let may_extend = Region::check_size(room);
        let result = match self.index {
            0 => self.give(part, len, room, may_extend, deadline, cancel),
            _ => self.take(part, len, may_extend, deadline, cancel),
        };
        cancel.end_connecting(result.is_err());
        result
    }

    /// Makes the memory, hands it to the others, and tells all whether all of them have mapped it.
    fn give(
        &self,
        part: usize,
        len: usize,
        room: usize,
        may_extend: io::Result<()>,
        deadline: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<Region>>, Failed> {
        let region = may_extend.and_then(|()| Region::create_extensible(len, room));
        let region = region.and_then(|region| region.reserve(0..part).map(|()| region));
        let region = region.inspect_err(|error| warn_of_memory(error, len)).ok();
        // Each rank finds a number in its part that it can learn only there, and puts another
        // number in its place.
        let secrets: Vec<u64> = self.others().map(|_| random_number()).collect();
        let region = self.hand_out(region, part, &secrets, deadline)?;
        let region = self.check_answers(region, part, &secrets, deadline, cancel)?;
        for (_, stream, member) in self.others() {
            let outcome = if region.is_some() { YES } else { NO };
            stream.until(deadline).write_all(&[outcome]).map_err(|error| failed(member, error))?;
        }
        Ok(region.map(Arc::new))
    }

    /// Returns the index, the connection and the rank of each of the others. Only the leader has
    /// connections to all.
    fn others(&self) -> impl Iterator<Item = (usize, &LocalStream, Rank)> {
        (1..).zip(&self.streams).zip(&self.members[1..]).map(|((index, stream), &member)| (index, stream, member))
    }

    /// Puts each rank's number into its part and hands the region over. Without a region, tells the
    /// ranks so.
    fn hand_out(
        &self,
        mut region: Option<Region>,
        part: usize,
        secrets: &[u64],
        deadline: Instant,
    ) -> Result<Option<Region>, Failed> {
        for ((index, stream, member), &secret) in self.others().zip(secrets) {
            let at = index * part;
            region = region.filter(|shared| {
                let reserved = shared.reserve(at..at + size_of::<u64>());
                reserved.inspect_err(|error| warn_of_memory(error, shared.len())).is_ok()
            });
            match &region {
                Some(shared) => {
                    proof(shared, part, index).store(secret, Ordering::Release);
                    shared.hand_over(stream)
                }
                None => stream.until(deadline).write_all(&[NO]),
            }
            .map_err(|error| failed(member, error))?;
        }
        Ok(region)
    }

    /// Reads whether each rank has found its number; drops the region if one has not.
    fn check_answers(
        &self,
        mut region: Option<Region>,
        part: usize,
        secrets: &[u64],
        deadline: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<Region>, Failed> {
        for ((index, stream, member), &secret) in self.others().zip(secrets) {
            let mut answer = [0; 9];
            read(stream, member, &mut answer, deadline, || {
                cancel.note_connecting(member);
                cancel.is_cancelled().then_some(Cause::Revoked)
            })?;
            region = region.filter(|shared| {
                let word = proof(shared, part, index);
                let is_mapped =
                    answer[0] == YES && answer[1..] == secret.to_le_bytes() && word.load(Ordering::Acquire) == !secret;
                if is_mapped {
                    word.store(0, Ordering::Release);
                }
                is_mapped
            });
        }
        Ok(region)
    }

    /// Maps the memory that the leader hands over, proves it, and reads whether all ranks have
    /// mapped it.
    fn take(
        &self,
        part: usize,
        len: usize,
        may_extend: io::Result<()>,
        deadline: Instant,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<Region>>, Failed> {
        let (stream, leader) = (&self.streams[0], self.members[0]);
        let lost = |error: io::Error| failed(leader, error);
        let region = match Region::take_over(stream, len, deadline).and_then(|region| may_extend.map(|()| region)) {
            Ok(region) => Some(region),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::TimedOut) || sys::is_refused(&error) =>
            {
                return Err(lost(error));
            }
            Err(error) => {
                warn_of_memory(&error, len);
                None
            }
        };
        let region = region.filter(|region| region.reserve(self.index * part..(self.index + 1) * part).is_ok());
        let mut answer = [NO; 9];
        if let Some(shared) = &region {
            let word = proof(shared, part, self.index);
            let secret = word.load(Ordering::Acquire);
            word.store(!secret, Ordering::Release);
            answer[0] = YES;
            answer[1..].copy_from_slice(&secret.to_le_bytes());
        }
        stream.until(deadline).write_all(&answer).map_err(lost)?;
        let mut outcome = [NO];
        read(stream, leader, &mut outcome, deadline, || cancel.is_cancelled().then_some(Cause::Revoked))?;
        Ok(region.filter(|_| outcome[0] == YES).map(Arc::new))
    }
}

/// Returns the first word of a rank's part.
fn proof(region: &Region, part: usize, index: usize) -> &AtomicU64 {
    assert!(part >= size_of::<u64>() && (index + 1) * part <= region.len());
    // SAFETY: the word is within the region, which lives as long as the reference. Parts are
    // multiples of a page, so it is aligned. Both ends access it through atomics only.
    unsafe { &*region.at(index * part).cast() }
}

fn warn_of_memory(error: &io::Error, bytes: usize) {
    crate::log::warn!(%error, bytes, "cannot share memory with the ranks of this host; they use TCP");
}

/// Fills a buffer with what a peer sends, until the deadline. Asks `absence` regularly, and fails
/// with what it says if the peer will send nothing.
fn read(
    stream: &LocalStream,
    peer: Rank,
    mut buf: &mut [u8],
    deadline: Instant,
    absence: impl Fn() -> Option<Cause>,
) -> Result<(), Failed> {
    while !buf.is_empty() {
        match stream.until(deadline.min(Instant::now() + WAIT_CHECK)).read(buf) {
            Ok(0) => return Err(failed(peer, io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => buf = &mut buf[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut && Instant::now() < deadline => {
                wait_check::go_on().map_err(|error| Failed::Own { doing: format!("waiting for rank {peer}"), error })?;
                if let Some(cause) = absence() {
                    return Err(Failed::Peer { rank: peer, cause });
                }
            }
            Err(error) => return Err(failed(peer, error)),
        }
    }
    Ok(())
}

fn failed(rank: Rank, error: io::Error) -> Failed {
    if sys::is_resource_shortage(&error) {
        return Failed::Own { doing: format!("sharing memory with rank {rank}"), error };
    }
    // Connections inside a host time out at this rank's deadline only. The peer may wait for
    // another rank, so this is no failure of the connection.
    let cause = match error.kind() {
        io::ErrorKind::TimedOut => Cause::Silent { deadline: Duration::ZERO },
        _ => cause_of(&error),
    };
    Failed::Peer { rank, cause }
}
