//! Which ranks share a host, when not all do.

use super::store_keys::{HOSTS, host_of};
use super::timing::{GRACE, POLL_INTERVAL};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::signed::SignedStore;
use crate::bootstrap::start::Start;
use crate::error::{Error, Result, StoreError};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// Returns, for each rank, the lowest rank that shares memory with it. `together` are the ranks on
/// this rank's host.
///
/// The lowest rank of each host writes which ranks are on it. Rank 0 reads that and writes the
/// hosts of all ranks.
pub(in crate::bootstrap) fn exchange_hosts(start: &Start<'_>, identity: &Identity, together: &[Rank]) -> Result<Vec<usize>> {
    let signed = SignedStore::new(start.store, identity);
    let patience = start.left().max(POLL_INTERVAL);
    let timed_out = |key: &str| -> Error {
        let problem = StoreError::Timeout { key: signed.name(key), waited: patience };
        problem.at(start.store.url())
    };
    if together[0] == start.rank {
        start.at_store(signed.set(&host_of(start.rank), start.rank, &encode(together), patience))?;
    }
    if start.rank != 0 {
        let bytes = start.at_store(signed.get(HOSTS, 0, start.left().max(POLL_INTERVAL) + GRACE))?;
        let hosts = bytes.and_then(|bytes| decode(&bytes)).filter(|hosts| hosts.len() == start.world_size);
        return hosts.ok_or_else(|| timed_out(HOSTS));
    }
    let mut hosts: Vec<Option<usize>> = vec![None; start.world_size];
    for rank in 0..start.world_size {
        // A rank that no lower rank has named is the lowest of its host.
        if hosts[rank].is_none() {
            let bytes = start.at_store(signed.get(&host_of(rank), rank, start.left().max(POLL_INTERVAL)))?;
            let bytes = bytes.ok_or_else(|| timed_out(&host_of(rank)))?;
            for member in decode(&bytes).unwrap_or_default() {
                if let Some(host) = hosts.get_mut(member) {
                    *host = Some(rank);
                }
            }
        }
    }
    let hosts: Vec<usize> = hosts.into_iter().enumerate().map(|(rank, host)| host.unwrap_or(rank)).collect();
    start.at_store(signed.set(HOSTS, 0, &encode(&hosts), patience))?;
    Ok(hosts)
}

fn encode(ranks: &[Rank]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.list(ranks, |writer, &rank| _ = writer.number(rank as u64));
    writer.0
}

fn decode(bytes: &[u8]) -> Option<Vec<Rank>> {
    Reader::new(bytes).list(Reader::size)
}
