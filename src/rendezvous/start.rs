//! What a rank knows before the rendezvous.

use std::time::{Duration, Instant};

use super::peer_table::OwnFailure;
use super::store::{Store, StoreUrl};
use crate::config::Settings;
use crate::error::{Result, StoreError};
use crate::network::identity::Identity;
use crate::sys;
use crate::types::Rank;

/// The most ranks. A larger world size is a mistake: rank 0 keeps a table of all ranks.
pub(crate) const MOST_RANKS: usize = 65_536;

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
    /// Returns why a rank will not come, if that is known. Only the ranks and newcomers of a
    /// communicator that grows know.
    pub(crate) absence: Option<&'a Absence<'a>>,
}

/// Returns what is known of a rank that will not come.
pub(crate) type Absence<'a> = dyn Fn(Rank) -> Option<OwnFailure> + Sync + 'a;

impl Start<'_> {
    /// Returns this rank's host, for messages.
    pub(super) fn host(&self) -> String {
        self.settings.host.clone().unwrap_or_else(sys::hostname)
    }

    /// Returns this process, for messages.
    pub(super) fn process(&self) -> String {
        format!("process {} on {}", std::process::id(), self.host())
    }

    /// Returns why a rank will not come, if that is known.
    pub(super) fn absence(&self, rank: Rank) -> Option<OwnFailure> {
        self.absence.and_then(|absence| absence(rank))
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
