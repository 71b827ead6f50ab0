//! The memory of fake GPUs, and what a process reaches of it on a device.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::cuda::device::{Address, DeviceId, Extent, Handle};
use crate::types::mix;

/// This bit is set in all addresses of the device: no host has memory there.
pub(super) const OF_DEVICE: u64 = 1 << 62;

/// This bit is set in the addresses of imported allocations.
pub(super) const IMPORTED: u64 = 1 << 61;

/// This bit is set in the addresses at which a process maps memory.
const MAPPED: u64 = 1 << 59;

/// One GPU, or several that share their memory, and all processes.
pub(crate) struct FakeGpu {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    /// The memory of mapped allocations that their owners export, by their number.
    exported: Mutex<HashMap<u64, (Arc<Physical>, DeviceId)>>,
    next: AtomicU64,
    random: AtomicU64,
    /// By device. Held while a kernel runs. Never freed, so that a test can keep one.
    slices: Mutex<HashMap<DeviceId, &'static Mutex<()>>>,
}

/// Memory, which lives as long as it is mapped anywhere.
struct Physical {
    words: UnsafeCell<Box<[u64]>>,
    len: usize,
}

// SAFETY: the memory is accessed by pointers only, as that of a GPU.
unsafe impl Send for Physical {}
// SAFETY: as above.
unsafe impl Sync for Physical {}

impl Physical {
    fn new(len: usize) -> Arc<Physical> {
        Arc::new(Physical { words: UnsafeCell::new(vec![0; len.div_ceil(8) + 1].into_boxed_slice()), len })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: nothing else borrows the words.
        unsafe { (*self.words.get()).as_mut_ptr() }.cast::<u8>().wrapping_add(offset)
    }
}

struct Allocation {
    memory: Arc<Physical>,
    /// Where it begins in the memory.
    offset: usize,
    len: usize,
    id: u64,
    /// The process and the device that have it.
    process: u64,
    device: DeviceId,
    kind: Kind,
}

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Other processes open it by CUDA IPC. Other devices reach it by peer access.
    Plain,
    /// Of a memory pool: neither reaches it.
    Pool,
    /// One handle of an expandable segment: neither reaches it.
    Segment,
    /// Mapped. Other processes open it by a file, and all devices of this process reach it.
    Mapped,
}

impl Default for FakeGpu {
    fn default() -> FakeGpu {
        FakeGpu {
            allocations: Mutex::default(),
            exported: Mutex::default(),
            next: AtomicU64::new(1),
            random: AtomicU64::new(1),
            slices: Mutex::default(),
        }
    }
}

impl FakeGpu {
    /// What a kernel on a device holds while it runs.
    pub(super) fn slice(&self, device: DeviceId) -> &'static Mutex<()> {
        self.slices.lock().entry(device).or_insert_with(|| Box::leak(Box::default()))
    }

    /// Returns the host address of device memory, or why there is none.
    pub(super) fn resolve(&self, opened: &Reach, address: Address, len: usize) -> Result<*mut u8, String> {
        if address & OF_DEVICE == 0 {
            return Err(format!("{address:#x} is not an address of the device"));
        }
        let (at, device) = if address & IMPORTED != 0 && address & MAPPED != 0 {
            opened.resolve_mapped(address, len)?
        } else {
            self.resolve_allocated(opened, address, len)?
        };
        let is_lost = device != opened.device && opened.loses_writes.load(Ordering::SeqCst);
        Ok(if is_lost { opened.nowhere(len) } else { at })
    }

    fn resolve_allocated(&self, opened: &Reach, address: Address, len: usize) -> Result<(*mut u8, DeviceId), String> {
        let base = address & !IMPORTED;
        let allocations = self.allocations.lock();
        let Some((&start, first)) = allocations.range(..=base).next_back() else {
            return Err("the memory was never allocated".to_owned());
        };
        let offset = (base - start) as usize;
        // Handles that are mapped one behind the other are one range for kernels.
        let mut end = start + first.len as u64;
        while let Some(next) = allocations.get(&end).filter(|next| next.len > 0 && Arc::ptr_eq(&next.memory, &first.memory)) {
            end += next.len as u64;
        }
        if base + len as u64 > end {
            return Err(format!("{len} bytes from {offset} on of {}", end - start));
        }
        if address & IMPORTED != 0 {
            if !opened.is_open(start, first.id) {
                return Err("the memory is not open".to_owned());
            }
        } else if first.process != opened.process {
            return Err("the memory belongs to another process".to_owned());
        } else if first.device != opened.device {
            let is_reached = match first.kind {
                Kind::Plain => opened.reached.lock().contains(&first.device),
                Kind::Pool | Kind::Segment => false,
                Kind::Mapped => true,
            };
            if !is_reached {
                return Err("the device has no access to the memory of another one".to_owned());
            }
        }
        Ok((first.memory.at(first.offset + offset), first.device))
    }

    /// Waits for a random time, as the work of a GPU does.
    pub(super) fn take_time(&self) {
        match mix(self.random.fetch_add(1, Ordering::Relaxed), 7) % 8 {
            0 => std::thread::sleep(Duration::from_micros(200)),
            1..4 => std::thread::yield_now(),
            _ => {}
        }
    }

    pub(super) fn extent(&self, address: Address) -> Option<Extent> {
        let allocations = self.allocations.lock();
        let (&base, allocation) = allocations.range(..=address).next_back()?;
        let extent = Extent { base, size: allocation.len as u64, id: allocation.id };
        (address < base + extent.size).then_some(extent)
    }

    /// The device that has the memory at an address.
    pub(super) fn device_at(&self, address: Address) -> Option<DeviceId> {
        let allocations = self.allocations.lock();
        allocations.range(..=address).next_back().map(|(_, allocation)| allocation.device)
    }

    pub(super) fn hide(&self, address: Address) {
        self.allocations.lock().get_mut(&address).expect("the memory was allocated").kind = Kind::Pool;
    }

    pub(super) fn allocate(&self, owner: &Reach, len: usize) -> Address {
        let memory = Physical::new(len);
        let base = memory.at(0).addr() as u64 | OF_DEVICE;
        self.add(owner, base, (memory, 0), len, Kind::Plain);
        base
    }

    /// Maps memory that other processes open by a file.
    pub(super) fn map(&self, owner: &Reach, len: usize) -> Address {
        let (base, memory) = (self.reserve(owner, len), Physical::new(len));
        let id = self.add(owner, base, (memory.clone(), 0), len, Kind::Mapped);
        self.exported.lock().insert(id, (memory, owner.device));
        base
    }

    /// Maps handles one behind the other.
    pub(super) fn map_segments(&self, owner: &Reach, parts: &[usize]) -> Address {
        let memory = Physical::new(parts.iter().sum());
        let base = self.reserve(owner, memory.len);
        let mut offset = 0;
        for &len in parts {
            self.add(owner, base + offset as u64, (memory.clone(), offset), len, Kind::Segment);
            offset += len;
        }
        base
    }

    /// Returns a range of addresses: where something of this length was mapped before, if there is
    /// such a range.
    fn reserve(&self, owner: &Reach, len: usize) -> Address {
        let mut ranges = owner.ranges.lock();
        match ranges.iter().position(|&(_, free)| free == len) {
            Some(index) => ranges.swap_remove(index).0,
            None => OF_DEVICE | MAPPED | self.next.fetch_add(len as u64 + (2 << 20), Ordering::Relaxed).next_multiple_of(2 << 20),
        }
    }

    fn add(&self, owner: &Reach, base: Address, (memory, offset): (Arc<Physical>, usize), len: usize, kind: Kind) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let allocation = Allocation { memory, offset, len, id, process: owner.process, device: owner.device, kind };
        assert!(self.allocations.lock().insert(base, allocation).is_none(), "something is mapped there");
        id
    }

    /// Frees memory. What other processes have mapped of it stays.
    pub(super) fn free(&self, owner: &Reach, address: Address) {
        let Allocation { id, len, kind, .. } = self.allocations.lock().remove(&address).expect("the memory was allocated");
        if kind == Kind::Mapped {
            self.exported.lock().remove(&id);
            owner.ranges.lock().push((address, len));
        }
    }

    /// Bytes that are allocated.
    pub(crate) fn used(&self) -> usize {
        self.allocations.lock().values().map(|allocation| allocation.len).sum()
    }

    /// Returns the handle of an allocation. The driver makes one of CUDA IPC for plain memory only.
    pub(super) fn export(&self, extent: &Extent) -> Option<Handle> {
        let id = extent.id.to_le_bytes();
        match self.allocations.lock()[&extent.base].kind {
            Kind::Plain => {
                let mut handle = [0; 64];
                handle[..8].copy_from_slice(&extent.base.to_le_bytes());
                handle[8..16].copy_from_slice(&id);
                Some(Handle::Ipc(handle))
            }
            Kind::Mapped => {
                let mut ticket = [0; 32];
                ticket[..8].copy_from_slice(&id);
                Some(Handle::File { ticket, size: extent.size })
            }
            Kind::Pool | Kind::Segment => None,
        }
    }

    /// Opens an allocation of another process, and returns its address.
    pub(super) fn open(&self, reach: &Reach, handle: &Handle) -> Result<Address, &'static str> {
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
        match handle {
            Handle::Ipc(handle) => {
                let (base, id) = (number(handle), number(&handle[8..]));
                let is_there = self.allocations.lock().get(&base).is_some_and(|allocation| allocation.id == id);
                if !is_there {
                    return Err("the allocation was freed");
                }
                reach.open(base, id).map(|()| base | IMPORTED)
            }
            Handle::File { ticket, size } => {
                let exported = self.exported.lock().get(&number(ticket)).cloned();
                let (memory, device) = exported.ok_or("its process does not hand it over")?;
                if memory.len as u64 != *size {
                    return Err("the allocation has another size");
                }
                let address = self.reserve(reach, memory.len) | IMPORTED;
                reach.map(address, memory, device);
                Ok(address)
            }
        }
    }
}

/// What a process reaches on a device.
pub(super) struct Reach {
    pub(super) process: u64,
    pub(super) device: DeviceId,
    /// Of each allocation that is open by CUDA IPC: its base address, and its number.
    allocations: Mutex<HashMap<u64, u64>>,
    /// Memory of other processes that is mapped, and the device that has it.
    mapped: Mutex<BTreeMap<Address, (Arc<Physical>, DeviceId)>>,
    /// Ranges where nothing is mapped any more, with their lengths. They are used again first.
    ranges: Mutex<Vec<(Address, usize)>>,
    /// The devices to which it has peer access.
    pub(super) reached: Mutex<HashSet<DeviceId>>,
    /// The number of imports so far.
    pub(super) imports: AtomicUsize,
    /// Whether what the device writes to memory of other devices is lost.
    pub(super) loses_writes: AtomicBool,
    /// What was lost.
    lost: Mutex<Vec<Box<[u64]>>>,
}

impl Reach {
    pub(super) fn new(process: u64, device: DeviceId) -> Reach {
        Reach {
            process,
            device,
            allocations: Mutex::default(),
            mapped: Mutex::default(),
            ranges: Mutex::default(),
            reached: Mutex::default(),
            imports: AtomicUsize::new(0),
            loses_writes: AtomicBool::new(false),
            lost: Mutex::default(),
        }
    }

    /// Returns memory that nothing else reads.
    fn nowhere(&self, len: usize) -> *mut u8 {
        let mut lost = self.lost.lock();
        lost.push(vec![0; len.div_ceil(8)].into());
        lost.last_mut().expect("it was pushed").as_mut_ptr().cast()
    }

    fn open(&self, base: Address, id: u64) -> Result<(), &'static str> {
        let mut allocations = self.allocations.lock();
        match allocations.get(&base) {
            Some(&open) if open == id => return Err("this process has opened it already"),
            Some(_) => return Err("this process has open what was freed there"),
            None => {}
        }
        allocations.insert(base, id);
        self.imports.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn map(&self, address: Address, memory: Arc<Physical>, device: DeviceId) {
        self.mapped.lock().insert(address, (memory, device));
        self.imports.fetch_add(1, Ordering::SeqCst);
    }

    fn resolve_mapped(&self, address: Address, len: usize) -> Result<(*mut u8, DeviceId), String> {
        let mapped = self.mapped.lock();
        let found = mapped.range(..=address).next_back();
        let (&base, (memory, device)) = found.ok_or("nothing is mapped there")?;
        let offset = (address - base) as usize;
        if offset + len > memory.len {
            return Err(format!("{len} bytes from {offset} on of {}, which is mapped", memory.len));
        }
        Ok((memory.at(offset), *device))
    }

    pub(super) fn close(&self, address: Address) {
        let mapped = self.mapped.lock().remove(&address);
        match mapped {
            Some((memory, _)) => self.ranges.lock().push((address & !IMPORTED, memory.len)),
            None => _ = self.allocations.lock().remove(&(address & !IMPORTED)).expect("the allocation is open"),
        }
    }

    fn is_open(&self, base: Address, id: u64) -> bool {
        self.allocations.lock().get(&base) == Some(&id)
    }

    pub(super) fn count(&self) -> usize {
        self.allocations.lock().len() + self.mapped.lock().len()
    }
}
