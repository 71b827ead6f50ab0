//! What a rank tells processes that watch the job: `kolo top`, and a collector of metrics.
//!
//! | file | what it does |
//! |---|---|
//! | `snapshot` | what one rank does at one moment, and its encoding |
//! | `answer` | takes the snapshot of this rank, without a lock for which an operation could wait |
//! | `exposition` | a snapshot as Prometheus text |
//! | `exporter` | serves that text over HTTP, at a port or a Unix socket |

mod answer;
pub(crate) mod exporter;
pub(crate) mod exposition;
mod snapshot;

pub(crate) use answer::{STATUS, answer};
pub use snapshot::{Communicator, Failure, Link, OpSummary, Running, Snapshot, Wait};
#[cfg(any(fuzzing, test))]
pub(crate) use snapshot::{fuzz, samples};
