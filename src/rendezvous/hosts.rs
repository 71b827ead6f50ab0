//! Which ranks share a host, when not all do.

use std::time::{Duration, Instant};

use super::store_keys::{HOSTS, host_of};
use crate::error::{Error, Result, StoreError};
use crate::network::identity::Identity;
use crate::rendezvous::peer_table::OwnFailure;
use crate::rendezvous::signed::SignedStore;
use crate::rendezvous::start::Start;
use crate::timeouts::{REASON_GRACE, RUN_INFO_CHECK};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// Returns, for each rank, the lowest rank that shares memory with it. `together` are the ranks on
/// this rank's host.
///
/// The lowest rank of each host writes which ranks are on it. Rank 0 reads that and writes the
/// hosts of all ranks.
pub(crate) fn exchange_hosts(start: &Start<'_>, identity: &Identity, together: &[Rank]) -> Result<Vec<usize>> {
    let signed = SignedStore::new(start.store, identity);
    let patience = start.left().max(RUN_INFO_CHECK);
    let timed_out = |key: &str| -> Error {
        let problem = StoreError::Timeout { key: signed.name(key), waited: patience };
        problem.at(start.store.url())
    };
    if together[0] == start.rank {
        start.at_store(signed.set(&host_of(start.rank), start.rank, &encode(together), patience))?;
    }
    if start.rank != 0 {
        let bytes = wait_for(start, &signed, HOSTS, 0, REASON_GRACE)?;
        if let Some(failure) = bytes.as_ref().and_then(|bytes| OwnFailure::decode(bytes)) {
            return Err(failure.error());
        }
        let hosts = bytes.and_then(|bytes| decode(&bytes)).filter(|hosts| hosts.len() == start.world_size);
        return hosts.ok_or_else(|| timed_out(HOSTS));
    }
    let mut hosts: Vec<Option<usize>> = vec![None; start.world_size];
    for rank in 0..start.world_size {
        // A rank that no lower rank has named is the lowest of its host.
        if hosts[rank].is_none() {
            let bytes = match wait_for(start, &signed, &host_of(rank), rank, Duration::ZERO) {
                Ok(bytes) => bytes.ok_or_else(|| timed_out(&host_of(rank)))?,
                Err(Absent::Store(error)) => return Err(error),
                Err(Absent::Ended(failure)) => {
                    start.at_store(signed.set(HOSTS, 0, &failure.encode(), REASON_GRACE))?;
                    return Err(failure.error());
                }
            };
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

/// Why a rank's value does not come.
enum Absent {
    Store(Error),
    /// The rank has ended.
    Ended(OwnFailure),
}

impl From<Absent> for Error {
    fn from(absent: Absent) -> Error {
        match absent {
            Absent::Store(error) => error,
            Absent::Ended(failure) => failure.error(),
        }
    }
}

/// Waits for a rank's value, for so long after the deadline at most; `None` if it has not come by
/// then.
fn wait_for(
    start: &Start<'_>,
    signed: &SignedStore<'_>,
    key: &str,
    writer: Rank,
    grace: Duration,
) -> Result<Option<Vec<u8>>, Absent> {
    let until = Instant::now() + start.left().max(RUN_INFO_CHECK) + grace;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // Only the ranks of a growth know which ranks have ended.
        let patience = if start.absence.is_some() { left.min(RUN_INFO_CHECK) } else { left };
        let bytes = start.at_store(signed.get(key, writer, patience)).map_err(Absent::Store)?;
        if bytes.is_some() || Instant::now() >= until {
            return Ok(bytes);
        }
        if let Some(failure) = start.absence(writer) {
            return Err(Absent::Ended(failure));
        }
    }
}

fn encode(ranks: &[Rank]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.list(ranks, |writer, &rank| _ = writer.small(rank as u64));
    writer.0
}

fn decode(bytes: &[u8]) -> Option<Vec<Rank>> {
    Reader::new(bytes).list(|reader| usize::try_from(reader.small()?).ok())
}
