//! An operation in flight on memory that the caller owns.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::exec::Lent;
use crate::exec::work::Work;

/// An operation that [`PreparedCall::start`](super::PreparedCall::start) has started. Its buffers
/// belong to the operation until [`RawWork::outcome`] has returned `Some`.
///
/// Dropping it does not end the operation, which goes on using the buffers.
#[derive(Debug)]
#[must_use = "nothing else tells when the operation has ended"]
pub struct RawWork {
    pub(super) work: Work<()>,
    /// If the buffers are on a device, or if the call has a place in a stream.
    pub(super) lent: Option<Arc<Lent>>,
}

impl RawWork {
    /// Returns whether the operation has ended. Does not wait.
    pub fn is_finished(&self) -> bool {
        self.work.is_finished()
    }

    /// Waits until the operation has ended, and returns how; `None` if it has not ended by the
    /// deadline. Every operation has a deadline of its own, so this ends without one, too. It may
    /// be called again, and by several threads.
    pub fn outcome(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        self.work.outcome(deadline)
    }

    /// Makes a CUDA stream (a `cudaStream_t`) wait until the operation has ended, and returns at
    /// once. The stream goes on after a failure, too. Returns false if no stream can wait for this
    /// operation: then the caller waits itself.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the driver refuses it.
    pub fn hold_stream(&self, stream: *mut c_void) -> Result<bool> {
        self.lent.as_ref().map_or(Ok(false), |lent| lent.close_on(stream.into()))
    }
}
