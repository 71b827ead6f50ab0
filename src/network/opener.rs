//! Opens the links of a communicator whose ranks are processes.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Interest, Registry, Token};

use super::process::{Network, cannot_connect};
use super::rails::{self, RailOpening};
use crate::config::CopyMode;
use crate::error::Cause;
use crate::network::listener::handshake::{Hello, Purpose};
use crate::network::listener::{Connector, DialError, Stream};
use crate::sys::{self, LocalStream, TcpStream, Waker};
use crate::timeouts::{OTHER_RAILS_OF_ACCEPTOR, WAIT_CHECK};
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
    /// How links in shared memory copy large messages.
    copy_mode: CopyMode,
    /// The links that this rank is opening.
    opening: HashMap<Rank, Opening>,
    /// Connections of peers that are about to hand over the memory of a link.
    offering: HashMap<Rank, LocalStream>,
}

/// A link that this rank is opening.
enum Opening {
    /// The connections that it has through the network, and the next one.
    InTurn { lanes: Vec<TcpStream>, connector: Box<Connector> },
    /// All connections at once.
    Rails(RailOpening),
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
        copy_mode: CopyMode,
    ) -> NetworkOpener {
        NetworkOpener { network, comm_id, rank, members, hosts, copy_mode, opening: HashMap::new(), offering: HashMap::new() }
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
            None => connector.with_lanes_by_round_trip(self.network.links.congestion_control.clone()),
        }
    }

    /// Begins to open a link through the network, or continues with the connection after `opened`.
    fn continue_in_network(&self, peer: Rank, opened: Vec<TcpStream>, lanes: Option<u8>) -> Opening {
        let to = self.members[peer];
        if !self.network.has_rails(to) {
            let connector = Box::new(self.connector(peer, &opened, lanes));
            return Opening::InTurn { lanes: opened, connector };
        }
        let targets = rails::targets(&self.network, to);
        let hello = Hello { lanes: targets.len() as u8, ..self.network.hello(Purpose::Link, self.comm_id, to) };
        let connectors = targets.into_iter().enumerate();
        let connectors = connectors.map(|(lane, target)| Connector::new(target, Hello { lane: lane as u8, ..hello }));
        Opening::Rails(RailOpening::new(peer, connectors))
    }

    /// Continues to open a link to a higher rank.
    fn connect(&mut self, peer: Rank, registry: &Registry, token: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        let mut opening = match self.opening.remove(&peer) {
            Some(opening) => opening,
            None if self.hosts[peer] == self.hosts[self.rank] => {
                Opening::InTurn { lanes: Vec::new(), connector: Box::new(self.local_connector(peer)) }
            }
            None => {
                if let Some(address) = self.network.unreachable(self.members[peer]) {
                    return Err(Cause::Unreachable { address, kind: io::ErrorKind::AddrNotAvailable }.into());
                }
                self.continue_in_network(peer, Vec::new(), self.network.links.lanes())
            }
        };
        loop {
            let mut count = self.network.links.lanes();
            let (mut lanes, mut connector) = match opening {
                Opening::InTurn { lanes, connector } => (lanes, connector),
                Opening::Rails(mut rails) => match rails.advance(&self.network.identity, registry, token)? {
                    Some(lanes) => return self.link(lanes, End::Initiator, peer).map(Some),
                    None => {
                        self.opening.insert(peer, Opening::Rails(rails));
                        return Ok(None);
                    }
                },
            };
            match connector.advance(&self.network.identity, registry, token) {
                Ok(None) => {
                    self.opening.insert(peer, Opening::InTurn { lanes, connector });
                    return Ok(None);
                }
                Ok(Some(Stream::Local(stream))) => match shm::offer(stream, self.copy_mode) {
                    Ok(link) => return Ok(Some(link)),
                    // The peer sees the connection end before any memory came, and waits for the
                    // next connection.
                    Err(error) => {
                        crate::log::warn!(%error, peer, "cannot create shared memory for a link to a rank of this host; the link uses TCP")
                    }
                },
                Ok(Some(Stream::Tcp(stream))) => {
                    lanes.push(stream);
                    count = Some(connector.lanes());
                    if lanes.len() == usize::from(connector.lanes()) {
                        return self.link(lanes, End::Initiator, peer).map(Some);
                    }
                }
                Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_resource_shortage(&error) => {
                    return Err(NoLink::Own(error));
                }
                Err(error) if connector.is_local() => {
                    let cause = cannot_connect(connector.target(), &error);
                    crate::log::warn!(%cause, peer, "cannot connect to a rank of this host inside the host; the link uses TCP");
                }
                Err(error) => return Err(cannot_connect(connector.target(), &error).into()),
            }
            opening = self.continue_in_network(peer, lanes, count);
        }
    }

    /// Makes a link of its connections through the network.
    fn link(&self, lanes: Vec<TcpStream>, end: End, peer: Rank) -> Result<Box<dyn Link>, NoLink> {
        let between = match end {
            End::Initiator => [self.rank, peer],
            End::Acceptor => [peer, self.rank],
        };
        let to = self.members[peer];
        let of_rails = self.network.has_rails(to).then(|| rails::targets(&self.network, to).len());
        Ok(self.network.links.link(lanes, of_rails, end, between)?)
    }

    /// Takes the connections of a link that a peer opens, once all have come.
    fn arrived_link(&self, peer: Rank) -> Option<Arrived> {
        let from = self.members[peer];
        let patience = self.network.has_rails(from).then_some(OTHER_RAILS_OF_ACCEPTOR);
        let streams = self.network.mailbox.link_streams(self.comm_id, from, patience)?;
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
                // A lower rank on another host will never connect.
                None if self.network.is_hidden_from(self.members[peer]) => {
                    let why =
                        "this rank advertises a loopback address to other hosts; check KOLO_INTERFACE, KOLO_RAILS and KOLO_STORE";
                    return Err(NoLink::Own(io::Error::new(io::ErrorKind::AddrNotAvailable, why)));
                }
                None => match self.arrived_link(peer) {
                    None => return self.network.mailbox.refusal().map_or(Ok(None), |error| Err(NoLink::Own(error))),
                    Some(Arrived::Lanes(lanes)) => {
                        return self.link(lanes, End::Acceptor, peer).map(Some);
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
                    return Ok(Some(shm::accept(stream, region, self.copy_mode)));
                }
                // The peer has no memory for a link, and connects through the network next.
                Err(error) if is_end_of_peer(&error) => {}
                Err(error) if sys::is_resource_shortage(&error) => return Err(NoLink::Own(error)),
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
        match self.opening.get(&peer) {
            Some(Opening::InTurn { connector, .. }) => connector.left(),
            Some(Opening::Rails(rails)) => rails.left(),
            // Nothing wakes a rank when the last connections of a link have had their time.
            None => {
                let from = self.members[peer];
                let waits = self.network.has_rails(from) && self.network.mailbox.has_some_of_link(self.comm_id, from);
                waits.then_some(WAIT_CHECK)
            }
        }
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
