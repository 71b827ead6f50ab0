//! Opens the connections of a link over several rails. Each rail is a pair of network interfaces, one
//! of each host.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mio::{Registry, Token};

use super::process::{Network, no_connection};
use crate::error::Cause;
use crate::network::address::{self, is_within};
use crate::network::identity::Identity;
use crate::network::listener::{Connector, Stream, Target};
use crate::sys::TcpStream;
use crate::timeouts::OTHER_RAILS;
use crate::transport::NoLink;
use crate::types::Rank;

/// The most connections of one link.
const MOST_LANES: usize = 64;

/// Returns the ends of each connection of a link to a rank of the job: each rail has as many
/// connections as a link without rails.
pub(super) fn targets(network: &Network, to: Rank) -> Vec<Target> {
    let [own, theirs] = network.peers[network.rank].rails_between(&network.peers[to]);
    let own: Vec<IpAddr> = own.iter().map(|address| address.ip()).collect();
    let pairs = pairs(&own, &address::networks(), &theirs);
    let each = usize::from(network.links.sockets.unwrap_or(1)).min(MOST_LANES / pairs.len().max(1));
    (0..each).flat_map(|_| pairs.iter()).map(|&(from, to)| Target::Rail { from, to }).collect()
}

/// Pairs the rails of two ranks: those in one network, as far as there are such, and the others by
/// their order. Each rail is in one pair at most.
fn pairs(own: &[IpAddr], networks: &[(IpAddr, u32)], theirs: &[SocketAddr]) -> Vec<(IpAddr, SocketAddr)> {
    let mut left: Vec<SocketAddr> = theirs.to_vec();
    let mut found: Vec<Option<SocketAddr>> = own
        .iter()
        .map(|own| {
            let (_, bits) = networks.iter().find(|(ip, _)| ip == own)?;
            let at = left.iter().position(|their| is_within(their.ip(), *own, *bits))?;
            Some(left.remove(at))
        })
        .collect();
    for (own, found) in own.iter().zip(&mut found) {
        let alike = left.iter().position(|their| their.is_ipv4() == own.is_ipv4());
        if let (None, Some(at)) = (&found, alike) {
            *found = Some(left.remove(at));
        }
    }
    own.iter().zip(found).filter_map(|(own, found)| Some((*own, found?))).collect()
}

/// Returns what links to a rank are made of, and with rails their ends.
pub(crate) fn kind_of_links(network: &Network, to: Rank) -> String {
    let kind = network.links.kind();
    if network.has_rails(to) { format!("{kind} on {}", ends(&targets(network, to))) } else { kind }
}

/// Returns both addresses of each rail, without the ports.
fn ends(targets: &[Target]) -> String {
    let mut rails: Vec<String> = Vec::new();
    for target in targets {
        let Target::Rail { from, to } = target else { continue };
        let rail = format!("{from}-{}", to.ip());
        if !rails.contains(&rail) {
            rails.push(rail);
        }
    }
    rails.join(" and ")
}

/// The connections of a link that this rank is opening.
pub(super) struct RailOpening {
    peer: Rank,
    lanes: Vec<Lane>,
    /// When the first of them was there.
    first: Option<Instant>,
}

enum Lane {
    Connecting(Box<Connector>),
    Open(TcpStream),
    Failed(Target, NoLink),
}

impl RailOpening {
    pub(super) fn new(peer: Rank, connectors: impl Iterator<Item = Connector>) -> RailOpening {
        RailOpening { peer, lanes: connectors.map(|connector| Lane::Connecting(Box::new(connector))).collect(), first: None }
    }

    /// Advances as far as possible without waiting. Returns the connections once all are there, or
    /// once the others have had their time.
    ///
    /// # Errors
    ///
    /// Why the first connection failed, if all have failed. If it did not reach the peer, the error
    /// names the ends of all.
    pub(super) fn advance(
        &mut self,
        identity: &Identity,
        registry: &Registry,
        token: Token,
    ) -> Result<Option<Vec<TcpStream>>, NoLink> {
        for lane in &mut self.lanes {
            let Lane::Connecting(connector) = lane else { continue };
            match connector.advance(identity, registry, token) {
                Ok(None) => {}
                Ok(Some(Stream::Tcp(stream))) => {
                    self.first.get_or_insert_with(Instant::now);
                    *lane = Lane::Open(stream);
                }
                Ok(Some(Stream::Local(_))) => unreachable!("a rail is in the network"),
                Err(error) => {
                    crate::log::warn!(peer = self.peer, rail = %connector.target(), ?error, "cannot connect to a rank over a rail");
                    let target = connector.target().clone();
                    let why = no_connection(&target, error);
                    *lane = Lane::Failed(target, why);
                }
            }
        }
        let connecting = || {
            self.lanes.iter().filter_map(|lane| match lane {
                Lane::Connecting(connector) => Some(connector),
                _ => None,
            })
        };
        let is_over = connecting().next().is_none() || self.first.is_some_and(|first| first.elapsed() >= OTHER_RAILS);
        if !is_over {
            return Ok(None);
        }
        for connector in connecting() {
            crate::log::warn!(peer = self.peer, rail = %connector.target(), "a rail to a rank does not connect; its link opens without it");
        }
        let mut streams = Vec::with_capacity(self.lanes.len());
        let mut failures = Vec::new();
        for lane in self.lanes.drain(..) {
            match lane {
                Lane::Open(stream) => streams.push(stream),
                Lane::Failed(target, why) => failures.push((target.to_string(), why)),
                Lane::Connecting(_) => {}
            }
        }
        match failure_of_all(failures) {
            Some(why) if streams.is_empty() => Err(why),
            _ => Ok(Some(streams)),
        }
    }

    /// Returns how long until [`RailOpening::advance`] has something to do even if nothing wakes the
    /// token.
    pub(super) fn left(&self) -> Option<Duration> {
        let connectors = self.lanes.iter().filter_map(|lane| match lane {
            Lane::Connecting(connector) => connector.left(),
            _ => None,
        });
        connectors.chain(self.first.map(|first| OTHER_RAILS.saturating_sub(first.elapsed()))).min()
    }
}

/// Returns why the first of some connections failed; if it did not reach the peer, with the ends of all.
fn failure_of_all(failures: Vec<(String, NoLink)>) -> Option<NoLink> {
    let ends = failures.iter().map(|(end, _)| end.as_str()).collect::<Vec<_>>().join(", ");
    let (_, first) = failures.into_iter().next()?;
    Some(match first {
        NoLink::Peer(Cause::Unreachable { kind, .. }) => Cause::Unreachable { address: ends, kind }.into(),
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_costs_of_rails_are_those_of_their_ends() {
        let rail = |from: &str, to: &str| Target::Rail { from: from.parse().unwrap(), to: to.parse().unwrap() };
        let (first, second) = (rail("10.0.1.1", "10.0.1.2:7"), rail("10.0.2.1", "10.0.2.2:7"));
        let again = rail("10.0.1.1", "10.0.1.2:7");
        assert_eq!(ends(&[first, second, again]), "10.0.1.1-10.0.1.2 and 10.0.2.1-10.0.2.2");
    }

    #[test]
    fn the_error_names_all_rails() {
        let failure = |end: &str| {
            let cause = Cause::Unreachable { address: end.to_owned(), kind: std::io::ErrorKind::HostUnreachable };
            (end.to_owned(), cause.into())
        };
        let Some(NoLink::Peer(cause)) = failure_of_all(vec![failure("10.0.1.9:7"), failure("10.0.2.9:7")]) else {
            panic!("the peer is the cause")
        };
        assert!(cause.to_string().contains("10.0.1.9:7, 10.0.2.9:7"), "{cause}");
        assert!(failure_of_all(Vec::new()).is_none());
    }

    #[test]
    fn rails_of_one_network_are_paired() {
        let own: Vec<IpAddr> = ["10.0.1.1", "10.0.2.1", "192.168.7.1"].map(|ip| ip.parse().unwrap()).to_vec();
        let networks: Vec<(IpAddr, u32)> = own.iter().map(|&ip| (ip, 24)).collect();
        let pair = |theirs: &[&str]| {
            let theirs: Vec<SocketAddr> = theirs.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 7)).collect();
            let pairs = pairs(&own, &networks, &theirs);
            pairs.iter().map(|(own, their)| format!("{own} {}", their.ip())).collect::<Vec<_>>()
        };
        // In another order, and one without a network in common.
        assert_eq!(
            pair(&["10.0.2.9", "172.16.0.9", "10.0.1.9"]),
            ["10.0.1.1 10.0.1.9", "10.0.2.1 10.0.2.9", "192.168.7.1 172.16.0.9"]
        );
        assert_eq!(pair(&["10.0.2.9"]), ["10.0.2.1 10.0.2.9"]);
        assert_eq!(pair(&["172.16.0.9", "172.16.1.9"]), ["10.0.1.1 172.16.0.9", "10.0.2.1 172.16.1.9"]);
        // No packet goes from one family of addresses to the other.
        assert_eq!(pair(&["fd00::9", "10.0.1.9"]), ["10.0.1.1 10.0.1.9"]);
        assert_eq!(pair(&["10.0.1.8", "10.0.1.9"]), ["10.0.1.1 10.0.1.8", "10.0.2.1 10.0.1.9"]);
    }
}
