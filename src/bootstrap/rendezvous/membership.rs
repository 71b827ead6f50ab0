//! The rendezvous of one rank.

use std::net::IpAddr;
use std::time::Instant;

use super::collect::collect;
use super::join::join;
use super::store_keys::refusal_read_by;
use super::timing::GRACE;
use crate::bootstrap::endpoint::Endpoint;
use crate::bootstrap::identity::Identity;
use crate::bootstrap::peer_info::PeerInfo;
use crate::bootstrap::peer_table::PeerTable;
use crate::bootstrap::signed::SignedStore;
use crate::bootstrap::start::Start;
use crate::config::SharedSettings;
use crate::error::Result;

/// What a rank knows after the rendezvous.
pub(in crate::bootstrap) struct Membership {
    pub(in crate::bootstrap) endpoint: Endpoint,
    /// With the run and its secret.
    pub(in crate::bootstrap) identity: Identity,
    pub(in crate::bootstrap) peers: Vec<PeerInfo>,
    /// Rank 0's.
    pub(in crate::bootstrap) settings: SharedSettings,
}

/// Meets the other ranks. Listens to them at `ip` as soon as this rank knows the secret.
pub(in crate::bootstrap) fn gather_members(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<Membership> {
    let (endpoint, identity, table) = if start.rank == 0 { collect(start, ip, began)? } else { join(start, ip, began)? };
    if let (PeerTable::Refused(_), true) = (&table, start.rank != 0) {
        let signed = SignedStore::new(start.store, &identity);
        start.at_store(signed.set(&refusal_read_by(start.rank), start.rank, &[], GRACE))?;
    }
    match table {
        PeerTable::Members { peers, settings } => Ok(Membership { endpoint, identity, peers, settings }),
        PeerTable::Refused(refusal) => Err(refusal.error(&start.store.url())),
    }
}
