//! The memory of the buckets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::layout::{BucketLayout, Layout};
use super::on_device::OnDevice;
use super::parameter::Parameter;
use crate::communicator::{Communicator, Registered};
use crate::cuda::device::{Address, Event, Memory};
use crate::error::Result;

/// Buckets, one after the other: those of the host in one piece of registered memory, those of a device in one piece of the device's.
///
/// Peers read and write a bucket while it is being reduced, and only then. So no reference to it exists while it is in flight:
/// who holds one is what [`Core`](super::core::Core) keeps count of. Addresses on a device are pointers that nobody dereferences.
pub(super) struct Buckets {
    pub(super) layout: Layout,
    base: *mut u8,
    _memory: Registered<u8>,
    device: Option<DeviceMemory>,
}

/// The memory of the buckets that are on a device.
pub(super) struct DeviceMemory {
    on: Arc<OnDevice>,
    memory: Option<Memory>,
    base: Address,
    /// For each bucket, done when the last gradient that was made ready is there.
    marks: Vec<Event>,
    /// Peers may still use it.
    is_abandoned: AtomicBool,
}

// SAFETY: an address and the memory behind it, which is this value's own. Whoever dereferences it vouches for being alone.
unsafe impl Send for Buckets {}
// SAFETY: as above.
unsafe impl Sync for Buckets {}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buckets").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Buckets {
    /// A collective call. `device` is what was allocated for the layout there.
    pub(super) fn allocate(comm: &Communicator, layout: Layout, device: Option<DeviceMemory>) -> Result<Buckets> {
        let mut memory = comm.alloc::<u8>(layout.host_bytes)?;
        let base = memory.as_mut_ptr();
        Ok(Buckets { layout, base, _memory: memory, device })
    }

    /// Where a bucket is.
    pub(super) fn at(&self, place: &BucketLayout) -> *mut u8 {
        assert!(place.bytes.start <= place.bytes.end);
        match &self.device {
            Some(device) if place.on_device => {
                assert!(place.bytes.end <= self.layout.device_bytes);
                std::ptr::without_provenance_mut(device.base as usize + place.bytes.start)
            }
            _ => {
                assert!(!place.on_device && place.bytes.end <= self.layout.host_bytes);
                self.base.wrapping_add(place.bytes.start)
            }
        }
    }

    /// The gradient of a parameter: its address and bytes.
    pub(super) fn gradient(&self, index: usize) -> (*mut u8, usize) {
        let (place, bytes) = self.layout.bytes_of(index);
        (self.at(place).wrapping_add(bytes.start), bytes.len())
    }

    /// The device of a bucket that is on one.
    pub(super) fn device_of(&self, place: &BucketLayout) -> Option<&Arc<OnDevice>> {
        self.device.as_ref().filter(|_| place.on_device).map(|device| &device.on)
    }

    /// In the order of the caller's stream if the gradient is a device's.
    ///
    /// # Safety
    ///
    /// Nobody else uses the parameter's gradient meanwhile.
    pub(super) unsafe fn zero(&self, index: usize) -> Result<()> {
        let (address, len) = self.gradient(index);
        // SAFETY: within the memory, and passed on.
        unsafe {
            match self.device_of(self.layout.bytes_of(index).0) {
                Some(on) => on.zero(address.addr() as Address, len)?,
                None => address.write_bytes(0, len),
            }
        }
        Ok(())
    }

    /// Copies a gradient of a device to its place, or adds it to what is there, in the order of the caller's stream.
    ///
    /// # Safety
    ///
    /// As for [`Buckets::zero`]; the gradient has the parameter's elements, and stays until the stream has come to it.
    pub(super) unsafe fn put(&self, comm: &Communicator, name: &str, index: usize, from: Address, adds: bool) -> Result<()> {
        let place = self.layout.bytes_of(index).0;
        let on = self.device_of(place).expect("the parameter's gradient is on a device");
        let (to, len) = self.gradient(index);
        if len == 0 {
            return Ok(());
        }
        on.expect_here(comm, name, from)?;
        let to = to.addr() as Address;
        // SAFETY: passed on.
        unsafe { if adds { on.add(place.dtype, from, to, len / place.dtype.size()) } else { on.copy(from, to, len) } }
    }

    /// A gradient of a bucket is there when the caller's stream has come here.
    pub(super) fn mark(&self, bucket: usize) -> Result<()> {
        self.mark_of(bucket).map_or(Ok(()), |(on, mark)| on.mark(mark))
    }

    /// Waits until all gradients of a bucket that were made ready are there.
    pub(super) fn until_there(&self, comm: &Communicator, bucket: usize) -> Result<()> {
        self.mark_of(bucket).map_or(Ok(()), |(_, mark)| comm.exec.until_done(mark))
    }

    /// Of a bucket that is on a device.
    fn mark_of(&self, bucket: usize) -> Option<(&OnDevice, &Event)> {
        let device = self.device.as_ref().filter(|_| self.layout.buckets[bucket].on_device)?;
        Some((&device.on, &device.marks[bucket]))
    }

    /// Takes over gradients that lie elsewhere in another layout of the same parameters.
    ///
    /// # Safety
    ///
    /// Nobody else uses either memory meanwhile.
    pub(super) unsafe fn copy_from(&self, other: &Buckets, parameters: &[Parameter]) -> Result<()> {
        for index in 0..parameters.len() {
            let ((to, len), (from, _)) = (self.gradient(index), other.gradient(index));
            // SAFETY: both are of the same parameter and so equally long, in memories that are apart; the rest is passed on.
            unsafe {
                match self.device_of(self.layout.bytes_of(index).0) {
                    Some(on) => on.copy(from.addr() as Address, to.addr() as Address, len)?,
                    None => std::ptr::copy_nonoverlapping(from, to, len),
                }
            }
        }
        Ok(())
    }

    /// A reduction has failed: other ranks may not have heard of it yet, and use this rank's part until they do. On a device it is
    /// never freed.
    pub(super) fn abandon(&self) {
        if let Some(device) = &self.device {
            device.is_abandoned.store(true, Ordering::Relaxed);
        }
    }
}

impl DeviceMemory {
    /// `None` if a layout has no bucket on the device.
    pub(super) fn allocate(on: Option<&Arc<OnDevice>>, layout: &Layout) -> Result<Option<DeviceMemory>> {
        let Some(on) = on.filter(|_| layout.buckets.iter().any(|place| place.on_device)) else { return Ok(None) };
        let memory = on.allocate(layout.device_bytes)?;
        let marks = layout.buckets.iter().map(|_| on.event()).collect::<Result<_>>()?;
        let (base, is_abandoned) = (memory.address, AtomicBool::new(false));
        Ok(Some(DeviceMemory { on: on.clone(), memory: Some(memory), base, marks, is_abandoned }))
    }
}

impl Drop for DeviceMemory {
    /// What streams still read or write is not freed.
    fn drop(&mut self) {
        let memory = self.memory.take();
        if self.is_abandoned.load(Ordering::Relaxed) || !self.on.drain() {
            std::mem::forget(memory);
        }
    }
}
