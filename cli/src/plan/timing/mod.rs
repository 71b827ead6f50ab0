//! Simulates the time of a collective: events over the real schedules of all ranks.
//!
//! Each rank takes its steps in order, on a processor of its own. A message costs its sender and its
//! receiver `overhead`, travels for `latency`, and passes the interfaces of both hosts byte by byte.
//! An interface serves the ranks of its host in turns. Racks have an uplink that their hosts share. Where each
//! two hosts were measured, what one sends to another also passes a port of their own.
//! A step that forwards does so while it receives, as the engine does.
//!
//! `world` runs the events, `network` has the interfaces, `placement` says where the ranks are,
//! `programme` what they do, and `case` decides how much of a large world has to be simulated:
//!
//! - all ranks, if their messages are few enough ([`Method::Full`]);
//! - the ranks of one host or rack, if all hosts do the same, only rotated. Then what a rank receives
//!   from a peer is what the same rank of this host sends ([`Method::Symmetry`]);
//! - two smaller sizes, if the schedule repeats with the size ([`Method::Extrapolated`]).

mod case;
mod network;
mod placement;
mod programme;
mod scenario;
#[cfg(test)]
mod tests;
mod world;

pub(super) use case::simulate;
pub(super) use scenario::{Links, Scenario, Simulated};
