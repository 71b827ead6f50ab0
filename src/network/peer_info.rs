//! What a rank publishes about itself.

use std::net::{IpAddr, SocketAddr};

use crate::config::topology_path;
use crate::error::Error;
use crate::network::listener::handshake::VERSION;
use crate::sys::Process;
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// The most rails of a rank.
pub(crate) const MOST_RAILS: usize = 8;

/// The address and identity of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) version: u32,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// A random number that distinguishes this process from an earlier one with the same rank.
    pub(crate) instance: u64,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// When the process was created; see [`Process`].
    pub(crate) created: u64,
    /// The namespace of `pid`; 0 if unknown.
    pub(crate) pid_namespace: u64,
    /// Ranks with equal machines may be able to share memory. Empty if this rank cannot share any.
    pub(crate) machine: String,
    /// The addresses of its listener in the network and on its host.
    pub(crate) address: SocketAddr,
    pub(crate) local_name: String,
    /// The addresses of its listener on the other interfaces that links may use.
    pub(crate) more_rails: Vec<SocketAddr>,
    /// The rank accepts only encrypted links.
    pub(crate) encrypts: bool,
    /// The path of its host in the network. Empty if unknown.
    pub(crate) topology: String,
    /// Its kolo was built with the feature `cuda`: it can take part in operations of which a rank has
    /// buffers on a device.
    pub(crate) has_cuda: bool,
}

impl PeerInfo {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.number(self.version.into()).number(self.rank as u64).number(self.world_size as u64).number(self.instance);
        writer.text(&self.host).number(self.pid.into()).number(self.created).number(self.pid_namespace);
        writer.text(&self.machine);
        write_address(&mut writer, &self.address);
        writer.text(&self.local_name).number(self.encrypts.into()).text(&self.topology);
        writer.list(&self.more_rails, write_address).number(self.has_cuda.into());
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<PeerInfo> {
        PeerInfo::read(&mut Reader::new(bytes))
    }

    fn read(reader: &mut Reader<'_>) -> Option<PeerInfo> {
        let info = PeerInfo::read_fields(reader)?;
        let is_possible = |rail: &SocketAddr| is_rail(rail, &info.address);
        (info.more_rails.len() < MOST_RAILS && info.more_rails.iter().all(is_possible)).then_some(info)
    }

    fn read_fields(reader: &mut Reader<'_>) -> Option<PeerInfo> {
        let version = reader.number()?.try_into().ok()?;
        let is_ours = version == self::version();
        Some(PeerInfo {
            version,
            rank: reader.size()?,
            world_size: reader.size()?,
            instance: reader.number()?,
            host: reader.text()?,
            pid: reader.number()?.try_into().ok()?,
            created: reader.number()?,
            pid_namespace: reader.number()?,
            machine: reader.text()?,
            address: read_address(reader)?,
            local_name: reader.text()?,
            encrypts: reader.number()? != 0,
            // Other versions may have none of these. They are refused for their version.
            topology: match is_ours {
                true => Some(reader.text()?).filter(|path| path.is_empty() || topology_path(path).is_some())?,
                false => String::new(),
            },
            more_rails: match is_ours {
                true => reader.list(read_address)?,
                false => Vec::new(),
            },
            has_cuda: is_ours && reader.number()? != 0,
        })
    }

    /// Returns the addresses of its listener in the network: one for each rail.
    pub(crate) fn rails(&self) -> impl Iterator<Item = SocketAddr> {
        std::iter::once(self.address).chain(self.more_rails.iter().copied())
    }

    /// Returns the rails that may connect two ranks, at each end. Both ranks find the same. An address
    /// that both have, as bridges inside a host often are, leads from neither to the other.
    pub(crate) fn rails_between(&self, other: &PeerInfo) -> [Vec<SocketAddr>; 2] {
        let of = |one: &PeerInfo, other: &PeerInfo| {
            one.rails().filter(|rail| other.rails().all(|theirs| theirs.ip() != rail.ip())).collect()
        };
        [of(self, other), of(other, self)]
    }

    /// Returns whether links between two ranks use several rails: both ranks have some, and one of each
    /// in the same family of addresses. Both ranks find the same.
    pub(crate) fn has_rails_to(&self, other: &PeerInfo) -> bool {
        let [own, theirs] = self.rails_between(other);
        let is_alike = |own: &SocketAddr| theirs.iter().any(|their| their.is_ipv4() == own.is_ipv4());
        self.rails().count().min(other.rails().count()) > 1 && own.iter().any(is_alike)
    }

    /// Returns the process, for messages.
    pub(crate) fn process(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }

    /// Returns the machine and its network namespace, without the declared host; `None` if unknown.
    pub(crate) fn machine(&self) -> Option<&str> {
        // The host that the user declared comes last.
        self.machine.rsplit_once(' ').map(|(machine, _)| machine)
    }

    /// Returns whether the other rank advertises only a loopback address, on another host.
    pub(crate) fn cannot_reach(&self, other: &PeerInfo) -> bool {
        other.is_hidden_from(self.machine()) && !self.has_rails_to(other)
    }

    /// Returns whether this rank's first address is loopback, on another host than a process on `machine`.
    /// Where the system does not tell hosts apart, both are on one.
    pub(crate) fn is_hidden_from(&self, machine: Option<&str>) -> bool {
        let (Some(mine), Some(theirs)) = (self.machine().and_then(host_of), machine.and_then(host_of)) else { return false };
        mine != theirs && self.address.ip().is_loopback()
    }

    /// Returns the other rank's process, if this one can see it. The declared hosts do not matter.
    pub(crate) fn sees(&self, other: &PeerInfo) -> Option<Process> {
        let is_same_machine = self.machine().is_some() && self.machine() == other.machine();
        let is_seen = self.pid_namespace != 0 && self.pid_namespace == other.pid_namespace;
        (is_same_machine && is_seen).then_some(Process { id: other.pid, created: other.created })
    }

    /// Returns why the two ranks cannot be in one job, if they cannot.
    pub(crate) fn disagreement(&self, other: &PeerInfo) -> Option<Error> {
        if other.version != self.version {
            let (theirs, mine) = (other.version, self.version);
            return Some(Error::Version { rank: other.rank, host: other.host.clone(), theirs, mine });
        }
        if other.world_size != self.world_size {
            return Some(Error::WorldSize {
                rank: other.rank,
                host: other.host.clone(),
                theirs: other.world_size,
                my_rank: self.rank,
                mine: self.world_size,
            });
        }
        (other.encrypts != self.encrypts).then(|| {
            let (with, without) = if self.encrypts { (self, other) } else { (other, self) };
            let why = format!(
                "rank {} ({}) has certificates and rank {} ({}) has none; give them to all ranks, or to none",
                with.rank, with.host, without.rank, without.host
            );
            Error::Unsupported { what: "TLS", why }
        })
    }
}

/// Returns the running kernel and the network namespace of a machine, as Linux tells them.
fn host_of(machine: &str) -> Option<[&str; 2]> {
    let mut words = machine.split(' ');
    Some([words.next()?, words.next().filter(|network| network.starts_with("net:["))?])
}

fn write_address(writer: &mut Writer, address: &SocketAddr) {
    writer.text(&address.ip().to_string()).number(address.port().into());
}

fn read_address(reader: &mut Reader<'_>) -> Option<SocketAddr> {
    Some(SocketAddr::new(reader.text()?.parse::<IpAddr>().ok()?, reader.number()?.try_into().ok()?))
}

/// Returns whether a rank can listen at an address on another interface than that of `first`.
fn is_rail(rail: &SocketAddr, first: &SocketAddr) -> bool {
    let ip = rail.ip();
    let is_of_others = !ip.is_unspecified() && !ip.is_multicast() && (!ip.is_loopback() || first.ip().is_loopback());
    rail.port() != 0 && is_of_others
}

/// Returns the protocol version that a [`PeerInfo`] carries.
pub(crate) fn version() -> u32 {
    VERSION.into()
}

/// Returns a peer info for tests.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample(rank: Rank) -> PeerInfo {
    PeerInfo {
        version: version(),
        rank,
        world_size: 2,
        instance: 99,
        host: "node7".to_owned(),
        pid: 4121,
        created: 0,
        pid_namespace: 7,
        machine: "here".to_owned(),
        address: "[fd00::2]:4000".parse().expect("an address"),
        local_name: "kolo-x".to_owned(),
        more_rails: vec!["[fd00:1::2]:4001".parse().expect("an address")],
        encrypts: true,
        topology: "pod1/rack7".to_owned(),
        has_cuda: rank.is_multiple_of(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_on_another_host_is_not_reached_on_loopback() {
        let at = |machine: &str, ip: &str, rails: &[&str]| {
            let address = |ip: &&str| format!("{ip}:4000").parse().unwrap();
            PeerInfo {
                machine: machine.to_owned(),
                address: address(&ip),
                more_rails: rails.iter().map(address).collect(),
                ..sample(1)
            }
        };
        let mine = at("boot1 net:[1] declared", "10.0.0.1", &[]);
        for (other, expected) in [
            (at("boot1 net:[1] other", "127.0.0.1", &[]), false),
            (at("boot1 net:[1] /folder other", "127.0.0.1", &[]), false),
            (at("boot2 net:[1] other", "10.0.0.2", &[]), false),
            (at("boot2 net:[1] other", "127.0.0.1", &[]), true),
            (at("boot1 net:[2] other", "127.0.0.1", &[]), true),
            // A machine that is unknown, and those of macOS and Windows.
            (at("", "127.0.0.1", &[]), false),
            (at("boot2 /Users/one other", "127.0.0.1", &[]), false),
            (at("boot2 1 S-1-5 other", "127.0.0.1", &[]), false),
        ] {
            assert_eq!(mine.cannot_reach(&other), expected, "{other:?}");
        }
        let with_rails = at("boot1 net:[1] declared", "127.0.0.1", &["10.0.0.1"]);
        assert!(!with_rails.cannot_reach(&at("boot2 net:[1] other", "127.0.0.1", &["10.0.0.2"])));
    }

    #[test]
    fn a_path_that_is_none_is_refused() {
        let with = |topology: &str| PeerInfo::decode(&PeerInfo { topology: topology.to_owned(), ..sample(1) }.encode());
        for path in ["", "rack7", "pod1/rack7", "\u{e9}/\u{fc}"] {
            assert_eq!(with(path).map(|peer| peer.topology), Some(path.to_owned()));
        }
        for path in ["/", "a//b", "a b", "a\n", "1/2/3/4/5/6/7/8/9", &"x".repeat(256)] {
            assert_eq!(with(path), None, "{path}");
        }
    }

    #[test]
    fn a_rail_that_no_rank_listens_at_is_refused() {
        let with = |address: &str, rail: &str| {
            let (address, more_rails) = (address.parse().unwrap(), vec![rail.parse().unwrap()]);
            PeerInfo::decode(&PeerInfo { address, more_rails, ..sample(1) }.encode()).is_some()
        };
        for rail in ["10.0.2.1:7", "[fd00::1]:7"] {
            assert!(with("10.0.1.1:7", rail), "{rail}");
        }
        for rail in ["10.0.2.1:0", "0.0.0.0:7", "[::]:7", "224.0.0.1:7", "[ff02::1]:7", "127.0.0.1:7", "[::1]:7"] {
            assert!(!with("10.0.1.1:7", rail), "{rail}");
        }
        assert!(with("127.0.0.1:7", "127.0.0.2:7"));
    }

    #[test]
    fn both_ranks_find_the_same_rails() {
        let rank = |rails: &[&str]| {
            let mut rails = rails.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 7));
            PeerInfo { address: rails.next().unwrap(), more_rails: rails.collect(), ..sample(1) }
        };
        for (one, other, expected) in [
            (&["10.0.1.1", "10.0.2.1"][..], &["10.0.1.2", "10.0.2.2"][..], true),
            (&["10.0.1.1"], &["10.0.1.2", "10.0.2.2"], false),
            // No common family.
            (&["10.0.1.1", "10.0.2.1"], &["fd00::1", "fd00:1::1"], false),
            (&["10.0.1.1", "fd00::2"], &["fd00::1", "fd00:1::1"], true),
            // The same bridge on both hosts.
            (&["172.17.0.1", "10.0.2.1"], &["172.17.0.1", "10.0.2.2"], true),
            (&["172.17.0.1", "10.0.2.1"], &["172.17.0.1", "fd00::1"], false),
        ] {
            let (one, other) = (rank(one), rank(other));
            assert_eq!([one.has_rails_to(&other), other.has_rails_to(&one)], [expected; 2], "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_peer_info_without_path_and_rails_is_of_another_version() {
        for version in [version(), version() - 1] {
            let mut bytes =
                PeerInfo { version, topology: String::new(), more_rails: Vec::new(), has_cuda: false, ..sample(1) }.encode();
            // The lengths of both, and whether it has CUDA.
            bytes.truncate(bytes.len() - 3 * size_of::<u64>());
            let expected = (version != self::version()).then(String::new);
            assert_eq!(PeerInfo::decode(&bytes).map(|peer| peer.topology), expected);
        }
    }
}
