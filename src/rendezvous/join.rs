//! What the ranks other than 0 do: they find the run, learn its secret and wait for the table.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::attempt::{Attempt, comes_again};
use super::store_keys::{TABLE, key_share_of, peer_info_of, secret_for, standby_of};
use crate::error::{Error, Result, StoreError};
use crate::network::identity::{Identity, MAC, Run};
use crate::network::listener::handshake::{Hello, Purpose, Refusal};
use crate::network::listener::{self, DialError};
use crate::network::peer_info::PeerInfo;
use crate::rendezvous::endpoint::Endpoint;
use crate::rendezvous::key_exchange::{Exchange, KeyShare};
use crate::rendezvous::peer_table::{OwnFailure, PeerTable};
use crate::rendezvous::run_info::{self, RunInfo, Source};
use crate::rendezvous::signed::{SignedStore, in_run};
use crate::rendezvous::start::Start;
use crate::sys;
use crate::timeouts::{LAST_PROBE, PROBE_PAUSE, RANK_CONFLICT, REASON_GRACE, RUN_INFO_CHECK, VALUE_PAUSE};
use crate::types::Rank;

/// How far this rank has come in a run.
enum JoinState {
    /// There is no run info.
    Nothing,
    /// The run info cannot be trusted. It may be that of a former run; at the deadline, this is
    /// the error.
    Untrusted(StoreError),
    /// The rank waits for rank 0 to send the secret.
    AwaitsSecret(AwaitsSecret),
    /// The rank knows the secret, listens, and waits for the table.
    Listening { attempt: Attempt, endpoint: Endpoint, identity: Identity, mine: Box<PeerInfo>, conflict: Option<Box<Conflict>> },
    /// The run has ended before this rank could join it.
    Missed(Identity),
    /// This process has been in the run as this rank. Rank 0 will announce another.
    Former,
}

/// Another process has claimed this rank.
struct Conflict {
    holder: PeerInfo,
    /// When this rank noticed.
    since: Instant,
    /// Whether that process answered then. If not, it is of a former run.
    was_alive: bool,
}

/// A rank that waits for the secret.
struct AwaitsSecret {
    attempt: Attempt,
    run: Run,
    /// This rank's public key, as it is in the store.
    mine: KeyShare,
    /// Rank 0's public key.
    theirs: [u8; 32],
    /// The public key of another process that has claimed this rank, and when this rank noticed.
    conflict: Option<(KeyShare, Instant)>,
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
    let mut announced: Option<Vec<u8>> = None;
    let mut state = JoinState::Nothing;
    let last_look = start.deadline - (start.left() / 4).min(LAST_PROBE);
    let mut seen = Seen { last_look, other_job: None, zero: None, living: None, dialled: None };
    let (mut end, mut gone) = (None, None);
    loop {
        if let Some(failure) = start.absence(0) {
            return Err(failure.error());
        }
        let now = Instant::now();
        let is_late = now >= start.deadline && (now >= start.deadline + REASON_GRACE || !may_hear_of_rank_0(start, &state));
        let patience = match now < start.deadline {
            true => RUN_INFO_CHECK.min(start.left()),
            false if is_late => Duration::ZERO,
            false => RUN_INFO_CHECK,
        };
        let current = match (start.store.get(run_info::NAME, patience), end.take()) {
            // Another job has left this file. Rank 0 will replace it.
            (Err(problem @ StoreError::OtherJob { .. }), _) if !is_late => {
                seen.other_job = Some(problem);
                continue;
            }
            // The store may have ended with rank 0. Then there will be no other run.
            (Err(_), Some(end)) => return Err(end),
            // The store of a former start of this process closes, and rank 0 will serve another.
            (Err(_), None) if !is_late && state.is_outside() && comes_again(start) && reconnects(start)? => {
                (announced, gone, state) = (None, None, JoinState::Nothing);
                continue;
            }
            (Err(problem), None) => return Err(taken(start, &state).unwrap_or_else(|| problem.at(start.store.url()))),
            (Ok(current), _) => current,
        };
        // A file ends when all ranks have joined. Rank 0 also removes the file of a former run, and
        // announces another run soon.
        gone = if current.is_none() && announced.is_some() { gone.or(Some(now)) } else { None };
        if gone.is_some_and(|since| since.elapsed() >= RANK_CONFLICT)
            && let Some(error) = taken(start, &state).or_else(|| started_without(start, &state, &seen))
        {
            return Err(error);
        }
        let is_missed = matches!(state, JoinState::Missed(_));
        if let Some(current) = current.filter(|current| is_missed || announced.as_ref() != Some(current)) {
            // Closes the listener, with whatever processes of a former run may have sent to it.
            drop(std::mem::replace(&mut state, JoinState::Nothing));
            (seen.living, seen.zero) = (None, None);
            state = begin(start, ip, &current, &mut seen)?;
            announced = Some(current);
        }
        state = match advance(start, ip, state, &mut seen, is_late)? {
            Advanced::Joined(endpoint, identity, table) => return Ok((endpoint, identity, table)),
            // A growth has one run.
            Advanced::Waits(_, Some(error)) if start.absence.is_some() => return Err(error),
            Advanced::Waits(state, error) => {
                end = error;
                state
            }
        };
        if is_late {
            return Err(too_late(start, state, seen, began));
        }
    }
}

impl JoinState {
    /// Returns whether this rank is in no run.
    fn is_outside(&self) -> bool {
        matches!(self, JoinState::Nothing | JoinState::Untrusted(_) | JoinState::Missed(_) | JoinState::Former)
    }
}

/// Connects to the store again, if that is possible.
fn reconnects(start: &Start<'_>) -> Result<bool> {
    start.at_store(start.store.reconnect(start.left()))
}

/// What a rank has seen of others, for the error at the deadline.
struct Seen {
    /// When it looks which ranks live, if rank 0 does not.
    last_look: Instant,
    /// Another job used the store.
    other_job: Option<StoreError>,
    /// The peer info of rank 0 in the run.
    zero: Option<PeerInfo>,
    /// The ranks that answered, if rank 0 did not.
    living: Option<Vec<Rank>>,
    /// When this rank last dialled an address that is not authenticated.
    dialled: Option<Instant>,
}

impl Seen {
    /// Returns whether this rank may dial an address that is not authenticated again.
    fn may_dial(&mut self) -> bool {
        let may = self.dialled.is_none_or(|at| at.elapsed() >= PROBE_PAUSE);
        if may {
            self.dialled = Some(Instant::now());
        }
        may
    }
}

/// What a look at the store leads to.
enum Advanced {
    Joined(Endpoint, Identity, PeerTable),
    /// The rank waits on. The run may have ended with this error.
    Waits(JoinState, Option<Error>),
}

/// Looks for what this rank waits for.
fn advance(start: &Start<'_>, ip: IpAddr, state: JoinState, seen: &mut Seen, is_late: bool) -> Result<Advanced> {
    Ok(match state {
        JoinState::AwaitsSecret(waiting @ AwaitsSecret { conflict: None, .. }) => {
            Advanced::Waits(learn(start, ip, waiting, seen)?, None)
        }
        JoinState::AwaitsSecret(AwaitsSecret { run, conflict: Some((ref holder, since)), .. })
            if since.elapsed() >= RANK_CONFLICT && seen.may_dial() && listens(start, &run) =>
        {
            return Err(rank_taken(start, &holder.process, holder.shown()));
        }
        JoinState::Listening { attempt, endpoint, identity, mine, conflict } => {
            if seen.zero.is_none() {
                seen.zero = rank_0(&SignedStore::new(start.store, &identity));
            }
            if Instant::now() >= seen.last_look && seen.living.is_none() {
                seen.living = Some(living_ranks(start, &identity));
            }
            let found = look_for_table(start, &identity, &mine, conflict.as_deref(), is_late)?;
            let end = match found {
                Found::PeerTable(table) => return Ok(Advanced::Joined(endpoint, identity, table)),
                Found::End(error) => Some(error),
                Found::Nothing => None,
            };
            Advanced::Waits(JoinState::Listening { attempt, endpoint, identity, mine, conflict }, end)
        }
        // The run info has to change.
        other => {
            std::thread::sleep(VALUE_PAUSE);
            Advanced::Waits(other, None)
        }
    })
}

/// Returns whether rank 0 may still say why the start failed: it gives up at its own deadline.
fn may_hear_of_rank_0(start: &Start<'_>, state: &JoinState) -> bool {
    match state {
        JoinState::Nothing | JoinState::Untrusted(_) | JoinState::Missed(_) | JoinState::Former => false,
        JoinState::AwaitsSecret(_) => true,
        JoinState::Listening { identity, .. } => lives(start, identity, 0),
    }
}

/// Returns the error of a rank that another process has claimed, if that process is of this run.
fn taken(start: &Start<'_>, state: &JoinState) -> Option<Error> {
    let (holder, shown) = match state {
        JoinState::Listening { conflict: Some(conflict), .. } if conflict.was_alive => {
            (conflict.holder.process(), conflict.holder.process())
        }
        JoinState::AwaitsSecret(AwaitsSecret { conflict: Some((holder, _)), .. }) => (holder.process.clone(), holder.shown()),
        _ => return None,
    };
    Some(rank_taken(start, &holder, shown))
}

/// Returns the error of a rank that a process holds. `shown` is that process in messages.
fn rank_taken(start: &Start<'_>, holder: &str, shown: String) -> Error {
    let second = start.process();
    match holder == second {
        true => Error::RankTaken { rank: start.rank, first: second, second: ANOTHER_START.to_owned() },
        false => Error::RankTaken { rank: start.rank, first: shown, second },
    }
}

/// Returns rank 0's peer info, if it is in the store.
fn rank_0(signed: &SignedStore<'_>) -> Option<PeerInfo> {
    signed.get(&peer_info_of(0), 0, Duration::ZERO).ok().flatten().and_then(|bytes| PeerInfo::decode(&bytes))
}

/// Returns the error of a rank whose run has started without it: its rank 0 lives, and has removed
/// the run info. So another process has this rank.
fn started_without(start: &Start<'_>, state: &JoinState, seen: &Seen) -> Option<Error> {
    let (JoinState::Listening { identity, .. } | JoinState::Missed(identity)) = state else { return None };
    let zero = seen.zero.as_ref().filter(|zero| answers(start, identity, zero, RUN_INFO_CHECK));
    zero.map(|_| Error::RankTaken { rank: start.rank, first: "another process".to_owned(), second: start.process() })
}

/// Enters the run of a run info, without waiting for other ranks.
fn begin(start: &Start<'_>, ip: IpAddr, announced: &[u8], seen: &mut Seen) -> Result<JoinState> {
    let Some(run_info) = RunInfo::decode(announced) else {
        let what = format!("its value of {:?} is no run info that this version of kolo knows", run_info::NAME);
        return Ok(JoinState::Untrusted(StoreError::Foreign(what)));
    };
    let run = run_info.run;
    match (run_info.secret, start.identity.secret()) {
        (Source::Given { .. }, Some(secret)) => {
            let identity = start.identity.clone().of_run(run, secret);
            if !run_info.is_of(run_info::NAME, start.store, &identity) {
                return Ok(JoinState::Untrusted(StoreError::Forged { key: run_info::NAME.to_owned() }));
            }
            let Some(attempt) = Attempt::begin(start, run) else { return Ok(JoinState::Former) };
            announce_self(start, ip, attempt, identity, seen)
        }
        (Source::Shared { secret }, None) => {
            let Some(attempt) = Attempt::begin(start, run) else { return Ok(JoinState::Former) };
            announce_self(start, ip, attempt, start.identity.clone().of_run(run, secret), seen)
        }
        (Source::Agreed { public: theirs }, None) => {
            let Some(attempt) = Attempt::begin(start, run) else { return Ok(JoinState::Former) };
            let mine = KeyShare { public: attempt.keys.public, process: start.process() };
            let key = in_run(&run, &key_share_of(start.rank));
            let patience = start.left().max(RUN_INFO_CHECK);
            let holder = start.at_store(start.store.claim(&key, &mine.encode(), patience))?;
            let holder = KeyShare::decode(&holder);
            if holder.is_none() {
                // The value is no public key, so no rank wrote it.
                start.at_store(start.store.set(&key, &mine.encode(), patience))?;
            }
            let conflict = holder.filter(|holder| holder.public != mine.public).map(|holder| (holder, Instant::now()));
            Ok(JoinState::AwaitsSecret(AwaitsSecret { attempt, run, mine, theirs, conflict, is_forged: false }))
        }
        // Either this rank or rank 0 was given a secret, and the other was not.
        (Source::Given { .. }, None) | (_, Some(_)) => Ok(JoinState::Untrusted(StoreError::Secret)),
    }
}

/// Checks whether rank 0 has sent the secret.
fn learn(start: &Start<'_>, ip: IpAddr, waiting: AwaitsSecret, seen: &mut Seen) -> Result<JoinState> {
    let AwaitsSecret { ref attempt, run, theirs, .. } = waiting;
    let Some(wrapped) = start.at_store(start.store.get(&in_run(&run, &secret_for(start.rank)), RUN_INFO_CHECK))? else {
        // Another process may have overwritten this rank's public key with something else.
        let key = in_run(&run, &key_share_of(start.rank));
        let holder = start.at_store(start.store.get(&key, Duration::ZERO))?;
        if holder.is_none_or(|holder| KeyShare::decode(&holder).is_none()) {
            start.at_store(start.store.set(&key, &waiting.mine.encode(), start.left().max(RUN_INFO_CHECK)))?;
        }
        return Ok(JoinState::AwaitsSecret(waiting));
    };
    let exchange = Exchange { job: start.identity.job(), run, rank: start.rank, publics: [theirs, attempt.keys.public] };
    let Some(secret) = exchange.unwrap(&attempt.keys, &wrapped) else {
        // Rank 0 will overwrite it. In a store without claims, the value may be for another process
        // that had this rank.
        std::thread::sleep(VALUE_PAUSE);
        return Ok(JoinState::AwaitsSecret(AwaitsSecret { is_forged: true, ..waiting }));
    };
    announce_self(start, ip, waiting.attempt, start.identity.clone().of_run(run, secret).agreed(), seen)
}

/// Opens the endpoint, and writes this rank's peer info.
fn announce_self(start: &Start<'_>, ip: IpAddr, attempt: Attempt, identity: Identity, seen: &mut Seen) -> Result<JoinState> {
    attempt.publishes();
    let signed = SignedStore::new(start.store, &identity);
    let endpoint = Endpoint::open(start, ip, &identity).inspect_err(|error| {
        let failure = OwnFailure { rank: start.rank, host: start.host(), pid: std::process::id(), why: error.to_string() };
        if let Err(problem) = signed.claim(&peer_info_of(start.rank), start.rank, &failure.encode(), REASON_GRACE) {
            crate::log::debug!(%problem, "cannot tell the other ranks why this rank does not start");
        }
    })?;
    let mine = endpoint.peer(start)?;
    let patience = start.left().max(RUN_INFO_CHECK);
    seen.zero = rank_0(&signed);
    let holder = loop {
        match signed.claim(&peer_info_of(start.rank), start.rank, &mine.encode(), RUN_INFO_CHECK) {
            // The file has been removed, or another process holds its lock.
            Err(StoreError::Unreachable { .. }) => return Ok(JoinState::Missed(identity)),
            Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::TimedOut && !start.left().is_zero() => {}
            holder => break start.at_store(holder)?,
        }
    };
    let holder = PeerInfo::decode(&holder).filter(|holder| holder.instance != mine.instance);
    if holder.is_some() {
        start.at_store(signed.set(&standby_of(start.rank), start.rank, &mine.encode(), patience))?;
    }
    let conflict = holder.map(|holder| {
        let was_alive = answers(start, &identity, &holder, RUN_INFO_CHECK);
        Box::new(Conflict { holder, since: Instant::now(), was_alive })
    });
    Ok(JoinState::Listening { attempt, endpoint, identity, mine: Box::new(mine), conflict })
}

/// Looks for a table that contains this rank.
fn look_for_table(
    start: &Start<'_>,
    identity: &Identity,
    mine: &PeerInfo,
    conflict: Option<&Conflict>,
    is_late: bool,
) -> Result<Found> {
    if let Some(Conflict { holder, since, was_alive }) = conflict {
        // Either a living process has this rank, or this is a former run and rank 0 will announce
        // another.
        let is_due = is_late || since.elapsed() >= RANK_CONFLICT;
        if is_due && answers(start, identity, holder, RUN_INFO_CHECK) || is_late && *was_alive {
            return Err(rank_taken(start, &holder.process(), holder.process()));
        }
        std::thread::sleep(VALUE_PAUSE);
        return Ok(Found::Nothing);
    }
    let signed = SignedStore::new(start.store, identity);
    let bytes = start.at_store(signed.get(TABLE, 0, table_patience(start)))?;
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
        std::thread::sleep(VALUE_PAUSE);
        return Ok(Found::Nothing);
    };
    let zero = start.at_store(signed.get(&peer_info_of(0), 0, Duration::ZERO))?.and_then(|bytes| PeerInfo::decode(&bytes));
    if is_late || zero.is_some_and(|zero| answers(start, identity, &zero, REASON_GRACE)) {
        return end.map(|refusal| Found::PeerTable(PeerTable::Refused(refusal)));
    }
    std::thread::sleep(VALUE_PAUSE);
    Ok(Found::End(end.map_or_else(|error| error, |refusal| refusal.error(&start.store.url()))))
}

/// Returns how long to wait for the table before looking for a new run info. In a large job it
/// is longer, so that the ranks that wait do not keep the store busy: the store answers each of them
/// twice in that time. It ends before the last look at the other ranks.
fn table_patience(start: &Start<'_>) -> Duration {
    let patience = RUN_INFO_CHECK * (1 + start.world_size / RANKS_OF_A_POLL).try_into().unwrap_or(u32::MAX);
    patience.min(start.left().saturating_sub(LAST_PROBE)).max(RUN_INFO_CHECK)
}

/// Returns why this rank has not met the others by the deadline.
fn too_late(start: &Start<'_>, state: JoinState, seen: Seen, began: Instant) -> Error {
    if let Some(error) = taken(start, &state) {
        return error;
    }
    let ranks = match (state, seen) {
        (JoinState::Untrusted(problem), _) | (JoinState::Nothing, Seen { other_job: Some(problem), .. }) => {
            return problem.at(start.store.url());
        }
        (JoinState::AwaitsSecret(AwaitsSecret { run, is_forged: true, .. }), _) => {
            return StoreError::Forged { key: in_run(&run, &secret_for(start.rank)) }.at(start.store.url());
        }
        (JoinState::Nothing | JoinState::AwaitsSecret(_) | JoinState::Missed(_) | JoinState::Former, _) => vec![0],
        (JoinState::Listening { identity, .. }, Seen { living, .. }) => missing(start, &identity, living.as_deref()),
    };
    Error::Missing { ranks, world_size: start.world_size, store: start.store.url(), waited: began.elapsed() }
}

/// The second process of an error, if it is the first one, too.
pub(super) const ANOTHER_START: &str = "another start in that process";

/// How many ranks may look for the table in a [`RUN_INFO_CHECK`].
const RANKS_OF_A_POLL: usize = 1024;

/// The most ranks that a rank other than 0 checks for.
const MOST_NAMED: usize = 1024;

/// The most ranks that are probed at once. A probe of an unreachable rank takes [`RUN_INFO_CHECK`].
const PROBES_AT_ONCE: usize = 64;

/// Returns whether the process that wrote a peer info lives: its listener admits ranks of this run,
/// or refuses them for their version. Only a process with the secret gives either answer.
fn answers(start: &Start<'_>, identity: &Identity, holder: &PeerInfo, patience: Duration) -> bool {
    let hello = Hello::new(Purpose::Probe, 0, start.rank, holder.rank);
    let answer = listener::dial(holder.address, identity, &hello, Instant::now() + patience);
    matches!(answer, Ok(_) | Err(DialError::Refused(Refusal::Version { .. })))
}

/// Returns whether a process accepts connections at the address of this rank in the store. The
/// address is not authenticated: this rank does not know the secret.
fn listens(start: &Start<'_>, run: &Run) -> bool {
    let stored = start.store.get(&in_run(run, &peer_info_of(start.rank)), Duration::ZERO);
    let holder = stored.ok().flatten().and_then(|stored| PeerInfo::decode(stored.get(MAC..)?));
    let connects =
        |address: SocketAddr| sys::above_standard(|| std::net::TcpStream::connect_timeout(&address, RUN_INFO_CHECK)).is_ok();
    holder.is_some_and(|holder| connects(holder.address))
}

/// Returns whether a process that has this rank in the run lives.
fn lives(start: &Start<'_>, identity: &Identity, rank: Rank) -> bool {
    let signed = SignedStore::new(start.store, identity);
    [peer_info_of(rank), standby_of(rank)].iter().any(|name| {
        let stored = signed.get(name, rank, Duration::ZERO);
        let peer = stored.ok().flatten().and_then(|bytes| PeerInfo::decode(&bytes)).filter(|peer| peer.rank == rank);
        peer.is_some_and(|peer| answers(start, identity, &peer, RUN_INFO_CHECK))
    })
}

/// Returns the other ranks that live, or all of them if rank 0 does: then its table names those
/// that do not. Ranks that are not probed by the deadline count as living.
fn living_ranks(start: &Start<'_>, identity: &Identity) -> Vec<Rank> {
    let others: Vec<Rank> = (0..start.world_size.min(MOST_NAMED)).filter(|&rank| rank != start.rank).collect();
    if lives(start, identity, 0) {
        return others;
    }
    let (next, living) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let probe = || {
        while let Some(&rank) = others.get(next.fetch_add(1, Ordering::Relaxed)) {
            if Instant::now() >= start.deadline || rank != 0 && lives(start, identity, rank) {
                living.lock().push(rank);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..others.len().min(PROBES_AT_ONCE) {
            // If no thread can start, this one probes the remaining ranks.
            if thread::Builder::new().name("kolo-probe".to_owned()).spawn_scoped(scope, probe).is_err() {
                break;
            }
        }
        probe();
    });
    living.into_inner()
}

/// Returns the other ranks that have no peer info in the store, or were not among the `living`, as
/// far as a rank other than 0 can tell.
fn missing(start: &Start<'_>, identity: &Identity, living: Option<&[Rank]>) -> Vec<Rank> {
    let has_peer_info = |rank: Rank| {
        let found = start.store.get(&in_run(&identity.run(), &peer_info_of(rank)), Duration::ZERO);
        !matches!(found, Ok(None))
    };
    let is_there = |rank: Rank| has_peer_info(rank) && living.is_none_or(|living| living.contains(&rank));
    let others = (0..start.world_size.min(MOST_NAMED)).filter(|&rank| rank != start.rank);
    let missing: Vec<Rank> = others.filter(|&rank| !is_there(rank)).collect();
    // All ranks are there, but no table came. Rank 0 has ended, or this is a former run.
    if missing.is_empty() { vec![0] } else { missing }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::config::Settings;
    use crate::network::listener::handshake;
    use crate::network::peer_info;
    use crate::rendezvous::store::{self, StoreUrl};

    /// Returns whether rank 1 takes rank 0 for alive if rank 0's listener gives this reply to a
    /// hello.
    fn is_alive(identity: &Identity, reply: impl Fn(&[u8]) -> Vec<u8> + Sync) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        let store = store::open(&StoreUrl::Hash("alive".to_owned()), true, identity, deadline).unwrap();
        let (settings, identity) = (Settings::default(), identity.clone());
        let start = Start {
            rank: 1,
            world_size: 2,
            identity,
            store: &*store,
            store_url: None,
            settings: &settings,
            deadline,
            absence: None,
        };
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

    /// Each probe takes as long as possible, and there is no time for one after the other.
    #[test]
    fn ranks_that_do_not_answer_are_not_living() {
        const WORLD: usize = 16;
        let deadline = Instant::now() + RUN_INFO_CHECK * (WORLD as u32 / 2);
        let identity = Identity::new("job", Some([7; 32]));
        let store = store::open(&StoreUrl::Hash("silent".to_owned()), true, &identity, deadline).unwrap();
        let settings = Settings::default();
        let start = Start {
            rank: 1,
            world_size: WORLD,
            identity,
            store: &*store,
            store_url: None,
            settings: &settings,
            deadline,
            absence: None,
        };
        // The system accepts connections, and no program answers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let signed = SignedStore::new(start.store, &start.identity);
        for rank in 0..WORLD {
            let silent = PeerInfo { address: listener.local_addr().unwrap(), ..peer_info::sample(rank) };
            signed.set(&peer_info_of(rank), rank, &silent.encode(), Duration::from_secs(1)).unwrap();
        }
        let living = living_ranks(&start, &start.identity);
        assert!(living.is_empty(), "{living:?}");
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
