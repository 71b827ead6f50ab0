//! The network of one process: its listener, its peers, and how it connects to them.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use mio::{Events, Token};
use parking_lot::Mutex;

use super::exported::ExportedRegions;
use super::mailbox::Mailbox;
use super::offered::Offered;
use super::topology::BetweenHosts;
use crate::config::{CongestionControl, Settings};
use crate::error::{Cause, Result};
use crate::failure::{StatusBoard, wait_check};
use crate::network::identity::Identity;
use crate::network::listener::handshake::{Hello, Purpose, Refusal};
use crate::network::listener::{Connector, DialError, Listener, Stream, Target};
use crate::network::peer_info::PeerInfo;
use crate::sys::{self, LocalStream, Poll, Process, Reserve, TcpStream};
use crate::timeouts::WAIT_CHECK;
use crate::transport::rail_link::RailLink;
use crate::transport::tls::{End, Tls};
use crate::transport::{Link, NoLink, congestion, tcp};
use crate::types::Rank;

/// What all communicators of one process use to reach the other ranks of the job.
pub(crate) struct Network {
    // Kept open: peers connect as long as they have communicators with this rank.
    pub(crate) _listener: Listener,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) board: Arc<StatusBoard>,
    pub(crate) identity: Identity,
    /// All ranks of the job.
    pub(crate) peers: Vec<PeerInfo>,
    /// This rank in the job.
    pub(crate) rank: Rank,
    pub(crate) links: LinkSettings,
    /// What messages between the hosts cost, once the job has measured that.
    pub(crate) between_hosts: OnceLock<BetweenHosts>,
    /// What this process offers to those that watch the job.
    pub(crate) offered: Mutex<Option<Offered>>,
    /// A rank that has no descriptor left tells its peers that it has failed all the same.
    pub(crate) reserve: Reserve,
}

/// What links in the network are made of.
pub(crate) struct LinkSettings {
    /// TCP connections of one link; `None` if each link has as many as its round trip asks for.
    pub(crate) sockets: Option<u8>,
    pub(crate) congestion_control: CongestionControl,
    pub(crate) tls: Option<Tls>,
}

impl LinkSettings {
    /// Returns how many connections a link has; `None` if its round trip decides.
    pub(super) fn lanes(&self) -> Option<u8> {
        // An encrypted stream cannot be divided.
        if self.tls.is_some() { Some(1) } else { self.sockets }
    }

    /// Returns what a link is made of, for people.
    pub(crate) fn kind(&self) -> String {
        let kind = match (&self.tls, self.lanes()) {
            (Some(_), _) => "tls".to_owned(),
            (None, None) => "tcp".to_owned(),
            (None, Some(lanes)) => format!("{lanes} tcp"),
        };
        match &self.congestion_control {
            CongestionControl::Auto => kind,
            CongestionControl::System => format!("{kind} system"),
            CongestionControl::Named(name) => format!("{kind} {name}"),
        }
    }

    /// Makes a link between two ranks of a communicator of its connections. With rails, it should have
    /// had `of_rails` connections.
    pub(super) fn link(
        &self,
        mut lanes: Vec<TcpStream>,
        of_rails: Option<usize>,
        end: End,
        between: [Rank; 2],
    ) -> Result<Box<dyn Link>, Cause> {
        lanes.iter().for_each(|lane| congestion::control(lane, &self.congestion_control));
        match (&self.tls, of_rails) {
            (None, Some(wanted)) => {
                let peer = if matches!(end, End::Initiator) { between[1] } else { between[0] };
                let left_out = wanted.saturating_sub(lanes.len());
                Ok(Box::new(RailLink::new(lanes, left_out, peer)))
            }
            (Some(tls), _) if lanes.len() == 1 => tls.link(lanes.remove(0), end, between),
            (Some(_), _) => Err(Cause::Corrupt("an encrypted link of several connections")),
            (None, None) => Ok(tcp::link(lanes)),
        }
    }
}

impl Network {
    /// Begins to offer what the settings ask for, until [`Network::withdraw`].
    ///
    /// # Errors
    ///
    /// Those of [`Offered::begin`].
    pub(crate) fn offer(&self, settings: &Settings, deadline: Instant) -> Result<()> {
        let offered = Offered::begin(settings, deadline, self.rank, &self.identity, &self.peers, &self.board)?;
        *self.offered.lock() = Some(offered);
        Ok(())
    }

    /// Offers nothing any more.
    pub(crate) fn withdraw(&self) {
        let offered = self.offered.lock().take();
        drop(offered);
    }

    pub(super) fn exported(&self) -> &ExportedRegions {
        &self.mailbox.exported
    }

    /// Returns the process of a rank of the job, if this process can see it.
    pub(crate) fn visible_process(&self, rank: Rank) -> Option<Process> {
        self.peers[self.rank].sees(&self.peers[rank])
    }

    /// Returns what it takes to connect to a rank's local listener.
    pub(super) fn local(&self, purpose: Purpose, comm_id: u64, to: Rank) -> (&str, &Identity, Hello) {
        (&self.peers[to].local_name, &self.identity, self.hello(purpose, comm_id, to))
    }

    pub(super) fn hello(&self, purpose: Purpose, comm_id: u64, to: Rank) -> Hello {
        Hello::new(purpose, comm_id, self.rank, to)
    }

    /// Returns whether links to a rank use several rails. Both ranks find the same.
    pub(super) fn has_rails(&self, to: Rank) -> bool {
        self.links.tls.is_none() && self.peers[self.rank].has_rails_to(&self.peers[to])
    }

    /// Returns the address of rank `to` if it advertises loopback on another host; `None` if this rank
    /// can reach it. If a process listens at that address on this host, it is not rank `to`.
    pub(super) fn unreachable(&self, to: Rank) -> Option<String> {
        let peer = &self.peers[to];
        self.peers[self.rank].cannot_reach(peer).then(|| peer.address.to_string())
    }

    /// Returns whether this rank advertises loopback to a rank on another host.
    pub(super) fn is_hidden_from(&self, other: Rank) -> bool {
        self.peers[other].cannot_reach(&self.peers[self.rank])
    }

    /// Returns where a rank listens: inside the host, or in the network.
    pub(super) fn target(&self, to: Rank, is_local: bool) -> Target {
        let PeerInfo { address, local_name, .. } = &self.peers[to];
        if is_local { Target::Local(local_name.clone()) } else { Target::Network(*address) }
    }

    /// Connects to a rank through the network, until the deadline. Asks `absence` regularly, and
    /// fails with what it says if the rank will not answer.
    pub(crate) fn connect(
        &self,
        purpose: Purpose,
        comm_id: u64,
        to: Rank,
        deadline: Instant,
        absence: impl Fn() -> Option<NoLink>,
    ) -> Result<Stream, NoLink> {
        self.wait_for(Connector::new(self.target(to, false), self.hello(purpose, comm_id, to)), deadline, absence)
    }

    /// Connects to a rank of this host, as [`Network::connect`] does.
    pub(crate) fn connect_locally(
        &self,
        purpose: Purpose,
        comm_id: u64,
        to: Rank,
        deadline: Instant,
        absence: impl Fn() -> Option<NoLink>,
    ) -> Result<LocalStream, NoLink> {
        let connector = Connector::new(self.target(to, true), self.hello(purpose, comm_id, to));
        match self.wait_for(connector, deadline, absence)? {
            Stream::Local(stream) => Ok(stream),
            Stream::Tcp(_) => unreachable!("a connector to a local name makes local connections"),
        }
    }

    fn wait_for(
        &self,
        mut connector: Connector,
        deadline: Instant,
        absence: impl Fn() -> Option<NoLink>,
    ) -> Result<Stream, NoLink> {
        let mut poll = Poll::new().map_err(NoLink::Own)?;
        let mut events = Events::with_capacity(1);
        loop {
            let advanced = connector.advance(&self.identity, poll.registry(), Token(0));
            if let Some(stream) = advanced.map_err(|error| no_connection(connector.target(), error))? {
                return Ok(stream);
            }
            if let Some(why) = absence() {
                return Err(why);
            }
            wait_check::go_on().map_err(NoLink::Own)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let address = connector.target().to_string();
                return Err(Cause::Unreachable { address, kind: io::ErrorKind::TimedOut }.into());
            }
            let timeout = connector.left().unwrap_or(WAIT_CHECK).min(WAIT_CHECK).min(left);
            match poll.poll(&mut events, Some(timeout)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => result.map_err(NoLink::Own)?,
            }
        }
    }
}

/// Returns why an attempt to connect failed: this process lacks a resource, or the peer is the cause.
pub(super) fn no_connection(target: &Target, error: DialError) -> NoLink {
    match error {
        DialError::Connect(error) | DialError::Io(error) if sys::is_resource_shortage(&error) => NoLink::Own(error),
        error => cannot_connect(target, &error).into(),
    }
}

/// Returns what a failed attempt to connect says about the peer.
pub(super) fn cannot_connect(target: &Target, error: &DialError) -> Cause {
    let address = target.to_string();
    match error {
        DialError::Connect(error) | DialError::Io(error) => Cause::Unreachable { address, kind: error.kind() },
        DialError::Refused(Refusal::Secret) => Cause::Secret,
        DialError::Refused(Refusal::Run) => {
            crate::log::warn!(address, "the process that listens at a rank's address belongs to another run of the job");
            Cause::Gone
        }
        DialError::Refused(refusal) => {
            crate::log::warn!(?refusal, address, "a rank of this job refuses the connection");
            Cause::Unreachable { address, kind: io::ErrorKind::PermissionDenied }
        }
    }
}
