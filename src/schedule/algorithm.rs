//! The algorithms, and the operations that each can execute.

use crate::types::{Op, numbered};

numbered! {
    /// The algorithm of a collective.
    #[non_exhaustive]
    pub enum Algorithm {
        /// Chunks travel around a ring of all ranks: the fewest bytes, and a latency that grows
        /// with the number of ranks.
        Ring = 0, "ring";
        /// A binomial tree: the latency grows with the logarithm of the number of ranks, and every
        /// hop carries all data.
        Binomial = 1, "binomial";
        /// Two binary trees, each for half of the data, in segments: logarithmic latency at nearly
        /// full bandwidth.
        DoubleTree = 2, "double-tree";
        /// Exchanges all data with partners at distance 1, 2, 4: the lowest latency.
        RecursiveDoubling = 3, "recursive-doubling";
        /// Exchanges halves, quarters and so on, then the reverse (Rabenseifner): the ring's bytes
        /// in logarithmic rounds.
        HalvingDoubling = 4, "halving-doubling";
        /// Every pair of ranks exchanges its blocks in one round. The owner of a chunk sums in the
        /// order of ranks.
        Direct = 5, "direct";
        /// Signals at distance 1, 2, 4: for barriers only.
        Dissemination = 6, "dissemination";
        /// The ranks of one host read each other's memory: no messages.
        Window = 7, "window";
        /// Shared memory inside each host, and one of the others between hosts.
        Hierarchical = 8, "hierarchical";
        /// Rings and trees inside each rack and between racks, with few bytes through the uplinks of
        /// racks. Only where the topology is known.
        TwoLevel = 9, "two-level";
    }
}

impl Algorithm {
    /// Returns whether the schedule of all ranks visits the hosts in their best order. Schedules that move runs
    /// of consecutive blocks keep the order of ranks, and so do direct ones, which reduce in that order.
    #[doc(hidden)]
    pub fn follows_hosts(self, op: Op) -> bool {
        match op {
            Op::AllReduce | Op::Reduce | Op::Broadcast | Op::Barrier => self != Algorithm::Direct,
            Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV => {
                matches!(self, Algorithm::Ring | Algorithm::TwoLevel)
            }
            _ => false,
        }
    }

    /// Returns whether [`Algorithm::TwoLevel`] can execute `op`. Exchanges of blocks need racks of
    /// one size.
    pub(crate) fn has_two_levels(op: Op, racks_are_even: bool) -> bool {
        match op {
            Op::AllReduce | Op::Broadcast | Op::Reduce => true,
            Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV => racks_are_even,
            _ => false,
        }
    }

    /// Returns the algorithms over messages that can execute `op` among `world` ranks, wherever these
    /// are.
    pub(crate) fn for_op(op: Op, world: usize) -> &'static [Algorithm] {
        use Algorithm::*;
        let power_of_two = world.is_power_of_two();
        match op {
            Op::AllReduce => &[Direct, RecursiveDoubling, HalvingDoubling, Ring, DoubleTree, Binomial],
            Op::Broadcast => &[Binomial, DoubleTree, Ring],
            Op::Reduce => &[Binomial, DoubleTree, Ring, Direct],
            Op::AllGather | Op::AllGatherV if power_of_two => &[Direct, RecursiveDoubling, Ring],
            Op::ReduceScatter | Op::ReduceScatterV if power_of_two => &[Direct, HalvingDoubling, Ring],
            Op::AllGather | Op::AllGatherV | Op::ReduceScatter | Op::ReduceScatterV => &[Direct, Ring],
            Op::Gather | Op::Scatter => &[Binomial, Direct],
            Op::AllToAll | Op::AllToAllV | Op::Send | Op::Recv => &[Direct],
            Op::Barrier => &[Dissemination],
            Op::Split | Op::Alloc | Op::Connect | Op::Grow => &[],
        }
    }
}
