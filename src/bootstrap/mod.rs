//! From a rank and a store to connected ranks.
//!
//! 1. Every rank opens its [`crate::door`], and puts a [`card::Card`] into the store.
//! 2. Rank 0 collects the cards and publishes the [`card::Book`]: all cards, or why there will be no start.
//! 3. Ranks that seem to be on one host prove that they can share memory ([`host`]).
//!
//! After that the store is not needed any more. Links between ranks are opened when they are first used.
//!
//! # Former runs
//!
//! A store may hold what a crashed run left. So rank 0 first announces a random *generation*, and all other keys are named
//! after it. A rank that finds a generation of a former run puts its card there and waits for a book that has this very card
//! in it; no former run's book has, and when the generation changes it starts over.

mod address;
mod card;
pub(crate) mod fabric;
mod host;
pub(crate) mod launcher;
mod network;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::attempt::Member;
use crate::config::{Settings, SharedSettings, Transport};
use crate::door::handshake::{Identity, random};
use crate::door::{self, Door};
use crate::error::{Cause, Error, Result};
use crate::store::{Place, Store};
use crate::sys::{self, LocalListener};
use crate::types::{DType, Op, Rank};
use crate::wire::{Reader, Writer};
use card::{Book, Card, Refusal};
use fabric::Fabric;
use host::{Failed, Star};
use network::{Mailbox, Network};

/// The communicator of all ranks.
const WORLD: u64 = 0;

/// What a rank knows before it meets the others.
pub(crate) struct Start<'a> {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) identity: Identity,
    pub(crate) store: &'a dyn Store,
    /// Where the store is, as far as that helps to choose an address.
    pub(crate) place: Option<Place>,
    pub(crate) settings: &'a Settings,
    pub(crate) deadline: Instant,
}

/// What it knows afterwards.
pub(crate) struct Connected {
    pub(crate) fabric: Fabric,
    pub(crate) settings: SharedSettings,
    pub(crate) members: Vec<Member>,
}

/// Meets the others.
pub(crate) fn connect(start: &Start<'_>) -> Result<Connected> {
    let began = Instant::now();
    let chosen = address::choose(start.place.as_ref(), start.settings.interface.as_deref())?;
    tracing::info!(address = %chosen.ip, why = chosen.why, "this rank's address");
    let mailbox = Arc::new(Mailbox::default());
    let door = open_door(start, chosen.ip, mailbox.clone())?;
    let card = card(start, &door)?;

    let (generation, cards, settings) = meet(start, &card, began)?;
    let members = cards.iter().map(|card| Member { host: card.host.as_str().into(), pid: card.pid }).collect::<Vec<_>>();
    let candidates = candidates(&cards, start.rank, settings.transport);
    let network = Network::new(door, mailbox, start.identity.clone(), cards, start.rank, settings.sockets);

    let everybody: Vec<Rank> = (0..start.world_size).collect();
    let star = match candidates.len() {
        1 => None,
        _ => Some(Star::form(&network, WORLD, start.rank, &everybody, &candidates, start.deadline)),
    };
    let star = star.transpose().map_err(|failed| peer_failed(failed, &members, began))?;
    let together = star.as_ref().map_or(vec![start.rank], |star| star.members().to_vec());
    let hosts = if together.len() == start.world_size {
        vec![0; start.world_size]
    } else {
        exchange_hosts(start, &generation, &together)?
    };
    if settings.transport == Transport::Shm && hosts.iter().any(|&host| host != hosts[0]) {
        let other = hosts.iter().position(|&host| host != hosts[0]).unwrap_or_default();
        let why = format!("rank {other} ({}) cannot share memory with rank 0 ({})", members[other].host, members[0].host);
        return Err(Error::Unsupported { what: "transport shm", why });
    }
    tracing::info!(rank = start.rank, world = start.world_size, neighbours = together.len(), after = ?began.elapsed(), "ranks have met");
    let fabric = Fabric::of_network(Arc::new(network), WORLD, hosts.into(), star);
    Ok(Connected { fabric, settings, members })
}

/// An error of the start, because of a peer.
pub(crate) fn peer_failed(failed: Failed, members: &[Member], began: Instant) -> Error {
    let Failed { rank, cause } = failed;
    let after = began.elapsed();
    let cause = if let Cause::Silent { .. } = cause { Cause::Silent { deadline: after } } else { cause };
    let Member { host, pid } = members[rank].clone();
    Error::Peer { rank, host, pid, op: Op::Connect, seq: 0, dtype: DType::U8, count: 0, after, cause }
}

fn open_door(start: &Start<'_>, ip: std::net::IpAddr, mailbox: Arc<Mailbox>) -> Result<Door> {
    let listener = TcpListener::bind((ip, 0)).map_err(Error::os(format!("listening at {ip}")))?;
    let name = door::random_name();
    let local = match LocalListener::bind(&name) {
        Ok(listener) => Some((name, listener)),
        Err(error) => {
            tracing::debug!(%error, "this rank cannot share memory with others");
            None
        }
    };
    let (rank, world) = (start.rank as u32, start.world_size as u32);
    let admit = move |hello: door::handshake::Hello, stream| {
        if hello.to == rank && hello.from < world && hello.from != rank {
            mailbox.admit(hello, stream);
        }
    };
    Door::open(Some(listener), local, start.identity.clone(), admit).map_err(Error::os("opening the door"))
}

fn card(start: &Start<'_>, door: &Door) -> Result<Card> {
    let address =
        door.address().ok_or_else(|| Error::Unsupported { what: "a network", why: "the door has no address".to_owned() })?;
    let local_name = door.name().unwrap_or_default().to_owned();
    let neighbourhood = sys::boot_identity().filter(|_| !local_name.is_empty());
    let declared = start.settings.host.as_deref().unwrap_or_default();
    Ok(Card {
        version: card::version(),
        rank: start.rank,
        world_size: start.world_size,
        instance: u128::from_le_bytes(random()) as u64,
        host: start.settings.host.clone().unwrap_or_else(sys::hostname),
        pid: std::process::id(),
        neighbourhood: neighbourhood.map_or_else(String::new, |identity| format!("{identity} {declared}")),
        address,
        local_name,
    })
}

/// The ranks that may be able to share memory with this one, and it.
fn candidates(cards: &[Card], rank: Rank, transport: Transport) -> Vec<Rank> {
    let mine = &cards[rank].neighbourhood;
    if mine.is_empty() || transport == Transport::Tcp {
        return vec![rank];
    }
    (0..cards.len()).filter(|&other| cards[other].neighbourhood == *mine).collect()
}

/// How long to wait for one key before looking whether the generation has changed.
const GLANCE: Duration = Duration::from_millis(300);

/// How much later than rank 0 the others give up, so that they hear its reason.
const GRACE: Duration = Duration::from_secs(2);

/// Exchanges cards: returns the generation, all cards, and the settings of rank 0.
fn meet(start: &Start<'_>, card: &Card, began: Instant) -> Result<(String, Vec<Card>, SharedSettings)> {
    let (generation, book) = if start.rank == 0 { collect(start, card, began)? } else { join(start, card, began)? };
    match book {
        Book::Members { cards, settings } => Ok((generation, cards, settings)),
        Book::Refused(refusal) => Err(refusal.error(&start.store.url())),
    }
}

fn store_error<T>(start: &Start<'_>, result: Result<T, crate::error::StoreProblem>) -> Result<T> {
    result.map_err(|problem| problem.at(start.store.url()))
}

fn left(start: &Start<'_>) -> Duration {
    start.deadline.saturating_duration_since(Instant::now())
}

/// What rank 0 does.
fn collect(start: &Start<'_>, mine: &Card, began: Instant) -> Result<(String, Book)> {
    let generation = format!("{:016x}", u128::from_le_bytes(random()) as u64);
    let patience = left(start).max(GLANCE);
    store_error(start, start.store.set("generation", generation.as_bytes(), patience))?;
    store_error(start, start.store.claim(&format!("{generation}/rank/0"), &mine.encode(), patience))?;
    let mut cards: Vec<Option<Card>> = vec![None; start.world_size];
    cards[0] = Some(mine.clone());
    let book = 'book: loop {
        let missing: Vec<Rank> = (0..start.world_size).filter(|&rank| cards[rank].is_none()).collect();
        let Some(&first) = missing.first() else {
            let settings = start.settings.shared;
            break Book::Members { cards: cards.into_iter().flatten().collect(), settings };
        };
        if left(start).is_zero() {
            let waited = began.elapsed();
            break Book::Refused(Refusal::Missing { ranks: missing, world_size: start.world_size, waited });
        }
        // The first is waited for; what of the others is there is taken along, so that disagreements show at once.
        for &rank in &missing {
            let patience = if rank == first { GLANCE.min(left(start)) } else { Duration::ZERO };
            let bytes = store_error(start, start.store.get(&format!("{generation}/rank/{rank}"), patience))?;
            let card = bytes.and_then(|bytes| Card::decode(&bytes)).filter(|card| card.rank == rank);
            if let Some(other) = card.as_ref().filter(|card| mine.disagreement(card).is_some()) {
                break 'book Book::Refused(Refusal::Disagrees { other: Box::new(other.clone()), zero: Box::new(mine.clone()) });
            }
            cards[rank] = card;
        }
        let current = store_error(start, start.store.get("generation", Duration::ZERO))?;
        if let Some(other) = current.filter(|current| *current != generation.as_bytes()) {
            let other = String::from_utf8_lossy(&other).into_owned();
            let second = store_error(start, start.store.get(&format!("{other}/rank/0"), GLANCE))?;
            let second =
                second.and_then(|bytes| Card::decode(&bytes)).map_or_else(|| "another process".to_owned(), |card| card.who());
            return Err(Error::RankTaken { rank: 0, first: mine.who(), second });
        }
    };
    store_error(start, start.store.set(&format!("{generation}/book"), &book.encode(), GRACE))?;
    Ok((generation, book))
}

/// What the others do.
fn join(start: &Start<'_>, mine: &Card, began: Instant) -> Result<(String, Book)> {
    let deadline = start.deadline + GRACE;
    let is_late = || Instant::now() >= deadline;
    let mut generation: Option<String> = None;
    let mut conflict: Option<(Card, Instant)> = None;
    loop {
        let current = store_error(start, start.store.get("generation", GLANCE))?;
        let current = current.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if let Some(found) = current.filter(|found| generation.as_ref() != Some(found)) {
            let key = format!("{found}/rank/{}", start.rank);
            let holder = store_error(start, start.store.claim(&key, &mine.encode(), left(start).max(GLANCE)))?;
            let holder = Card::decode(&holder).filter(|holder| holder.instance != mine.instance);
            conflict = holder.map(|holder| (holder, Instant::now()));
            generation = Some(found);
        }
        if let Some((holder, since)) = &conflict {
            // Either a living process has this rank, or the generation is a former run's and will change.
            if since.elapsed() >= CONFLICT_PATIENCE || is_late() {
                return Err(Error::RankTaken { rank: start.rank, first: holder.who(), second: mine.who() });
            }
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        if let Some(generation) = &generation {
            let bytes = store_error(start, start.store.get(&format!("{generation}/book"), GLANCE))?;
            match bytes.and_then(|bytes| Book::decode(&bytes)) {
                Some(Book::Members { cards, .. }) if cards.len() != start.world_size => {
                    let theirs = cards.len();
                    let host = cards.first().map_or_else(String::new, |card| card.host.clone());
                    return Err(Error::WorldSize { rank: 0, host, theirs, my_rank: start.rank, mine: start.world_size });
                }
                Some(Book::Members { cards, settings }) if cards[start.rank].instance == mine.instance => {
                    return Ok((generation.clone(), Book::Members { cards, settings }));
                }
                Some(Book::Refused(Refusal::Disagrees { other, zero }))
                    if zero.disagreement(mine).is_some() || zero.world_size == mine.world_size =>
                {
                    return Ok((generation.clone(), Book::Refused(Refusal::Disagrees { other, zero })));
                }
                Some(book @ Book::Refused(Refusal::Missing { .. })) => return Ok((generation.clone(), book)),
                // A former run's.
                _ => {}
            }
        }
        if is_late() {
            return Err(Error::Missing {
                ranks: missing(start, generation.as_deref()),
                world_size: start.world_size,
                store: start.store.url(),
                waited: began.elapsed(),
            });
        }
    }
}

/// How long a rank that finds its place taken waits for the generation to turn out to be a former run's.
const CONFLICT_PATIENCE: Duration = Duration::from_millis(700);

/// The ranks without a card, as far as another than rank 0 can tell.
fn missing(start: &Start<'_>, generation: Option<&str>) -> Vec<Rank> {
    let Some(generation) = generation else { return vec![0] };
    let has_card = |rank: &Rank| {
        let found = start.store.get(&format!("{generation}/rank/{rank}"), Duration::ZERO);
        !matches!(found, Ok(None))
    };
    let missing: Vec<Rank> = (0..start.world_size.min(1024)).filter(|rank| !has_card(rank)).collect();
    // All cards are there, but no book: rank 0 has ended, or this generation is a former run's.
    if missing.is_empty() { vec![0] } else { missing }
}

/// Learns which ranks share memory, when not all do: the lowest rank of each host says who its ranks are, and rank 0 puts
/// it together.
fn exchange_hosts(start: &Start<'_>, generation: &str, together: &[Rank]) -> Result<Vec<usize>> {
    let patience = left(start).max(GLANCE);
    let key = |rank: Rank| format!("{generation}/host/{rank}");
    if together[0] == start.rank {
        let mut writer = Writer::default();
        writer.list(together, |writer, &rank| _ = writer.number(rank as u64));
        store_error(start, start.store.set(&key(start.rank), &writer.0, patience))?;
    }
    let all = format!("{generation}/hosts");
    let silent = |what: &str| {
        let problem = crate::error::StoreProblem::Timeout { key: what.to_owned(), waited: patience };
        problem.at(start.store.url())
    };
    if start.rank != 0 {
        let bytes = store_error(start, start.store.get(&all, left(start).max(GLANCE) + GRACE))?.ok_or_else(|| silent(&all))?;
        let hosts = Reader::new(&bytes).list(Reader::size).filter(|hosts| hosts.len() == start.world_size);
        return hosts.ok_or_else(|| silent(&all));
    }
    let mut hosts: Vec<Option<usize>> = vec![None; start.world_size];
    for rank in 0..start.world_size {
        // A rank that nobody before it has named is the lowest of its host.
        if hosts[rank].is_none() {
            let bytes =
                store_error(start, start.store.get(&key(rank), left(start).max(GLANCE)))?.ok_or_else(|| silent(&key(rank)))?;
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
    store_error(start, start.store.set(&all, &writer.0, patience))?;
    Ok(hosts)
}
