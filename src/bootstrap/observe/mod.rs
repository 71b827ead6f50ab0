//! What a rank tells processes that watch the job: `kolo top`, and a collector of metrics.
//!
//! | file | what it does |
//! |---|---|
//! | `snapshot` | what one rank does at one moment, and its encoding |
//! | `answer` | takes the snapshot of this rank, without a lock for which an operation could wait |
//! | `attachment` | the file by which `kolo top` finds and enters a job of this user |
//! | `exposition` | a snapshot as Prometheus text |
//! | `exporter` | serves that text over HTTP, at a port or a Unix socket |
//! | `offered` | what a process offers while it belongs to the job: the file, and the exporter |

mod answer;
mod attachment;
mod exporter;
mod exposition;
mod offered;
mod snapshot;

pub(super) use answer::{STATUS, answer};
pub(super) use attachment::Attachment;
pub(super) use offered::Offered;
pub use snapshot::{Communicator, Failure, Link, OpSummary, Running, Snapshot, Wait};
#[cfg(any(fuzzing, test))]
pub(crate) use snapshot::{fuzz, samples};
