//! A store on a Redis server. Keys carry the job's name, and expire: nothing has to be cleared.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Client, Connection, RedisError};

use super::{Store, check, poll};
use crate::error::StoreProblem;

/// How long keys are kept after they were set.
const LIFETIME: Duration = Duration::from_secs(3600);

pub(super) struct RedisStore {
    url: String,
    prefix: String,
    connection: Mutex<Connection>,
}

impl RedisStore {
    pub(super) fn open(url: &str, job: &str, deadline: Instant) -> Result<RedisStore, StoreProblem> {
        let client = Client::open(url).map_err(|error| StoreProblem::Url(error.to_string()))?;
        let waited = deadline.saturating_duration_since(Instant::now());
        let mut last = String::new();
        let connection = poll(waited, || match client.get_connection_with_timeout(Duration::from_secs(2)) {
            Ok(connection) => Ok(Some(connection)),
            Err(error) if error.is_io_error() => {
                last = error.to_string();
                Ok(None)
            }
            Err(error) => Err(problem("connecting")(error)),
        })?;
        let connection = connection.ok_or(StoreProblem::Unreachable { waited, last })?;
        Ok(RedisStore { url: url.to_owned(), prefix: format!("kolo:{job}:"), connection: Mutex::new(connection) })
    }

    fn ask<T: redis::FromRedisValue>(&self, command: &redis::Cmd, timeout: Duration) -> Result<T, StoreProblem> {
        let mut connection = self.connection.lock();
        let timeout = Some(timeout.max(Duration::from_secs(1)));
        let limits = connection.set_read_timeout(timeout).and_then(|()| connection.set_write_timeout(timeout));
        limits.and_then(|()| command.query(&mut connection)).map_err(problem("asking the server"))
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

fn problem(doing: &'static str) -> impl FnOnce(RedisError) -> StoreProblem {
    move |error| StoreProblem::io(doing)(std::io::Error::other(error))
}

impl Store for RedisStore {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
        check(key, value)?;
        self.ask(redis::cmd("SET").arg(self.key(key)).arg(value).arg("EX").arg(LIFETIME.as_secs()), timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        poll(timeout, || self.ask(redis::cmd("GET").arg(self.key(key)), timeout))
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        check(key, value)?;
        let key_there = self.key(key);
        let mut set = redis::cmd("SET");
        set.arg(&key_there).arg(value).arg("EX").arg(LIFETIME.as_secs()).arg("NX");
        let was_set: Option<String> = self.ask(&set, timeout)?;
        if was_set.is_some() {
            return Ok(value.to_vec());
        }
        let there: Option<Vec<u8>> = self.ask(redis::cmd("GET").arg(&key_there), timeout)?;
        there.ok_or_else(|| StoreProblem::Timeout { key: key.to_owned(), waited: timeout })
    }
}
