//! The part of a store that one growth of a communicator uses.

use std::time::Duration;

use crate::error::StoreError;
use crate::rendezvous::store::Store;
use crate::wire::hexadecimal;

/// A store in which every key begins with the number of a growth.
pub(crate) struct Within<'a> {
    store: &'a dyn Store,
    prefix: String,
}

impl<'a> Within<'a> {
    pub(crate) fn new(store: &'a dyn Store, growth: u64) -> Within<'a> {
        Within { store, prefix: format!("growth-{}/", hexadecimal(&growth.to_le_bytes())) }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }
}

impl Store for Within<'_> {
    fn url(&self) -> String {
        self.store.url()
    }

    fn is_private(&self) -> bool {
        self.store.is_private()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.store.set(&self.key(key), value, timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(&self.key(key), timeout)
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.store.claim(&self.key(key), value, timeout)
    }
}
