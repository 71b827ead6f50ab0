//! Where ranks find each other: small key-value stores behind one trait and one syntax of URLs.
//!
//! | URL | what it is |
//! |---|---|
//! | `file:///path` | a file that all ranks reach, local or shared; `file:///D:/path` on Windows |
//! | `tcp://host:port` | rank 0 serves it from its own process; port 0 picks one and logs it |
//! | `env://` | `tcp://` at `MASTER_ADDR` and `MASTER_PORT` |
//! | `redis://host:port`, `rediss://host:port` | a Redis server (feature `redis`), by TLS with the second s |
//! | `hash://name` | inside one process |
//!
//! A store is needed only while ranks connect. What is in it is small and short-lived; keys of former runs do no harm, see
//! `bootstrap`.

pub(crate) mod file;
mod hash;
#[cfg(feature = "redis")]
mod redis;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::bootstrap::listener::handshake::Identity;
use crate::error::{Error, Result, StoreProblem};

pub use tcp::TcpStoreServer;

/// The longest key, and the largest value, in bytes.
pub(crate) const LONGEST_KEY: usize = 256;
pub(crate) const LARGEST_VALUE: usize = 16 << 20;

/// A key-value store that ranks share. Bring your own with [`crate::Builder::store_object`].
///
/// Every call ends by its timeout. Keys are at most 256 bytes, values at most 16 MiB.
pub trait Store: Send + Sync {
    /// What to call the store in messages.
    fn url(&self) -> String;

    /// Whether only the ranks of the job can read or write it. Then ranks that were given no secret share one through it. Otherwise
    /// they agree on one that a process that only reads the store cannot learn; see [`crate::security`]. Rank 0's counts.
    fn is_private(&self) -> bool {
        false
    }

    /// Sets a key, whether it was there or not.
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem>;

    /// Waits for a key; `None` if it is not there by the timeout.
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem>;

    /// Sets a key unless it is there; returns its value afterwards. Without a way to do both at once, sets it and hopes: then a
    /// rank that is started twice is noticed later.
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        self.set(key, value, timeout)?;
        Ok(value.to_vec())
    }
}

/// A store's place, parsed from its URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    File(PathBuf),
    Tcp { host: String, port: u16 },
    Redis(RedisUrl),
    Env,
    Hash(String),
}

/// A URL of a Redis server. Only the connection gets to see the password in it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RedisUrl(String);

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&masked(&self.0))
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A URL without the user, the password and the parameters that it may have. A file's path is shown as it is.
fn masked(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (&url[..scheme.len() + 3], rest));
    if scheme == "file://" {
        return url.to_owned();
    }
    let (rest, parameters) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?***"));
    let (user, place) = rest.rsplit_once('@').map_or(("", rest), |(_, place)| ("***@", place));
    format!("{scheme}{user}{place}{parameters}")
}

impl StoreUrl {
    pub(crate) fn parse(url: &str) -> Result<StoreUrl> {
        StoreUrl::try_parse(url).map_err(|problem| StoreProblem::Url(problem).at(masked(url)))
    }

    fn try_parse(url: &str) -> Result<StoreUrl, String> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| "it has no scheme".to_owned())?;
        match scheme {
            "file" => file::path(rest).map(StoreUrl::File),
            "tcp" => {
                let (host, port) = split_port(rest)?;
                Ok(StoreUrl::Tcp { host, port })
            }
            "redis" | "rediss" if rest.is_empty() => Err("it names no host".to_owned()),
            "redis" | "rediss" => Ok(StoreUrl::Redis(RedisUrl(url.to_owned()))),
            "env" if rest.is_empty() => Ok(StoreUrl::Env),
            "env" => Err("nothing may follow env://".to_owned()),
            "hash" if !rest.is_empty() => Ok(StoreUrl::Hash(rest.to_owned())),
            "hash" => Err("it has no name".to_owned()),
            // What stands in place of a scheme may be a part of a password.
            _ if scheme.contains('@') => Err("it has no scheme".to_owned()),
            _ => Err(format!("there is no store {scheme}://")),
        }
    }
}

/// `host:port`, with IPv6 addresses in brackets.
fn split_port(text: &str) -> Result<(String, u16), String> {
    let text = text.strip_suffix('/').unwrap_or(text);
    let (host, port) = text.rsplit_once(':').ok_or_else(|| "it has no port".to_owned())?;
    let port = port.parse().map_err(|_| "what follows its last colon is not a port".to_owned())?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    if host.is_empty() {
        return Err("it names no host".to_owned());
    }
    if bare.is_none() && host.contains(':') {
        return Err("an IPv6 address must be in brackets".to_owned());
    }
    Ok((host.to_owned(), port))
}

/// Opens a store. Rank 0 is its owner: it serves what must be served, and clears what a former run left.
pub(crate) fn open(place: &StoreUrl, owner: bool, identity: &Identity, deadline: Instant) -> Result<Box<dyn Store>> {
    match place {
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

/// Checks the sizes of what is to be stored.
fn check(key: &str, value: &[u8]) -> Result<(), StoreProblem> {
    let too_large = |what, bytes, limit| Err(StoreProblem::TooLarge { what, bytes, limit });
    match (key.len(), value.len()) {
        (bytes, _) if bytes > LONGEST_KEY => too_large("a key", bytes, LONGEST_KEY),
        (_, bytes) if bytes > LARGEST_VALUE => too_large("a value", bytes, LARGEST_VALUE),
        _ => Ok(()),
    }
}

/// Asks again and again until there is an answer or the timeout is over; less often the longer it takes.
#[cfg(feature = "redis")]
fn poll<T>(timeout: Duration, mut ask: impl FnMut() -> Result<Option<T>, StoreProblem>) -> Result<Option<T>, StoreProblem> {
    let deadline = Instant::now() + timeout;
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(answer) = ask()? {
            return Ok(Some(answer));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 3 / 2).min(Duration::from_millis(25));
    }
}
