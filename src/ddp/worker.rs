//! The thread that reduces buckets while gradients of others are still being computed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use super::buckets::Buckets;
use super::builder::Uneven;
use super::core::{Core, Job};
use super::float::scale;
use super::hook::{Bucket, Hook, with_float};
use crate::error::{Error, ReducerProblem, Result};

use crate::types::ReduceOp;

pub(super) struct Worker {
    pub(super) core: Arc<Core>,
    pub(super) hook: Box<dyn Hook>,
    /// Ranks that make the step under way.
    active: usize,
}

impl Worker {
    pub(super) fn new(core: Arc<Core>, hook: Box<dyn Hook>) -> Worker {
        let active = core.comm.world_size();
        Worker { core, hook, active }
    }

    /// Carries out jobs until there are no more.
    pub(super) fn work(mut self) {
        while let Some((job, buckets, step)) = self.core.next_job() {
            let core = self.core.clone();
            let carried_out = std::panic::catch_unwind(AssertUnwindSafe(|| self.carry_out(job, &buckets, step)));
            if carried_out.is_err() {
                let problem = ReducerProblem::Moment { call: "hook", why: "it panicked, as printed above" };
                core.job_ended(Err(problem.into()), |_| {});
            }
        }
    }

    fn carry_out(&mut self, job: Job, buckets: &Buckets, step: u64) {
        let core = self.core.clone();
        match job {
            Job::Announce => {
                let announced = core.announce(Core::STEP);
                self.active = announced.as_ref().map_or(1, |active| active.iter().filter(|&&active| active).count());
                core.job_ended(announced.as_ref().map(|_| ()).map_err(Error::clone), |state| {
                    state.active = announced.unwrap_or_default();
                });
            }
            Job::Bucket(index) => {
                let reduced = self.reduce(buckets, index, step);
                core.job_ended(reduced, |state| state.bucket_ended(index));
            }
            Job::Used(used) => {
                let mut used: Vec<u8> = used.into_iter().map(u8::from).collect();
                let result = core.comm.all_reduce(&mut used, ReduceOp::Max);
                core.job_ended(result, |state| state.used = used.into_iter().map(|used| used != 0).collect());
            }
        }
    }

    fn reduce(&mut self, buckets: &Buckets, index: usize, step: u64) -> Result<()> {
        let place = &buckets.layout.buckets[index];
        // SAFETY: the bucket has been launched, so all its gradients are ready and nobody has a view of them; it is this thread's
        // until the job has ended. Peers write it only in collectives that it is lent to.
        let elements = unsafe { std::slice::from_raw_parts_mut(buckets.at(&place.bytes), place.bytes.len()) };
        let (members, parameters) = (&place.members[..], &self.core.parameters[..]);
        let mut bucket = Bucket { index, step, dtype: place.dtype, elements, members, parameters };
        self.hook.reduce(&mut bucket, &self.core.comm)?;
        let world = self.core.comm.world_size();
        if self.core.uneven == Uneven::ByRanksWithInput && self.active < world {
            let factor = world as f64 / self.active as f64;
            with_float!(place.dtype, T => scale(bucket.elements::<T>()?, factor));
        }
        Ok(())
    }
}
