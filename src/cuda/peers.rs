//! How ranks reach each other's device memory.
//!
//! Each rank has an area on its device, which all leaders have open from the start. A rank tells
//! its peers of a new allocation in the operation that first uses it, and passes its data through
//! its area. Leaders open the allocation before they enqueue a later operation, and say so in that
//! operation. From then on the rank's buffers in that allocation are used in place. So nothing is
//! opened while a stream is held back.

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::barrier::{DeviceBarrier, FLAGS_BYTES};
use super::device::{Address, Device, DeviceId, Extent, Handle, MOST_PARTS, Memory};
use super::direct::Place;
use super::imports::Import;
use super::moves::Moves;
use super::shared::shared;
use crate::timeouts::OPENING;
use crate::types::{Descriptor, Rank};
use crate::wire::Reader;

/// An allocation, and what another process needs to open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) extent: Extent,
    pub(crate) handle: Handle,
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferAt {
    /// This rank has no such buffer.
    Nowhere,
    Host,
    /// On a device. It passes through other memory.
    Device,
    /// In an allocation that all leaders have open.
    Open {
        base: Address,
        id: u64,
        offset: u64,
    },
}

/// How a rank takes part in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Participation {
    /// With host memory alone.
    Host,
    /// Through host memory, in rounds.
    Staged,
    /// Where the buffers are, or through its area.
    Direct,
    /// It has not prepared for such operations yet. It waits for its peers, and comes again then.
    Prepares,
    /// It does not run the operation now: a CUDA graph captures it.
    Captures,
    /// In the replay of a CUDA graph, where the buffers are.
    Replays,
}

/// What a rank tells its peers about its call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The call, so that a mismatch is found before anything is written.
    pub(crate) call: [u64; Descriptor::WORDS],
    pub(crate) participation: Participation,
    /// A number that no other process has. Ranks of one process need not open each other's memory.
    pub(crate) process: u64,
    /// The device of the buffers; all zeros for host memory.
    pub(crate) device: DeviceId,
    /// Where the send and the receive buffer are.
    pub(crate) places: [BufferAt; 2],
    /// What it has open.
    pub(crate) opened: Progress,
    /// The area of a rank that prepares, or the allocations that this operation uses first.
    pub(crate) news: [Option<Exported>; 2],
    /// The numbers of allocations that the rank has freed.
    pub(crate) gone: [u64; GONE],
}

/// The most freed allocations that a record tells of.
const GONE: usize = 8;

/// How far a leader has opened the allocations that it was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Progress {
    /// It cannot: all data passes through the areas from now on.
    Refused,
    /// Those of the first operations.
    Through(u64),
    /// It opens none, because it launches nothing for ranks of other processes.
    All,
}

impl Record {
    const PLACE: usize = 1 + 3 * 8;
    const NEWS: usize = 1 + 3 * 8 + Handle::LEN;

    /// Bytes of an encoded record.
    pub(crate) const LEN: usize = Descriptor::WORDS * 8 + 1 + 8 + 16 + 2 * Record::PLACE + 9 + 2 * Record::NEWS + GONE * 8;

    pub(crate) fn encode(&self) -> [u8; Record::LEN] {
        let mut bytes = Vec::with_capacity(Record::LEN);
        let numbers = |bytes: &mut Vec<u8>, all: &[u64]| all.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        numbers(&mut bytes, &self.call);
        bytes.push(match self.participation {
            Participation::Host => 0,
            Participation::Staged => 1,
            Participation::Direct => 2,
            Participation::Prepares => 3,
            Participation::Captures => 4,
            Participation::Replays => 5,
        });
        numbers(&mut bytes, &[self.process]);
        bytes.extend(self.device);
        for place in self.places {
            let (kind, of_place) = match place {
                BufferAt::Nowhere => (0, [0; 3]),
                BufferAt::Host => (1, [0; 3]),
                BufferAt::Device => (2, [0; 3]),
                BufferAt::Open { base, id, offset } => (3, [base, id, offset]),
            };
            bytes.push(kind);
            numbers(&mut bytes, &of_place);
        }
        let (kind, through) = match self.opened {
            Progress::Refused => (0, 0),
            Progress::Through(operations) => (1, operations),
            Progress::All => (2, 0),
        };
        bytes.push(kind);
        numbers(&mut bytes, &[through]);
        for news in self.news {
            bytes.push(news.is_some().into());
            let Exported { extent, handle } =
                news.unwrap_or(Exported { extent: Extent { base: 0, size: 0, id: 0 }, handle: Handle::Ipc([0; 64]) });
            numbers(&mut bytes, &[extent.base, extent.size, extent.id]);
            bytes.extend(handle.encode());
        }
        numbers(&mut bytes, &self.gone);
        bytes.try_into().expect("a record has a fixed length")
    }

    /// Decodes a record of a peer, which is not trusted; `None` if it is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Record> {
        let mut reader = Reader::new(bytes);
        let mut call = [0; Descriptor::WORDS];
        for word in &mut call {
            *word = reader.number()?;
        }
        let participation = match reader.array()? {
            [0] => Participation::Host,
            [1] => Participation::Staged,
            [2] => Participation::Direct,
            [3] => Participation::Prepares,
            [4] => Participation::Captures,
            [5] => Participation::Replays,
            _ => return None,
        };
        let process = reader.number()?;
        let device = reader.array()?;
        let mut places = [BufferAt::Nowhere; 2];
        for place in &mut places {
            let [kind] = reader.array()?;
            let [base, id, offset] = [reader.number()?, reader.number()?, reader.number()?];
            *place = match kind {
                0 => BufferAt::Nowhere,
                1 => BufferAt::Host,
                2 => BufferAt::Device,
                3 => BufferAt::Open { base, id, offset },
                _ => return None,
            };
        }
        let kind = reader.array()?;
        let through = reader.number()?;
        let opened = match kind {
            [0] => Progress::Refused,
            [1] => Progress::Through(through),
            [2] => Progress::All,
            _ => return None,
        };
        let mut news = [None; 2];
        for news in &mut news {
            let is_some = reader.array()?;
            let extent = Extent { base: reader.number()?, size: reader.number()?, id: reader.number()? };
            let handle = Handle::decode(reader.array()?)?;
            extent.base.checked_add(extent.size)?;
            if matches!(handle, Handle::File { size, .. } if size != extent.size) {
                return None;
            }
            *news = match is_some {
                [0] => None,
                [1] => Some(Exported { extent, handle }),
                _ => return None,
            };
        }
        let mut gone = [0; GONE];
        for id in &mut gone {
            *id = reader.number()?;
        }
        reader.is_at_end().then_some(Record { call, participation, process, device, places, opened, news, gone })
    }
}

/// The leader of each rank: the first rank on the same device.
pub(crate) fn leaders(devices: &[DeviceId]) -> Vec<Rank> {
    let first = |device: &DeviceId| devices.iter().position(|other| other == device).expect("it is one of them");
    devices.iter().map(first).collect()
}

/// The device memory of the ranks of a communicator. Callers and the progress thread share it. It
/// is not locked during a driver call.
pub(crate) struct Peers {
    rank: Rank,
    pub(crate) leaders: Vec<Rank>,
    /// The process of each rank.
    processes: Vec<u64>,
    /// Whether all ranks have the same device.
    is_one_device: bool,
    /// This rank's area. Never freed after a failure: peers that have not noticed it yet still use
    /// it.
    area: ManuallyDrop<Memory>,
    is_abandoned: AtomicBool,
    /// Bytes of each area.
    pub(crate) area_len: usize,
    /// Each rank's area, as this leader reaches it.
    areas: Vec<(Address, Option<Arc<Import>>)>,
    /// Whether kernels wait for those of other ranks. Then each rank has a device of its own.
    have_barrier: bool,
    /// The number of the next kernel that waits.
    next_barrier: AtomicU32,
    state: Mutex<State>,
}

/// The largest all-reduce, in bytes, that is one-shot where kernels wait for each other.
pub(crate) const ONE_SHOT: usize = 256 << 10;

/// Bytes of what one kernel is to do, at most.
const MOVES: usize = Moves::bytes(MOST_PARTS * MOST_PARTS);

/// Bytes behind each area: the slot of one-shot all-reduces, the flags of the kernels' barrier, and what
/// this rank's next kernel is to do.
pub(crate) const BEHIND_AREA: usize = (ONE_SHOT + FLAGS_BYTES + MOVES).next_multiple_of(1 << 16);

#[derive(Default)]
struct State {
    /// This rank's allocations that peers know of, the latest last.
    own: Vec<Own>,
    /// Allocations that this rank has freed, of which the peers are to be told.
    gone: Vec<u64>,
    /// What this leader has open, by rank and the allocation's number.
    open: HashMap<(Rank, u64), Open>,
    /// What it is to open.
    wanted: Vec<Wanted>,
    /// The latest allocations that their owners have freed, by rank.
    freed: VecDeque<(Rank, u64)>,
    /// How many operations have told of their allocations.
    told: u64,
    /// How far each rank has opened.
    opened: Vec<Progress>,
}

/// An allocation of a peer that is to be opened.
struct Wanted {
    /// The operation that told of it.
    told: u64,
    rank: Rank,
    exported: Exported,
    /// How often the driver has refused it. Its owner may have freed it, and say so later.
    refusals: u32,
}

/// How often opening one allocation may fail, once a call, before a rank opens no memory of others any
/// more.
const MOST_REFUSALS: u32 = 100;

/// How many allocations that were freed are remembered.
const MOST_FREED: usize = 1024;

/// An allocation of this rank.
struct Own {
    extent: Extent,
    /// The operation that told of it. `None` until that has run.
    told: Option<u64>,
    /// Whether a graph may use it, so that it stays open until this rank has freed it.
    is_kept: bool,
}

/// An allocation of a peer.
struct Open {
    import: Arc<Import>,
    size: u64,
}

/// Segments of an area.
pub(crate) const HALVES: usize = 2;

/// The most allocations that stay open of a rank, beside those that graphs use.
const MOST_OWN: usize = 256;

/// What a call says of this rank's memory.
#[derive(Clone, Debug)]
pub(crate) struct Announcement {
    pub(crate) places: [BufferAt; 2],
    pub(crate) news: [Option<Exported>; 2],
    pub(crate) gone: [u64; GONE],
    pub(crate) opened: Progress,
}

impl Announcement {
    /// Nothing, for a call that is not direct.
    pub(crate) fn nothing(places: [BufferAt; 2]) -> Announcement {
        Announcement { places, news: [None; 2], gone: [0; GONE], opened: Progress::All }
    }
}

impl Peers {
    pub(crate) fn new(
        rank: Rank,
        records: &[Record],
        (area, area_len): (Memory, usize),
        areas: Vec<(Address, Option<Arc<Import>>)>,
        have_barrier: bool,
    ) -> Peers {
        let leaders = leaders(&records.iter().map(|record| record.device).collect::<Vec<_>>());
        let processes = records.iter().map(|record| record.process).collect();
        let is_one_device = leaders.iter().all(|&leader| leader == 0);
        let state = Mutex::new(State { opened: vec![Progress::Through(0); records.len()], ..State::default() });
        let (area, is_abandoned) = (ManuallyDrop::new(area), AtomicBool::new(false));
        let next_barrier = AtomicU32::new(0);
        Peers { rank, leaders, processes, is_one_device, area, is_abandoned, area_len, areas, have_barrier, next_barrier, state }
    }

    /// Whether the kernels of the ranks wait for each other, and not the ranks on the host.
    pub(crate) fn have_barrier(&self) -> bool {
        self.have_barrier
    }

    /// Returns the barrier of the ranks' next kernels that wait, at most for `limit`. All ranks call this
    /// for the same operations.
    pub(crate) fn barrier(&self, limit: Duration) -> DeviceBarrier {
        let number = self.next_barrier.fetch_add(1, Ordering::Relaxed);
        DeviceBarrier::new(number, self.rank, &self.behind_areas(ONE_SHOT), limit)
    }

    /// Returns the slots of all ranks, for a one-shot all-reduce.
    pub(crate) fn slots(&self) -> Vec<Address> {
        self.behind_areas(0)
    }

    /// Memory for what this rank's kernel is to do. One kernel runs after the other: the host lets the
    /// next one begin when this one is done. After a failure several may, when all calls have been released
    /// in their order, so that none of them succeeds.
    pub(crate) fn moves_on_device(&self) -> Address {
        self.area.address + (self.area_len + ONE_SHOT + FLAGS_BYTES) as Address
    }

    /// Whether some ranks share a device.
    pub(crate) fn share_devices(&self) -> bool {
        self.leaders.iter().enumerate().any(|(rank, &leader)| rank != leader)
    }

    fn behind_areas(&self, offset: usize) -> Vec<Address> {
        self.areas.iter().map(|(area, _)| area + (self.area_len + offset) as Address).collect()
    }

    /// The address of a round's segment in this rank's area, for this rank.
    pub(crate) fn own_segment(&self, round: usize) -> Address {
        self.area.address + self.segment(round) as Address
    }

    /// Keeps the area for ever, because an operation has failed.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }

    /// The offset of a round's segment in an area.
    pub(crate) fn segment(&self, round: usize) -> usize {
        round % HALVES * (self.area_len / HALVES)
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.leaders[self.rank] == self.rank
    }

    /// Whether a leader must open this rank's memory.
    fn must_be_opened(&self) -> bool {
        self.leaders.iter().any(|&leader| self.processes[leader] != self.processes[self.rank])
    }

    /// Whether this rank opens memory of others.
    fn opens(&self) -> bool {
        self.is_leader() && self.processes.iter().any(|&process| process != self.processes[self.rank])
    }

    /// Opens what peers have told of. Called before a call is enqueued; calls the driver.
    pub(crate) fn open_news(&self, device: &Arc<dyn Device>) -> Progress {
        if !self.opens() {
            return Progress::All;
        }
        let began = Instant::now();
        let (wanted, mut through) = {
            let mut state = self.state.lock();
            if state.opened[self.rank] == Progress::Refused {
                return Progress::Refused;
            }
            (std::mem::take(&mut state.wanted), Progress::Through(state.told))
        };
        let mut later = Vec::new();
        let mut opened = Vec::new();
        for mut one in wanted {
            let Wanted { told, rank, exported, .. } = one;
            if began.elapsed() >= OPENING {
                through = through.min(Progress::Through(told - 1));
                later.push(one);
                continue;
            }
            match shared(&**device).imports.open(device, &exported.handle) {
                Ok(Some(import)) => opened.push(((rank, exported.extent.id), Open { import, size: exported.extent.size })),
                Err(error) if one.refusals == MOST_REFUSALS => {
                    crate::log::warn!(%error, rank, "memory of another rank cannot be opened: it passes through areas");
                    through = Progress::Refused;
                }
                refused => {
                    one.refusals += u32::from(refused.is_err());
                    through = through.min(Progress::Through(told - 1));
                    later.push(one);
                }
            }
        }
        let mut state = self.state.lock();
        // Freed meanwhile.
        let freed = |rank, id| state.freed.contains(&(rank, id));
        let (opened, dropped): (Vec<_>, Vec<_>) = opened.into_iter().partition(|((rank, id), _)| !freed(*rank, *id));
        later.retain(|one| !freed(one.rank, one.exported.extent.id));
        state.open.extend(opened);
        later.append(&mut state.wanted);
        state.wanted = later;
        drop(state);
        // Closed later.
        drop(dropped);
        through
    }

    /// What this rank says of its buffers in a direct call. `exports` has the allocation of each
    /// buffer, its handle if peers can open it, and the buffer's offset in it.
    pub(crate) fn announce(
        &self,
        device: &Arc<dyn Device>,
        exports: [Option<(Extent, Option<Handle>, u64)>; 2],
        places: [BufferAt; 2],
        may_be_open: bool,
    ) -> Announcement {
        let mut announced = Announcement { opened: self.open_news(device), ..Announcement::nothing(places) };
        let must_be_opened = self.must_be_opened();
        let mut state = self.state.lock();
        let State { own, gone, opened, .. } = &mut *state;
        let opened = opened.iter().copied().min().unwrap_or(Progress::Refused);
        for (buffer, export) in exports.iter().enumerate() {
            let Some((extent, handle, offset)) = *export else { continue };
            let Extent { base, id, .. } = extent;
            let is_open = match own.iter().find(|known| known.extent.id == id) {
                // Peer access to other devices does not include memory that cannot be exported either.
                _ if !must_be_opened => self.is_one_device || handle.is_some(),
                _ if handle.is_none() => false,
                Some(Own { told: Some(told), .. }) => opened >= Progress::Through(*told),
                Some(Own { told: None, .. }) => false,
                None if opened == Progress::Refused => false,
                None => {
                    // The same address, or an allocation of long ago.
                    let replaced = own.iter().position(|known| known.extent.base == base);
                    let mut others = own.iter().enumerate().filter(|(_, known)| !known.is_kept).map(|(index, _)| index);
                    let oldest = others.next().filter(|_| others.count() + 1 >= MOST_OWN);
                    gone.extend(replaced.or(oldest).map(|index| own.remove(index).extent.id));
                    own.push(Own { extent, told: None, is_kept: false });
                    announced.news[buffer] = handle.map(|handle| Exported { extent, handle });
                    false
                }
            };
            if is_open && may_be_open {
                announced.places[buffer] = BufferAt::Open { base, id, offset };
            }
        }
        for place in &mut announced.gone {
            *place = gone.pop().unwrap_or(0);
        }
        announced
    }

    /// Has the allocations of these buffers stay open, because a graph uses them.
    pub(crate) fn keep(&self, announced: &Announcement) {
        let is_of =
            |own: &Own| announced.places.iter().any(|place| matches!(place, BufferAt::Open { id, .. } if *id == own.extent.id));
        self.state.lock().own.iter_mut().filter(|own| is_of(own)).for_each(|own| own.is_kept = true);
    }

    /// This rank's allocations of which peers know.
    pub(crate) fn own(&self) -> Vec<Extent> {
        self.state.lock().own.iter().map(|own| own.extent).collect()
    }

    /// Has peers be told that this rank has freed an allocation.
    pub(crate) fn has_gone(&self, extent: &Extent) {
        let mut state = self.state.lock();
        let State { own, gone, .. } = &mut *state;
        own.retain(|known| {
            let is_it = known.extent.id == extent.id;
            if is_it {
                gone.push(extent.id);
            }
            !is_it
        });
    }

    /// Applies the records of all ranks.
    pub(crate) fn apply(&self, records: &[Record]) {
        let opens = self.opens();
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        state.told += 1;
        let number = state.told;
        for (rank, record) in records.iter().enumerate() {
            state.opened[rank] =
                record.opened.min(if state.opened[rank] == Progress::Refused { Progress::Refused } else { Progress::All });
            if rank == self.rank {
                let told = |id| record.news.iter().flatten().any(|news| news.extent.id == id);
                state.own.iter_mut().filter(|own| told(own.extent.id)).for_each(|own| own.told = Some(number));
                continue;
            }
            for &id in record.gone.iter().filter(|&&id| id != 0) {
                dropped.extend(state.open.remove(&(rank, id)));
                state.wanted.retain(|one| (one.rank, one.exported.extent.id) != (rank, id));
                state.freed.push_back((rank, id));
                if state.freed.len() > MOST_FREED {
                    state.freed.pop_front();
                }
            }
            if opens && record.process != self.processes[self.rank] {
                let wanted = |news: &Exported| Wanted { told: number, rank, exported: *news, refusals: 0 };
                state.wanted.extend(record.news.iter().flatten().map(wanted));
            }
        }
        drop(state);
        // Closed later.
        drop(dropped);
    }

    /// Where a rank's data is, as this leader reaches it. `segment` is the offset of the round's
    /// segment in an area, `needed` the bytes that are used of each buffer. `None` if what the rank
    /// says is impossible.
    pub(crate) fn place(&self, rank: Rank, record: &Record, segment: usize, needed: [u64; 2]) -> Option<Place> {
        if record.places.contains(&BufferAt::Host) {
            return None;
        }
        if record.places.contains(&BufferAt::Device) {
            return Some(Place::Segment(self.areas[rank].0 + segment as u64));
        }
        let mut buffers = [0; 2];
        for (buffer, (place, needed)) in buffers.iter_mut().zip(record.places.iter().zip(needed)) {
            let BufferAt::Open { base, id, offset } = *place else { continue };
            if record.process == self.processes[self.rank] {
                *buffer = base.checked_add(offset)?;
                continue;
            }
            let state = self.state.lock();
            let open = state.open.get(&(rank, id))?;
            if offset.checked_add(needed)? > open.size {
                return None;
            }
            *buffer = open.import.address + offset;
        }
        Some(Place::Buffers(buffers))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if !*self.is_abandoned.get_mut() {
            // SAFETY: it is dropped only here, and no operation uses it: none is in flight, and none failed.
            unsafe { ManuallyDrop::drop(&mut self.area) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let extent = Extent { base: 4096, size: 1000, id: 7 };
        Record {
            call: [5; Descriptor::WORDS],
            participation: Participation::Direct,
            process: 11,
            device: [2; 16],
            places: [BufferAt::Open { base: 4096, id: 7, offset: 900 }, BufferAt::Device],
            opened: Progress::Through(3),
            news: [None, Some(Exported { extent, handle: Handle::Ipc([3; 64]) })],
            gone: [1, 2, 3, 4, 0, 0, 0, 0],
        }
    }

    #[test]
    fn encoded_records_decode_to_the_same() {
        let bytes = record().encode();
        assert_eq!(Record::decode(&bytes), Some(record()));
        let news = |size: u64| {
            let extent = Extent { base: 1 << 21, size: 1 << 21, id: 8 };
            [Some(Exported { extent, handle: Handle::File { ticket: [4; 32], size } }), None]
        };
        let bytes = Record { news: news(1 << 21), ..record() }.encode();
        assert_eq!(Record::decode(&bytes), Some(Record { news: news(1 << 21), ..record() }));
        // A kernel would go beyond what is mapped.
        assert_eq!(Record::decode(&Record { news: news(1 << 20), ..record() }.encode()), None);
    }

    #[test]
    fn malformed_records_are_rejected() {
        let bytes = record().encode();
        for len in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..len]), None);
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 5, 255] {
                let mut bytes = bytes;
                bytes[at] = value;
                // The bytes may be another valid record, whose allocations have an end.
                for news in Record::decode(&bytes).into_iter().flat_map(|record| record.news).flatten() {
                    assert!(news.extent.base as u128 + news.extent.size as u128 <= u64::MAX as u128);
                }
            }
        }
    }

    #[test]
    fn the_first_rank_of_a_device_launches() {
        assert_eq!(leaders(&[[1; 16], [2; 16], [1; 16], [2; 16]]), [0, 1, 0, 1]);
    }
}
