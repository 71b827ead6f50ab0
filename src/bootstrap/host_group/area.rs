//! The areas of communicators: where their flag lines lie.
//!
//! The lowest rank of a communicator on a host, its leader, provides the area out of a *slab*, a segment that holds many. The
//! other processes map a slab once. An area is used again when every one of its ranks has departed from it or has ended.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use super::HostGroup;
use crate::sys::Segment;
use crate::types::Rank;

/// Bytes of one rank's part of an area.
pub(crate) const AREA: usize = 4096;

/// Where in its part a rank says that it touches the area no more. Before it, the part belongs to the user of the area.
const DEPARTED: usize = AREA - 64;

/// Bytes of a part that its user has.
pub(crate) const USABLE: usize = DEPARTED;

/// Bytes of the first slab. Each is twice as large as the one before, up to [`LARGEST`].
const SMALLEST: usize = 256 << 10;
const LARGEST: usize = 8 << 20;

/// How many slabs hold areas of so many bytes in all.
pub(crate) fn slabs_for(bytes: u64) -> usize {
    let mut room = 0;
    let mut slabs = 0;
    while room < bytes {
        room += slab_size(slabs) as u64;
        slabs += 1;
    }
    slabs
}

/// Bytes of a process's next slab, when it has so many.
fn slab_size(slabs: usize) -> usize {
    (SMALLEST << slabs.min(16)).min(LARGEST)
}

/// Parts at equal distances in a segment, one for each rank of a communicator on this host.
#[derive(Clone)]
pub(crate) struct Parts {
    /// Keeps the memory mapped.
    _segment: Arc<Segment>,
    start: *mut u8,
    stride: usize,
    ranks: usize,
}

// SAFETY: an address in a segment, which is used as the segment's is.
unsafe impl Send for Parts {}
// SAFETY: as above.
unsafe impl Sync for Parts {}

impl Parts {
    fn new(segment: Arc<Segment>, base: usize, stride: usize, ranks: usize) -> Parts {
        assert!(stride >= AREA && ranks > 0 && base + (ranks - 1) * stride + AREA <= segment.len());
        Parts { start: segment.at(base), _segment: segment, stride, ranks }
    }

    /// The start of a rank's part: [`AREA`] bytes, aligned to as many.
    #[inline]
    pub(crate) fn at(&self, rank: usize) -> *mut u8 {
        debug_assert!(rank < self.ranks);
        self.start.wrapping_add(rank * self.stride)
    }

    fn departed(&self, rank: usize) -> &AtomicU32 {
        assert!(rank < self.ranks);
        // SAFETY: within the part, which lives as long as the segment; aligned, zeroed in the beginning, and used through atomics
        // only.
        unsafe { &*self.at(rank).add(DEPARTED).cast() }
    }
}

/// A communicator's area, seen from one of its ranks.
pub(crate) struct Area {
    parts: Parts,
    rank: usize,
    /// Whether this rank has written there. Until then an area may be given up without a trace, for another one takes its place.
    is_entered: bool,
}

impl Area {
    /// The parts that lie `stride` bytes apart in a segment, of which this rank's has been reserved and all were zeroed.
    pub(crate) fn new(segment: Arc<Segment>, stride: usize, rank: usize, ranks: usize) -> Area {
        Area::within(segment, 0, stride, rank, ranks)
    }

    fn within(segment: Arc<Segment>, base: usize, stride: usize, rank: usize, ranks: usize) -> Area {
        assert!(rank < ranks);
        Area { parts: Parts::new(segment, base, stride, ranks), rank, is_entered: false }
    }

    /// From now on this rank uses the area, until it drops this.
    pub(crate) fn enter(&mut self) {
        self.is_entered = true;
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// This rank's number among those of the area.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.parts.ranks
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if self.is_entered {
            self.parts.departed(self.rank).store(1, Ordering::Release);
        }
    }
}

/// An area that a leader provides: the number of the slab and the number of its first part. Zero is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    slab: u32,
    first: u32,
}

impl Offer {
    pub(crate) const NONE: Offer = Offer { slab: 0, first: 0 };

    pub(crate) fn encode(self) -> u64 {
        u64::from(self.slab) << 32 | u64::from(self.first)
    }

    pub(crate) fn decode(word: u64) -> Offer {
        Offer { slab: (word >> 32) as u32, first: word as u32 }
    }
}

/// The slabs of this process.
#[derive(Default)]
pub(super) struct Slabs {
    all: Vec<Slab>,
    leases: Vec<Lease>,
}

struct Slab {
    id: u32,
    segment: Arc<Segment>,
    /// Which parts are in use.
    used: Vec<bool>,
}

/// An area that a communicator uses.
struct Lease {
    slab: usize,
    parts: Parts,
    first: usize,
    members: Vec<Rank>,
}

impl Slabs {
    /// The first of `count` free parts side by side.
    fn find(&self, count: usize) -> Option<(usize, usize)> {
        self.all.iter().enumerate().find_map(|(slab, Slab { used, .. })| {
            let mut free = 0;
            used.iter().enumerate().find_map(|(at, &is_used)| {
                free = if is_used { 0 } else { free + 1 };
                (free == count).then(|| (slab, at + 1 - count))
            })
        })
    }
}

impl HostGroup {
    /// Sets parts for `ranks` aside in a slab of this process, until [`HostGroup::settle`]; none if there is no memory.
    pub(crate) fn offer(&self, ranks: usize) -> Offer {
        let mut slabs = self.slabs.lock();
        self.reclaim(&mut slabs);
        let (slab, first) = match slabs.find(ranks) {
            Some(found) => found,
            None => {
                let len = slab_size(slabs.all.len()).max(ranks * AREA);
                let segment = match Segment::create_like(&self.home, len) {
                    Ok(segment) => Arc::new(segment),
                    Err(error) => {
                        tracing::warn!(%error, bytes = len, "no shared memory");
                        return Offer::NONE;
                    }
                };
                let id = self.lend(&segment);
                slabs.all.push(Slab { id, segment, used: vec![false; len / AREA] });
                (slabs.all.len() - 1, 0)
            }
        };
        let slab = &mut slabs.all[slab];
        slab.used[first..first + ranks].fill(true);
        Offer { slab: slab.id, first: first as u32 }
    }

    /// What has become of an offer of parts for `ranks`: an area of these ranks of the job, or nothing if there are none.
    pub(crate) fn settle(&self, offer: Offer, ranks: usize, members: &[Rank]) {
        let mut slabs = self.slabs.lock();
        let Some(slab) = slabs.all.iter().position(|slab| slab.id == offer.slab) else { return };
        let (first, count) = (offer.first as usize, members.len());
        let Slab { segment, used, .. } = &mut slabs.all[slab];
        used[first + count..first + ranks].fill(false);
        if count > 0 {
            let parts = Parts::new(segment.clone(), first * AREA, AREA, count);
            slabs.leases.push(Lease { slab, parts, first, members: members.to_vec() });
        }
    }

    /// The area that `owner` offers, for this rank, of which its part is reserved.
    pub(crate) fn accept(&self, owner: Rank, offer: Offer, rank: usize, ranks: usize, until: Instant) -> io::Result<Area> {
        let segment = if owner == self.rank {
            let slabs = self.slabs.lock();
            slabs.all.iter().find(|slab| slab.id == offer.slab).map(|slab| slab.segment.clone()).ok_or(io::ErrorKind::NotFound)?
        } else {
            self.fetch(owner, offer.slab, until)?
        };
        let base = offer.first as usize * AREA;
        // The offer is a peer's.
        if ranks.checked_mul(AREA).and_then(|len| len.checked_add(base)).is_none_or(|end| end > segment.len()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        segment.reserve(base + rank * AREA..base + (rank + 1) * AREA)?;
        Ok(Area::within(segment, base, AREA, rank, ranks))
    }

    /// Frees the areas that every rank has left for good.
    fn reclaim(&self, slabs: &mut Slabs) {
        let Slabs { all, leases } = slabs;
        leases.retain(|Lease { slab, parts, first, members }| {
            let is_done = |(rank, &member): (usize, &Rank)| {
                parts.departed(rank).load(Ordering::Acquire) != 0 || (member != self.rank && self.has_ended(member))
            };
            if !members.iter().enumerate().all(is_done) {
                return true;
            }
            let bytes = first * AREA..(first + members.len()) * AREA;
            // A rank that has ended may not have reserved its part.
            if let Err(error) = all[*slab].segment.reserve(bytes.clone()) {
                tracing::warn!(%error, "no shared memory");
                return true;
            }
            // SAFETY: the parts are reserved, and no rank uses them any more.
            unsafe { std::ptr::write_bytes(parts.at(0), 0, bytes.len()) };
            all[*slab].segment.release(bytes);
            all[*slab].used[*first..*first + members.len()].fill(false);
            false
        });
    }
}
