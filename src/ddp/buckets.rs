//! The memory of the buckets.

use std::sync::Arc;

use super::layout::{BucketLayout, Layout};
use super::on_device::{BucketDevice, DeviceMemory};
use super::parameter::Parameter;
use crate::buffer::Address;
use crate::communicator::{Communicator, Registered};
use crate::error::Result;

/// The memory of all buckets: those of the host in one registered buffer, those of the device in
/// one allocation.
///
/// Peers read and write a bucket while it is reduced, and only then. So no reference to a bucket
/// exists while it is in flight; [`Core`](super::core::Core) tracks the views. Addresses on a
/// device are pointers that the host never dereferences.
pub(super) struct Buckets {
    pub(super) layout: Layout,
    base: *mut u8,
    _memory: Registered<u8>,
    device: Option<DeviceMemory>,
}

// SAFETY: `base` points to memory that this value owns. Each dereference promises that it is the
// only access.
unsafe impl Send for Buckets {}
// SAFETY: as for `Send`.
unsafe impl Sync for Buckets {}

impl std::fmt::Debug for Buckets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buckets").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Buckets {
    /// Allocates the memory of a layout. A collective call. `device` is what was allocated for the
    /// layout on the device.
    pub(super) fn allocate(comm: &Communicator, layout: Layout, device: Option<DeviceMemory>) -> Result<Buckets> {
        let mut memory = comm.alloc::<u8>(layout.host_bytes)?;
        let base = memory.as_mut_ptr();
        Ok(Buckets { layout, base, _memory: memory, device })
    }

    /// Returns the address of a bucket.
    pub(super) fn at(&self, place: &BucketLayout) -> *mut u8 {
        assert!(place.bytes.start <= place.bytes.end);
        match &self.device {
            Some(device) if place.on_device => {
                assert!(place.bytes.end <= self.layout.device_bytes);
                std::ptr::without_provenance_mut(device.base() as usize + place.bytes.start)
            }
            _ => {
                assert!(!place.on_device && place.bytes.end <= self.layout.host_bytes);
                self.base.wrapping_add(place.bytes.start)
            }
        }
    }

    /// Returns the address and the bytes of a parameter's gradient.
    pub(super) fn gradient(&self, index: usize) -> (*mut u8, usize) {
        let (place, bytes) = self.layout.bytes_of(index);
        (self.at(place).wrapping_add(bytes.start), bytes.len())
    }

    /// Returns the device of a bucket that is on one.
    pub(super) fn device_of(&self, place: &BucketLayout) -> Option<&Arc<BucketDevice>> {
        self.device.as_ref().filter(|_| place.on_device).map(DeviceMemory::on)
    }

    /// Sets a gradient to zero, on a device in the order of the caller's stream.
    ///
    /// # Safety
    ///
    /// Nothing else uses the parameter's gradient during the call.
    pub(super) unsafe fn zero(&self, index: usize) -> Result<()> {
        let (address, len) = self.gradient(index);
        // SAFETY: the gradient lies within the memory, and the caller promises the rest.
        unsafe {
            match self.device_of(self.layout.bytes_of(index).0) {
                Some(on) => on.zero(address.addr() as Address, len)?,
                None => address.write_bytes(0, len),
            }
        }
        Ok(())
    }

    /// Copies a gradient in the memory of the device to its place, or adds it to what is there, in
    /// the order of the caller's stream.
    ///
    /// # Safety
    ///
    /// As for [`Buckets::zero`]. `from` holds the parameter's elements until the stream has passed
    /// the copy.
    pub(super) unsafe fn put(&self, comm: &Communicator, name: &str, index: usize, from: Address, adds: bool) -> Result<()> {
        let place = self.layout.bytes_of(index).0;
        let on = self.device_of(place).expect("the parameter's gradient is on a device");
        let (to, len) = self.gradient(index);
        if len == 0 {
            return Ok(());
        }
        on.expect_here(comm, name, from)?;
        let to = to.addr() as Address;
        // SAFETY: as promised by the caller.
        unsafe { if adds { on.add(place.dtype, from, to, len / place.dtype.size()) } else { on.copy(from, to, len) } }
    }

    /// Notes that a gradient of a bucket is complete once the caller's stream has come this far.
    pub(super) fn mark(&self, bucket: usize) -> Result<()> {
        self.memory_of(bucket).map_or(Ok(()), |memory| memory.mark(bucket))
    }

    /// Waits until all gradients of a bucket that were made ready are complete.
    pub(super) fn until_there(&self, comm: &Communicator, bucket: usize) -> Result<()> {
        self.memory_of(bucket).map_or(Ok(()), |memory| memory.until_there(comm, bucket))
    }

    /// Returns the memory of a bucket that is on a device.
    fn memory_of(&self, bucket: usize) -> Option<&DeviceMemory> {
        self.device.as_ref().filter(|_| self.layout.buckets[bucket].on_device)
    }

    /// Copies the gradients from a different layout of the same parameters.
    ///
    /// # Safety
    ///
    /// Nothing else uses either memory during the call.
    pub(super) unsafe fn copy_from(&self, other: &Buckets, parameters: &[Parameter]) -> Result<()> {
        for index in 0..parameters.len() {
            let ((to, len), (from, _)) = (self.gradient(index), other.gradient(index));
            // SAFETY: both are gradients of the same parameter, so they are equally long, and lie
            // in different memory. The caller promises the rest.
            unsafe {
                match self.device_of(self.layout.bytes_of(index).0) {
                    Some(on) => on.copy(from.addr() as Address, to.addr() as Address, len)?,
                    None => std::ptr::copy_nonoverlapping(from, to, len),
                }
            }
        }
        Ok(())
    }

    /// Keeps the device's memory from being freed after a failed reduction: other ranks may not
    /// know of the failure yet, and use this rank's part until they do.
    pub(super) fn abandon(&self) {
        if let Some(device) = &self.device {
            device.abandon();
        }
    }
}
