//! Keeps the connections that peers have made until this rank asks for them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::exported::ExportedRegions;
use crate::error::Cause;
use crate::failure::{Query, Reply, StatusBoard, wait_check};
use crate::network::listener::handshake::{Hello, Purpose};
use crate::network::listener::{Handler, Stream};
use crate::observe;
use crate::sys::Waker;
use crate::timeouts::WAIT_CHECK;
use crate::transport::NoLink;
use crate::types::Rank;

/// The most connections that wait for one communicator from one peer.
const MOST_WAITING: usize = 128;

/// How many communicators are remembered after they have ended. A connection for one of them comes
/// within the deadline of an operation.
const REMEMBERED: usize = 1 << 16;

/// Connections that were admitted and not yet asked for, by communicator and peer.
#[derive(Default)]
pub(crate) struct Mailbox {
    arrived: Mutex<HashMap<(u64, u32), Vec<Arrival>>>,
    /// Locked after `arrived`.
    ended: Mutex<Ended>,
    changed: Condvar,
    /// Why no connections can come now.
    refused: Mutex<Option<Arc<io::Error>>>,
    /// What to wake when a connection arrives for a communicator.
    wakers: Mutex<HashMap<u64, Arc<Waker>>>,
    /// What the other ranks of this host may map.
    pub(super) exported: ExportedRegions,
}

/// The communicators that have ended, and the order in which they did.
#[derive(Default)]
struct Ended {
    comm_ids: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Ended {
    fn add(&mut self, comm_id: u64) {
        if self.comm_ids.insert(comm_id) {
            self.order.push_back(comm_id);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.comm_ids.remove(&oldest);
        }
    }
}

/// A connection, and when it came.
type Arrival = (Hello, Stream, Instant);

fn is_local(stream: &Stream) -> bool {
    matches!(stream, Stream::Local(_))
}

impl Mailbox {
    /// Keeps a connection until this rank asks for it, unless its communicator has ended here: then the
    /// peer sees it close. `lives` tells which communicators this rank has.
    pub(crate) fn admit(&self, hello: Hello, stream: Stream, lives: impl Fn(u64) -> bool) {
        if hello.purpose == Purpose::Probe {
            return;
        }
        let mut arrived = self.arrived.lock();
        if self.ended.lock().comm_ids.contains(&hello.comm_id) {
            return;
        }
        // This rank may never have the communicators of others, because their start has failed. If a
        // peer has closed all its connections for one, and sent nothing, none of them is asked for.
        arrived.retain(|&(comm_id, _), waiting| lives(comm_id) || !waiting.iter().all(|(_, stream, _)| stream.is_ended()));
        let waiting = arrived.entry((hello.comm_id, hello.from)).or_default();
        if waiting.len() >= MOST_WAITING {
            crate::log::warn!(from = hello.from, "dropped a connection: the rank opens more connections than it can need");
            return;
        }
        // A rank that connects once more has lost its earlier connection.
        let is_same = |(other, before, _): &Arrival| *other == hello && is_local(before) == is_local(&stream);
        waiting.retain(|arrival| !is_same(arrival));
        waiting.push((hello, stream, Instant::now()));
        drop(arrived);
        self.changed.notify_all();
        if let Some(Err(error)) = self.wakers.lock().get(&hello.comm_id).map(|waker| waker.wake()) {
            crate::log::warn!(%error, comm_id = hello.comm_id, "cannot wake a communicator for a connection");
        }
    }

    /// Ends the waits for connections: the system refuses this process what each one needs.
    fn refuse(&self, error: &Arc<io::Error>) {
        *self.refused.lock() = Some(error.clone());
        self.changed.notify_all();
        self.wakers.lock().values().for_each(|waker| _ = waker.wake());
    }

    /// Returns why no more connections can come, if that is so.
    pub(super) fn refusal(&self) -> Option<io::Error> {
        self.refused.lock().as_ref().map(|error| io::Error::new(error.kind(), error.clone()))
    }

    /// Waits for the connection with which a rank joins the host group, or says that it cannot.
    /// Asks `absence` regularly, and fails with what it says if the rank will not come.
    pub(crate) fn wait_for_host_member(
        &self,
        comm_id: u64,
        from: Rank,
        deadline: Instant,
        absence: impl Fn() -> Option<NoLink>,
    ) -> Result<Stream, NoLink> {
        let is_it = |(hello, ..): &Arrival| matches!(hello.purpose, Purpose::HostGroup | Purpose::NoHostGroup);
        let mut arrived = self.arrived.lock();
        loop {
            if let Some(waiting) = arrived.get_mut(&(comm_id, from as u32))
                && let Some(at) = waiting.iter().position(is_it)
            {
                return Ok(waiting.remove(at).1);
            }
            if let Some(error) = self.refusal() {
                return Err(NoLink::Own(error));
            }
            if self.changed.wait_until(&mut arrived, deadline.min(Instant::now() + WAIT_CHECK)).timed_out() {
                MutexGuard::unlocked(&mut arrived, wait_check::go_on).map_err(NoLink::Own)?;
                if let Some(why) = absence() {
                    return Err(why);
                }
                if Instant::now() >= deadline {
                    return Err(Cause::Silent { deadline: Duration::ZERO }.into());
                }
            }
        }
    }

    /// Takes all connections of one link, once all have come; with `patience`, those that have come so
    /// long after the first one.
    pub(crate) fn link_streams(&self, comm_id: u64, from: Rank, patience: Option<Duration>) -> Option<Vec<Stream>> {
        let mut arrived = self.arrived.lock();
        let waiting = arrived.get_mut(&(comm_id, from as u32))?;
        let (first, medium) = waiting
            .iter()
            .find_map(|(hello, stream, _)| (hello.purpose == Purpose::Link).then_some((*hello, is_local(stream))))?;
        // A peer may give up a connection inside the host for others through the network, which
        // belong to another link.
        let of_link = |(hello, stream, _): &Arrival| {
            hello.purpose == Purpose::Link && hello.lanes == first.lanes && is_local(stream) == medium
        };
        let have_had_time = || {
            let since = waiting.iter().filter(|entry| of_link(entry)).map(|(.., at)| *at).min();
            since.zip(patience).is_some_and(|(since, patience)| !medium && since.elapsed() >= patience)
        };
        if waiting.iter().filter(|entry| of_link(entry)).count() < first.lanes.into() && !have_had_time() {
            return None;
        }
        let (mut link, rest): (Vec<_>, Vec<_>) = waiting.drain(..).partition(of_link);
        *waiting = rest;
        link.sort_by_key(|(hello, ..)| hello.lane);
        Some(link.into_iter().map(|(_, stream, _)| stream).collect())
    }

    /// Returns whether connections of a link have come, and others have not.
    pub(super) fn has_some_of_link(&self, comm_id: u64, from: Rank) -> bool {
        let arrived = self.arrived.lock();
        let is_link = |(hello, ..): &Arrival| hello.purpose == Purpose::Link;
        arrived.get(&(comm_id, from as u32)).is_some_and(|waiting| waiting.iter().any(is_link))
    }

    /// Returns the ranks of the job that have connected for a link which this rank has not asked
    /// for.
    pub(crate) fn peers_with_links(&self, comm_id: u64) -> Vec<Rank> {
        let arrived = self.arrived.lock();
        let is_link = |arrivals: &[Arrival]| arrivals.iter().any(|(hello, ..)| hello.purpose == Purpose::Link);
        let peers = arrived.iter().filter(|((of, _), arrivals)| *of == comm_id && is_link(arrivals));
        peers.map(|(&(_, from), _)| from as Rank).collect()
    }

    /// Has `waker` woken when a connection arrives for a communicator.
    pub(super) fn attach(&self, comm_id: u64, waker: Arc<Waker>) {
        self.wakers.lock().insert(comm_id, waker);
    }

    /// Drops what waits for a communicator, which opens no links any more.
    pub(crate) fn forget(&self, comm_id: u64) {
        self.wakers.lock().remove(&comm_id);
        self.arrived.lock().retain(|&(other, _), _| other != comm_id);
    }

    /// Drops what waits for a communicator that has ended, and what will come for it.
    pub(crate) fn end(&self, comm_id: u64) {
        let mut arrived = self.arrived.lock();
        self.ended.lock().add(comm_id);
        arrived.retain(|&(other, _), _| other != comm_id);
    }

    /// Returns how many connections wait.
    #[cfg(any(fuzzing, test))]
    pub(crate) fn waiting(&self) -> usize {
        self.arrived.lock().values().map(Vec::len).sum()
    }
}

/// Sorts the connections and queries that the listener of this process admits.
pub(crate) struct Dispatcher {
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) board: Arc<StatusBoard>,
}

impl Dispatcher {
    fn is_for_this_rank(&self, hello: &Hello) -> bool {
        let (from, to) = (hello.from as usize, hello.to as usize);
        to == self.rank && from < self.world && from != self.rank
    }
}

impl Handler for Dispatcher {
    fn admit(&mut self, hello: Hello, stream: Stream) {
        if !self.is_for_this_rank(&hello) {
            return;
        }
        match hello.purpose {
            Purpose::Region => self.mailbox.exported.hand_over(hello.comm_id, &stream),
            // If the peer sees its link close, it asks why.
            _ => self.mailbox.admit(hello, stream, |comm_id| self.board.has(comm_id, self.rank)),
        }
    }

    fn refused(&mut self, error: &Arc<io::Error>) {
        self.mailbox.refuse(error);
    }

    fn accepts_again(&mut self) {
        *self.mailbox.refused.lock() = None;
    }

    fn answer(&mut self, hello: &Hello, query: &[u8]) -> Vec<u8> {
        if hello.purpose == Purpose::Observe {
            return if hello.to as usize == self.rank { observe::answer(&self.board, self.rank, query) } else { Vec::new() };
        }
        let reply = match Query::decode(query).filter(|_| self.is_for_this_rank(hello)) {
            Some(query) => self.board.answer(hello.comm_id, hello.from as usize, self.rank, query),
            None => Reply::Unknown,
        };
        reply.encode()
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns both ends of a connection, that of the mailbox first.
    fn ends() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        (Stream::Tcp(crate::sys::TcpStream::from_std(near)), far)
    }

    fn link(comm_id: u64, from: Rank) -> Hello {
        Hello::new(Purpose::Link, comm_id, from, 0)
    }

    #[test]
    fn what_comes_for_a_communicator_ends_with_it() {
        let mailbox = Mailbox::default();
        let closes = |mut far: TcpStream| assert_eq!(far.read(&mut [0]).unwrap(), 0);
        let [(one, far_one), (late, far_late), (other, _far_other)] = [ends(), ends(), ends()];
        mailbox.admit(link(7, 1), one, |_| true);
        mailbox.admit(link(8, 1), other, |_| true);
        mailbox.end(7);
        closes(far_one);
        mailbox.admit(link(7, 1), late, |_| true);
        closes(far_late);
        assert_eq!(mailbox.waiting(), 1);
        assert_eq!(mailbox.link_streams(8, 1, None).unwrap().len(), 1);
    }

    #[test]
    fn what_a_peer_has_given_up_is_dropped_unless_it_may_be_read() {
        let mailbox = Mailbox::default();
        // For communicators 1 to 3 the peer has closed the connection, for 1 after it has sent
        // something. This rank has communicator 2.
        for comm_id in 1..=4 {
            let (near, mut far) = ends();
            if comm_id == 1 {
                far.write_all(b"x").unwrap();
            }
            if comm_id < 4 {
                drop(far);
                let Stream::Tcp(stream) = &near else { unreachable!("it is of the network") };
                while stream.peek(&mut [0]).is_err() {
                    std::thread::yield_now();
                }
            } else {
                std::mem::forget(far);
            }
            mailbox.admit(link(comm_id, 1), near, |comm_id| comm_id == 2);
        }
        let (near, _far) = ends();
        mailbox.admit(link(5, 1), near, |comm_id| comm_id == 2);
        let left = [1, 2, 3, 4, 5].map(|comm_id| mailbox.link_streams(comm_id, 1, None).is_some());
        assert_eq!(left, [true, true, false, true, true]);
    }

    #[test]
    fn the_oldest_ends_are_forgotten() {
        let mut ended = Ended::default();
        (0..REMEMBERED as u64 + 2).for_each(|comm_id| ended.add(comm_id));
        assert_eq!((ended.comm_ids.len(), ended.order.front()), (REMEMBERED, Some(&2)));
    }
}
