//! Which store the ranks of a job use: the one that the program or the environment names, otherwise
//! the launcher's.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use super::launcher::{self, LOOKED_FOR, Launch, Rendezvous};
use super::store::tcp::TcpStore;
use super::store::{self, Store, StoreUrl};
use crate::config::process_env;
use crate::error::{Error, Result};
use crate::network::identity::Identity;
use crate::sys;

/// Which store the ranks of a job use.
pub(crate) struct StoreSource {
    /// The program's own store.
    pub(crate) object: Option<Arc<dyn Store>>,
    /// The URL that the program or the environment names.
    pub(crate) url: Option<String>,
    /// Another process serves it.
    pub(crate) is_served: bool,
    pub(crate) launch: Launch,
    /// The ports at which this process may listen.
    pub(crate) within: Option<RangeInclusive<u16>>,
}

impl StoreSource {
    /// Opens the store. Its owner is rank 0. Also returns the store's URL, if it helps to choose an
    /// address.
    pub(crate) fn open(&self, owner: bool, identity: &Identity, deadline: Instant) -> Result<(Arc<dyn Store>, Option<StoreUrl>)> {
        sys::try_out().map_err(Error::os("starting to connect"))?;
        if let Some(store) = &self.object {
            return Ok((store.clone(), None));
        }
        let StoreSource { is_served, launch, within, .. } = self;
        let place = match (&self.url, &launch.rendezvous) {
            (Some(url), _) => match StoreUrl::parse(url)? {
                StoreUrl::Env => launcher::env_store(&process_env)?,
                place => place,
            },
            (None, Rendezvous::Store(place)) => place.clone(),
            (None, Rendezvous::Ports { host, ports }) => {
                let ports = &launcher::ports_within(ports, within.as_ref());
                let store = TcpStore::open_any(host, ports, owner, identity, deadline)?;
                return Ok((Arc::new(store), Some(StoreUrl::Tcp { host: host.clone(), port: ports[0] })));
            }
            (None, Rendezvous::Unknown { .. }) if launch.world_size == 0 => {
                let why = "a newcomer has to be told the store of the job: set KOLO_STORE, or Builder::store";
                return Err(Error::setting("join", "true", why));
            }
            (None, Rendezvous::Unknown { advice }) => {
                let found = format!(
                    "{} says rank {} of {}, but no store is known where they find each other: {advice}",
                    launch.launcher, launch.rank, launch.world_size
                );
                return Err(Error::NoLauncher { found, looked_for: LOOKED_FOR.to_owned() });
            }
        };
        if let (StoreUrl::Tcp { host, port: 0 }, true, Some(within)) = (&place, owner && !is_served, within) {
            let store = TcpStore::open_any(host, &within.clone().collect::<Vec<_>>(), true, identity, deadline)?;
            crate::log::warn!(url = store.url(), "rank 0 has picked the port of the store; give this URL to the other ranks");
            return Ok((Arc::new(store), Some(place)));
        }
        let store = store::open(&place, owner && !is_served, identity, deadline)?;
        Ok((store.into(), Some(place)))
    }

    /// Uses the port that this process has picked for the store, when it opens the store again.
    pub(crate) fn keep_port(&mut self, store: &dyn Store, place: Option<&StoreUrl>) {
        if matches!(place, Some(StoreUrl::Tcp { port: 0, .. })) {
            self.url = Some(store.url());
        }
    }
}
