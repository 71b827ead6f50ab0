//! The state of one communicator: its core, and why it ended.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::call::Call;
use super::core::Core;
use super::device;
use crate::bootstrap::host_group::HostGroup;
use crate::bootstrap::host_group::stage::{Holder, Stage};
use crate::config::SharedSettings;
use crate::cuda::device::Driver;
use crate::error::{Error, Result};
use crate::failure::{self, CommInfo, CommStatus};
use crate::schedule::select::Layout;
use crate::sys;
use crate::trace::Recording;
use crate::types::{Descriptor, Op};

/// One communicator, as its callers' threads and its progress thread share it.
pub(crate) struct CommState {
    pub(crate) core: Mutex<Core>,
    pub(crate) info: CommInfo,
    /// The failure that revoked the communicator.
    pub(crate) failure: OnceLock<Arc<Error>>,
    pub(crate) layout: Layout,
    pub(crate) settings: SharedSettings,
    pub(crate) recording: Arc<Recording>,
    pub(crate) status: Arc<CommStatus>,
    /// What this process shares with the other ranks of its host, and how many of them there are, if they share memory.
    pub(crate) host: Option<(Arc<HostGroup>, usize)>,
    /// The devices of this process, once they have been looked for.
    pub(crate) driver: OnceLock<Option<Arc<dyn Driver>>>,
    /// The kinds of calls on devices that there have been.
    pub(crate) kinds: Mutex<HashSet<device::Kind>>,
    /// Of the process that made it.
    pub(crate) forks: u32,
}

impl CommState {
    pub(crate) fn new(core: Core, info: CommInfo) -> Arc<CommState> {
        let (layout, settings, recording) = (core.layout(), core.settings(), core.recording().clone());
        sys::count_forks();
        let failure = OnceLock::new();
        let status = core.fabric().status().clone();
        let host = core.fabric().host().filter(|_| layout.windows).map(|host| (host.clone(), core.fabric().neighbours().len()));
        let state = Arc::new(CommState {
            core: Mutex::new(core),
            info,
            failure,
            layout,
            settings,
            recording,
            status,
            host,
            driver: OnceLock::new(),
            kinds: Mutex::default(),
            forks: sys::forks(),
        });
        if let Some(window) = state.core.lock().window() {
            let holder: Weak<dyn Holder> = Arc::downgrade(&state) as _;
            window.set_holder(holder);
        }
        state
    }

    /// # Safety
    ///
    /// As for [`Executor::submit`](super::submit::Executor::submit).
    #[inline]
    pub(crate) unsafe fn carry_out(&self, core: &mut Core, call: &Call) -> Result<()> {
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
    /// As for [`Executor::submit_together`](super::submit::Executor::submit_together).
    pub(crate) unsafe fn point_to_point(&self, core: &mut Core, calls: Vec<Call>) -> Result<()> {
        let Some(first) = calls.first() else { return Ok(()) };
        let op = first.op;
        self.check_not_revoked(core, first)?;
        let mut calls = calls.into_iter();
        let run = |core: &mut Core| {
            // SAFETY: passed on.
            unsafe { core.point_to_point(&self.info, || calls.next(), |_| {}) }
        };
        let result = self.unless_it_panics(core, op, run);
        result.map_err(|error| self.fail(core, error))
    }

    #[inline]
    pub(crate) fn check_not_revoked(&self, core: &mut Core, call: &Call) -> Result<()> {
        if let Some(first) = self.failure.get() {
            return Err(Error::Revoked { first: first.clone() });
        }
        // What ended the communicator while no operation was under way meets this one.
        let collective = (!call.op.is_point_to_point()).then(|| core.next_seq());
        if self.info.cancel.stops(collective) {
            let Descriptor { op, seq, .. } = call.descriptor(core.next_number(call), 0);
            return Err(self.fail(core, Error::Aborted { op, seq }));
        }
        Ok(())
    }

    /// A copy of the process that a fork made has none of its threads, and would write into what the others see.
    #[inline]
    pub(crate) fn check_process(&self, op: Op) -> Result<()> {
        if self.forks == sys::forks() { Ok(()) } else { Err(Error::Forked { op }) }
    }

    /// Waits until nothing is under way, and ends the communicator, if it has not failed already.
    pub(crate) fn end(&self) -> parking_lot::MutexGuard<'_, Core> {
        let mut core = self.core.lock();
        self.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 });
        core
    }

    /// An operation failed: agrees with the other ranks on why, and ends the communicator. What to report.
    #[cold]
    pub(crate) fn fail(&self, core: &mut Core, error: Error) -> Error {
        if let Some(first) = self.failure.get() {
            return Error::Revoked { first: first.clone() };
        }
        let error = failure::agree_on_report(&self.status, &self.info, error);
        self.revoke(core, &error);
        error
    }

    /// An operation failed: no later one can be trusted to match those of the others.
    #[cold]
    pub(crate) fn revoke(&self, core: &mut Core, error: &Error) {
        if self.failure.set(Arc::new(error.clone())).is_ok() {
            tracing::info!(%error, rank = self.info.rank, "the communicator is revoked");
            core.part(true);
            self.recording.failed(error);
        }
    }
}

impl Holder for CommState {
    fn give_up(&self) -> Option<Stage> {
        self.core.try_lock()?.window()?.give_up_stage()
    }
}
