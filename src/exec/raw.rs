//! Calls on raw memory, from [`crate::raw`] and on devices.

use std::time::Duration;

use super::call::{Call, Counts};
use super::submit::Executor;
use super::work::{Work, begin};
use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::error::{ArgumentError, Error, Result};
use crate::types::{DType, Op, Rank, ReduceOp};

/// A call on pointers: the lengths of the buffers follow from the counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw<'a> {
    pub(crate) op: Op,
    pub(crate) dtype: DType,
    pub(crate) redop: Option<ReduceOp>,
    /// The root or the peer.
    pub(crate) root: Rank,
    /// Elements of the buffer, or of one rank's block.
    pub(crate) count: usize,
    pub(crate) send: *const u8,
    pub(crate) recv: *mut u8,
    /// A count for each rank, where the operation has them.
    pub(crate) send_counts: Option<&'a [usize]>,
    pub(crate) recv_counts: Option<&'a [usize]>,
    /// For a receive from any rank, which has no peer: where to write that rank.
    pub(crate) source: Option<Source>,
    /// The timeout, if it is not that of the communicator.
    pub(crate) timeout: Option<Duration>,
}

impl Raw<'_> {
    pub(crate) const fn new(op: Op, dtype: DType) -> Self {
        let (send, recv) = (std::ptr::null(), std::ptr::null_mut());
        Raw {
            op,
            dtype,
            redop: None,
            root: 0,
            count: 0,
            send,
            recv,
            send_counts: None,
            recv_counts: None,
            source: None,
            timeout: None,
        }
    }
}

impl Executor {
    /// Checks everything that this rank can check alone.
    // Always inlined: out of line, the call would be copied once more.
    #[inline(always)]
    pub(crate) fn prepare(&self, raw: &Raw<'_>) -> Result<Call> {
        let Raw { op, dtype, redop, root, count, send, recv, source, timeout, .. } = *raw;
        let root = if source.is_some() { self.rank() } else { root };
        let refuse = |problem| Error::Argument { op, problem };
        let counts = |counts: Option<&[usize]>| match counts {
            Some(counts) => Counts::new(counts).map(Some).ok_or_else(|| refuse(ArgumentError::TooMany { count: usize::MAX })),
            None => Ok(None),
        };
        let (send_counts, recv_counts) = (counts(raw.send_counts)?, counts(raw.recv_counts)?);
        let (send, recv) = (RawSlice { ptr: send, len: 0 }, RawSliceMut { ptr: recv, len: 0 });
        let mut call = Call {
            op,
            on_behalf_of: None,
            dtype,
            redop,
            root,
            count,
            send,
            recv,
            send_counts,
            recv_counts,
            source,
            timeout,
            described: None,
            lent: None,
        };
        let (rank, world) = (self.rank(), self.world_size());
        [call.send.len, call.recv.len] = call.lengths(rank, world).map_err(refuse)?;
        // In place: the call is large, and a copy would take as long as a small operation.
        call.check_in_place(rank, world).map_err(refuse)?;
        Ok(call)
    }

    /// Executes a prepared call.
    ///
    /// # Safety
    ///
    /// What the call reads and writes is valid until this returns, and nothing else uses it.
    #[inline]
    pub(crate) unsafe fn run_prepared(&self, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.submit_checked(call) }
    }

    /// Executes prepared sends and receives side by side.
    ///
    /// # Safety
    ///
    /// As for [`Executor::run_prepared`], for all calls.
    pub(crate) unsafe fn run_prepared_together(&self, calls: Vec<Call>) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.submit_together_checked(calls) }
    }

    /// Queues a prepared call.
    ///
    /// # Safety
    ///
    /// What the call reads and writes stays valid until the operation has ended, and nothing else
    /// uses it until then.
    pub(crate) unsafe fn start_prepared(&self, call: Call) -> Result<Work<()>> {
        let (work, call, completion) = begin((), |()| Ok(call))?;
        self.queue.push(&self.state, call, completion)?;
        Ok(work)
    }

    /// Returns the failure that ended the communicator.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.state.failure.get().map(|failure| &**failure)
    }
}
