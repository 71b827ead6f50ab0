//! Values in a store that only the ranks of one run can have written.
//!
//! Each value follows an HMAC-SHA256 over the job, the run, the name of the value, the rank that
//! wrote it and the value. The key is derived from the secret. So a value of another run, name or
//! rank is an error. A store can still lose values. It could also return an older value of a name
//! that a rank wrote twice, but no rank does that.

use std::time::Duration;

use super::store::Store;
use crate::error::StoreError;
use crate::network::identity::{Identity, Key, MAC, Run};
use crate::types::Rank;
use crate::wire::{Writer, hexadecimal};

/// A store whose values the ranks of one run sign.
pub(super) struct SignedStore<'a> {
    store: &'a dyn Store,
    job: String,
    run: Run,
    key: Key,
}

impl<'a> SignedStore<'a> {
    pub(super) fn new(store: &'a dyn Store, identity: &Identity) -> SignedStore<'a> {
        SignedStore { store, job: identity.job().to_owned(), run: identity.run(), key: identity.store_key() }
    }

    /// Writes this rank's value.
    pub(super) fn set(&self, name: &str, writer: Rank, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.store.set(&self.name(name), &self.sign(name, writer, value), timeout)
    }

    /// Waits for a rank's value; `None` if there is none by the timeout.
    ///
    /// # Errors
    ///
    /// [`StoreError::Forged`] if `writer` did not write the value in this run.
    pub(super) fn get(&self, name: &str, writer: Rank, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let stored = self.store.get(&self.name(name), timeout)?;
        stored.map(|stored| self.checked(name, writer, &stored)).transpose()
    }

    /// Writes a value unless there is one; returns the value that the store then holds. Errors as
    /// for [`SignedStore::get`].
    pub(super) fn claim(&self, name: &str, writer: Rank, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        let stored = self.store.claim(&self.name(name), &self.sign(name, writer, value), timeout)?;
        self.checked(name, writer, &stored)
    }

    /// Returns the MAC, then the value.
    pub(super) fn sign(&self, name: &str, writer: Rank, value: &[u8]) -> Vec<u8> {
        [&self.key.sign(&[&self.about(name, writer), value])[..], value].concat()
    }

    /// Returns the value, if `writer` wrote it in this run.
    pub(super) fn open(&self, name: &str, writer: Rank, stored: &[u8]) -> Option<Vec<u8>> {
        let (mac, value) = stored.split_at_checked(MAC)?;
        self.key.is_signed(&[&self.about(name, writer), value], mac).then(|| value.to_vec())
    }

    fn checked(&self, name: &str, writer: Rank, stored: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.open(name, writer, stored).ok_or_else(|| StoreError::Forged { key: self.name(name) })
    }

    fn about(&self, name: &str, writer: Rank) -> Vec<u8> {
        let mut about = Writer::default();
        about.text(&self.job).bytes(&self.run).text(name).number(writer as u64);
        about.0
    }

    /// Returns the key of a value in the store, which may hold values of several runs.
    pub(super) fn name(&self, name: &str) -> String {
        in_run(&self.run, name)
    }
}

/// Returns the key of a run's value in a store.
pub(super) fn in_run(run: &Run, name: &str) -> String {
    format!("{}/{name}", hexadecimal(run))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::store::StoreUrl;

    const NOW: Duration = Duration::ZERO;

    fn hash_store(name: &str) -> Box<dyn Store> {
        let late = std::time::Instant::now() + Duration::from_secs(60);
        crate::rendezvous::store::open(&StoreUrl::Hash(name.to_owned()), true, &Identity::new("job", None), late).unwrap()
    }

    fn identity(job: &str, run: u8, secret: u8) -> Identity {
        Identity::new(job, None).of_run([run; 16], [secret; 32])
    }

    #[test]
    fn a_value_belongs_to_one_job_run_name_rank_and_secret() {
        let store = hash_store("signed values");
        let signed = SignedStore::new(&*store, &identity("job", 1, 7));
        signed.set("rank/3", 3, b"here", NOW).unwrap();
        assert_eq!(signed.get("rank/3", 3, NOW).unwrap().unwrap(), b"here");
        assert_eq!(signed.claim("rank/3", 3, b"there", NOW).unwrap(), b"here");
        let stored = store.get(&signed.name("rank/3"), NOW).unwrap().unwrap();
        for (other, name, writer) in [
            (identity("other", 1, 7), "rank/3", 3),
            (identity("job", 2, 7), "rank/3", 3),
            (identity("job", 1, 8), "rank/3", 3),
            (identity("job", 1, 7), "rank/4", 3),
            (identity("job", 1, 7), "rank/3", 4),
        ] {
            let other = SignedStore::new(&*store, &other);
            assert_eq!(other.open(name, writer, &stored), None, "{name} of {writer}");
            store.set(&other.name(name), &stored, NOW).unwrap();
            let error = other.get(name, writer, NOW).unwrap_err();
            assert!(matches!(&error, StoreError::Forged { key } if *key == other.name(name)), "{error}");
        }
        for at in 0..stored.len() {
            let mut changed = stored.clone();
            changed[at] ^= 1;
            assert_eq!(signed.open("rank/3", 3, &changed), None, "changed at {at}");
            assert_eq!(signed.open("rank/3", 3, &stored[..at]), None, "cut at {at}");
        }
    }
}
