//! Where the [words](super::words) of a device are.

use std::sync::Arc;

use parking_lot::Mutex;

use super::device::{Address, Device, Pinned};
use super::words::{Lines, Words};
use crate::error::{Error, Result};
use crate::sys::Region;

/// Where the words of a device are. Its memory is never freed: a stream may come to a word long
/// after the operation has failed and everything else is gone. A fork shares it, so that what the
/// parent writes stays in the pages that are pinned.
#[derive(Default)]
pub(crate) struct WordPool {
    /// The words that no operation uses, and the value that they have reached.
    free: Mutex<Vec<Free>>,
}

#[derive(Clone, Copy)]
struct Free {
    lines: &'static Lines,
    address: Address,
    reached: u32,
}

/// Bytes of words that are pinned at once.
const PINNED_AT_ONCE: usize = 64 << 10;

impl WordPool {
    /// Takes words for an operation of `rounds` rounds. May call the driver.
    pub(crate) fn take(&self, device: &Arc<dyn Device>, rounds: u32) -> Result<Words> {
        let mut free = self.free.lock().pop();
        if free.is_none() {
            let more = more(device)?;
            let mut all = self.free.lock();
            all.extend(more);
            free = all.pop();
        }
        let Free { lines, address, reached } = free.expect("there are more words now");
        Ok(Words::new(lines, address, reached, rounds))
    }

    /// Takes words back that the stream has left, or to which it was never given.
    pub(crate) fn give_back(&self, words: Words) {
        let (lines, address, reached) = words.settle();
        self.free.lock().push(Free { lines, address, reached });
    }
}

fn more(device: &Arc<dyn Device>) -> Result<impl Iterator<Item = Free> + use<>> {
    let region = Box::leak(Box::new(Region::create(PINNED_AT_ONCE).map_err(Error::os("allocating words for a device"))?));
    let first = region.at(0);
    // SAFETY: the region is never freed.
    let pinned = Box::leak(Box::new(unsafe { Pinned::new(device, first, PINNED_AT_ONCE)? }));
    let address = pinned.address;
    Ok((0..PINNED_AT_ONCE / size_of::<Lines>()).map(move |place| {
        let offset = place * size_of::<Lines>();
        // SAFETY: the region is aligned to pages, never freed, and all zeros, which are words. Only
        // atomics access it.
        let lines = unsafe { &*region.at(offset).cast::<Lines>() };
        Free { lines, address: address + offset as u64, reached: 0 }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake_device::FakeDevice;

    /// Words that calls without kernels have used for long are as new.
    #[test]
    fn words_do_not_fall_behind() {
        let (device, pool): (Arc<dyn Device>, _) = (Arc::new(FakeDevice::new()), WordPool::default());
        let words = pool.take(&device, 1).unwrap();
        words.release();
        // As after very many rounds, in which no kernel was done.
        let (lines, address, _) = words.settle();
        pool.give_back(Words::new(lines, address, u32::MAX / 2 + 10, 1));
        let again = pool.take(&device, 1).unwrap();
        assert!(!again.has_arrived(0) && !again.is_done(0) && !again.has_left() && !again.is_ended(0));
    }
}
