//! What a process shares with the other ranks of its host: one [`HostGroup`] for each process and
//! job, which all communicators use.
//!
//! - [`area`]: the flag lines of each communicator, cut from few regions of shared memory.
//! - [`stage`]: the memory through which large data passes, which communicators take turns to use.
//! - `region_exchange`: how the processes of a host map each other's regions of memory.
//! - `group`: the [`HostGroup`], which also watches the other processes and keeps measured results.
//!
//! So descriptors grow with the ranks of the host, and memory grows with the operations in flight.
//! A further communicator costs [`area::AREA`] bytes a rank.

pub(crate) mod area;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod group;
mod region_exchange;
pub(crate) mod stage;
#[cfg(test)]
mod tests;

pub(crate) use group::HostGroup;
pub(crate) use region_exchange::RegionExchange;
pub(crate) use stage::HOME;
