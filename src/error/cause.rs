//! How a peer failed.

use std::fmt;
use std::io;
use std::time::Duration;

use super::shown::{count, time};
use crate::types::{Descriptor, Rank, Tag};

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
    #[error("did not take part within the deadline of {}; it may be stopped, stuck, or not have made this call", time(*deadline))]
    Silent {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its process runs, but did not make this call before the deadline.
    #[error(
        "is alive, but did not make this call within the deadline of {}; {}{}", time(*deadline), did(*last_seq), waits(elsewhere)
    )]
    Absent {
        /// The deadline of one operation.
        deadline: Duration,
        /// The last collective that it completed; 0 if none.
        last_seq: u64,
        /// The rank that it waits for in another communicator, if it does.
        elsewhere: Option<Box<Elsewhere>>,
    },
    /// It sent no message with the tag of a receive before the deadline, but others, or it is this rank
    /// itself. Or its part of a collective is behind messages for which there is no room.
    #[error("{unmatched} within the deadline of {}{}", time(*deadline), unmatched.others())]
    Unmatched {
        /// The deadline of one operation.
        deadline: Duration,
        /// The message, and those that wait.
        unmatched: Box<Unmatched>,
    },
    /// Its process is stopped, by SIGSTOP or a debugger.
    #[error("is stopped, by a signal or a debugger; the deadline of {} is over", time(*deadline))]
    Stopped {
        /// The deadline of one operation.
        deadline: Duration,
    },
    /// Its machine accepts connections, but its process does not answer.
    #[error(
        "did not take part within the deadline of {} and does not answer; its process is stopped, or its machine hangs", time(*deadline)
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
    /// It called `shrink`, and no rank has reported a failure before.
    #[error("called shrink, which ends the communicator; call shrink on this rank, too")]
    Shrinks,
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
    #[error("cannot be reached at {address}: {kind}{}", advice(address))]
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
    /// A system call failed on it, or a communicator from which it was making this one by `split`.
    /// Holds its own error, which may name a rank that is no member of this communicator.
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

/// A message that did not come or was not received, and those of the same rank that wait for receives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Unmatched {
    /// The tag of the receive. `None` in a collective.
    pub tag: Option<Tag>,
    /// Whether it is one of this rank to itself.
    pub is_itself: bool,
    /// How many messages of that rank wait; of all ranks, for a receive from any.
    pub waiting: u64,
    /// The lowest of their tags.
    pub tags: Vec<Tag>,
    /// The tag of the next message, if it waits at its sender because it does not fit. Everything that
    /// the sender has sent afterwards is behind it.
    pub refused: Option<Tag>,
}

/// Prints `sent no message with tag 9`.
impl fmt::Display for Unmatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exchanged = if self.is_itself { "exchanged with itself no message" } else { "sent no message" };
        match self.tag {
            None => f.write_str("did not take part"),
            Some(0) => write!(f, "{exchanged} without a tag"),
            Some(tag) => write!(f, "{exchanged} with tag {tag}"),
        }
    }
}

impl Unmatched {
    /// Says which messages wait.
    fn others(&self) -> String {
        let Unmatched { tag, is_itself, waiting, ref tags, refused } = *self;
        let mut text = String::new();
        if waiting > 0 {
            let list = tags.iter().map(Tag::to_string).collect::<Vec<_>>().join(", ");
            let wait = if waiting == 1 { "waits" } else { "wait" };
            let of_tags = if tag.is_some() { "of other tags" } else { "with tags" };
            text = format!("; {} {of_tags} {wait}: {list}", count(waiting as usize, "message"));
        }
        if let Some(next) = refused {
            let first = if waiting > 0 { "those that wait" } else { "it" };
            text += &format!(
                "; the next one, with tag {next}, does not fit and waits at the sender, all others behind it: receive {first} first"
            );
        } else if is_itself {
            text += "; start the receive before a large send, or send with a nonblocking call";
        }
        text
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

/// What to check if a rank advertises an address that no other host can reach.
fn advice(address: &str) -> &'static str {
    match address.parse::<std::net::SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => "; if it is on another host, check KOLO_INTERFACE there",
        _ => "",
    }
}

fn did(last_seq: u64) -> String {
    if last_seq == 0 { "it has completed none so far".to_owned() } else { format!("its last completed seq is {last_seq}") }
}

fn waits(elsewhere: &Option<Box<Elsewhere>>) -> String {
    elsewhere.as_ref().map_or_else(String::new, |elsewhere| format!("; it waits for {elsewhere}"))
}

/// Says that the rank at fault is one of several that may be.
pub(super) fn if_tie(is_tie: bool) -> &'static str {
    if is_tie { "; equally many ranks made each of the two calls, so either may be the wrong one" } else { "" }
}
