//! Opens the store of a URL.

use std::time::Instant;

use super::kv::Store;
#[cfg(feature = "redis")]
use super::redis;
use super::url::StoreUrl;
use super::{file, hash, tcp};
use crate::error::{Error, Result, StoreError};
use crate::network::identity::Identity;
use crate::sys;

/// Opens a store. Rank 0 is its owner: it serves a store that must be served, and removes the
/// values of a former run.
pub(crate) fn open(url: &StoreUrl, owner: bool, identity: &Identity, deadline: Instant) -> Result<Box<dyn Store>> {
    if url.asks_a_foreign_server().is_some()
        && let Some(name) = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().find(|name| sys::is_overruled(name))
    {
        // The library that connects to the server reads the variables itself.
        let what = "a store in a program with rights that the user who started it need not have";
        return Err(Error::Unsupported {
            what,
            why: format!("{name} is set, by which that user chooses the authorities; unset it"),
        });
    }
    if let Some(address) = url.asks_a_foreign_server()
        && let Err(error) = sys::try_out()
    {
        return Err(StoreError::io("connecting to it")(error).at(address));
    }
    match url {
        StoreUrl::File(path) => {
            let store = file::FileStore::open(path, owner, identity.job(), deadline);
            store.map(|store| Box::new(store) as _).map_err(|problem| problem.at(format!("file://{}", path.display())))
        }
        StoreUrl::Tcp { host, port } => {
            tcp::TcpStore::open(host, *port, owner, identity, deadline).map(|store| Box::new(store) as _)
        }
        #[cfg(feature = "redis")]
        StoreUrl::Redis(url) => {
            let store = redis::RedisStore::open(url, identity.job(), deadline);
            store.map(|store| Box::new(store) as _).map_err(|problem| problem.at(url.to_string()))
        }
        #[cfg(not(feature = "redis"))]
        StoreUrl::Redis(_) => Err(Error::Unsupported {
            what: "a redis:// store",
            why: "kolo was built without the feature `redis`; build with --features redis, or use file:// or tcp://".to_owned(),
        }),
        StoreUrl::Hash(name) => Ok(Box::new(hash::HashStore::open(name))),
        StoreUrl::Env => Err(Error::setting("store", "env://", "MASTER_ADDR and MASTER_PORT must be set")),
    }
}
