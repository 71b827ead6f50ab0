//! The state of one communicator: its core, and the failure that ended it.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::call::Call;
use super::core::{self, Core};
use super::device_state::Calling;
use super::graphs::Graphs;
use super::lent::Lent;
use crate::bootstrap::host_group::HostGroup;
use crate::bootstrap::host_group::stage::{Holder, Stage};
use crate::config::SharedSettings;
use crate::cuda::device::Driver;
use crate::error::{Error, Result};
use crate::failure::{self, CommInfo, CommStatus};
use crate::schedule::select::{Choice, Layout};
use crate::shm::Pool;
use crate::sys::{self, Waker};
use crate::trace::Recording;
use crate::types::{Descriptor, Op};

/// Longer than anything but an operation holds the core.
pub(super) const MOMENT: Duration = Duration::from_millis(20);

/// What the threads that call a communicator share with its progress thread.
pub(crate) struct CommState {
    pub(crate) core: Mutex<Core>,
    /// Wakes the thread that holds the core where it sleeps on links; set when links are first used.
    pub(super) links: Arc<OnceLock<Arc<Waker>>>,
    pub(crate) info: CommInfo,
    /// The failure that revoked the communicator.
    pub(crate) failure: OnceLock<Arc<Error>>,
    pub(crate) layout: Layout,
    pub(crate) settings: SharedSettings,
    pub(crate) recording: Arc<Recording>,
    pub(crate) status: Arc<CommStatus>,
    /// The host group, and how many ranks of this communicator are on this host; `None` if they do
    /// not share memory.
    pub(crate) host: Option<(Arc<HostGroup>, usize)>,
    /// How many ranks of this communicator are on this host.
    pub(super) neighbours: usize,
    /// The memory that this rank takes alone; `None` if ranks do not share memory.
    pub(crate) pool: Option<Arc<Pool>>,
    /// The devices of this process, once they have been looked for.
    pub(crate) driver: OnceLock<Option<Arc<dyn Driver>>>,
    /// What its callers keep for calls on devices.
    pub(super) calling: Mutex<Calling>,
    /// The calls whose streams may wait for this communicator.
    pub(super) on_streams: Mutex<Vec<Weak<Lent>>>,
    /// The calls that graphs have captured.
    pub(super) graphs: Graphs,
    pub(super) this: Weak<CommState>,
    /// Forks that led to the process that made the communicator: another number in a forked child.
    pub(crate) forks: u32,
}

impl CommState {
    pub(crate) fn new(mut core: Core, info: CommInfo) -> Arc<CommState> {
        let pool = core.window().map(|window| window.pool());
        let (layout, settings, recording) = (core.layout(), core.settings(), core.recording().clone());
        sys::count_forks();
        let (failure, links) = (OnceLock::new(), core.links.clone());
        let status = core.fabric().status().clone();
        let neighbours = core.fabric().neighbours().len();
        let host = core.fabric().host().filter(|_| layout.windows).map(|host| (host.clone(), neighbours));
        let state = Arc::new_cyclic(|this| CommState {
            this: this.clone(),
            core: Mutex::new(core),
            links,
            info,
            failure,
            layout,
            settings,
            recording,
            status,
            host,
            neighbours,
            pool,
            driver: OnceLock::new(),
            calling: Mutex::default(),
            on_streams: Mutex::default(),
            graphs: Graphs::default(),
            forks: sys::forks(),
        });
        if let Some(window) = state.core.lock().window() {
            let holder: Weak<dyn Holder> = Arc::downgrade(&state) as _;
            window.set_holder(holder);
        }
        state
    }

    /// Fails if the communicator has been revoked or cancelled.
    #[inline(always)]
    pub(crate) fn check_not_revoked(&self, core: &mut Core, call: &Call) -> Result<()> {
        if let Some(first) = self.failure.get() {
            return Err(Error::Revoked { first: first.clone() });
        }
        // A cancellation while no operation was in flight fails this one.
        let collective = (!call.op.is_point_to_point()).then(|| core.next_seq());
        if self.info.cancel.stops(collective) {
            let Descriptor { op, seq, .. } = call.descriptor(core.next_number(call));
            // A receive has the descriptor of its send.
            let op = if op.is_point_to_point() { call.op } else { op };
            return Err(self.fail(core, Error::Aborted { op, seq }));
        }
        Ok(())
    }

    /// Fails in a forked child: it has none of its parent's threads, and would write into memory
    /// that the peers see.
    #[inline]
    pub(crate) fn check_process(&self, op: Op) -> Result<()> {
        if self.forks == sys::forks() { Ok(()) } else { Err(Error::Forked { op }) }
    }

    /// Returns the path and the algorithm of a collective of `bytes` bytes.
    pub(crate) fn choose(&self, op: Op, bytes: u64) -> Choice {
        core::choose(&self.settings, self.layout, op, bytes)
    }

    /// A stream may wait for this call from now on.
    pub(super) fn add_on_stream(&self, lent: &Arc<Lent>) {
        let mut all = self.on_streams.lock();
        all.retain(|lent| lent.strong_count() > 0);
        all.push(Arc::downgrade(lent));
    }

    /// Lets all streams continue that wait for this communicator. Calls no driver.
    pub(super) fn release_streams(&self) {
        let all: Vec<Arc<Lent>> = self.on_streams.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|lent| lent.release());
    }

    /// Wakes the thread that holds the core, if it sleeps on links.
    pub(super) fn wake_on_links(&self) {
        if let Some(Err(error)) = self.links.get().map(|waker| waker.wake()) {
            // It wakes by itself a little later.
            crate::log::warn!(%error, "the thread that waits for links was not woken");
        }
    }

    /// Ends the communicator for a shrink, if it has not failed already. Waits until no operation is in
    /// flight: those of other threads fail.
    pub(crate) fn end_by_shrink(&self) -> parking_lot::MutexGuard<'_, Core> {
        if self.failure.get().is_none() {
            failure::end_by_shrink(&self.status);
        }
        let mut core = self.core.lock();
        self.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 });
        core
    }

    /// Ends the communicator because of an error outside of its operations. Does not wait for another
    /// thread's call, which it ends.
    #[cold]
    pub(crate) fn fail_outside(&self, error: Error) -> Error {
        let mut core = self.core.try_lock_for(MOMENT).unwrap_or_else(|| {
            failure::abort(&self.status);
            self.core.lock()
        });
        self.fail(&mut core, error)
    }

    /// Ends the communicator because an operation failed. Agrees with the other ranks on the
    /// report, and returns it.
    #[cold]
    pub(crate) fn fail(&self, core: &mut Core, error: Error) -> Error {
        if let Some(first) = self.failure.get() {
            return Error::Revoked { first: first.clone() };
        }
        let error = failure::agree_on_report(&self.status, &self.info, error);
        self.revoke(core, &error);
        error
    }

    /// Revokes the communicator: after a failure, later operations might not match those of other
    /// ranks.
    #[cold]
    pub(crate) fn revoke(&self, core: &mut Core, error: &Error) {
        // Before anything that may wait, such as the program's log.
        self.release_streams();
        if self.failure.set(Arc::new(error.clone())).is_ok() {
            crate::log::info!(%error, rank = self.info.rank, "the communicator is revoked");
            core.part(true);
            self.recording.failed(error);
        }
        self.graphs.abandon();
    }
}

impl Holder for CommState {
    fn give_up(&self) -> Option<Stage> {
        self.core.try_lock()?.window()?.give_up_stage()
    }
}
