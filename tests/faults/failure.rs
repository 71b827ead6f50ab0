//! An error of a rank as one line, which the rank writes and the test reads.

use std::fmt;

use kolo::{Cause, Error, Op};

use crate::system::now;

/// A call that failed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Failure {
    /// Microseconds on the clock that all processes of a machine share.
    pub(crate) at: u64,
    /// The kind of the error: the variant of [`Error`].
    pub(crate) kind: String,
    /// The operation and its sequence number, as the error has them and as the rank counted them.
    pub(crate) operation: String,
    pub(crate) called: String,
    /// The rank at fault, its host and its process.
    pub(crate) culprit: Option<usize>,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) cause: String,
    /// The two ranks of a call mismatch.
    pub(crate) pair: Vec<usize>,
    /// The message of the error.
    pub(crate) text: String,
}

impl Failure {
    /// Describes an error. `call` is the call as the rank made it: the operation, and its number on
    /// the communicator.
    pub(crate) fn of(error: &Error, call: Option<(Op, u64)>) -> Failure {
        let called = call.map_or_else(String::new, |(op, seq)| format!("{op} seq={seq}"));
        let base = Failure { at: now(), called, culprit: error.culprit(), text: error.to_string(), ..Failure::default() };
        match error {
            Error::Peer { rank, host, pid, op, seq, cause, .. } => {
                let pair = if let Cause::Mismatch(differs) = cause { vec![*rank, differs.rank] } else { Vec::new() };
                Failure {
                    kind: "Peer".to_owned(),
                    operation: format!("{op} seq={seq}"),
                    host: host.to_string(),
                    pid: *pid,
                    cause: format!("{cause:?}"),
                    pair,
                    ..base
                }
            }
            Error::Mismatch { rank, peer, host, mine, .. } => Failure {
                kind: "Mismatch".to_owned(),
                operation: format!("{} seq={}", mine.op(), mine.seq()),
                host: host.to_string(),
                pair: vec![*rank, *peer],
                ..base
            },
            Error::Aborted { op, seq } => Failure { kind: "Aborted".to_owned(), operation: format!("{op} seq={seq}"), ..base },
            other => Failure { kind: kind(other).to_owned(), ..base },
        }
    }

    pub(crate) fn parse(line: &str) -> Failure {
        let fields: Vec<&str> = line.split('\t').collect();
        let [at, kind, operation, called, culprit, host, pid, cause, pair, text] = fields[..] else {
            panic!("not a rank's line about a failure: {line:?}")
        };
        let owned = |field: &str| field.to_owned();
        Failure {
            at: at.parse().unwrap(),
            kind: owned(kind),
            operation: owned(operation),
            called: owned(called),
            culprit: culprit.parse().ok(),
            host: owned(host),
            pid: pid.parse().unwrap(),
            cause: owned(cause),
            pair: pair.split_whitespace().map(|rank| rank.parse().unwrap()).collect(),
            text: owned(text),
        }
    }
}

/// The line that [`Failure::parse`] reads.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { at, kind, operation, called, culprit, host, pid, cause, pair, text } = self;
        let culprit = culprit.map_or_else(|| "-".to_owned(), |rank| rank.to_string());
        let pair: Vec<String> = pair.iter().map(usize::to_string).collect();
        let line = [&at.to_string(), kind, operation, called, &culprit, host, &pid.to_string(), cause, &pair.join(" "), text];
        f.write_str(&line.map(|field| field.replace(['\t', '\n'], " ")).join("\t"))
    }
}

/// Returns the name of an error's variant.
pub(crate) fn kind(error: &Error) -> &'static str {
    match error {
        Error::Argument { .. } => "ArgumentError",
        Error::Peer { .. } => "Peer",
        Error::Mismatch { .. } => "Mismatch",
        Error::Counts { .. } => "Counts",
        Error::Revoked { .. } => "Revoked",
        Error::Aborted { .. } => "Aborted",
        Error::Forked { .. } => "Forked",
        Error::Excluded { .. } => "Excluded",
        Error::Setting { .. } => "Setting",
        Error::NoLauncher { .. } => "NoLauncher",
        Error::Missing { .. } => "Missing",
        Error::WorldSize { .. } => "WorldSize",
        Error::RankTaken { .. } => "RankTaken",
        Error::Version { .. } => "Version",
        Error::Store { .. } => "Store",
        Error::Os { .. } => "Os",
        Error::NoMemory { .. } => "NoMemory",
        _ => "another",
    }
}
