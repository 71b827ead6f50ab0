//! A store on a Redis server. Keys contain the job's name, and expire, so that nothing has to be
//! removed.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Client, Connection, RedisError};

use super::kv::{Store, check};
use super::url::RedisUrl;
use crate::error::StoreError;
use crate::sys;

/// How long keys are kept after they were set.
const LIFETIME: Duration = Duration::from_secs(3600);

pub(super) struct RedisStore {
    /// The URL without the password.
    url: String,
    prefix: String,
    /// The deadline of the start. Until then the server may be silent.
    deadline: Instant,
    connection: Mutex<Connection>,
}

impl RedisStore {
    pub(super) fn open(url: &RedisUrl, job: &str, deadline: Instant) -> Result<RedisStore, StoreError> {
        if url.0.starts_with("rediss://") {
            // The client uses the process's provider of cryptography. This keeps one that the
            // program has chosen.
            _ = rustls::crypto::ring::default_provider().install_default();
        }
        // The parser's own error may quote the URL, and the password with it.
        let client = Client::open(&*url.0).map_err(|_| StoreError::Url("it is not the URL of a Redis server".to_owned()))?;
        let waited = deadline.saturating_duration_since(Instant::now());
        let mut last = String::new();
        let connection = poll(waited, || match connect(&client, url, deadline) {
            Ok(connection) => Ok(Some(connection)),
            // A certificate that is not trusted now is not trusted later.
            Err(error) if error.is_io_error() && !is_of_tls(&error) => {
                // The deadline ends the last attempt. The error of the attempt before is more
                // useful.
                if last.is_empty() || !error.is_timeout() {
                    last = error.to_string();
                }
                Ok(None)
            }
            Err(error) => Err(problem("connecting")(error)),
        })?;
        let connection = connection.ok_or(StoreError::Unreachable { waited, last })?;
        Ok(RedisStore { url: url.to_string(), prefix: format!("kolo:{job}:"), deadline, connection: Mutex::new(connection) })
    }

    fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd, timeout: Duration) -> Result<T, StoreError> {
        let mut connection = self.connection.lock();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Some(timeout.max(left).max(Duration::from_secs(1)));
        let limits = connection.set_read_timeout(timeout).and_then(|()| connection.set_write_timeout(timeout));
        let ask = || limits.and_then(|()| command.query(&mut connection));
        // TLS writes vectors.
        sys::without_sigpipe(ask).map_err(problem("asking the server"))
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// Resolves the server's name, reads the certificates of the system's authorities, connects and
/// logs in. Each of these may block, so a helper thread does it.
fn connect(client: &Client, url: &RedisUrl, deadline: Instant) -> Result<Connection, RedisError> {
    let client = client.clone();
    let connect = move || {
        let connection = || client.get_connection_with_timeout(Duration::from_secs(2));
        sys::above_standard(|| sys::without_sigpipe(connection))
    };
    let advice = "neither a name server nor the Redis server answered in time";
    sys::by_deadline(format!("connect {url}"), deadline, advice, connect, RedisError::from)
}

/// Whether the two ends did not agree on an encrypted connection. The client shares its error, which is
/// that of the socket, which wraps that of TLS.
fn is_of_tls(error: &RedisError) -> bool {
    let shared = error.source().and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let of_socket = shared.and_then(|shared| shared.downcast_ref::<io::Error>()).and_then(io::Error::get_ref);
    of_socket.is_some_and(|error| error.is::<rustls::Error>())
}

fn problem(doing: &'static str) -> impl FnOnce(RedisError) -> StoreError {
    move |error| StoreError::io(doing)(io::Error::other(error))
}

impl Store for RedisStore {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        check(key, value)?;
        self.ask(redis::cmd("SET").arg(self.key(key)).arg(value).arg("EX").arg(LIFETIME.as_secs()), timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        poll(timeout, || self.ask(redis::cmd("GET").arg(self.key(key)), timeout))
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check(key, value)?;
        let key_there = self.key(key);
        let mut set = redis::cmd("SET");
        set.arg(&key_there).arg(value).arg("EX").arg(LIFETIME.as_secs()).arg("NX");
        let was_set: Option<String> = self.ask(&set, timeout)?;
        if was_set.is_some() {
            return Ok(value.to_vec());
        }
        let there: Option<Vec<u8>> = self.ask(redis::cmd("GET").arg(&key_there), timeout)?;
        there.ok_or_else(|| StoreError::Timeout { key: key.to_owned(), waited: timeout })
    }
}

/// Calls `ask` until it returns an answer or the timeout has passed, at growing intervals.
fn poll<T>(timeout: Duration, mut ask: impl FnMut() -> Result<Option<T>, StoreError>) -> Result<Option<T>, StoreError> {
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
