//! The areas of communicators: where their flag lines lie.
//!
//! The lowest rank of a communicator on a host, its leader, provides the area from a *slab*, a
//! region of memory that holds many areas. The other processes map a slab once. An area is used
//! again when each of its ranks has departed from it or has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::Region;
use crate::types::Rank;

/// Bytes of one rank's part of an area.
pub(crate) const AREA: usize = 4096;

/// The offset in its part of the word in which a rank announces that it uses the area no more. The
/// bytes before it belong to the user of the area.
const DEPARTED: usize = AREA - 64;

/// Bytes of a part that the user of the area may use.
pub(crate) const USABLE: usize = DEPARTED;

/// Bytes of the first slab. Each is twice as large as the one before, up to [`LARGEST`].
const SMALLEST: usize = 256 << 10;
const LARGEST: usize = 8 << 20;

/// Returns how many slabs hold areas of `bytes` bytes in total.
pub(crate) fn slabs_for(bytes: u64) -> usize {
    let mut room = 0;
    let mut slabs = 0;
    while room < bytes {
        room += slab_size(slabs) as u64;
        slabs += 1;
    }
    slabs
}

/// Returns the bytes of a process's next slab when it has `slabs` of them.
fn slab_size(slabs: usize) -> usize {
    (SMALLEST << slabs.min(16)).min(LARGEST)
}

/// Parts at equal distances in a region, one for each rank of a communicator on this host.
#[derive(Clone)]
pub(crate) struct Parts {
    /// Keeps the memory mapped.
    _region: Arc<Region>,
    start: *mut u8,
    stride: usize,
    ranks: usize,
}

// SAFETY: `start` is an address in a region that this keeps mapped, and `Region` itself is Send and
// Sync.
unsafe impl Send for Parts {}
// SAFETY: as above.
unsafe impl Sync for Parts {}

impl Parts {
    fn new(region: Arc<Region>, base: usize, stride: usize, ranks: usize) -> Parts {
        assert!(stride >= AREA && ranks > 0 && base + (ranks - 1) * stride + AREA <= region.len());
        Parts { start: region.at(base), _region: region, stride, ranks }
    }

    /// Returns the start of a rank's part: [`AREA`] bytes, aligned to [`AREA`].
    #[inline]
    pub(crate) fn at(&self, rank: usize) -> *mut u8 {
        debug_assert!(rank < self.ranks);
        self.start.wrapping_add(rank * self.stride)
    }

    fn departed(&self, rank: usize) -> &AtomicU32 {
        assert!(rank < self.ranks);
        // SAFETY: the word lies within the part and is aligned. The part lives as long as the
        // region, was zeroed at first, and this word is accessed through atomics only.
        unsafe { &*self.at(rank).add(DEPARTED).cast() }
    }
}

/// A communicator's area, seen from one of its ranks.
pub(crate) struct Area {
    parts: Parts,
    rank: usize,
    /// Whether this rank has written to the area. Until then, another area can take its place.
    is_entered: bool,
}

impl Area {
    /// An area of parts that lie `stride` bytes apart in a region. All parts are zeroed, and this
    /// rank's is reserved.
    pub(crate) fn new(region: Arc<Region>, stride: usize, rank: usize, ranks: usize) -> Area {
        Area::within(region, 0, stride, rank, ranks)
    }

    /// As [`Area::new`], from `base` on.
    pub(super) fn within(region: Arc<Region>, base: usize, stride: usize, rank: usize, ranks: usize) -> Area {
        assert!(rank < ranks);
        Area { parts: Parts::new(region, base, stride, ranks), rank, is_entered: false }
    }

    /// Marks the area as used by this rank until the area is dropped.
    pub(crate) fn enter(&mut self) {
        self.is_entered = true;
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Returns this rank's number among the ranks of the area.
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

/// An area that a leader provides: the number of the slab, and the number of the first part in it.
/// A slab of 0 is no offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(super) slab: u32,
    pub(super) first: u32,
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
    region: Arc<Region>,
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
    /// Sets parts for `ranks` aside until [`Slabs::confirm`]. If no slab has room, `create` makes
    /// the region of a new slab of the given bytes and returns its number, too. Returns
    /// [`Offer::NONE`] if it cannot.
    pub(super) fn offer(&mut self, ranks: usize, create: impl FnOnce(usize) -> Option<(u32, Arc<Region>)>) -> Offer {
        let (slab, first) = match self.find(ranks) {
            Some(found) => found,
            None => {
                let len = slab_size(self.all.len()).max(ranks * AREA);
                let Some((id, region)) = create(len) else { return Offer::NONE };
                self.all.push(Slab { id, region, used: vec![false; len / AREA] });
                (self.all.len() - 1, 0)
            }
        };
        let slab = &mut self.all[slab];
        slab.used[first..first + ranks].fill(true);
        Offer { slab: slab.id, first: first as u32 }
    }

    /// Finds `count` free parts side by side: the slab, and the number of the first part.
    fn find(&self, count: usize) -> Option<(usize, usize)> {
        self.all.iter().enumerate().find_map(|(slab, Slab { used, .. })| {
            let mut free = 0;
            used.iter().enumerate().find_map(|(at, &is_used)| {
                free = if is_used { 0 } else { free + 1 };
                (free == count).then(|| (slab, at + 1 - count))
            })
        })
    }

    /// Ends an offer of parts for `ranks`: they become an area of these ranks of the job, or are
    /// free if there are none.
    pub(super) fn confirm(&mut self, offer: Offer, ranks: usize, members: &[Rank]) {
        let Some(slab) = self.all.iter().position(|slab| slab.id == offer.slab) else { return };
        let (first, count) = (offer.first as usize, members.len());
        let Slab { region, used, .. } = &mut self.all[slab];
        used[first + count..first + ranks].fill(false);
        if count > 0 {
            let parts = Parts::new(region.clone(), first * AREA, AREA, count);
            self.leases.push(Lease { slab, parts, first, members: members.to_vec() });
        }
    }

    /// Returns the region of a slab.
    pub(super) fn region(&self, id: u32) -> Option<Arc<Region>> {
        self.all.iter().find(|slab| slab.id == id).map(|slab| slab.region.clone())
    }

    /// Frees the areas that every rank has left for good: it has departed, or `has_ended` says so.
    pub(super) fn reclaim(&mut self, has_ended: impl Fn(Rank) -> bool) {
        let Slabs { all, leases } = self;
        leases.retain(|Lease { slab, parts, first, members }| {
            let is_done =
                |(rank, &member): (usize, &Rank)| parts.departed(rank).load(Ordering::Acquire) != 0 || has_ended(member);
            if !members.iter().enumerate().all(is_done) {
                return true;
            }
            let bytes = first * AREA..(first + members.len()) * AREA;
            // A rank that has ended may not have reserved its part.
            if let Err(error) = all[*slab].region.reserve(bytes.clone()) {
                crate::log::warn!(%error, "cannot reserve shared memory to clear an area; it stays unused");
                return true;
            }
            // SAFETY: the parts are reserved, and no rank uses them any more.
            unsafe { std::ptr::write_bytes(parts.at(0), 0, bytes.len()) };
            all[*slab].region.release(bytes);
            all[*slab].used[*first..*first + members.len()].fill(false);
            false
        });
    }
}
