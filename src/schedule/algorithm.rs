//! The algorithms, and the operations that each can execute.

use crate::types::{Op, numbered};

numbered! {
    /// How a collective is executed.
    #[non_exhaustive]
    pub enum Algorithm {
        /// Chunks go round a ring of all ranks: fewest bytes, latency grows with the number of ranks.
        Ring = 0, "ring";
        /// A binomial tree: latency grows with the logarithm, every hop carries everything.
        Binomial = 1, "binomial";
        /// Two binary trees, each for half of the data, in pieces: logarithmic latency at nearly full bandwidth.
        DoubleTree = 2, "double-tree";
        /// Exchange everything with partners at distance 1, 2, 4: lowest latency.
        RecursiveDoubling = 3, "recursive-doubling";
        /// Exchange halves, quarters and so on, then the way back (Rabenseifner): the ring's bytes in logarithmic rounds.
        HalvingDoubling = 4, "halving-doubling";
        /// Every pair of ranks exchanges what concerns it: one round; the owner of a slice sums in the order of ranks.
        Direct = 5, "direct";
        /// Signals at distance 1, 2, 4: barriers only.
        Dissemination = 6, "dissemination";
        /// Ranks of one host read each other's memory: no messages at all.
        Window = 7, "window";
        /// Windows inside each host, one of the above between hosts.
        Hierarchical = 8, "hierarchical";
    }
}

impl Algorithm {
    /// The algorithms over messages that carry out `op` among `world` ranks.
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
            Op::Split | Op::Alloc | Op::Connect => &[],
        }
    }
}
