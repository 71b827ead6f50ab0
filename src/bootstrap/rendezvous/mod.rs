//! How ranks meet in a store. See [`super`] for the protocol.
//!
//! | file | what it does |
//! |---|---|
//! | `membership` | runs the rendezvous of this rank |
//! | `collect` | rank 0: announces the run, collects the peer infos, publishes the table |
//! | `join` | the other ranks: find the run, learn its secret, wait for the table |
//! | `attempt` | what this process remembers of its starts |
//! | `hosts` | exchanges which ranks share a host |
//! | `observe` | reads the table for a process that is no rank |
//! | `store_keys`, `timing` | the keys in the store, and how long to wait for a value |

mod attempt;
mod collect;
mod hosts;
mod join;
mod membership;
mod observe;
mod store_keys;
#[cfg(test)]
mod tests;
mod timing;

pub(super) use hosts::exchange_hosts;
pub(super) use membership::{Membership, gather_members};
pub(super) use observe::read_members;
