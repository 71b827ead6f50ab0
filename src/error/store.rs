//! How a store failed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Error;
use super::shown::time;

/// How a store failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The URL is not that of a store.
    #[error("{0}; a store is file:///path, tcp://host:port, redis://host:port (rediss:// with TLS) or env://")]
    Url(String),
    /// No store answered at the address.
    #[error(
        "no store answered within {} ({last}); check that rank 0 is running, that the address is right, \
         and that this rank was not started twice", time(*waited)
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
        "its file system has not answered for {}; check the mount and the server behind it, or choose another store", time(*waited)
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
    #[error("no rank set {key:?} within {}", time(*waited))]
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

impl StoreError {
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { doing, source: Arc::new(source) }
    }

    pub(crate) fn at(self, store: impl Into<String>) -> Error {
        Error::Store { store: store.into(), problem: self }
    }
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

fn holder_of(holder: &Option<String>) -> &str {
    holder.as_deref().unwrap_or("a process that this one cannot see")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_jobs_of_one_name_are_told_apart() {
        let problem = |theirs: &str| {
            let (theirs, mine, process) = (theirs.to_owned(), "env".to_owned(), "process 7 on node1".to_owned());
            StoreError::InUse { theirs, mine, process }.to_string()
        };
        assert!(problem("env").starts_with("another rank 0 of a job named \"env\" (process 7 on node1) is starting"));
        assert!(problem("first").starts_with("job \"first\" (process 7 on node1) is starting"));
    }
}
