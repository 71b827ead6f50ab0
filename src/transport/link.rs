//! The trait of all links.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Registry, Token};

use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::trace::Traffic;

/// The multiple of bytes to which every message is padded, so that elements are aligned and never
/// straddle the end of a buffer.
pub(crate) const ALIGN: usize = 16;

/// One end of a stream of bytes to a peer, and of one from it.
///
/// Links keep no address of memory that is passed to them. The caller offers a stream's bytes in
/// order: bytes that a call did not take come first in the next call.
pub(crate) trait Link: Send {
    /// Sends bytes from the front of `parts`, laid end to end; returns how many. 0 means none now.
    ///
    /// # Safety
    ///
    /// The parts are readable until this returns.
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause>;

    /// As [`Link::send`], but takes all bytes or none; returns whether it took them. A link may refuse
    /// although it has room.
    ///
    /// # Safety
    ///
    /// As for [`Link::send`].
    unsafe fn send_whole(&mut self, _parts: &[RawSlice]) -> Result<bool, Cause> {
        Ok(false)
    }

    /// Returns the most parts of a call for which [`Link::send`] of several messages at once is quicker than
    /// one after the other; 0 if it is not.
    fn most_parts(&self) -> usize {
        0
    }

    /// Sends a last message, after all others, as [`Link::send`] does. A link with its own buffer
    /// always has room for it.
    ///
    /// # Safety
    ///
    /// The message is readable until this returns.
    unsafe fn send_last(&mut self, message: RawSlice) -> Result<usize, Cause> {
        // SAFETY: the caller vouches for the message.
        unsafe { self.send(&[message]) }
    }

    /// Returns whether bytes that the link did not take may have been sent all the same, so that no
    /// other bytes can follow.
    fn has_begun(&self) -> bool {
        false
    }

    /// Returns bytes that have arrived, from the front and in place, at most `want`. More may have
    /// been read from the system. Empty means none now.
    ///
    /// The byte at stream offset n is at an address congruent to n modulo [`ALIGN`].
    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause>;

    /// Drops bytes that [`Link::peek`] returned.
    fn consume(&mut self, count: usize);

    /// Moves bytes that have arrived to `into`; returns how many. 0 means none now.
    ///
    /// Bytes that come later in the stream may already lie behind those. So the next call goes on
    /// behind them in the same memory, until all of `into` has arrived.
    ///
    /// # Safety
    ///
    /// `into` is writable until this returns, and no other thread accesses it.
    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause>;

    /// Arranges that [`Mesh::sleep`](super::Mesh::sleep) is woken when the link can send or receive
    /// again, as requested. Returns false if it can already.
    fn arm(&mut self, _to_send: bool, _to_receive: bool) -> bool {
        // A socket's readiness is edge-triggered: a call that would have blocked wakes the mesh
        // when it no longer would.
        true
    }

    /// Returns how long until another call may get further even if nothing is woken.
    fn left(&self) -> Option<Duration> {
        None
    }

    /// Ends [`Link::arm`], after a sleep or without one. `event` says that this link ended the
    /// sleep.
    fn disarm(&mut self, _event: bool) {}

    /// Returns what kind of link this is, and its counters, if it counts.
    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        None
    }

    /// Returns whether the program has left the link's descriptors open. Their numbers may be those of
    /// its files otherwise.
    fn is_intact(&self) -> bool {
        true
    }

    /// Registers the link, so that its events end [`Mesh::sleep`](super::Mesh::sleep).
    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()>;
}

/// Returns what an I/O error says about the peer.
pub(crate) fn cause_of(error: &io::Error) -> Cause {
    if is_end_of_peer(error) { Cause::Closed } else { Cause::Broken(error.kind()) }
}

/// Returns whether an I/O error says that the peer has closed the connection, or has ended.
pub(crate) fn is_end_of_peer(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof)
}

/// Returns how many bytes a call sent. `WouldBlock` is 0, and not an error.
pub(super) fn sent(result: io::Result<usize>) -> Result<usize, Cause> {
    match result {
        Ok(count) => Ok(count),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(cause_of(&error)),
    }
}

/// Returns how many bytes a call received, as [`sent`] does. A count of 0 is the end of the stream.
pub(super) fn received(result: io::Result<usize>) -> Result<usize, Cause> {
    match result {
        Ok(0) => Err(Cause::Closed),
        other => sent(other),
    }
}
