//! Watches a job from outside, for `kolo top`: finds its ranks and asks each what it does. Nothing
//! is written to the store, and no rank is changed.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::launcher;
use super::store::{self, StoreUrl};
use crate::config::process_env;
use crate::error::Result;
use crate::network::attachment::Attachment;
use crate::network::identity::Identity;
use crate::network::listener::handshake::{Hello, Purpose, Refusal};
use crate::network::listener::{self, DialError};
use crate::network::peer_info::PeerInfo;
use crate::observe::STATUS;
pub use crate::observe::{Communicator, Failure, Link, OpSummary, Running, Snapshot, Wait};
use crate::sys::{self, Process};
use crate::transport::is_end_of_peer;
use crate::types::Rank;
use crate::wire::hexadecimal;

/// The rank that an observer gives as its own. No rank has it.
const NO_RANK: Rank = u32::MAX as Rank;

/// The ranks of a running job, and what it takes to ask them.
pub struct Observer {
    identity: Identity,
    peers: Vec<PeerInfo>,
    /// This machine, if it is known.
    machine: Option<String>,
    /// The namespace of process ids that this process sees; 0 if unknown.
    namespace: u64,
}

/// A rank of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The rank.
    pub rank: Rank,
    /// The name of its host.
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
    /// Where it listens.
    pub address: SocketAddr,
}

/// Why a rank has not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Silence {
    /// Nothing listens at its address: its process has ended, or has dropped its communicators.
    #[error("its process has ended, or has left the job")]
    Gone,
    /// The operating system reports that the process is stopped.
    #[error("its process is stopped")]
    Stopped,
    /// It does not answer in time.
    #[error("it does not answer")]
    Mute,
    /// The network leads to no answer.
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    /// It refuses to answer.
    #[error("{0}")]
    Refused(String),
}

impl fmt::Debug for Observer {
    /// Writes the job, and not its secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("job", &self.job()).field("run", &self.run()).finish_non_exhaustive()
    }
}

impl Observer {
    fn new(identity: Identity, peers: Vec<PeerInfo>) -> Observer {
        let machine = sys::boot_identity();
        Observer { identity, peers, machine, namespace: sys::process_namespace().unwrap_or(0) }
    }

    /// Returns the jobs of this user whose ranks have written a file to a folder, and the files.
    /// Files that cannot be read are left out: they may be of a job that ends just now.
    ///
    /// # Errors
    ///
    /// The folder cannot be read.
    pub fn of_folder(folder: &Path) -> io::Result<Vec<(PathBuf, Observer)>> {
        let mut jobs: Vec<(PathBuf, Observer)> = Vec::new();
        for path in Attachment::files(folder)? {
            match Attachment::read(&path) {
                Ok(Attachment { job, run, secret, peers }) => {
                    // The lowest rank of each machine writes a file, and all say the same.
                    if jobs.iter().all(|(_, other)| other.identity.run() != run) {
                        jobs.push((path, Observer::new(Identity::new(&job, None).of_run(run, secret), peers)));
                    }
                }
                Err(error) => crate::log::debug!(%error, path = %path.display(), "a file of a job cannot be used"),
            }
        }
        Ok(jobs)
    }

    /// Finds a job as its ranks do, in their store; `None` if none has started there by the
    /// deadline.
    ///
    /// # Errors
    ///
    /// The store cannot be reached, or the secret is not that of the job.
    pub fn of_store(url: &str, job: &str, secret: Option<[u8; 32]>, deadline: Instant) -> Result<Option<Observer>> {
        let url = match StoreUrl::parse(url)? {
            StoreUrl::Env => launcher::env_store(&process_env)?,
            url => url,
        };
        let identity = Identity::new(job, secret);
        let store = store::open(&url, false, &identity, deadline)?;
        let found = super::observe::read_members(&*store, &identity, deadline)?;
        Ok(found.map(|(identity, peers)| Observer::new(identity, peers)))
    }

    /// Returns the name of the job.
    pub fn job(&self) -> &str {
        self.identity.job()
    }

    /// Returns a text that is the same for all ranks of a run, and differs for each start.
    pub fn run(&self) -> String {
        hexadecimal(&self.identity.run()[..8])
    }

    /// Returns the ranks.
    pub fn peers(&self) -> Vec<Peer> {
        let peer = |peer: &PeerInfo| Peer { rank: peer.rank, host: peer.host.clone(), pid: peer.pid, address: peer.address };
        self.peers.iter().map(peer).collect()
    }

    fn is_on_this_machine(&self, peer: &PeerInfo) -> bool {
        peer.machine().is_some() && peer.machine() == self.machine.as_deref()
    }

    /// Returns a rank's process, if this process can see it.
    fn visible_process(&self, peer: &PeerInfo) -> Option<Process> {
        let is_seen = self.namespace != 0 && self.namespace == peer.pid_namespace && self.is_on_this_machine(peer);
        is_seen.then_some(Process { id: peer.pid, created: peer.created })
    }

    /// Asks a rank what it does. The listener of its process answers, whatever the rank does.
    ///
    /// # Errors
    ///
    /// Why it does not answer by the deadline.
    ///
    /// # Panics
    ///
    /// There is no such rank.
    pub fn ask(&self, rank: Rank, deadline: Instant) -> std::result::Result<Snapshot, Silence> {
        let peer = &self.peers[rank];
        let process = self.visible_process(peer);
        if process.is_some_and(sys::has_ended) {
            return Err(Silence::Gone);
        }
        // A stopped process takes no time to find, and would take all of it to ask.
        if process.is_some_and(sys::is_stopped) {
            return Err(Silence::Stopped);
        }
        let hello = Hello::new(Purpose::Observe, 0, NO_RANK, rank);
        match self.query(peer, &hello, deadline) {
            Ok(reply) => match Snapshot::decode(&reply).filter(|snapshot| snapshot.rank == rank) {
                Some(snapshot) => Ok(snapshot),
                None => Err(Silence::Refused("its answer is of another version of kolo".to_owned())),
            },
            Err(error) => Err(silence(&error)),
        }
    }

    fn query(&self, peer: &PeerInfo, hello: &Hello, deadline: Instant) -> std::result::Result<Vec<u8>, DialError> {
        if self.is_on_this_machine(peer) && !peer.local_name.is_empty() {
            match listener::query_local(&peer.local_name, &self.identity, hello, STATUS, deadline) {
                // The queue of the listener is full: it is there, and does not answer.
                Err(DialError::Connect(error)) if error.kind() == io::ErrorKind::TimedOut => return Err(DialError::Io(error)),
                Err(DialError::Connect(_)) => {}
                result => return result,
            }
        }
        if peer.is_hidden_from(self.machine.as_deref()) {
            // What listens at that address on this host is another process.
            let why = format!("it advertises {} on another host", peer.address);
            return Err(DialError::Connect(io::Error::new(io::ErrorKind::AddrNotAvailable, why)));
        }
        listener::query(peer.address, &self.identity, hello, STATUS, deadline)
    }
}

fn silence(error: &DialError) -> Silence {
    let refused = |why: &str| Silence::Refused(why.to_owned());
    match error {
        DialError::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => Silence::Gone,
        DialError::Connect(error) => Silence::Unreachable(error.to_string()),
        DialError::Io(error) if is_end_of_peer(error) => Silence::Gone,
        DialError::Io(_) => Silence::Mute,
        DialError::Refused(Refusal::Secret) => refused("it refuses the secret: this is not the secret of the job"),
        DialError::Refused(Refusal::Version { theirs }) => Silence::Refused(format!(
            "it runs a version of kolo with another protocol ({theirs}); use the `kolo` of that version"
        )),
        // Another process got the port of a process that has ended.
        DialError::Refused(Refusal::Foreign | Refusal::Job { .. } | Refusal::Run) => Silence::Gone,
    }
}
