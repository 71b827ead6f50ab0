//! How a rank sends queries to the other ranks of a communicator, beside its operations: through
//! their listeners.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::process::Network;
use crate::error::Cause;
use crate::failure::{ControlChannel, Query, QueryError, Reply};
use crate::network::listener::handshake::Purpose;
use crate::network::listener::{self, DialError};
use crate::network::peer_info::PeerInfo;
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
        // What listens on this host at an address that both ranks have is not the peer.
        let [_, between] = peers[*rank].rails_between(&peers[to]);
        let rails: Vec<SocketAddr> = if between.is_empty() { peers[to].rails().collect() } else { between };
        ask_over_rails(&rails, deadline, |address, until| listener::query(address, identity, &hello, query, until))
    }
}

/// Asks a peer over one rail after the other until it answers over one. Each has its share of the
/// time.
///
/// # Errors
///
/// The one that says most about the peer: it does not answer on a connection; then, no process listens
/// at one of its addresses; then, why the last rail does not connect.
fn ask_over_rails<T>(
    rails: &[SocketAddr],
    deadline: Instant,
    mut ask: impl FnMut(SocketAddr, Instant) -> Result<T, DialError>,
) -> Result<T, DialError> {
    let weight = |error: &DialError| match error {
        DialError::Connect(error) => u8::from(error.kind() == io::ErrorKind::ConnectionRefused),
        _ => 2,
    };
    let mut failure: Option<DialError> = None;
    for (at, address) in rails.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let error = match ask(*address, Instant::now() + left / (rails.len() - at) as u32) {
            Err(error) => error,
            answer => return answer,
        };
        // The rail may have failed, at this end or the other one or between them.
        let may_be_rail = match &error {
            DialError::Connect(error) => !sys::is_resource_shortage(error) || error.kind() == io::ErrorKind::AddrNotAvailable,
            DialError::Io(error) => error.kind() == io::ErrorKind::TimedOut,
            DialError::Refused(_) => false,
        };
        if !may_be_rail {
            return Err(error);
        }
        failure = match failure {
            Some(before) if weight(&before) > weight(&error) => Some(before),
            _ => Some(error),
        };
    }
    Err(failure.unwrap_or_else(|| DialError::Connect(io::ErrorKind::AddrNotAvailable.into())))
}

impl ControlChannel for NetworkControl {
    fn lost(&self) -> Vec<(Rank, Cause)> {
        self.network.board.lost(self.network.rank, &self.members)
    }

    fn is_stopped(&self, peer: Rank) -> bool {
        self.visible_process(peer).is_some_and(sys::is_stopped)
    }

    fn has_ended(&self, peer: Rank) -> bool {
        self.visible_process(peer).is_some_and(sys::has_ended)
    }

    fn ask(&self, peer: Rank, query: &Query, patience: Duration) -> Result<Reply, QueryError> {
        if self.has_ended(peer) {
            return Err(QueryError::Died);
        }
        let to = self.members[peer];
        if let Some(address) = self.network.unreachable(to) {
            return Err(QueryError::Unreachable { address, kind: io::ErrorKind::AddrNotAvailable });
        }
        let query = query.encode();
        let deadline = Instant::now() + patience;
        let send = || self.send(to, &query, deadline);
        let is_own = |result: &Result<_, DialError>| matches!(result, Err(DialError::Connect(error) | DialError::Io(error)) if sys::is_resource_shortage(error));
        let mut sent = send();
        if is_own(&sent) {
            sent = self.network.reserve.without(deadline, send).unwrap_or(sent);
        }
        match sent {
            sent if is_own(&sent) => Err(QueryError::Unasked),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, HostUnreachable, TimedOut};

    #[test]
    fn a_peer_is_gone_only_if_no_rail_reaches_it() {
        let connect = |kind: io::ErrorKind| Err(DialError::Connect(kind.into()));
        let silent = |kind: io::ErrorKind| Err(DialError::Io(kind.into()));
        let told = |answers: Vec<Result<u8, DialError>>| {
            let rails: Vec<SocketAddr> = (1..=answers.len() as u16).map(|port| ([10, 0, 0, 1], port).into()).collect();
            let mut answers = answers.into_iter();
            let answer = ask_over_rails(&rails, Instant::now(), |_, _| answers.next().unwrap());
            let what = match answer {
                Ok(answer) => answer.to_string(),
                Err(DialError::Connect(error)) => format!("connect {}", error.kind()),
                Err(DialError::Io(error)) => format!("io {}", error.kind()),
                Err(DialError::Refused(_)) => "refused".to_owned(),
            };
            (what, answers.count())
        };
        let expected = |what: &str, left| (what.to_owned(), left);
        for other in [connect(ConnectionRefused), connect(HostUnreachable), silent(TimedOut)] {
            assert_eq!(told(vec![other, Ok(7), Ok(8)]), expected("7", 1));
        }
        let refused = format!("connect {ConnectionRefused}");
        assert_eq!(told(vec![connect(ConnectionRefused), connect(HostUnreachable)]), expected(&refused, 0));
        assert_eq!(told(vec![connect(HostUnreachable), connect(ConnectionRefused)]), expected(&refused, 0));
        let mute = format!("io {TimedOut}");
        assert_eq!(told(vec![silent(TimedOut), connect(ConnectionRefused)]), expected(&mute, 0));
        // The peer ended while it was asked.
        assert_eq!(told(vec![silent(BrokenPipe), Ok(7)]), expected(&format!("io {BrokenPipe}"), 1));
        assert_eq!(told(vec![connect(HostUnreachable)]), expected(&format!("connect {HostUnreachable}"), 0));
    }
}
