//! Memory by CUDA's virtual memory management, which other processes open by a file descriptor.
//!
//! An allocation lives as long as any process has it mapped. So its owner may free it while peers
//! have it open, which CUDA IPC forbids, and a process may open it next to one that was freed at the
//! same address. Peer access does not include such memory: each device is given access to it.
//!
//! CUDA does not say which of these calls wait for streams. So memory is unmapped when no stream is
//! held back, as memory is freed by `cuMemFree`, and mapped before a call is enqueued.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::sys::{self as cu, CUresult};

use super::{Gpu, has_call};
use crate::cuda::device::{Address, Extent, Handle};
use crate::error::{Error, Result};
use crate::sys::{self, ExportedFile, ImportedFile, Ticket, can_export_files};
use crate::timeouts::FILE_HANDOVER;

/// Memory that is mapped in this process.
pub(super) struct Mapped {
    size: usize,
    id: u64,
    /// Of this process's own memory.
    exported: Option<ExportedFile>,
}

pub(super) type AllMapped = BTreeMap<Address, Mapped>;

/// The numbers of allocations, apart from those of the driver.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 63);

const FILE: cu::CUmemAllocationHandleType = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Whether the driver has the calls. cudarc panics at one that is missing.
static HAS_CALLS: LazyLock<bool> = LazyLock::new(|| {
    let calls: [&[u8]; 12] = [
        b"cuDeviceCanAccessPeer\0",
        b"cuDeviceGetCount\0",
        b"cuMemAddressFree\0",
        b"cuMemAddressReserve\0",
        b"cuMemCreate\0",
        b"cuMemExportToShareableHandle\0",
        b"cuMemGetAllocationGranularity\0",
        b"cuMemImportFromShareableHandle\0",
        b"cuMemMap\0",
        b"cuMemRelease\0",
        b"cuMemSetAccess\0",
        b"cuMemUnmap\0",
    ];
    calls.into_iter().all(has_call)
});

/// Physical memory. Mappings of it stay when the handle is released.
struct Physical<'a> {
    gpu: &'a Gpu,
    handle: cu::CUmemGenericAllocationHandle,
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is held once, here.
        let released = self.gpu.within("releasing device memory", || unsafe { cu::cuMemRelease(self.handle) });
        if let Err(error) = released {
            crate::log::debug!(%error);
        }
    }
}

fn at(device: c_int) -> cu::CUmemLocation {
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

impl Gpu {
    /// Whether this device has such memory, and processes can hand files over.
    pub(super) fn has_mapped_memory(&self) -> bool {
        use cu::CUdevice_attribute::*;
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: the call writes one number.
            let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, self.ordinal) };
            result == CUresult::CUDA_SUCCESS && value != 0
        };
        *self.has_mapped_memory.get_or_init(|| {
            *HAS_CALLS
                && has(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)
                && has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
                && can_export_files()
        })
    }

    pub(super) fn allocate_mapped(&self, len: usize) -> Result<Address> {
        const DOING: &str = "allocating device memory for other processes";
        let properties = cu::CUmemAllocationProp {
            type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FILE,
            location: at(self.ordinal),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (mut grain, mut handle, mut file) = (0, 0, -1 as c_int);
        let least = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the call writes one number.
        self.within(DOING, || unsafe { cu::cuMemGetAllocationGranularity(&mut grain, &properties, least) })?;
        let size = len.checked_next_multiple_of(grain.max(1)).unwrap_or(len);
        // SAFETY: the call writes a handle.
        self.within(DOING, || unsafe { cu::cuMemCreate(&mut handle, size, &properties, 0) })?;
        let physical = Physical { gpu: self, handle };
        sys::above_standard(|| {
            // SAFETY: the call writes a file descriptor.
            self.within(DOING, || unsafe { cu::cuMemExportToShareableHandle((&raw mut file).cast(), handle, FILE, 0) })
        })?;
        // SAFETY: the descriptor is new, and nothing else has it.
        let exported = unsafe { ExportedFile::new(file) }.map_err(Error::os("exporting device memory to other processes"))?;
        let address = self.map(&physical, size, &self.all_that_reach_it())?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        self.mapped.lock().insert(address, Mapped { size, id, exported: Some(exported) });
        Ok(address)
    }

    pub(super) fn import_mapped(&self, ticket: &Ticket, size: u64) -> Result<Address> {
        const DOING: &str = "opening another process's memory";
        let refuse = |problem: String| Error::Device { device: self.name.clone(), doing: DOING, problem };
        let size = usize::try_from(size).map_err(|error| refuse(error.to_string()))?;
        let file = ImportedFile::fetch(ticket, Instant::now() + FILE_HANDOVER);
        let file = file.map_err(|error| refuse(format!("its process does not hand it over: {error}")))?;
        let mut handle = 0;
        let number: *mut c_void = std::ptr::without_provenance_mut(file.number() as usize);
        // SAFETY: the descriptor is open. The driver refuses one of another kind.
        self.within(DOING, || unsafe { cu::cuMemImportFromShareableHandle(&mut handle, number, FILE) })?;
        let address = self.map(&Physical { gpu: self, handle }, size, &[self.ordinal])?;
        self.mapped.lock().insert(address, Mapped { size, id: NEXT_ID.fetch_add(1, Ordering::Relaxed), exported: None });
        Ok(address)
    }

    /// This device, and those of this process that can access its memory.
    fn all_that_reach_it(&self) -> Vec<c_int> {
        let mut count = 0;
        // SAFETY: the call writes one number.
        _ = unsafe { cu::cuDeviceGetCount(&mut count) };
        let reaches = |&device: &c_int| {
            let mut can = 0;
            // SAFETY: as above.
            let result = unsafe { cu::cuDeviceCanAccessPeer(&mut can, device, self.ordinal) };
            device == self.ordinal || (result == CUresult::CUDA_SUCCESS && can != 0)
        };
        (0..count.max(self.ordinal + 1)).filter(reaches).collect()
    }

    /// Maps memory, and gives devices access to it.
    fn map(&self, physical: &Physical<'_>, size: usize, devices: &[c_int]) -> Result<Address> {
        const DOING: &str = "mapping device memory";
        let mut address = 0;
        // SAFETY: the call writes an address.
        self.within(DOING, || unsafe { cu::cuMemAddressReserve(&mut address, size, 0, 0, 0) })?;
        let flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access: Vec<_> = devices.iter().map(|&device| cu::CUmemAccessDesc { location: at(device), flags }).collect();
        // SAFETY: the range was reserved, and nothing is mapped there.
        let mapped = self.within(DOING, || unsafe { cu::cuMemMap(address, size, 0, physical.handle, 0) });
        let is_mapped = mapped.is_ok();
        // SAFETY: the range is mapped, and the list has as many entries.
        let given = mapped
            .and_then(|()| self.within(DOING, || unsafe { cu::cuMemSetAccess(address, size, access.as_ptr(), access.len()) }));
        given.inspect_err(|_| self.unmap(address, size, is_mapped))?;
        Ok(address)
    }

    fn unmap(&self, address: Address, size: usize, is_mapped: bool) {
        // SAFETY: `map` reserved the range, and nothing uses it.
        let unmapped = self.within("unmapping device memory", || unsafe {
            match if is_mapped { cu::cuMemUnmap(address, size) } else { CUresult::CUDA_SUCCESS } {
                CUresult::CUDA_SUCCESS => cu::cuMemAddressFree(address, size),
                result => result,
            }
        });
        if let Err(error) = unmapped {
            crate::log::debug!(%error);
        }
    }

    /// Unmaps memory, if it is mapped by this. Returns whether it was.
    pub(super) fn free_mapped(&self, address: Address) -> bool {
        // The descriptor, which keeps the memory alive, is closed before it is unmapped.
        let size = match self.mapped.lock().remove(&address) {
            Some(Mapped { size, .. }) => size,
            None => return false,
        };
        self.unmap(address, size, true);
        true
    }

    /// Returns the allocation of an address, if it is mapped by this. The driver does not number
    /// such memory.
    pub(super) fn mapped_extent(&self, address: Address) -> Option<Extent> {
        let mapped = self.mapped.lock();
        let (&base, &Mapped { size, id, .. }) = mapped.range(..=address).next_back()?;
        (address - base < size as u64).then_some(Extent { base, size: size as u64, id })
    }

    pub(super) fn mapped_handle(&self, extent: &Extent) -> Option<Handle> {
        let mapped = self.mapped.lock();
        let Mapped { size, id, exported } = mapped.get(&extent.base)?;
        let ticket = exported.as_ref()?.ticket();
        (*id == extent.id).then_some(Handle::File { ticket, size: *size as u64 })
    }
}
