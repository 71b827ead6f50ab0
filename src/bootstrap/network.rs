//! The network of one process: its listener, and the connections that came in through it.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use parking_lot::{Condvar, Mutex};

use super::lending::Lent;
use super::peer_info::PeerInfo;
use crate::bootstrap::listener::handshake::{Hello, Identity, Purpose, Refusal};
use crate::bootstrap::listener::{self, Connector, DialError, Host, Listener, Stream, Target};
use crate::error::Cause;
use crate::failure::{ControlChannel, Query, QueryError, Reply, StatusBoard};
use crate::sys::{self, LocalStream};
use crate::transport::tls::{End, Tls};
use crate::transport::{Link, NoLink, Opener, shm, tcp};
use crate::types::Rank;

/// What all communicators of one process use to reach the others of its job.
pub(crate) struct Network {
    // Kept open: others call as long as they have communicators with this rank.
    _listener: Listener,
    mailbox: Arc<Mailbox>,
    board: Arc<StatusBoard>,
    identity: Identity,
    /// All ranks of the job.
    pub(crate) peers: Vec<PeerInfo>,
    /// This rank in the job.
    pub(crate) rank: Rank,
    lines: Lines,
}

/// Of what links in the network are made.
pub(crate) struct Lines {
    /// TCP connections of one link.
    pub(crate) sockets: u8,
    pub(crate) tls: Option<Tls>,
}

impl Lines {
    /// How many connections a link has.
    fn count(&self) -> u8 {
        // What is encrypted keeps a core busy before it fills a connection.
        if self.tls.is_some() { 1 } else { self.sockets }
    }

    fn link(&self, mut streams: Vec<TcpStream>, end: End, between: [Rank; 2]) -> Result<Box<dyn Link>, Cause> {
        match &self.tls {
            Some(tls) if streams.len() == 1 => tls.link(streams.remove(0), end, between),
            Some(_) => Err(Cause::Corrupt("an encrypted link of several connections")),
            None => Ok(tcp::link(streams)),
        }
    }
}

/// How often whoever waits for a rank of its host looks whether that one will come.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// Connections that were admitted and not yet asked for, by communicator and caller.
#[derive(Default)]
pub(crate) struct Mailbox {
    arrived: Mutex<HashMap<(u64, u32), Vec<Arrival>>>,
    changed: Condvar,
    /// Who to wake when something arrives for a communicator.
    wakers: Mutex<HashMap<u64, Arc<Waker>>>,
    /// What the other ranks of this host may come for.
    lent: Lent,
}

type Arrival = (Hello, Stream);

fn is_local(stream: &Stream) -> bool {
    matches!(stream, Stream::Local(_))
}

/// The most connections that wait for one communicator from one caller.
const MOST_WAITING: usize = 128;

impl Mailbox {
    pub(crate) fn admit(&self, hello: Hello, stream: Stream) {
        if hello.purpose == Purpose::Probe {
            return;
        }
        let mut arrived = self.arrived.lock();
        let waiting = arrived.entry((hello.comm_id, hello.from)).or_default();
        if waiting.len() >= MOST_WAITING {
            tracing::warn!(from = hello.from, "a rank opens more connections than it can need");
            return;
        }
        // A rank that connects once more has lost its earlier connection.
        let is_same = |(other, before): &Arrival| *other == hello && is_local(before) == is_local(&stream);
        waiting.retain(|arrival| !is_same(arrival));
        waiting.push((hello, stream));
        drop(arrived);
        self.changed.notify_all();
        if let Some(Err(error)) = self.wakers.lock().get(&hello.comm_id).map(|waker| waker.wake()) {
            tracing::warn!(%error, "a communicator could not be woken");
        }
    }

    /// Takes out the connections with which a rank joins the host's ranks, or says that it cannot. Waits no longer when `look`, which
    /// is asked now and then, says that it will not come.
    pub(super) fn wait_for_neighbour(
        &self,
        comm_id: u64,
        from: Rank,
        deadline: Instant,
        look: impl Fn() -> Option<Cause>,
    ) -> Result<Arrival, Cause> {
        let mut arrived = self.arrived.lock();
        loop {
            if let Some(waiting) = arrived.get_mut(&(comm_id, from as u32))
                && let Some(at) = waiting.iter().position(|(hello, _)| matches!(hello.purpose, Purpose::Window | Purpose::Apart))
            {
                return Ok(waiting.remove(at));
            }
            if self.changed.wait_until(&mut arrived, deadline.min(Instant::now() + LOOK)).timed_out() {
                if let Some(cause) = look() {
                    return Err(cause);
                }
                if Instant::now() >= deadline {
                    return Err(Cause::Silent { deadline: Duration::ZERO });
                }
            }
        }
    }

    /// Takes out all connections of one link, once they have all come.
    pub(super) fn link_streams(&self, comm_id: u64, from: Rank) -> Option<Vec<Stream>> {
        let mut arrived = self.arrived.lock();
        let waiting = arrived.get_mut(&(comm_id, from as u32))?;
        let (first, medium) =
            waiting.iter().find_map(|(hello, stream)| (hello.purpose == Purpose::Link).then_some((*hello, is_local(stream))))?;
        // A connection inside the host may be given up for others through the network, which are of another link.
        let of_link = |(hello, stream): &Arrival| {
            hello.purpose == Purpose::Link && hello.lanes == first.lanes && is_local(stream) == medium
        };
        if waiting.iter().filter(|entry| of_link(entry)).count() < first.lanes.into() {
            return None;
        }
        let (mut link, rest): (Vec<_>, Vec<_>) = waiting.drain(..).partition(of_link);
        *waiting = rest;
        link.sort_by_key(|(hello, _)| hello.lane);
        Some(link.into_iter().map(|(_, stream)| stream).collect())
    }

    /// The ranks of the job that have connected for a link which this rank has not asked for.
    pub(super) fn callers(&self, comm_id: u64) -> Vec<Rank> {
        let arrived = self.arrived.lock();
        let is_link = |arrivals: &[Arrival]| arrivals.iter().any(|(hello, _)| hello.purpose == Purpose::Link);
        let callers = arrived.iter().filter(|((of, _), arrivals)| *of == comm_id && is_link(arrivals));
        callers.map(|(&(_, from), _)| from as Rank).collect()
    }

    /// How many connections wait.
    #[cfg(any(fuzzing, test))]
    pub(super) fn waiting(&self) -> usize {
        self.arrived.lock().values().map(Vec::len).sum()
    }

    pub(super) fn forget(&self, comm_id: u64) {
        self.wakers.lock().remove(&comm_id);
        self.arrived.lock().retain(|&(other, _), _| other != comm_id);
    }
}

/// Whom the listener of this process serves.
pub(super) struct Arrivals {
    pub(super) rank: Rank,
    pub(super) world: usize,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) board: Arc<StatusBoard>,
}

impl Arrivals {
    fn is_for_this_rank(&self, hello: &Hello) -> bool {
        let (from, to) = (hello.from as usize, hello.to as usize);
        to == self.rank && from < self.world && from != self.rank
    }
}

impl Host for Arrivals {
    fn admit(&mut self, hello: Hello, stream: Stream) {
        if !self.is_for_this_rank(&hello) {
            return;
        }
        match hello.purpose {
            // The caller sees the link close, and asks why.
            Purpose::Link if self.board.has_left(hello.comm_id, self.rank) => {}
            Purpose::Segment => self.mailbox.lent.hand_over(hello.comm_id, &stream),
            _ => self.mailbox.admit(hello, stream),
        }
    }

    fn answer(&mut self, hello: &Hello, query: &[u8]) -> Vec<u8> {
        let answer = match Query::decode(query).filter(|_| self.is_for_this_rank(hello)) {
            Some(query) => self.board.answer(hello.comm_id, hello.from as usize, self.rank, query),
            None => Reply::Unknown,
        };
        answer.encode()
    }
}

impl Network {
    pub(crate) fn new(
        listener: Listener,
        mailbox: Arc<Mailbox>,
        board: Arc<StatusBoard>,
        identity: Identity,
        peers: Vec<PeerInfo>,
        rank: Rank,
        lines: Lines,
    ) -> Network {
        Network { _listener: listener, mailbox, board, identity, peers, rank, lines }
    }

    pub(super) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    pub(super) fn board(&self) -> &StatusBoard {
        &self.board
    }

    pub(super) fn lent(&self) -> &Lent {
        &self.mailbox.lent
    }

    /// How to call at a rank's local listener.
    pub(super) fn local(&self, purpose: Purpose, comm_id: u64, to: Rank) -> (&str, &Identity, Hello) {
        (&self.peers[to].local_name, &self.identity, self.hello(purpose, comm_id, to))
    }

    fn hello(&self, purpose: Purpose, comm_id: u64, to: Rank) -> Hello {
        Hello::new(purpose, comm_id, self.rank, to)
    }

    /// Where a rank listens: in the network, or inside the host.
    fn target(&self, to: Rank, is_local: bool) -> Target {
        let PeerInfo { address, local_name, .. } = &self.peers[to];
        if is_local { Target::Local(local_name.clone()) } else { Target::Network(*address) }
    }

    /// Connects with a rank through the network, as [`Network::connect`] does.
    pub(super) fn call(
        &self,
        purpose: Purpose,
        comm_id: u64,
        to: Rank,
        deadline: Instant,
        look: impl Fn() -> Option<Cause>,
    ) -> Result<Stream, Cause> {
        self.connect(Connector::new(self.target(to, false), self.hello(purpose, comm_id, to)), deadline, look)
    }

    /// Connects with a rank of this host, as [`Network::connect`] does.
    pub(super) fn call_locally(
        &self,
        purpose: Purpose,
        comm_id: u64,
        to: Rank,
        deadline: Instant,
        look: impl Fn() -> Option<Cause>,
    ) -> Result<LocalStream, Cause> {
        let connector = Connector::new(self.target(to, true), self.hello(purpose, comm_id, to));
        match self.connect(connector, deadline, look)? {
            Stream::Local(stream) => Ok(stream),
            Stream::Tcp(_) => unreachable!("a name inside the host is no address in the network"),
        }
    }

    /// Waits for a connection, until the deadline, or until `look`, which is asked now and then, says that it will not come.
    fn connect(&self, mut connector: Connector, deadline: Instant, look: impl Fn() -> Option<Cause>) -> Result<Stream, Cause> {
        let broken = |error: io::Error| Cause::Broken(error.kind());
        let mut poll = Poll::new().map_err(broken)?;
        let mut events = Events::with_capacity(1);
        loop {
            let advanced = connector.advance(&self.identity, poll.registry(), Token(0));
            if let Some(stream) = advanced.map_err(|error| unreachable(connector.target(), &error))? {
                return Ok(stream);
            }
            if let Some(cause) = look() {
                return Err(cause);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Cause::Unreachable { address: connector.target().to_string(), kind: io::ErrorKind::TimedOut });
            }
            match poll.poll(&mut events, Some(connector.left().unwrap_or(LOOK).min(LOOK).min(left))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => result.map_err(broken)?,
            }
        }
    }
}

fn unreachable(target: &Target, error: &DialError) -> Cause {
    let address = target.to_string();
    match error {
        DialError::Connect(error) | DialError::Io(error) => Cause::Unreachable { address, kind: error.kind() },
        DialError::Refused(Refusal::Secret) => Cause::Secret,
        DialError::Refused(Refusal::Run) => {
            tracing::warn!(address, "the process that listens there now belongs to another run of the job");
            Cause::Gone
        }
        DialError::Refused(refusal) => {
            tracing::warn!(?refusal, address, "a rank of this job turned this one away");
            Cause::Unreachable { address, kind: io::ErrorKind::PermissionDenied }
        }
    }
}

/// How a rank reaches the others of a communicator at their listeners.
pub(super) struct NetworkControl {
    pub(super) network: Arc<Network>,
    pub(super) comm_id: u64,
    /// The communicator's ranks as ranks of the job.
    pub(super) members: Arc<[Rank]>,
}

impl NetworkControl {
    /// The process of a rank, if this one can see it.
    fn process(&self, peer: Rank) -> Option<u32> {
        let Network { peers, rank, .. } = &*self.network;
        peers[*rank].sees(&peers[self.members[peer]])
    }
}

impl ControlChannel for NetworkControl {
    fn is_stopped(&self, peer: Rank) -> bool {
        self.process(peer).is_some_and(sys::is_stopped)
    }

    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError> {
        if self.process(peer).is_some_and(sys::has_ended) {
            return Err(QueryError::Died);
        }
        let to = self.members[peer];
        let Network { peers, identity, rank, .. } = &*self.network;
        let hello = self.network.hello(Purpose::Ask, self.comm_id, to);
        let (query, deadline) = (query.encode(), Instant::now() + patience);
        let PeerInfo { address, local_name, machine, .. } = &peers[to];
        let is_near = !machine.is_empty() && *machine == peers[*rank].machine;
        let heard = match is_near.then(|| listener::ask_local(local_name, identity, &hello, &query, deadline)) {
            // Its queue is full: it takes no calls.
            Some(Err(DialError::Connect(error))) if error.kind() == io::ErrorKind::TimedOut => return Err(QueryError::Mute),
            // It may be in a namespace of its own, where only the network reaches.
            None | Some(Err(DialError::Connect(_))) => listener::ask(*address, identity, &hello, &query, deadline),
            Some(heard) => heard,
        };
        match heard {
            Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_want(&error) => Err(QueryError::Unasked),
            Ok(answer) => Reply::decode(&answer).ok_or(QueryError::Mute),
            Err(DialError::Connect(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(QueryError::Gone),
            Err(DialError::Connect(error)) => Err(QueryError::Unreachable { address: address.to_string(), kind: error.kind() }),
            // It ended while it was asked.
            Err(DialError::Io(error)) if is_end(&error) => Err(QueryError::Gone),
            // Somebody else got the port of a process that has ended.
            Err(DialError::Refused(_)) => Err(QueryError::Gone),
            Err(DialError::Io(_)) => Err(QueryError::Mute),
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof)
}

/// Opens the links of one communicator. Of two ranks, the lower one connects.
pub(crate) struct NetworkOpener {
    network: Arc<Network>,
    comm_id: u64,
    /// This rank in the communicator.
    rank: Rank,
    /// The communicator's ranks as ranks of the job.
    members: Arc<[Rank]>,
    /// The host of each.
    hosts: Arc<[usize]>,
    /// Links that this rank is opening.
    opening: HashMap<Rank, Opening>,
    /// Connections of peers that are about to hand over the memory of a link.
    offering: HashMap<Rank, LocalStream>,
}

/// A link that this rank is opening: the connections that it has through the network, and the next.
struct Opening {
    lanes: Vec<TcpStream>,
    connector: Connector,
}

impl NetworkOpener {
    pub(super) fn new(
        network: Arc<Network>,
        comm_id: u64,
        rank: Rank,
        members: Arc<[Rank]>,
        hosts: Arc<[usize]>,
    ) -> NetworkOpener {
        NetworkOpener { network, comm_id, rank, members, hosts, opening: HashMap::new(), offering: HashMap::new() }
    }

    /// How to connect with a peer of this host, or through the network for one lane of a link.
    fn connector(&self, peer: Rank, is_local: bool, lane: usize) -> Connector {
        let to = self.members[peer];
        let hello = self.network.hello(Purpose::Link, self.comm_id, to);
        let lanes = if is_local { 1 } else { self.network.lines.count() };
        Connector::new(self.network.target(to, is_local), Hello { lane: lane as u8, lanes, ..hello })
    }

    /// Goes on with a link that this rank opens.
    fn connect(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        let mut opening = self.opening.remove(&peer).unwrap_or_else(|| {
            let is_local = self.hosts[peer] == self.hosts[self.rank];
            Opening { lanes: Vec::new(), connector: self.connector(peer, is_local, 0) }
        });
        loop {
            match opening.connector.advance(&self.network.identity, registry, token) {
                Ok(None) => {
                    self.opening.insert(peer, opening);
                    return Ok(None);
                }
                Ok(Some(Stream::Local(stream))) => match shm::offer(stream) {
                    Ok(link) => return Ok(Some(link)),
                    // The peer sees the connection end before anything came, and waits for the next.
                    Err(error) => tracing::warn!(%error, peer, "no shared memory for a link; it goes through TCP"),
                },
                Ok(Some(Stream::Tcp(stream))) => {
                    opening.lanes.push(stream);
                    if opening.lanes.len() == usize::from(self.network.lines.count()) {
                        return Ok(Some(self.network.lines.link(opening.lanes, End::Caller, [self.rank, peer])?));
                    }
                }
                Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_want(&error) => return Err(NoLink::Own(error)),
                Err(error) if opening.connector.is_local() => {
                    let cause = unreachable(opening.connector.target(), &error);
                    tracing::warn!(%cause, peer, "a rank on this host cannot be reached there; its link goes through TCP");
                }
                Err(error) => return Err(unreachable(opening.connector.target(), &error).into()),
            }
            opening.connector = self.connector(peer, false, opening.lanes.len());
        }
    }

    /// Goes on with a link that a peer opens.
    fn accept(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        loop {
            let mut stream = match self.offering.remove(&peer) {
                Some(stream) => stream,
                None => {
                    let Some(streams) = self.network.mailbox.link_streams(self.comm_id, self.members[peer]) else {
                        return Ok(None);
                    };
                    let mut lanes = Vec::with_capacity(streams.len());
                    let mut local = None;
                    for stream in streams {
                        match stream {
                            Stream::Tcp(stream) => lanes.push(stream),
                            Stream::Local(stream) => local = Some(stream),
                        }
                    }
                    let Some(mut stream) = local else {
                        return Ok(Some(self.network.lines.link(lanes, End::Called, [peer, self.rank])?));
                    };
                    registry.register(&mut stream, token, Interest::READABLE).map_err(NoLink::Own)?;
                    stream
                }
            };
            match shm::offered(&stream) {
                Ok(None) => {
                    self.offering.insert(peer, stream);
                    return Ok(None);
                }
                Ok(Some(segment)) => {
                    registry.deregister(&mut stream).map_err(NoLink::Own)?;
                    return Ok(Some(shm::accept(stream, segment)));
                }
                // It has no memory for a link, and connects through the network next.
                Err(error) if is_end(&error) => {}
                Err(error) => return Err(Cause::Broken(error.kind()).into()),
            }
        }
    }
}

impl Opener for NetworkOpener {
    fn open(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        if self.rank < peer { self.connect(peer, registry, token) } else { self.accept(peer, registry, token) }
    }

    fn left(&self, peer: Rank) -> Option<Duration> {
        self.opening.get(&peer)?.connector.left()
    }

    fn is_alive(&self, peer: Rank) -> Option<bool> {
        let Network { peers, rank, .. } = &*self.network;
        peers[*rank].sees(&peers[self.members[peer]]).map(|process| !sys::has_ended(process))
    }

    fn attach(&mut self, waker: Arc<Waker>) {
        self.network.mailbox.wakers.lock().insert(self.comm_id, waker);
    }
}

impl Drop for NetworkOpener {
    fn drop(&mut self) {
        self.network.mailbox.forget(self.comm_id);
    }
}
