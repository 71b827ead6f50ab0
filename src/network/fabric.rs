//! What a communicator is built on: where its ranks are, how its links are opened, and how the
//! ranks of a host share memory.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::Network;
use super::control::NetworkControl;
use super::host_setup::{Failed, HostConnections, HostSetup};
use super::in_process::{ProcessControl, ProcessRegions};
use super::opener::NetworkOpener;
use super::rails::kind_of_links;
use super::region_exchange::NetworkRegions;
use super::topology::BetweenHosts;
use crate::config::{CopyMode, Settings};
use crate::failure::{CommStatus, ControlChannel, StatusBoard};
use crate::host_group::area::{AREA, Area};
use crate::host_group::{HOME, HostGroup, RegionExchange, stage};
use crate::schedule::order::{PairCost, PairCosts};
use crate::schedule::select::CostModel;
use crate::sys::Region;
use crate::trace::{Recorder, Recording};
use crate::transport::memory::{Hub, MemoryOpener};
use crate::transport::{NoPeers, Opener};
use crate::types::Rank;

/// The ranks of one communicator, seen from one of them.
pub(crate) struct Fabric {
    backing: Backing,
    /// The number of the communicator in the job, the same on all its ranks.
    comm_id: u64,
    rank: Rank,
    /// The ranks of the communicator as ranks of the job.
    members: Arc<[Rank]>,
    /// For each rank, the lowest one that can share memory with it.
    hosts: Arc<[usize]>,
    /// The connections of the host, until memory is first shared.
    connections: Option<HostConnections>,
    /// What this process shares with the other ranks of its host; `None` if they share nothing.
    host: Option<Arc<HostGroup>>,
    /// What messages between hosts cost, if the ranks of this communicator have measured again since the start.
    since_start: Option<Arc<BetweenHosts>>,
    recorder: Arc<Recorder>,
    /// What peers may learn of this rank.
    status: Arc<CommStatus>,
}

#[derive(Clone)]
enum Backing {
    /// The ranks are processes.
    Network(Arc<Network>),
    /// The ranks are threads of one process.
    Process(Arc<Hub>, Arc<StatusBoard>),
    /// There is one rank.
    Nothing,
}

impl Fabric {
    /// Makes the fabric of one rank without peers.
    pub(crate) fn alone(recorder: Arc<Recorder>) -> Fabric {
        Fabric::new(Backing::Nothing, 0, 0, [0].into(), [0].into(), recorder)
    }

    /// Makes the fabric of all ranks of a job. Before anything is sent, [`Fabric::place`] sets where
    /// they are.
    pub(crate) fn of_network(network: Arc<Network>, comm_id: u64, recorder: Arc<Recorder>) -> Fabric {
        let members: Arc<[Rank]> = (0..network.peers.len()).collect();
        let (rank, hosts) = (network.rank, members.clone());
        Fabric::new(Backing::Network(network), comm_id, rank, members, hosts, recorder)
    }

    /// Sets the host of each rank, and the connections of this host.
    pub(crate) fn place(&mut self, hosts: Arc<[usize]>, connections: Option<HostConnections>) {
        self.hosts = hosts;
        self.connections = connections;
    }

    /// Makes the fabric of one of `world` threads of this process.
    pub(crate) fn of_process(
        hub: Arc<Hub>,
        board: Arc<StatusBoard>,
        rank: Rank,
        world: usize,
        recorder: Arc<Recorder>,
    ) -> Fabric {
        let hosts = vec![0; world].into();
        Fabric::new(Backing::Process(hub, board), 0, rank, (0..world).collect(), hosts, recorder)
    }

    fn new(
        backing: Backing,
        comm_id: u64,
        rank: Rank,
        members: Arc<[Rank]>,
        hosts: Arc<[usize]>,
        recorder: Arc<Recorder>,
    ) -> Fabric {
        let recording = recorder.open(comm_id, rank, members.clone());
        let status = Arc::new(CommStatus::new(rank, members.clone(), recording));
        let fabric =
            Fabric { backing, comm_id, rank, members, hosts, connections: None, host: None, since_start: None, recorder, status };
        if let Some(control) = fabric.control() {
            fabric.status.reach(control);
        }
        if let Some(board) = fabric.board() {
            board.post(comm_id, fabric.members[rank], fabric.status.clone());
        }
        fabric
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn comm_id(&self) -> u64 {
        self.comm_id
    }

    /// Returns the record of this rank's operations on the communicator.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.status.recording
    }

    /// Returns, for each rank, the lowest one that can share memory with it.
    pub(crate) fn hosts(&self) -> &Arc<[usize]> {
        &self.hosts
    }

    /// Returns the ranks on this rank's host, this rank among them.
    pub(crate) fn neighbours(&self) -> Arc<[Rank]> {
        (0..self.world()).filter(|&rank| self.hosts[rank] == self.hosts[self.rank]).collect()
    }

    /// Returns what opens links to the others, in one process or in several. Those in shared memory copy
    /// large messages by `copy_mode`.
    pub(crate) fn opener(&self, copy_mode: CopyMode) -> Box<dyn Opener> {
        match &self.backing {
            Backing::Network(network) => Box::new(NetworkOpener::new(
                network.clone(),
                self.comm_id,
                self.rank,
                self.members.clone(),
                self.hosts.clone(),
                copy_mode,
            )),
            Backing::Process(hub, _) => {
                Box::new(MemoryOpener { hub: hub.clone(), comm_id: self.comm_id, rank: self.rank, copy_mode })
            }
            Backing::Nothing => Box::new(NoPeers),
        }
    }

    /// Returns the host's name and address at which a rank is reached through a network; `None` in one
    /// process.
    pub(crate) fn address_on_network(&self, rank: Rank) -> Option<String> {
        let Backing::Network(network) = &self.backing else { return None };
        let peer = &network.peers[self.members[rank]];
        Some(format!("{} {}", peer.host, peer.address.ip()))
    }

    /// Offers nothing any more to those that watch the job.
    pub(crate) fn withdraw_offers(&self) {
        if let Backing::Network(network) = &self.backing {
            network.withdraw();
        }
    }

    /// Offers again what the settings ask for.
    pub(crate) fn renew_offers(&self, settings: &Settings, deadline: Instant) {
        if let Backing::Network(network) = &self.backing
            && let Err(error) = network.offer(settings, deadline)
        {
            crate::log::warn!(%error, "this rank offers no metrics any more");
        }
    }

    /// Returns the path of a rank's host in the network; empty if it is unknown.
    pub(crate) fn topology(&self, rank: Rank) -> &str {
        match &self.backing {
            Backing::Network(network) => &network.peers[self.members[rank]].topology,
            _ => "",
        }
    }

    /// Keeps what messages between hosts cost, for the communicators that are made of this one. `first` are
    /// the lowest ranks of the hosts.
    pub(crate) fn keep_costs(&self, first: &[Rank], model: CostModel, costs: PairCosts) {
        if let Backing::Network(network) = &self.backing {
            // Only the first communicator of a job measures.
            _ = network.between_hosts.set(self.between(first, network.peers.len(), (model, costs.of(0, 1)), costs, false));
        }
    }

    /// Keeps what messages cost now, for this communicator and those that are made of it, if the job has measured
    /// at its start.
    pub(crate) fn renew_costs(&mut self, first: &[Rank], costs: PairCosts) {
        let Backing::Network(network) = &self.backing else { return };
        let Some(start) = network.between_hosts.get() else { return };
        let hosts: Vec<usize> = first.iter().map(|&rank| start.hosts[self.members[rank]]).collect();
        let is_slower = costs.is_slower_than(&start.costs.among(&hosts));
        let renewed = self.between(first, network.peers.len(), (start.model, start.usual), costs, is_slower);
        self.since_start = Some(Arc::new(renewed));
    }

    fn between(
        &self,
        first: &[Rank],
        peers: usize,
        (model, usual): (CostModel, PairCost),
        costs: PairCosts,
        is_slower: bool,
    ) -> BetweenHosts {
        let mut hosts = vec![0; peers];
        for (rank, host) in self.hosts.iter().enumerate() {
            hosts[self.members[rank]] = first.iter().position(|first| first == host).unwrap_or(0);
        }
        BetweenHosts { hosts, model, usual, costs, is_slower, last: Mutex::default() }
    }

    /// Returns the measured costs, and the index in them of each given rank's host.
    pub(crate) fn costs_between(&self, first: &[Rank]) -> Option<(&BetweenHosts, Vec<usize>)> {
        let Backing::Network(network) = &self.backing else { return None };
        let between = self.since_start.as_deref().or_else(|| network.between_hosts.get())?;
        Some((between, first.iter().map(|&rank| between.hosts[self.members[rank]]).collect()))
    }

    /// Returns what a link to a rank in the network is made of, for people.
    pub(crate) fn kind_of_links(&self, to: Rank) -> String {
        match &self.backing {
            Backing::Network(network) => kind_of_links(network, self.members[to]),
            _ => "memory".to_owned(),
        }
    }

    /// Returns the ranks that have connected for a link which this rank has not asked for.
    pub(crate) fn peers_with_links(&self) -> Vec<Rank> {
        let Backing::Network(network) = &self.backing else { return Vec::new() };
        let peers = network.mailbox.peers_with_links(self.comm_id);
        peers.into_iter().filter_map(|peer| self.members.iter().position(|&member| member == peer)).collect()
    }

    /// Drops the connections of peers that wait for the communicator, which has ended, and those that
    /// will come. Such a peer asks why.
    pub(crate) fn refuse_connections(&self) {
        if let Backing::Network(network) = &self.backing {
            network.mailbox.end(self.comm_id);
        }
    }

    /// Returns what sends queries to the others, beside the operations; `None` for a rank without
    /// peers.
    fn control(&self) -> Option<Arc<dyn ControlChannel>> {
        let (comm_id, members) = (self.comm_id, self.members.clone());
        match &self.backing {
            Backing::Network(network) => Some(Arc::new(NetworkControl { network: network.clone(), comm_id, members })),
            Backing::Process(_, board) => {
                Some(Arc::new(ProcessControl { board: board.clone(), comm_id, rank: self.rank, members }))
            }
            Backing::Nothing => None,
        }
    }

    /// Returns what peers may learn of this rank, as long as the fabric lives.
    pub(crate) fn status(&self) -> &Arc<CommStatus> {
        &self.status
    }

    pub(crate) fn board(&self) -> Option<&StatusBoard> {
        match &self.backing {
            Backing::Network(network) => Some(&network.board),
            Backing::Process(_, board) => Some(board),
            Backing::Nothing => None,
        }
    }

    /// Makes the area of this communicator on this host, which has at least two of its ranks.
    /// Returns `None` on all of them if one of them cannot map it. All of them call this together,
    /// once.
    pub(crate) fn share(&mut self, deadline: Instant) -> Result<Option<Area>, Failed> {
        let neighbours = self.neighbours();
        let index = neighbours.iter().position(|&rank| rank == self.rank).expect("a rank is on its own host");
        // The first communicator also makes the first stages.
        let is_home = self.host.is_none();
        let part = if is_home { HOME } else { AREA };
        let room = if is_home { stage::room(neighbours.len()) } else { 0 };
        let Some(region) = self.shared_region(&neighbours, part, room, deadline)? else { return Ok(None) };
        if is_home {
            let Some(exchange) = self.region_exchange() else { return Ok(None) };
            let members = neighbours.iter().map(|&rank| self.members[rank]).collect();
            self.host = Some(Arc::new(HostGroup::new(self.members[self.rank], members, region.clone(), exchange)));
        } else {
            // All ranks have reserved their parts and mapped those of the others.
            region.close();
        }
        Ok(Some(Area::new(region, part, index, neighbours.len())))
    }

    /// Makes a region with `part` bytes for each of `neighbours`; `None` if one of them cannot map
    /// it.
    fn shared_region(
        &mut self,
        neighbours: &[Rank],
        part: usize,
        room: usize,
        deadline: Instant,
    ) -> Result<Option<Arc<Region>>, Failed> {
        match &self.backing {
            Backing::Network(network) => {
                let connections = match self.connections.take() {
                    Some(connections) => connections,
                    None => {
                        let (comm_id, rank, members) = (self.comm_id, self.rank, &*self.members);
                        let cancel = &*self.status.cancel;
                        HostSetup { network, comm_id, rank, members, cancel, deadline }.connect(neighbours)?
                    }
                };
                // If a rank could not join, all ranks know it.
                if connections.members() != neighbours {
                    return Ok(None);
                }
                connections.share(part, room, deadline, &self.status.cancel)
            }
            Backing::Process(hub, _) => {
                let users = neighbours.len();
                // Links are named by two ranks, and no rank is as large as this one.
                Ok(Some(hub.region((self.comm_id, [u64::MAX, 0]), part * users, users)))
            }
            Backing::Nothing => Ok(None),
        }
    }

    /// Returns how regions pass between the ranks of a host; `None` for a rank without peers.
    fn region_exchange(&self) -> Option<Arc<dyn RegionExchange>> {
        match &self.backing {
            Backing::Network(network) => Some(Arc::new(NetworkRegions { network: network.clone() })),
            Backing::Process(hub, _) => Some(Arc::new(ProcessRegions { hub: hub.clone(), rank: self.members[self.rank] })),
            Backing::Nothing => None,
        }
    }

    /// Returns what this process shares with the other ranks of its host.
    pub(crate) fn host(&self) -> Option<&Arc<HostGroup>> {
        self.host.as_ref()
    }

    /// Gives up shared memory for this fabric and those divided from it.
    pub(crate) fn leave_host(&mut self) {
        self.host = None;
    }

    /// Returns the ranks of the communicator as ranks of the job.
    pub(crate) fn members(&self) -> &Arc<[Rank]> {
        &self.members
    }

    /// Makes the fabric of some of the ranks, in the order given. This rank is one of them.
    pub(crate) fn divide(&self, comm_id: u64, ranks: &[Rank]) -> Fabric {
        let rank =
            ranks.iter().position(|&rank| rank == self.rank).expect("this rank is among the ranks of the new communicator");
        let members = ranks.iter().map(|&rank| self.members[rank]).collect();
        let same_host = |rank: Rank| ranks.iter().position(|&other| self.hosts[other] == self.hosts[rank]);
        let hosts = ranks.iter().map(|&rank| same_host(rank).unwrap_or(0)).collect();
        let mut part = Fabric::new(self.backing.clone(), comm_id, rank, members, hosts, self.recorder.clone());
        part.host = self.host.clone();
        part.since_start = self.since_start.clone();
        part
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(board) = self.board() {
            board.take_down(self.comm_id, self.members[self.rank]);
        }
        self.refuse_connections();
    }
}
