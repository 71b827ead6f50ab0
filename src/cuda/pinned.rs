//! Pinned host memory that operations on devices take and give back. Pinning takes long, so what is
//! given back is kept.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device::{Address, Device, Pinned};
use crate::error::{Error, Result};
use crate::sys::Region;

/// Pinned memory that no operation uses, by its length.
#[derive(Default)]
pub(crate) struct PinnedPool {
    free: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    by_len: HashMap<usize, Vec<PinnedBuffer>>,
    bytes: usize,
}

/// Bytes of the shortest piece.
const LEAST: usize = 4 << 10;

/// Bytes that are kept. What is given back beyond them is unpinned.
const MOST_IDLE: usize = 256 << 20;

/// Pinned host memory. A fork shares it, so that what the parent writes stays in the pages that are
/// pinned.
pub(crate) struct PinnedBuffer {
    /// Declared before the memory, because it is unpinned first.
    pinned: Pinned,
    region: Region,
}

impl PinnedBuffer {
    /// Where the host finds it.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.region.at(offset)
    }

    /// Where the device finds it.
    pub(crate) fn address(&self) -> Address {
        self.pinned.address
    }
}

impl PinnedPool {
    /// Takes at least `len` bytes. May call the driver.
    pub(crate) fn take(&self, device: &Arc<dyn Device>, len: usize) -> Result<PinnedBuffer> {
        let len = len.max(LEAST).checked_next_power_of_two().unwrap_or(len);
        {
            let mut free = self.free.lock();
            if let Some(buffer) = free.by_len.get_mut(&len).and_then(Vec::pop) {
                free.bytes -= len;
                return Ok(buffer);
            }
        }
        let region = Region::create(len).map_err(Error::os(format!("allocating {len} bytes of host memory for a device")))?;
        // SAFETY: the region lives as long as the pinned memory.
        let pinned = unsafe { Pinned::new(device, region.at(0), len)? };
        Ok(PinnedBuffer { pinned, region })
    }

    /// Takes memory back that no stream uses. Returns it if there is enough already: to unpin it
    /// waits for all streams.
    pub(crate) fn give_back(&self, buffer: PinnedBuffer) -> Option<PinnedBuffer> {
        let len = buffer.region.len();
        let mut free = self.free.lock();
        if free.bytes + len > MOST_IDLE {
            return Some(buffer);
        }
        free.bytes += len;
        free.by_len.entry(len).or_default().push(buffer);
        None
    }
}
