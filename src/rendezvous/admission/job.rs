//! What the communicators of a process keep of their job, so that newcomers can join it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::waiting_list::{WaitingList, WaitingNewcomer};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::network::identity::Identity;
use crate::rendezvous::store::{Store, StoreUrl};
use crate::rendezvous::store_source::StoreSource;
use crate::timeouts::{LIST_LIFETIME, LIST_REOPENING, LIST_RETRY};

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
    /// Whether this process has tried to open a list.
    was_opened: AtomicBool,
    /// When a list could not be opened, and why.
    failed: Mutex<Option<(Instant, Error)>>,
    /// How many communicators this process has made of the job.
    communicators: AtomicUsize,
    /// Whether the last of them had failed when it was dropped. Other ranks may go on then.
    ended_by_failure: AtomicBool,
    list_lifetime: Duration,
    /// A forked child does not close the list.
    owner: u32,
}

impl Job {
    pub(crate) fn new(given: Identity, settings: Settings, source: StoreSource) -> Job {
        Job {
            given,
            settings,
            source,
            identity: OnceLock::new(),
            list: Mutex::default(),
            was_opened: AtomicBool::new(false),
            failed: Mutex::default(),
            communicators: AtomicUsize::new(0),
            ended_by_failure: AtomicBool::new(false),
            list_lifetime: LIST_LIFETIME,
            owner: std::process::id(),
        }
    }

    /// Replaces lists after this time.
    pub(crate) fn list_lifetime(mut self, list_lifetime: Duration) -> Job {
        self.list_lifetime = list_lifetime;
        self
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
    /// first if there is none. Replaces an old one in which it has found none.
    pub(crate) fn look(&self, ranks: usize, deadline: Instant) -> Result<Vec<WaitingNewcomer>> {
        let mut list = self.list.lock();
        if let Some(current) = list.as_mut() {
            match current.look(ranks, &self.settings) {
                Ok(found) if found.is_empty() && current.age() >= self.list_lifetime => {}
                Ok(found) => return Ok(found),
                Err(error) => {
                    // The next growth opens the store again.
                    *list = None;
                    return Err(error);
                }
            }
        }
        // A file has one owner at a time.
        let former = list.take().map(|former| (former.store().clone(), former.place));
        let mut opened = self.open_list(former, deadline)?;
        let found = opened.look(ranks, &self.settings)?;
        *list = Some(opened);
        Ok(found)
    }

    /// Opens a list, in the store of the former one if there was one.
    fn open_list(&self, former: Option<(Arc<dyn Store>, Option<StoreUrl>)>, deadline: Instant) -> Result<WaitingList> {
        let mut failed = self.failed.lock();
        if let Some((_, error)) = failed.as_ref().filter(|(at, _)| at.elapsed() < LIST_RETRY) {
            return Err(error.clone());
        }
        let is_first = !self.was_opened.swap(true, Ordering::Relaxed);
        let deadline = if is_first { deadline } else { deadline.min(Instant::now() + LIST_REOPENING) };
        let opened = match former.filter(|(_, place)| is_kept(place.as_ref())) {
            Some(former) => Ok(former),
            None => self.open_store(true, deadline),
        };
        let opened = opened.and_then(|(store, place)| WaitingList::open(store, place, self.identity(), self.given.has_secret()));
        *failed = opened.as_ref().err().map(|error| (Instant::now(), error.clone()));
        let opened = opened?;
        self.keep(opened.identity().clone());
        Ok(opened)
    }

    /// Gives up the list after a growth that failed: the next [`Job::look`] opens another, in which
    /// the newcomers that live take places.
    pub(crate) fn reopen(&self) {
        *self.list.lock() = None;
    }

    /// Tells newcomers that they are admitted, on rank 0 of a communicator of `ranks` ranks.
    pub(crate) fn admit(&self, newcomers: &[WaitingNewcomer], growth: u64, ranks: usize, deadline: Instant) -> Result<()> {
        match &*self.list.lock() {
            Some(list) => list.admit(newcomers, growth, ranks, deadline),
            None if newcomers.is_empty() => Ok(()),
            None => Err(Error::NotGrown { why: "the waiting list was closed while newcomers were admitted".to_owned() }),
        }
    }

    /// Counts a communicator of the job, and returns its number.
    pub(crate) fn begins(&self) -> usize {
        self.communicators.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Notes how the communicator with this number ended. Newcomers are told that the job has ended,
    /// unless the last communicator had failed.
    pub(crate) fn ends(&self, number: usize, by_failure: bool) {
        if number == self.communicators.load(Ordering::Relaxed) {
            self.ended_by_failure.store(by_failure, Ordering::Relaxed);
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

/// Returns whether a store is used on for the next list. A server may have ended a connection that was
/// idle, so that store is opened again.
fn is_kept(place: Option<&StoreUrl>) -> bool {
    !matches!(place, Some(StoreUrl::Redis(_)))
}

impl Drop for Job {
    fn drop(&mut self) {
        let Some(list) = self.list.get_mut().take() else { return };
        if self.owner != std::process::id() {
            // The threads of the store are not in a forked child.
            std::mem::forget(list);
        } else if !*self.ended_by_failure.get_mut() {
            list.close();
        }
    }
}
