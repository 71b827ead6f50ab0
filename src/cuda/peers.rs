//! What ranks tell each other about a collective's buffers before it runs, and the memory of peers
//! that this rank has opened.

use std::collections::HashMap;
use std::sync::Arc;

use super::device::{Address, Device, DeviceId, Extent, Handle};
use super::direct::Buffer;
use crate::error::Result;
use crate::types::{Descriptor, Rank};
use crate::wire::Reader;

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferAt {
    /// This rank has no such buffer.
    Nowhere,
    Host,
    /// In device memory that only this rank can reach.
    Hidden,
    /// In memory of a device whose kernels cannot be loaded.
    Inert,
    /// In an allocation that peers can open.
    Open {
        extent: Extent,
        handle: Handle,
        offset: u64,
    },
}

/// What a rank tells its peers about its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The call, so that a mismatch is found before anything is written.
    pub(crate) call: [u64; Descriptor::WORDS],
    /// A number that no other process has. Ranks of one process need not open each other's memory.
    pub(crate) process: u64,
    /// The device of the buffers that are not in host memory.
    pub(crate) device: DeviceId,
    /// Whether the buffers are those of an all-to-all in place.
    pub(crate) is_in_place: bool,
    /// Where the send and the receive buffer are.
    pub(crate) places: [BufferAt; 2],
}

const PLACE: usize = 1 + 4 * 8 + 64;

impl Record {
    /// Bytes of an encoded record.
    pub(crate) const LEN: usize = Descriptor::WORDS * 8 + 8 + 16 + 1 + 2 * PLACE;

    pub(crate) fn encode(&self) -> [u8; Record::LEN] {
        let mut bytes = Vec::with_capacity(Record::LEN);
        self.call.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.device);
        bytes.push(self.is_in_place.into());
        for place in &self.places {
            let (kind, numbers, handle) = match *place {
                BufferAt::Nowhere => (0, [0; 4], [0; 64]),
                BufferAt::Host => (1, [0; 4], [0; 64]),
                BufferAt::Hidden => (2, [0; 4], [0; 64]),
                BufferAt::Open { extent: Extent { base, size, id }, handle, offset } => (3, [base, size, id, offset], handle),
                BufferAt::Inert => (4, [0; 4], [0; 64]),
            };
            bytes.push(kind);
            numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
            bytes.extend(handle);
        }
        bytes.try_into().expect("a record has a fixed length")
    }

    /// Decodes a record of a peer, which is not trusted; `None` if it is malformed. `needed` has
    /// the bytes that will be used of each buffer.
    pub(crate) fn decode(bytes: &[u8], needed: [u64; 2]) -> Option<Record> {
        let mut reader = Reader::new(bytes);
        let mut call = [0; Descriptor::WORDS];
        for word in &mut call {
            *word = reader.number()?;
        }
        let process = reader.number()?;
        let device = reader.array()?;
        let is_in_place = match reader.array::<1>()? {
            [0] => false,
            [1] => true,
            _ => return None,
        };
        let mut places = [BufferAt::Nowhere; 2];
        for (place, needed) in places.iter_mut().zip(needed) {
            let [kind] = reader.array()?;
            let [base, size, id, offset] = [reader.number()?, reader.number()?, reader.number()?, reader.number()?];
            let handle = reader.array()?;
            *place = match kind {
                0 => BufferAt::Nowhere,
                1 => BufferAt::Host,
                2 => BufferAt::Hidden,
                3 => {
                    let fits = offset.checked_add(needed).is_some_and(|end| end <= size) && base.checked_add(size).is_some();
                    fits.then_some(BufferAt::Open { extent: Extent { base, size, id }, handle, offset })?
                }
                4 => BufferAt::Inert,
                _ => return None,
            };
        }
        reader.is_at_end().then_some(Record { call, process, device, is_in_place, places })
    }

    pub(crate) fn place(&self, buffer: Buffer) -> &BufferAt {
        &self.places[buffer as usize]
    }
}

/// Allocations of peers.
///
/// All ranks of a communicator see the same records in the same order, so an allocation that is new
/// to one is new to all.
#[derive(Default)]
pub(crate) struct Peers {
    /// By rank and base address: the id of the allocation, and the opened allocation; `None` if a
    /// rank could not open it.
    opened: HashMap<(Rank, Address), (u64, Option<Opened>)>,
}

/// An allocation of a peer that this rank can reach.
struct Opened {
    device: Arc<dyn Device>,
    address: Address,
    /// Whether it belongs to another process.
    is_imported: bool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.is_imported {
            // SAFETY: the device imported it, and the operations that used it have ended:
            // operations run one after the other.
            unsafe { self.device.close(self.address) };
        }
    }
}

/// The number of peers' allocations that stay open.
const MOST_OPENED: usize = 1024;

impl Peers {
    /// Returns the buffers of these records whose allocations are new, or replace one at the same
    /// address.
    pub(crate) fn news(&self, records: &[Record]) -> Vec<(Rank, Buffer)> {
        let buffers = (0..records.len()).flat_map(|rank| [(rank, Buffer::Send), (rank, Buffer::Recv)]);
        let is_new = |&(rank, buffer): &(Rank, Buffer)| match records[rank].place(buffer) {
            BufferAt::Open { extent, .. } => self.opened.get(&(rank, extent.base)).is_none_or(|(id, _)| *id != extent.id),
            _ => false,
        };
        buffers.filter(is_new).collect()
    }

    /// Opens new allocations, and closes those that they replace. Returns at the first failure;
    /// [`Peers::apply_results`] applies it.
    pub(crate) fn open(
        &mut self,
        device: &Arc<dyn Device>,
        mine: &Record,
        records: &[Record],
        news: &[(Rank, Buffer)],
    ) -> Result<()> {
        if self.opened.len() + news.len() > MOST_OPENED {
            self.opened.clear();
        }
        for &(rank, buffer) in news {
            let BufferAt::Open { extent, handle, .. } = records[rank].place(buffer) else { continue };
            let key = (rank, extent.base);
            if self.opened.get(&key).is_some_and(|(id, _)| *id == extent.id) {
                // Both buffers are in the same allocation.
                continue;
            }
            // Removed first: the new allocation may get the address of the old one.
            self.opened.remove(&key);
            let is_imported = records[rank].process != mine.process;
            let address = if is_imported {
                device.import(handle)?
            } else {
                device.reach(extent.base)?;
                extent.base
            };
            self.opened.insert(key, (extent.id, Some(Opened { device: device.clone(), address, is_imported })));
        }
        Ok(())
    }

    /// Records whether all ranks could open the new allocations. If not, no rank uses them, and
    /// they are not tried again.
    pub(crate) fn apply_results(&mut self, records: &[Record], news: &[(Rank, Buffer)], by_all: bool) {
        for &(rank, buffer) in news.iter().filter(|_| !by_all) {
            if let BufferAt::Open { extent, .. } = records[rank].place(buffer) {
                self.opened.insert((rank, extent.base), (extent.id, None));
            }
        }
    }

    /// Returns the address of a rank's buffer on this device; `None` if a rank cannot reach it.
    pub(crate) fn address(&self, rank: Rank, place: &BufferAt) -> Option<Address> {
        let BufferAt::Open { extent, offset, .. } = place else { return None };
        let (id, opened) = self.opened.get(&(rank, extent.base))?;
        opened.as_ref().filter(|_| *id == extent.id).map(|opened| opened.address + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let extent = Extent { base: 4096, size: 1000, id: 7 };
        let places = [BufferAt::Open { extent, handle: [3; 64], offset: 900 }, BufferAt::Hidden];
        Record { call: [5; Descriptor::WORDS], process: 11, device: [2; 16], is_in_place: true, places }
    }

    #[test]
    fn encoded_records_decode_to_the_same() {
        let bytes = record().encode();
        assert_eq!(Record::decode(&bytes, [100, 100]), Some(record()));
    }

    #[test]
    fn malformed_records_are_rejected() {
        let bytes = record().encode();
        // More bytes than the allocation has after the offset.
        assert_eq!(Record::decode(&bytes, [101, 0]), None);
        for len in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..len], [0, 0]), None);
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 5, 255] {
                let mut bytes = bytes;
                bytes[at] = value;
                // The bytes may be another valid record, whose buffers stay within their
                // allocations.
                for place in Record::decode(&bytes, [100, 100]).into_iter().flat_map(|record| record.places) {
                    if let BufferAt::Open { extent, offset, .. } = place {
                        assert!(extent.base as u128 + extent.size as u128 <= u64::MAX as u128);
                        assert!(offset as u128 + 100 <= extent.size as u128);
                    }
                }
            }
        }
    }
}
