//! From the start of a rank to a communicator that is connected.

use std::time::Instant;

use crate::config::Settings;
use crate::error::Result;
use crate::exec::Core;
use crate::failure::CommInfo;
use crate::network::fabric::Fabric;
use crate::network::identity::Identity;
use crate::rendezvous::{self, Connected, Start};
use crate::timeouts::LEAST_TO_CONNECT;
use crate::types::Member;

/// Connects this rank with the others. Also returns the identity of the run, with its secret.
pub(super) fn connect(start: &Start<'_>) -> Result<(Core, CommInfo, Identity)> {
    let Connected { fabric, identity, settings, members } = rendezvous::connect(start)?;
    let info = info(&fabric, members, start.settings);
    let left = start.deadline.saturating_duration_since(Instant::now()).max(LEAST_TO_CONNECT);
    let core = Core::start(fabric, settings, &CommInfo { timeout: left, ..info.clone() }, Instant::now())?;
    Ok((core, info, identity))
}

/// Returns what a communicator knows of its ranks.
pub(super) fn info(fabric: &Fabric, members: Vec<Member>, settings: &Settings) -> CommInfo {
    let Settings { timeout, start_timeout, .. } = *settings;
    CommInfo { rank: fabric.rank(), members, timeout, start_timeout, cancel: fabric.status().cancel.clone() }
}
