//! Calls on raw memory, from [`crate::raw`] and on devices.

use std::time::Duration;

use super::submit::Executor;
use super::work::Work;
use crate::buffer::{RawSlice, RawSliceMut, Source, StreamId};
use crate::call::{Call, Counts};
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

    /// The call, whose buffers have no lengths and which has no counts yet. `rank`: this rank, the
    /// peer of a receive from any rank.
    #[inline(always)]
    fn call(&self, rank: Rank) -> Call {
        Call {
            op: self.op,
            on_behalf_of: None,
            dtype: self.dtype,
            redop: self.redop,
            root: if self.source.is_some() { rank } else { self.root },
            count: self.count,
            send: RawSlice { ptr: self.send, len: 0 },
            recv: RawSliceMut { ptr: self.recv, len: 0 },
            send_counts: None,
            recv_counts: None,
            source: self.source,
            timeout: self.timeout,
            described: None,
            on_device: None,
        }
    }

    /// Sets the counts of the blocks. Most operations have none, and the copies here would take as
    /// long as a small operation.
    #[inline(always)]
    fn set_counts(&self, call: &mut Call) -> Result<()> {
        if self.send_counts.is_none() && self.recv_counts.is_none() { Ok(()) } else { self.copy_counts(call) }
    }

    #[inline(never)]
    fn copy_counts(&self, call: &mut Call) -> Result<()> {
        let refuse = || Error::Argument { op: self.op, problem: ArgumentError::TooMany { count: usize::MAX } };
        let counts = |counts: Option<&[usize]>| counts.map(|counts| Counts::new(counts).ok_or_else(refuse)).transpose();
        (call.send_counts, call.recv_counts) = (counts(self.send_counts)?, counts(self.recv_counts)?);
        Ok(())
    }
}

impl Executor {
    /// Checks everything that this rank can check alone.
    pub(crate) fn prepare(&self, raw: &Raw<'_>) -> Result<Call> {
        let mut call = raw.call(self.rank());
        raw.set_counts(&mut call)?;
        self.check_raw(&mut call)?;
        Ok(call)
    }

    /// Prepares a call, binds it to its device, if it has one, and executes it.
    ///
    /// # Safety
    ///
    /// As for [`Executor::run_prepared`].
    #[inline(always)]
    pub(crate) unsafe fn run_raw(&self, raw: &Raw<'_>, stream: StreamId) -> Result<()> {
        // The call is made where it stays: it is large, and a copy would take as long as a small
        // operation.
        let mut call = raw.call(self.rank());
        raw.set_counts(&mut call)?;
        self.check_raw(&mut call)?;
        self.state.bind(&mut call, stream)?;
        // SAFETY: passed on.
        unsafe { self.run_prepared(&call) }
    }

    #[inline(always)]
    fn check_raw(&self, call: &mut Call) -> Result<()> {
        let op = call.op;
        call.check_raw(self.rank(), self.world_size()).map_err(|problem| Error::Argument { op, problem })
    }

    /// Executes a prepared call.
    ///
    /// # Safety
    ///
    /// What the call reads and writes is valid until this returns, and nothing else uses it.
    #[inline(always)]
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
        if call.on_device.is_none() {
            return self.queue_call(call);
        }
        self.check_not_failed()?;
        let work = self.enqueue_one(&call, true, false)?;
        Ok(work.expect("its end is not left to its stream"))
    }

    /// Returns the failure that ended the communicator.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.state.failure.get().map(|failure| &**failure)
    }
}
