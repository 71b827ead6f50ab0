//! The store, whose calls wait and end by their timeouts.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::log::{Log, Look};
use crate::error::StoreError;
use crate::network::identity::random;
use crate::rendezvous::store::kv::{Store, check};
use crate::sys::{self, Helper};
use crate::timeouts::{LONGEST_FILE_PAUSE, LONGEST_FILE_PAUSE_OF_RANK_0, SHARED_FILE_SYSTEM, SHORTEST_FILE_PAUSE};

/// A rank's access to the file. The rank's thread waits and checks the deadline; the helper thread
/// calls the file system.
pub(in crate::rendezvous::store) struct FileStore {
    url: String,
    is_owner: bool,
    log: Arc<Mutex<Log>>,
    helper: Arc<Helper>,
    /// The deadline of the start. Until then the file system may be silent.
    deadline: Instant,
    /// A call to the file system has missed its deadline. Later calls do not wait for it again.
    is_hung: AtomicBool,
    pause: Mutex<Duration>,
}

impl FileStore {
    pub(in crate::rendezvous::store) fn open(
        path: &Path,
        owner: bool,
        job: &str,
        deadline: Instant,
    ) -> Result<FileStore, StoreError> {
        let url = format!("file://{}", path.display());
        let helper = Helper::of(&url).map_err(StoreError::io("starting a helper thread"))?;
        let store = FileStore {
            url,
            is_owner: owner,
            log: Arc::new(Mutex::new(Log::new(path, job))),
            helper,
            deadline,
            is_hung: AtomicBool::new(false),
            pause: Mutex::new(SHORTEST_FILE_PAUSE),
        };
        if owner {
            store.poll(deadline.saturating_duration_since(Instant::now()), Log::start)?;
        }
        Ok(store)
    }

    /// Calls the file system on the helper thread.
    fn call<T: Send + 'static>(
        &self,
        timeout: Duration,
        call: impl FnOnce(&mut Log) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let deadline = match self.is_hung.load(Ordering::Relaxed) {
            true => began,
            false => self.deadline.max(began + timeout.max(SHARED_FILE_SYSTEM)),
        };
        let log = self.log.clone();
        let result = self.helper.call(deadline, move || call(&mut log.lock()));
        self.is_hung.store(result.is_none(), Ordering::Relaxed);
        result.unwrap_or_else(|| Err(StoreError::Hung { waited: began.elapsed() }))
    }

    /// Calls `look` until it returns an answer or the timeout has passed, at growing intervals.
    fn poll<T: Send + 'static>(
        &self,
        timeout: Duration,
        look: impl Fn(&mut Log) -> Result<Look<T>, StoreError> + Clone + Send + 'static,
    ) -> Result<Option<T>, StoreError> {
        let deadline = Instant::now() + timeout;
        let mut has_waited = false;
        loop {
            let problem = match self.call(timeout, look.clone())? {
                Look::Found(answer) => {
                    if has_waited {
                        *self.pause.lock() = SHORTEST_FILE_PAUSE;
                    }
                    return Ok(Some(answer));
                }
                Look::NotYet(problem) => problem,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return problem.map_or(Ok(None), Err);
            }
            let mut pause = self.pause.lock();
            // The pause is random, so that ranks that start together do not read together.
            std::thread::sleep(pause.mul_f64(0.5 + f64::from(random()[0]) / 256.0).min(left));
            *pause = (*pause * 3 / 2).min(if self.is_owner { LONGEST_FILE_PAUSE_OF_RANK_0 } else { LONGEST_FILE_PAUSE });
            has_waited = true;
        }
    }

    /// Appends a record, unless `keep` is set and the key exists; returns the value that the key
    /// then has.
    fn append(&self, key: &str, value: &[u8], keep: bool, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check(key, value)?;
        let (key, value): (Arc<str>, Arc<[u8]>) = (key.into(), value.into());
        let appended = self.poll(timeout, move |log| log.append(&key, &value, keep))?;
        appended.ok_or_else(|| StoreError::Unreachable { waited: timeout, last: "rank 0 has not started the file".to_owned() })
    }
}

impl Store for FileStore {
    /// Only the user that the ranks run as can read the file, where the system has file
    /// permissions.
    fn is_private(&self) -> bool {
        sys::has_file_permissions()
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.append(key, value, false, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let key: Arc<str> = key.into();
        self.poll(timeout, move |log| log.value(&key))
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.append(key, value, true, timeout)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if !self.is_owner {
            return;
        }
        let log = self.log.clone();
        let patience = if self.is_hung.load(Ordering::Relaxed) { Duration::ZERO } else { SHARED_FILE_SYSTEM };
        if self.helper.call(Instant::now() + patience, move || log.lock().finish()).is_none() {
            crate::log::warn!(store = self.url, "the file system does not answer; the file of the store may be left behind");
        }
    }
}
