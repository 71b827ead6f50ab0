//! How a rank sends queries to the other ranks of a communicator, beside its operations: through
//! their listeners.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::process::Network;
use crate::bootstrap::listener::handshake::Purpose;
use crate::bootstrap::listener::{self, DialError};
use crate::bootstrap::peer_info::PeerInfo;
use crate::failure::{ControlChannel, Query, QueryError, Reply};
use crate::sys::{self, Process};
use crate::transport::is_end_of_peer;
use crate::types::Rank;

/// Reaches the ranks of one communicator.
pub(crate) struct NetworkControl {
    pub(crate) network: Arc<Network>,
    pub(crate) comm_id: u64,
    /// The communicator's ranks as ranks of the job.
    pub(crate) members: Arc<[Rank]>,
}

impl NetworkControl {
    fn visible_process(&self, peer: Rank) -> Option<Process> {
        self.network.visible_process(self.members[peer])
    }

    /// Sends a query through the host if the peer seems to be on it, otherwise through the network.
    fn send(&self, to: Rank, query: &[u8], deadline: Instant) -> Result<Vec<u8>, DialError> {
        let Network { peers, identity, rank, .. } = &*self.network;
        let PeerInfo { local_name, machine, .. } = &peers[to];
        let hello = self.network.hello(Purpose::Query, self.comm_id, to);
        if !machine.is_empty() && *machine == peers[*rank].machine {
            match listener::query_local(local_name, identity, &hello, query, deadline) {
                // The queue of the peer's listener is full: the peer is there, and does not answer.
                Err(DialError::Connect(error)) if error.kind() == io::ErrorKind::TimedOut => return Err(DialError::Io(error)),
                // The peer may be in a namespace of its own, which only the network reaches.
                Err(DialError::Connect(_)) => {}
                result => return result,
            }
        }
        let rails: Vec<SocketAddr> = peers[to].rails().collect();
        let (last, others) = rails.split_last().expect("a rank has an address");
        for (at, address) in others.iter().enumerate() {
            let share = deadline.saturating_duration_since(Instant::now()) / (rails.len() - at) as u32;
            match listener::query(*address, identity, &hello, query, Instant::now() + share) {
                // The rail may have failed.
                Err(DialError::Connect(error)) if error.kind() != io::ErrorKind::ConnectionRefused => {}
                result => return result,
            }
        }
        listener::query(*last, identity, &hello, query, deadline)
    }
}

impl ControlChannel for NetworkControl {
    fn is_stopped(&self, peer: Rank) -> bool {
        self.visible_process(peer).is_some_and(sys::is_stopped)
    }

    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError> {
        if self.visible_process(peer).is_some_and(sys::has_ended) {
            return Err(QueryError::Died);
        }
        let to = self.members[peer];
        match self.send(to, &query.encode(), Instant::now() + patience) {
            Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_resource_shortage(&error) => {
                Err(QueryError::Unasked)
            }
            Ok(reply) => Reply::decode(&reply).ok_or(QueryError::Mute),
            Err(DialError::Connect(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(QueryError::Gone),
            Err(DialError::Connect(error)) => {
                let address = self.network.peers[to].address.to_string();
                Err(QueryError::Unreachable { address, kind: error.kind() })
            }
            // The peer ended while it was asked.
            Err(DialError::Io(error)) if is_end_of_peer(&error) => Err(QueryError::Gone),
            // Another process got the port of a process that has ended.
            Err(DialError::Refused(_)) => Err(QueryError::Gone),
            Err(DialError::Io(_)) => Err(QueryError::Mute),
        }
    }
}
