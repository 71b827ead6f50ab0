//! A store that rank 0 (or `kolo run`) serves over TCP.
//!
//! `server` serves it, `client` is a rank's connection to it, `connect` makes such connections, and
//! `protocol` encodes the messages.

mod client;
mod connect;
mod protocol;
mod server;

pub(crate) use client::TcpStore;
#[cfg(any(fuzzing, test))]
pub(crate) use protocol::{fuzz, sample};
pub use server::TcpStoreServer;
