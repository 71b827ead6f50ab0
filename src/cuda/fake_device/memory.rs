//! The memory of a fake GPU, and what a process has opened of other processes' allocations.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::cuda::device::{Address, DeviceId, Extent, Handle};
use crate::types::mix;

/// This bit is set in all addresses of the device: no host has memory there.
pub(super) const OF_DEVICE: u64 = 1 << 62;

/// This bit is set in the addresses of imported allocations.
pub(super) const IMPORTED: u64 = 1 << 61;

/// One GPU, which several processes may share.
pub(crate) struct FakeGpu {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    next: AtomicU64,
    random: AtomicU64,
    /// Held while a kernel runs.
    pub(super) slice: Mutex<()>,
}

struct Allocation {
    memory: Box<[u64]>,
    len: usize,
    id: u64,
    /// The device that has it.
    device: DeviceId,
    /// Whether peers cannot reach it.
    is_hidden: bool,
}

impl Default for FakeGpu {
    fn default() -> FakeGpu {
        FakeGpu { allocations: Mutex::default(), next: AtomicU64::new(1), random: AtomicU64::new(1), slice: Mutex::default() }
    }
}

impl FakeGpu {
    /// Returns the host address of device memory, or why there is none.
    pub(super) fn resolve(&self, opened: &Opened, address: Address, len: usize) -> Result<*mut u8, String> {
        if address & OF_DEVICE == 0 {
            return Err(format!("{address:#x} is not an address of the device"));
        }
        let base = address & !IMPORTED;
        let mut allocations = self.allocations.lock();
        let Some((&start, allocation)) = allocations.range_mut(..=base).next_back() else {
            return Err("the memory was never allocated".to_owned());
        };
        let offset = (base - start) as usize;
        if offset + len > allocation.len {
            return Err(format!("{len} bytes from {offset} on of {}", allocation.len));
        }
        if address & IMPORTED != 0 && !opened.is_open(start, allocation.id) {
            return Err("the memory is not open".to_owned());
        }
        if allocation.device != opened.device && opened.loses_writes.load(Ordering::SeqCst) {
            return Ok(opened.nowhere(len));
        }
        Ok(allocation.memory.as_mut_ptr().cast::<u8>().wrapping_add(offset))
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

    pub(super) fn hide(&self, address: Address) {
        self.allocations.lock().get_mut(&address).expect("the memory was allocated").is_hidden = true;
    }

    pub(super) fn allocate(&self, device: DeviceId, len: usize) -> Address {
        let mut memory = vec![0u64; len.div_ceil(8) + 1].into_boxed_slice();
        let base = memory.as_mut_ptr().addr() as u64 | OF_DEVICE;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.allocations.lock().insert(base, Allocation { memory, len, id, device, is_hidden: false });
        base
    }

    pub(super) fn free(&self, address: Address) {
        self.allocations.lock().remove(&address).expect("the memory was allocated");
    }

    /// Bytes that are allocated.
    pub(crate) fn used(&self) -> usize {
        self.allocations.lock().values().map(|allocation| allocation.len).sum()
    }

    pub(super) fn export(&self, extent: &Extent) -> Option<Handle> {
        if self.allocations.lock()[&extent.base].is_hidden {
            return None;
        }
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&extent.base.to_le_bytes());
        handle[8..16].copy_from_slice(&extent.id.to_le_bytes());
        Some(handle)
    }

    /// Returns the address of an allocation of another process, if it is still there.
    pub(super) fn find(&self, handle: &Handle) -> Option<Address> {
        let (base, id) = numbers(handle);
        self.allocations.lock().get(&base).is_some_and(|allocation| allocation.id == id).then_some(base)
    }
}

fn numbers(handle: &Handle) -> (u64, u64) {
    let number = |at: usize| u64::from_le_bytes(handle[at..at + 8].try_into().unwrap());
    (number(0), number(8))
}

/// What a process has opened on a device.
pub(super) struct Opened {
    device: DeviceId,
    /// By base address, the number of the allocation.
    allocations: Mutex<HashMap<u64, u64>>,
    /// The number of imports so far.
    pub(super) imports: AtomicUsize,
    /// Whether what the device writes to memory of other devices is lost.
    pub(super) loses_writes: AtomicBool,
    /// What was lost.
    lost: Mutex<Vec<Box<[u64]>>>,
}

impl Opened {
    pub(super) fn new(device: DeviceId) -> Opened {
        Opened {
            device,
            allocations: Mutex::default(),
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

    pub(super) fn open(&self, base: Address, handle: &Handle) -> Result<(), &'static str> {
        let (_, id) = numbers(handle);
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

    pub(super) fn close(&self, address: Address) {
        self.allocations.lock().remove(&(address & !IMPORTED)).expect("the allocation is open");
    }

    fn is_open(&self, base: Address, id: u64) -> bool {
        self.allocations.lock().get(&base) == Some(&id)
    }

    pub(super) fn count(&self) -> usize {
        self.allocations.lock().len()
    }
}
