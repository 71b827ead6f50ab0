//! The error type. It carries data to match on, and its message names what happened, the rank at
//! fault, and what to do.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

mod argument;
mod cause;
mod reducer;
pub(crate) mod shown;
mod store;

pub use argument::ArgumentError;
pub use cause::{CallMismatch, Cause, Elsewhere, Unmatched};
pub use reducer::ReducerError;
pub use store::StoreError;

use crate::types::{DType, Descriptor, Op, Rank, UnknownNameError};
use cause::if_tie;
use shown::{count, list, time};

/// What every fallible call returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Defines an enum of errors whose `Debug` prints the sentence, and its fields with `{:#?}`.
macro_rules! told_by_debug {
    (
        $(#[$of_enum:meta])*
        pub enum $name:ident {
            $($(#[$of_variant:meta])* $variant:ident { $($(#[$of_field:meta])* $field:ident: $type:ty,)* },)*
        }
    ) => {
        $(#[$of_enum])*
        pub enum $name {
            $($(#[$of_variant])* $variant { $($(#[$of_field])* $field: $type,)* },)*
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                if !f.alternate() {
                    return fmt::Display::fmt(self, f);
                }
                match self {
                    $($name::$variant { $($field,)* } => {
                        f.debug_struct(stringify!($variant))$(.field(stringify!($field), $field))*.finish()
                    })*
                }
            }
        }
    };
}

told_by_debug! {
    /// Why a call failed.
    ///
    /// [`Error::Argument`] is found before anything is sent and leaves the communicator usable, as do
    /// those that [`Error::leaves_communicator_usable`] lists. After any other failure of an operation
    /// the communicator is revoked: every later call on it returns [`Error::Revoked`] at once.
    ///
    /// `{}` prints a sentence for users: what happened, to which rank, and what to do. `{:?}` prints the
    /// same, so that a `main` that returns an error shows it. `{:#?}` prints the variant and its fields.
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
    #[derive(Clone, thiserror::Error)]
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
        /// Inside a host a rank writes at most its own block before all ranks have compared their calls,
        /// but in `all_to_all_v`. There and between hosts it compares its call with that of each peer
        /// before it accepts a message; the receive buffer may already hold messages of peers whose call
        /// matched. A rank that
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

        /// `grow` did not admit the newcomers that it found. The communicator stays as it was.
        #[error("the communicator does not grow: {why}; it stays usable, and grow can be called again")]
        NotGrown {
            /// What happened.
            why: String,
        },

        /// The ranks of the job did not admit this process, which was to join them.
        #[error("the ranks of job {job:?} did not admit this process, which waited {} at {store}: {why}", time(*waited))]
        NotAdmitted {
            /// The name of the job.
            job: String,
            /// The URL of the store.
            store: String,
            /// How long this process waited.
            waited: Duration,
            /// What is known of the reason.
            why: String,
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
            "cannot tell this process's rank: {found}. Looked for {looked_for}. Start it with `kolo run`, torchrun, srun or mpirun, or give rank, world size and store in the program"
        )]
        NoLauncher {
            /// What was found instead.
            found: String,
            /// The variables that kolo looked for, by launcher.
            looked_for: String,
        },

        /// Ranks did not join before the deadline of the start.
        #[error(
            "{} of {} did not join within {} at {store}: missing {}; check that they were started, and with \
             the same store{}", ranks.len(), count(*world_size, "rank"), time(*waited), list(ranks), if_only_rank_0(ranks)
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

        /// A rank had no memory for what it was about to allocate. In a call of all ranks, all return
        /// this, and none keeps any of it. The communicator stays usable.
        #[error("{op}: rank {rank} ({host}) has no memory for {bytes} bytes; free some there, raise its limit, or ask for less")]
        NoMemory {
            /// The operation that was called.
            op: Op,
            /// The rank without memory; the lowest of several.
            rank: Rank,
            /// Its host's name.
            host: Arc<str>,
            /// What that rank asked for.
            bytes: u64,
        },

        /// A system call failed.
        #[error("{doing}: {source}")]
        Os {
            /// What kolo was doing.
            doing: String,
            /// The system's error.
            source: Arc<io::Error>,
            /// This rank, in the communicator that the failure has ended; `None` if it has ended none.
            rank: Option<Rank>,
        },
    }
}

impl Error {
    /// Returns whether the communicator is still usable after this error.
    pub fn leaves_communicator_usable(&self) -> bool {
        matches!(
            self,
            Error::Argument { .. }
                | Error::Setting { .. }
                | Error::Unsupported { .. }
                | Error::Reducer { .. }
                | Error::NotGrown { .. }
                | Error::NoMemory { .. }
        )
    }

    /// Returns the rank at fault, in the communicator of the call, if it is known.
    pub fn culprit(&self) -> Option<Rank> {
        match self {
            Error::Peer { rank, .. } => Some(*rank),
            Error::Mismatch { culprit, .. } => Some(*culprit),
            Error::Counts { peer, .. } => Some(*peer),
            Error::NoMemory { rank, .. } => Some(*rank),
            Error::Os { rank, .. } => *rank,
            Error::Revoked { first } => first.culprit(),
            _ => None,
        }
    }

    pub(crate) fn os(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Os { doing: doing.into(), source: Arc::new(source), rank: None }
    }

    /// Names the rank at fault in the error of a system call.
    pub(crate) fn on_rank(mut self, own: Rank) -> Error {
        if let Error::Os { rank, .. } = &mut self {
            *rank = Some(own);
        }
        self
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

/// The elements of an operation; empty if it has none, or if it failed before it began.
fn shape(op: Op, dtype: DType, count: u64) -> String {
    if count == 0 || matches!(op, Op::Barrier | Op::Connect | Op::Split | Op::Grow) {
        String::new()
    } else {
        format!(" {dtype} x {count}")
    }
}

/// How long an operation had been in flight; empty if that is not known, or if it did not wait.
fn after_some(after: Duration) -> String {
    if after < Duration::from_micros(1) { String::new() } else { format!(" after {}", time(after)) }
}

/// The rank that all ranks report in a call mismatch, unless it is the peer that the message names.
fn at_fault(culprit: Rank, peer: Rank, is_tie: bool) -> String {
    let named = if culprit == peer { String::new() } else { format!("; all ranks report rank {culprit}") };
    named + if_tie(is_tie)
}

/// The survivors, if they are known.
fn the_survivors(survivors: &[Rank]) -> String {
    match survivors {
        [] => ", and have ended meanwhile".to_owned(),
        [one] => format!(": it was rank {one} of the communicator that failed"),
        some => format!(": they were ranks {} of the communicator that failed", list(some)),
    }
}

/// The other reason why a rank finds no rank 0.
fn if_only_rank_0(missing: &[Rank]) -> &'static str {
    if missing == [0] {
        ", and that this rank was not started twice: the others may have started without this process"
    } else {
        ""
    }
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

    /// A `main` that returns an error prints it by `{:?}`.
    #[test]
    fn debug_prints_the_sentence_or_the_fields() {
        let problem = ArgumentError::TooMany { count: 7 };
        let error = Error::Revoked { first: Arc::new(Error::Argument { op: Op::Alloc, problem }) };
        assert_eq!(format!("{error:?}"), error.to_string());
        let fields = format!("{error:#?}");
        assert!(fields.starts_with("Revoked {") && fields.contains("problem: TooMany {"), "{fields}");
    }

    #[test]
    fn results_stay_small() {
        assert!(size_of::<Error>() <= 128, "{} bytes", size_of::<Error>());
    }
}
