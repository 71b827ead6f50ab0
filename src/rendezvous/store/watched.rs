//! A store whose caller is asked, while it waits, whether to go on.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::kv::Store;
use crate::error::StoreError;
use crate::failure::wait_check;
use crate::timeouts::WATCHED_KEY;

/// A store for a thread that has a wait check. Once the check has said no, all requests fail.
pub(crate) struct WatchedStore {
    store: Arc<dyn Store>,
    has_stopped: AtomicBool,
}

impl WatchedStore {
    pub(crate) fn new(store: Arc<dyn Store>) -> WatchedStore {
        WatchedStore { store, has_stopped: AtomicBool::new(false) }
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.has_stopped.load(Ordering::Relaxed) {
            return Err(stopped(io::ErrorKind::Interrupted.into()));
        }
        check().inspect_err(|_| self.has_stopped.store(true, Ordering::Relaxed))
    }
}

/// Fails if the thread shall not go on waiting for a store.
pub(super) fn check() -> Result<(), StoreError> {
    wait_check::go_on().map_err(stopped)
}

fn stopped(error: io::Error) -> StoreError {
    StoreError::io("waiting for it")(error)
}

impl Store for WatchedStore {
    fn url(&self) -> String {
        self.store.url()
    }

    fn is_private(&self) -> bool {
        self.store.is_private()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.check()?;
        self.store.set(key, value, timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let until = Instant::now() + timeout;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            let found = self.store.get(key, left.min(WATCHED_KEY))?;
            if found.is_some() || left <= WATCHED_KEY {
                return Ok(found);
            }
        }
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.check()?;
        self.store.claim(key, value, timeout)
    }

    fn reconnect(&self, timeout: Duration) -> Result<bool, StoreError> {
        self.check()?;
        self.store.reconnect(timeout)
    }
}
