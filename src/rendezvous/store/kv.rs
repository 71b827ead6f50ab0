//! The trait of all stores.

use std::time::Duration;

use crate::error::StoreError;

/// The length of the longest key and of the largest value, in bytes.
pub(super) const LONGEST_KEY: usize = 256;
pub(super) const LARGEST_VALUE: usize = 16 << 20;

/// A key-value store that ranks share. Bring your own with [`crate::Builder::store_object`].
///
/// Every call ends by its timeout. Keys are at most 256 bytes, values at most 16 MiB.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Condvar, Mutex};
/// use std::time::Duration;
///
/// use kolo::{Communicator, Store, StoreError};
///
/// /// A store for ranks that are threads of one process.
/// #[derive(Default)]
/// struct Memory {
///     values: Mutex<HashMap<String, Vec<u8>>>,
///     changed: Condvar,
/// }
///
/// impl Store for Memory {
///     fn url(&self) -> String {
///         "memory".to_owned()
///     }
///
///     fn set(&self, key: &str, value: &[u8], _: Duration) -> Result<(), StoreError> {
///         self.values.lock().unwrap().insert(key.to_owned(), value.to_owned());
///         self.changed.notify_all();
///         Ok(())
///     }
///
///     fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
///         let values = self.values.lock().unwrap();
///         let is_missing = |values: &mut HashMap<String, Vec<u8>>| !values.contains_key(key);
///         let (values, _) = self.changed.wait_timeout_while(values, timeout, is_missing).unwrap();
///         Ok(values.get(key).cloned())
///     }
///
///     fn claim(&self, key: &str, value: &[u8], _: Duration) -> Result<Vec<u8>, StoreError> {
///         let mut values = self.values.lock().unwrap();
///         let first = values.entry(key.to_owned()).or_insert_with(|| value.to_owned()).clone();
///         self.changed.notify_all();
///         Ok(first)
///     }
/// }
///
/// # fn main() -> kolo::Result<()> {
/// let store = Arc::new(Memory::default());
/// let rank = |rank| Communicator::builder().store_object(store.clone()).rank(rank).world_size(2);
/// std::thread::scope(|scope| {
///     scope.spawn(|| rank(1).connect().unwrap().barrier().unwrap());
///     rank(0).connect()?.barrier()
/// })
/// # }
/// ```
pub trait Store: Send + Sync {
    /// Returns the name of the store for messages.
    fn url(&self) -> String;

    /// Returns whether only the ranks of the job can read and write the store. If so, ranks that
    /// were given no secret share one through it. Otherwise they agree on a secret that a process
    /// that only reads the store cannot learn; see [`crate::security`]. Rank 0's answer counts.
    fn is_private(&self) -> bool {
        false
    }

    /// Sets a key, whether or not it exists.
    ///
    /// # Errors
    ///
    /// The store did not take the value within the timeout: [`StoreError::Io`] with the reason.
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError>;

    /// Waits for a key; `None` if it does not exist by the timeout.
    ///
    /// # Errors
    ///
    /// The store failed: [`StoreError::Io`] with the reason. It is no error that the key does not
    /// exist.
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError>;

    /// Sets a key unless it exists; returns the value that it then has. The default is not atomic:
    /// it sets the key in any case, and then a rank that is started twice is noticed later.
    ///
    /// # Errors
    ///
    /// Those of [`Store::set`].
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.set(key, value, timeout)?;
        Ok(value.to_vec())
    }

    /// Connects again to a store that has closed the connection, because rank 0 will serve it again.
    /// Returns whether this kind of store can do so. A rank asks for it if it starts once more in the
    /// same process, and meets the store of the start before.
    ///
    /// # Errors
    ///
    /// The store is not served again within the timeout: [`StoreError::Unreachable`].
    fn reconnect(&self, timeout: Duration) -> Result<bool, StoreError> {
        _ = timeout;
        Ok(false)
    }
}

/// Checks the sizes of a key and a value.
pub(super) fn check(key: &str, value: &[u8]) -> Result<(), StoreError> {
    let too_large = |what, bytes, limit| Err(StoreError::TooLarge { what, bytes, limit });
    match (key.len(), value.len()) {
        (bytes, _) if bytes > LONGEST_KEY => too_large("a key", bytes, LONGEST_KEY),
        (_, bytes) if bytes > LARGEST_VALUE => too_large("a value", bytes, LARGEST_VALUE),
        _ => Ok(()),
    }
}
