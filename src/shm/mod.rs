//! Collectives of ranks that share memory. They send no messages, synchronise once or twice, and
//! move each byte as rarely as possible.
//!
//! A [`Window`] is memory that all ranks of one host map. Each rank has a part of the
//! communicator's area, which holds its flags, and a stage with the slots through which its data
//! passes. [`flags`] has how ranks wait for each other, [`collectives`] has what they do in
//! between. Areas and stages belong to the host group: see [`crate::host_group`].
//!
//! Everything here runs on the caller's thread. The short path of a small collective takes no lock,
//! does not allocate and makes no system call.

mod all_reduce;
mod autotune;
mod choreography;
mod cma;
mod collectives;
mod exchange;
mod flag_area;
pub(crate) mod flags;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod groups;
mod hierarchy;
mod inline;
mod lend;
mod liveness;
mod one_shot;
mod part;
mod pipeline;
mod placement;
mod pool;
mod pull;
pub(crate) mod registered;
mod rooted;
mod slots;
mod staging;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod transfer_tests;
mod tuning;
mod two_shot;
mod wait;
mod window;

pub(crate) use pool::{Block, Pool};
pub(crate) use slots::MOST_RANKS;
pub(crate) use tuning::Autotune;
pub(crate) use window::Window;
