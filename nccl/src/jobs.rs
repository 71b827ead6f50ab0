//! Calls that make a communicator or end one, which wait for other ranks: they run on the caller's
//! thread, at the end of a group those on different communicators side by side, or on threads of their own if the communicator is
//! nonblocking.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use kolo::Communicator;
use kolo::raw::set_wait_check;

use crate::codes::*;
use crate::comm::{Comm, Pending, ncclComm_t, take};
use crate::environment::{Level, print};
use crate::fault::Fault;
use crate::last;

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
    /// Runs the call on this thread. A panic is its error: otherwise the communicator would be in progress
    /// for ever.
    fn run(self) -> Result<(), Fault> {
        let Job { name, new, make, .. } = self;
        let comm = new.map(|(comm, _)| comm);
        if let Some(comm) = comm.clone() {
            set_wait_check(Some(Box::new(move || !comm.is_aborted())));
        }
        let made = catch_unwind(AssertUnwindSafe(|| {
            let made = make()?.map(with_companion).transpose()?;
            if let (Some(comm), Some((made, _))) = (&comm, &made) {
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
            }
            Ok(made)
        }));
        set_wait_check(None);
        let made = made.unwrap_or_else(|panic| Err(Fault::panic(&*panic)));
        let Some(comm) = comm else { return made.map(drop) };
        match made {
            Ok(Some(made)) => comm.started(Ok(made)),
            Ok(None) => comm.started(Err(Fault::usage("this rank is no member"))),
            Err(fault) => {
                comm.started(Err(fault.clone()));
                return Err(fault);
            }
        }
        Ok(())
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
}

/// Runs calls in their order, also after one has failed: the other ranks do.
fn run_here(line: Vec<Job>) -> Result<(), Fault> {
    let ended: Vec<Result<(), Fault>> = line.into_iter().map(Job::run_here).collect();
    ended.into_iter().collect()
}

/// Runs calls in their order on a thread of their own.
fn run_apart(line: Vec<Job>) -> Result<(), Fault> {
    let made: Vec<Arc<Comm>> = line.iter().filter_map(|job| Some(job.new.as_ref()?.0.clone())).collect();
    let pending: Vec<Pending> = line.iter().filter_map(|job| job.parent.as_ref()).map(Comm::begin).collect();
    let run = move || {
        for job in line {
            let (name, parent) = (job.name, job.parent.clone());
            if let Err(fault) = job.run() {
                // No call returns it.
                let text = format!("{name}: {fault}");
                if let Some(parent) = parent {
                    parent.note(&text);
                }
                last::report(&text);
            }
        }
        drop(pending);
    };
    let started = std::thread::Builder::new().name("kolo-nccl".to_owned()).spawn(run);
    started.map(drop).map_err(|error| {
        let fault = Fault::System(format!("cannot start a thread: {error}"));
        made.iter().for_each(|comm| comm.started(Err(fault.clone())));
        fault
    })
}

/// Puts the calls on the same communicator into one line. They wait for the other ranks in this order, which
/// is that of all ranks.
fn lines(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let mut lines: Vec<Vec<Job>> = Vec::new();
    for job in jobs {
        let is_its = |line: &&mut Vec<Job>| match (&line[0].parent, &job.parent) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        match lines.iter_mut().find(is_its) {
            Some(line) => line.push(job),
            None => lines.push(vec![job]),
        }
    }
    lines
}

/// Runs the calls of a group, or one alone: those on different communicators at the same time, because they
/// may wait for each other. Returns `IN_PROGRESS` if some go on.
pub(crate) fn run(jobs: Vec<Job>) -> Result<ncclResult_t, Fault> {
    let (mut here, apart): (Vec<Vec<Job>>, Vec<Vec<Job>>) =
        lines(jobs).into_iter().partition(|line| line.iter().all(|job| job.blocking));
    let result = if apart.is_empty() { SUCCESS } else { IN_PROGRESS };
    for line in apart {
        run_apart(line)?;
    }
    if here.len() == 1 {
        run_here(here.pop().expect("one"))?;
        return Ok(result);
    }
    let ended: Vec<Result<(), Fault>> = std::thread::scope(|scope| {
        let threads: Vec<_> = here.into_iter().map(|line| scope.spawn(|| run_here(line))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| Err(Fault::panic(&*panic)))).collect()
    });
    ended.into_iter().collect::<Result<(), Fault>>()?;
    Ok(result)
}
