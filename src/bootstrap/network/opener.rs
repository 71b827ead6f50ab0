//! Opens the links of a communicator whose ranks are processes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token, Waker};

use super::process::{Network, cannot_connect};
use crate::bootstrap::listener::handshake::{Hello, Purpose};
use crate::bootstrap::listener::{Connector, DialError, Stream};
use crate::error::Cause;
use crate::sys::{self, LocalStream, Process};
use crate::transport::tls::End;
use crate::transport::{Link, NoLink, Opener, is_end_of_peer, shm};
use crate::types::Rank;

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
    /// Whether the system may copy from the memory of peers.
    reads_memory: bool,
    /// The links that this rank is opening.
    opening: HashMap<Rank, Opening>,
    /// Connections of peers that are about to hand over the memory of a link.
    offering: HashMap<Rank, LocalStream>,
}

/// A link that this rank is opening: the connections that it has through the network, and the next
/// one.
struct Opening {
    lanes: Vec<TcpStream>,
    connector: Connector,
}

/// The connections of a link that a peer opens.
enum Arrived {
    /// Through the network.
    Lanes(Vec<TcpStream>),
    /// Inside the host.
    Local(LocalStream),
}

impl NetworkOpener {
    pub(crate) fn new(
        network: Arc<Network>,
        comm_id: u64,
        rank: Rank,
        members: Arc<[Rank]>,
        hosts: Arc<[usize]>,
        reads_memory: bool,
    ) -> NetworkOpener {
        NetworkOpener { network, comm_id, rank, members, hosts, reads_memory, opening: HashMap::new(), offering: HashMap::new() }
    }

    fn readable_process(&self, peer: Rank) -> Option<Process> {
        self.network.visible_process(self.members[peer]).filter(|_| self.reads_memory)
    }

    /// Returns a connector to a peer of this host.
    fn local_connector(&self, peer: Rank) -> Connector {
        let to = self.members[peer];
        Connector::new(self.network.target(to, true), self.network.hello(Purpose::Link, self.comm_id, to))
    }

    /// Returns a connector through the network for the next lane of a link. The first lane may decide
    /// how many there are.
    fn connector(&self, peer: Rank, opened: &[TcpStream], lanes: Option<u8>) -> Connector {
        let to = self.members[peer];
        let hello = self.network.hello(Purpose::Link, self.comm_id, to);
        let hello = Hello { lane: opened.len() as u8, lanes: lanes.unwrap_or(1), ..hello };
        let connector = Connector::new(self.network.target(to, false), hello);
        match lanes {
            Some(_) => connector,
            None => connector.with_lanes_by_way(self.network.links.congestion_control.clone()),
        }
    }

    /// Continues to open a link to a higher rank.
    fn connect(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        let mut opening = self.opening.remove(&peer).unwrap_or_else(|| {
            let is_local = self.hosts[peer] == self.hosts[self.rank];
            let through_network = || self.connector(peer, &[], self.network.links.lanes());
            let connector = if is_local { self.local_connector(peer) } else { through_network() };
            Opening { lanes: Vec::new(), connector }
        });
        loop {
            let mut lanes = self.network.links.lanes();
            match opening.connector.advance(&self.network.identity, registry, token) {
                Ok(None) => {
                    self.opening.insert(peer, opening);
                    return Ok(None);
                }
                Ok(Some(Stream::Local(stream))) => match shm::offer(stream, self.readable_process(peer)) {
                    Ok(link) => return Ok(Some(link)),
                    // The peer sees the connection end before any memory came, and waits for the
                    // next connection.
                    Err(error) => {
                        tracing::warn!(%error, peer, "cannot create shared memory for a link to a rank of this host; the link uses TCP")
                    }
                },
                Ok(Some(Stream::Tcp(stream))) => {
                    opening.lanes.push(stream);
                    lanes = Some(opening.connector.lanes());
                    if opening.lanes.len() == usize::from(opening.connector.lanes()) {
                        return Ok(Some(self.network.links.link(opening.lanes, End::Initiator, [self.rank, peer])?));
                    }
                }
                Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_resource_shortage(&error) => {
                    return Err(NoLink::Own(error));
                }
                Err(error) if opening.connector.is_local() => {
                    let cause = cannot_connect(opening.connector.target(), &error);
                    tracing::warn!(%cause, peer, "cannot connect to a rank of this host inside the host; the link uses TCP");
                }
                Err(error) => return Err(cannot_connect(opening.connector.target(), &error).into()),
            }
            opening.connector = self.connector(peer, &opening.lanes, lanes);
        }
    }

    /// Takes the connections of a link that a peer opens, once all have come.
    fn arrived_link(&self, peer: Rank) -> Option<Arrived> {
        let streams = self.network.mailbox.link_streams(self.comm_id, self.members[peer])?;
        let mut lanes = Vec::with_capacity(streams.len());
        for stream in streams {
            match stream {
                Stream::Tcp(stream) => lanes.push(stream),
                Stream::Local(stream) => return Some(Arrived::Local(stream)),
            }
        }
        Some(Arrived::Lanes(lanes))
    }

    /// Continues to accept the link of a lower rank.
    fn accept(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        loop {
            let mut stream = match self.offering.remove(&peer) {
                Some(stream) => stream,
                None => match self.arrived_link(peer) {
                    None => return Ok(None),
                    Some(Arrived::Lanes(lanes)) => {
                        return Ok(Some(self.network.links.link(lanes, End::Acceptor, [peer, self.rank])?));
                    }
                    Some(Arrived::Local(mut stream)) => {
                        registry.register(&mut stream, token, Interest::READABLE).map_err(NoLink::Own)?;
                        stream
                    }
                },
            };
            match shm::offered(&stream) {
                Ok(None) => {
                    self.offering.insert(peer, stream);
                    return Ok(None);
                }
                Ok(Some(region)) => {
                    registry.deregister(&mut stream).map_err(NoLink::Own)?;
                    return Ok(Some(shm::accept(stream, region, self.readable_process(peer))));
                }
                // The peer has no memory for a link, and connects through the network next.
                Err(error) if is_end_of_peer(&error) => {}
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
        self.network.visible_process(self.members[peer]).map(|process| !sys::has_ended(process))
    }

    fn attach(&mut self, waker: Arc<Waker>) {
        self.network.mailbox.attach(self.comm_id, waker);
    }
}

impl Drop for NetworkOpener {
    fn drop(&mut self) {
        self.network.mailbox.forget(self.comm_id);
    }
}
