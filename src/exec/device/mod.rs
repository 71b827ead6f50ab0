//! Collectives of which some buffers, or all, are in the memory of GPUs.
//!
//! Short ones pass through the host as they are. Of others, ranks first tell each other where their buffers are. If all can reach
//! all, each does its part where the buffers are ("direct"). Where they cannot, because memory is of one of CUDA's pools, an all-reduce
//! passes through areas on the devices that all can reach. Otherwise operations are cut into pieces that pass through pinned host memory:
//! while one is being reduced there, the next is on its way from the device, and the one before on its way back.
//!
//! The host waits for devices, and ranks for each other on the host; no stream waits for another process. For what a process that
//! died was to do never comes, and a stream that waited for it could never be used again. The caller's stream waits at a gate,
//! which opens when the operation has ended, however that was.

mod agree;
mod areas;
mod lend;
mod message;
mod staged;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use super::call::Call;
use super::core::Core;
use super::raw::Raw;
use super::state::CommState;
use super::submit::Executor;
use crate::bootstrap::identity;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config::DevicePath;
use crate::cuda;
use crate::cuda::device::{
    Address, Device, DeviceId, Driver, Event, Gate, MOST_PARTS, Memory, Pinned, Reduction, Stream, StreamId,
};
use crate::cuda::direct::{self, Buffer, Move, Plan};
use crate::cuda::peers::{BufferAt, Peers, Record};
use crate::cuda::pieces::{Cut, Piece, Row};
use crate::error::{Argument, Cause, Error, Result};
use crate::shm::registered::Allocation;
use crate::sys::Segment;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp, mix};

use areas::DeviceArea;
pub(crate) use lend::Lent;
pub(super) use message::Staged;
use staged::Area;

/// Up to so many bytes an operation is not worth asking where the others' buffers are.
const SHORT: u64 = 64 << 10;

/// Bytes of a piece: enough that starting a copy does not count, and few enough that the first and the last, beside which nothing
/// else goes on, do not either.
const PIECE: usize = 2 << 20;

/// Bytes of the area of a rank on its device: enough that two meetings of the ranks do not count.
const DEVICE_AREA: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Pieces that are under way at once: one comes, one is reduced, one goes.
const SLOTS: usize = 3;

/// Calls that need the same of a device: the operation, and whether it is long.
pub(super) type Kind = (Op, DType, Option<ReduceOp>, bool);

/// Of a rank that has its buffers in host memory.
const NO_DEVICE: DeviceId = [0; 16];

/// What a communicator keeps for devices.
#[derive(Default)]
pub(crate) struct Devices {
    lanes: Option<Lanes>,
    /// For pieces. Ranks of one host share it, so that what is reduced need not be staged once more.
    area: Option<Area>,
    /// For what is short.
    scratch: Option<Area>,
    on_device: Option<DeviceArea>,
    peers: Peers,
    /// The device that each rank last had, if any.
    of_ranks: Vec<DeviceId>,
    /// A number that tests have of their own.
    process: Option<u64>,
}

impl Devices {
    /// An operation has failed: other ranks may not have heard of it yet, and use this one's area until they do. It is never freed.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(self.on_device.take().and_then(|area| area.memory));
    }
}

/// kolo's own streams on a device.
struct Lanes {
    device: Arc<dyn Device>,
    out: Stream,
    back: Stream,
    /// For each slot, when its piece has come, and when it has gone.
    outs: [Event; SLOTS],
    backs: [Event; SLOTS],
    /// How long what they are given may take: of the call that uses them.
    timeout: Duration,
}

impl Lanes {
    fn new(device: &Arc<dyn Device>) -> Result<Lanes> {
        let events = || -> Result<[Event; SLOTS]> { Ok([Event::new(device)?, Event::new(device)?, Event::new(device)?]) };
        Ok(Lanes {
            out: Stream::new(device)?,
            back: Stream::new(device)?,
            outs: events()?,
            backs: events()?,
            device: device.clone(),
            timeout: Duration::MAX,
        })
    }

    fn until_done(&self, event: &Event) -> Result<()> {
        until_done(event, self.timeout)
    }

    /// Waits for all that the stream to devices was given.
    fn finish(&self) -> Result<()> {
        self.backs[0].record(self.back.id)?;
        self.until_done(&self.backs[0])
    }
}

impl CommState {
    /// Whether ranks tell each other where the buffers of a call are: not of one alone, for it depends on what all know.
    fn asks(&self, call: &Call) -> bool {
        let may_differ = matches!(call.op, Op::AllToAllV | Op::Barrier);
        self.settings.devices && !may_differ && call.bytes(self.layout.ranks) > SHORT
    }

    /// A collective, on whatever memory.
    ///
    /// # Safety
    ///
    /// As for [`Core::collective`].
    #[inline]
    pub(super) unsafe fn collective(&self, core: &mut Core, call: &Call) -> Result<()> {
        if !self.settings.devices || (call.lent.is_none() && !self.asks(call)) {
            // SAFETY: passed on.
            return unsafe { core.collective(&self.info, &self.recording.history, call) };
        }
        // SAFETY: passed on.
        unsafe { OnDevices::new(self, core, call).carry_out() }
    }

    /// Waits until the caller's stream has come to a call.
    fn until_ready(&self, call: &Call, lent: &Lent, seq: Option<u64>) -> Result<()> {
        self.until(&lent.ready, call.timeout.unwrap_or(self.info.timeout), call.op, seq)
    }

    /// Waits for what a stream of the caller's was given.
    fn until(&self, event: &Event, timeout: Duration, op: Op, seq: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let mut looks = Looks::default();
        while !event.is_done()? {
            if self.info.cancel.stops(seq) {
                return Err(Error::Aborted { op, seq: seq.unwrap_or(0) });
            }
            if began.elapsed() >= timeout {
                let problem = format!("it is not done after {timeout:.1?}; give the call more time, or find out what it does");
                let doing = "waiting for what the stream was given before";
                return Err(Error::Device { device: event.device().name(), doing, problem });
            }
            looks.look_again();
        }
        Ok(())
    }
}

/// Waits for what depends on this rank's copies and kernels only.
fn until_done(event: &Event, timeout: Duration) -> Result<()> {
    let began = Instant::now();
    let mut looks = Looks::default();
    while !event.is_done()? {
        if began.elapsed() >= timeout {
            let problem = format!("the device has not come to it after {timeout:.1?}; find out what else it does");
            return Err(Error::Device { device: event.device().name(), doing: "copying or reducing", problem });
        }
        looks.look_again();
    }
    Ok(())
}

/// So long what is under way on a device is waited for when its operation has failed.
const DRAIN: Duration = Duration::from_secs(5);

/// Waits until a stream has done what it was given, after a failure or before the end; whether it has.
pub(crate) fn drain(event: &Event, stream: StreamId) -> bool {
    let drained = event.record(stream).and_then(|()| until_done(event, DRAIN));
    drained.inspect_err(|error| tracing::warn!(%error, "what was under way on the device has failed as well")).is_ok()
}

/// How often it is looked whether a device is done: without pause while that may be a matter of microseconds.
#[derive(Default)]
struct Looks(u32);

impl Looks {
    fn look_again(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..100 => std::hint::spin_loop(),
            100..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// One collective, as it is carried out.
struct OnDevices<'a> {
    shared: &'a CommState,
    core: &'a mut Core,
    call: &'a Call,
    rank: Rank,
    world: usize,
}

impl<'a> OnDevices<'a> {
    fn new(shared: &'a CommState, core: &'a mut Core, call: &'a Call) -> OnDevices<'a> {
        OnDevices { rank: shared.info.rank, world: shared.layout.ranks, shared, core, call }
    }

    /// # Safety
    ///
    /// As for [`Core::collective`].
    unsafe fn carry_out(&mut self) -> Result<()> {
        if let Some(lent) = &self.call.lent {
            self.shared.until_ready(self.call, lent, Some(self.core.next_seq()))?;
        }
        // SAFETY: passed on.
        let result = unsafe { self.carry_out_when_ready() };
        if result.is_err() {
            // The buffers are about to be the caller's again.
            self.drain();
        }
        result
    }

    unsafe fn carry_out_when_ready(&mut self) -> Result<()> {
        // SAFETY: passed on, as below.
        unsafe {
            if self.world == 1 && self.call.lent.as_ref().is_some_and(|lent| lent.on_device == [true; 2]) {
                return self.alone();
            }
            if !self.shared.asks(self.call) || self.world == 1 {
                return self.whole();
            }
            if !self.may_be_direct() {
                // Where they are is of no interest, only whether all are the host's.
                return if self.agree(!self.touches_device())? { self.on_host(self.call) } else { self.through_host() };
            }
            let records = self.tell()?;
            self.look_for_other_devices(&records);
            if records.iter().flat_map(|record| record.places).all(|place| matches!(place, BufferAt::Nowhere | BufferAt::Host)) {
                return self.on_host(self.call);
            }
            if let Some(addresses) = self.reach(&records)? {
                return self.direct(&addresses);
            }
            let is_on_device = |place: BufferAt| matches!(place, BufferAt::Hidden | BufferAt::Open { .. });
            let all_are = || records.iter().flat_map(|record| record.places).all(is_on_device);
            if self.call.op == Op::AllReduce
                && all_are()
                && let Some(areas) = self.areas()?
            {
                return self.through_areas(&areas);
            }
            self.through_host()
        }
    }

    /// Whether a buffer of this rank is a device's.
    fn touches_device(&self) -> bool {
        self.call.lent.as_ref().is_some_and(|lent| lent.on_device.contains(&true))
    }

    /// An error if the operation has been given up: what other ranks lent for it may be theirs again.
    fn check_not_given_up(&self) -> Result<()> {
        let seq = self.core.next_seq();
        if self.shared.info.cancel.stops(Some(seq)) { Err(Error::Aborted { op: self.call.op, seq }) } else { Ok(()) }
    }

    /// A part of the call, in host memory.
    unsafe fn on_host(&mut self, call: &Call) -> Result<()> {
        let (info, history) = (&self.shared.info, &self.shared.recording.history);
        // SAFETY: passed on.
        unsafe { self.core.collective(info, history, call) }
    }

    /// A call that serves this one.
    fn beside(&self, op: Op, dtype: DType, count: usize) -> Call {
        let on_behalf_of = Some(self.call.op);
        Call { op, on_behalf_of, dtype, count, timeout: self.call.timeout, ..Call::new::<u8>(op) }
    }

    /// Waits for all ranks.
    fn meet(&mut self) -> Result<()> {
        let barrier = self.beside(Op::Barrier, DType::U8, 0);
        // SAFETY: a barrier touches no buffer.
        unsafe { self.on_host(&barrier) }
    }

    /// This rank's part where the buffers are. When it is called, those of all ranks are ready.
    unsafe fn direct(&mut self, addresses: &[[u64; 2]]) -> Result<()> {
        let Call { op, dtype, redop, root, count, .. } = *self.call;
        let counts = self.call.recv_counts.as_ref().or(self.call.send_counts.as_ref());
        let offsets = counts.map(super::call::Counts::offsets);
        let moves = Plan { op, dtype, rank: self.rank, world: self.world, root, count, offsets }.moves();
        if !moves.is_empty() {
            self.check_not_given_up()?;
            let world = self.world;
            let lanes = self.lanes()?;
            for one in &moves {
                // SAFETY: all parts are of buffers that their ranks have lent, and no two ranks touch what one of them writes.
                unsafe { give(lanes, one, addresses, (dtype, redop, world))? };
            }
            lanes.finish()?;
        }
        // Nobody returns before all have read from, and written to, its buffers.
        self.meet()
    }

    /// The call of the only rank: a copy.
    unsafe fn alone(&mut self) -> Result<()> {
        let Call { send, recv, .. } = *self.call;
        if send.ptr == recv.ptr {
            return Ok(());
        }
        let lanes = self.lanes()?;
        // SAFETY: passed on; alone, both are equally long.
        unsafe { lanes.device.copy(lanes.back.id, send.ptr.addr() as u64, recv.ptr.addr() as u64, recv.len)? };
        lanes.finish()
    }

    /// The streams on the call's device.
    fn lanes(&mut self) -> Result<&Lanes> {
        let lent = self.call.lent.as_ref().expect("only of calls that are lent");
        let devices = &mut self.core.devices;
        if devices.lanes.as_ref().is_some_and(|lanes| lanes.device.id() != lent.device.id()) {
            (devices.lanes, devices.scratch) = (None, None);
            if let Some(area) = &mut devices.area {
                area.pinned = None;
            }
        }
        let mut lanes = match devices.lanes.take() {
            Some(lanes) => lanes,
            None => Lanes::new(&lent.device)?,
        };
        lanes.timeout = self.call.timeout.unwrap_or(self.shared.info.timeout);
        Ok(devices.lanes.insert(lanes))
    }

    /// Waits until nothing of this operation is under way on the device.
    fn drain(&mut self) {
        let Some(lanes) = &self.core.devices.lanes else { return };
        drain(&lanes.outs[0], lanes.out.id);
        drain(&lanes.backs[0], lanes.back.id);
    }
}

/// Gives a device one move to do.
///
/// # Safety
///
/// All parts are within buffers that can be reached there, and stay until it is done.
unsafe fn give(
    lanes: &Lanes,
    one: &Move,
    addresses: &[[u64; 2]],
    (dtype, redop, world): (DType, Option<ReduceOp>, usize),
) -> Result<()> {
    let address = |part: &crate::cuda::direct::Part| addresses[part.rank][part.buffer as usize] + part.offset;
    let sources: Vec<u64> = one.sources.iter().map(address).collect();
    let targets: Vec<u64> = one.targets.iter().map(address).collect();
    // SAFETY: passed on.
    unsafe {
        match redop {
            Some(redop) => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop, sources, targets, count: one.count, divisor: world };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            // What is no bool becomes one.
            None if dtype == DType::Bool => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop: ReduceOp::Max, sources, targets, count: one.count, divisor: 1 };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            None if sources == targets => Ok(()),
            None => lanes.device.copy(lanes.back.id, sources[0], targets[0], one.count * dtype.size()),
        }
    }
}
