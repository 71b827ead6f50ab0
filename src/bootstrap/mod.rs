//! From a rank and a store to connected ranks.
//!
//! 1. Rank 0 makes up the number of this run, and announces it ([`announcement`]).
//! 2. Every rank learns the secret of the run: it was given it, finds it in a store that only ranks read, or agrees on it with
//!    rank 0 ([`key_exchange`]). Until then it listens nowhere, and believes nothing that it reads.
//! 3. Every rank opens its [`endpoint`], and puts a [`peer_info::PeerInfo`] into the store.
//! 4. Rank 0 collects them and publishes the [`peer_info::PeerTable`]: the information of all ranks, or why there will be no start.
//! 5. Ranks that seem to be on one host prove that they can share memory ([`host_setup`]).
//!
//! After that the store is not needed any more. Links between ranks are opened when they are first used.
//!
//! From step 3 on, all that ranks put into the store is [`signed`].
//!
//! # Former runs
//!
//! A store may hold what a crashed run left. So all keys but that of the announcement are named after the run. A rank that finds
//! the announcement of a former run takes part in it: it puts its information there and waits for a table that has this very information in it. No
//! former run's table has; and when the announcement changes, the rank closes its listener and starts over.

pub(crate) mod address;
pub(crate) mod announcement;
mod endpoint;
pub(crate) mod fabric;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
pub(crate) mod host_group;
mod host_setup;
pub(crate) mod key_exchange;
pub(crate) mod launcher;
mod lending;
pub(crate) mod listener;
mod network;
pub(crate) mod peer_info;
mod rendezvous;
mod signed;
pub(crate) mod store;

use std::sync::Arc;
use std::time::Instant;

use crate::config::{Settings, SharedSettings, TlsFiles, Transport};
use crate::error::{Cause, Error, Result};
use crate::sys;
use crate::trace::{RankOfJob, Recorder};
use crate::transport::tls::Tls;
use crate::types::{DType, Member, Op, Rank, mix};
use endpoint::Endpoint;
use fabric::Fabric;
use host_setup::{Failed, HostConnections};
use listener::handshake::Identity;
use network::{Lines, Network};
use peer_info::PeerInfo;
use rendezvous::Met;
use store::{Store, StoreUrl};

/// The communicator of all ranks.
const WORLD: u64 = 0;

/// What a rank knows before it meets the others.
pub(crate) struct Start<'a> {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) identity: Identity,
    pub(crate) store: &'a dyn Store,
    /// Where the store is, as far as that helps to choose an address.
    pub(crate) place: Option<StoreUrl>,
    pub(crate) settings: &'a Settings,
    pub(crate) deadline: Instant,
}

impl Start<'_> {
    /// This rank's host, for people.
    fn host(&self) -> String {
        self.settings.host.clone().unwrap_or_else(sys::hostname)
    }
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
    let chosen = address::choose(start.place.as_ref(), start.settings.interface.as_deref(), start.deadline)?;
    tracing::info!(address = %chosen.ip, why = chosen.why, "this rank's address");
    let load = |files: TlsFiles| {
        let kind = format!("read {} {} {}", files.authority.display(), files.certificate.display(), files.key.display());
        let load = move || Tls::load(&files.authority, &files.certificate, &files.key);
        sys::by_deadline(kind, start.deadline, sys::SILENT_FILE, load, Error::os("reading the files of KOLO_TLS_*"))
    };
    let tls = start.settings.tls.clone().map(load).transpose()?;
    let Met { endpoint: Endpoint { listener, mailbox, board }, identity, peers, settings } =
        rendezvous::meet(start, chosen.ip, began)?;
    let members = peers.iter().map(|peer| Member { host: peer.host.as_str().into(), pid: peer.pid }).collect::<Vec<_>>();
    let candidates = candidates(&peers, start.rank, settings.transport);
    let run = peers.iter().fold(0, |run, peer| mix(run, peer.instance));
    let who = RankOfJob { job: start.identity.job().to_owned(), run, rank: start.rank, members: members.clone() };
    let network =
        Network::new(listener, mailbox, board, identity.clone(), peers, start.rank, Lines { sockets: settings.sockets, tls });

    let everybody: Vec<Rank> = (0..start.world_size).collect();
    let connections = match candidates.len() {
        1 => None,
        _ => Some(HostConnections::form(&network, WORLD, start.rank, &everybody, &candidates, None, start.deadline)),
    };
    let connections = connections.transpose().map_err(|failed| peer_failed(failed, &members, began))?;
    let together = connections.as_ref().map_or(vec![start.rank], |connections| connections.members().to_vec());
    let hosts = if together.len() == start.world_size {
        vec![0; start.world_size]
    } else {
        rendezvous::exchange_hosts(start, &identity, &together)?
    };
    if settings.transport == Transport::Shm && hosts.iter().any(|&host| host != hosts[0]) {
        let other = hosts.iter().position(|&host| host != hosts[0]).unwrap_or_default();
        let why = format!("rank {other} ({}) cannot share memory with rank 0 ({})", members[other].host, members[0].host);
        return Err(Error::Unsupported { what: "transport shm", why });
    }
    tracing::info!(rank = start.rank, world = start.world_size, neighbours = together.len(), after = ?began.elapsed(), "ranks have met");
    let recorder = Recorder::new(who, start.settings.trace_dir.clone());
    let fabric = Fabric::of_network(Arc::new(network), WORLD, hosts.into(), connections, recorder);
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

/// The ranks that may be able to share memory with this one, and it.
fn candidates(peers: &[PeerInfo], rank: Rank, transport: Transport) -> Vec<Rank> {
    let mine = &peers[rank].machine;
    if mine.is_empty() || transport == Transport::Tcp {
        return vec![rank];
    }
    (0..peers.len()).filter(|&other| peers[other].machine == *mine).collect()
}
