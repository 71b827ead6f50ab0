//! The state of one communicator: its core, its devices, and the failure that ended it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::buffer::StreamId;
use crate::call::Call;
use crate::config::SharedSettings;
use crate::error::{Error, Result};
use crate::exec::Core;
use crate::exec::compression::choose_for;
use crate::exec::core::choose;
use crate::failure::{self, CommInfo, CommStatus};
use crate::host_group::HostGroup;
use crate::host_group::stage::{Holder, Stage};
use crate::schedule::select::{Choice, Layout};
use crate::shm::Pool;
use crate::sys::{self, Waker};
use crate::timeouts::CORE_LOCK;
use crate::trace::Recording;
use crate::types::{DType, Descriptor, Op, ReduceOp};

/// What a communicator can do with devices: `crate::device`, or [`NoDevices`]. Each method does by
/// default what is right where there are none.
pub(crate) trait Devices: Any + Send + Sync {
    /// The communicator whose devices these are begins.
    fn attach(&self, _state: &Weak<CommState>) {}

    /// Whether buffers may be on devices. This looks for them.
    fn are_there(&self, _state: &CommState) -> bool {
        false
    }

    /// The devices of another communicator of this process, which need not be looked for again.
    fn of_same_process(&self) -> Box<dyn Devices>;

    /// See [`CommState::bind`].
    fn bind(&self, state: &CommState, call: &mut Call, stream: StreamId) -> Result<()>;

    /// Whether a collective may concern devices, on this rank or another.
    fn concerns(&self, _state: &CommState, _call: &Call) -> bool {
        false
    }

    /// Enqueues what calls are to do on devices. `queue` has the host's part of them run, and is called
    /// once, unless this fails first: then the communicator is usable, or has ended. `is_apart`: the caller's streams do
    /// not wait for them.
    fn enqueue(
        &self,
        _state: &CommState,
        _exclusively: &Exclusively<'_>,
        _calls: &[Call],
        _is_apart: bool,
        queue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        queue()
    }

    /// Runs a collective that concerns devices.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_on_host`].
    unsafe fn run(&self, state: &CommState, core: &mut Core, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe { core.run_on_host(&state.info, &state.recording.history, call) }
    }

    /// Whether a message can begin now.
    fn can_begin(&self, _call: &Call) -> bool {
        true
    }

    /// Begins a message: gives it memory of the host in place of a device's. `None` if none of it is on
    /// a device.
    fn begin_message(&self, _state: &CommState, _call: &mut Call) -> Result<Option<Box<dyn DeviceMessage>>> {
        Ok(None)
    }

    /// Whether graphs may replay calls, which no caller queues.
    fn has_graphs(&self) -> bool {
        false
    }

    /// Returns replayed calls that have not been run, if there are any: a collective, or messages side
    /// by side.
    fn next_replay(&self) -> Option<Vec<Call>> {
        None
    }

    /// Waits until a queued call can begin, which is the next one of the queue. Returns replayed
    /// calls that are to run before it. `seq`: its number, if it is a collective.
    fn wait_to_begin(&self, _state: &CommState, _call: &Call, _seq: Option<u64>) -> Result<Option<Vec<Call>>> {
        Ok(None)
    }

    /// Lets all streams go on that wait for the communicator. Calls no driver.
    fn release(&self) {}

    /// The communicator ends: no call comes any more.
    fn abandon(&self) {}

    /// After [`Devices::abandon`]: an operation had failed, so other ranks may still use this rank's
    /// memory.
    fn abandon_memory(&self) {}
}

/// The devices of a communicator that has none: kolo was built without them.
#[cfg(not(feature = "cuda"))]
pub(crate) struct NoDevices;

#[cfg(not(feature = "cuda"))]
impl Devices for NoDevices {
    fn of_same_process(&self) -> Box<dyn Devices> {
        Box::new(NoDevices)
    }

    fn bind(&self, state: &CommState, _: &mut Call, stream: StreamId) -> Result<()> {
        state.has_no_devices.store(true, Ordering::Relaxed);
        if stream == StreamId::DEFAULT { Ok(()) } else { Err(no_devices("a stream")) }
    }
}

/// Why a kolo without devices refuses something.
#[cfg(not(feature = "cuda"))]
pub(crate) fn no_devices(what: &'static str) -> Error {
    Error::Unsupported { what, why: "this kolo was built without the feature `cuda`".to_owned() }
}

/// Runs a part of a call on this thread, after all calls that were made before and before all that are
/// made later.
pub(crate) type Exclusively<'a> = dyn Fn(&Call, &mut dyn FnMut(&mut Core) -> Result<()>) -> Result<()> + 'a;

/// A message from or to a device, on its way through memory of the host.
pub(crate) trait DeviceMessage {
    /// The message has been sent or received: its stream goes on with it.
    fn end(&self, state: &CommState) -> Result<()>;

    /// Whether the stream has left the message. It may wait for the end of others before.
    fn has_left(&self) -> bool;

    /// Waits until the stream has left the message, of which [`DeviceMessage::has_left`] has said that
    /// it has not.
    fn until_left(&self, state: &CommState) -> Result<()>;

    /// Counts the message, which has ended.
    fn count(&self, state: &CommState);
}

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
    pub(crate) neighbours: usize,
    /// The memory that this rank takes alone; `None` if ranks do not share memory.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) devices: Box<dyn Devices>,
    /// It is known that no buffer is on a device, so none is looked at.
    pub(crate) has_no_devices: AtomicBool,
    /// Forks that led to the process that made the communicator: another number in a forked child.
    pub(crate) forks: u32,
}

impl CommState {
    pub(crate) fn new(mut core: Core, info: CommInfo, devices: Box<dyn Devices>) -> Arc<CommState> {
        let pool = core.window().map(|window| window.pool());
        let (layout, settings, recording) = (core.layout(), core.settings(), core.recording().clone());
        sys::count_forks();
        let (failure, links) = (OnceLock::new(), core.links.clone());
        let status = core.fabric().status().clone();
        let neighbours = core.fabric().neighbours().len();
        let host = core.fabric().host().filter(|_| layout.windows).map(|host| (host.clone(), neighbours));
        let state = Arc::new(CommState {
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
            devices,
            has_no_devices: AtomicBool::new(false),
            forks: sys::forks(),
        });
        state.devices.attach(&Arc::downgrade(&state));
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
        choose(&self.settings, self.layout, op, bytes)
    }

    /// As [`CommState::choose`], for elements and a reduction.
    pub(crate) fn choose_for(&self, op: Op, dtype: DType, redop: Option<ReduceOp>, bytes: u64) -> Choice {
        choose_for(&self.settings, self.layout, (op, dtype, redop, bytes))
    }

    /// Finds out whether the buffers of a call are on a device, or whether it has a place in a stream. A
    /// failure leaves the communicator usable: no other rank has seen the call yet.
    #[inline(always)]
    pub(crate) fn bind(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        if self.has_only_host_memory(stream) { Ok(()) } else { self.devices.bind(self, call, stream) }
    }

    /// Whether it is known that a call with this stream concerns no device.
    #[inline(always)]
    pub(crate) fn has_only_host_memory(&self, stream: StreamId) -> bool {
        stream == StreamId::DEFAULT && self.has_no_devices.load(Ordering::Relaxed)
    }

    /// Whether a collective may concern devices, on this rank or another.
    #[inline]
    pub(crate) fn concerns_devices(&self, call: &Call) -> bool {
        self.settings.devices && self.devices.concerns(self, call)
    }

    /// Wakes the thread that holds the core, if it sleeps on links.
    pub(super) fn wake_on_links(&self) {
        if let Some(Err(error)) = self.links.get().map(|waker| waker.wake_once()) {
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
        let mut core = self.core.try_lock_for(CORE_LOCK).unwrap_or_else(|| {
            failure::abort(&self.status);
            self.core.lock()
        });
        self.fail(&mut core, error)
    }

    /// See [`crate::Communicator::abort`].
    pub(crate) fn abort(&self) {
        if self.check_process(Op::Connect).is_err() {
            return;
        }
        // Another communicator may hold the core for a moment, to take this one's stage.
        match self.core.try_lock_for(CORE_LOCK) {
            Some(mut core) => _ = self.fail(&mut core, Error::Aborted { op: Op::Connect, seq: 0 }),
            // The call that holds the core fails and ends the communicator.
            None => failure::abort(&self.status),
        }
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
        self.devices.release();
        if self.failure.set(Arc::new(error.clone())).is_ok() {
            crate::log::info!(%error, rank = self.info.rank, "the communicator is revoked");
            core.leave(true);
            self.recording.failed(error);
        }
        self.devices.abandon();
    }
}

impl Holder for CommState {
    fn give_up(&self) -> Option<Stage> {
        self.core.try_lock()?.window()?.give_up_stage()
    }
}
