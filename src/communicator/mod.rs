//! The communicator: the public API of operations. [`operations`] describes each of them once.

mod blocking;
mod builder;
mod calls;
mod connect;
mod grow;
mod join;
mod nonblocking;
mod operations;
mod pooled;
mod registered;
mod scope;
mod shrink;
mod split;
#[cfg(feature = "cuda")]
mod stream;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::config::{Transport, WireDType};
use crate::error::{Cause, Error, Result};
use crate::exec::Core;
use crate::exec::compression::{What, compression};
use crate::exec::costs::Again;
use crate::failure::CommInfo;
use crate::progress::{CommState, Executor};
use crate::reduce::Packing;
use crate::rendezvous::admission::Job;
use crate::schedule::select::{Choice, Layout};
use crate::shm::MOST_RANKS;
use crate::trace::Stats;
use crate::types::{DType, Op, Rank, ReduceOp};

pub use builder::Builder;
pub use pooled::Pooled;
pub use registered::Registered;
pub use scope::Scope;
#[cfg(feature = "cuda")]
pub(crate) use stream::in_turn;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use stream::on_one_gpu;
#[cfg(feature = "cuda")]
pub use stream::{DeviceBuffer, DeviceView, DeviceViewMut, OnStream};

/// A group of ranks that communicate with each other, as one of these ranks sees it.
///
/// All ranks make the same calls in the same order. Collectives of several threads on one
/// communicator run one after the other. Messages of several threads run side by side: while one
/// thread waits in [`recv`](Communicator::recv), another can send and receive. A collective waits
/// until messages that were begun before it have ended. Each operation has these forms:
///
/// - [`all_reduce`](Communicator::all_reduce) borrows its buffers and returns when this rank's part
///   is done;
/// - [`start_all_reduce`](Communicator::start_all_reduce) owns its buffers and returns a
///   [`Work`](crate::Work) at once;
/// - [`Scope::all_reduce`] returns at once and borrows its buffers until the
///   [`scope`](Communicator::scope) ends;
/// - `OnStream::all_reduce`, with the feature `cuda`, takes device memory, in the order of a CUDA
///   stream (`Communicator::on`).
///
/// Dropping the communicator tells its peers that this rank has left, and aborts operations in
/// flight. If a panic drops it, the calls of the peers fail with
/// [`Cause::Panicked`](crate::Cause::Panicked).
///
/// # Errors
///
/// A call returns [`Error::Argument`] before it sends anything if its arguments are wrong: a buffer
/// of the wrong length, counts whose number is not the world size, a root out of range, a reduction
/// that is not defined on the elements. The communicator stays usable.
///
/// It returns [`Error::Peer`] if a peer fails, leaves or does not take part before the deadline,
/// and [`Error::Mismatch`] if the ranks made different calls. Any such failure revokes the
/// communicator: later calls return [`Error::Revoked`], and the calls of the other ranks fail, too.
/// [`Communicator::shrink`] makes a new communicator of the survivors.
///
/// ```
/// # fn main() -> kolo::Result<()> {
/// let comm = kolo::Communicator::from_env()?; // This process alone, unless a launcher started it.
/// let mut gradients = vec![1.0f32; 1000];
/// comm.all_reduce(&mut gradients, kolo::ReduceOp::Average)?;
/// # Ok(())
/// # }
/// ```
pub struct Communicator {
    pub(crate) exec: Executor,
    /// The job that newcomers can join; `None` for a part of its ranks, and for threads.
    job: Option<OfJob>,
}

/// A communicator's part in the job.
struct OfJob {
    job: Arc<Job>,
    number: usize,
    state: Arc<CommState>,
}

impl Drop for OfJob {
    fn drop(&mut self) {
        // Ending a communicator by an abort is the program's choice.
        let has_failed = match self.state.failure.get().map(|failure| &**failure) {
            None | Some(Error::Aborted { .. } | Error::Peer { cause: Cause::Aborted, .. }) => false,
            Some(_) => true,
        };
        self.job.ends(self.number, has_failed || std::thread::panicking());
    }
}

impl Communicator {
    fn new(core: Core, info: CommInfo) -> Communicator {
        #[cfg(feature = "cuda")]
        let devices = Box::new(crate::device::DeviceState::default());
        #[cfg(not(feature = "cuda"))]
        let devices = Box::new(crate::progress::state::NoDevices);
        Communicator { exec: Executor::new(core, info, devices), job: None }
    }

    /// Lets newcomers join a job.
    fn of_job(self, job: Arc<Job>) -> Communicator {
        let state = self.exec.state.clone();
        Communicator { job: Some(OfJob { number: job.begins(), job, state }), ..self }
    }

    /// Replaces the devices of the machine.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn with_driver(self, driver: std::sync::Arc<dyn crate::cuda::device::Driver>) -> Communicator {
        crate::device::DeviceState::of(&self.exec.state).set_driver(driver);
        self
    }

    /// Fails in a forked child.
    pub(crate) fn check_process(&self, op: Op) -> Result<()> {
        self.exec.state.check_process(op)
    }

    /// Makes a communicator of the same ranks, fewer or more, with the devices of this one.
    fn of_same_process(&self, core: Core, info: CommInfo) -> Communicator {
        let devices = self.exec.state.devices.of_same_process();
        Communicator { exec: Executor::new(core, info, devices), job: None }
    }

    /// Returns this rank, from 0 to the world size less one.
    pub fn rank(&self) -> Rank {
        self.exec.state.info.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.exec.state.layout.ranks
    }

    /// Returns the number of hosts. Ranks count as on one host if they share memory, which was
    /// tried. With the transport forced to TCP it is not tried, and ranks with equal host names
    /// count as on one host.
    pub fn host_count(&self) -> usize {
        match self.exec.state.settings.transport {
            Transport::Tcp => self.exec.state.info.members.iter().map(|member| &member.host).collect::<HashSet<_>>().len(),
            _ => self.exec.state.layout.hosts,
        }
    }

    /// As [`doctor::host_links`](crate::doctor::host_links), once.
    pub(crate) fn measure_hosts(&self) -> Result<Option<Again>> {
        let state = &self.exec.state;
        state.core.lock().measure_for_doctor(&state.info)
    }

    /// Returns the algorithm of a collective of `bytes` bytes: of the buffer, or of all blocks
    /// together.
    pub fn algorithm(&self, op: Op, bytes: u64) -> Choice {
        self.exec.state.choose(op, bytes)
    }

    /// As [`Communicator::algorithm`], for elements of a type and, where the operation has one, a
    /// reduction: those that [`Builder::wire_dtype`] compresses take another algorithm.
    pub fn algorithm_for(&self, op: Op, dtype: DType, redop: Option<ReduceOp>, bytes: u64) -> Choice {
        self.exec.state.choose_for(op, dtype, redop, bytes)
    }

    /// Returns how elements of messages between hosts are written, in sums and averages: rank 0's
    /// [`Builder::wire_dtype`], but always `f32` in reproducible mode.
    pub fn wire_dtype(&self) -> WireDType {
        let settings = &self.exec.state.settings;
        if settings.reproducible { WireDType::F32 } else { settings.wire_dtype }
    }

    /// Returns how the messages of a collective between hosts are packed, if they are.
    pub(crate) fn packing(&self, what: What) -> Option<Packing> {
        compression(&self.exec.state.settings, self.exec.state.layout, || what)
    }

    /// Returns the lowest rank that counts as on this rank's host, as [`Communicator::host_count`] counts.
    pub(crate) fn lowest_of_host(&self) -> Rank {
        let (layout, info) = (self.exec.state.layout, &self.exec.state.info);
        if layout.hosts == layout.ranks {
            return info.rank;
        }
        let host = &info.members[info.rank].host;
        info.members.iter().position(|member| member.host == *host).unwrap_or(info.rank)
    }

    /// Returns what the communicator has done so far, on this rank.
    pub fn stats(&self) -> Stats {
        Stats { device: self.exec.state.recording.counters.device() }
    }

    /// Returns the failure that ended the communicator, or `None` if it still works. Does not wait.
    pub fn failure(&self) -> Option<&Error> {
        self.exec.failure()
    }

    /// Returns whether this rank's buffers may be in the memory of GPUs: rank 0 allows it (see
    /// [`Builder::devices`]), every rank's kolo has the feature `cuda`, and this machine a driver.
    pub fn has_devices(&self) -> bool {
        self.exec.state.devices.are_there(&self.exec.state)
    }

    /// Returns how ranks exchange data: `"none"` for a single rank, `"shm"` inside one host,
    /// `"tcp"`, or `"shm+tcp"`.
    pub fn transport_name(&self) -> &'static str {
        let Layout { ranks, hosts, windows, .. } = self.exec.state.layout;
        // More ranks than a window can have share memory as well: each pair exchanges its messages
        // through it.
        let shares_memory = windows || ranks > MOST_RANKS;
        match (self.exec.state.settings.transport, ranks, hosts) {
            (_, 1, _) => "none",
            (Transport::Tcp, ..) => "tcp",
            _ if !shares_memory => "tcp",
            (_, _, 1) => "shm",
            (_, ranks, hosts) if ranks == hosts => "tcp",
            _ => "shm+tcp",
        }
    }

    /// Aborts the operations in flight, of all threads, and ends the communicator. These calls fail
    /// with [`Error::Aborted`], later ones with [`Error::Revoked`], and the calls of other ranks
    /// fail, too. Returns within a second, when the peers have been told.
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
        self.exec.state.abort();
    }

    /// Writes the last operations of this rank to a file, for `kolo trace`: up to 1024 of this
    /// communicator, of the one that it was split from, and of each other one that was split from
    /// that and has not been dropped. It can be called from any thread, also while operations are
    /// in flight.
    ///
    /// With [`Builder::trace_dir`] kolo writes such files when an operation fails.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the file cannot be written by [`Builder::timeout`]. The communicator
    /// stays usable.
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
        let state = &self.exec.state;
        state.recording.recorder().write(path, "call", Instant::now() + state.info.timeout).map_err(refuse)
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
