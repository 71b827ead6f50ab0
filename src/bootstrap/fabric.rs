//! What a communicator is made on: where its ranks are, how its links are opened, and how its hosts share memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::host_setup::{Failed, HostConnections};
use super::lending::{NetworkLender, ProcessLender};
use super::network::{Network, NetworkControl, NetworkOpener};
use crate::bootstrap::host_group::area::{AREA, Area};
use crate::bootstrap::host_group::{HOME, HostGroup, Lender, stage};
use crate::failure::{CommStatus, ControlChannel, Query, QueryError, Reply, StatusBoard};
use crate::trace::{Recorder, Recording};
use crate::transport::Opener;
use crate::transport::memory::{Hub, MemoryOpener};
use crate::types::Rank;

/// The ranks of one communicator, seen from one of them.
pub(crate) struct Fabric {
    backing: Backing,
    /// Tells the communicators of a job apart; the same on all its ranks.
    comm_id: u64,
    rank: Rank,
    /// The ranks of the communicator as ranks of the job.
    members: Arc<[Rank]>,
    /// For each rank, the lowest one that can share memory with it.
    hosts: Arc<[usize]>,
    /// Until memory is shared first.
    connections: Option<HostConnections>,
    /// What this process shares with the other ranks of its host; `None` if they share nothing.
    host: Option<Arc<HostGroup>>,
    recorder: Arc<Recorder>,
    /// What the others may know of this rank.
    status: Arc<CommStatus>,
}

#[derive(Clone)]
enum Backing {
    /// Processes.
    Network(Arc<Network>),
    /// Threads of one process.
    Process(Arc<Hub>, Arc<StatusBoard>),
    /// One rank alone.
    Nothing,
}

impl Fabric {
    /// One rank that needs nobody.
    pub(crate) fn alone(recorder: Arc<Recorder>) -> Fabric {
        Fabric::new(Backing::Nothing, 0, 0, [0].into(), [0].into(), recorder)
    }

    /// All ranks of a job, of which `connections` are those of this host.
    pub(super) fn of_network(
        network: Arc<Network>,
        comm_id: u64,
        hosts: Arc<[usize]>,
        connections: Option<HostConnections>,
        recorder: Arc<Recorder>,
    ) -> Fabric {
        let members = (0..network.peers.len()).collect();
        let rank = network.rank;
        let mut fabric = Fabric::new(Backing::Network(network), comm_id, rank, members, hosts, recorder);
        fabric.connections = connections;
        fabric
    }

    /// One of `world` threads of this process.
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
        let fabric = Fabric { backing, comm_id, rank, members, hosts, connections: None, host: None, recorder, status };
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

    /// Where this rank's operations on the communicator are recorded.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.status.recording
    }

    /// For each rank, the lowest one that can share memory with it.
    pub(crate) fn hosts(&self) -> &Arc<[usize]> {
        &self.hosts
    }

    /// The ranks on this one's host.
    pub(crate) fn neighbours(&self) -> Arc<[Rank]> {
        (0..self.world()).filter(|&rank| self.hosts[rank] == self.hosts[self.rank]).collect()
    }

    /// Opens links to the others; `None` for a rank alone.
    pub(crate) fn opener(&self) -> Option<Box<dyn Opener>> {
        match &self.backing {
            Backing::Network(network) => Some(Box::new(NetworkOpener::new(
                network.clone(),
                self.comm_id,
                self.rank,
                self.members.clone(),
                self.hosts.clone(),
            ))),
            Backing::Process(hub, _) => Some(Box::new(MemoryOpener { hub: hub.clone(), comm_id: self.comm_id, rank: self.rank })),
            Backing::Nothing => None,
        }
    }

    /// The ranks that have connected with this one for a link which it has not asked for.
    pub(crate) fn callers(&self) -> Vec<Rank> {
        let Backing::Network(network) = &self.backing else { return Vec::new() };
        let callers = network.mailbox().callers(self.comm_id);
        callers.into_iter().filter_map(|caller| self.members.iter().position(|&member| member == caller)).collect()
    }

    /// How this rank asks the others, beside its operations; `None` for a rank alone.
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

    /// What the others may know of this rank, as long as this lives.
    pub(crate) fn status(&self) -> &Arc<CommStatus> {
        &self.status
    }

    fn board(&self) -> Option<&StatusBoard> {
        match &self.backing {
            Backing::Network(network) => Some(network.board()),
            Backing::Process(_, board) => Some(board),
            Backing::Nothing => None,
        }
    }

    /// The area of this communicator on this host, which has at least two of its ranks; `None`, on all of them, if one of them
    /// cannot have it. All of them call this together, once.
    pub(crate) fn share(&mut self, deadline: Instant) -> Result<Option<Area>, Failed> {
        let neighbours = self.neighbours();
        let place = neighbours.iter().position(|&rank| rank == self.rank).expect("a rank is its own neighbour");
        // The first communicator brings the first stages.
        let is_home = self.host.is_none();
        let part = if is_home { HOME } else { AREA };
        let room = if is_home { stage::room(neighbours.len()) } else { 0 };
        let segment = match &self.backing {
            Backing::Network(network) => {
                let cancel = Some(&*self.status.cancel);
                let connections = match self.connections.take() {
                    Some(connections) => connections,
                    None => {
                        HostConnections::form(network, self.comm_id, self.rank, &self.members, &neighbours, cancel, deadline)?
                    }
                };
                // If a rank could not come, all know it.
                if connections.members() != &*neighbours {
                    return Ok(None);
                }
                connections.share(part, room, deadline)?
            }
            Backing::Process(hub, _) => {
                let users = neighbours.len();
                // Links are named by two ranks; no rank is as large as this.
                Some(hub.segment((self.comm_id, [u64::MAX, 0]), part * users, users))
            }
            Backing::Nothing => None,
        };
        let Some(segment) = segment else { return Ok(None) };
        if is_home {
            let lender: Arc<dyn Lender> = match &self.backing {
                Backing::Network(network) => Arc::new(NetworkLender { network: network.clone() }),
                Backing::Process(hub, _) => Arc::new(ProcessLender { hub: hub.clone(), rank: self.members[self.rank] }),
                Backing::Nothing => return Ok(None),
            };
            let members = neighbours.iter().map(|&rank| self.members[rank]).collect();
            self.host = Some(Arc::new(HostGroup::new(self.members[self.rank], members, segment.clone(), lender)));
        } else {
            // All have reserved their parts and mapped the others'.
            segment.close();
        }
        Ok(Some(Area::new(segment, part, place, neighbours.len())))
    }

    /// What this process shares with the other ranks of its host.
    pub(crate) fn host(&self) -> Option<&Arc<HostGroup>> {
        self.host.as_ref()
    }

    /// Does without shared memory, and so will the parts that this is divided into.
    pub(crate) fn leave_host(&mut self) {
        self.host = None;
    }

    /// The ranks of the communicator as ranks of the job.
    pub(crate) fn members(&self) -> &Arc<[Rank]> {
        &self.members
    }

    /// The fabric of some of the ranks, in the order given, of which this rank is one.
    pub(crate) fn divide(&self, comm_id: u64, ranks: &[Rank]) -> Fabric {
        let rank = ranks.iter().position(|&rank| rank == self.rank).expect("a rank divides into parts of which it is one");
        let members = ranks.iter().map(|&rank| self.members[rank]).collect();
        let same_host = |rank: Rank| ranks.iter().position(|&other| self.hosts[other] == self.hosts[rank]);
        let hosts = ranks.iter().map(|&rank| same_host(rank).unwrap_or(0)).collect();
        let mut part = Fabric::new(self.backing.clone(), comm_id, rank, members, hosts, self.recorder.clone());
        part.host = self.host.clone();
        part
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(board) = self.board() {
            board.take_down(self.comm_id, self.members[self.rank]);
        }
    }
}

/// How a rank reaches the others that are threads of its process.
struct ProcessControl {
    board: Arc<StatusBoard>,
    comm_id: u64,
    rank: Rank,
    members: Arc<[Rank]>,
}

impl ControlChannel for ProcessControl {
    fn ask(&self, peer: Rank, query: &Query, _: Duration) -> Result<Reply, QueryError> {
        Ok(self.board.answer(self.comm_id, self.members[self.rank], self.members[peer], query.clone()))
    }
}
