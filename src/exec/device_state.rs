//! What a communicator keeps between its calls on devices: streams, memory, and what it has opened
//! of its peers'.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cuda::device::{Address, Device, DeviceId, Event, Memory, Pinned, Stream, StreamId};
use crate::cuda::peers::Peers;
use crate::error::{Error, Result};
use crate::shm::registered::Allocation;
use crate::sys::Region;
use crate::types::{DType, Op, ReduceOp};

/// Calls that need the same of a device: operation, element type, reduction, and whether it is
/// large.
pub(super) type Kind = (Op, DType, Option<ReduceOp>, bool);

/// Segments that are in flight at once: one arrives, one is reduced, one leaves.
pub(super) const SLOTS: usize = 3;

#[derive(Default)]
pub(crate) struct Devices {
    pub(super) lanes: Option<Lanes>,
    /// Host memory for segments. Ranks of one host share it, so that a reduced segment is not
    /// staged a second time.
    pub(super) area: Option<Area>,
    /// Host memory for short calls.
    pub(super) scratch: Option<Area>,
    pub(super) on_device: Option<DeviceArea>,
    pub(super) peers: Peers,
    /// The device that each rank used last; all zeros if none.
    pub(super) of_ranks: Vec<DeviceId>,
    /// A process number that tests choose.
    pub(super) process: Option<u64>,
}

impl Devices {
    /// An operation has failed. Peers that have not noticed it yet still use this rank's area, so
    /// it is never freed.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(self.on_device.take().and_then(|area| area.memory));
    }
}

/// kolo's own streams on a device.
pub(super) struct Lanes {
    pub(super) device: Arc<dyn Device>,
    pub(super) out: Stream,
    pub(super) back: Stream,
    /// For each slot, when its segment has left the device, and when it has come back.
    pub(super) outs: [Event; SLOTS],
    pub(super) backs: [Event; SLOTS],
    /// How long the streams may take: the deadline of the call that uses them.
    pub(super) timeout: Duration,
}

impl Lanes {
    pub(super) fn new(device: &Arc<dyn Device>) -> Result<Lanes> {
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

    pub(super) fn until_done(&self, event: &Event) -> Result<()> {
        until_done(event, self.timeout)
    }

    /// Waits for everything in the stream to the device.
    pub(super) fn finish(&self) -> Result<()> {
        self.backs[0].record(self.back.id)?;
        self.until_done(&self.backs[0])
    }
}

/// Host memory through which segments pass.
pub(super) struct Area {
    /// Declared before the memory, because it is unpinned first. Memory that could not be pinned is
    /// not tried again.
    pub(super) pinned: Option<Option<Pinned>>,
    pub(super) memory: Arc<Allocation>,
    /// This rank's part.
    pub(super) place: usize,
}

impl Area {
    pub(super) fn private(len: usize) -> Option<Area> {
        let region = Arc::new(Region::try_heap(len)?);
        Some(Area { pinned: None, memory: Arc::new(Allocation { region, part: len }), place: 0 })
    }

    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.memory.at(self.place, offset)
    }

    /// Pins the memory for a device. Copies from memory that is not pinned are slower, but correct.
    pub(super) fn pin(&mut self, device: &Arc<dyn Device>) {
        if self.pinned.is_none() {
            // SAFETY: the memory is dropped after that.
            let pinned = unsafe { Pinned::new(device, self.at(0), self.memory.part) };
            let pinned = pinned.inspect_err(|error| tracing::warn!(%error, "host memory cannot be pinned: copies take longer"));
            self.pinned = Some(pinned.ok());
        }
    }
}

/// Device memory that peers can reach, for buffers that they cannot.
pub(super) struct DeviceArea {
    /// Keeps the addresses valid.
    pub(super) _peers: Peers,
    pub(super) memory: Option<Memory>,
    /// Where each rank's area is from here; `None` if not every rank can reach every other.
    pub(super) addresses: Option<Vec<Address>>,
}

/// Waits for this rank's own copies and kernels.
pub(super) fn until_done(event: &Event, timeout: Duration) -> Result<()> {
    let began = Instant::now();
    let mut looks = Looks::default();
    while !event.is_done()? {
        if began.elapsed() >= timeout {
            let problem = format!("the device has not reached it after {timeout:.1?}; check what else runs on it");
            return Err(Error::Device { device: event.device().name(), doing: "copying or reducing", problem });
        }
        looks.look_again();
    }
    Ok(())
}

/// How long to wait for a device whose operation has failed.
const DRAIN: Duration = Duration::from_secs(5);

/// Waits until a stream has done what it was given, after a failure or at the end. Returns whether
/// it has.
pub(crate) fn drain(event: &Event, stream: StreamId) -> bool {
    let drained = event.record(stream).and_then(|()| until_done(event, DRAIN));
    drained.inspect_err(|error| tracing::warn!(%error, "the work in flight on the device has failed as well")).is_ok()
}

/// Paces the polling of a device: without pause while it may take microseconds only.
#[derive(Default)]
pub(super) struct Looks(u32);

impl Looks {
    pub(super) fn look_again(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..100 => std::hint::spin_loop(),
            100..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
