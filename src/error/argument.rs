//! What is wrong with the arguments of a call.

use super::shown::count;
use crate::types::{DType, Rank, ReduceOp};

/// What is wrong with the arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// The root is not a rank of this communicator.
    #[error("root {root} is out of range; the communicator has {}", ranks_of(*world_size))]
    Root {
        /// What was given.
        root: Rank,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The peer is not a rank of this communicator.
    #[error("peer {peer} is out of range; the communicator has {}", ranks_of(*world_size))]
    Peer {
        /// What was given.
        peer: Rank,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The reduction is not defined on these elements.
    #[error("{redop} is not defined on {dtype}")]
    ReduceOp {
        /// The reduction.
        redop: ReduceOp,
        /// The element type.
        dtype: DType,
    },
    /// A buffer has the wrong number of elements.
    #[error("the {buffer} buffer has {}, but needs {expected}", count(*given, "element"))]
    Length {
        /// Which buffer.
        buffer: &'static str,
        /// The elements needed.
        expected: usize,
        /// The elements given.
        given: usize,
    },
    /// A buffer cannot be divided into one block for each rank.
    #[error(
        "the {buffer} buffer has {}, which is not a multiple of the world size {world_size}; use the _v form", count(*given, "element")
    )]
    Blocks {
        /// Which buffer.
        buffer: &'static str,
        /// The elements given.
        given: usize,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The number of counts is not the world size.
    #[error("{} given; one for each of {} is needed", count(*given, "count"), count(*world_size, "rank"))]
    Counts {
        /// The number of counts given.
        given: usize,
        /// The size of the communicator.
        world_size: usize,
    },
    /// The root gave no buffer, which only the root must give.
    #[error("this rank is the root and must give a {buffer} buffer")]
    RootBuffer {
        /// Which buffer.
        buffer: &'static str,
    },
    /// A pointer is null and the count is not zero.
    #[error("the {buffer} pointer is null")]
    Null {
        /// Which buffer.
        buffer: &'static str,
    },
    /// A pointer is not a multiple of the element's size.
    #[error("the {buffer} pointer {address:#x} is not aligned to the {align} bytes of a {dtype}")]
    Misaligned {
        /// Which buffer.
        buffer: &'static str,
        /// The address.
        address: usize,
        /// The alignment in bytes.
        align: usize,
        /// The element type.
        dtype: DType,
    },
    /// The count, in bytes and over all ranks, is more than memory can hold.
    #[error("{count} elements are more than memory can hold")]
    TooMany {
        /// What was given.
        count: usize,
    },
    /// Buffers overlap without being in place.
    #[error("the buffers overlap, but are not in place; give the same memory for both, or memory that does not overlap")]
    Overlap,
}

fn ranks_of(world_size: usize) -> String {
    if world_size == 1 { "rank 0 alone".to_owned() } else { format!("ranks 0 to {}", world_size - 1) }
}
