//! How a rank lends its registered buffers to its peers for one operation, borrows theirs, and
//! takes its own back after a failure.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flag_area::RankState;
use super::flags::Words;
use super::pool::MOST_EXTENTS;
use super::registered::{Announced, Loan, Location, Notice};
use super::window::Window;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::sync::Ordering;
use crate::sys::Region;
use crate::timeouts::{EXTENT, LAST_WRITERS, MAPPING_CHECK, WRITERS};

/// While this lives, the rank uses registered buffers of its peers. Dropping it ends that, also in
/// a panic.
pub(super) struct Borrowed<'a>(&'a RankState);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.borrows.store(0, Ordering::Release);
    }
}

impl Window {
    /// Fetches a region that a rank of this host exports. Asks that rank for as long as `patience`,
    /// and at most until the operation's deadline, while it may still answer. The inner error says
    /// why this process cannot have the region.
    pub(crate) fn fetch(
        &mut self,
        context: &OpContext<'_>,
        peer: usize,
        id: u32,
        patience: Duration,
    ) -> Result<io::Result<Arc<Region>>> {
        let began = Instant::now();
        let found = loop {
            let until = Instant::now() + context.patience_with(self.members[peer], Some(id.into()))?.min(MAPPING_CHECK);
            let found = self.host.fetch_once(self.jobs[peer], id, until);
            if found.is_err()
                && let Some(cause) = self.why_gone(peer)
            {
                return Err(context.failed(self.members[peer], cause));
            }
            match found {
                Err(error) if error.kind() == io::ErrorKind::TimedOut && began.elapsed() < patience => {}
                found => break found,
            }
        };
        // From here on the peer is not the cause of a delay.
        context.rest();
        Ok(found)
    }

    /// Lends the input of an operation to the peers, and the output that they write, if there is
    /// one. `None` if these are not registered.
    pub(super) fn lend_memory(&mut self, context: &OpContext<'_>, input: RawSlice, output: Option<RawSliceMut>) -> Option<Loan> {
        let loan = self.heap.lend(context.descriptor.seq, input, output)?;
        // The phase in which the peers read the locations publishes these stores.
        let lent = &self.phases.lines.rank_state(self.rank).lent;
        lent[0].store(input.ptr.cast_mut(), Ordering::Relaxed);
        lent[1].store(output.map_or(input.ptr.cast_mut(), |output| output.ptr), Ordering::Relaxed);
        Some(loan)
    }

    /// Returns this rank's words for the first phase of an operation. `all_see`: every rank reads
    /// the words of every other.
    pub(super) fn words_of(&mut self, mine: Option<Loan>, all_see: bool) -> Words {
        let host = &self.host;
        let notice = self.heap.notice(mine, all_see, |region| host.export(region));
        Notice { doubts: all_see && self.autotune.doubts(), ..notice }.words()
    }

    /// Returns whether a rank doubts the copy mode in a phase in which all see the words of all.
    pub(super) fn is_doubted(&self, phase: u32) -> bool {
        let says = |rank| match rank == self.rank {
            true => self.autotune.doubts(),
            false => Notice::from_words(self.phases.line(rank, phase).words()).doubts,
        };
        (0..self.members.len()).any(says)
    }

    /// What a rank has lent in a phase. `mine` is what this one has.
    pub(super) fn loan_of(&self, rank: usize, phase: u32, mine: Option<Loan>) -> Option<Loan> {
        if rank == self.rank { mine } else { Notice::from_words(self.phases.line(rank, phase).words()).loan }
    }

    /// What a rank has said in a phase. `words` are those of this rank.
    fn notice(&self, rank: usize, phase: u32, words: Words) -> Notice {
        Notice::from_words(if rank == self.rank { words } else { self.phases.line(rank, phase).words() })
    }

    /// Maps the extents that ranks have announced in a phase in which all see the words of all.
    /// `words` are those of this rank.
    pub(super) fn map_announced(&mut self, context: &OpContext<'_>, phase: u32, words: Words) -> Result<()> {
        let ranks = 0..self.members.len();
        let mapped = ranks.clone().map(|rank| self.notice(rank, phase, words).mapped).min().unwrap_or(0);
        for id in self.heap.mapped_by_all(mapped as usize) {
            self.host.withdraw(id);
        }
        for rank in ranks {
            let notice = self.notice(rank, phase, words);
            let Some(Announced { id, len }) = notice.announced else { continue };
            let region = if rank == self.rank {
                self.heap.take_announced()
            } else if self.heap.extents() >= MOST_EXTENTS * self.members.len() {
                None
            } else {
                let found = self.fetch(context, rank, id, EXTENT)?;
                let found = found.inspect_err(|error| crate::log::warn!(%error, "cannot map memory that a peer shares"));
                found.ok().filter(|region| region.len() as u64 == len)
            };
            if rank != self.rank
                && let Some(region) = &region
            {
                // Only its owner reserves it or makes it private.
                region.close();
            }
            self.heap.add_extent(rank, region);
        }
        Ok(())
    }

    /// Returns the address in this process of the input that a rank lends: `count` elements of
    /// `element` bytes. Returns `None` if no such memory is registered, or if it is not aligned:
    /// locations come from peers and are not trusted.
    pub(super) fn lent_input(&self, rank: usize, loan: Loan, count: usize, element: usize) -> Option<*const u8> {
        self.lent_by(rank, loan.input, 0, count, element).map(<*mut u8>::cast_const)
    }

    /// As [`Window::lent_input`], for the output.
    pub(super) fn lent_output(&self, rank: usize, loan: Loan, count: usize, element: usize) -> Option<*mut u8> {
        self.lent_by(rank, loan.output, 1, count, element)
    }

    /// A rank that is a thread of this process borrows its buffers from its caller during the call.
    /// Only pointers derived from that borrow may be used, so such a rank leaves them in its state.
    /// The pointers of another process mean something here only if they equal the addresses at
    /// which its memory is mapped here.
    fn lent_by(&self, rank: usize, location: Location, which: usize, count: usize, element: usize) -> Option<*mut u8> {
        let here = self.heap.resolve(rank, location, count * element)?;
        let lent = self.phases.lines.rank_state(rank).lent[which].load(Ordering::Relaxed);
        here.addr().is_multiple_of(element).then_some(if lent.addr() == here.addr() { lent } else { here })
    }

    /// The error for a peer that lends what does not exist.
    #[cold]
    pub(super) fn no_such_buffer(&self, context: &OpContext<'_>, rank: usize) -> Error {
        context.failed(self.members[rank], Cause::Corrupt("a registered buffer that does not exist"))
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
        let until = Instant::now() + WRITERS;
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
                    Err(error) if Instant::now() >= until + LAST_WRITERS => {
                        let rank = self.members[peer];
                        crate::log::error!(rank, seq, %error, "a rank may still write into a registered buffer of an operation that failed");
                        break;
                    }
                    Err(_) => {}
                }
            }
        }
        self.heap.revoke();
    }
}
