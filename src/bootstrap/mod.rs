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

pub(crate) mod address;
pub(crate) mod card;
pub(crate) mod fabric;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod host;
pub(crate) mod launcher;
mod meeting;
mod network;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use crate::attempt::Member;
use crate::config::{Settings, SharedSettings, Transport};
use crate::door::handshake::{Identity, random};
use crate::door::{self, Door};
use crate::error::{Cause, Error, Result};
use crate::health::{Boards, Recorder, Who};
use crate::store::{Place, Store};
use crate::sys::{self, LocalListener};
use crate::transport::tls::Tls;
use crate::types::{DType, Op, Rank, mix};
use card::Card;
use fabric::Fabric;
use host::{Failed, Star};
use network::{Lines, Mailbox, Network, Reception};

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
    let tls = start.settings.tls.as_ref().map(|files| Tls::load(&files.authority, &files.certificate, &files.key)).transpose()?;
    let mailbox = Arc::new(Mailbox::default());
    let boards = Arc::new(Boards::default());
    let door = open_door(start, chosen.ip, mailbox.clone(), boards.clone())?;
    let card = card(start, &door)?;

    let (generation, cards, settings) = meeting::meet(start, &door, &card, began)?;
    let members = cards.iter().map(|card| Member { host: card.host.as_str().into(), pid: card.pid }).collect::<Vec<_>>();
    let candidates = candidates(&cards, start.rank, settings.transport);
    let identity = door.identity();
    let run = cards.iter().fold(0, |run, card| mix(run, card.instance));
    let who = Who { job: start.identity.job().to_owned(), run, rank: start.rank, members: members.clone() };
    let network = Network::new(door, mailbox, boards, identity, cards, start.rank, Lines { sockets: settings.sockets, tls });

    let everybody: Vec<Rank> = (0..start.world_size).collect();
    let star = match candidates.len() {
        1 => None,
        _ => Some(Star::form(&network, WORLD, start.rank, &everybody, &candidates, None, start.deadline)),
    };
    let star = star.transpose().map_err(|failed| peer_failed(failed, &members, began))?;
    let together = star.as_ref().map_or(vec![start.rank], |star| star.members().to_vec());
    let hosts = if together.len() == start.world_size {
        vec![0; start.world_size]
    } else {
        meeting::exchange_hosts(start, &generation, &together)?
    };
    if settings.transport == Transport::Shm && hosts.iter().any(|&host| host != hosts[0]) {
        let other = hosts.iter().position(|&host| host != hosts[0]).unwrap_or_default();
        let why = format!("rank {other} ({}) cannot share memory with rank 0 ({})", members[other].host, members[0].host);
        return Err(Error::Unsupported { what: "transport shm", why });
    }
    tracing::info!(rank = start.rank, world = start.world_size, neighbours = together.len(), after = ?began.elapsed(), "ranks have met");
    let recorder = Recorder::new(who, start.settings.trace_dir.clone());
    let fabric = Fabric::of_network(Arc::new(network), WORLD, hosts.into(), star, recorder);
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

fn open_door(start: &Start<'_>, ip: std::net::IpAddr, mailbox: Arc<Mailbox>, boards: Arc<Boards>) -> Result<Door> {
    let identity = start.identity.clone();
    let (ip, identity) = match start.store.is_private() && !identity.has_secret() {
        // Until rank 0's secret is known, nobody is let in.
        true => (ip, identity.with_secret(random_secret())),
        false if identity.may_listen() => (ip, identity),
        false => (sys::own_loopback(ip), identity),
    };
    let listener = TcpListener::bind((ip, 0)).map_err(Error::os(format!("listening at {ip}")))?;
    let name = door::random_name();
    let local = match LocalListener::bind(&name) {
        Ok(listener) => Some((name, listener)),
        Err(error) => {
            tracing::debug!(%error, "this rank cannot share memory with others");
            None
        }
    };
    let reception = Reception { rank: start.rank, world: start.world_size, mailbox, boards };
    Door::open(Some(listener), local, identity, reception).map_err(Error::os("opening the door"))
}

fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    secret.chunks_mut(16).for_each(|part| part.copy_from_slice(&random()));
    secret
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
        pid_namespace: sys::process_namespace().unwrap_or(0),
        neighbourhood: neighbourhood.map_or_else(String::new, |identity| format!("{identity} {declared}")),
        address,
        local_name,
        encrypts: start.settings.tls.is_some(),
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
