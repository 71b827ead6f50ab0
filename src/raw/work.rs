//! An operation in flight on memory that the caller owns.

use std::ffi::c_void;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::call::OnDevice;
use crate::error::Result;
use crate::progress::work::Work;

/// An operation that [`PreparedCall::start`](super::PreparedCall::start) has started. Its buffers
/// belong to the operation until [`RawWork::outcome`] has returned `Some`.
///
/// Dropping it does not end the operation, which goes on using the buffers.
#[derive(Debug)]
#[must_use = "nothing else tells when the operation has ended"]
pub struct RawWork {
    pub(super) work: Work<()>,
    /// If the buffers are on a device, or if the call has a place in a stream.
    pub(super) on_device: Option<Arc<dyn OnDevice>>,
}

impl RawWork {
    /// Returns whether the operation has ended. Does not wait.
    pub fn is_finished(&self) -> bool {
        self.work.is_finished()
    }

    /// Returns whether a CUDA graph has captured the operation, which runs with each replay. It counts
    /// as ended. [`RawWork::hold_stream`] orders streams in the capture.
    pub fn is_captured(&self) -> bool {
        self.on_device.as_ref().is_some_and(|on_device| on_device.is_captured())
    }

    /// Waits until the operation has ended, and returns how; `None` if it has not ended by the
    /// deadline. Every operation has a deadline of its own, so this ends without one, too. It may
    /// be called again, and by several threads.
    pub fn outcome(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        self.work.outcome(deadline)
    }

    /// Runs the operation, if this thread can: a collective that has not begun, as
    /// [`RawWork::outcome`] without a deadline does. The wait check of this thread then counts as in a
    /// blocking call. Returns before the operation has ended if another thread runs it.
    pub fn help(&self) {
        self.work.help();
    }

    /// Returns how long the operation took: from its beginning, after the operations that were
    /// started before it, to its end. It contains the time in which this rank waited for others.
    /// Zero if the operation failed before it began; `None` if it has not ended, and in a forked
    /// child.
    pub fn duration(&self) -> Option<Duration> {
        self.work.duration()
    }

    /// Waits until one of several operations has ended, and returns its place in the list; `None` if
    /// none has ended by the deadline. Without operations it returns `None` at once.
    pub fn wait_any(works: &[&RawWork], deadline: Option<Instant>) -> Option<usize> {
        // First all: an operation that ends from now on unparks this thread.
        for (index, each) in works.iter().enumerate() {
            if !each.work.unparks_this_thread() {
                return Some(index);
            }
        }
        while !works.is_empty() {
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => thread::park(),
                Some(left) if left.is_zero() => break,
                Some(left) => thread::park_timeout(left),
            }
            if let Some(index) = works.iter().position(|each| each.is_finished()) {
                return Some(index);
            }
        }
        None
    }

    /// Calls a function once when the operation has ended, on a thread of its own, with how it
    /// ended. The function may wait for anything, also for other operations. If the system has no
    /// thread left, the function is dropped, and the log says so.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`](crate::Error::Forked) in a forked child.
    pub fn on_done(&self, function: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        self.work.on_done(function)
    }

    /// Makes a CUDA stream (a `cudaStream_t`) wait until the operation has ended, and returns at
    /// once. The stream goes on after a failure, too. Returns false if no stream can wait for this
    /// operation: then the caller waits itself.
    ///
    /// # Safety
    ///
    /// The driver dereferences the pointer. It is null, which is the default stream, or a stream of
    /// this process that lives until this returns.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the driver refuses it;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if a graph has captured the operation, and
    /// not the stream's work.
    pub unsafe fn hold_stream(&self, stream: *mut c_void) -> Result<bool> {
        self.on_device.as_ref().map_or(Ok(false), |on_device| on_device.hold_stream(stream.into()))
    }
}
