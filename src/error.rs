//! One error type, which carries data: match on it, or print it and read what happened, to whom, and what to do.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::types::{DType, Descriptor, Op, Rank, ReduceOp};

/// What every fallible call returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
///
/// [`Error::Argument`] is found before anything is sent and leaves the communicator as it was. After an operation failed in
/// another way the communicator is revoked: every later call on it returns [`Error::Revoked`] at once.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call cannot be carried out as written. Nothing was sent; the communicator is as usable as before.
    #[error("{op}: {problem}")]
    Argument {
        /// What was called.
        op: Op,
        /// What is wrong with it.
        problem: Argument,
    },

    /// A peer failed, left, or did not come, and the operation with it.
    #[error("{op} seq={seq}{} failed{}: rank {rank} ({host}, pid {pid}) {cause}", shape(*op, *dtype, *count), after_some(*after))]
    Peer {
        /// The rank at fault, in the communicator of the call.
        rank: Rank,
        /// Its host's name.
        host: Arc<str>,
        /// Its process.
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

    /// Two ranks called different things, now or a little earlier.
    ///
    /// Within a host no rank's memory was written before all had agreed. Between hosts, ranks compare with those whose messages
    /// they receive, before they take in any of them; what came from others who agreed may be in the receive buffer already.
    /// Ranks that are not one of the two get [`Error::Peer`] with [`Cause::Mismatch`]. A rank that only sends, like the root of a
    /// broadcast, may notice at a later call.
    #[error(
        "ranks disagree: this rank {rank} called [{mine}], rank {peer} ({host}) called [{theirs}]; all ranks of a communicator \
         must make the same calls in the same order"
    )]
    Mismatch {
        /// This rank.
        rank: Rank,
        /// The rank that called something else.
        peer: Rank,
        /// Its host's name.
        host: Arc<str>,
        /// What this rank called.
        mine: Box<Descriptor>,
        /// What the other rank called.
        theirs: Box<Descriptor>,
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

    /// The communicator was aborted or dropped, or its progress thread panicked, while the operation was under way.
    #[error(
        "{op} seq={seq} was given up: the communicator was aborted or dropped, or its progress thread panicked, while it was under \
         way"
    )]
    Aborted {
        /// The operation.
        op: Op,
        /// Its sequence number.
        seq: u64,
    },

    /// A call panicked, and the communicator has ended. A program that catches the panic finds this as what revoked it.
    #[error(
        "{op} panicked, which has ended the communicator; this is a defect of kolo: please report it with the panic's message"
    )]
    Panicked {
        /// What was called.
        op: Op,
    },

    /// This process was forked from the one that made the communicator.
    #[error(
        "{op}: this process was forked after the communicator was made; use it in the process that made it, and connect anew here"
    )]
    Forked {
        /// What was called.
        op: Op,
    },

    /// The others went on without this rank, which came too late.
    #[error(
        "the survivors of a failure went on without this rank, which came too late{}; end this process, or connect anew",
        who_went_on(survivors)
    )]
    Excluded {
        /// Who went on: ranks of the communicator that failed. Empty if they have ended meanwhile.
        survivors: Vec<Rank>,
    },

    /// An option or an environment variable has a value that it cannot have.
    #[error("{name}={value:?}: {expected}")]
    Setting {
        /// The option or variable.
        name: String,
        /// Its value.
        value: String,
        /// What it may be.
        expected: String,
    },

    /// Nothing told this process its rank and world size.
    #[error(
        "cannot tell this process's rank: {found}. Looked for {looked_for}. Start it with `kolo run`, torchrun, srun or mpirun, or use Communicator::builder()"
    )]
    NoLauncher {
        /// What was there, as far as it went.
        found: String,
        /// The variables that were looked for, by launcher.
        looked_for: String,
    },

    /// Ranks did not come to the start in time.
    #[error(
        "{} of {world_size} ranks did not join within {waited:.1?} at {store}: missing {}; check that they were started, and with \
         the same store", ranks.len(), list(ranks)
    )]
    Missing {
        /// Those that did not come.
        ranks: Vec<Rank>,
        /// How many were expected in all.
        world_size: usize,
        /// Where they were expected.
        store: String,
        /// How long they were waited for.
        waited: Duration,
    },

    /// Two ranks were given different world sizes.
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

    /// Two processes were given the same rank.
    #[error("rank {rank} was started twice: as {first} and as {second}; give every process its own rank")]
    RankTaken {
        /// The rank.
        rank: Rank,
        /// The process that came first.
        first: String,
        /// The process that came second.
        second: String,
    },

    /// Two ranks run versions of kolo that do not understand each other.
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

    /// The store where ranks find each other did not serve.
    #[error("store {store}: {problem}")]
    Store {
        /// Its URL.
        store: String,
        /// What happened.
        problem: StoreProblem,
    },

    /// A gradient reducer was used as it cannot be, or its ranks do not fit together.
    #[error("reducer: {problem}")]
    Reducer {
        /// What is wrong.
        problem: Box<ReducerProblem>,
    },

    /// What was asked for cannot be had here.
    #[error("{what} cannot be had here: {why}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why not.
        why: String,
    },

    /// A device, or its driver, failed.
    #[error("{device}: {doing}: {problem}")]
    Device {
        /// Its name.
        device: String,
        /// What was being done.
        doing: &'static str,
        /// What it said.
        problem: String,
    },

    /// The operating system refused something.
    #[error("{doing}: {source}")]
    Os {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
}

impl Error {
    /// Whether the communicator can still be used after this error.
    pub fn leaves_communicator_usable(&self) -> bool {
        matches!(self, Error::Argument { .. } | Error::Setting { .. } | Error::Unsupported { .. } | Error::Reducer { .. })
    }

    /// The rank at fault, in the communicator of the call, where it is known.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            Error::Peer { rank, .. } => Some(*rank),
            Error::Mismatch { peer, .. } | Error::Counts { peer, .. } => Some(*peer),
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

/// The sentence, for programs whose `main` returns an error: that prints it so.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// What is wrong with the arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Argument {
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
    Oneself {
        /// This rank.
        rank: Rank,
    },
    /// The reduction means nothing on these elements.
    #[error("{redop} is not defined on {dtype}")]
    ReduceOp {
        /// The reduction.
        redop: ReduceOp,
        /// The elements.
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
    /// There is not one count for each rank.
    #[error("{given} counts were given; one for each of the {world_size} ranks is needed")]
    Counts {
        /// The counts given.
        given: usize,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The root has to give a buffer that the others need not.
    #[error("this rank is the root and must give a {buffer} buffer")]
    RootBuffer {
        /// Which buffer.
        buffer: &'static str,
    },
    /// A pointer is null although the count is not zero.
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
        /// Where it points.
        address: usize,
        /// What it must be a multiple of.
        align: usize,
        /// The elements.
        dtype: DType,
    },
    /// The count, in bytes and over all ranks, is beyond what memory can hold.
    #[error("{count} elements are more than memory can hold")]
    TooMany {
        /// What was given.
        count: usize,
    },
    /// Send and receive buffers overlap without being in place.
    #[error("the send and receive buffers overlap, but are not in place")]
    Overlap,
}

/// What a failed peer did.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Its connection ended without a goodbye: it crashed or was killed.
    #[error("closed its connection without a goodbye; it crashed or was killed")]
    Closed,
    /// Its process is gone.
    #[error("has died; its process is gone")]
    Died,
    /// It dropped its communicator, or ended, in good order.
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
    /// It lives, but did not make this call before the deadline.
    #[error("is there, but did not make this call within the deadline of {deadline:.1?}; {}{}", did(*last_seq), waits(elsewhere))]
    Absent {
        /// The deadline of one operation.
        deadline: Duration,
        /// The last collective that it completed; 0 if none.
        last_seq: u64,
        /// What it waits for instead, if that is in another communicator.
        elsewhere: Option<Box<Elsewhere>>,
    },
    /// Its process is stopped, by SIGSTOP or a debugger.
    #[error("is stopped, by a signal or a debugger; the deadline of {deadline:.1?} is over")]
    Stopped {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its machine takes connections, but its process says nothing.
    #[error(
        "did not take part within the deadline of {deadline:.1?} and answers nothing; its process is stopped, or its machine stuck"
    )]
    Unresponsive {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Nobody is where it was.
    #[error("is gone: its process has ended, or has dropped all its communicators")]
    Gone,
    /// It aborted the communicator.
    #[error("aborted the communicator")]
    Aborted,
    /// It called something else than another rank.
    #[error("called [{}], rank {} called [{}]; all ranks of a communicator must make the same calls in the same order", .0.mine, .0.rank, .0.theirs)]
    Mismatch(Box<Differs>),
    /// It sent another number of bytes than another rank expected.
    #[error("sent {sent} bytes where rank {to} expected {expected}; give both the same count")]
    Counts {
        /// Who expected them.
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
        /// Where it was expected.
        address: String,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// It has another secret.
    #[error("has another secret; give all ranks the same KOLO_SECRET")]
    Secret,
    /// It could not be agreed with it on an encrypted connection: one of the two does not believe the other's certificate.
    #[error("did not pass TLS: {0}; both need certificates for the name kolo that the authority in KOLO_TLS_CA has signed")]
    Tls(String),
    /// An operation failed on it, and it told the others. Its own error says what happened.
    #[error("has revoked the communicator after a failure; its own error says what happened")]
    Revoked,
    /// It has made other calls than this rank before; both call the same now.
    #[error("made another call earlier; all ranks of a communicator must make the same calls in the same order")]
    Diverged,
    /// It sent what no kolo sends.
    #[error("sent what is no part of kolo's protocol: {0}")]
    Corrupt(&'static str),
}

/// For whom a rank waits in another communicator than the one that this is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Elsewhere {
    /// For this rank of the job, as it was when it started.
    pub job_rank: Rank,
    /// Which is this rank of the communicator that this is about, if it is one of it.
    pub rank: Option<Rank>,
    /// What it called, if it has not just given that up.
    pub call: Option<Descriptor>,
}

/// "rank 3 in another communicator (barrier seq=7)".
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
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Differs {
    /// What the rank at fault called.
    pub mine: Descriptor,
    /// The rank that called something else.
    pub rank: Rank,
    /// What it called.
    pub theirs: Descriptor,
}

/// What went wrong with a store.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreProblem {
    /// The URL names no store that kolo knows.
    #[error("{0}; a store is file:///path, tcp://host:port, redis://host:port, rediss://host:port or env://")]
    Url(String),
    /// Nobody answered.
    #[error("nobody answered within {waited:.1?} ({last}); is rank 0 running, and is the address right?")]
    Unreachable {
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt met.
        last: String,
    },
    /// The port that this store shall serve is taken.
    #[error(
        "it cannot be served at {address}: port {} is taken by {}; end that process, or choose another port in the store's URL \
         (KOLO_STORE) or MASTER_PORT; port 0 has one picked", address.port(), holder_of(holder)
    )]
    PortTaken {
        /// Where it would have been served.
        address: SocketAddr,
        /// Who holds it, if that can be known.
        holder: Option<String>,
    },
    /// Somebody answered, or a file is there, but it is no store of kolo.
    #[error("{0}; it is not a store of kolo")]
    Foreign(String),
    /// The store is served by a version of kolo that does not understand this one.
    #[error("it speaks version {theirs} of kolo's protocol, this process speaks {mine}; install the same kolo everywhere")]
    Version {
        /// The store's protocol version.
        theirs: u32,
        /// This process's protocol version.
        mine: u32,
    },
    /// Its file may have been written by another user.
    #[error(
        "{0}; ranks use a file only if it belongs to the user that all of them run as, and no other user can open it: remove it, or \
         choose another path"
    )]
    Untrusted(String),
    /// Its file is not there, and its folder cannot take one.
    #[error(
        "its file cannot be created in the folder {folder}: {source}; make the folder, where all ranks reach it and their user may \
         write, or choose another path"
    )]
    Folder {
        /// The folder.
        folder: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The file system of its file does not answer.
    #[error(
        "its file system has not answered for {waited:.1?}; check the mount and the server behind it, or choose another store"
    )]
    Hung {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The store belongs to another job.
    #[error("it belongs to {}, this process to job {mine:?}; give each job its own store", name_of(theirs))]
    OtherJob {
        /// The store's job; empty if that is not told, because the jobs have no secret.
        theirs: String,
        /// This process's job.
        mine: String,
    },
    /// Another job is starting with it at this moment.
    #[error(
        "{} is starting with it at this moment, this process belongs to job {mine:?}; give each job its own store",
        name_of(theirs)
    )]
    InUse {
        /// The other job; empty if that cannot be known.
        theirs: String,
        /// This process's job.
        mine: String,
    },
    /// It is on another machine, and the ranks share no secret.
    #[error(
        "without a secret, ranks listen only to their own machine, and this store is on another; give all ranks the same KOLO_SECRET \
         (openssl rand -hex 32), or KOLO_INSECURE=1 if nobody else reaches the network"
    )]
    NoSecret,
    /// The two ends do not share a secret.
    #[error(
        "the job secret is not the same on both ends; check KOLO_SECRET and KOLO_SECRET_FILE, and that no other job uses this store"
    )]
    Secret,
    /// A value was not put there by the rank that its key names.
    #[error(
        "the value of {key:?} has no valid signature of this job's secret; another job uses this store, ranks have different \
         secrets (KOLO_SECRET, KOLO_SECRET_FILE), or another process changes values in it"
    )]
    Forged {
        /// The key.
        key: String,
    },
    /// A key did not appear.
    #[error("nobody set {key:?} within {waited:.1?}")]
    Timeout {
        /// The key.
        key: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A key or value is beyond what a store takes.
    #[error("{what} of {bytes} bytes is beyond the limit of {limit}")]
    TooLarge {
        /// Key or value.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The most that is taken.
        limit: usize,
    },
    /// The operating system, or the server, refused something.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What it said.
        source: Arc<io::Error>,
    },
}

fn name_of(job: &str) -> String {
    if job.is_empty() { "another job".to_owned() } else { format!("job {job:?}") }
}

impl StoreProblem {
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> StoreProblem {
        move |source| StoreProblem::Io { doing, source: Arc::new(source) }
    }

    pub(crate) fn at(self, store: impl Into<String>) -> Error {
        Error::Store { store: store.into(), problem: self }
    }
}

/// What is wrong with a gradient reducer, or with a call of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerProblem {
    /// Two ranks gave it different parameters, buffers or options. All ranks report the same difference, the first.
    #[error(
        "ranks differ at {what}: rank 0 has {first}, rank {rank} has {other}; all ranks must give the same parameters in the same \
         order, and the same options"
    )]
    Differs {
        /// Which parameter, buffer or option.
        what: String,
        /// What rank 0 has.
        first: String,
        /// The lowest rank that has something else there.
        rank: Rank,
        /// What it has.
        other: String,
    },
    /// Another rank could not do its part. The reducer was not made.
    #[error("rank {rank} cannot make a reducer: {why}")]
    Refused {
        /// The lowest such rank.
        rank: Rank,
        /// Its own error.
        why: String,
    },
    /// The step was to end, but gradients are missing. The other ranks' step fails, too.
    #[error(
        "finish() was called, but {name}{} not ready; make it ready, say that it is unused, or choose Unused::Find or \
         Unused::Static", if *others > 0 { format!(" and {others} more are") } else { " is".to_owned() }
    )]
    NotReady {
        /// The first of them in forward order.
        name: String,
        /// How many more there are.
        others: usize,
    },
    /// A parameter was made ready, or said to be unused, twice in a step.
    #[error("{name} was made ready, or said to be unused, before in this step; accumulate in steps of their own")]
    Twice {
        /// The parameter.
        name: String,
    },
    /// A parameter was used that the first step had not used, although the graph was said to be static.
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
    /// There is no such parameter.
    #[error("there is no parameter {index}; there are {count}")]
    NoParameter {
        /// What was given.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// Elements of another type than the parameter's, or the buffer's, were given or asked for.
    #[error("{name} has elements of {dtype}, not {given}")]
    Elements {
        /// The parameter or buffer.
        name: String,
        /// Its elements.
        dtype: DType,
        /// The elements in the call.
        given: DType,
    },
    /// What is on the reducer's device was given, or asked for, as host memory, or the other way round.
    #[error("{name} was described as in {0} memory, but {1} memory was given or asked for", place(*on_device), place(!on_device))]
    Place {
        /// The parameter or buffer.
        name: String,
        /// Whether it is on the device.
        on_device: bool,
    },
    /// Another number of elements, or of tensors, was given.
    #[error("{name} has {expected}, but {given} were given")]
    Length {
        /// The parameter, the buffer, or what they are called together.
        name: String,
        /// How many it has.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// A hook of C's did not return 0.
    #[error("hook_function returned {returned} for bucket {bucket}, not 0; as a result of kolo it means: {meaning}")]
    Hook {
        /// The bucket.
        bucket: usize,
        /// What it returned.
        returned: i32,
        /// What that is, if it is what a call of kolo returned.
        meaning: &'static str,
    },
    /// The call came at a moment when it has no meaning.
    #[error("{call}: {why}")]
    Moment {
        /// What was called.
        call: &'static str,
        /// Why it cannot be.
        why: &'static str,
    },
}

impl From<ReducerProblem> for Error {
    fn from(problem: ReducerProblem) -> Error {
        Error::Reducer { problem: Box::new(problem) }
    }
}

/// Elements, where there are any: an operation that met an error before it began has none.
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

/// `1, 2, 5 to 9`: ranks as a reader wants them, even if there are thousands.
/// The survivors, if they are known.
fn who_went_on(survivors: &[Rank]) -> String {
    match survivors {
        [] => ", and have ended meanwhile".to_owned(),
        some => format!(": they were ranks {} of the communicator that failed", list(some)),
    }
}

/// How long an operation had been under way, if that is known.
fn after_some(time: Duration) -> String {
    if time.is_zero() { String::new() } else { format!(" after {time:.1?}") }
}

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

    #[test]
    fn many_missing_ranks_are_named_shortly() {
        assert_eq!(list(&[1]).to_string(), "1");
        assert_eq!(list(&[1, 2, 5, 6, 7, 9]).to_string(), "1, 2, 5 to 7, 9");
        // What a store says may be anything.
        let last = usize::MAX;
        assert_eq!(list(&[last - 1, last, 0]).to_string(), format!("{}, {last}, 0", last - 1));
    }

    #[test]
    fn results_stay_small() {
        assert!(size_of::<Error>() <= 128, "{} bytes", size_of::<Error>());
    }
}
