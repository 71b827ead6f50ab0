//! From a rank and a store to connected ranks.
//!
//! 1. Rank 0 chooses a random number for this run and announces it ([`announcement`]).
//! 2. Every rank learns the secret of the run. It was given the secret, finds it in a store that
//!    only the ranks can read, or agrees on it with rank 0 ([`key_exchange`]). Until then the rank
//!    listens nowhere, and trusts nothing that it reads.
//! 3. Every rank opens its [`endpoint`] and puts a [`peer_info::PeerInfo`] into the store.
//! 4. Rank 0 collects the peer infos and publishes a [`peer_table::PeerTable`]: the peer infos of
//!    all ranks, or the reason why the start failed. Steps 1 to 4 are the [`rendezvous`].
//! 5. Ranks that seem to be on one host prove that they can share memory ([`host_setup`]).
//!
//! After that the store is not needed. Links between ranks are opened when they are first used
//! ([`network`]). A communicator that grows uses the store again ([`admission`]).
//!
//! From step 3 on, all values that ranks put into the store are [`signed`].
//!
//! # Former runs
//!
//! A store may hold the values of a run that crashed. So every key but that of the announcement
//! contains the number of the run. A rank that finds the announcement of a former run joins that
//! run: it puts its peer info there and waits for a table that contains this very peer info. No
//! table of a former run contains it. When the announcement changes, the rank closes its listener
//! and starts over.

pub(crate) mod address;
pub(crate) mod admission;
pub(crate) mod announcement;
mod connect;
mod endpoint;
pub(crate) mod fabric;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
pub(crate) mod host_group;
mod host_setup;
pub(crate) mod identity;
mod in_process;
pub(crate) mod key_exchange;
pub(crate) mod launcher;
pub(crate) mod listener;
mod network;
pub(crate) mod observe;
pub mod observer;
pub(crate) mod peer_info;
pub(crate) mod peer_table;
mod rendezvous;
mod signed;
mod start;
pub(crate) mod store;
pub(crate) mod store_source;
pub(crate) mod topology;

pub(crate) use connect::{Connected, connect, peer_failed};
pub(crate) use peer_table::OwnFailure;
pub(crate) use start::{MOST_RANKS, Start};
