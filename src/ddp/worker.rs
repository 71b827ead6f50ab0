//! The thread that reduces buckets while gradients of others are still being computed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use super::builder::Uneven;
use super::core::Core;
use super::hook::{Bucket, Elements, Hook};
use super::intent::Intent;
use super::on_device::DeviceElements;
use super::state::{Job, Task};
use crate::buffer::Address;
use crate::communicator::Registered;
use crate::error::{ReducerError, Result};
use crate::types::ReduceOp;

pub(super) struct Worker {
    pub(super) core: Arc<Core>,
    pub(super) hook: Box<dyn Hook>,
    /// Where hooks find a device's elements on the host.
    pub(super) scratch: Option<Registered<u8>>,
}

impl Worker {
    /// Runs jobs until there are no more.
    pub(super) fn work(mut self) {
        let core = self.core.clone();
        while let Some(task) = core.next_job() {
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.run(task)));
            if outcome.is_err() {
                let problem = ReducerError::Moment { call: "hook", why: "it panicked, as printed above" };
                core.job_ended(Err::<(), _>(problem.into()), |_, ()| {});
            }
        }
    }

    fn run(&mut self, task: Task) {
        let core = self.core.clone();
        match task.job {
            Job::Announce => core.job_ended(core.announce(Intent::Step), |state, active| state.active = active),
            Job::Bucket(index) => core.job_ended(self.reduce(&task, index), |state, ()| state.bucket_ended(index)),
            Job::Used(ref used) => {
                let mut used = used.clone();
                let result = core.comm.all_reduce(&mut used, ReduceOp::Max);
                core.job_ended(result, |state, ()| state.used_by_any = Some(used));
            }
        }
    }

    fn reduce(&mut self, task: &Task, index: usize) -> Result<()> {
        let Task { buckets, step, active, .. } = task;
        let place = &buckets.layout.buckets[index];
        buckets.until_there(&self.core.comm, index)?;
        self.core.bucket_starts(index, place.on_device);
        let bytes = place.bytes.len();
        let elements = match buckets.device_of(place) {
            Some(on) => {
                let memory = (buckets.at(place).addr() as Address, bytes);
                // SAFETY: the bucket has been launched, so it belongs to this thread until the job ends.
                Elements::Device(unsafe { DeviceElements::new(on, &self.core.comm, memory, &mut self.scratch) })
            }
            // SAFETY: the bucket has been launched, so its gradients are ready and no view of them
            // exists. It belongs to this thread until the job ends. Peers write it only in
            // collectives that use it.
            None => Elements::Host(unsafe { std::slice::from_raw_parts_mut(buckets.at(place), bytes) }),
        };
        let (members, parameters) = (&place.members[..], &self.core.parameters[..]);
        let mut bucket = Bucket { index, step: *step, dtype: place.dtype, elements, members, parameters };
        self.hook.reduce(&mut bucket, &self.core.comm)?;
        let world = self.core.comm.world_size();
        if self.core.uneven == Uneven::ByRanksWithInput && *active < world && self.hook.averages(*step) {
            bucket.scale(world as f64 / *active as f64)?;
        }
        if let Elements::Device(device) = &mut bucket.elements {
            device.bring_back()?;
        }
        Ok(())
    }
}
