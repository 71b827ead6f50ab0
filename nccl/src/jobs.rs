//! Calls that make a communicator or end one, which wait for other ranks: they run on the caller's
//! thread, side by side at the end of a group, or on threads of their own if the communicator is
//! nonblocking.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use kolo::Communicator;
use kolo::raw::set_wait_check;

use crate::codes::*;
use crate::comm::{Comm, Pending, ncclComm_t, take};
use crate::environment::{Level, print};
use crate::fault::Fault;

/// What makes a communicator; `None` for a rank that becomes a member of none.
type Make = Box<dyn FnOnce() -> Result<Option<Communicator>, Fault> + Send>;

/// Finds out, with the other ranks, whether one of them is in this process.
fn with_companion(made: Communicator) -> Result<(Communicator, bool), Fault> {
    // A number of this process, and its own again after a fork.
    static NUMBER: OnceLock<u64> = OnceLock::new();
    let number = *NUMBER.get_or_init(|| getrandom::u64().unwrap_or_default());
    let own = [number, u64::from(std::process::id())];
    let mut all = vec![0; own.len() * made.world_size()];
    made.all_gather(&own, &mut all)?;
    let has_companion = all.chunks_exact(own.len()).filter(|other| *other == own).count() > 1;
    Ok((made, has_companion))
}

/// One call.
pub(crate) struct Job {
    pub(crate) name: &'static str,
    /// The communicator that the call makes, and where its handle is; `None` for a rank that becomes a
    /// member of none, or if the call ends a communicator.
    pub(crate) new: Option<(Arc<Comm>, Place)>,
    /// The communicators that take no other call meanwhile.
    pub(crate) parent: Option<Arc<Comm>>,
    pub(crate) blocking: bool,
    pub(crate) make: Make,
}

/// Where the caller wants a handle.
#[derive(Clone, Copy)]
pub(crate) struct Place(pub(crate) *mut ncclComm_t, pub(crate) ncclComm_t);

// SAFETY: only the thread of the call writes there, while the caller's memory is valid.
unsafe impl Send for Place {}

impl Job {
    /// Runs the call on this thread.
    fn run(self) -> Result<(), Fault> {
        let Job { name, new, make, .. } = self;
        if let Some((comm, _)) = &new {
            let comm = comm.clone();
            set_wait_check(Some(Box::new(move || !comm.is_aborted())));
        }
        let made = catch_unwind(AssertUnwindSafe(make));
        set_wait_check(None);
        let made = made.unwrap_or_else(|panic| Err(Fault::panic(&*panic)));
        let made = made.and_then(|made| made.map(with_companion).transpose());
        match (new, made) {
            (Some((comm, _)), Ok(Some((made, has_companion)))) => {
                print(Level::Info, || {
                    let title = comm.config.name.clone().unwrap_or_default();
                    format!(
                        "{name}: comm {title} rank {} nranks {} cudaDev {} transport {} - Init COMPLETE",
                        made.rank(),
                        made.world_size(),
                        comm.device,
                        made.transport_name()
                    )
                });
                comm.started(Ok((made, has_companion)));
                Ok(())
            }
            (Some((comm, _)), Ok(None)) => {
                comm.started(Err(Fault::usage("this rank is no member")));
                Ok(())
            }
            (None, made) => made.map(drop),
            (Some((comm, _)), Err(fault)) => {
                comm.started(Err(fault.clone()));
                Err(fault)
            }
        }
    }

    /// Runs the call, and forgets what it was to make if that fails.
    fn run_here(self) -> Result<(), Fault> {
        let place = self.new.as_ref().map(|(_, place)| *place);
        self.run().inspect_err(|_| {
            if let Some(Place(to, handle)) = place {
                // The handle was never of use.
                _ = take(handle);
                // SAFETY: the caller waits for this call, and its pointer was checked when it was made.
                unsafe { to.write(std::ptr::null_mut()) };
            }
        })
    }

    /// Forgets a call that is not executed, because another one of its group failed.
    pub(crate) fn forget(self) {
        if let Some((_, Place(to, handle))) = self.new {
            _ = take(handle);
            // SAFETY: the caller's pointer was checked when it made the call, and is valid until the
            // group ends.
            unsafe { to.write(std::ptr::null_mut()) };
        }
    }

    /// Runs the call on a thread of its own.
    fn run_apart(self) -> Result<(), Fault> {
        let pending: Vec<Pending> = self.parent.iter().map(Comm::begin).collect();
        let (name, new, parent) = (self.name, self.new.as_ref().map(|(comm, _)| comm.clone()), self.parent.clone());
        let run = move || {
            if let (Err(fault), Some(parent)) = (self.run(), parent) {
                parent.remember(&format!("{name}: {fault}"));
            }
            drop(pending);
        };
        let started = std::thread::Builder::new().name("kolo-nccl".to_owned()).spawn(run);
        started.map(drop).map_err(|error| {
            let fault = Fault::System(format!("cannot start a thread: {error}"));
            if let Some(comm) = new {
                comm.started(Err(fault.clone()));
            }
            fault
        })
    }
}

/// Runs the calls of a group, or one alone: all at the same time, because they may wait for each other.
/// Returns `IN_PROGRESS` if some go on.
pub(crate) fn run(jobs: Vec<Job>) -> Result<ncclResult_t, Fault> {
    let (here, apart): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.blocking);
    let result = if apart.is_empty() { SUCCESS } else { IN_PROGRESS };
    for job in apart {
        job.run_apart()?;
    }
    let mut here = here;
    if here.len() == 1 {
        here.pop().expect("one").run_here()?;
        return Ok(result);
    }
    let ended: Vec<Result<(), Fault>> = std::thread::scope(|scope| {
        let threads: Vec<_> = here.into_iter().map(|job| scope.spawn(|| job.run_here())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| Err(Fault::panic(&*panic)))).collect()
    });
    ended.into_iter().collect::<Result<(), Fault>>()?;
    Ok(result)
}
