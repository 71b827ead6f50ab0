//! The communicator: the public face.

mod blocking;
mod builder;
mod calls;
mod nonblocking;
mod operations;
mod registered;
mod scope;
mod shrink;
mod split;
#[cfg(feature = "cuda")]
mod stream;

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::exec::{Core, Executor};
use crate::failure::CommInfo;
use crate::schedule::select::{Choice, Layout};
use crate::shm::MOST_RANKS;
use crate::types::{Op, Rank};

pub use builder::Builder;
pub use registered::Registered;
pub use scope::Scope;
#[cfg(feature = "cuda")]
pub(crate) use stream::in_turn;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use stream::on_one_gpu;
#[cfg(feature = "cuda")]
pub use stream::{DeviceBuffer, DeviceView, DeviceViewMut, OnStream};

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
    pub(crate) exec: Executor,
}

impl Communicator {
    fn new(core: Core, info: CommInfo) -> Communicator {
        Communicator { exec: Executor::new(core, info) }
    }

    /// Has other devices than those of the machine.
    #[cfg(test)]
    pub(crate) fn with_driver(self, driver: std::sync::Arc<dyn crate::cuda::device::Driver>) -> Communicator {
        assert!(self.exec.state.driver.set(Some(driver)).is_ok(), "the devices have been looked for");
        self
    }

    /// An error in a forked child.
    pub(crate) fn check_process(&self, op: Op) -> Result<()> {
        self.exec.state.check_process(op)
    }

    /// The same ranks, or some of them, in this process: it need not look for the devices again.
    fn of_same_process(&self, core: Core, info: CommInfo) -> Communicator {
        let other = Communicator::new(core, info);
        self.exec.pass_devices_on(&other.exec);
        other
    }

    /// This rank, from 0 to the world size less one.
    pub fn rank(&self) -> Rank {
        self.exec.state.info.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.exec.state.layout.ranks
    }

    /// How many hosts the ranks are on. Ranks count as on one host if they can share memory, which was proved by doing it. With
    /// the transport forced to TCP nobody tries to, and it is the hosts' names that count.
    pub fn host_count(&self) -> usize {
        match self.exec.state.settings.transport {
            crate::Transport::Tcp => self.exec.state.info.members.iter().map(|member| &member.host).collect::<HashSet<_>>().len(),
            _ => self.exec.state.layout.hosts,
        }
    }

    /// How collectives of so many bytes (of the buffer, or of all blocks together) are carried out.
    pub fn algorithm(&self, op: Op, bytes: u64) -> Choice {
        self.exec.state.core.lock().choose(op, bytes)
    }

    /// Returns the failure that ended the communicator, or `None` if it still works. Does not wait.
    pub fn failure(&self) -> Option<&Error> {
        self.exec.failure()
    }

    /// Whether this rank's buffers may be in the memory of GPUs: rank 0 has it so (see [`Builder::devices`]), and there is a driver
    /// here.
    pub fn has_devices(&self) -> bool {
        self.exec.driver().is_some()
    }

    /// Through what ranks exchange data: `"shm"` inside one host, `"tcp"`, or `"shm+tcp"`.
    pub fn transport_name(&self) -> &'static str {
        let Layout { ranks, hosts, windows, .. } = self.exec.state.layout;
        // More ranks than a window has places for share memory all the same, each pair for its messages.
        let shares_memory = windows || ranks > MOST_RANKS;
        match (self.exec.state.settings.transport, ranks, hosts) {
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
        self.exec.abort();
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
        self.exec.state.recording.recorder().write(path, "call").map_err(refuse)
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
