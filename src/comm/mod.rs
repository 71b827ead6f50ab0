//! The communicator: the public face.

mod blocking;
mod builder;
mod call;
mod calls;
mod core;
mod devices;
#[cfg(feature = "cuda")]
mod on_stream;
mod queue;
mod raw;
mod registered;
mod scope;
mod shrink;
#[cfg(test)]
mod simulation;
mod split;
mod start;
mod unwinding;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::attempt::Terms;
use crate::config::SharedSettings;
use crate::cuda::device::Driver;
use crate::engine::progress::{Work, begin};
use crate::error::{Error, Result};
use crate::health::{self, Bulletin, Recording};
use crate::host::HostGroup;
use crate::host::stage::{Holder, Stage};
use crate::plan::{Choice, Layout};
use crate::sys;
use crate::types::{Descriptor, Op, Rank};
use crate::window::MOST_RANKS;
use core::Core;
use queue::Queue;

pub use builder::Builder;
pub(crate) use call::Call;
pub(crate) use devices::{Lent, drain};
#[cfg(feature = "cuda")]
pub(crate) use on_stream::in_turn;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use on_stream::on_one_gpu;
#[cfg(feature = "cuda")]
pub use on_stream::{DeviceBuffer, DeviceView, DeviceViewMut, OnStream};
pub(crate) use raw::{Raw, own_address};
pub use registered::Registered;
pub use scope::Scope;

/// A group of ranks that communicate with each other, seen from one of them.
///
/// Every rank makes the same calls in the same order; calls of several threads are carried out one after the other. An
/// operation that fails revokes the communicator: later calls return [`Error::Revoked`], and the other ranks' calls fail, too.
///
/// Dropping it tells the others that this rank has left. Operations that are still under way are given up.
///
/// ```
/// # fn main() -> kolo::Result<()> {
/// let comm = kolo::Communicator::from_env()?; // alone, unless a launcher says otherwise
/// let mut gradients = vec![1.0f32; 1000];
/// comm.all_reduce(&mut gradients, kolo::ReduceOp::Average)?;
/// # Ok(())
/// # }
/// ```
pub struct Communicator {
    shared: Arc<Shared>,
    queue: Queue,
}

/// What the callers' threads and the progress thread share.
struct Shared {
    core: Mutex<Core>,
    terms: Terms,
    /// The failure that revoked the communicator.
    failure: std::sync::OnceLock<Arc<Error>>,
    layout: Layout,
    settings: SharedSettings,
    recording: Arc<Recording>,
    bulletin: Arc<Bulletin>,
    /// What this process shares with the other ranks of its host, and how many of them there are, if they share memory.
    host: Option<(Arc<HostGroup>, usize)>,
    /// The devices of this process, once they have been looked for.
    driver: std::sync::OnceLock<Option<Arc<dyn Driver>>>,
    /// The kinds of calls on devices that there have been.
    kinds: Mutex<HashSet<devices::Kind>>,
    /// Of the process that made it.
    forks: u32,
}

/// Longer than anything holds the core but an operation.
const MOMENT: Duration = Duration::from_millis(20);

impl Communicator {
    /// The communicator of all ranks that a launcher started, or of this process alone if none did.
    ///
    /// Recognised are `kolo run`, torchrun, SLURM's srun, mpirun of Open MPI, MPICH and Intel MPI, PMIx, PALS, Flux, LSF,
    /// Kubernetes jobs, and plain `RANK` and `WORLD_SIZE` variables. Waits for all ranks, at most for
    /// `KOLO_START_TIMEOUT`.
    ///
    /// # Errors
    ///
    /// [`Error::NoLauncher`] if what a launcher says is not enough; it lists what was looked for. [`Error::Missing`],
    /// [`Error::WorldSize`], [`Error::RankTaken`] and [`Error::Store`] if the ranks do not come together.
    pub fn from_env() -> Result<Communicator> {
        Builder::default().connect()
    }

    /// Options for connecting.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(core: Core, terms: Terms) -> Communicator {
        let (layout, settings, recording) = (core.layout(), core.settings(), core.recording().clone());
        sys::count_forks();
        let failure = std::sync::OnceLock::new();
        let bulletin = core.fabric().bulletin().clone();
        let host = core.fabric().host().filter(|_| layout.windows).map(|host| (host.clone(), core.fabric().neighbours().len()));
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            terms,
            failure,
            layout,
            settings,
            recording,
            bulletin,
            host,
            driver: std::sync::OnceLock::new(),
            kinds: Mutex::default(),
            forks: sys::forks(),
        });
        if let Some(window) = shared.core.lock().window() {
            let holder: Weak<dyn Holder> = Arc::downgrade(&shared) as _;
            window.set_holder(holder);
        }
        Communicator { queue: Queue::new(), shared }
    }

    /// This rank, from 0 to the world size less one.
    pub fn rank(&self) -> Rank {
        self.shared.terms.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.shared.layout.ranks
    }

    /// How many hosts the ranks are on. Ranks count as on one host if they can share memory, which was proved by doing it. With
    /// the transport forced to TCP nobody tries to, and it is the hosts' names that count.
    pub fn host_count(&self) -> usize {
        match self.shared.settings.transport {
            crate::Transport::Tcp => self.shared.terms.members.iter().map(|member| &member.host).collect::<HashSet<_>>().len(),
            _ => self.shared.layout.hosts,
        }
    }

    /// How collectives of so many bytes (of the buffer, or of all blocks together) are carried out.
    pub fn algorithm(&self, op: Op, bytes: u64) -> Choice {
        self.shared.core.lock().choose(op, bytes)
    }

    /// Whether this rank's buffers may be in the memory of GPUs: rank 0 has it so (see [`Builder::devices`]), and there is a driver
    /// here.
    pub fn has_devices(&self) -> bool {
        self.driver().is_some()
    }

    /// Through what ranks exchange data: `"shm"` inside one host, `"tcp"`, or `"shm+tcp"`.
    pub fn transport_name(&self) -> &'static str {
        let Layout { ranks, hosts, windows, .. } = self.shared.layout;
        // More ranks than a window has places for share memory all the same, each pair for its messages.
        let shares_memory = windows || ranks > MOST_RANKS;
        match (self.shared.settings.transport, ranks, hosts) {
            (_, 1, _) => "none",
            (crate::Transport::Tcp, ..) => "tcp",
            _ if !shares_memory => "tcp",
            (_, _, 1) => "shm",
            (_, ranks, hosts) if ranks == hosts => "tcp",
            _ => "shm+tcp",
        }
    }

    /// Gives up what is under way, in whatever thread, and ends the communicator: the calls fail with [`Error::Aborted`], later
    /// ones with [`Error::Revoked`], and those of other ranks fail, too. Returns when all have heard of it, within a
    /// second.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// comm.abort();
    /// assert!(matches!(comm.barrier(), Err(kolo::Error::Revoked { .. })));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort(&self) {
        if self.shared.check_process(Op::Connect).is_err() {
            return;
        }
        // A communicator that takes this one's stage holds the core for a moment.
        match self.shared.core.try_lock_for(MOMENT) {
            Some(mut core) => _ = self.shared.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 }),
            // The call that holds the core sees to the rest.
            None => health::abort(&self.shared.bulletin),
        }
    }

    /// Writes the last operations of this rank to a file, for `kolo trace`: those of this communicator, of the one that it was split
    /// from, and of all others that came of that one and have not been dropped, up to 1024 of each. From any thread, also while
    /// operations are under way.
    ///
    /// [`Builder::trace_dir`] has such files written when an operation fails.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the file cannot be written. The communicator is as usable as before.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # let folder = std::env::temp_dir().join(format!("kolo-dump-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// comm.dump_trace(folder.join(format!("rank{}.json", comm.rank())))?;
    /// # }
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn dump_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let refuse = |error| Error::setting("path", path.display().to_string(), format!("a file that can be written: {error}"));
        self.shared.recording.recorder().write(path, "call").map_err(refuse)
    }

    /// Carries out a call on this thread if nothing is in its way, else on the progress thread, after what is.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until this returns, and nobody else uses them.
    #[inline]
    unsafe fn run(&self, mut call: Call) -> Result<()> {
        // In its place: it is large, and small operations are short.
        let op = call.op;
        call.check_in_place(self.rank(), self.world_size()).map_err(|problem| Error::Argument { op, problem })?;
        // SAFETY: passed on.
        unsafe { self.run_checked(&call) }
    }

    /// # Safety
    ///
    /// As for [`Communicator::run`].
    #[inline]
    unsafe fn run_checked(&self, call: &Call) -> Result<()> {
        self.shared.check_process(call.op)?;
        if call.lent.is_some() {
            // SAFETY: passed on: a call that is lent ends when its stream has come behind it.
            return unsafe { self.enqueue(call) };
        }
        if self.queue.is_idle()
            && let Some(mut core) = self.shared.core.try_lock()
        {
            // SAFETY: passed on.
            return unsafe { self.shared.carry_out(&mut core, call) };
        }
        let (work, call, completion) = begin((), |()| Ok(call.clone()))?;
        self.queue.push(&self.shared, call, completion)?;
        work.wait()
    }

    /// Carries out sends and receives side by side.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::run`], for all calls.
    unsafe fn run_together<const N: usize>(&self, calls: [Call; N]) -> Result<()> {
        let check = |call: Call| call.check(self.rank(), self.world_size());
        let checked = calls.into_iter().map(check).collect::<Result<Vec<_>>>()?;
        // SAFETY: passed on.
        unsafe { self.run_together_checked(checked) }
    }

    /// # Safety
    ///
    /// As for [`Communicator::run_together`].
    unsafe fn run_together_checked(&self, checked: Vec<Call>) -> Result<()> {
        self.shared.check_process(Op::Send)?;
        if checked.iter().all(|call| call.lent.is_none())
            && self.queue.is_idle()
            && let Some(mut core) = self.shared.core.try_lock()
        {
            // SAFETY: passed on.
            return unsafe { self.shared.point_to_point(&mut core, checked) };
        }
        let mut works = Vec::with_capacity(checked.len());
        let mut result = Ok(());
        // Before the first is queued, for then their buffers are in use.
        if checked.iter().any(|call| call.lent.is_some()) {
            self.check_not_failed()?;
        }
        let gated = checked.iter().map(|call| self.close(call)).collect::<Result<Vec<_>>>()?;
        for (call, is_gated) in checked.into_iter().zip(gated) {
            let (work, call, completion) = begin((), |()| Ok(call))?;
            result = result.and(self.queue.push(&self.shared, call, completion));
            if !is_gated {
                works.push(work);
            }
        }
        // All have to end before their buffers are given back.
        works.into_iter().map(Work::wait).fold(result, Result::and)
    }
}

impl Shared {
    /// # Safety
    ///
    /// As for [`Communicator::run`].
    #[inline]
    unsafe fn carry_out(&self, core: &mut Core, call: &Call) -> Result<()> {
        if call.op.is_point_to_point() {
            // SAFETY: passed on.
            return unsafe { self.point_to_point(core, vec![call.clone()]) };
        }
        self.check_not_revoked(core, call)?;
        // SAFETY: passed on.
        let result = self.unless_it_panics(core, call.op, |core| unsafe { self.collective(core, call) });
        result.map_err(|error| self.fail(core, error))
    }

    /// # Safety
    ///
    /// As for [`Communicator::run_together`].
    unsafe fn point_to_point(&self, core: &mut Core, calls: Vec<Call>) -> Result<()> {
        let Some(first) = calls.first() else { return Ok(()) };
        let op = first.op;
        self.check_not_revoked(core, first)?;
        let mut calls = calls.into_iter();
        let run = |core: &mut Core| {
            // SAFETY: passed on.
            unsafe { core.point_to_point(&self.terms, || calls.next(), |_| {}) }
        };
        let result = self.unless_it_panics(core, op, run);
        result.map_err(|error| self.fail(core, error))
    }

    #[inline]
    fn check_not_revoked(&self, core: &mut Core, call: &Call) -> Result<()> {
        if let Some(first) = self.failure.get() {
            return Err(Error::Revoked { first: first.clone() });
        }
        // What ended the communicator while no operation was under way meets this one.
        let collective = (!call.op.is_point_to_point()).then(|| core.next_seq());
        if self.terms.alarm.stops(collective) {
            let Descriptor { op, seq, .. } = call.descriptor(core.next_number(call), 0);
            return Err(self.fail(core, Error::Aborted { op, seq }));
        }
        Ok(())
    }

    /// A copy of the process that a fork made has none of its threads, and would write into what the others see.
    #[inline]
    fn check_process(&self, op: Op) -> Result<()> {
        if self.forks == sys::forks() { Ok(()) } else { Err(Error::Forked { op }) }
    }

    /// Waits until nothing is under way, and ends the communicator, if it has not failed already.
    fn end(&self) -> parking_lot::MutexGuard<'_, Core> {
        let mut core = self.core.lock();
        self.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 });
        core
    }

    /// An operation failed: agrees with the other ranks on why, and ends the communicator. What to report.
    #[cold]
    fn fail(&self, core: &mut Core, error: Error) -> Error {
        if let Some(first) = self.failure.get() {
            return Error::Revoked { first: first.clone() };
        }
        let error = health::settle(&self.bulletin, &self.terms, error);
        self.revoke(core, &error);
        error
    }

    /// An operation failed: no later one can be trusted to match those of the others.
    #[cold]
    fn revoke(&self, core: &mut Core, error: &Error) {
        if self.failure.set(Arc::new(error.clone())).is_ok() {
            tracing::info!(%error, rank = self.terms.rank, "the communicator is revoked");
            core.part(true);
            self.recording.failed(error);
        }
    }
}

impl Holder for Shared {
    fn give_up(&self) -> Option<Stage> {
        self.core.try_lock()?.window()?.give_up_stage()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.shared.check_process(Op::Connect).is_err() {
            // Nothing of it is the child's to end.
            std::mem::forget(self.shared.clone());
            return;
        }
        self.queue.close(&self.shared);
        // Nobody else holds the lock now: calls borrow the communicator, and the progress thread has ended.
        let mut core = self.shared.core.lock();
        match self.shared.failure.get() {
            None => core.part(false),
            Some(_) => core.devices.abandon(),
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("hosts", &self.host_count())
            .field("transport", &self.transport_name())
            .finish_non_exhaustive()
    }
}
