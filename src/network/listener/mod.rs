//! The socket on which a process takes connections, and what a peer must prove before the rest of
//! the library sees it.
//!
//! | file | what it does |
//! |---|---|
//! | [`handshake`] | the messages with which two processes prove that they share job, run and secret |
//! | `accept` | the [`Listener`], whose thread accepts connections and shakes hands |
//! | `dial` | connects and sends queries on the caller's thread, which waits |
//! | `connector` | connects without waiting, beside the engine's operations |
//! | `stream`, `query` | a connection to either kind of socket; how queries and replies are framed |
//! | [`stranger`] | connects without the secret, for `kolo soak` |

mod accept;
mod connector;
mod dial;
pub(crate) mod handshake;
mod query;
pub mod stranger;
mod stream;
#[cfg(test)]
mod tests;

pub(crate) use accept::{Handler, Listener, random_name};
pub(crate) use connector::{Connector, Target};
#[cfg(any(fuzzing, test))]
pub(crate) use dial::fuzz_initiator;
pub(crate) use dial::{DialError, dial, dial_local, query, query_local};
pub(crate) use stream::{Stream, Until};
