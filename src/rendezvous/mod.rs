//! From a rank and a store to connected ranks.
//!
//! 1. Rank 0 chooses a random number for this run and announces it ([`run_info`]).
//! 2. Every rank learns the secret of the run. It was given the secret, finds it in a store that
//!    only the ranks can read, or agrees on it with rank 0 ([`key_exchange`]). Until then the rank
//!    listens nowhere, and trusts nothing that it reads.
//! 3. Every rank opens its [`endpoint`] and puts a [`PeerInfo`](crate::network::peer_info::PeerInfo)
//!    into the store.
//! 4. Rank 0 collects the peer infos and publishes a [`peer_table::PeerTable`]: the peer infos of
//!    all ranks, or the reason why the start failed.
//! 5. Ranks that seem to be on one host prove that they can share memory
//!    ([`host_setup`](crate::network::host_setup)).
//!
//! After that the store is not needed. Links between ranks are opened when they are first used
//! ([`network`](crate::network)). A communicator that grows uses the store again ([`admission`]).
//!
//! From step 3 on, all values that ranks put into the store are [`signed`].
//!
//! # Former runs
//!
//! A store may hold the values of a run that crashed. So every key but that of the run info
//! contains the number of the run. A rank that finds the run info of a former run joins that
//! run: it puts its peer info there and waits for a table that contains this very peer info. No
//! table of a former run contains it. When the run info changes, the rank closes its listener
//! and starts over.
//!
//! # Files
//!
//! | file | what it does |
//! |---|---|
//! | `launcher`, `store_source`, `store` | which rank this is; which store the ranks use; the stores |
//! | `connect` | connects the ranks: the rendezvous, then the host groups |
//! | `membership` | runs steps 1 to 4 for this rank |
//! | `collect` | rank 0: announces the run, collects the peer infos, publishes the table |
//! | `join` | the other ranks: find the run, learn its secret, wait for the table |
//! | `attempt` | what this process remembers of its starts |
//! | `hosts` | exchanges which ranks share a host |
//! | `admission` | admits newcomers to a communicator that grows |
//! | `observer`, `observe` | what a process that is no rank learns of a job |
//! | `store_keys` | the keys in the store |

pub(crate) mod admission;
mod attempt;
mod collect;
mod connect;
mod endpoint;
mod hosts;
mod join;
pub(crate) mod key_exchange;
pub(crate) mod launcher;
mod membership;
mod observe;
pub mod observer;
pub(crate) mod peer_table;
pub(crate) mod run_info;
mod signed;
mod start;
pub(crate) mod store;
mod store_keys;
pub(crate) mod store_source;
#[cfg(test)]
mod tests;

pub(crate) use connect::{Connected, connect, peer_failed};
pub(crate) use peer_table::OwnFailure;
pub(crate) use start::{MOST_RANKS, Start};
