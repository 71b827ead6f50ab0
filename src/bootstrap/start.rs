//! What a rank knows before the rendezvous.

use std::time::{Duration, Instant};

use super::identity::Identity;
use super::store::{Store, StoreUrl};
use crate::config::Settings;
use crate::error::{Result, StoreError};
use crate::sys;
use crate::types::Rank;

/// What a rank knows before the rendezvous.
pub(crate) struct Start<'a> {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) identity: Identity,
    pub(crate) store: &'a dyn Store,
    /// The URL of the store, if it helps to choose an address.
    pub(crate) store_url: Option<StoreUrl>,
    pub(crate) settings: &'a Settings,
    pub(crate) deadline: Instant,
}

impl Start<'_> {
    /// Returns this rank's host, for messages.
    pub(super) fn host(&self) -> String {
        self.settings.host.clone().unwrap_or_else(sys::hostname)
    }

    /// Returns this process, for messages.
    pub(super) fn process(&self) -> String {
        format!("process {} on {}", std::process::id(), self.host())
    }

    /// Returns the time until the deadline.
    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Adds the store's URL to an error of the store.
    pub(super) fn at_store<T>(&self, result: Result<T, StoreError>) -> Result<T> {
        result.map_err(|problem| problem.at(self.store.url()))
    }
}
