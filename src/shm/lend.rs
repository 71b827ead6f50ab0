//! How a rank lends its registered buffers to its peers for one operation, borrows theirs, and
//! takes its own back after a failure.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flag_area::RankState;
use super::registered::Location;
use super::window::Window;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Result;
use crate::failure::OpContext;
use crate::sync::Ordering;
use crate::sys::Region;

/// How long a rank that has failed waits for the peers that write into its registered buffers.
const PATIENCE_WITH_WRITERS: Duration = Duration::from_millis(100);

/// How long it waits beyond that if its buffers cannot become private memory.
const LAST_PATIENCE_WITH_WRITERS: Duration = Duration::from_secs(10);

/// How long a rank tries to fetch a peer's region before it checks again whether the peer is alive.
const FETCH_INTERVAL: Duration = Duration::from_millis(500);

/// While this lives, the rank uses registered buffers of its peers. Dropping it ends that, also in
/// a panic.
pub(super) struct Borrowed<'a>(&'a RankState);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.borrows.store(0, Ordering::Release);
    }
}

impl Window {
    /// Fetches a region that a rank of this host lends. Asks that rank until the operation's
    /// deadline, as long as it may still answer. The inner error says why this process cannot have
    /// the region.
    pub(crate) fn fetch(&mut self, context: &OpContext<'_>, peer: usize, id: u32) -> Result<io::Result<Arc<Region>>> {
        let found = loop {
            let until = Instant::now() + context.patience_with(self.members[peer])?.min(FETCH_INTERVAL);
            let found = self.host.fetch_once(self.jobs[peer], id, until);
            if found.is_err()
                && let Some(cause) = self.why_gone(peer)
            {
                return Err(context.failed(self.members[peer], cause));
            }
            match found {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                found => break found,
            }
        };
        // From here on the peer is not the cause of a delay.
        context.rest();
        Ok(found)
    }

    /// Lends the buffers of an operation to the peers, if both are registered, and returns their
    /// locations.
    pub(super) fn lend_memory(&mut self, context: &OpContext<'_>, input: RawSlice, output: RawSliceMut) -> Option<[Location; 2]> {
        let locations = self.heap.lend(context.descriptor.seq, input, output)?;
        // The phase in which the peers read the locations publishes these stores.
        let lent = &self.phases.lines.rank_state(self.rank).lent;
        lent[0].store(input.ptr.cast_mut(), Ordering::Relaxed);
        lent[1].store(output.ptr, Ordering::Relaxed);
        Some(locations)
    }

    /// Returns the addresses in this process of a rank's input and output of `len` bytes. Returns
    /// `None` if no such memory is registered: locations come from peers and are not trusted.
    ///
    /// A rank that is a thread of this process borrows its buffers from its caller during the call.
    /// Only pointers derived from that borrow may be used, so such a rank leaves them in its state.
    /// The pointers of another process mean something here only if they equal the addresses at
    /// which its memory is mapped here.
    pub(super) fn lent_by(&self, rank: usize, locations: [Location; 2], len: usize) -> Option<[*mut u8; 2]> {
        let mut found = [std::ptr::null_mut(); 2];
        for ((found, location), lent) in found.iter_mut().zip(locations).zip(&self.phases.lines.rank_state(rank).lent) {
            let (here, lent) = (self.heap.resolve(rank, location, len)?, lent.load(Ordering::Relaxed));
            *found = if lent.addr() == here.addr() { lent } else { here };
        }
        Some(found)
    }

    /// Declares that this rank uses registered buffers of its peers from now on. Returns an error
    /// if a peer has failed.
    ///
    /// Both sides store their own word before they load the other's, all sequentially consistent.
    /// So either this rank sees the failure, or the failed rank sees the borrower: see
    /// [`Window::take_back_memory`].
    pub(super) fn borrow_memory(&self, context: &OpContext<'_>) -> Result<Borrowed<'_>> {
        let rank_state = self.phases.lines.rank_state(self.rank);
        rank_state.borrows.store(1, Ordering::SeqCst);
        let borrowed = Borrowed(rank_state);
        self.check_no_peer_failed(context)?;
        Ok(borrowed)
    }

    /// Waits until no peer uses what the failed operation has lent. A process that has ended uses
    /// nothing. A process that is stopped may continue at any time, so the memory becomes private
    /// to this process and that peer writes elsewhere.
    pub(super) fn take_back_memory(&mut self) {
        let Some(seq) = self.heap.lent_to() else { return };
        let until = Instant::now() + PATIENCE_WITH_WRITERS;
        let mut private = None;
        for peer in self.peers() {
            while self.phases.lines.rank_state(peer).borrows.load(Ordering::SeqCst) != 0 && !self.has_ended(peer) {
                std::thread::yield_now();
                if Instant::now() < until {
                    continue;
                }
                match private.get_or_insert_with(|| self.heap.make_private()) {
                    Ok(()) => break,
                    // The ranks are threads of this process. None of them is stopped alone, so each
                    // reaches its end.
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                    Err(error) if Instant::now() >= until + LAST_PATIENCE_WITH_WRITERS => {
                        let rank = self.members[peer];
                        tracing::error!(rank, seq, %error, "a rank may still write into a registered buffer of an operation that failed");
                        break;
                    }
                    Err(_) => {}
                }
            }
        }
        self.heap.revoke();
    }
}
