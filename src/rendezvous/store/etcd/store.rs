//! The store. Keys contain the job's name and belong to a lease, so that nothing has to be removed.

use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::kv::{Store, check};
use super::super::poll::poll;
use super::super::url::EtcdUrl;
use super::client::{Client, Problem, decoded, encoded};
use crate::error::StoreError;
use crate::sys;

/// How long keys are kept after the deadline of the start.
const LIFETIME: Duration = Duration::from_secs(3600);

/// The longest lease. etcd accepts 9,000,000,000 seconds.
const LONGEST_LEASE: Duration = Duration::from_secs(30 * 24 * 3600);

/// A wait that is shorter asks again instead of watching.
const SHORT: Duration = Duration::from_millis(20);

pub(in super::super) struct EtcdStore {
    /// The URL without user and password.
    url: String,
    prefix: String,
    /// The lease of all keys of this process.
    lease: String,
    /// The deadline of the start. Until then the server may be silent.
    deadline: Instant,
    client: Client,
}

impl EtcdStore {
    pub(in super::super) fn open(url: &EtcdUrl, job: &str, deadline: Instant) -> Result<EtcdStore, StoreError> {
        let left = || deadline.saturating_duration_since(Instant::now());
        let client = client(url, deadline)?;
        let waited = left();
        let seconds = waited.saturating_add(LIFETIME).min(LONGEST_LEASE).as_secs();
        let mut last = String::new();
        let lease = poll(waited, || {
            match client.call("/v3/lease/grant", &json!({"TTL": seconds.to_string()}), left().max(Duration::from_millis(1))) {
                Ok(answer) => match answer["ID"].as_str() {
                    Some(lease) => Ok(Some(lease.to_owned())),
                    None => Err(failed(Problem::Foreign("it grants no lease".to_owned()))),
                },
                Err(Problem::NoAnswer(why)) => {
                    // The deadline ends the last attempt. The error of the attempt before is more
                    // useful.
                    if last.is_empty() || !left().is_zero() {
                        last = why;
                    }
                    Ok(None)
                }
                Err(problem) => Err(failed(problem)),
            }
        })?;
        let lease = lease.ok_or(StoreError::Unreachable { waited, last })?;
        let store = EtcdStore { url: url.to_string(), prefix: format!("{}/{job}/", url.prefix), lease, deadline, client };
        // Every client may have a lease, but not every client may read the keys.
        store.get("", Duration::ZERO)?;
        Ok(store)
    }

    fn ask(&self, path: &str, request: &Value, timeout: Duration) -> Result<Value, StoreError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let until = Instant::now() + timeout.max(left).max(Duration::from_secs(1));
        let mut last = String::new();
        // A server may start again, and a cluster elect a leader, while the job starts.
        let answer = poll(left, || {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            match self.client.call(path, request, left) {
                Err(Problem::NoAnswer(why)) => {
                    last = why;
                    Ok(None)
                }
                answer => answer.map(Some).map_err(failed),
            }
        })?;
        answer.ok_or_else(|| failed(Problem::NoAnswer(last)))
    }

    fn key(&self, key: &str) -> String {
        encoded(format!("{}{key}", self.prefix).as_bytes())
    }

    fn put(&self, key: &str, value: &[u8]) -> Value {
        json!({"key": key, "value": encoded(value), "lease": self.lease})
    }
}

fn client(url: &EtcdUrl, deadline: Instant) -> Result<Client, StoreError> {
    if !url.tls {
        return Ok(Client::new(url));
    }
    // The certificates of the system's authorities are files, which may block.
    let address = url.clone();
    sys::by_deadline(
        format!("read certificates for {url}"),
        deadline,
        "the file system of the system's certificates does not answer",
        move || Ok(Client::new(&address)),
        StoreError::io("reading the system's certificates"),
    )
}

/// What to do about a refusal, by a part of etcd's message.
const ADVICE: [(&str, &str); 4] = [
    ("authentication failed", "; check the user and the password in the store's URL"),
    ("user name is empty", "; give a user and a password in the store's URL: etcd://user:password@host:port"),
    ("permission denied", "; give the user a role that may read and write the prefix of the store's URL"),
    ("too large", "; start etcd with a larger --max-request-bytes, or use another store for this number of ranks"),
];

fn failed(problem: Problem) -> StoreError {
    let what = match problem {
        Problem::Foreign(what) => return StoreError::Foreign(format!("{what}; the server is not etcd 3.4 or later")),
        Problem::NoAnswer(what) => what,
        Problem::Refused(what) => {
            let advice = ADVICE.iter().find(|(part, _)| what.contains(part)).map_or("", |(_, advice)| advice);
            format!("the server refuses: {what}{advice}")
        }
    };
    StoreError::io("asking the server")(io::Error::other(what))
}

/// Returns the value in an answer to a range of one key.
fn value_in(range: &Value) -> Result<Option<Vec<u8>>, StoreError> {
    range["kvs"].get(0).map(|found| decoded(&found["value"]).map_err(failed)).transpose()
}

impl Store for EtcdStore {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        check(key, value)?;
        self.ask("/v3/kv/put", &self.put(&self.key(key), value), timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let until = Instant::now() + timeout;
        let encoded_key = self.key(key);
        let mut pause = Duration::from_millis(1);
        loop {
            let range = self.ask("/v3/kv/range", &json!({"key": encoded_key}), timeout)?;
            if let Some(value) = value_in(&range)? {
                return Ok(Some(value));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let revision = range["header"]["revision"].as_str().and_then(|text| text.parse::<i64>().ok());
            let watches = revision.filter(|_| left >= SHORT);
            if watches.is_some_and(|revision| self.client.watch(format!("{}{key}", self.prefix).as_bytes(), revision, left)) {
                continue;
            }
            // Where no watch is possible, the key is asked for at growing intervals.
            std::thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
            pause = (pause * 3 / 2).min(Duration::from_millis(100));
        }
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check(key, value)?;
        let encoded_key = self.key(key);
        let request = json!({
            "compare": [{"key": encoded_key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": self.put(&encoded_key, value)}],
            "failure": [{"request_range": {"key": encoded_key}}],
        });
        let answer = self.ask("/v3/kv/txn", &request, timeout)?;
        if answer["succeeded"].as_bool() == Some(true) {
            return Ok(value.to_vec());
        }
        let there = value_in(&answer["responses"][0]["response_range"])?;
        there.ok_or_else(|| StoreError::Timeout { key: key.to_owned(), waited: timeout })
    }
}
