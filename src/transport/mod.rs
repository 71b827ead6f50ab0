//! Links that move bytes between two ranks, and know nothing of collectives.
//!
//! A [`Link`] is an ordered, reliable stream in each direction. Nothing on it blocks: the engine tries all links that matter,
//! and sleeps in [`Mesh::sleep`] when none of them moves.

pub(crate) mod memory;
mod mesh;
mod ring;
pub(crate) mod shm;
mod stripe;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
pub(crate) mod tls;

use std::io;

use mio::{Registry, Token};

use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;

pub(crate) use mesh::{Mesh, NoLink, Opener};

/// What every message is padded to, so that elements never straddle the end of a buffer and are always aligned.
pub(crate) const ALIGN: usize = 16;

/// One end of a stream of bytes to a peer, and of one from it.
///
/// Links keep no address of what is passed as memory. A stream's bytes are offered in order: what a call did not take is
/// offered again, at the front.
pub(crate) trait Link: Send {
    /// Takes bytes from the front of `parts`, laid end to end; returns how many. 0 means none now.
    ///
    /// # Safety
    ///
    /// The parts are readable until this returns.
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause>;

    /// As [`Link::send`], of a last message that comes behind all others. A link whose buffer is its own always has room for it.
    ///
    /// # Safety
    ///
    /// The message is readable until this returns.
    unsafe fn send_last(&mut self, message: RawSlice) -> Result<usize, Cause> {
        // SAFETY: passed on.
        unsafe { self.send(&[message]) }
    }

    /// Whether some of what [`Link::send`] did not take may have left all the same, so that nothing else can follow.
    fn has_begun(&self) -> bool {
        false
    }

    /// The bytes that have arrived, or some of them from the front, in place; at most `want`, but as many more may have been
    /// read from the system. Empty means none now.
    ///
    /// The address of the stream's n-th byte is n modulo [`ALIGN`], modulo [`ALIGN`].
    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause>;

    /// Drops bytes that [`Link::peek`] showed.
    fn consume(&mut self, count: usize);

    /// Moves bytes that have arrived to `into`; returns how many. 0 means none now.
    ///
    /// # Safety
    ///
    /// `into` is writable until this returns, and nobody else reads or writes it.
    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause>;

    /// Makes sure that [`Mesh::sleep`] will be woken when the link can send or receive again, whichever is asked for. False if
    /// it can already.
    fn arm(&mut self, _to_send: bool, _to_receive: bool) -> bool {
        // A socket's readiness is edge-triggered: whatever was tried and would have blocked wakes the mesh when it no longer would.
        true
    }

    /// The sleep is over, or was not begun. `event` says that this link ended it.
    fn disarm(&mut self, _event: bool) {}

    /// Has [`Mesh::sleep`] listen to this link.
    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()>;
}

/// What an I/O error says about the peer.
fn cause_of(error: &io::Error) -> Cause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => Cause::Closed,
        kind => Cause::Broken(kind),
    }
}

/// `WouldBlock` is no error here: nothing moved.
fn moved(result: io::Result<usize>) -> Result<usize, Cause> {
    match result {
        Ok(count) => Ok(count),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(cause_of(&error)),
    }
}
