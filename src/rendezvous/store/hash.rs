//! A store inside one process, for ranks that are threads.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::kv::{Store, check};
use crate::error::StoreError;

#[derive(Default)]
struct Shared {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

/// The stores of this process that are open, by name.
static STORES: Mutex<Option<HashMap<String, std::sync::Weak<Shared>>>> = Mutex::new(None);

pub(super) struct HashStore {
    name: String,
    shared: Arc<Shared>,
}

impl HashStore {
    pub(super) fn open(name: &str) -> HashStore {
        let mut stores = STORES.lock();
        let stores = stores.get_or_insert_default();
        stores.retain(|_, store| store.strong_count() > 0);
        let shared = stores.get(name).and_then(std::sync::Weak::upgrade).unwrap_or_default();
        stores.insert(name.to_owned(), Arc::downgrade(&shared));
        HashStore { name: name.to_owned(), shared }
    }
}

impl Store for HashStore {
    fn is_private(&self) -> bool {
        true
    }

    fn url(&self) -> String {
        format!("hash://{}", self.name)
    }

    fn set(&self, key: &str, value: &[u8], _: Duration) -> Result<(), StoreError> {
        check(key, value)?;
        self.shared.values.lock().insert(key.to_owned(), value.to_vec());
        self.shared.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let deadline = Instant::now() + timeout;
        let mut values = self.shared.values.lock();
        while !values.contains_key(key) {
            if self.shared.changed.wait_until(&mut values, deadline).timed_out() {
                break;
            }
        }
        Ok(values.get(key).cloned())
    }

    fn claim(&self, key: &str, value: &[u8], _: Duration) -> Result<Vec<u8>, StoreError> {
        check(key, value)?;
        let holder = self.shared.values.lock().entry(key.to_owned()).or_insert_with(|| value.to_vec()).clone();
        self.shared.changed.notify_all();
        Ok(holder)
    }
}
