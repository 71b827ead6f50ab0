//! The memory that the ranks of one host share, seen from one of them.
//!
//! This file has what a window consists of, and how it begins and ends. [`super::wait`],
//! [`super::placement`], [`super::liveness`], [`super::staging`], [`super::lend`] and
//! [`super::pipeline`] have what it does.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::flag_area::{FlagArea, LEFT, PRESENT, REVOKED};
use super::flags::{FlagLines, Phases, SLOTS, WORDS, Words};
use super::groups::PhaseGroups;
use super::placement::Placement;
use super::pool::Pool;
use super::registered::Heap;
use super::slots::StageAt;
use super::tuning::Autotune;
use crate::config::FlagLayout;
use crate::failure::Written;
use crate::host_group::HostGroup;
use crate::host_group::area::Area;
use crate::host_group::stage::{Holder, Stage};
use crate::sync::Ordering;
use crate::sys::{self, PageSize, Patience, Process};
use crate::types::Rank;

/// A cache line of scratch memory, aligned for every element type.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CacheLine(pub(super) [u8; 64]);

/// How ranks wait for all of them.
pub(super) enum Layout {
    /// Every rank reads the flags of all, until it has read where all run. Then the setting
    /// decides.
    Undecided(FlagLayout),
    Flat,
    /// Ranks form groups, whose group leaders read the flags of their members and of each other.
    Groups(Box<PhaseGroups>),
}

/// The memory that the ranks of one host share, seen from one of them.
pub(crate) struct Window {
    pub(super) phases: Phases<FlagArea>,
    /// The namespace of this process's id; 0 if unknown.
    pub(super) namespace: u64,
    /// When this rank last asked for the processes of all its peers.
    pub(super) asked: Option<Instant>,
    /// This rank's number among those of the host.
    pub(super) rank: usize,
    /// The ranks of this host as ranks of the communicator, in order.
    pub(super) members: Arc<[Rank]>,
    /// The same ranks as ranks of the job.
    pub(super) jobs: Arc<[Rank]>,
    pub(super) layout: Layout,
    /// Whether there are more ranks than processors. The same on all ranks, which decide it with the layout.
    pub(super) is_crowded: bool,
    pub(super) patience: Arc<Patience>,
    pub(super) placement: Placement,
    pub(super) host: Arc<HostGroup>,
    /// `None` once it belongs to a stage that peers still read.
    pub(super) area: Option<Area>,
    /// Where this rank stages data, if it holds a stage.
    pub(super) stage: Option<Stage>,
    /// The last phase in which this rank staged something, counted since the start: it may be longer
    /// ago than the phases in shared memory, of 32 bits, can tell.
    pub(super) staged: i64,
    /// For every rank, the stage that was last seen and the address of its slots.
    pub(super) slots: Vec<StageAt>,
    /// The communicator that the host group asks to give up the stage.
    pub(super) holder: Weak<dyn Holder>,
    pub(super) heap: Heap,
    /// The fingerprint of the chain of all calls so far. Some operations do not compare every pair
    /// of ranks: the root of a broadcast reads no flags. Because fingerprints are chained, the next
    /// comparison shows such a mismatch.
    pub(super) chain: u64,
    pub(super) autotune: Autotune,
    /// The addresses of the parts that a fold reduces, and what came inline. Both are kept for
    /// their allocations.
    pub(super) parts: Vec<*const u8>,
    pub(super) inline: Vec<Words>,
    /// The words of all ranks, and what was read from other processes. Both are kept for their
    /// allocations.
    pub(super) peer_words: Vec<Words>,
    pub(super) scratch: Vec<CacheLine>,
    /// How often this rank has read memory of another process.
    #[cfg(test)]
    pub(super) reads: u64,
    /// The system refuses this rank to read memory of its peers, although it allowed it once.
    #[cfg(test)]
    pub(super) cannot_read: bool,
    /// In how many operations this rank has used registered buffers of its peers.
    #[cfg(test)]
    pub(super) loans: u64,
    /// How often a group leader has released this rank.
    #[cfg(test)]
    pub(super) releases: u64,
}

// SAFETY: `parts` is used only within a call, and `slots` holds addresses in memory that the host
// group keeps mapped. Any one thread at a time may use the other fields.
unsafe impl Send for Window {}

impl Window {
    /// Returns the window of this rank in `area`. `members` are the area's ranks in the
    /// communicator, `jobs` the same in the job.
    pub(crate) fn new(
        mut area: Area,
        members: Arc<[Rank]>,
        jobs: Arc<[Rank]>,
        host: Arc<HostGroup>,
        patience: Arc<Patience>,
        autotune: Autotune,
        layout: FlagLayout,
    ) -> Window {
        let (rank, ranks) = (area.rank(), members.len());
        assert!(area.ranks() == ranks && jobs.len() == ranks);
        area.enter();
        let flags = FlagArea { parts: area.parts().clone() };
        let rank_state = flags.rank_state(rank);
        let Process { id, created } = Process::own();
        rank_state.pid.store(id, Ordering::Relaxed);
        rank_state.created.store(created, Ordering::Relaxed);
        let namespace = sys::process_namespace().unwrap_or(0);
        rank_state.namespace.store(namespace, Ordering::Relaxed);
        rank_state.set_affinity(sys::affinity());
        rank_state.state.store(PRESENT, Ordering::Release);
        Window {
            phases: Phases::new(flags, rank, ranks),
            namespace,
            asked: None,
            rank,
            members,
            jobs,
            layout: Layout::Undecided(layout),
            is_crowded: false,
            patience,
            placement: Placement::new(),
            heap: Heap::new(rank, PageSize::system(), Pool::new(host.clone())),
            host,
            area: Some(area),
            stage: None,
            staged: 0,
            slots: vec![StageAt { stage: 0, base: std::ptr::null_mut() }; ranks],
            holder: Weak::<NoHolder>::new(),
            chain: 0,
            autotune,
            parts: Vec::with_capacity(ranks),
            inline: vec![[0; WORDS]; ranks],
            peer_words: vec![[0; WORDS]; ranks],
            scratch: Vec::new(),
            #[cfg(test)]
            reads: 0,
            #[cfg(test)]
            cannot_read: false,
            #[cfg(test)]
            loans: 0,
            #[cfg(test)]
            releases: 0,
        }
    }

    pub(crate) fn heap(&mut self) -> &mut Heap {
        &mut self.heap
    }

    /// The memory that this rank takes alone, and its peers read and write in place.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        self.heap.pool().clone()
    }

    /// This rank's number among those of the host.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks of this host, as ranks of the communicator.
    pub(crate) fn members(&self) -> &Arc<[Rank]> {
        &self.members
    }

    /// Every rank of this host but this one.
    #[inline]
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.members.len());
        (0..ranks).filter(move |&peer| peer != rank)
    }

    /// Sets the communicator that is asked when another communicator of the process needs this
    /// one's stage.
    pub(crate) fn set_holder(&mut self, holder: Weak<dyn Holder>) {
        self.holder = holder;
    }

    /// Returns a function that another thread may call. It ends the sleep of every rank that waits
    /// in this window, in any process.
    pub(crate) fn waker(&self) -> impl Fn() + Send + Sync + use<> {
        let flags = FlagArea { parts: self.phases.lines.parts.clone() };
        let ranks = self.members.len();
        move || {
            for (rank, slot) in (0..ranks).flat_map(|rank| (0..SLOTS).map(move |slot| (rank, slot))) {
                flags.wake(&flags.line(rank, slot).phase);
            }
        }
    }

    /// Returns a function that another thread may call. It returns what a rank of the communicator has
    /// written about itself.
    pub(crate) fn written(&self) -> impl Fn(Rank) -> Option<Written> + Send + Sync + use<> {
        let flags = FlagArea { parts: self.phases.lines.parts.clone() };
        let members = self.members.clone();
        move |rank| flags.rank_state(members.binary_search(&rank).ok()?).written()
    }

    /// Tells the peers that this rank has failed, or has left after operation `last_seq`. If it has
    /// failed, no peer uses its registered buffers when this returns.
    pub(crate) fn leave(&mut self, last_seq: u64, failed: bool) {
        let rank_state = self.phases.lines.rank_state(self.rank);
        rank_state.last_seq.store(last_seq, Ordering::Relaxed);
        rank_state.state.store(if failed { REVOKED } else { LEFT }, Ordering::SeqCst);
        self.phases.wake_all();
        if failed {
            self.take_back_memory();
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.park_stage();
        // Each holds a descriptor and memory. A peer that has not fetched it needs it no more.
        for &id in self.heap.not_fetched() {
            self.host.withdraw(id);
        }
    }
}

/// The holder before [`Window::set_holder`]: it keeps its stage.
struct NoHolder;

impl Holder for NoHolder {
    fn give_up(&self) -> Option<Stage> {
        None
    }
}
