//! One collective on device memory: the choice of its path, and what all paths use.

use std::time::{Duration, Instant};

use crate::config::DevicePath;
use crate::cuda::device::{Event, MOST_PARTS};
use crate::cuda::peers::BufferAt;
use crate::error::{Error, Result};
use crate::exec::call::Call;
use crate::exec::core::Core;
use crate::exec::device_state::{Lanes, Looks, drain};
use crate::exec::lent::Lent;
use crate::exec::state::CommState;
use crate::types::{DType, Op, Rank};

/// The largest operation, in bytes, for which the ranks do not ask each other where their buffers
/// are.
pub(in crate::exec) const SHORT: u64 = 64 << 10;

impl CommState {
    /// Whether a collective may concern devices, on this rank or another.
    #[inline]
    pub(in crate::exec) fn concerns_devices(&self, call: &Call) -> bool {
        self.settings.devices && (call.lent.is_some() || self.asks(call))
    }

    /// Whether the ranks tell each other where the buffers of a call are. It depends only on what
    /// all ranks know.
    pub(super) fn asks(&self, call: &Call) -> bool {
        let may_differ = matches!(call.op, Op::AllToAllV | Op::Barrier);
        self.settings.devices && !may_differ && call.bytes(self.layout.ranks) > SHORT
    }

    /// Waits until the caller's stream has reached a call.
    pub(super) fn until_ready(&self, call: &Call, lent: &Lent, seq: Option<u64>) -> Result<()> {
        self.until(&lent.ready, call.timeout.unwrap_or(self.info.timeout), call.op, seq)
    }

    /// Waits for what the caller gave its stream.
    pub(in crate::exec) fn until(&self, event: &Event, timeout: Duration, op: Op, seq: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let mut looks = Looks::default();
        while !event.is_done()? {
            if self.info.cancel.stops(seq) {
                return Err(Error::Aborted { op, seq: seq.unwrap_or(0) });
            }
            if began.elapsed() >= timeout {
                let problem =
                    format!("it is not done after {timeout:.1?}; give the call more time, or check what the stream does");
                let doing = "waiting for what the stream was given before";
                return Err(Error::Device { device: event.device().name(), doing, problem });
            }
            looks.look_again();
        }
        Ok(())
    }
}

/// One collective while it runs.
pub(in crate::exec) struct OnDevices<'a> {
    pub(super) shared: &'a CommState,
    pub(super) core: &'a mut Core,
    pub(super) call: &'a Call,
    pub(super) rank: Rank,
    pub(super) world: usize,
}

impl<'a> OnDevices<'a> {
    pub(in crate::exec) fn new(shared: &'a CommState, core: &'a mut Core, call: &'a Call) -> OnDevices<'a> {
        OnDevices { rank: shared.info.rank, world: shared.layout.ranks, shared, core, call }
    }

    /// Runs the collective.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    pub(in crate::exec) unsafe fn run(&mut self) -> Result<()> {
        if let Some(lent) = &self.call.lent {
            self.shared.until_ready(self.call, lent, Some(self.core.next_seq()))?;
        }
        // SAFETY: passed on.
        let result = unsafe { self.run_when_ready() };
        if result.is_err() {
            // The caller gets its buffers back.
            self.drain();
        }
        result
    }

    /// Chooses the path. All ranks choose the same, from what all of them know.
    unsafe fn run_when_ready(&mut self) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            if self.world == 1 && self.call.lent.as_ref().is_some_and(|lent| lent.on_device == [true; 2]) {
                return self.copy_alone();
            }
            if !self.shared.asks(self.call) || self.world == 1 {
                return self.whole();
            }
            if !self.may_be_direct() {
                // It does not matter where the buffers are, only whether all are in host memory.
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

    /// Whether ranks may be able to reach each other's devices, from what all of them know without
    /// asking.
    fn may_be_direct(&self) -> bool {
        self.shared.settings.device_path == DevicePath::Auto && self.world <= MOST_PARTS && self.shared.layout.hosts == 1
    }

    /// Whether a buffer of this rank is on a device.
    pub(super) fn touches_device(&self) -> bool {
        self.call.lent.as_ref().is_some_and(|lent| lent.on_device.contains(&true))
    }

    /// Fails if the operation has been cancelled: its buffers on other ranks may no longer be lent.
    pub(super) fn check_not_cancelled(&self) -> Result<()> {
        let seq = self.core.next_seq();
        if self.shared.info.cancel.stops(Some(seq)) { Err(Error::Aborted { op: self.call.op, seq }) } else { Ok(()) }
    }

    /// Runs a part of the call on host memory.
    ///
    /// # Safety
    ///
    /// As for [`OnDevices::run`].
    pub(super) unsafe fn on_host(&mut self, call: &Call) -> Result<()> {
        let (info, history) = (&self.shared.info, &self.shared.recording.history);
        // SAFETY: passed on.
        unsafe { self.core.run_on_host(info, history, call) }
    }

    /// A call that is a part of this one. Other ranks see it as this one's operation.
    pub(super) fn beside(&self, op: Op, dtype: DType, count: usize) -> Call {
        let on_behalf_of = Some(self.call.op);
        Call { op, on_behalf_of, dtype, count, timeout: self.call.timeout, ..Call::new::<u8>(op) }
    }

    /// Waits for all ranks.
    pub(super) fn synchronise(&mut self) -> Result<()> {
        let barrier = self.beside(Op::Barrier, DType::U8, 0);
        // SAFETY: a barrier touches no buffer.
        unsafe { self.on_host(&barrier) }
    }

    /// The call of a single rank: a copy.
    unsafe fn copy_alone(&mut self) -> Result<()> {
        let Call { send, recv, .. } = *self.call;
        if send.ptr == recv.ptr {
            return Ok(());
        }
        let lanes = self.lanes()?;
        // SAFETY: passed on; on a single rank both are equally long.
        unsafe { lanes.device.copy(lanes.back.id, send.ptr.addr() as u64, recv.ptr.addr() as u64, recv.len)? };
        lanes.finish()
    }

    /// The streams on the call's device.
    pub(super) fn lanes(&mut self) -> Result<&Lanes> {
        let lent = self.call.lent.as_ref().expect("a call that is lent");
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

    /// Waits until nothing of this operation is in flight on the device.
    fn drain(&mut self) {
        let Some(lanes) = &self.core.devices.lanes else { return };
        drain(&lanes.outs[0], lanes.out.id);
        drain(&lanes.backs[0], lanes.back.id);
    }
}
