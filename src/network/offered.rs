//! What a process offers to those that watch the job.

use std::sync::Arc;
use std::time::Instant;

use super::attachment::{Attachment, AttachmentFile};
use crate::config::Settings;
use crate::error::Result;
use crate::failure::StatusBoard;
use crate::network::identity::Identity;
use crate::network::peer_info::PeerInfo;
use crate::observe::exporter::Exporter;
use crate::observe::exposition::Target;
use crate::sys;
use crate::timeouts::FILE_SYSTEM;
use crate::types::Rank;

/// What a process offers, until this is dropped.
pub(crate) struct Offered {
    _file: Option<AttachmentFile>,
    _exporter: Option<Exporter>,
}

impl Offered {
    /// Begins to offer what the settings ask for.
    ///
    /// # Errors
    ///
    /// Metrics cannot be served. Without a file for `kolo top`, the job runs all the same.
    pub(crate) fn begin(
        settings: &Settings,
        deadline: Instant,
        rank: Rank,
        identity: &Identity,
        peers: &[PeerInfo],
        board: &Arc<StatusBoard>,
    ) -> Result<Offered> {
        let before = ranks_before(rank, peers);
        let _file = if before == 0 { write_file(settings, deadline, rank, identity, peers) } else { None };
        let metrics = settings.metrics.as_ref();
        let target = Target { job: identity.job().to_owned(), host: peers[rank].host.clone(), rank };
        let _exporter = metrics.map(|address| Exporter::open(address, before, target, board.clone())).transpose()?;
        Ok(Offered { _file, _exporter })
    }
}

/// Returns how many ranks with lower numbers are on this rank's machine.
fn ranks_before(rank: Rank, peers: &[PeerInfo]) -> usize {
    let mine = &peers[rank];
    let is_here = |other: &&PeerInfo| match mine.machine() {
        // Hosts that the user declared do not matter: ports belong to the machine.
        Some(machine) => other.machine() == Some(machine),
        None => other.host == mine.host,
    };
    peers[..rank].iter().filter(is_here).count()
}

/// Writes the file by which `kolo top` finds the job.
fn write_file(
    settings: &Settings,
    deadline: Instant,
    rank: Rank,
    identity: &Identity,
    peers: &[PeerInfo],
) -> Option<AttachmentFile> {
    let folder = settings.top_dir.clone()?;
    let attachment = Attachment::new(identity, peers)?;
    let name = folder.display().to_string();
    let write = move || attachment.write(&folder, rank);
    let deadline = deadline.min(Instant::now() + FILE_SYSTEM);
    let written = sys::by_deadline(format!("write {name}"), deadline, sys::SILENT_FILE, write, |error| error);
    written
        .inspect_err(|error| crate::log::warn!(%error, folder = name, "cannot write the file by which `kolo top` finds the job"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::peer_info::sample;

    #[test]
    fn ranks_of_a_machine_are_counted() {
        let at = |rank, machine: &str, host: &str| PeerInfo {
            machine: format!("{machine} declared").trim_start_matches(" declared").to_owned(),
            host: host.to_owned(),
            ..sample(rank)
        };
        let peers = [at(0, "a", "h"), at(1, "b", "h"), at(2, "a", "h"), at(3, "", "h"), at(4, "", "i"), at(5, "a", "h")];
        let before: Vec<usize> = (0..peers.len()).map(|rank| ranks_before(rank, &peers)).collect();
        assert_eq!(before, [0, 0, 1, 3, 0, 2]);
    }
}
