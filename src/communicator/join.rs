//! How a process joins a job that has started.

use std::sync::Arc;
use std::time::Instant;

use super::Communicator;
use super::connect::connect;
use crate::bootstrap::Start;
use crate::bootstrap::admission::{Job, Newcomer, Within};
use crate::error::{Error, Result};

/// Waits until the ranks of a job admit this process, and connects with them. If a growth fails, it
/// waits for the next.
pub(super) fn join(job: Job, began: Instant) -> Result<Communicator> {
    let mut newcomer = Newcomer::new(&job, began, began + job.settings.start_timeout)?;
    let (core, info, identity) = loop {
        let admitted = newcomer.wait()?;
        let within = Within::new(&*admitted.store, admitted.growth);
        let start = Start {
            rank: admitted.rank,
            world_size: admitted.world_size,
            identity: admitted.identity,
            store: &within,
            store_url: admitted.store_url,
            settings: &job.settings,
            deadline: Instant::now() + job.settings.start_timeout,
            absence: None,
        };
        match connect(&start) {
            Ok(connected) => break connected,
            Err(error @ (Error::Peer { .. } | Error::Missing { .. } | Error::Store { .. })) => newcomer.failed(error),
            Err(error) => return Err(error),
        }
    };
    drop(newcomer);
    tracing::info!(rank = info.rank, world_size = info.members.len(), after = ?began.elapsed(), "joined the job");
    job.keep(identity);
    Ok(Communicator::new(core, info).of_job(Arc::new(job)))
}
