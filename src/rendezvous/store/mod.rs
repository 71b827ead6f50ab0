//! Where ranks find each other: small key-value stores behind one trait and one syntax of URLs.
//!
//! | URL | store |
//! |---|---|
//! | `file:///path`, `/path` | a file that all ranks reach, local or shared; on Windows `file:///D:/path`, also with two slashes or with backslashes, and `D:\path` |
//! | `tcp://host:port` | rank 0 serves it from its own process; port 0 picks a port and logs it |
//! | `env://` | `tcp://` at `MASTER_ADDR` and `MASTER_PORT` |
//! | `redis://host:port`, `rediss://host:port` | a Redis server (feature `redis`), `rediss` with TLS |
//! | `hash://name` | inside one process |
//!
//! A store is needed only while ranks connect. Its values are small and short-lived. Keys of former
//! runs do no harm, see `rendezvous`.
//!
//! `kv` has the trait, `url` parses URLs, and `open` opens the store of a URL. The other files are
//! the stores.

pub(crate) mod file;
mod hash;
mod kv;
mod open;
#[cfg(feature = "redis")]
mod redis;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
mod url;
mod watched;

pub use kv::Store;
pub use tcp::TcpStoreServer;

pub(crate) use open::open;
pub(crate) use url::{StoreUrl, masked};
pub(crate) use watched::WatchedStore;
