//! The memory of the buckets that are on a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::BucketDevice;
use crate::communicator::Communicator;
use crate::cuda::device::{Address, Event, Memory};
use crate::ddp::layout::Layout;
use crate::error::Result;

/// The memory of the buckets of a layout that are on a device.
pub(in crate::ddp) struct DeviceMemory {
    on: Arc<BucketDevice>,
    memory: Option<Memory>,
    base: Address,
    /// For each bucket, the event that is done when its last ready gradient is complete.
    marks: Vec<Event>,
    /// Whether peers may still use the memory.
    is_abandoned: AtomicBool,
}

impl DeviceMemory {
    /// Allocates the device's part of a layout. Returns `None` if the layout has no bucket there.
    pub(in crate::ddp) fn allocate(on: Option<&Arc<BucketDevice>>, layout: &Layout) -> Result<Option<DeviceMemory>> {
        let Some(on) = on.filter(|_| layout.buckets.iter().any(|place| place.on_device)) else { return Ok(None) };
        let memory = on.allocate(layout.device_bytes)?;
        let marks = layout.buckets.iter().map(|_| Event::new(&on.device)).collect::<Result<_>>()?;
        let (base, is_abandoned) = (memory.address, AtomicBool::new(false));
        Ok(Some(DeviceMemory { on: on.clone(), memory: Some(memory), base, marks, is_abandoned }))
    }

    pub(in crate::ddp) fn on(&self) -> &Arc<BucketDevice> {
        &self.on
    }

    pub(in crate::ddp) fn base(&self) -> Address {
        self.base
    }

    /// Notes that a gradient of a bucket is complete once the caller's stream has come this far.
    pub(in crate::ddp) fn mark(&self, bucket: usize) -> Result<()> {
        self.on.mark(&self.marks[bucket])
    }

    /// Waits until all gradients of a bucket that were made ready are complete.
    pub(in crate::ddp) fn until_there(&self, comm: &Communicator, bucket: usize) -> Result<()> {
        comm.exec.until_done(&self.marks[bucket])
    }

    /// Keeps the memory from being freed.
    pub(in crate::ddp) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for DeviceMemory {
    /// Does not free memory that streams still read or write.
    fn drop(&mut self) {
        let memory = self.memory.take();
        if self.is_abandoned.load(Ordering::Relaxed) || !self.on.drain() {
            std::mem::forget(memory);
        }
    }
}
