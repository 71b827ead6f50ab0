//! The table of all ranks, which rank 0 publishes in the store.

use std::time::Duration;

use crate::config::SharedSettings;
use crate::error::{Cause, Error, StoreError};
use crate::network::peer_info::PeerInfo;
#[cfg(any(fuzzing, test))]
use crate::network::peer_info::sample;
use crate::types::{DType, Op, Rank};
use crate::wire::{Reader, Writer};

/// What rank 0 publishes: the peer infos of all ranks, or why the start failed.
#[derive(Clone, Debug)]
pub(crate) enum PeerTable {
    Members { peers: Vec<PeerInfo>, settings: SharedSettings },
    Refused(Refusal),
}

/// Why rank 0 refuses to start. All ranks report the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// These ranks have not come within this time.
    Missing { ranks: Vec<Rank>, world_size: usize, waited: Duration },
    /// A rank's peer info disagrees with rank 0's.
    Disagrees { other: Box<PeerInfo>, zero: Box<PeerInfo> },
    /// A value in the store was not written by the rank that it should be from.
    Forged { key: String },
    /// A rank cannot start.
    Failed(OwnFailure),
}

/// What a rank writes in place of its peer info if it cannot start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnFailure {
    pub(crate) rank: Rank,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Its error.
    pub(crate) why: String,
}

impl OwnFailure {
    /// A peer info begins with a smaller number.
    const MARK: u64 = u64::MAX;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.number(OwnFailure::MARK).number(self.rank as u64).text(&self.host).number(self.pid.into()).text(&self.why);
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<OwnFailure> {
        let mut reader = Reader::new(bytes);
        if reader.number()? != OwnFailure::MARK {
            return None;
        }
        let (rank, host) = (reader.size()?, reader.text()?);
        Some(OwnFailure { rank, host, pid: reader.number()?.try_into().ok()?, why: reader.text()? })
    }

    pub(crate) fn error(&self) -> Error {
        Error::Peer {
            rank: self.rank,
            host: self.host.as_str().into(),
            pid: self.pid,
            op: Op::Connect,
            seq: 0,
            dtype: DType::U8,
            count: 0,
            after: Duration::ZERO,
            cause: Cause::Failed(self.why.clone()),
        }
    }
}

impl Refusal {
    /// Returns the error that a rank reports.
    pub(crate) fn error(&self, store: &str) -> Error {
        match self {
            Refusal::Missing { ranks, world_size, waited } => {
                Error::Missing { ranks: ranks.clone(), world_size: *world_size, store: store.to_owned(), waited: *waited }
            }
            Refusal::Forged { key } => StoreError::Forged { key: key.clone() }.at(store),
            Refusal::Failed(failure) => failure.error(),
            Refusal::Disagrees { other, zero } => zero.disagreement(other).unwrap_or_else(|| Error::Store {
                store: store.to_owned(),
                problem: StoreError::Foreign("it holds a refusal without a reason".to_owned()),
            }),
        }
    }
}

const MEMBERS: u64 = 0;
const MISSING: u64 = 1;
const DISAGREES: u64 = 2;
const FORGED: u64 = 3;
const FAILED: u64 = 4;

impl PeerTable {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            PeerTable::Members { peers, settings } => {
                // Every rank reads this, so in all these bytes grow with the square of the ranks.
                writer.number(MEMBERS).alike(peers.iter().map(PeerInfo::encode));
                settings.write(&mut writer);
            }
            PeerTable::Refused(Refusal::Missing { ranks, world_size, waited }) => {
                writer.number(MISSING).list(ranks, |writer, &rank| _ = writer.number(rank as u64));
                writer.number(*world_size as u64).number(waited.as_millis() as u64);
            }
            PeerTable::Refused(Refusal::Forged { key }) => _ = writer.number(FORGED).text(key),
            PeerTable::Refused(Refusal::Failed(failure)) => _ = writer.number(FAILED).bytes(&failure.encode()),
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
                let peers = reader.alike(PeerInfo::decode)?;
                PeerTable::Members { peers, settings: SharedSettings::take(&mut reader)? }
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
            FAILED => PeerTable::Refused(Refusal::Failed(OwnFailure::decode(reader.bytes()?)?)),
            _ => return None,
        })
    }
}

/// Decodes what a store holds in place of a peer info or the table.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(peer) = PeerInfo::decode(bytes) {
        assert_eq!(PeerInfo::decode(&peer.encode()), Some(peer), "a peer info changes when it is encoded and decoded");
    }
    match PeerTable::decode(bytes) {
        Some(PeerTable::Refused(refusal)) => _ = refusal.error("file:///store").to_string(),
        Some(table @ PeerTable::Members { .. }) => assert!(PeerTable::decode(&table.encode()).is_some()),
        None => {}
    }
}

/// Returns a peer info, and tables of every kind.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let peer = sample(1);
    let settings = crate::config::Settings::default().shared;
    let tables = [
        PeerTable::Members { peers: vec![peer.clone(), peer.clone()], settings },
        PeerTable::Refused(Refusal::Missing { ranks: vec![1, 5], world_size: 8, waited: Duration::from_secs(30) }),
        PeerTable::Refused(Refusal::Disagrees { other: Box::new(peer.clone()), zero: Box::new(peer.clone()) }),
    ];
    tables.iter().map(PeerTable::encode).chain([peer.encode()]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Settings;
    use crate::schedule::select::CostModel;

    #[test]
    fn tables_survive_encoding() {
        let mut settings = Settings::default().shared;
        settings.sockets = Some(3);
        let members = PeerTable::Members { peers: vec![sample(0), sample(1)], settings };
        match PeerTable::decode(&members.encode()) {
            Some(PeerTable::Members { peers, settings: read }) => {
                assert_eq!((peers, read), (vec![sample(0), sample(1)], settings))
            }
            other => panic!("{other:?}"),
        }
        for refusal in [
            Refusal::Missing { ranks: vec![1, 5], world_size: 8, waited: Duration::from_secs(30) },
            Refusal::Forged { key: "run/rank/1".to_owned() },
            Refusal::Failed(OwnFailure { rank: 1, host: "node7".to_owned(), pid: 4121, why: "no descriptors".to_owned() }),
            Refusal::Disagrees { other: Box::new(PeerInfo { world_size: 3, ..sample(1) }), zero: Box::new(sample(0)) },
        ] {
            match PeerTable::decode(&PeerTable::Refused(refusal.clone()).encode()) {
                Some(PeerTable::Refused(read)) => assert_eq!(read, refusal),
                other => panic!("{other:?}"),
            }
        }
    }

    /// How many ranks a store can serve (docs/scale.md) follows from these bytes.
    #[test]
    fn a_large_table_takes_few_bytes_for_each_rank() {
        let random = |seed: usize| crate::types::mix(7, seed as u64);
        let bytes_of = |ranks: usize, per_host: usize| {
            let peer = |rank: usize| {
                let host = rank / per_host;
                let ip = [10, 0, (host / 250) as u8, (host % 250 + 1) as u8];
                PeerInfo {
                    world_size: ranks,
                    instance: random(rank),
                    host: format!("node{host:04}"),
                    pid: 40_000 + (random(rank) % 20_000) as u32,
                    created: 1_000_000 + random(host) % 100_000 + rank as u64 % 8,
                    machine: format!("{:016x}-{:016x} net:[4026531840] ", random(host), random(host + ranks)),
                    address: (ip, 32_768 + (random(rank) % 28_000) as u16).into(),
                    local_name: format!("kolo-{:016x}", random(rank)),
                    more_rails: Vec::new(),
                    topology: format!("rack{:03}", host / 32),
                    ..sample(rank)
                }
            };
            let table = PeerTable::Members { peers: (0..ranks).map(peer).collect(), settings: Settings::default().shared };
            let bytes = table.encode();
            match PeerTable::decode(&bytes) {
                Some(PeerTable::Members { peers, .. }) => assert_eq!(peers, (0..ranks).map(peer).collect::<Vec<_>>()),
                other => panic!("{other:?}"),
            }
            bytes.len() as f64 / ranks as f64
        };
        for (per_host, most) in [(8, 60.0), (1, 105.0)] {
            let bytes = bytes_of(1024, per_host);
            println!("1024 ranks, {per_host} on each host: {bytes:.0} bytes for each");
            assert!(bytes < most, "{bytes} bytes for each rank");
        }
    }

    #[test]
    fn a_table_with_costs_that_cannot_be_compared_is_refused() {
        for cost in [f64::NAN, f64::INFINITY, -1e-9] {
            for at in 0..12 {
                let mut settings = Settings::default().shared;
                let CostModel { network, uplink, local, reduce, window_sync, window_per_byte, .. } =
                    &mut settings.cost_model.model;
                let links = [network, uplink, local].map(|link| [&mut link.latency, &mut link.overhead, &mut link.per_byte]);
                *links.into_iter().flatten().chain([reduce, window_sync, window_per_byte]).nth(at).unwrap() = cost;
                let bytes = PeerTable::Members { peers: vec![sample(0)], settings }.encode();
                assert!(PeerTable::decode(&bytes).is_none(), "cost {at} is {cost}");
            }
        }
    }

    proptest! {
        #[test]
        fn damaged_tables_cause_no_panic(at in 0usize..400, bits: u8, cut in 0usize..400) {
            let mut bytes = PeerTable::Members { peers: vec![sample(0), sample(1)], settings: Settings::default().shared }.encode();
            let at = at % bytes.len();
            bytes[at] ^= bits;
            bytes.truncate(cut);
            let _ = PeerTable::decode(&bytes);
        }
    }
}
