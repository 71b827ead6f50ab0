//! The first large call of a communicator with device memory: the ranks find out whether they can
//! reach each other's memory, and make what later calls need. Each driver call here is made by the
//! caller, before its stream waits for anything.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::DeviceCall;
use super::caller::Caller;
use super::host_area::HostArea;
use super::state::{Calling, Mode, Prepared, finish};
use super::verify::{VERIFIED, verify};
use crate::call::Call;
use crate::config::DeviceWaits;
use crate::cuda::barrier::FLAGS_BYTES;
use crate::cuda::device::{Address, Device, Event, Memory};
use crate::cuda::imports::Import;
use crate::cuda::peers::{BEHIND_AREA, Exported, ONE_SHOT, Peers, Record, leaders};
use crate::cuda::shared::shared;
use crate::error::{Error, Result};
use crate::timeouts::AREAS_CLOSING;
use crate::types::Rank;

/// Bytes that a rank allocates on its device.
const ALLOCATED: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Bytes of its area there.
const DEVICE_AREA: usize = ALLOCATED - BEHIND_AREA;

const _: () = assert!(VERIFIED <= DEVICE_AREA);

impl Caller<'_> {
    /// Returns how the large calls of a communicator pass. Prepares for them with the other ranks,
    /// if this is the first.
    pub(super) fn mode(&self, calling: &mut Calling, call: &Call, bound: &Arc<DeviceCall>) -> Result<Mode> {
        match &calling.mode {
            Some(Mode::Direct(device, _)) if *device != bound.device.id() => {
                let why = format!("it has used another device than {}; use a communicator for each device", bound.device.name());
                return Err(Error::Unsupported { what: "a second device in one communicator", why });
            }
            Some(mode) => return Ok(mode.clone()),
            None => {}
        }
        if self.devices.graphs.is_any() && !bound.is_captured() {
            // On all ranks, replays that were launched earlier on this stream run first.
            let earlier = Event::new(&bound.device)?;
            earlier.record(bound.stream)?;
            self.state.until_event(&earlier, call.timeout.unwrap_or(self.state.info.timeout), call.op)?;
        }
        let mode = self.prepare_mode(call, bound)?;
        Ok(calling.mode.insert(mode).clone())
    }

    fn prepare_mode(&self, call: &Call, bound: &Arc<DeviceCall>) -> Result<Mode> {
        let device = &bound.device;
        let state = self.state;
        // The other ranks are in the call already: this rank cannot leave it.
        let staged = |memory, place| {
            let area = HostArea::new(device, memory, place).map_err(|error| self.state.fail_outside(error))?;
            Ok(Mode::Staged(Arc::new(area)))
        };
        // The other ranks wait for this one as long as for any step of the call.
        let timeout = call.timeout.unwrap_or(state.info.timeout) / 2;
        let area = if state.may_be_direct() && bound.has_kernels { own_area(device, timeout) } else { None };
        let exported = area.as_ref().map(|(_, exported)| *exported);
        let records = match self.in_turn(call, |operation| operation.prepare(exported))? {
            Prepared::Staged(memory, place) => return staged(memory, place),
            Prepared::Reachable(records) => records,
        };
        let (memory, _) = area.expect("all ranks have an area");
        // After a failure it stays: peers that have not noticed it yet still use it.
        let memory = ManuallyDrop::new(memory);
        let areas = reach_areas(device, state.info.rank, &records, timeout).map_err(|error| self.state.fail_outside(error))?;
        let areas = areas.inspect_err(|error| {
            crate::log::info!(%error, "memory of other ranks cannot be reached: it passes through the host");
        });
        match self.in_turn(call, |operation| operation.agree_on_areas(areas.is_ok(), &records))? {
            Prepared::Staged(host, place) => {
                drop(ManuallyDrop::into_inner(memory));
                staged(host, place)
            }
            Prepared::Reachable(records) => {
                let areas = areas.expect("all ranks have opened the areas");
                let have_barrier = self.agree_on_barrier(call, device, &records)?;
                let waits = if have_barrier { DeviceWaits::Kernels } else { DeviceWaits::Host };
                crate::log::debug!(device = device.name(), %waits, "ranks reach each other's memory, and wait for each other");
                let memory = (ManuallyDrop::into_inner(memory), DEVICE_AREA);
                let peers = Peers::new(state.info.rank, &records, memory, areas, have_barrier);
                Ok(Mode::Direct(device.id(), Arc::new(peers)))
            }
        }
    }

    /// Agrees with the other ranks whether kernels wait for each other: if each rank has a device of its
    /// own, and none of these ends kernels that run for long.
    fn agree_on_barrier(&self, call: &Call, device: &Arc<dyn Device>, records: &[Record]) -> Result<bool> {
        let devices: Vec<_> = records.iter().map(|record| record.device).collect();
        let have_own_devices = leaders(&devices).into_iter().eq(0..records.len());
        if !have_own_devices || self.state.settings.device_waits == DeviceWaits::Host {
            return Ok(false);
        }
        self.in_turn(call, |operation| operation.agree(!device.limits_kernels()))
    }
}

/// Allocates this rank's area; `None` if there is no memory for it, or if peers could not open it.
fn own_area(device: &Arc<dyn Device>, timeout: Duration) -> Option<(Memory, Exported)> {
    let made = Memory::new(device, ALLOCATED).and_then(|memory| {
        let extent = device.extent(memory.address)?;
        let handle = device.export(&extent)?;
        if let Err(error) = clear(device, memory.address + (DEVICE_AREA + ONE_SHOT) as Address, timeout) {
            // The stream may still come to it.
            std::mem::forget(memory);
            return Err(error);
        }
        Ok((memory, Exported { extent, handle }))
    });
    made.inspect_err(|error| crate::log::info!(%error, "no area on the device: its memory passes through the host")).ok()
}

/// Sets the flags at an address to 0, before other ranks know of them.
fn clear(device: &Arc<dyn Device>, flags: Address, timeout: Duration) -> Result<()> {
    let lane = shared(&**device).lanes.take(device)?;
    // SAFETY: the flags are in an area, which the caller keeps for ever if this fails.
    unsafe { device.zero(lane.stream.id, flags, FLAGS_BYTES)? };
    finish(&lane, timeout)?;
    shared(&**device).lanes.give_back(lane);
    Ok(())
}

/// The ranks' areas, as this rank's kernels reach them.
type Areas = Vec<(Address, Option<Arc<Import>>)>;

/// Opens the areas of all ranks, if this rank launches kernels, and verifies that its device reaches
/// them. The inner error says why it does not. With the outer one the device may still write there.
fn reach_areas(device: &Arc<dyn Device>, rank: Rank, records: &[Record], timeout: Duration) -> Result<Result<Areas>> {
    let areas = match open_areas(device, rank, records) {
        Ok(areas) => areas,
        Err(error) => return Ok(Err(error)),
    };
    let addresses: Vec<Address> = areas.iter().map(|(address, _)| *address).collect();
    Ok(verify(device, rank, records, &addresses, timeout)?.map(|()| areas))
}

/// Opens the areas of all ranks, if this rank launches kernels.
fn open_areas(device: &Arc<dyn Device>, rank: Rank, records: &[Record]) -> Result<Areas> {
    let devices: Vec<_> = records.iter().map(|record| record.device).collect();
    let is_leader = leaders(&devices)[rank] == rank;
    let open = |(peer, record): (Rank, &Record)| {
        let Some(Exported { extent, handle }) = record.news[0] else { return Ok((0, None)) };
        if !is_leader {
            return Ok((0, None));
        }
        if record.process == records[rank].process {
            if peer != rank {
                device.reach(extent.base)?;
            }
            return Ok((extent.base, None));
        }
        // That of an earlier communicator, at the same address, is closed soon.
        let began = Instant::now();
        loop {
            match shared(&**device).imports.open(device, &handle)? {
                Some(import) => return Ok((import.address, Some(import))),
                None if began.elapsed() < AREAS_CLOSING => std::thread::sleep(Duration::from_millis(1)),
                None => {
                    let problem = "memory at the same address is not closed yet".to_owned();
                    return Err(Error::Device { device: device.name(), doing: "opening another rank's area", problem });
                }
            }
        }
    };
    records.iter().enumerate().map(open).collect()
}
