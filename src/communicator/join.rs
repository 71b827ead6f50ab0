//! How a process joins a job that has started.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::Communicator;
use super::connect::connect;
use crate::error::{Error, Result, shown};
use crate::rendezvous::Start;
use crate::rendezvous::admission::{Job, Newcomer, Within};
use crate::timeouts::GROWTH_CHECK;

/// Waits until the ranks of a job admit this process, and connects with them. If a growth fails, it
/// waits for the next.
pub(super) fn join(job: Job, began: Instant) -> Result<Communicator> {
    let mut newcomer = Newcomer::new(&job, began, began + job.settings.start_timeout)?;
    let (comm, identity) = loop {
        let admitted = newcomer.wait()?;
        let asked = Mutex::new(Instant::now());
        let absence = |rank| {
            let is_due = asked.lock().elapsed() >= GROWTH_CHECK;
            if !is_due {
                return None;
            }
            *asked.lock() = Instant::now();
            newcomer.absence(&admitted, rank)
        };
        let within = Within::new(&*admitted.store, admitted.growth);
        let start = Start {
            rank: admitted.rank,
            world_size: admitted.world_size,
            identity: admitted.identity.clone(),
            store: &within,
            store_url: admitted.store_url.clone(),
            settings: &job.settings,
            deadline: Instant::now() + job.settings.start_timeout,
            absence: Some(&absence),
        };
        match connect(&start) {
            Ok((core, info, identity)) => {
                let comm = Communicator::new(core, info);
                match comm.confirm_growth() {
                    Ok(()) => break (comm, identity),
                    Err(error) => newcomer.failed(error),
                }
            }
            Err(error @ (Error::Peer { .. } | Error::Missing { .. } | Error::Store { .. })) => newcomer.failed(error),
            Err(error) => return Err(error),
        }
    };
    drop(newcomer);
    crate::log::info!(rank = comm.rank(), world_size = comm.world_size(), after = %shown::time(began.elapsed()), "joined the job");
    job.keep(identity);
    Ok(comm.of_job(Arc::new(job)))
}
