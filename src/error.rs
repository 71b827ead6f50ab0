//! The error type. It carries data to match on, and its message names what happened, the rank at
//! fault, and what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::types::{DType, Descriptor, Op, Rank, ReduceOp, UnknownNameError};

/// What every fallible call returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
///
/// [`Error::Argument`] is found before anything is sent and leaves the communicator usable, as do
/// those that [`Error::leaves_communicator_usable`] lists. After any other failure of an operation
/// the communicator is revoked: every later call on it returns [`Error::Revoked`] at once.
///
/// `{}` prints a sentence for users: what happened, to which rank, and what to do. `{:?}` prints
/// the variant and its fields.
///
/// ```
/// use kolo::{Cause, Communicator, Error};
///
/// /// Returns the communicator of the ranks that can go on.
/// fn barrier(comm: Communicator) -> kolo::Result<Communicator> {
///     match comm.barrier() {
///         Ok(()) => Ok(comm),
///         // Nothing was sent: the program is wrong.
///         Err(error) if error.leaves_communicator_usable() => Err(error),
///         Err(Error::Mismatch { mine, theirs, .. }) => {
///             panic!("this rank called {}, another one {}", mine.op(), theirs.op())
///         }
///         Err(Error::Peer { rank, host, cause: Cause::Died | Cause::Silent { .. }, .. }) => {
///             eprintln!("rank {rank} on {host} is gone; the others continue");
///             comm.shrink()
///         }
///         Err(error) => Err(error),
///     }
/// }
/// # fn main() -> kolo::Result<()> {
/// # for comm in Communicator::in_process(1)? { barrier(comm)?; }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments of the call are wrong. Nothing was sent, and the communicator stays usable.
    #[error("{op}: {problem}")]
    Argument {
        /// The operation that was called.
        op: Op,
        /// What is wrong with the arguments.
        problem: ArgumentError,
    },

    /// A peer failed, left, or did not take part, so the operation failed.
    #[error("{op} seq={seq}{} failed{}: rank {rank} ({host}, pid {pid}) {cause}", shape(*op, *dtype, *count), after_some(*after))]
    Peer {
        /// The rank at fault, in the communicator of the call.
        rank: Rank,
        /// Its host's name.
        host: Arc<str>,
        /// Its process id.
        pid: u32,
        /// The operation that failed.
        op: Op,
        /// Its sequence number.
        seq: u64,
        /// Its element type.
        dtype: DType,
        /// Its count.
        count: u64,
        /// How long the operation had been running.
        after: Duration,
        /// What the peer did.
        cause: Cause,
    },

    /// Ranks made different calls, now or a little earlier.
    ///
    /// All ranks name the same rank at fault: the one whose call differs from that of most ranks. If
    /// two calls were made by equally many ranks, the call of the lowest rank counts as right.
    ///
    /// Inside a host no rank's memory is written before all ranks have compared their calls.
    /// Between hosts a rank compares its call with that of each peer before it accepts a message;
    /// the receive buffer may already hold messages of peers whose call matched. A rank that
    /// has not made the call gets [`Error::Peer`] with [`Cause::Mismatch`]. A rank that only sends,
    /// like the root of a broadcast, may notice at a later call.
    #[error(
        "ranks disagree: this rank {rank} called [{mine}], rank {peer} ({host}) called [{theirs}]{}; all ranks of a communicator \
         must make the same calls in the same order", at_fault(*culprit, *peer, *is_tie)
    )]
    Mismatch {
        /// The rank at fault; it may be this one.
        culprit: Rank,
        /// This rank.
        rank: Rank,
        /// The rank at fault, or, if this rank made the same call as that one, a rank that made
        /// the right call.
        peer: Rank,
        /// Its host's name.
        host: Arc<str>,
        /// The call of this rank.
        mine: Box<Descriptor>,
        /// The call of the other rank.
        theirs: Box<Descriptor>,
        /// Whether equally many ranks are known to have made each of the two calls. Then either may
        /// be the wrong one.
        is_tie: bool,
    },

    /// Two ranks gave different counts for what one sends to the other.
    #[error(
        "counts differ in {op} seq={seq}: rank {peer} ({host}) sent {sent} bytes, this rank {rank} expected {expected}; give both \
         the same count"
    )]
    Counts {
        /// This rank.
        rank: Rank,
        /// The rank that sent.
        peer: Rank,
        /// Its host's name.
        host: Arc<str>,
        /// The operation.
        op: Op,
        /// Its sequence number.
        seq: u64,
        /// Bytes that were sent.
        sent: u64,
        /// Bytes that were expected.
        expected: u64,
    },

    /// An earlier operation on this communicator failed.
    #[error("the communicator is revoked, because an earlier operation failed: {first}; make a new communicator")]
    Revoked {
        /// The failure that revoked it.
        first: Arc<Error>,
    },

    /// The communicator was aborted or dropped, or its progress thread panicked, while the
    /// operation was in flight.
    #[error(
        "{op} seq={seq} was aborted: the communicator was aborted or dropped, or its progress thread panicked, while it was in \
         flight"
    )]
    Aborted {
        /// The operation.
        op: Op,
        /// Its sequence number.
        seq: u64,
    },

    /// A call panicked, which ended the communicator. A program that catches the panic finds this
    /// in [`Error::Revoked`].
    #[error(
        "{op} panicked, which has ended the communicator; this is a defect of kolo: please report it with the panic's message"
    )]
    Panicked {
        /// The operation that was called.
        op: Op,
    },

    /// This process was forked from the one that made the communicator.
    #[error(
        "{op}: this process was forked after the communicator was made; use it in the process that made it, and connect anew here"
    )]
    Forked {
        /// The operation that was called.
        op: Op,
    },

    /// The survivors of a failure continued without this rank, which called `shrink` too late.
    #[error(
        "the survivors of a failure continued without this rank, which called shrink too late{}; end this process, or connect anew",
        the_survivors(survivors)
    )]
    Excluded {
        /// The ranks that continued, as ranks of the communicator that failed. Empty if they have
        /// ended since.
        survivors: Vec<Rank>,
    },

    /// An option or an environment variable has an invalid value.
    #[error("{name}={value:?}: {expected}")]
    Setting {
        /// The option or variable.
        name: String,
        /// Its value.
        value: String,
        /// The valid values.
        expected: String,
    },

    /// No launcher told this process its rank and world size.
    #[error(
        "cannot tell this process's rank: {found}. Looked for {looked_for}. Start it with `kolo run`, torchrun, srun or mpirun, or use Communicator::builder()"
    )]
    NoLauncher {
        /// What was found instead.
        found: String,
        /// The variables that kolo looked for, by launcher.
        looked_for: String,
    },

    /// Ranks did not join before the deadline of the start.
    #[error(
        "{} of {world_size} ranks did not join within {waited:.1?} at {store}: missing {}; check that they were started, and with \
         the same store{}", ranks.len(), list(ranks), if_only_rank_0(ranks)
    )]
    Missing {
        /// The missing ranks.
        ranks: Vec<Rank>,
        /// The world size.
        world_size: usize,
        /// The URL of the store.
        store: String,
        /// How long this process waited.
        waited: Duration,
    },

    /// Two ranks were started with different world sizes.
    #[error(
        "world sizes differ: rank {rank} ({host}) was started with {theirs}, rank {my_rank} with {mine}; give all ranks the same"
    )]
    WorldSize {
        /// The other rank.
        rank: Rank,
        /// Its host's name.
        host: String,
        /// Its world size.
        theirs: usize,
        /// The rank that reports this.
        my_rank: Rank,
        /// Its world size.
        mine: usize,
    },

    /// Two processes were started with the same rank.
    #[error("rank {rank} was started twice: as {first} and as {second}; give every process its own rank")]
    RankTaken {
        /// The rank.
        rank: Rank,
        /// The process that came first.
        first: String,
        /// The process that came second.
        second: String,
    },

    /// Two ranks run versions of kolo with different protocols.
    #[error(
        "rank {rank} ({host}) speaks version {theirs} of kolo's protocol, this process speaks {mine}; install the same kolo everywhere"
    )]
    Version {
        /// The other rank.
        rank: Rank,
        /// Its host's name.
        host: String,
        /// Its protocol version.
        theirs: u32,
        /// This process's protocol version.
        mine: u32,
    },

    /// The store where ranks find each other failed.
    #[error("store {store}: {problem}")]
    Store {
        /// Its URL.
        store: String,
        /// What happened.
        problem: StoreError,
    },

    /// A gradient reducer was used wrongly, or its ranks differ.
    #[error("reducer: {problem}")]
    Reducer {
        /// What is wrong.
        problem: Box<ReducerError>,
    },

    /// A feature is not available on this machine or in this build.
    #[error("{what} is not available: {why}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// Why not.
        why: String,
    },

    /// A device, or its driver, failed.
    #[error("{device}: {doing}: {problem}")]
    Device {
        /// Its name.
        device: String,
        /// What kolo was doing.
        doing: &'static str,
        /// What the driver reported.
        problem: String,
    },

    /// A system call failed.
    #[error("{doing}: {source}")]
    Os {
        /// What kolo was doing.
        doing: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
}

impl Error {
    /// Returns whether the communicator is still usable after this error.
    pub fn leaves_communicator_usable(&self) -> bool {
        matches!(self, Error::Argument { .. } | Error::Setting { .. } | Error::Unsupported { .. } | Error::Reducer { .. })
    }

    /// Returns the rank at fault, in the communicator of the call, if it is known.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            Error::Peer { rank, .. } => Some(*rank),
            Error::Mismatch { culprit, .. } => Some(*culprit),
            Error::Counts { peer, .. } => Some(*peer),
            Error::Revoked { first } => first.culprit(),
            _ => None,
        }
    }

    pub(crate) fn os(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Os { doing: doing.into(), source: Arc::new(source) }
    }

    pub(crate) fn setting(name: impl Into<String>, value: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::Setting { name: name.into(), value: value.into(), expected: expected.into() }
    }
}

/// A program that parses an algorithm or a transport can use `?`.
impl From<UnknownNameError> for Error {
    fn from(unknown: UnknownNameError) -> Error {
        let expected = format!("known are {}", unknown.known.join(", "));
        Error::setting("name", unknown.given, expected)
    }
}

/// What is wrong with the arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// The root is not a rank of this communicator.
    #[error("root {root} is out of range; the communicator has ranks 0 to {}", world_size - 1)]
    Root {
        /// What was given.
        root: Rank,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The peer is not a rank of this communicator.
    #[error("peer {peer} is out of range; the communicator has ranks 0 to {}", world_size - 1)]
    Peer {
        /// What was given.
        peer: Rank,
        /// The size of the communicator.
        world_size: usize,
    },
    /// A rank cannot send to, or receive from, itself.
    #[error("rank {rank} cannot send to or receive from itself; copy instead")]
    SelfPeer {
        /// This rank.
        rank: Rank,
    },
    /// The reduction is not defined on these elements.
    #[error("{redop} is not defined on {dtype}")]
    ReduceOp {
        /// The reduction.
        redop: ReduceOp,
        /// The element type.
        dtype: DType,
    },
    /// A buffer has the wrong number of elements.
    #[error("the {buffer} buffer has {given} elements, {expected} are needed")]
    Length {
        /// Which buffer.
        buffer: &'static str,
        /// The elements needed.
        expected: usize,
        /// The elements given.
        given: usize,
    },
    /// A buffer cannot be divided into one block for each rank.
    #[error("the {buffer} buffer has {given} elements, which is not a multiple of the world size {world_size}; use the _v form")]
    Blocks {
        /// Which buffer.
        buffer: &'static str,
        /// The elements given.
        given: usize,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The number of counts is not the world size.
    #[error("{given} counts were given; one for each of the {world_size} ranks is needed")]
    Counts {
        /// The number of counts given.
        given: usize,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The root gave no buffer, which only the root must give.
    #[error("this rank is the root and must give a {buffer} buffer")]
    RootBuffer {
        /// Which buffer.
        buffer: &'static str,
    },
    /// A pointer is null and the count is not zero.
    #[error("the {buffer} pointer is null")]
    Null {
        /// Which buffer.
        buffer: &'static str,
    },
    /// A pointer is not a multiple of the element's size.
    #[error("the {buffer} pointer {address:#x} is not aligned to the {align} bytes of a {dtype}")]
    Misaligned {
        /// Which buffer.
        buffer: &'static str,
        /// The address.
        address: usize,
        /// The alignment in bytes.
        align: usize,
        /// The element type.
        dtype: DType,
    },
    /// The count, in bytes and over all ranks, is more than memory can hold.
    #[error("{count} elements are more than memory can hold")]
    TooMany {
        /// What was given.
        count: usize,
    },
    /// Send and receive buffers overlap without being in place.
    #[error("the send and receive buffers overlap, but are not in place")]
    Overlap,
}

/// How a peer failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Its connection ended without a goodbye: it crashed or was killed.
    #[error("closed its connection without a goodbye; it crashed or was killed")]
    Closed,
    /// Its process has ended.
    #[error("has died; its process is gone")]
    Died,
    /// It dropped its communicator, or exited, without a failure.
    #[error("has left; its last operation was seq {last_seq}")]
    Left {
        /// The last operation that it completed.
        last_seq: u64,
    },
    /// It did not take part before the deadline.
    #[error("did not take part within the deadline of {deadline:.1?}; it may be stopped, stuck, or not have made this call")]
    Silent {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its process runs, but did not make this call before the deadline.
    #[error("is alive, but did not make this call within the deadline of {deadline:.1?}; {}{}", did(*last_seq), waits(elsewhere))]
    Absent {
        /// The deadline of one operation.
        deadline: Duration,
        /// The last collective that it completed; 0 if none.
        last_seq: u64,
        /// The rank that it waits for in another communicator, if it does.
        elsewhere: Option<Box<Elsewhere>>,
    },
    /// Its process is stopped, by SIGSTOP or a debugger.
    #[error("is stopped, by a signal or a debugger; the deadline of {deadline:.1?} is over")]
    Stopped {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its machine accepts connections, but its process does not answer.
    #[error(
        "did not take part within the deadline of {deadline:.1?} and does not answer; its process is stopped, or its machine hangs"
    )]
    Unresponsive {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its address no longer accepts connections.
    #[error("is gone: its process has ended, or has dropped all its communicators")]
    Gone,
    /// It aborted the communicator.
    #[error("aborted the communicator")]
    Aborted,
    /// A thread of it panicked, which dropped the communicator.
    #[error("panicked; its own output says where")]
    Panicked,
    /// It made another call than a peer.
    #[error("called [{}], rank {} called [{}]{}; all ranks of a communicator must make the same calls in the same order", .0.mine, .0.rank, .0.theirs, if_tie(.0.is_tie))]
    Mismatch(Box<CallMismatch>),
    /// It sent another number of bytes than a peer expected.
    #[error("sent {sent} bytes where rank {to} expected {expected}; give both the same count")]
    Counts {
        /// The rank that expected them.
        to: Rank,
        /// Bytes that were sent.
        sent: u64,
        /// Bytes that were expected.
        expected: u64,
    },
    /// Its connection broke.
    #[error("lost its connection: {0}")]
    Broken(io::ErrorKind),
    /// No connection to it could be made.
    #[error("cannot be reached at {address}: {kind}")]
    Unreachable {
        /// Its address.
        address: String,
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// It has another secret.
    #[error("has another secret; give all ranks the same KOLO_SECRET")]
    Secret,
    /// The TLS handshake failed: one of the two does not trust the other's certificate.
    #[error("did not pass TLS: {0}; both need certificates for the name kolo that the authority in KOLO_TLS_CA has signed")]
    Tls(String),
    /// An operation failed on it, and it told its peers. Its own error names the cause.
    #[error("has revoked the communicator after a failure; its own error says what happened")]
    Revoked,
    /// A system call failed on it. Holds its own error.
    #[error("failed: {0}")]
    Failed(String),
    /// It made other calls than this rank earlier; the calls now are the same.
    #[error("made another call earlier; all ranks of a communicator must make the same calls in the same order")]
    Diverged,
    /// It sent bytes that are not of kolo's protocol.
    #[error("violated kolo's protocol: {0}")]
    Corrupt(&'static str),
}

/// The rank that a peer waits for in another communicator than that of the failed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Elsewhere {
    /// The rank that it waits for, as a rank of the job at its start.
    pub job_rank: Rank,
    /// The same rank in the communicator of the failed operation, if it is a member.
    pub rank: Option<Rank>,
    /// The call with which it waits, if that has not ended since.
    pub call: Option<Descriptor>,
}

/// Prints `rank 3 in another communicator (barrier seq=7)`.
impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} in another communicator")?,
            None => write!(f, "rank {} of the job in another communicator", self.job_rank)?,
        }
        match &self.call {
            Some(call) => write!(f, " ({call})"),
            None => Ok(()),
        }
    }
}

/// Two calls that should have been the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CallMismatch {
    /// The call of the rank at fault.
    pub mine: Descriptor,
    /// The rank that made another call.
    pub rank: Rank,
    /// The call of that rank.
    pub theirs: Descriptor,
    /// Whether equally many ranks are known to have made each of the two calls. Then either may be
    /// the wrong one.
    pub is_tie: bool,
}

/// How a store failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The URL is not that of a store.
    #[error("{0}; a store is file:///path, tcp://host:port, redis://host:port, rediss://host:port or env://")]
    Url(String),
    /// No store answered at the address.
    #[error(
        "no store answered within {waited:.1?} ({last}); check that rank 0 is running, that the address is right, \
         and that this rank was not started twice"
    )]
    Unreachable {
        /// How long this process tried.
        waited: Duration,
        /// The error of the last attempt.
        last: String,
    },
    /// The port on which this process must serve the store is taken.
    #[error(
        "it cannot be served at {address}: port {} is taken by {}; end that process, or choose another port in the store's URL \
         (KOLO_STORE) or MASTER_PORT; port 0 picks a free port", address.port(), holder_of(holder)
    )]
    PortTaken {
        /// The address of the store.
        address: SocketAddr,
        /// The process that holds the port, if it is known.
        holder: Option<String>,
    },
    /// A server answered, or a file exists, but it is not a store of kolo.
    #[error("{0}; it is not a store of kolo")]
    Foreign(String),
    /// The store is served by a version of kolo with another protocol.
    #[error("it speaks version {theirs} of kolo's protocol, this process speaks {mine}; install the same kolo everywhere")]
    Version {
        /// The store's protocol version.
        theirs: u32,
        /// This process's protocol version.
        mine: u32,
    },
    /// Another user may have written its file.
    #[error(
        "{0}; ranks use a file only if it belongs to the user that all of them run as, and no other user can open it: remove it, or \
         choose another path"
    )]
    Untrusted(String),
    /// Its file does not exist and cannot be created.
    #[error(
        "its file cannot be created in the folder {folder}: {source}; make the folder, where all ranks reach it and their user may \
         write, or choose another path"
    )]
    Folder {
        /// The folder.
        folder: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The file system of its file does not answer.
    #[error(
        "its file system has not answered for {waited:.1?}; check the mount and the server behind it, or choose another store"
    )]
    Hung {
        /// How long this process waited.
        waited: Duration,
    },
    /// The store belongs to another job.
    #[error("it belongs to {}, this process to job {mine:?}; give each job its own store", name_of(theirs))]
    OtherJob {
        /// The store's job; empty if it is not known, because the jobs have no secret.
        theirs: String,
        /// This process's job.
        mine: String,
    },
    /// Another job is starting with the store at this moment.
    #[error("{}", in_use(theirs, mine, process))]
    InUse {
        /// The other job; empty if it is not known.
        theirs: String,
        /// This process's job.
        mine: String,
        /// The other job's rank 0; empty if it is not known.
        process: String,
    },
    /// The store is on another machine, and the ranks share no secret.
    #[error(
        "without a secret, ranks listen only to their own machine, and this store is on another; give all ranks the same KOLO_SECRET \
         (openssl rand -hex 32), or KOLO_INSECURE=1 if no other user reaches the network"
    )]
    NoSecret,
    /// The two ends do not share a secret.
    #[error(
        "the job secret is not the same on both ends; check KOLO_SECRET and KOLO_SECRET_FILE, and that no other job uses this store"
    )]
    Secret,
    /// The rank that the key names did not set the value.
    #[error(
        "the value of {key:?} has no valid signature of this job's secret; another job uses this store, ranks have different \
         secrets (KOLO_SECRET, KOLO_SECRET_FILE), or another process changes values in it"
    )]
    Forged {
        /// The key.
        key: String,
    },
    /// No rank set a key.
    #[error("no rank set {key:?} within {waited:.1?}")]
    Timeout {
        /// The key.
        key: String,
        /// How long this process waited.
        waited: Duration,
    },
    /// A key or value is larger than a store accepts.
    #[error("{what} of {bytes} bytes is beyond the limit of {limit}")]
    TooLarge {
        /// `key` or `value`.
        what: &'static str,
        /// Its size in bytes.
        bytes: usize,
        /// The largest size in bytes.
        limit: usize,
    },
    /// A system call, or a request to the server, failed.
    #[error("{doing}: {source}")]
    Io {
        /// What kolo was doing.
        doing: &'static str,
        /// The error.
        source: Arc<io::Error>,
    },
}

fn name_of(job: &str) -> String {
    if job.is_empty() { "another job".to_owned() } else { format!("job {job:?}") }
}

fn in_use(theirs: &str, mine: &str, process: &str) -> String {
    let process = if process.is_empty() { String::new() } else { format!(" ({process})") };
    if theirs == mine {
        return format!(
            "another rank 0 of a job named {mine:?}{process} is starting with it at this moment; if rank 0 was not started twice, \
             two jobs have the same name: give each job its own store, and its own name (KOLO_JOB_ID)"
        );
    }
    format!(
        "{}{process} is starting with it at this moment, this process belongs to job {mine:?}; give each job its own store",
        name_of(theirs)
    )
}

impl StoreError {
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { doing, source: Arc::new(source) }
    }

    pub(crate) fn at(self, store: impl Into<String>) -> Error {
        Error::Store { store: store.into(), problem: self }
    }
}

/// How a gradient reducer, or a call of it, is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerError {
    /// Two ranks gave different parameters, buffers or options. All ranks report the same
    /// difference, the first one.
    #[error(
        "ranks differ at {what}: rank 0 has {first}, rank {rank} has {other}; all ranks must give the same parameters in the same \
         order, and the same options"
    )]
    Differs {
        /// The parameter, buffer or option.
        what: String,
        /// What rank 0 has.
        first: String,
        /// The lowest rank that differs.
        rank: Rank,
        /// What it has.
        other: String,
    },
    /// Another rank cannot make its reducer. No rank makes one.
    #[error("rank {rank} cannot make a reducer: {why}")]
    Refused {
        /// The lowest such rank.
        rank: Rank,
        /// The error of that rank.
        why: String,
    },
    /// The step ended, but gradients are missing. The step of the other ranks fails, too.
    #[error(
        "finish() was called, but {name}{} not ready; make it ready, say that it is unused, or choose Unused::Find or \
         Unused::Static", if *others > 0 { format!(" and {others} more are") } else { " is".to_owned() }
    )]
    NotReady {
        /// The first missing parameter in forward order.
        name: String,
        /// How many more are missing.
        others: usize,
    },
    /// A parameter was made ready, or declared unused, twice in a step.
    #[error("{name} was marked ready or unused twice in this step; accumulate gradients in separate steps")]
    Twice {
        /// The parameter.
        name: String,
    },
    /// A parameter was used that the first step had not used, although the graph was declared
    /// static.
    #[error("{name} was not used in the first step, but is in this one; with Unused::Static every step uses the same parameters")]
    NotStatic {
        /// The parameter.
        name: String,
    },
    /// A view of the gradient exists already.
    #[error("the gradient of {name} is being written already; drop its view first")]
    Lent {
        /// The parameter.
        name: String,
    },
    /// The parameter's index is out of range.
    #[error("there is no parameter {index}; there are {count}")]
    NoParameter {
        /// What was given.
        index: usize,
        /// The number of parameters.
        count: usize,
    },
    /// The elements given or requested are not of the type of the parameter or buffer.
    #[error("{name} has elements of {dtype}, not {given}")]
    Elements {
        /// The parameter or buffer.
        name: String,
        /// Its element type.
        dtype: DType,
        /// The element type of the call.
        given: DType,
    },
    /// A tensor on the device was given or requested as host memory, or the other way round.
    #[error("{name} was described as in {0} memory, but {1} memory was given or asked for", place(*on_device), place(!on_device))]
    Place {
        /// The parameter or buffer.
        name: String,
        /// Whether it is on the device.
        on_device: bool,
    },
    /// The number of elements, or of tensors, is wrong.
    #[error("{name} has {expected}, but {given} were given")]
    Length {
        /// The parameter, the buffer, or the group of tensors.
        name: String,
        /// How many it has.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// A hook in C did not return 0.
    #[error("hook_function returned {returned} for bucket {bucket}, not 0 (as a kolo_result_t: {meaning})")]
    Hook {
        /// The bucket.
        bucket: usize,
        /// What it returned.
        returned: i32,
        /// The meaning of that number as a result of kolo.
        meaning: &'static str,
    },
    /// The call is not possible at this moment.
    #[error("{call}: {why}")]
    Moment {
        /// The call.
        call: &'static str,
        /// Why it is not possible.
        why: &'static str,
    },
}

impl From<ReducerError> for Error {
    fn from(problem: ReducerError) -> Error {
        Error::Reducer { problem: Box::new(problem) }
    }
}

/// The elements of an operation; empty if it has none, or if it failed before it began.
fn shape(op: Op, dtype: DType, count: u64) -> String {
    if count == 0 || matches!(op, Op::Barrier | Op::Connect | Op::Split) { String::new() } else { format!(" {dtype} x {count}") }
}

fn did(last_seq: u64) -> String {
    if last_seq == 0 { "it has completed none so far".to_owned() } else { format!("its last completed seq is {last_seq}") }
}

fn waits(elsewhere: &Option<Box<Elsewhere>>) -> String {
    elsewhere.as_ref().map_or_else(String::new, |elsewhere| format!("; it waits for {elsewhere}"))
}

fn place(on_device: bool) -> &'static str {
    if on_device { "the device's" } else { "host" }
}

fn holder_of(holder: &Option<String>) -> &str {
    holder.as_deref().unwrap_or("a process that this one cannot see")
}

/// The survivors, if they are known.
fn the_survivors(survivors: &[Rank]) -> String {
    match survivors {
        [] => ", and have ended meanwhile".to_owned(),
        some => format!(": they were ranks {} of the communicator that failed", list(some)),
    }
}

/// The rank that all ranks report in a call mismatch, unless it is the peer that the message names.
fn at_fault(culprit: Rank, peer: Rank, is_tie: bool) -> String {
    let named = if culprit == peer { String::new() } else { format!("; all ranks report rank {culprit}") };
    named + if_tie(is_tie)
}

/// Says that the rank at fault is one of several that may be.
fn if_tie(is_tie: bool) -> &'static str {
    if is_tie { "; equally many ranks made each of the two calls, so either may be the wrong one" } else { "" }
}

/// The other reason why a rank finds no rank 0.
fn if_only_rank_0(missing: &[Rank]) -> &'static str {
    if missing == [0] {
        ", and that this rank was not started twice: the others may have started without this process"
    } else {
        ""
    }
}

/// How long an operation had been in flight, if that is known.
fn after_some(time: Duration) -> String {
    if time.is_zero() { String::new() } else { format!(" after {time:.1?}") }
}

/// Lists ranks with their runs shortened, as `1, 2, 5 to 9`: there may be thousands.
fn list(ranks: &[Rank]) -> impl fmt::Display {
    let mut text = String::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let run = rest.iter().enumerate().take_while(|&(i, &rank)| first.checked_add(i) == Some(rank)).count();
        if !text.is_empty() {
            text += ", ";
        }
        text += &match run {
            1 => first.to_string(),
            2 => format!("{first}, {}", first + 1),
            _ => format!("{first} to {}", first + run - 1),
        };
        rest = &rest[run..];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_error_reads_like_a_sentence() {
        let error = Error::Peer {
            rank: 3,
            host: "node7".into(),
            pid: 4121,
            op: Op::AllReduce,
            seq: 812,
            dtype: DType::F32,
            count: 1 << 20,
            after: Duration::from_millis(83),
            cause: Cause::Closed,
        };
        assert_eq!(
            error.to_string(),
            "all_reduce seq=812 f32 x 1048576 failed after 83.0ms: rank 3 (node7, pid 4121) closed its connection without a \
             goodbye; it crashed or was killed"
        );
    }

    /// Then the rank that is named is one of several that may be at fault.
    #[test]
    fn a_tie_between_two_calls_is_told() {
        let call = Box::new(Descriptor::nothing());
        for is_tie in [false, true] {
            let calls = CallMismatch { mine: *call, rank: 0, theirs: *call, is_tie };
            let (mine, theirs, host) = (call.clone(), call.clone(), "here".into());
            let seen = Error::Mismatch { culprit: 1, rank: 0, peer: 1, host, mine, theirs, is_tie };
            for text in [seen.to_string(), Cause::Mismatch(Box::new(calls)).to_string()] {
                assert_eq!(text.contains("; equally many ranks made each of the two calls, so either may be"), is_tie, "{text}");
            }
        }
    }

    #[test]
    fn two_jobs_of_one_name_are_told_apart() {
        let problem = |theirs: &str| {
            let (theirs, mine, process) = (theirs.to_owned(), "env".to_owned(), "process 7 on node1".to_owned());
            StoreError::InUse { theirs, mine, process }.to_string()
        };
        assert!(problem("env").starts_with("another rank 0 of a job named \"env\" (process 7 on node1) is starting"));
        assert!(problem("first").starts_with("job \"first\" (process 7 on node1) is starting"));
    }

    #[test]
    fn many_missing_ranks_are_named_shortly() {
        assert_eq!(list(&[1]).to_string(), "1");
        assert_eq!(list(&[1, 2, 5, 6, 7, 9]).to_string(), "1, 2, 5 to 7, 9");
        // A store may return any number.
        let last = usize::MAX;
        assert_eq!(list(&[last - 1, last, 0]).to_string(), format!("{}, {last}, 0", last - 1));
    }

    #[test]
    fn results_stay_small() {
        assert!(size_of::<Error>() <= 128, "{} bytes", size_of::<Error>());
    }
}
