//! The memory of the GPUs, as a process has it. Processes share it by files.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::code::{ALREADY_MAPPED, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY};
use crate::{Answer, next};

/// Set in the addresses of device memory. No address of the host has it.
pub(crate) const DEVICE: u64 = 1 << 56;

/// Bytes of which mapped memory is a multiple.
pub(crate) const GRAIN: usize = 2 << 20;

/// Memory that is mapped in this process.
struct Mapping {
    at: usize,
    len: usize,
}

impl Mapping {
    fn new(file: &File, len: usize) -> Answer<Mapping> {
        // SAFETY: the system chooses the address, so no other memory changes.
        let at = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        Ok(Mapping { at: at.map_err(|_| OUT_OF_MEMORY)?.expose_provenance(), len })
    }

    /// Maps memory of the process alone, or a range without access.
    fn anonymous(len: usize, access: ProtFlags) -> Answer<Mapping> {
        // SAFETY: as above.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
        Ok(Mapping { at: at.map_err(|_| OUT_OF_MEMORY)?.expose_provenance(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped it. The program frees memory that it no longer uses.
        _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.at), self.len) };
    }
}

/// Where an allocation comes from.
enum Source {
    /// Other processes can open it by its file.
    Own(File),
    /// Of a pool.
    Pool,
    /// Of another process.
    Import(u64),
    /// Physical memory in a range of addresses.
    Range,
}

pub(crate) struct Allocation {
    base: u64,
    size: usize,
    id: u64,
    ordinal: usize,
    source: Source,
    /// Ends with the allocation. `None` in a range of addresses.
    _mapping: Option<Mapping>,
}

/// What other processes need to open an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle {
    process: u64,
    file: u64,
    id: u64,
    size: u64,
    rest: [u64; 4],
}

/// What an allocation is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) base: u64,
    pub(crate) size: usize,
    pub(crate) id: u64,
    /// Of its GPU.
    pub(crate) ordinal: usize,
}

/// Physical memory.
pub(crate) struct Physical(pub(crate) File);

impl Physical {
    pub(crate) fn new(size: usize) -> Answer<Physical> {
        Ok(Physical(file("kolo-mapped", size)?))
    }

    fn size(&self) -> usize {
        self.0.metadata().map_or(0, |data| data.len() as usize)
    }
}

/// Returns a file of memory.
fn file(name: &str, size: usize) -> Answer<File> {
    let file: OwnedFd = memfd_create(name, MemfdFlags::CLOEXEC).map_err(|_| OUT_OF_MEMORY)?;
    let file = File::from(file);
    file.set_len(size as u64).map_err(|_| OUT_OF_MEMORY)?;
    Ok(file)
}

#[derive(Default)]
pub(crate) struct Memory {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    /// The processes and numbers of the allocations that are open.
    imports: Mutex<HashSet<(u64, u64)>>,
    ranges: Mutex<HashMap<u64, Mapping>>,
    /// Memory of the host that the driver has allocated.
    of_host: Mutex<HashMap<usize, Mapping>>,
}

impl Memory {
    /// Calls a function with the allocation of an address.
    fn with<R>(&self, address: u64, of: impl FnOnce(&Allocation) -> R) -> Option<R> {
        let allocations = self.allocations.lock();
        let (_, allocation) = allocations.range(..=address).next_back()?;
        (address < allocation.base + allocation.size as u64).then(|| of(allocation))
    }

    /// Returns the host's address of device memory.
    pub(crate) fn resolve(&self, address: u64, len: usize) -> Option<*mut u8> {
        let is_there = |one: &Allocation| address - one.base + len as u64 <= one.size as u64;
        let at = (address & !DEVICE) as usize;
        self.with(address, is_there)?.then(|| std::ptr::with_exposed_provenance_mut(at))
    }

    pub(crate) fn facts(&self, address: u64) -> Option<Facts> {
        self.with(address, |&Allocation { base, size, id, ordinal, .. }| Facts { base, size, id, ordinal })
    }

    fn add(&self, base: u64, size: usize, id: u64, ordinal: usize, source: Source, mapping: Option<Mapping>) -> u64 {
        self.allocations.lock().insert(base, Allocation { base, size, id, ordinal, source, _mapping: mapping });
        base
    }

    pub(crate) fn allocate(&self, ordinal: usize, size: usize, is_of_pool: bool) -> Answer<u64> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let id = next() as u64;
        let file = file(&format!("kolo-{id}"), size)?;
        let mapping = Mapping::new(&file, size)?;
        let base = mapping.at as u64 | DEVICE;
        let source = if is_of_pool { Source::Pool } else { Source::Own(file) };
        Ok(self.add(base, size, id, ordinal, source, Some(mapping)))
    }

    fn remove(&self, base: u64, is_right: impl FnOnce(&Source) -> bool) -> Answer<Allocation> {
        let mut allocations = self.allocations.lock();
        let is_right = allocations.get(&base).is_some_and(|allocation| is_right(&allocation.source));
        if is_right { allocations.remove(&base).ok_or(NOT_FOUND) } else { Err(INVALID_VALUE) }
    }

    pub(crate) fn free(&self, base: u64) -> Answer {
        self.remove(base, |source| matches!(source, Source::Own(_) | Source::Pool)).map(drop)
    }

    pub(crate) fn export(&self, base: u64) -> Answer<Handle> {
        let allocations = self.allocations.lock();
        let Some(Allocation { size, id, source: Source::Own(file), .. }) = allocations.get(&base) else {
            return Err(INVALID_VALUE);
        };
        let (process, file) = (std::process::id().into(), file.as_raw_fd() as u64);
        Ok(Handle { process, file, id: *id, size: *size as u64, rest: [0; 4] })
    }

    /// Opens an allocation of another process.
    pub(crate) fn open(&self, ordinal: usize, handle: &Handle) -> Answer<u64> {
        let &Handle { process, file, id, size, .. } = handle;
        let path = format!("/proc/{process}/fd/{file}");
        let is_there = std::fs::read_link(&path).is_ok_and(|name| name.as_os_str() == &*format!("/memfd:kolo-{id} (deleted)"));
        if !is_there {
            return Err(INVALID_VALUE);
        }
        if !self.imports.lock().insert((process, id)) {
            return Err(ALREADY_MAPPED);
        }
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| INVALID_VALUE);
        let mapping = file.and_then(|file| Mapping::new(&file, size as usize));
        let mapping = mapping.inspect_err(|_| _ = self.imports.lock().remove(&(process, id)))?;
        Ok(self.add(mapping.at as u64 | DEVICE, size as usize, id, ordinal, Source::Import(process), Some(mapping)))
    }

    pub(crate) fn close(&self, base: u64) -> Answer {
        let closed = self.remove(base, |source| matches!(source, Source::Import(_)))?;
        if let Source::Import(process) = closed.source {
            self.imports.lock().remove(&(process, closed.id));
        }
        Ok(())
    }

    pub(crate) fn reserve(&self, size: usize) -> Answer<u64> {
        let range = Mapping::anonymous(size, ProtFlags::empty())?;
        let base = range.at as u64 | DEVICE;
        self.ranges.lock().insert(base, range);
        Ok(base)
    }

    pub(crate) fn end_range(&self, base: u64) -> Answer {
        self.ranges.lock().remove(&base).map(drop).ok_or(INVALID_VALUE)
    }

    /// Maps physical memory, to which no GPU has access until [`give_access`](Memory::give_access).
    pub(crate) fn map(&self, ordinal: usize, base: u64, size: usize, physical: &Physical) -> Answer {
        let ranges = self.ranges.lock();
        let range = ranges.get(&base).filter(|range| range.len == size && physical.size() == size).ok_or(INVALID_VALUE)?;
        let at = std::ptr::with_exposed_provenance_mut(range.at);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range was reserved for this, and nothing uses it.
        unsafe { mmap(at, size, access, MapFlags::SHARED | MapFlags::FIXED, &physical.0, 0) }.map_err(|_| INVALID_VALUE)?;
        self.add(base, 0, next() as u64, ordinal, Source::Range, None);
        Ok(())
    }

    pub(crate) fn give_access(&self, base: u64, size: usize) -> Answer {
        self.allocations.lock().get_mut(&base).ok_or(INVALID_VALUE)?.size = size;
        Ok(())
    }

    pub(crate) fn unmap(&self, base: u64) -> Answer {
        self.remove(base, |source| matches!(source, Source::Range)).map(drop)
    }

    /// Allocates memory of the host.
    pub(crate) fn allocate_of_host(&self, len: usize) -> Answer<*mut u8> {
        let mapping = Mapping::anonymous(len, ProtFlags::READ | ProtFlags::WRITE)?;
        let at = mapping.at;
        self.of_host.lock().insert(at, mapping);
        Ok(std::ptr::with_exposed_provenance_mut(at))
    }

    pub(crate) fn free_of_host(&self, memory: *mut u8) {
        self.of_host.lock().remove(&memory.addr());
    }
}
