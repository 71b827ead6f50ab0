//! What the communicators of a process keep of their job, so that newcomers can join it.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use super::waiting_list::{Waiting, WaitingList};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::store::{Store, StoreUrl};
use crate::bootstrap::store_source::StoreSource;
use crate::config::Settings;
use crate::error::Result;

/// What a process keeps of its job after the start.
pub(crate) struct Job {
    /// Before the start: the name of the job, and the secret that the ranks were given.
    given: Identity,
    pub(crate) settings: Settings,
    source: StoreSource,
    /// The identity of the run, with its secret. A rank alone has none until it opens a list.
    identity: OnceLock<Identity>,
    /// Rank 0's, once it has called `grow`.
    list: Mutex<Option<WaitingList>>,
    /// A forked child does not close the list.
    owner: u32,
}

impl Job {
    pub(crate) fn new(given: Identity, settings: Settings, source: StoreSource) -> Job {
        let (identity, list, owner) = (OnceLock::new(), Mutex::default(), std::process::id());
        Job { given, settings, source, identity, list, owner }
    }

    /// Opens the store for this process: rank 0 is its owner.
    pub(crate) fn open_store(&self, owner: bool, deadline: Instant) -> Result<(Arc<dyn Store>, Option<StoreUrl>)> {
        self.source.open(owner, &self.given, deadline)
    }

    /// Returns what this process knew of the job before the start.
    pub(crate) fn given(&self) -> &Identity {
        &self.given
    }

    /// Returns the identity with which this process starts a larger communicator.
    pub(crate) fn identity(&self) -> &Identity {
        self.identity.get().unwrap_or(&self.given)
    }

    /// Keeps the secret of the run.
    pub(crate) fn keep(&self, identity: Identity) {
        self.identity.get_or_init(|| identity);
    }

    /// Returns the newcomers that wait, on rank 0 of a communicator of `ranks` ranks. Opens the list
    /// first if there is none.
    pub(crate) fn look(&self, ranks: usize, deadline: Instant) -> Result<Vec<Waiting>> {
        let mut list = self.list.lock();
        if list.as_ref().is_none_or(WaitingList::is_due) {
            // A file has one owner at a time.
            let former = list.take().map(|former| (former.store().clone(), former.place));
            let (store, place) = match former.filter(|(_, place)| is_kept(place.as_ref())) {
                Some(former) => former,
                None => self.open_store(true, deadline)?,
            };
            let opened = WaitingList::open(store, place, self.identity(), self.given.has_secret())?;
            self.keep(opened.identity().clone());
            *list = Some(opened);
        }
        let Some(current) = list.as_mut() else { return Ok(Vec::new()) };
        let found = current.look(ranks, &self.settings);
        if found.is_err() {
            // The next growth opens the store again.
            *list = None;
        }
        found
    }

    /// Tells newcomers that they are admitted, on rank 0 of a communicator of `ranks` ranks.
    pub(crate) fn admit(&self, newcomers: &[Waiting], growth: u64, ranks: usize) -> Result<()> {
        match &*self.list.lock() {
            Some(list) => list.admit(newcomers, growth, ranks),
            None => Ok(()),
        }
    }

    /// Returns the store for a growth: that of the list on rank 0, otherwise a new connection.
    pub(crate) fn store_for_growth(&self, deadline: Instant) -> Result<(Arc<dyn Store>, Option<StoreUrl>)> {
        if let Some(list) = &*self.list.lock() {
            return Ok((list.store().clone(), list.place.clone()));
        }
        self.open_store(false, deadline)
    }
}

/// Returns whether a store is used on for the next list. A lease at etcd ends after a while, so that
/// store is opened again.
fn is_kept(place: Option<&StoreUrl>) -> bool {
    !matches!(place, Some(StoreUrl::Redis(_) | StoreUrl::Etcd(_)))
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(list) = self.list.get_mut().take().filter(|_| self.owner == std::process::id()) {
            list.close();
        }
    }
}
