//! What rank 0 does: it announces the run, collects the peer infos and publishes the table.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::join::ANOTHER_START;
use super::store_keys::{TABLE, key_share_of, peer_info_of, refusal_read_by, secret_for};
use crate::config::SharedSettings;
use crate::error::{Error, Result, StoreError};
use crate::network::identity::{Identity, random, random_secret};
use crate::network::peer_info::PeerInfo;
use crate::rendezvous::endpoint::Endpoint;
use crate::rendezvous::key_exchange::{Exchange, KeyPair, KeyShare};
use crate::rendezvous::peer_table::{OwnFailure, PeerTable, Refusal};
use crate::rendezvous::run_info::{self, RunInfo, Source};
use crate::rendezvous::signed::{SignedStore, in_run};
use crate::rendezvous::start::Start;
use crate::timeouts::{REASON_GRACE, RUN_INFO_CHECK};
use crate::types::Rank;

/// Returns rank 0's endpoint, the identity of the run, and the table that it has published.
pub(super) fn collect(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<(Endpoint, Identity, PeerTable)> {
    let keys = KeyPair::random();
    let (run_info, identity) = new_run(start, &keys);
    let endpoint = Endpoint::open(start, ip, &identity)?;
    let mine = endpoint.peer(start)?;
    let signed = SignedStore::new(start.store, &identity);
    let patience = start.left().max(RUN_INFO_CHECK);
    start.at_store(start.store.set(run_info::NAME, &run_info.encode(), patience))?;
    start.at_store(signed.claim(&peer_info_of(0), 0, &mine.encode(), patience))?;

    let mut peers: Vec<Option<PeerInfo>> = vec![None; start.world_size];
    peers[0] = Some(mine.clone());
    let is_agreed = matches!(run_info.secret, Source::Agreed { .. });
    let has_secret = vec![!is_agreed; start.world_size];
    let mut collector = Collector { start, identity: &identity, keys, signed: &signed, mine: &mine, peers, has_secret };
    let table = loop {
        let missing: Vec<Rank> = (0..start.world_size).filter(|&rank| collector.peers[rank].is_none()).collect();
        if missing.is_empty() {
            let peers: Vec<PeerInfo> = collector.peers.into_iter().flatten().collect();
            let settings =
                SharedSettings { devices: have_devices(start.settings.shared.devices, &peers), ..start.settings.shared };
            break PeerTable::Members { peers, settings };
        }
        if start.left().is_zero() {
            let waited = began.elapsed();
            break PeerTable::Refused(Refusal::Missing { ranks: missing, world_size: start.world_size, waited });
        }
        if let Some(failure) = start.absence(missing[0]) {
            break PeerTable::Refused(Refusal::Failed(failure));
        }
        if let Some(refusal) = collector.read_some(&missing)? {
            break PeerTable::Refused(refusal);
        }
        let current = start.at_store(start.store.get(run_info::NAME, Duration::ZERO))?;
        if let Some(other) = current.filter(|current| *current != run_info.encode()) {
            return Err(second_rank_0(start, &mine, &other)?);
        }
    };
    start.at_store(signed.set(TABLE, 0, &table.encode(), REASON_GRACE))?;
    if let PeerTable::Refused(refusal) = &table {
        wait_for_readers(start, &signed, refusal)?;
    }
    Ok((endpoint, identity, table))
}

/// Chooses the number of a new run, and how its ranks learn the secret.
fn new_run(start: &Start<'_>, keys: &KeyPair) -> (RunInfo, Identity) {
    let run = random();
    let given = start.identity.secret();
    let secret = given.unwrap_or_else(random_secret);
    let identity = start.identity.clone().of_run(run, secret);
    match (given, start.store.is_private()) {
        (Some(_), _) => (RunInfo::of_given(run_info::NAME, start.store, &identity), identity),
        (None, true) => (RunInfo { run, secret: Source::Shared { secret } }, identity),
        (None, false) => {
            crate::log::warn!(
                store = start.store.url(),
                "no secret was given, so the ranks agree on one through the store; a process that can write to the store can join \
                 the job; give all ranks a secret (KOLO_SECRET_FILE) to keep it out"
            );
            (RunInfo { run, secret: Source::Agreed { public: keys.public } }, identity.agreed())
        }
    }
}

/// What rank 0 has collected.
struct Collector<'a> {
    start: &'a Start<'a>,
    identity: &'a Identity,
    keys: KeyPair,
    signed: &'a SignedStore<'a>,
    mine: &'a PeerInfo,
    peers: Vec<Option<PeerInfo>>,
    /// The ranks that know the secret, as far as rank 0 is concerned.
    has_secret: Vec<bool>,
}

impl Collector<'_> {
    /// Waits for the first missing rank, and reads what the others have written, so that
    /// disagreements show at once. Once the first has come, reads only up to the next missing rank,
    /// which is then the first: so rank 0 reads each key about once, not in every round.
    ///
    /// Returns why this start is refused, if it is.
    fn read_some(&mut self, missing: &[Rank]) -> Result<Option<Refusal>> {
        let first = missing[0];
        let mut has_first_come = false;
        for &rank in missing {
            let patience = if rank == first { RUN_INFO_CHECK.min(self.start.left()) } else { Duration::ZERO };
            let had_secret = self.has_secret[rank];
            if !had_secret {
                self.has_secret[rank] = self.hand_out(rank, patience)?;
            }
            if let Some(refusal) = self.read_peer(rank, patience)? {
                return Ok(Some(refusal));
            }
            let has_come = self.peers[rank].is_some();
            has_first_come |= has_come && rank == first;
            // A rank that has just received the secret is about to write its peer info, and must
            // not delay the secret of the next one.
            if has_first_come && !has_come && had_secret == self.has_secret[rank] {
                break;
            }
        }
        Ok(None)
    }

    /// Reads a rank's peer info, if the rank knows the secret. Returns why this start is refused,
    /// if it is.
    fn read_peer(&mut self, rank: Rank, patience: Duration) -> Result<Option<Refusal>> {
        if !self.has_secret[rank] {
            return Ok(None);
        }
        let bytes = match self.signed.get(&peer_info_of(rank), rank, patience) {
            Err(StoreError::Forged { key }) => return Ok(Some(Refusal::Forged { key })),
            other => self.start.at_store(other)?,
        };
        if let Some(failure) = bytes.as_ref().and_then(|bytes| OwnFailure::decode(bytes)).filter(|failure| failure.rank == rank) {
            return Ok(Some(Refusal::Failed(failure)));
        }
        let peer = bytes.and_then(|bytes| PeerInfo::decode(&bytes)).filter(|peer| peer.rank == rank);
        if let Some(other) = peer.as_ref().filter(|peer| self.mine.disagreement(peer).is_some()) {
            return Ok(Some(Refusal::Disagrees { other: Box::new(other.clone()), zero: Box::new(self.mine.clone()) }));
        }
        self.peers[rank] = peer;
        Ok(None)
    }

    /// Gives the secret to a rank that has put its public key into the store. Returns whether the
    /// key was there.
    ///
    /// A value that is no public key counts as missing: no rank wrote it. The rank to which the key
    /// belongs overwrites the value when it joins the run.
    fn hand_out(&self, rank: Rank, patience: Duration) -> Result<bool> {
        let Collector { start, identity, keys, .. } = self;
        let (run, key) = (identity.run(), |name: String| in_run(&identity.run(), &name));
        let key_share = start.at_store(start.store.get(&key(key_share_of(rank)), patience))?;
        let Some(key_share) = key_share else { return Ok(false) };
        let wrapped = KeyShare::decode(&key_share).and_then(|key_share| {
            let exchange = Exchange { job: identity.job(), run, rank, publics: [keys.public, key_share.public] };
            exchange.wrap(keys, &identity.secret().unwrap_or_default())
        });
        let Some(wrapped) = wrapped else {
            // Wait as long as for a missing value.
            std::thread::sleep(patience);
            return Ok(false);
        };
        start.at_store(start.store.set(&key(secret_for(rank)), &wrapped, start.left().max(RUN_INFO_CHECK)))?;
        Ok(true)
    }
}

/// Waits until the ranks that have come have read a refusal: the store may end with this process.
fn wait_for_readers(start: &Start<'_>, signed: &SignedStore<'_>, refusal: &Refusal) -> Result<()> {
    let absent = match refusal {
        Refusal::Missing { ranks, .. } => &ranks[..],
        Refusal::Failed(failure) => std::slice::from_ref(&failure.rank),
        _ => &[],
    };
    let until = Instant::now() + REASON_GRACE;
    for rank in (1..start.world_size).filter(|rank| !absent.contains(rank)) {
        let patience = until.saturating_duration_since(Instant::now());
        // The value is not authenticated: it only ends the wait.
        start.at_store(start.store.get(&signed.name(&refusal_read_by(rank)), patience))?;
    }
    Ok(())
}

/// Returns the error for a run info that another process has made while this one collected
/// peer infos.
fn second_rank_0(start: &Start<'_>, mine: &PeerInfo, announced: &[u8]) -> Result<Error> {
    let forged = || StoreError::Forged { key: run_info::NAME.to_owned() }.at(start.store.url());
    let Some(run_info) = RunInfo::decode(announced) else { return Ok(forged()) };
    let secret = match run_info.secret {
        Source::Given { .. } => start.identity.secret(),
        Source::Shared { secret } => Some(secret).filter(|_| !start.identity.has_secret()),
        Source::Agreed { .. } => None,
    };
    let other = secret.map(|secret| start.identity.clone().of_run(run_info.run, secret));
    if other.as_ref().is_some_and(|other| start.identity.has_secret() && !run_info.is_of(run_info::NAME, start.store, other)) {
        return Ok(forged());
    }
    let peer = other.map(|other| SignedStore::new(start.store, &other).get(&peer_info_of(0), 0, RUN_INFO_CHECK));
    let peer = peer.and_then(|peer| PeerInfo::decode(&peer.ok()??));
    let first = mine.process();
    let second = match peer {
        None => "another process".to_owned(),
        Some(peer) if peer.process() == first => ANOTHER_START.to_owned(),
        Some(peer) => peer.process(),
    };
    Ok(Error::RankTaken { rank: 0, first, second })
}

/// Whether buffers may be on devices: rank 0 allows it, and each rank can take part in an operation of
/// which another one has buffers there.
fn have_devices(allowed: bool, peers: &[PeerInfo]) -> bool {
    let without = peers.iter().find(|peer| !peer.has_cuda).filter(|_| allowed);
    if let Some(peer) = without {
        let (rank, process) = (peer.rank, peer.process());
        crate::log::warn!(
            rank,
            process,
            "a rank's kolo was built without the feature `cuda`, so no rank may have buffers on devices"
        );
    }
    allowed && without.is_none()
}

#[cfg(test)]
mod tests {
    use super::have_devices;
    use crate::network::peer_info::{PeerInfo, sample};

    #[test]
    fn no_rank_has_devices_unless_all_can_take_part() {
        let peer = |rank, has_cuda| PeerInfo { has_cuda, ..sample(rank) };
        let [all, some] = [true, false].map(|last| [peer(0, true), peer(1, true), peer(2, last)]);
        assert_eq!(
            [(true, &all), (true, &some), (false, &all)].map(|(allowed, peers)| have_devices(allowed, peers)),
            [true, false, false]
        );
    }
}
