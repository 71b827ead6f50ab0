//! What a communicator is made on: where its ranks are, how its links are opened, and how its hosts share memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::host::{Failed, Star};
use super::network::{Network, NetworkContact, NetworkOpener};
use crate::health::{Answer, Boards, Bulletin, Contact, Question, Recorder, Recording, Unheard};
use crate::sys::Segment;
use crate::transport::Opener;
use crate::transport::memory::{Hub, MemoryOpener};
use crate::types::Rank;

/// The ranks of one communicator, seen from one of them.
pub(crate) struct Fabric {
    ground: Ground,
    /// Tells the communicators of a job apart; the same on all its ranks.
    channel: u64,
    rank: Rank,
    /// The ranks of the communicator as ranks of the job.
    members: Arc<[Rank]>,
    /// For each rank, the lowest one that can share memory with it.
    hosts: Arc<[usize]>,
    star: Option<Star>,
    recorder: Arc<Recorder>,
    /// How often memory was shared.
    shares: u64,
    /// What the others may know of this rank.
    bulletin: Arc<Bulletin>,
}

#[derive(Clone)]
enum Ground {
    /// Processes.
    Network(Arc<Network>),
    /// Threads of one process.
    Process(Arc<Hub>, Arc<Boards>),
    /// One rank alone.
    Nothing,
}

impl Fabric {
    /// One rank that needs nobody.
    pub(crate) fn alone(recorder: Arc<Recorder>) -> Fabric {
        Fabric::new(Ground::Nothing, 0, 0, [0].into(), [0].into(), recorder)
    }

    /// All ranks of a job, of which `star` connects those of this host.
    pub(super) fn of_network(
        network: Arc<Network>,
        channel: u64,
        hosts: Arc<[usize]>,
        star: Option<Star>,
        recorder: Arc<Recorder>,
    ) -> Fabric {
        let members = (0..network.cards.len()).collect();
        let rank = network.rank;
        let mut fabric = Fabric::new(Ground::Network(network), channel, rank, members, hosts, recorder);
        fabric.star = star;
        fabric
    }

    /// One of `world` threads of this process.
    pub(crate) fn of_process(hub: Arc<Hub>, boards: Arc<Boards>, rank: Rank, world: usize, recorder: Arc<Recorder>) -> Fabric {
        let hosts = vec![0; world].into();
        Fabric::new(Ground::Process(hub, boards), 0, rank, (0..world).collect(), hosts, recorder)
    }

    fn new(
        ground: Ground,
        channel: u64,
        rank: Rank,
        members: Arc<[Rank]>,
        hosts: Arc<[usize]>,
        recorder: Arc<Recorder>,
    ) -> Fabric {
        let recording = recorder.open(channel, rank, members.clone());
        let bulletin = Arc::new(Bulletin::new(rank, members.clone(), recording));
        let fabric = Fabric { ground, channel, rank, members, hosts, star: None, recorder, shares: 0, bulletin };
        if let Some(contact) = fabric.contact() {
            fabric.bulletin.reach(contact);
        }
        if let Some(boards) = fabric.boards() {
            boards.post(channel, fabric.members[rank], fabric.bulletin.clone());
        }
        fabric
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn channel(&self) -> u64 {
        self.channel
    }

    /// Where this rank's operations on the communicator are recorded.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.bulletin.recording
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
        match &self.ground {
            Ground::Network(network) => Some(Box::new(NetworkOpener {
                network: network.clone(),
                channel: self.channel,
                rank: self.rank,
                members: self.members.clone(),
                hosts: self.hosts.clone(),
                in_vain: HashMap::new(),
            })),
            Ground::Process(hub, _) => Some(Box::new(MemoryOpener { hub: hub.clone(), channel: self.channel, rank: self.rank })),
            Ground::Nothing => None,
        }
    }

    /// How this rank asks the others, beside its operations; `None` for a rank alone.
    fn contact(&self) -> Option<Arc<dyn Contact>> {
        let (channel, members) = (self.channel, self.members.clone());
        match &self.ground {
            Ground::Network(network) => Some(Arc::new(NetworkContact { network: network.clone(), channel, members })),
            Ground::Process(_, boards) => {
                Some(Arc::new(ProcessContact { boards: boards.clone(), channel, rank: self.rank, members }))
            }
            Ground::Nothing => None,
        }
    }

    /// What the others may know of this rank, as long as this lives.
    pub(crate) fn bulletin(&self) -> &Arc<Bulletin> {
        &self.bulletin
    }

    fn boards(&self) -> Option<&Boards> {
        match &self.ground {
            Ground::Network(network) => Some(network.boards()),
            Ground::Process(_, boards) => Some(boards),
            Ground::Nothing => None,
        }
    }

    /// Memory with a part of `part` bytes for each of the neighbours, in their order; `None`, on all of them, if one of them
    /// cannot have it. All of them call this together.
    pub(crate) fn share(&mut self, part: usize, deadline: Instant) -> Result<Option<Arc<Segment>>, Failed> {
        let neighbours = self.neighbours();
        self.shares += 1;
        match &self.ground {
            Ground::Network(network) => {
                if neighbours.len() == 1 {
                    return Ok(Some(Arc::new(Segment::heap(part))));
                }
                if self.star.is_none() {
                    self.star = Some(Star::form(
                        network,
                        self.channel,
                        self.rank,
                        &self.members,
                        &neighbours,
                        Some(&*self.bulletin.alarm),
                        deadline,
                    )?);
                }
                match &self.star {
                    // Who fails at it hangs up, so that no other waits for what will not come.
                    Some(star) if star.members() == &*neighbours => star.share(part, deadline).inspect_err(|_| self.star = None),
                    // Somebody could not come, and all know it.
                    _ => Ok(None),
                }
            }
            Ground::Process(hub, _) => {
                let users = self.world();
                // Links are named by two ranks; no rank is as large as this.
                Ok(Some(hub.segment((self.channel, [u64::MAX, self.shares]), part * users, users)))
            }
            Ground::Nothing => Ok(Some(Arc::new(Segment::heap(part)))),
        }
    }

    /// The fabric of some of the ranks, in the order given, of which this rank is one.
    pub(crate) fn divide(&self, channel: u64, ranks: &[Rank]) -> Fabric {
        let rank = ranks.iter().position(|&rank| rank == self.rank).expect("a rank divides into parts of which it is one");
        let members = ranks.iter().map(|&rank| self.members[rank]).collect();
        let same_host = |rank: Rank| ranks.iter().position(|&other| self.hosts[other] == self.hosts[rank]);
        let hosts = ranks.iter().map(|&rank| same_host(rank).unwrap_or(0)).collect();
        Fabric::new(self.ground.clone(), channel, rank, members, hosts, self.recorder.clone())
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(boards) = self.boards() {
            boards.take_down(self.channel, self.members[self.rank]);
        }
    }
}

/// How a rank reaches the others that are threads of its process.
struct ProcessContact {
    boards: Arc<Boards>,
    channel: u64,
    rank: Rank,
    members: Arc<[Rank]>,
}

impl Contact for ProcessContact {
    fn ask(&self, peer: Rank, question: &Question, _: Duration) -> Result<Answer, Unheard> {
        Ok(self.boards.answer(self.channel, self.members[self.rank], self.members[peer], question.clone()))
    }
}
