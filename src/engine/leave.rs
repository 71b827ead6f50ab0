//! The last message to each peer.

use std::time::Instant;

use super::frame::{Frame, Kind};
use super::state::Engine;
use crate::buffer::RawSlice;
use crate::timeouts::LAST_MESSAGES;
use crate::types::{Descriptor, Rank};

impl Engine {
    /// Tells peers that this rank takes part no longer: it leaves after operation `last_seq`, or an
    /// operation has `failed`. Informs all peers with which there is a link, and the `callers` that
    /// have just connected. A rank that leaves waits up to [`LAST_MESSAGES`] for room in the links.
    pub(crate) fn leave(&mut self, last_seq: u64, failed: bool, callers: &[Rank]) {
        let descriptor = Descriptor { seq: last_seq, ..Descriptor::nothing() };
        let kind = if failed { Kind::Revoked } else { Kind::Goodbye };
        let bytes = Frame { kind, len: 0, descriptor: descriptor.encode() }.encode();
        for &caller in callers {
            if let Err(why) = self.mesh.link(caller) {
                crate::log::debug!(?why, caller, "cannot tell a rank that has just connected that this rank leaves");
            }
        }
        // The peers that have not got all of the message, and how much of it each has got.
        let mut rest: Vec<(Rank, usize)> = self.mesh.open_links().map(|(peer, _)| (peer, 0)).collect();
        let until = Instant::now() + LAST_MESSAGES;
        loop {
            rest.retain_mut(|(peer, sent)| !self.has_sent(*peer, &bytes, sent));
            let left = until.saturating_duration_since(Instant::now());
            if failed || rest.is_empty() || left.is_zero() {
                return;
            }
            let waits: Vec<_> = rest.iter().map(|&(peer, _)| (peer, true, false)).collect();
            if self.mesh.sleep(waits.iter().copied(), left).is_err() {
                return;
            }
        }
    }

    /// Sends more of the last message, of which `sent` bytes were sent. Returns whether nothing is
    /// left to do for this peer.
    fn has_sent(&mut self, peer: Rank, bytes: &[u8], sent: &mut usize) -> bool {
        let Ok(Some(link)) = self.mesh.link(peer) else { return true };
        // SAFETY: `bytes` is borrowed for the call.
        match unsafe { link.send_last(RawSlice::of(&bytes[*sent..])) } {
            Ok(count) => {
                *sent += count;
                *sent >= bytes.len()
            }
            Err(_) => true,
        }
    }
}
