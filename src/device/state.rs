//! What a communicator keeps between its calls on devices.

use std::any::Any;
use std::sync::{Arc, LazyLock, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::call::DeviceCall;
use super::graphs::Graphs;
use super::host_area::HostArea;
use crate::call::Call;
use crate::cuda::device::{Device, DeviceId, Driver, Event, StreamId};
use crate::cuda::lanes::Lane;
use crate::cuda::peers::{Peers, Record};
use crate::cuda::shared::shared;
use crate::error::{Error, Result};
use crate::network::identity;
use crate::progress::CommState;
use crate::shm::registered::Allocation;
use crate::sys::Backoff;
use crate::timeouts::DEVICE_DRAIN;
use crate::types::{Op, Rank, mix};

/// What a communicator has for calls on devices.
#[derive(Default)]
pub(crate) struct DeviceState {
    /// The devices of this process, once they have been looked for.
    pub(super) driver: OnceLock<Option<Arc<dyn Driver>>>,
    pub(super) calling: Mutex<Calling>,
    /// The communicator.
    pub(super) comm: OnceLock<Weak<CommState>>,
    /// The calls whose streams may wait for this communicator.
    pub(super) on_streams: Mutex<Vec<Weak<DeviceCall>>>,
    /// The calls that graphs have captured.
    pub(super) graphs: Graphs,
    /// Host memory for segments, and this rank's place in it. Ranks of one host share it, so that a
    /// reduced segment is not staged a second time. All ranks have it, or none.
    pub(super) area: OnceLock<(Arc<Allocation>, usize)>,
    /// A process number that tests choose.
    #[cfg(test)]
    pub(super) process: OnceLock<u64>,
}

impl DeviceState {
    /// That of a communicator.
    pub(crate) fn of(state: &CommState) -> &DeviceState {
        let any: &dyn Any = &*state.devices;
        any.downcast_ref().expect("with the feature `cuda`, every communicator has one")
    }

    /// A number of this process that no other process has, a forked child included.
    pub(super) fn process(&self) -> u64 {
        #[cfg(test)]
        if let Some(&process) = self.process.get() {
            return process;
        }
        mix(*PROCESS, std::process::id().into())
    }

    /// A stream may wait for this call from now on.
    pub(super) fn add_on_stream(&self, bound: &Arc<DeviceCall>) {
        let mut all = self.on_streams.lock();
        all.retain(|bound| bound.strong_count() > 0);
        all.push(Arc::downgrade(bound));
    }
}

/// Drawn by the process that first needed it; its forked children inherit it.
static PROCESS: LazyLock<u64> = LazyLock::new(|| u64::from_le_bytes(std::array::from_fn(|i| identity::random()[i])));

/// What the callers keep. It is locked while one of them prepares and enqueues a call, never while
/// an operation runs.
#[derive(Default)]
pub(crate) struct Calling {
    /// kolo's own streams, by the calls that go over them.
    pub(super) lanes: Vec<(LaneOf, Arc<Lane>)>,
    /// Lanes for captured calls, with the number of the capture. They are apart, because a stream in a
    /// capture can do no other work.
    pub(super) captured_lanes: Vec<(Option<u64>, Arc<Lane>)>,
    /// How large calls pass; `None` before the first.
    pub(super) mode: Option<Mode>,
    /// The last call that used this rank's area. The next one waits until its stream has left.
    pub(super) last: Weak<DeviceCall>,
    /// Large calls so far.
    pub(super) calls: u64,
}

/// The calls that share a stream of kolo's own, one behind the other. A send must not be behind a receive:
/// the peer may do the same, and wait for the send first. A receive should not be behind one from another
/// rank, which may send later. Messages of one rank arrive in their order anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneOf {
    Collectives,
    /// They wait only for the streams on which they were called.
    Sends,
    /// Of some peers.
    Receives(usize),
    ReceivesFromAny,
}

/// How many streams the receives from given ranks have. A process should need no more streams than are
/// made at once ([`LanePool`](crate::cuda::lanes::LanePool)), and the GPU has few queues for them.
const RECEIVING: usize = 5;

impl LaneOf {
    pub(super) fn of(call: &Call, rank: Rank, world: usize) -> LaneOf {
        match call.op {
            Op::Send => LaneOf::Sends,
            Op::Recv if call.source.is_some() => LaneOf::ReceivesFromAny,
            // With up to 5 peers, each has its own.
            Op::Recv => LaneOf::Receives((call.root + world - rank).wrapping_sub(1) % world % RECEIVING),
            _ => LaneOf::Collectives,
        }
    }

    /// Those that are taken together. To make a stream waits for all streams, which the first message may
    /// hold.
    fn together(self) -> Vec<LaneOf> {
        match self {
            LaneOf::Collectives => vec![self],
            _ => (0..RECEIVING).map(LaneOf::Receives).chain([LaneOf::Sends, LaneOf::ReceivesFromAny]).collect(),
        }
    }
}

/// How large calls on devices pass, on all ranks alike.
#[derive(Clone)]
pub(super) enum Mode {
    /// Every leader can reach the memory of all ranks.
    Direct(DeviceId, Arc<Peers>),
    /// Through host memory.
    Staged(Arc<HostArea>),
}

impl Drop for Calling {
    fn drop(&mut self) {
        self.lanes.drain(..).for_each(|(_, lane)| retire(lane));
        self.captured_lanes.drain(..).for_each(|(_, lane)| retire_captured(lane));
    }
}

impl Calling {
    /// kolo's own stream on a device, for these calls.
    pub(super) fn lane(&mut self, device: &Arc<dyn Device>, of: LaneOf) -> Result<Arc<Lane>> {
        let find = |lanes: &[(LaneOf, Arc<Lane>)]| {
            let mut here = lanes.iter().filter(|(_, lane)| lane.device.id() == device.id());
            here.find(|(other, _)| *other == of).map(|(_, lane)| lane.clone())
        };
        if let Some(lane) = find(&self.lanes) {
            return Ok(lane);
        }
        // All or none, so that a failure leaves no part of them.
        let take = |each| Ok((each, shared(&**device).lanes.take(device)?));
        self.lanes.extend(of.together().into_iter().map(take).collect::<Result<Vec<_>>>()?);
        Ok(find(&self.lanes).expect("it is one of those that were taken"))
    }

    /// kolo's own stream on a device, for calls of a capture. Two captures may go on at once.
    pub(super) fn captured_lane(&mut self, device: &Arc<dyn Device>, capture: Option<u64>) -> Result<Arc<Lane>> {
        let lanes = &mut self.captured_lanes;
        let is_here = |lane: &Lane| lane.device.id() == device.id();
        // A capture that was made invalid keeps its stream until it ends.
        let is_free = |lane: &Lane| is_here(lane) && matches!(device.capture(lane.stream.id), Ok(None));
        let same = lanes.iter().position(|(number, lane)| *number == capture && is_here(lane));
        if let Some(index) = same.or_else(|| lanes.iter().position(|(_, lane)| is_free(lane))) {
            lanes[index].0 = capture;
            return Ok(lanes[index].1.clone());
        }
        let lane = shared(&**device).lanes.take(device)?;
        lanes.push((capture, lane.clone()));
        Ok(lane)
    }

    /// Keeps this rank's area for ever, because an operation has failed.
    pub(super) fn abandon(&mut self) {
        if let Some(Mode::Direct(_, peers)) = &self.mode {
            peers.abandon();
        }
    }
}

/// What the ranks have found out together before their first large call.
pub(super) enum Prepared {
    /// All of them have areas on devices, which may be reachable.
    Reachable(Vec<Record>),
    /// They use host memory, which is there now: this, and this rank's place in it.
    Staged(Arc<Allocation>, usize),
}

/// Waits for an event of this rank's stream.
pub(super) fn until_done(event: &Event, timeout: Duration) -> Result<()> {
    let began = Instant::now();
    let backoff = Backoff::default();
    while !event.is_done()? {
        if began.elapsed() >= timeout {
            let problem =
                format!("the device has not reached it after {}; check what else runs on it", crate::error::shown::time(timeout));
            return Err(Error::Device { device: event.device().name(), doing: "copying or reducing", problem });
        }
        backoff.wait();
    }
    Ok(())
}

/// Gives a lane back when its stream has done all its work: it may still wait for a stream of the
/// caller.
fn retire(lane: Arc<Lane>) {
    if lane.device.held().is_own() && lane.mark().is_ok() {
        let held = lane.device.held().clone();
        held.until_left(move || {
            let is_done = lane.has_done_it();
            if is_done {
                shared(&*lane.device).lanes.give_back(lane.clone());
            }
            is_done
        });
    }
}

/// As [`retire`], for a lane that may belong to a capture, in which its work cannot be queried.
fn retire_captured(lane: Arc<Lane>) {
    if !lane.device.held().is_own() {
        return;
    }
    match lane.device.capture(lane.stream.id) {
        Ok(None) => retire(lane),
        _ => std::mem::forget(lane),
    }
}

/// Waits for all work of kolo's stream. For devices whose streams cannot wait for the host.
pub(super) fn finish(lane: &Lane, timeout: Duration) -> Result<()> {
    lane.join(|join| until_done(join, timeout))
}

/// Waits until a stream has done what it was given, after a failure or before its memory is freed,
/// but at most [`DEVICE_DRAIN`]. Returns whether it has.
pub(crate) fn drain(event: &Event, stream: StreamId) -> bool {
    let drained = event.record(stream).and_then(|()| until_done(event, DEVICE_DRAIN));
    drained
        .inspect_err(|error| crate::log::warn!(%error, "the work in flight on the device has failed or has not ended in time"))
        .is_ok()
}
