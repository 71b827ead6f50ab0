//! What the ranks other than 0 do: they find the run, learn its secret and wait for the table.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::store_keys::{TABLE, key_share_of, peer_info_of, secret_for};
use super::timing::{GRACE, PAUSE, POLL_INTERVAL};
use crate::bootstrap::announcement::{self, Announcement, Source};
use crate::bootstrap::endpoint::Endpoint;
use crate::bootstrap::identity::{Identity, Run};
use crate::bootstrap::key_exchange::{Exchange, KeyPair, KeyShare};
use crate::bootstrap::listener::handshake::{Hello, Purpose, Refusal};
use crate::bootstrap::listener::{self, DialError};
use crate::bootstrap::peer_info::PeerInfo;
use crate::bootstrap::peer_table::{OwnFailure, PeerTable};
use crate::bootstrap::signed::{SignedStore, in_run};
use crate::bootstrap::start::Start;
use crate::error::{Error, Result, StoreError};
use crate::types::Rank;

/// How far this rank has come in a run.
enum JoinState {
    /// There is no announcement.
    Nothing,
    /// The announcement cannot be trusted. It may be that of a former run; at the deadline, this is
    /// the error.
    Untrusted(StoreError),
    /// The rank waits for rank 0 to send the secret.
    AwaitsSecret(AwaitsSecret),
    /// The rank knows the secret, listens, and waits for the table.
    Listening { endpoint: Endpoint, identity: Identity, mine: Box<PeerInfo>, conflict: Option<Box<(PeerInfo, Instant)>> },
}

/// A rank that waits for the secret.
struct AwaitsSecret {
    run: Run,
    keys: KeyPair,
    /// This rank's public key, as it is in the store.
    mine: KeyShare,
    /// Rank 0's public key.
    theirs: [u8; 32],
    /// The public key of another process that claims this rank.
    conflict: Option<KeyShare>,
    /// The store holds a value in place of the secret that rank 0 did not write.
    is_forged: bool,
}

/// What a rank finds while it waits for the table.
enum Found {
    Nothing,
    /// The table contains this rank, or a living rank 0 refuses to start.
    PeerTable(PeerTable),
    /// The run has ended with this error. It is a former run, or this rank is too late.
    End(Error),
}

/// Returns this rank's endpoint, the identity of the run, and the table that rank 0 has published.
pub(super) fn join(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<(Endpoint, Identity, PeerTable)> {
    let deadline = start.deadline + GRACE;
    let mut announced: Option<Vec<u8>> = None;
    let mut state = JoinState::Nothing;
    let mut end = None;
    loop {
        let is_late = Instant::now() >= deadline;
        let current = match (start.store.get(announcement::NAME, POLL_INTERVAL), end.take()) {
            // Another job has left this file. Rank 0 will replace it.
            (Err(StoreError::OtherJob { .. }), _) if !is_late => continue,
            // The store may have ended with rank 0. Then there will be no other run.
            (Err(_), Some(end)) => return Err(end),
            (current, _) => start.at_store(current)?,
        };
        if let Some(current) = current.filter(|current| announced.as_ref() != Some(current)) {
            // Closes the listener, with whatever processes of a former run may have sent to it.
            drop(std::mem::replace(&mut state, JoinState::Nothing));
            state = begin(start, ip, &current)?;
            announced = Some(current);
        }
        state = match state {
            JoinState::AwaitsSecret(waiting @ AwaitsSecret { conflict: None, .. }) => learn(start, ip, waiting)?,
            JoinState::Listening { endpoint, identity, mine, conflict } => {
                match look_for_table(start, &identity, &mine, conflict.as_deref(), is_late)? {
                    Found::PeerTable(table) => return Ok((endpoint, identity, table)),
                    Found::End(error) => end = Some(error),
                    Found::Nothing => {}
                }
                JoinState::Listening { endpoint, identity, mine, conflict }
            }
            // The announcement has to change.
            other => {
                std::thread::sleep(PAUSE);
                other
            }
        };
        if is_late {
            return Err(too_late(start, state, began));
        }
    }
}

/// Enters the run of an announcement, without waiting for other ranks.
fn begin(start: &Start<'_>, ip: IpAddr, announced: &[u8]) -> Result<JoinState> {
    let Some(announcement) = Announcement::decode(announced) else {
        let what = format!("its value of {:?} is no announcement that this version of kolo knows", announcement::NAME);
        return Ok(JoinState::Untrusted(StoreError::Foreign(what)));
    };
    let run = announcement.run;
    match (announcement.secret, start.identity.secret()) {
        (Source::Given { .. }, Some(secret)) => {
            let identity = start.identity.clone().of_run(run, secret);
            if announcement.is_of(start.store, &identity) {
                return announce_self(start, ip, identity);
            }
            Ok(JoinState::Untrusted(StoreError::Forged { key: announcement::NAME.to_owned() }))
        }
        (Source::Shared { secret }, None) => announce_self(start, ip, start.identity.clone().of_run(run, secret)),
        (Source::Agreed { public: theirs }, None) => {
            let keys = KeyPair::random();
            let mine = KeyShare { public: keys.public, process: start.process() };
            let key = in_run(&run, &key_share_of(start.rank));
            let patience = start.left().max(POLL_INTERVAL);
            let holder = start.at_store(start.store.claim(&key, &mine.encode(), patience))?;
            let holder = KeyShare::decode(&holder);
            if holder.is_none() {
                // The value is no public key, so no rank wrote it.
                start.at_store(start.store.set(&key, &mine.encode(), patience))?;
            }
            let conflict = holder.filter(|holder| holder.public != mine.public);
            Ok(JoinState::AwaitsSecret(AwaitsSecret { run, keys, mine, theirs, conflict, is_forged: false }))
        }
        // Either this rank or rank 0 was given a secret, and the other was not.
        (Source::Given { .. }, None) | (_, Some(_)) => Ok(JoinState::Untrusted(StoreError::Secret)),
    }
}

/// Checks whether rank 0 has sent the secret.
fn learn(start: &Start<'_>, ip: IpAddr, waiting: AwaitsSecret) -> Result<JoinState> {
    let AwaitsSecret { run, theirs, .. } = waiting;
    let Some(wrapped) = start.at_store(start.store.get(&in_run(&run, &secret_for(start.rank)), POLL_INTERVAL))? else {
        // Another process may have overwritten this rank's public key with something else.
        let key = in_run(&run, &key_share_of(start.rank));
        let holder = start.at_store(start.store.get(&key, Duration::ZERO))?;
        if holder.is_none_or(|holder| KeyShare::decode(&holder).is_none()) {
            start.at_store(start.store.set(&key, &waiting.mine.encode(), start.left().max(POLL_INTERVAL)))?;
        }
        return Ok(JoinState::AwaitsSecret(waiting));
    };
    let exchange = Exchange { job: start.identity.job(), run, rank: start.rank, publics: [theirs, waiting.keys.public] };
    let Some(secret) = exchange.unwrap(&waiting.keys, &wrapped) else {
        // Rank 0 will overwrite it. In a store without claims, the value may be for another process
        // that had this rank.
        std::thread::sleep(PAUSE);
        return Ok(JoinState::AwaitsSecret(AwaitsSecret { is_forged: true, ..waiting }));
    };
    announce_self(start, ip, start.identity.clone().of_run(run, secret).agreed())
}

/// Opens the endpoint, and writes this rank's peer info.
fn announce_self(start: &Start<'_>, ip: IpAddr, identity: Identity) -> Result<JoinState> {
    let signed = SignedStore::new(start.store, &identity);
    let endpoint = Endpoint::open(start, ip, &identity).inspect_err(|error| {
        let failure = OwnFailure { rank: start.rank, host: start.host(), pid: std::process::id(), why: error.to_string() };
        if let Err(problem) = signed.claim(&peer_info_of(start.rank), start.rank, &failure.encode(), GRACE) {
            tracing::debug!(%problem, "cannot tell the other ranks why this rank does not start");
        }
    })?;
    let mine = endpoint.peer(start)?;
    let patience = start.left().max(POLL_INTERVAL);
    let holder = start.at_store(signed.claim(&peer_info_of(start.rank), start.rank, &mine.encode(), patience))?;
    let holder = PeerInfo::decode(&holder).filter(|holder| holder.instance != mine.instance);
    let conflict = holder.map(|holder| Box::new((holder, Instant::now())));
    Ok(JoinState::Listening { endpoint, identity, mine: Box::new(mine), conflict })
}

/// Looks for a table that contains this rank.
fn look_for_table(
    start: &Start<'_>,
    identity: &Identity,
    mine: &PeerInfo,
    conflict: Option<&(PeerInfo, Instant)>,
    is_late: bool,
) -> Result<Found> {
    if let Some((holder, since)) = conflict {
        // Either a living process has this rank, or this is a former run and rank 0 will announce
        // another.
        if is_late || since.elapsed() >= CONFLICT_PATIENCE && answers(start, identity, holder, POLL_INTERVAL) {
            return Err(Error::RankTaken { rank: start.rank, first: holder.process(), second: mine.process() });
        }
        std::thread::sleep(PAUSE);
        return Ok(Found::Nothing);
    }
    let signed = SignedStore::new(start.store, identity);
    let bytes = start.at_store(signed.get(TABLE, 0, POLL_INTERVAL))?;
    let end = match bytes.and_then(|bytes| PeerTable::decode(&bytes)) {
        None => return Ok(Found::Nothing),
        Some(PeerTable::Members { peers, settings })
            if peers.get(start.rank).is_some_and(|peer| peer.instance == mine.instance) =>
        {
            return Ok(Found::PeerTable(PeerTable::Members { peers, settings }));
        }
        Some(PeerTable::Members { peers, .. }) if peers.len() != start.world_size => {
            let theirs = peers.len();
            let host = peers.first().map_or_else(String::new, |peer| peer.host.clone());
            Some(Err(Error::WorldSize { rank: 0, host, theirs, my_rank: start.rank, mine: start.world_size }))
        }
        Some(PeerTable::Members { .. }) => None,
        Some(PeerTable::Refused(refusal)) => Some(Ok(refusal)),
    };
    // If rank 0 still lives, this start ends like this. Otherwise a former run may have ended like
    // this.
    let Some(end) = end else {
        std::thread::sleep(PAUSE);
        return Ok(Found::Nothing);
    };
    let zero = start.at_store(signed.get(&peer_info_of(0), 0, Duration::ZERO))?.and_then(|bytes| PeerInfo::decode(&bytes));
    if is_late || zero.is_some_and(|zero| answers(start, identity, &zero, GRACE)) {
        return end.map(|refusal| Found::PeerTable(PeerTable::Refused(refusal)));
    }
    std::thread::sleep(PAUSE);
    Ok(Found::End(end.map_or_else(|error| error, |refusal| refusal.error(&start.store.url()))))
}

/// Returns why this rank has not met the others by the deadline.
fn too_late(start: &Start<'_>, state: JoinState, began: Instant) -> Error {
    let ranks = match state {
        JoinState::Untrusted(problem) => return problem.at(start.store.url()),
        JoinState::AwaitsSecret(AwaitsSecret { conflict: Some(holder), .. }) => {
            return Error::RankTaken { rank: start.rank, first: holder.process, second: start.process() };
        }
        JoinState::AwaitsSecret(AwaitsSecret { run, is_forged: true, .. }) => {
            return StoreError::Forged { key: in_run(&run, &secret_for(start.rank)) }.at(start.store.url());
        }
        JoinState::Nothing | JoinState::AwaitsSecret(_) => vec![0],
        JoinState::Listening { identity, .. } => missing(start, &identity),
    };
    Error::Missing { ranks, world_size: start.world_size, store: start.store.url(), waited: began.elapsed() }
}

/// How long a rank waits before it checks whether the process that has its rank lives: a former run
/// may be about to end.
const CONFLICT_PATIENCE: Duration = Duration::from_millis(700);

/// Returns whether the process that wrote a peer info lives: its listener admits ranks of this run,
/// or refuses them for their version. Only a process with the secret gives either answer.
fn answers(start: &Start<'_>, identity: &Identity, holder: &PeerInfo, patience: Duration) -> bool {
    let hello = Hello::new(Purpose::Probe, 0, start.rank, holder.rank);
    let answer = listener::dial(holder.address, identity, &hello, Instant::now() + patience);
    matches!(answer, Ok(_) | Err(DialError::Refused(Refusal::Version { .. })))
}

/// Returns the other ranks without a peer info in the store, as far as a rank other than 0 can
/// tell.
fn missing(start: &Start<'_>, identity: &Identity) -> Vec<Rank> {
    let has_peer_info = |rank: &Rank| {
        let found = start.store.get(&in_run(&identity.run(), &peer_info_of(*rank)), Duration::ZERO);
        !matches!(found, Ok(None))
    };
    let missing: Vec<Rank> =
        (0..start.world_size.min(1024)).filter(|&rank| rank != start.rank && !has_peer_info(&rank)).collect();
    // All peer infos are there, but no table. Rank 0 has ended, or this is a former run.
    if missing.is_empty() { vec![0] } else { missing }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::bootstrap::listener::handshake;
    use crate::bootstrap::peer_info;
    use crate::bootstrap::store::{self, StoreUrl};
    use crate::config::Settings;

    /// Returns whether rank 1 takes rank 0 for alive if rank 0's listener gives this reply to a
    /// hello.
    fn is_alive(identity: &Identity, reply: impl Fn(&[u8]) -> Vec<u8> + Sync) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        let store = store::open(&StoreUrl::Hash("alive".to_owned()), true, identity, deadline).unwrap();
        let (settings, identity) = (Settings::default(), identity.clone());
        let start = Start { rank: 1, world_size: 2, identity, store: &*store, store_url: None, settings: &settings, deadline };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = PeerInfo { address: listener.local_addr().unwrap(), ..peer_info::sample(0) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut hello = vec![0; handshake::HELLO];
                stream.read_exact(&mut hello).unwrap();
                stream.write_all(&reply(&hello)).unwrap();
            });
            answers(&start, &start.identity, &holder, Duration::from_secs(20))
        })
    }

    /// Otherwise a rank of another version waits until its deadline and reports missing ranks.
    #[test]
    fn a_rank_0_of_another_version_is_alive() {
        let identity = Identity::new("job", Some([7; 32]));
        assert!(is_alive(&identity, |hello| handshake::refuse_for_version(&identity, hello)));
        let stranger = Identity::new("job", Some([8; 32]));
        assert!(!is_alive(&identity, |hello| handshake::refuse_for_version(&stranger, hello)));
    }
}
