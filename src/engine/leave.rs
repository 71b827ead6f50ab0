//! The last message to each peer.

use std::time::Instant;

use super::frame::{Frame, Kind};
use super::receive::message;
use super::state::Engine;
use super::unexpected::Queue;
use crate::buffer::RawSlice;
use crate::error::shown::list;
use crate::timeouts::LAST_MESSAGES;
use crate::types::{Descriptor, Rank, Tag};

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
        if !failed {
            self.name_unreceived();
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

    /// Names the messages that have arrived and that no receive has taken.
    fn name_unreceived(&mut self) {
        let peers: Vec<Rank> = self.mesh.open_links().map(|(peer, _)| peer).collect();
        for peer in peers {
            let mut tags: Vec<Tag> = self.unexpected.of(peer).into_iter().flat_map(Queue::tags).collect();
            let mut messages = self.unexpected.of(peer).map_or(0, |queue| queue.count);
            let next = match (self.unexpected.coming(peer), self.mesh.link(peer)) {
                (Some(message), _) => Some(message.descriptor),
                (None, Ok(Some(link))) => {
                    let header = self.inboxes[peer].header(link, &mut false).ok().flatten();
                    header.and_then(|header| Some(message(header)?.0))
                }
                (None, _) => None,
            };
            if let Some(next) = next {
                messages += 1;
                tags.push(next.tag());
                tags.sort_unstable();
                tags.dedup();
            }
            if messages > 0 {
                let tags = list(&tags.into_iter().map(|tag| tag as usize).collect::<Vec<_>>());
                crate::log::warn!(
                    rank = peer,
                    messages,
                    tags,
                    "this rank leaves without having received these messages of a rank, and any behind them"
                );
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
