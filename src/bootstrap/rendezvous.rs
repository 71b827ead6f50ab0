//! How ranks meet in a store: the announcement, the secret, the information of each rank, the table of all, and which ranks share a host. See [`super`] for the
//! protocol.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Start;
use super::announcement::{self, Announcement, Source};
use super::endpoint::Endpoint;
use super::key_exchange::{Exchange, KeyPair, KeyShare};
use super::peer_info::{PeerInfo, PeerTable, Refusal};
use super::signed::{SignedStore, in_run};
use crate::bootstrap::listener;
use crate::bootstrap::listener::handshake::{Hello, Identity, Purpose, Run, random, random_secret};
use crate::config::SharedSettings;
use crate::error::{Error, Result, StoreProblem};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// How long to wait for one key before looking whether there is a new announcement.
const GLANCE: Duration = Duration::from_millis(300);

/// How much later than rank 0 the others give up, so that they hear its reason.
const GRACE: Duration = Duration::from_secs(2);

/// How long to wait before looking again at what is there and has to change.
const PAUSE: Duration = Duration::from_millis(10);

/// The key of the table.
const TABLE: &str = "table";

/// The keys in the store of: a rank's information, its public key, its secret, the ranks on its host, and that it has read a refusal.
fn peer_info_of(rank: Rank) -> String {
    format!("rank/{rank}")
}

fn key_share_of(rank: Rank) -> String {
    format!("key_share/{rank}")
}

fn secret_for(rank: Rank) -> String {
    format!("secret/{rank}")
}

fn host_of(rank: Rank) -> String {
    format!("host/{rank}")
}

fn heard_by(rank: Rank) -> String {
    format!("heard/{rank}")
}

/// What a rank knows when all have met.
pub(super) struct Met {
    pub(super) endpoint: Endpoint,
    /// With the run and its secret.
    pub(super) identity: Identity,
    pub(super) peers: Vec<PeerInfo>,
    /// Rank 0's.
    pub(super) settings: SharedSettings,
}

/// Meets the other ranks, and listens to them at `ip` from when it knows the secret.
pub(super) fn meet(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<Met> {
    let (endpoint, identity, table) = if start.rank == 0 { collect(start, ip, began)? } else { join(start, ip, began)? };
    if let (PeerTable::Refused(_), true) = (&table, start.rank != 0) {
        store_error(start, SignedStore::new(start.store, &identity).set(&heard_by(start.rank), start.rank, &[], GRACE))?;
    }
    match table {
        PeerTable::Members { peers, settings } => Ok(Met { endpoint, identity, peers, settings }),
        PeerTable::Refused(refusal) => Err(refusal.error(&start.store.url())),
    }
}

fn store_error<T>(start: &Start<'_>, result: Result<T, StoreProblem>) -> Result<T> {
    result.map_err(|problem| problem.at(start.store.url()))
}

fn left(start: &Start<'_>) -> Duration {
    start.deadline.saturating_duration_since(Instant::now())
}

/// What rank 0 does.
fn collect(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<(Endpoint, Identity, PeerTable)> {
    let run = random();
    let keys = KeyPair::random();
    let secret = start.identity.secret();
    let mut identity = start.identity.clone().of_run(run, secret.unwrap_or_else(random_secret));
    let known = identity.secret().unwrap_or_default();
    let announcement = match (secret, start.store.is_private()) {
        (Some(_), _) => Announcement::of_given(start.store, &identity),
        (None, true) => Announcement { run, secret: Source::Shared { secret: known } },
        (None, false) => {
            identity = identity.agreed();
            tracing::warn!(
                store = start.store.url(),
                "no secret was given, so the ranks agree on one through the store; a process that can write to the store can join the \
                 job; give all ranks a secret (KOLO_SECRET_FILE) to keep it out"
            );
            Announcement { run, secret: Source::Agreed { public: keys.public } }
        }
    };
    let is_agreed = matches!(announcement.secret, Source::Agreed { .. });
    let endpoint = Endpoint::open(start, ip, &identity)?;
    let mine = endpoint.peer(start)?;
    let signed = SignedStore::new(start.store, &identity);
    let patience = left(start).max(GLANCE);
    store_error(start, start.store.set(announcement::NAME, &announcement.encode(), patience))?;
    store_error(start, signed.claim(&peer_info_of(0), 0, &mine.encode(), patience))?;
    let mut peers: Vec<Option<PeerInfo>> = vec![None; start.world_size];
    peers[0] = Some(mine.clone());
    let mut has_secret = vec![!is_agreed; start.world_size];
    let table = 'table: loop {
        let missing: Vec<Rank> = (0..start.world_size).filter(|&rank| peers[rank].is_none()).collect();
        let Some(&first) = missing.first() else {
            let settings = start.settings.shared;
            break PeerTable::Members { peers: peers.into_iter().flatten().collect(), settings };
        };
        if left(start).is_zero() {
            let waited = began.elapsed();
            break PeerTable::Refused(Refusal::Missing { ranks: missing, world_size: start.world_size, waited });
        }
        // The first is waited for; what of the others is there is taken along, so that disagreements show at once. But once the
        // first has come, only up to the next that is missing, which is then the first: each rank is asked for once, not in
        // every round.
        let mut has_first_come = false;
        for &rank in &missing {
            let patience = if rank == first { GLANCE.min(left(start)) } else { Duration::ZERO };
            let was_told = has_secret[rank];
            if !was_told {
                has_secret[rank] = hand_out(start, &identity, &keys, rank, patience)?;
            }
            let bytes = match has_secret[rank].then(|| signed.get(&peer_info_of(rank), rank, patience)) {
                Some(Err(StoreProblem::Forged { key })) => break 'table PeerTable::Refused(Refusal::Forged { key }),
                Some(other) => store_error(start, other)?,
                None => None,
            };
            let peer = bytes.and_then(|bytes| PeerInfo::decode(&bytes)).filter(|peer| peer.rank == rank);
            if let Some(other) = peer.as_ref().filter(|peer| mine.disagreement(peer).is_some()) {
                break 'table PeerTable::Refused(Refusal::Disagrees {
                    other: Box::new(other.clone()),
                    zero: Box::new(mine.clone()),
                });
            }
            let has_come = peer.is_some();
            peers[rank] = peer;
            has_first_come |= has_come && rank == first;
            // A rank that has just been told the secret is about to put its information there, and keeps no other from being told.
            if has_first_come && !has_come && was_told == has_secret[rank] {
                break;
            }
        }
        let current = store_error(start, start.store.get(announcement::NAME, Duration::ZERO))?;
        if let Some(other) = current.filter(|current| *current != announcement.encode()) {
            return Err(second_rank_0(start, &mine, &other)?);
        }
    };
    store_error(start, signed.set(TABLE, 0, &table.encode(), GRACE))?;
    if let PeerTable::Refused(refusal) = &table {
        // The store may end with this process: the others shall read why before it does.
        let absent = match refusal {
            Refusal::Missing { ranks, .. } => &ranks[..],
            _ => &[],
        };
        let until = Instant::now() + GRACE;
        for rank in (1..start.world_size).filter(|rank| !absent.contains(rank)) {
            let patience = until.saturating_duration_since(Instant::now());
            // Whether it is theirs does not matter: nothing is believed.
            store_error(start, start.store.get(&signed.name(&heard_by(rank)), patience))?;
        }
    }
    Ok((endpoint, identity, table))
}

/// Gives the secret to a rank that has put its public key into the store. Returns whether the key was there.
///
/// A value that is no public key counts as missing: no rank wrote it, and the rank in whose place it stands overwrites it when it
/// joins the run.
fn hand_out(start: &Start<'_>, identity: &Identity, keys: &KeyPair, rank: Rank, patience: Duration) -> Result<bool> {
    let (run, key) = (identity.run(), |name: String| in_run(&identity.run(), &name));
    let key_share = store_error(start, start.store.get(&key(key_share_of(rank)), patience))?;
    let Some(key_share) = key_share else { return Ok(false) };
    let wrapped = KeyShare::decode(&key_share).and_then(|key_share| {
        let exchange = Exchange { job: identity.job(), run, rank, publics: [keys.public, key_share.public] };
        exchange.wrap(keys, &identity.secret().unwrap_or_default())
    });
    let Some(wrapped) = wrapped else {
        // As long as it would have been waited for.
        std::thread::sleep(patience);
        return Ok(false);
    };
    store_error(start, start.store.set(&key(secret_for(rank)), &wrapped, left(start).max(GLANCE)))?;
    Ok(true)
}

/// Another process has announced a run while this one collected those of the ranks.
fn second_rank_0(start: &Start<'_>, mine: &PeerInfo, announced: &[u8]) -> Result<Error> {
    let forged = || StoreProblem::Forged { key: announcement::NAME.to_owned() }.at(start.store.url());
    let Some(Announcement { run, secret }) = Announcement::decode(announced) else { return Ok(forged()) };
    let known = match secret {
        Source::Given { .. } => start.identity.secret(),
        Source::Shared { secret } => Some(secret).filter(|_| !start.identity.has_secret()),
        Source::Agreed { .. } => None,
    };
    let other = known.map(|secret| start.identity.clone().of_run(run, secret));
    if other
        .as_ref()
        .is_some_and(|other| start.identity.has_secret() && !(Announcement { run, secret }).is_of(start.store, other))
    {
        return Ok(forged());
    }
    let peer = other.map(|other| SignedStore::new(start.store, &other).get(&peer_info_of(0), 0, GLANCE));
    let peer = peer.and_then(|peer| PeerInfo::decode(&peer.ok()??));
    let second = peer.map_or_else(|| "another process".to_owned(), |peer| peer.who());
    Ok(Error::RankTaken { rank: 0, first: mine.who(), second })
}

/// How far another rank than 0 has come in a run.
enum JoinState {
    /// It has found no announcement.
    Nothing,
    /// It does not believe what it has found. It may be a former run's; at the deadline this is what went wrong.
    Unbelieved(StoreProblem),
    /// It waits for rank 0 to hand it the secret.
    Secretless(Secretless),
    /// It knows the secret, listens, and waits for the table.
    Listening { endpoint: Endpoint, identity: Identity, mine: Box<PeerInfo>, conflict: Option<Box<(PeerInfo, Instant)>> },
}

/// What a rank that waits for the secret knows.
struct Secretless {
    run: Run,
    keys: KeyPair,
    /// This rank's public key, as the store has it.
    mine: KeyShare,
    /// Rank 0's public key.
    theirs: [u8; 32],
    /// Another process has this rank.
    conflict: Option<KeyShare>,
    /// The store holds a value in place of the secret that rank 0 did not put there.
    is_forged: bool,
}

/// What a rank finds that waits for the table.
enum Found {
    Nothing,
    /// It has this rank in it, or rank 0, which still lives, refuses to start.
    PeerTable(PeerTable),
    /// The run has ended like this: it is a former one, or this rank comes too late.
    End(Error),
}

/// What the others do.
fn join(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<(Endpoint, Identity, PeerTable)> {
    let deadline = start.deadline + GRACE;
    let mut announced: Option<Vec<u8>> = None;
    let mut state = JoinState::Nothing;
    let mut end = None;
    loop {
        let is_late = Instant::now() >= deadline;
        let current = match (start.store.get(announcement::NAME, GLANCE), end.take()) {
            // A file that another job has left: rank 0 will make it this job's.
            (Err(StoreProblem::OtherJob { .. }), _) if !is_late => continue,
            // The store may have ended with rank 0: there will be no other run.
            (Err(_), Some(end)) => return Err(end),
            (current, _) => store_error(start, current)?,
        };
        if let Some(current) = current.filter(|current| announced.as_ref() != Some(current)) {
            // What a former run's processes may have sent here goes with its listener.
            drop(std::mem::replace(&mut state, JoinState::Nothing));
            state = begin(start, ip, &current)?;
            announced = Some(current);
        }
        state = match state {
            JoinState::Secretless(waiting @ Secretless { conflict: None, .. }) => learn(start, ip, waiting)?,
            JoinState::Listening { endpoint, identity, mine, conflict } => {
                match listen(start, &identity, &mine, conflict.as_deref(), is_late)? {
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

/// An announcement is there: does what can be done without waiting.
fn begin(start: &Start<'_>, ip: IpAddr, announced: &[u8]) -> Result<JoinState> {
    let Some(announcement) = Announcement::decode(announced) else {
        let what = format!("what it holds as {:?} is no announcement that this version of kolo knows", announcement::NAME);
        return Ok(JoinState::Unbelieved(StoreProblem::Foreign(what)));
    };
    let run = announcement.run;
    match (announcement.secret, start.identity.secret()) {
        (Source::Given { .. }, Some(secret)) => {
            let identity = start.identity.clone().of_run(run, secret);
            if announcement.is_of(start.store, &identity) {
                return announce_self(start, ip, identity);
            }
            Ok(JoinState::Unbelieved(StoreProblem::Forged { key: announcement::NAME.to_owned() }))
        }
        (Source::Shared { secret }, None) => announce_self(start, ip, start.identity.clone().of_run(run, secret)),
        (Source::Agreed { public: theirs }, None) => {
            let keys = KeyPair::random();
            let mine = KeyShare { public: keys.public, who: format!("process {} on {}", std::process::id(), start.host()) };
            let key = in_run(&run, &key_share_of(start.rank));
            let patience = left(start).max(GLANCE);
            let holder = store_error(start, start.store.claim(&key, &mine.encode(), patience))?;
            let holder = KeyShare::decode(&holder);
            if holder.is_none() {
                // No rank wrote what is there.
                store_error(start, start.store.set(&key, &mine.encode(), patience))?;
            }
            let conflict = holder.filter(|holder| holder.public != mine.public);
            Ok(JoinState::Secretless(Secretless { run, keys, mine, theirs, conflict, is_forged: false }))
        }
        // One of the two was given a secret, and the other was not.
        (Source::Given { .. }, None) | (_, Some(_)) => Ok(JoinState::Unbelieved(StoreProblem::Secret)),
    }
}

/// Looks whether rank 0 has handed out the secret.
fn learn(start: &Start<'_>, ip: IpAddr, waiting: Secretless) -> Result<JoinState> {
    let Secretless { run, theirs, .. } = waiting;
    let Some(wrapped) = store_error(start, start.store.get(&in_run(&run, &secret_for(start.rank)), GLANCE))? else {
        // What is no public key was written over this rank's.
        let key = in_run(&run, &key_share_of(start.rank));
        let holder = store_error(start, start.store.get(&key, Duration::ZERO))?;
        if holder.is_none_or(|holder| KeyShare::decode(&holder).is_none()) {
            store_error(start, start.store.set(&key, &waiting.mine.encode(), left(start).max(GLANCE)))?;
        }
        return Ok(JoinState::Secretless(waiting));
    };
    let exchange = Exchange { job: start.identity.job(), run, rank: start.rank, publics: [theirs, waiting.keys.public] };
    let Some(secret) = exchange.unwrap(&waiting.keys, &wrapped) else {
        // Rank 0 writes its own over it. At a store that cannot claim, a former run's rank had another public key here.
        std::thread::sleep(PAUSE);
        return Ok(JoinState::Secretless(Secretless { is_forged: true, ..waiting }));
    };
    announce_self(start, ip, start.identity.clone().of_run(run, secret).agreed())
}

/// Opens the endpoint, and says where it is.
fn announce_self(start: &Start<'_>, ip: IpAddr, identity: Identity) -> Result<JoinState> {
    let endpoint = Endpoint::open(start, ip, &identity)?;
    let mine = endpoint.peer(start)?;
    let signed = SignedStore::new(start.store, &identity);
    let patience = left(start).max(GLANCE);
    let holder = store_error(start, signed.claim(&peer_info_of(start.rank), start.rank, &mine.encode(), patience))?;
    let holder = PeerInfo::decode(&holder).filter(|holder| holder.instance != mine.instance);
    let conflict = holder.map(|holder| Box::new((holder, Instant::now())));
    Ok(JoinState::Listening { endpoint, identity, mine: Box::new(mine), conflict })
}

/// Looks for a table with this rank in it.
fn listen(
    start: &Start<'_>,
    identity: &Identity,
    mine: &PeerInfo,
    conflict: Option<&(PeerInfo, Instant)>,
    is_late: bool,
) -> Result<Found> {
    if let Some((holder, since)) = conflict {
        // Either a living process has this rank, or the run is a former one and rank 0 will announce another.
        if is_late || since.elapsed() >= CONFLICT_PATIENCE && answers(start, identity, holder, GLANCE) {
            return Err(Error::RankTaken { rank: start.rank, first: holder.who(), second: mine.who() });
        }
        std::thread::sleep(PAUSE);
        return Ok(Found::Nothing);
    }
    let signed = SignedStore::new(start.store, identity);
    let bytes = store_error(start, signed.get(TABLE, 0, GLANCE))?;
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
    // That is how this start ends if rank 0 still lives; else it may be how a former run has ended.
    let Some(end) = end else {
        std::thread::sleep(PAUSE);
        return Ok(Found::Nothing);
    };
    let zero = store_error(start, signed.get(&peer_info_of(0), 0, Duration::ZERO))?.and_then(|bytes| PeerInfo::decode(&bytes));
    if is_late || zero.is_some_and(|zero| answers(start, identity, &zero, GRACE)) {
        return end.map(|refusal| Found::PeerTable(PeerTable::Refused(refusal)));
    }
    std::thread::sleep(PAUSE);
    Ok(Found::End(end.map_or_else(|error| error, |refusal| refusal.error(&start.store.url()))))
}

/// What kept a rank from meeting the others until the deadline.
fn too_late(start: &Start<'_>, state: JoinState, began: Instant) -> Error {
    let ranks = match state {
        JoinState::Unbelieved(problem) => return problem.at(start.store.url()),
        JoinState::Secretless(Secretless { conflict: Some(holder), .. }) => {
            let second = format!("process {} on {}", std::process::id(), start.host());
            return Error::RankTaken { rank: start.rank, first: holder.who, second };
        }
        JoinState::Secretless(Secretless { run, is_forged: true, .. }) => {
            return StoreProblem::Forged { key: in_run(&run, &secret_for(start.rank)) }.at(start.store.url());
        }
        JoinState::Nothing | JoinState::Secretless(_) => vec![0],
        JoinState::Listening { identity, .. } => missing(start, &identity),
    };
    Error::Missing { ranks, world_size: start.world_size, store: start.store.url(), waited: began.elapsed() }
}

/// How long a rank that finds its place taken waits before it looks who holds it: a former run may be about to end.
const CONFLICT_PATIENCE: Duration = Duration::from_millis(700);

/// Whether the process that wrote a peer info lives: its listener lets in ranks of this run.
fn answers(start: &Start<'_>, identity: &Identity, holder: &PeerInfo, patience: Duration) -> bool {
    let hello = Hello::new(Purpose::Probe, 0, start.rank, holder.rank);
    listener::dial(holder.address, identity, &hello, Instant::now() + patience).is_ok()
}

/// The ranks without an entry in the store, as far as another than rank 0 can tell.
fn missing(start: &Start<'_>, identity: &Identity) -> Vec<Rank> {
    let has_peer_info = |rank: &Rank| {
        let found = start.store.get(&in_run(&identity.run(), &peer_info_of(*rank)), Duration::ZERO);
        !matches!(found, Ok(None))
    };
    let missing: Vec<Rank> = (0..start.world_size.min(1024)).filter(|rank| !has_peer_info(rank)).collect();
    // All entries are there, but no table: rank 0 has ended, or this is a former run.
    if missing.is_empty() { vec![0] } else { missing }
}

/// Learns which ranks share memory, when not all do: the lowest rank of each host says who its ranks are, and rank 0 puts
/// it together.
pub(super) fn exchange_hosts(start: &Start<'_>, identity: &Identity, together: &[Rank]) -> Result<Vec<usize>> {
    let signed = SignedStore::new(start.store, identity);
    let patience = left(start).max(GLANCE);
    if together[0] == start.rank {
        let mut writer = Writer::default();
        writer.list(together, |writer, &rank| _ = writer.number(rank as u64));
        store_error(start, signed.set(&host_of(start.rank), start.rank, &writer.0, patience))?;
    }
    let all = "hosts";
    let silent = |what: &str| {
        let problem = StoreProblem::Timeout { key: signed.name(what), waited: patience };
        problem.at(start.store.url())
    };
    if start.rank != 0 {
        let bytes = store_error(start, signed.get(all, 0, left(start).max(GLANCE) + GRACE))?.ok_or_else(|| silent(all))?;
        let hosts = Reader::new(&bytes).list(Reader::size).filter(|hosts| hosts.len() == start.world_size);
        return hosts.ok_or_else(|| silent(all));
    }
    let mut hosts: Vec<Option<usize>> = vec![None; start.world_size];
    for rank in 0..start.world_size {
        // A rank that nobody before it has named is the lowest of its host.
        if hosts[rank].is_none() {
            let bytes = store_error(start, signed.get(&host_of(rank), rank, left(start).max(GLANCE)))?;
            let bytes = bytes.ok_or_else(|| silent(&host_of(rank)))?;
            for member in Reader::new(&bytes).list(Reader::size).unwrap_or_default() {
                if let Some(host) = hosts.get_mut(member) {
                    *host = Some(rank);
                }
            }
        }
    }
    let hosts: Vec<usize> = hosts.into_iter().enumerate().map(|(rank, host)| host.unwrap_or(rank)).collect();
    let mut writer = Writer::default();
    writer.list(&hosts, |writer, &host| _ = writer.number(host as u64));
    store_error(start, signed.set(all, 0, &writer.0, patience))?;
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::bootstrap::store::{self, Store, StoreUrl};
    use crate::config::Settings;

    /// A store, and all that was put into it.
    struct Recording {
        store: Box<dyn Store>,
        is_private: bool,
        values: Mutex<Vec<(String, Vec<u8>)>>,
        looks_for_table: AtomicUsize,
        /// Requests for the information of ranks and for public keys.
        looks_for_ranks: AtomicUsize,
    }

    impl Recording {
        fn new(name: &str, is_private: bool) -> Recording {
            let place = StoreUrl::Hash(name.to_owned());
            let store = store::open(&place, true, &Identity::new("job", None), late()).unwrap();
            Recording { store, is_private, values: Mutex::default(), looks_for_table: 0.into(), looks_for_ranks: 0.into() }
        }

        fn holds_key(&self, end: &str) -> bool {
            self.values.lock().unwrap().iter().any(|(key, _)| key.ends_with(&format!("/{end}")))
        }
    }

    impl Store for Recording {
        fn url(&self) -> String {
            self.store.url()
        }
        fn is_private(&self) -> bool {
            self.is_private
        }
        fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
            self.values.lock().unwrap().push((key.to_owned(), value.to_vec()));
            self.store.set(key, value, timeout)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
            if key.ends_with(TABLE) {
                self.looks_for_table.fetch_add(1, Ordering::Relaxed);
            } else if key.contains("/rank/") || key.contains("/key_share/") {
                self.looks_for_ranks.fetch_add(1, Ordering::Relaxed);
            }
            self.store.get(key, timeout)
        }
        fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
            self.values.lock().unwrap().push((key.to_owned(), value.to_vec()));
            self.store.claim(key, value, timeout)
        }
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// Three ranks meet; returns the secret that all of them know.
    fn secret_of(store: &Recording, given: Option<[u8; 32]>) -> [u8; 32] {
        let settings = Settings::default();
        let secrets: Vec<_> = std::thread::scope(|scope| {
            let meet = |rank| {
                let identity = Identity::new("job", given);
                let start = Start { rank, world_size: 3, identity, store, place: None, settings: &settings, deadline: late() };
                let met = super::meet(&start, [127, 0, 0, 1].into(), Instant::now()).unwrap();
                exchange_hosts(&start, &met.identity, &[rank]).unwrap();
                met.identity.secret().unwrap()
            };
            let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || meet(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        secrets[0]
    }

    fn holds(store: &Recording, secret: &[u8; 32]) -> bool {
        let hexadecimal: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        // Not even a part of it.
        let parts: Vec<&[u8]> = secret.windows(8).chain(hexadecimal.as_bytes().windows(16)).collect();
        let values = store.values.lock().unwrap();
        assert!(values.len() > 8, "the ranks did not meet here");
        values.iter().any(|(_, value)| parts.iter().any(|part| value.windows(part.len()).any(|bytes| bytes == *part)))
    }

    #[test]
    fn no_secret_stands_in_a_store_that_others_read() {
        let store = Recording::new("no secret, agreed", false);
        let agreed = secret_of(&store, None);
        assert!(!holds(&store, &agreed), "the agreed secret stands in the store");
        let store = Recording::new("no secret, given", false);
        assert_eq!(secret_of(&store, Some([7; 32])), [7; 32]);
        assert!(!holds(&store, &[7; 32]), "the given secret stands in the store");
        // What the test would see.
        let store = Recording::new("secret, shared", true);
        let shared = secret_of(&store, None);
        assert!(holds(&store, &shared) && shared != agreed);
    }

    /// A store where a stranger writes over what rank 1 has written, before rank 0 has read it.
    struct Overwritten {
        store: Box<dyn Store>,
        writes: AtomicUsize,
    }

    impl Store for Overwritten {
        fn url(&self) -> String {
            self.store.url()
        }
        fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
            self.writes.fetch_add(usize::from(key.ends_with(&key_share_of(1))), Ordering::Relaxed);
            self.store.set(key, value, timeout)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
            self.store.get(key, timeout)
        }
        fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
            let held = self.store.claim(key, value, timeout);
            if key.ends_with(&key_share_of(1)) {
                self.store.set(key, b"garbage", timeout)?;
            }
            held
        }
    }

    #[test]
    fn a_rank_whose_public_key_is_written_over_writes_it_again() {
        let store = Overwritten { store: Recording::new("overwritten", false).store, writes: 0.into() };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let store = &store;
                    scope.spawn(move || meet(store, rank, 2, late()).map(drop))
                })
                .collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
        });
        assert_eq!(store.writes.load(Ordering::Relaxed), 1);
    }

    /// A store where a stranger writes before the ranks do: values that are no public keys, and one that is no secret.
    struct Disturbed {
        store: Box<dyn Store>,
        /// How often rank 1 has looked for its secret.
        looks: AtomicUsize,
    }

    impl Store for Disturbed {
        fn url(&self) -> String {
            self.store.url()
        }
        fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
            if key == announcement::NAME {
                let run = Announcement::decode(value).unwrap().run;
                let of_small_order = KeyShare { public: [0; 32], who: "a stranger".to_owned() }.encode();
                self.store.set(&in_run(&run, &key_share_of(1)), &of_small_order, timeout)?;
                self.store.set(&in_run(&run, &key_share_of(2)), b"garbage", timeout)?;
                self.store.set(&in_run(&run, &secret_for(1)), &[7; 64], timeout)?;
            }
            // Rank 1 has read the stranger's.
            let until = Instant::now() + timeout;
            while key.ends_with(&secret_for(1)) && self.looks.load(Ordering::Relaxed) < 2 && Instant::now() < until {
                std::thread::yield_now();
            }
            self.store.set(key, value, timeout)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
            let value = self.store.get(key, timeout);
            if key.ends_with(&secret_for(1)) {
                self.looks.fetch_add(1, Ordering::Relaxed);
            }
            value
        }
        fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
            self.store.claim(key, value, timeout)
        }
    }

    #[test]
    fn what_is_no_public_key_or_secret_does_not_keep_ranks_from_meeting() {
        let store = Recording::new("disturbed", false).store;
        let store = Disturbed { store, looks: 0.into() };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let store = &store;
                    scope.spawn(move || meet(store, rank, 3, late()).map(|met| met.identity.secret()))
                })
                .collect();
            let secrets: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
            assert!(secrets[0].is_some() && secrets.iter().all(|secret| *secret == secrets[0]));
        });
        assert!(store.looks.load(Ordering::Relaxed) >= 2);
    }

    /// The test of a promise that holds between processes is `row_37_before_the_secret`; this is about the order.
    #[test]
    fn a_rank_publishes_its_address_after_it_has_learned_the_secret() {
        let store = Recording::new("order", false);
        secret_of(&store, None);
        let values = store.values.lock().unwrap();
        let position = |end: &str| values.iter().position(|(key, _)| key.ends_with(end)).unwrap();
        for rank in 1..3 {
            assert!(position(&key_share_of(rank)) < position(&secret_for(rank)));
            assert!(position(&secret_for(rank)) < position(&format!("/{}", peer_info_of(rank))));
        }
    }
    /// Meets, as `rank` of `world_size`, by the deadline.
    fn meet(store: &dyn Store, rank: Rank, world_size: usize, deadline: Instant) -> Result<Met> {
        let settings = Settings::default();
        let identity = Identity::new("job", None);
        let start = Start { rank, world_size, identity, store, place: None, settings: &settings, deadline };
        super::meet(&start, [127, 0, 0, 1].into(), Instant::now())
    }

    /// A store that outlives runs holds how one ended; the ranks of the next wait for their rank 0, however it ended.
    #[test]
    fn the_end_of_a_former_run_does_not_end_the_next() {
        // Only rank 0 came; and a run of another size was complete.
        for former_size in [2, 1] {
            let store = Recording::new(&format!("former run of {former_size}"), true);
            let former = meet(&store, 0, former_size, Instant::now() + GLANCE);
            assert_eq!(former.is_err(), former_size == 2);
            drop(former);
            std::thread::scope(|scope| {
                let one = scope.spawn(|| meet(&store, 1, 2, late()).map(drop));
                while store.looks_for_table.load(Ordering::Relaxed) < 2 && !one.is_finished() {
                    std::thread::yield_now();
                }
                meet(&store, 0, 2, Instant::now() + 10 * GRACE).map(drop).unwrap();
                one.join().unwrap().unwrap();
            });
        }
    }

    /// Rank 0 asks for each rank about once, however many there are.
    #[test]
    fn a_start_takes_no_more_requests_than_there_are_ranks() {
        const RANKS: usize = 40;
        for is_private in [true, false] {
            let store = Recording::new(&format!("requests, {is_private}"), is_private);
            // The others are there one after the other: each round of rank 0 finds one more.
            let began = Instant::now();
            std::thread::scope(|scope| {
                let zero = scope.spawn(|| meet(&store, 0, RANKS, late()).map(drop));
                let others: Vec<_> = (1..RANKS)
                    .map(|rank| {
                        let joins = scope.spawn({
                            let store = &store;
                            move || meet(store, rank, RANKS, late()).map(drop)
                        });
                        while !store.holds_key(&peer_info_of(rank)) && !joins.is_finished() {
                            std::thread::yield_now();
                        }
                        joins
                    })
                    .collect();
                zero.join().unwrap().unwrap();
                others.into_iter().for_each(|joins| joins.join().unwrap().unwrap());
            });
            let asked = store.looks_for_ranks.load(Ordering::Relaxed);
            // While the first does not come, all are asked for, now and then.
            let rounds = 8 + began.elapsed().div_duration_f64(GLANCE) as usize;
            assert!(asked < rounds * RANKS, "{asked} requests for {RANKS} ranks");
        }
    }
}
