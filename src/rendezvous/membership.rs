//! The rendezvous of one rank.

use std::net::IpAddr;
use std::time::Instant;

use super::collect::collect;
use super::join::join;
use super::store_keys::refusal_read_by;
use crate::config::SharedSettings;
use crate::error::Result;
use crate::network::identity::Identity;
use crate::network::peer_info::PeerInfo;
use crate::rendezvous::endpoint::Endpoint;
use crate::rendezvous::peer_table::PeerTable;
use crate::rendezvous::signed::SignedStore;
use crate::rendezvous::start::Start;
use crate::timeouts::REASON_GRACE;

/// What a rank knows after the rendezvous.
pub(crate) struct Membership {
    pub(crate) endpoint: Endpoint,
    /// With the run and its secret.
    pub(crate) identity: Identity,
    pub(crate) peers: Vec<PeerInfo>,
    /// Rank 0's.
    pub(crate) settings: SharedSettings,
}

/// Meets the other ranks. Listens to them at `ip` as soon as this rank knows the secret.
pub(crate) fn gather_members(start: &Start<'_>, ip: IpAddr, began: Instant) -> Result<Membership> {
    let (endpoint, identity, table) = if start.rank == 0 { collect(start, ip, began)? } else { join(start, ip, began)? };
    if let (PeerTable::Refused(_), true) = (&table, start.rank != 0) {
        let signed = SignedStore::new(start.store, &identity);
        start.at_store(signed.set(&refusal_read_by(start.rank), start.rank, &[], REASON_GRACE))?;
    }
    match table {
        PeerTable::Members { peers, settings } => Ok(Membership { endpoint, identity, peers, settings }),
        PeerTable::Refused(refusal) => Err(refusal.error(&start.store.url())),
    }
}
