//! What a rank tells the others of itself, and what rank 0 makes of it: the table of all ranks, or the reason why
//! there is none.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::bootstrap::listener::handshake::VERSION;
use crate::config::{CopyMode, DevicePath, SharedSettings, Transport};
use crate::error::{Error, StoreProblem};
use crate::schedule::Algorithm;
use crate::schedule::select::{CostModel, LinkCost};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// What a rank tells of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) version: u32,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// Random: tells this process from an earlier one with the same rank.
    pub(crate) instance: u64,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// The namespace in which `pid` means something; 0 if unknown.
    pub(crate) pid_namespace: u64,
    /// Ranks with equal ones may be able to share memory. Empty if this one surely cannot.
    pub(crate) machine: String,
    /// Where its listener is in the network, and on its host.
    pub(crate) address: SocketAddr,
    pub(crate) local_name: String,
    /// It takes only links that are encrypted.
    pub(crate) encrypts: bool,
}

impl PeerInfo {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.number(self.version.into()).number(self.rank as u64).number(self.world_size as u64).number(self.instance);
        writer.text(&self.host).number(self.pid.into()).number(self.pid_namespace).text(&self.machine);
        writer.text(&self.address.ip().to_string()).number(self.address.port().into()).text(&self.local_name);
        writer.number(self.encrypts.into());
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<PeerInfo> {
        PeerInfo::read(&mut Reader::new(bytes))
    }

    fn read(reader: &mut Reader<'_>) -> Option<PeerInfo> {
        Some(PeerInfo {
            version: reader.number()?.try_into().ok()?,
            rank: reader.size()?,
            world_size: reader.size()?,
            instance: reader.number()?,
            host: reader.text()?,
            pid: reader.number()?.try_into().ok()?,
            pid_namespace: reader.number()?,
            machine: reader.text()?,
            address: SocketAddr::new(reader.text()?.parse::<IpAddr>().ok()?, reader.number()?.try_into().ok()?),
            local_name: reader.text()?,
            encrypts: reader.number()? != 0,
        })
    }

    /// The process, for people.
    pub(crate) fn who(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }

    /// The machine, and the network of it; `None` if that is not known.
    fn machine(&self) -> Option<&str> {
        // What the rank declared follows.
        self.machine.rsplit_once(' ').map(|(machine, _)| machine)
    }

    /// The other's process, if this one can see it, whatever hosts were declared.
    pub(crate) fn sees(&self, other: &PeerInfo) -> Option<u32> {
        let is_same_machine = self.machine().is_some() && self.machine() == other.machine();
        let is_seen = self.pid_namespace != 0 && self.pid_namespace == other.pid_namespace;
        (is_same_machine && is_seen).then_some(other.pid)
    }

    /// What keeps this rank from joining the other, if anything does.
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

/// What rank 0 publishes when the information of all ranks is there, or when it will not be.
#[derive(Clone, Debug)]
pub(crate) enum PeerTable {
    Members { peers: Vec<PeerInfo>, settings: SharedSettings },
    Refused(Refusal),
}

/// Why rank 0 refuses to start, for all ranks to report alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Missing {
        ranks: Vec<Rank>,
        world_size: usize,
        waited: Duration,
    },
    /// The information that does not agree with rank 0's, and rank 0's.
    Disagrees {
        other: Box<PeerInfo>,
        zero: Box<PeerInfo>,
    },
    /// A value in the store is not of the rank that it should be of.
    Forged {
        key: String,
    },
}

impl Refusal {
    pub(crate) fn error(&self, store: &str) -> Error {
        match self {
            Refusal::Missing { ranks, world_size, waited } => {
                Error::Missing { ranks: ranks.clone(), world_size: *world_size, store: store.to_owned(), waited: *waited }
            }
            Refusal::Forged { key } => StoreProblem::Forged { key: key.clone() }.at(store),
            Refusal::Disagrees { other, zero } => zero.disagreement(other).unwrap_or_else(|| Error::Store {
                store: store.to_owned(),
                problem: StoreProblem::Foreign("it holds a refusal without a reason".to_owned()),
            }),
        }
    }
}

const MEMBERS: u64 = 0;
const MISSING: u64 = 1;
const DISAGREES: u64 = 2;
const FORGED: u64 = 3;
const NO_ALGORITHM: u64 = u64::MAX;

impl PeerTable {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            PeerTable::Members { peers, settings } => {
                writer.number(MEMBERS).list(peers, |writer, peer| _ = writer.bytes(&peer.encode()));
                let SharedSettings { algorithm, transport, copy_mode, reproducible, sockets, devices, device_path, model } =
                    settings;
                writer.number(algorithm.map_or(NO_ALGORITHM, |algorithm| algorithm as u64));
                writer
                    .number(*transport as u64)
                    .number(*copy_mode as u64)
                    .number((*reproducible).into())
                    .number((*sockets).into());
                writer.number((*devices).into()).number(*device_path as u64);
                for price in prices(model) {
                    writer.number(price.to_bits());
                }
            }
            PeerTable::Refused(Refusal::Missing { ranks, world_size, waited }) => {
                writer.number(MISSING).list(ranks, |writer, &rank| _ = writer.number(rank as u64));
                writer.number(*world_size as u64).number(waited.as_millis() as u64);
            }
            PeerTable::Refused(Refusal::Forged { key }) => _ = writer.number(FORGED).text(key),
            PeerTable::Refused(Refusal::Disagrees { other, zero }) => {
                writer.number(DISAGREES).bytes(&other.encode()).bytes(&zero.encode());
            }
        }
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<PeerTable> {
        let mut reader = Reader::new(bytes);
        Some(match reader.number()? {
            MEMBERS => {
                let peers = reader.list(|reader| PeerInfo::decode(reader.bytes()?))?;
                let algorithm = match reader.number()? {
                    NO_ALGORITHM => None,
                    number => Some(Algorithm::from_number(number.try_into().ok()?)?),
                };
                let transport = Transport::from_number(reader.number()?.try_into().ok()?)?;
                let copy_mode = CopyMode::from_number(reader.number()?.try_into().ok()?)?;
                let reproducible = reader.number()? != 0;
                let sockets = crate::config::sockets(reader.size()?)?;
                let devices = reader.number()? != 0;
                let device_path = DevicePath::from_number(reader.number()?.try_into().ok()?)?;
                let mut price = || reader.number().map(f64::from_bits);
                let mut link = || Some(LinkCost { latency: price()?, overhead: price()?, per_byte: price()? });
                let (network, local) = (link()?, link()?);
                let model = CostModel { network, local, reduce: price()?, window_sync: price()?, window_per_byte: price()? };
                let settings =
                    SharedSettings { algorithm, transport, copy_mode, reproducible, sockets, devices, device_path, model };
                PeerTable::Members { peers, settings }
            }
            MISSING => PeerTable::Refused(Refusal::Missing {
                ranks: reader.list(Reader::size)?,
                world_size: reader.size()?,
                waited: Duration::from_millis(reader.number()?),
            }),
            DISAGREES => PeerTable::Refused(Refusal::Disagrees {
                other: Box::new(PeerInfo::decode(reader.bytes()?)?),
                zero: Box::new(PeerInfo::decode(reader.bytes()?)?),
            }),
            FORGED => PeerTable::Refused(Refusal::Forged { key: reader.text()? }),
            _ => return None,
        })
    }
}

/// All numbers of a model, in the order in which `decode` reads them.
fn prices(model: &CostModel) -> [f64; 9] {
    let CostModel { network, local, reduce, window_sync, window_per_byte } = *model;
    let [network, local] = [network, local].map(|LinkCost { latency, overhead, per_byte }| [latency, overhead, per_byte]);
    [network[0], network[1], network[2], local[0], local[1], local[2], reduce, window_sync, window_per_byte]
}

/// The protocol version that a [`PeerInfo`] carries.
pub(crate) fn version() -> u32 {
    VERSION.into()
}

/// Whatever a store holds where a peer info or the table should be.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(peer) = PeerInfo::decode(bytes) {
        assert_eq!(PeerInfo::decode(&peer.encode()), Some(peer), "a peer is read as another");
    }
    match PeerTable::decode(bytes) {
        Some(PeerTable::Refused(refusal)) => _ = refusal.error("file:///store").to_string(),
        Some(table @ PeerTable::Members { .. }) => assert!(PeerTable::decode(&table.encode()).is_some()),
        None => {}
    }
}

/// A peer info, and tables of every kind.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let peer = PeerInfo {
        version: version(),
        rank: 1,
        world_size: 2,
        instance: 99,
        host: "node7".to_owned(),
        pid: 4121,
        pid_namespace: 7,
        machine: "here".to_owned(),
        address: SocketAddr::from(([10, 0, 0, 2], 4000)),
        local_name: "kolo-x".to_owned(),
        encrypts: true,
    };
    let settings = crate::config::Settings::default().shared;
    let books = [
        PeerTable::Members { peers: vec![peer.clone(), peer.clone()], settings },
        PeerTable::Refused(Refusal::Missing { ranks: vec![1, 5], world_size: 8, waited: Duration::from_secs(30) }),
        PeerTable::Refused(Refusal::Disagrees { other: Box::new(peer.clone()), zero: Box::new(peer.clone()) }),
    ];
    books.iter().map(PeerTable::encode).chain([peer.encode()]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Settings;

    fn peer(rank: Rank) -> PeerInfo {
        PeerInfo {
            version: 1,
            rank,
            world_size: 2,
            instance: 99,
            host: "node7".to_owned(),
            pid: 4121,
            pid_namespace: 7,
            machine: "here".to_owned(),
            address: "[fd00::2]:4000".parse().unwrap(),
            local_name: "kolo-x".to_owned(),
            encrypts: false,
        }
    }

    #[test]
    fn books_survive_the_store() {
        let mut settings = Settings::default().shared;
        settings.algorithm = Some(Algorithm::DoubleTree);
        settings.devices = true;
        settings.device_path = DevicePath::Staged;
        settings.model.local.per_byte = 0.125;
        let members = PeerTable::Members { peers: vec![peer(0), peer(1)], settings };
        match PeerTable::decode(&members.encode()) {
            Some(PeerTable::Members { peers, settings: read }) => assert_eq!((peers, read), (vec![peer(0), peer(1)], settings)),
            other => panic!("{other:?}"),
        }
        for refusal in [
            Refusal::Missing { ranks: vec![1, 5], world_size: 8, waited: Duration::from_secs(30) },
            Refusal::Forged { key: "run/rank/1".to_owned() },
            Refusal::Disagrees { other: Box::new(PeerInfo { world_size: 3, ..peer(1) }), zero: Box::new(peer(0)) },
        ] {
            match PeerTable::decode(&PeerTable::Refused(refusal.clone()).encode()) {
                Some(PeerTable::Refused(read)) => assert_eq!(read, refusal),
                other => panic!("{other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn damaged_books_do_no_harm(at in 0usize..400, bits: u8, cut in 0usize..400) {
            let mut bytes = PeerTable::Members { peers: vec![peer(0), peer(1)], settings: Settings::default().shared }.encode();
            let at = at % bytes.len();
            bytes[at] ^= bits;
            bytes.truncate(cut);
            let _ = PeerTable::decode(&bytes);
        }
    }
}
