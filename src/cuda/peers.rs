//! What ranks tell each other of a collective's buffers before it is carried out, and the memory of others that this rank has
//! opened.

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
    /// This rank needs none.
    Nowhere,
    Host,
    /// In memory of a device that only this rank can reach.
    Hidden,
    /// In memory of a device that cannot reduce.
    Inert,
    /// In an allocation that others can open.
    Open {
        extent: Extent,
        handle: Handle,
        offset: u64,
    },
}

/// What a rank says of its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The call, so that those that do not match are found before anything is written.
    pub(crate) call: [u64; Descriptor::WORDS],
    /// A number that no other process has: within one, memory need not be opened.
    pub(crate) process: u64,
    /// The device of the buffers that are not the host's.
    pub(crate) device: DeviceId,
    /// Whether the buffers are as in an all-to-all in place.
    pub(crate) is_in_place: bool,
    /// Of the send and of the receive buffer.
    pub(crate) places: [BufferAt; 2],
}

const PLACE: usize = 1 + 4 * 8 + 64;

impl Record {
    /// Bytes of a record as it is sent.
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

    /// `None` if it is none: it comes from another rank. `needed` says how many bytes of its buffers will be used.
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

/// Allocations of other ranks.
///
/// All ranks of a communicator see the same records in the same order, so what is new to one is new to all.
#[derive(Default)]
pub(crate) struct Peers {
    /// By rank and base: the allocation's number, and where it is here; `None` if it could not be opened by all.
    opened: HashMap<(Rank, Address), (u64, Option<Opened>)>,
}

/// An allocation of another rank that can be reached.
struct Opened {
    device: Arc<dyn Device>,
    address: Address,
    /// It is another process's.
    is_imported: bool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.is_imported {
            // SAFETY: it was imported there, and what used it has ended: operations are carried out one after the other.
            unsafe { self.device.close(self.address) };
        }
    }
}

/// So many allocations of other ranks stay open.
const MOST_OPENED: usize = 1024;

impl Peers {
    /// What of these records was not seen before: other allocations, or others where some were.
    pub(crate) fn news(&self, records: &[Record]) -> Vec<(Rank, Buffer)> {
        let buffers = (0..records.len()).flat_map(|rank| [(rank, Buffer::Send), (rank, Buffer::Recv)]);
        let is_new = |&(rank, buffer): &(Rank, Buffer)| match records[rank].place(buffer) {
            BufferAt::Open { extent, .. } => self.opened.get(&(rank, extent.base)).is_none_or(|(id, _)| *id != extent.id),
            _ => false,
        };
        buffers.filter(is_new).collect()
    }

    /// Opens what is new. What was where it is now is closed. The first failure ends it; [`Peers::settle`] says what becomes of it.
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
                // Both buffers are in one allocation.
                continue;
            }
            // First, for the other may be where this one will be.
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

    /// Whether all ranks could open what was new. If not, nobody uses it: it need not be tried again.
    pub(crate) fn settle(&mut self, records: &[Record], news: &[(Rank, Buffer)], by_all: bool) {
        for &(rank, buffer) in news.iter().filter(|_| !by_all) {
            if let BufferAt::Open { extent, .. } = records[rank].place(buffer) {
                self.opened.insert((rank, extent.base), (extent.id, None));
            }
        }
    }

    /// Where a rank's buffer is here; `None` if it cannot be reached by all.
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
    fn records_survive_the_way() {
        let bytes = record().encode();
        assert_eq!(Record::decode(&bytes, [100, 100]), Some(record()));
    }

    #[test]
    fn garbage_is_no_record() {
        let bytes = record().encode();
        // More than there is behind the offset.
        assert_eq!(Record::decode(&bytes, [101, 0]), None);
        for len in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..len], [0, 0]), None);
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 5, 255] {
                let mut bytes = bytes;
                bytes[at] = value;
                // It may be another record, which stays within its allocation.
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
