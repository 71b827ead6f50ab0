//! The keys of a run in the store, all but the run info's.

use crate::types::Rank;

/// The table of all ranks.
pub(super) const TABLE: &str = "table";

/// The host of each rank.
pub(super) const HOSTS: &str = "hosts";

/// A rank's peer info.
pub(super) fn peer_info_of(rank: Rank) -> String {
    format!("rank/{rank}")
}

/// The peer info of a process whose rank another process has claimed: the other one may be of a
/// former run.
pub(super) fn standby_of(rank: Rank) -> String {
    format!("standby/{rank}")
}

/// A rank's public key.
pub(super) fn key_share_of(rank: Rank) -> String {
    format!("key_share/{rank}")
}

/// The secret, encrypted for a rank.
pub(super) fn secret_for(rank: Rank) -> String {
    format!("secret/{rank}")
}

/// The ranks on a rank's host.
pub(super) fn host_of(rank: Rank) -> String {
    format!("host/{rank}")
}

/// Present when a rank has read a refusal.
pub(super) fn refusal_read_by(rank: Rank) -> String {
    format!("heard/{rank}")
}
