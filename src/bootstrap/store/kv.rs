//! The trait of all stores.

use std::time::Duration;

use crate::error::StoreError;

/// The length of the longest key and of the largest value, in bytes.
pub(super) const LONGEST_KEY: usize = 256;
pub(super) const LARGEST_VALUE: usize = 16 << 20;

/// A key-value store that ranks share. Bring your own with [`crate::Builder::store_object`].
///
/// Every call ends by its timeout. Keys are at most 256 bytes, values at most 16 MiB.
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
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError>;

    /// Waits for a key; `None` if it does not exist by the timeout.
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError>;

    /// Sets a key unless it exists; returns the value that it then has. The default is not atomic:
    /// it sets the key in any case, and then a rank that is started twice is noticed later.
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.set(key, value, timeout)?;
        Ok(value.to_vec())
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
