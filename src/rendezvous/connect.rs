//! Connects the ranks of a job: the rendezvous, then the host groups.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use super::endpoint::Endpoint;
use super::hosts::exchange_hosts;
use super::membership::{Membership, gather_members};
use super::start::Start;
use super::store::StoreUrl;
use crate::config::{SharedSettings, TlsFiles, Transport, failure_file, process_env};
use crate::error::{Cause, Error, Result, shown};
use crate::failure::{CancelToken, CommInfo, agree_on_report};
use crate::network::address;
use crate::network::fabric::Fabric;
use crate::network::host_setup::{Failed, HostConnections, HostSetup};
use crate::network::identity::Identity;
use crate::network::peer_info::PeerInfo;
use crate::network::topology;
use crate::network::{LinkSettings, Network};
use crate::sys;
use crate::trace::{RankOfJob, Recorder};
use crate::transport::tls::Tls;
use crate::types::{DType, Member, Op, Rank, mix};

/// The comm id of the communicator of all ranks.
const WORLD: u64 = 0;

/// What a rank knows when it is connected with the others.
pub(crate) struct Connected {
    pub(crate) fabric: Fabric,
    /// With the run and its secret.
    pub(crate) identity: Identity,
    pub(crate) settings: SharedSettings,
    pub(crate) members: Vec<Member>,
}

/// Connects this rank with the others.
pub(crate) fn connect(start: &Start<'_>) -> Result<Connected> {
    let began = Instant::now();
    let (filter, rails) = (start.settings.interface.as_deref(), start.settings.rails.as_deref());
    // The newcomers of a growth may be on other machines.
    let local = address::of_one_machine(start.world_size, filter.or(rails), &process_env).filter(|_| start.absence.is_none());
    let chosen = match local {
        Some(chosen) => chosen,
        None => {
            let place = start.store_url.as_ref().and_then(StoreUrl::host_and_port);
            address::choose(place, filter, rails, start.deadline)?
        }
    };
    crate::log::info!(address = %chosen.ip, why = chosen.why, "chose the advertised address");
    let tls = start.settings.tls.clone().map(|files| load_tls(start, files)).transpose()?;
    let Membership { endpoint: Endpoint { listener, mailbox, board }, identity, peers, settings } =
        gather_members(start, chosen.ip, began)?;
    warn_of_loopback(&peers, start.rank);
    let members = peers.iter().map(|peer| Member { host: peer.host.as_str().into(), pid: peer.pid }).collect::<Vec<_>>();
    let candidates = candidates(&peers, start.rank, settings.transport);
    let run = peers.iter().fold(0, |run, peer| mix(run, peer.instance));
    let job_rank = RankOfJob { job: start.identity.job().to_owned(), run, rank: start.rank, members: members.clone() };
    let congestion_control = start.settings.congestion_control.clone();
    let links = LinkSettings { sockets: settings.sockets, congestion_control, tls };
    let rank = start.rank;
    let network = Arc::new(Network {
        _listener: listener,
        mailbox,
        board,
        identity: identity.clone(),
        peers,
        rank,
        links,
        between_hosts: OnceLock::new(),
        offered: Mutex::default(),
        reserve: sys::Reserve::new(),
    });
    let recorder = Recorder::new(job_rank, start.settings.trace_dir.clone(), failure_file());
    let mut fabric = Fabric::of_network(network.clone(), WORLD, recorder);

    // All ranks have the table now, so they also learn why this one fails.
    let report = |error| {
        let (timeout, cancel) = (start.settings.timeout, fabric.status().cancel.clone());
        let info = CommInfo { rank, members: members.clone(), timeout, start_timeout: timeout, cancel };
        agree_on_report(fabric.status(), &info, error)
    };
    let connections = host_connections(start, &network, &candidates, &fabric.status().cancel)
        .map_err(|failed| report(peer_failed(failed, &members, began)))?;
    let together = connections.as_ref().map_or(vec![rank], |connections| connections.members().to_vec());
    let hosts =
        if together.len() == start.world_size { vec![0; start.world_size] } else { exchange_hosts(start, &identity, &together)? };
    if settings.transport == Transport::Shm && hosts.iter().any(|&host| host != hosts[0]) {
        let other = hosts.iter().position(|&host| host != hosts[0]).unwrap_or_default();
        let why = format!("rank {other} ({}) cannot share memory with rank 0 ({})", members[other].host, members[0].host);
        return Err(Error::Unsupported { what: "transport shm", why });
    }
    crate::log::info!(rank, world = start.world_size, on_host = together.len(), after = %shown::time(began.elapsed()), "connected all ranks");
    // An address for metrics that is taken fails the start, when the others wait for this rank itself.
    network.offer(start.settings, start.deadline).map_err(report)?;
    if rank == 0 {
        let first = (0..hosts.len()).filter(|&rank| hosts[rank] == rank);
        topology::log(&first.map(|rank| &*network.peers[rank].topology).collect::<Vec<_>>());
    }
    fabric.place(hosts.into(), connections);
    Ok(Connected { fabric, identity, settings, members })
}

/// Warns of ranks that others cannot reach, and of this rank if it is one.
fn warn_of_loopback(peers: &[PeerInfo], rank: Rank) {
    let this = &peers[rank];
    if peers.iter().any(|peer| peer.cannot_reach(this)) {
        crate::log::warn!(
            address = %this.address.ip(),
            "this rank advertises a loopback address to ranks on other hosts; check KOLO_INTERFACE, KOLO_RAILS and KOLO_STORE"
        );
    }
    if let Some(hidden) = peers.iter().find(|peer| this.cannot_reach(peer)) {
        let PeerInfo { rank, host, address, .. } = hidden;
        crate::log::warn!(
            rank,
            host,
            address = %address.ip(),
            "a rank on another host advertises a loopback address; check KOLO_INTERFACE, KOLO_RAILS and KOLO_STORE there"
        );
    }
}

/// Reads the PEM files by the deadline of the start.
fn load_tls(start: &Start<'_>, files: TlsFiles) -> Result<Tls> {
    let kind = format!("read {} {} {}", files.authority.display(), files.certificate.display(), files.key.display());
    let load = move || Tls::load(&files.authority, &files.certificate, &files.key);
    sys::by_deadline(kind, start.deadline, sys::SILENT_FILE, load, Error::os("reading the files of KOLO_TLS_*"))
}

/// Connects this rank with those of `candidates` that it can share memory with; `None` if it is the
/// only candidate.
fn host_connections(
    start: &Start<'_>,
    network: &Network,
    candidates: &[Rank],
    cancel: &CancelToken,
) -> Result<Option<HostConnections>, Failed> {
    if candidates.len() == 1 {
        return Ok(None);
    }
    let members: Vec<Rank> = (0..start.world_size).collect();
    let (rank, deadline) = (start.rank, start.deadline);
    let setup = HostSetup { network, comm_id: WORLD, rank, members: &members, cancel, deadline };
    setup.connect(candidates).map(Some)
}

/// Makes the failure of a peer, or of this process, an error of the start.
pub(crate) fn peer_failed(failed: Failed, members: &[Member], began: Instant) -> Error {
    let (rank, cause) = match failed {
        Failed::Peer { rank, cause } => (rank, cause),
        Failed::Own { doing, error } => return Error::os(doing)(error),
    };
    let after = began.elapsed();
    let cause = if let Cause::Silent { .. } = cause { Cause::Silent { deadline: after } } else { cause };
    let Member { host, pid } = members[rank].clone();
    Error::Peer { rank, host, pid, op: Op::Connect, seq: 0, dtype: DType::U8, count: 0, after, cause }
}

/// Returns the ranks that may be able to share memory, this rank among them.
fn candidates(peers: &[PeerInfo], rank: Rank, transport: Transport) -> Vec<Rank> {
    let mine = &peers[rank].machine;
    if mine.is_empty() || transport == Transport::Tcp {
        return vec![rank];
    }
    (0..peers.len()).filter(|&other| peers[other].machine == *mine).collect()
}
