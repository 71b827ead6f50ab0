//! How a process that is no rank reads the peer table. It writes nothing to the store.

use std::time::{Duration, Instant};

use super::store_keys::TABLE;
use crate::error::{Result, StoreError};
use crate::network::identity::Identity;
use crate::network::peer_info::PeerInfo;
use crate::rendezvous::peer_table::PeerTable;
use crate::rendezvous::run_info::{self, RunInfo, Source};
use crate::rendezvous::signed::SignedStore;
use crate::rendezvous::store::Store;

/// Returns the identity of the run in a store, and its ranks, after the rendezvous. `None` if there is
/// no run by the deadline, or if its rendezvous has not ended.
pub(crate) fn read_members(
    store: &dyn Store,
    identity: &Identity,
    deadline: Instant,
) -> Result<Option<(Identity, Vec<PeerInfo>)>> {
    let at_store = |problem: StoreError| problem.at(store.url());
    let left = || deadline.saturating_duration_since(Instant::now());
    let Some(announced) = store.get(run_info::NAME, left()).map_err(at_store)? else { return Ok(None) };
    let foreign = || at_store(StoreError::Foreign(format!("its value of {:?} is no run info", run_info::NAME)));
    let run_info = RunInfo::decode(&announced).ok_or_else(foreign)?;
    let identity = match (run_info.secret, identity.secret()) {
        (Source::Given { .. }, Some(secret)) => {
            let identity = identity.clone().of_run(run_info.run, secret);
            if !run_info.is_of(run_info::NAME, store, &identity) {
                return Err(at_store(StoreError::Forged { key: run_info::NAME.to_owned() }));
            }
            identity
        }
        (Source::Shared { secret }, None) => identity.clone().of_run(run_info.run, secret),
        // Without the secret nothing in the store can be trusted, and no rank answers.
        _ => return Err(at_store(StoreError::Secret)),
    };
    let signed = SignedStore::new(store, &identity);
    let Some(bytes) = signed.get(TABLE, 0, left().max(Duration::from_millis(1))).map_err(at_store)? else { return Ok(None) };
    match PeerTable::decode(&bytes) {
        Some(PeerTable::Members { peers, .. }) => Ok(Some((identity, peers))),
        Some(PeerTable::Refused(refusal)) => Err(refusal.error(&store.url())),
        None => Err(at_store(StoreError::Foreign("its peer table is of another version of kolo".to_owned()))),
    }
}
