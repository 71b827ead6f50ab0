//! Collectives of ranks that share memory: no messages, one or two synchronisations, every byte moved as rarely as can be.
//!
//! A [`Window`] is memory that all ranks of one host map. Each rank has a part of the communicator's area, with its flags, and a
//! stage with the slots through which its data passes. [`flags`] is how ranks wait for each other, [`collectives`] what they do in
//! between. Areas and stages are the host group's, see [`crate::bootstrap::host_group`].
//!
//! Everything here runs on the caller's thread. The short path of a small collective takes no lock, allocates nothing and calls
//! nothing in the system.

mod autotune;
mod cma;
mod collectives;
mod exchange;
pub(crate) mod flags;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod one_shot;
mod pipeline;
pub(crate) mod registered;
mod rooted;
#[cfg(test)]
mod tests;
mod tuning;
mod two_shot;
mod window;

pub(crate) use pipeline::WindowCall;
pub(crate) use tuning::Autotune;
pub(crate) use window::{MOST_RANKS, Window};
