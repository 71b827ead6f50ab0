//! A call that pointers describe, before and after it is checked.

use std::ffi::c_void;
use std::time::Duration;

use super::work::RawWork;
use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::call::{Call, Counts, Lengths};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::types::{DType, Op, Rank, ReduceOp, Tag};

/// A collective, a send or a receive on raw memory. Buffers have no lengths: they follow from the
/// operation and the counts.
///
/// An operation ignores what it does not have: a barrier has no buffers, and the root of an
/// all-reduce is not read.
#[derive(Clone, Debug)]
#[must_use = "a call does nothing before it is prepared and run"]
pub struct RawCall {
    call: Call,
    stream: *mut c_void,
}

impl RawCall {
    /// Describes an operation on elements of a type. All else is zero, null or absent.
    #[inline]
    pub const fn new(op: Op, dtype: DType) -> RawCall {
        RawCall { call: Call::raw(op, dtype), stream: std::ptr::null_mut() }
    }

    /// Sets the buffers and the count: elements of a buffer, or of one rank's block where the
    /// operation has blocks. A buffer that the operation does not have on this rank may be null,
    /// and so may one without elements. In place as the operation allows.
    #[inline]
    pub fn buffers(&mut self, send: *const u8, recv: *mut u8, count: usize) -> &mut RawCall {
        (self.call.send, self.call.recv, self.call.count) = (RawSlice::at(send), RawSliceMut::at(recv), count);
        self
    }

    /// Sets the elements of each rank's block that is sent: of `Op::ReduceScatterV` and
    /// `Op::AllToAllV`.
    #[inline]
    pub fn send_counts(&mut self, counts: &[usize]) -> &mut RawCall {
        self.call.send_counts = Some(Counts::of_raw(counts));
        self
    }

    /// Sets the elements of each rank's block that is received: of `Op::AllGatherV` and
    /// `Op::AllToAllV`.
    #[inline]
    pub fn recv_counts(&mut self, counts: &[usize]) -> &mut RawCall {
        self.call.recv_counts = Some(Counts::of_raw(counts));
        self
    }

    /// Sets the reduction, of operations that reduce.
    #[inline]
    pub fn reduce(&mut self, redop: ReduceOp) -> &mut RawCall {
        self.call.redop = Some(redop);
        self
    }

    /// Sets the root, of operations that have one.
    #[inline]
    pub fn root(&mut self, root: Rank) -> &mut RawCall {
        self.call.root = root;
        self
    }

    /// Sets the rank to which a send goes, or from which a receive comes.
    #[inline]
    pub fn peer(&mut self, peer: Rank) -> &mut RawCall {
        self.call.root = peer;
        self
    }

    /// Sets the tag of a send or a receive. Default: 0, which is that of messages without a tag.
    #[inline]
    pub fn tag(&mut self, tag: Tag) -> &mut RawCall {
        self.call.tag = tag;
        self
    }

    /// Makes a receive take the message of any rank. That rank is written to `source`, unless it is
    /// null.
    #[inline]
    pub fn any_source(&mut self, source: *mut i32) -> &mut RawCall {
        self.call.source = Some(Source::Int(source));
        self
    }

    /// Sets how long the operation may take. Default: the communicator's timeout.
    #[inline]
    pub fn timeout(&mut self, timeout: Duration) -> &mut RawCall {
        self.call.timeout = Some(timeout);
        self
    }

    /// Sets the CUDA stream (a `cudaStream_t`) in whose order the buffers are used. Null, the
    /// default, is CUDA's default stream if a buffer is on a device, and no stream otherwise.
    ///
    /// # Safety
    ///
    /// The driver dereferences the pointer. It is null, or a stream of this process that lives as
    /// long as this call is used, and until each call that was prepared from it has been run,
    /// started or dropped.
    #[inline]
    pub unsafe fn stream(&mut self, stream: *mut c_void) -> &mut RawCall {
        self.stream = stream;
        self
    }

    /// Checks everything that this rank can check alone. A call with a stream, or with a buffer on
    /// a device, takes its place in the stream now: after the earlier work of the stream. No memory
    /// is read or written, and no other rank learns of it.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if an argument is wrong;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if a stream or a device cannot take part.
    /// The communicator is as usable as before.
    pub fn prepare(&self, comm: &Communicator) -> Result<PreparedCall> {
        let mut call = self.call.clone();
        comm.exec.check(&mut call, Lengths::Counted)?;
        call.on_device = None;
        comm.exec.state.bind(&mut call, self.stream.into())?;
        Ok(PreparedCall(call))
    }

    /// Checks the call as [`RawCall::prepare`] does, unless it equals the last one of its operation, and
    /// executes it as [`PreparedCall::run`] does.
    /// This is faster than the two functions: the call, which is large, is not copied.
    ///
    /// # Safety
    ///
    /// As for [`PreparedCall::run`]. A run may forget the buffers that its rank does not need: before the
    /// call is run or prepared on another communicator, or with another root or other counts, its
    /// buffers are set again.
    ///
    /// # Errors
    ///
    /// Those of both functions.
    #[inline]
    pub unsafe fn run(&mut self, comm: &Communicator) -> Result<()> {
        // An earlier run may have been on a device.
        self.call.on_device = None;
        if comm.exec.state.has_only_host_memory(self.stream.into()) {
            // SAFETY: passed on.
            return unsafe { comm.exec.submit_in_place(&mut self.call, Lengths::Counted) };
        }
        comm.exec.check(&mut self.call, Lengths::Counted)?;
        comm.exec.state.bind(&mut self.call, self.stream.into())?;
        // SAFETY: passed on.
        unsafe { comm.exec.submit_checked(&self.call) }
    }
}

/// A call that [`RawCall::prepare`] has checked, for the communicator that was given there.
#[derive(Debug)]
#[must_use = "a prepared call does nothing before it is run"]
pub struct PreparedCall(Call);

impl PreparedCall {
    /// Returns the operation.
    pub fn op(&self) -> Op {
        self.0.op
    }

    /// Executes the call, and returns when this rank's part is done. A call in a stream is enqueued
    /// instead, and this returns at once.
    ///
    /// # Safety
    ///
    /// - The call was prepared for `comm`.
    /// - The buffers are valid for the elements that operation and counts require, and so is the
    ///   place for the source. They stay valid until this returns; those of a call in a stream
    ///   until the stream has passed the call.
    /// - Until then nothing writes what the call reads, and nothing reads or writes what it writes.
    ///
    /// # Errors
    ///
    /// Those of the operation; see [`Error`](crate::Error).
    pub unsafe fn run(self, comm: &Communicator) -> Result<()> {
        // SAFETY: passed on.
        unsafe { comm.exec.submit_checked(&self.0) }
    }

    /// Starts the operation and returns at once. Operations of one communicator take effect in the
    /// order of their calls.
    ///
    /// # Safety
    ///
    /// As for [`PreparedCall::run`], until [`RawWork::outcome`] has returned `Some`.
    ///
    /// # Errors
    ///
    /// If this fails, the operation was not started, and the buffers are the caller's.
    pub unsafe fn start(self, comm: &Communicator) -> Result<RawWork> {
        let on_device = self.0.on_device.clone();
        // SAFETY: passed on.
        let work = unsafe { comm.exec.start_checked(self.0)? };
        Ok(RawWork { work, on_device })
    }
}

/// Executes sends and receives side by side, so that none waits for one before it, and returns when
/// all are done.
///
/// # Safety
///
/// As for [`PreparedCall::run`], for all calls. All of them are sends and receives.
///
/// # Errors
///
/// The first failure, if any call fails.
pub unsafe fn run_together(comm: &Communicator, calls: Vec<PreparedCall>) -> Result<()> {
    let calls = calls.into_iter().map(|PreparedCall(call)| call).collect();
    // SAFETY: passed on.
    unsafe { comm.exec.submit_together_checked(calls) }
}
