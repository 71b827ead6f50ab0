//! The arguments of a collective in C, and the call that they describe.

use std::cell::Cell;
use std::ffi::c_void;
use std::time::Duration;

use kolo::raw::RawCall;
use kolo::{Communicator, DType, Op, Rank, ReduceOp};

use crate::boundary::boundary;
use crate::codes::{assert_same, kolo_result_t};
use crate::fault::Fault;
use crate::pointers::{place, pointer, slice_of};

/// The type of an element. The numbers up to 9 are NCCL's.
pub type kolo_dtype_t = i32;

pub const KOLO_INT8: kolo_dtype_t = 0;
pub const KOLO_UINT8: kolo_dtype_t = 1;
pub const KOLO_INT32: kolo_dtype_t = 2;
pub const KOLO_UINT32: kolo_dtype_t = 3;
pub const KOLO_INT64: kolo_dtype_t = 4;
pub const KOLO_UINT64: kolo_dtype_t = 5;
/// IEEE 754 half precision. Sums accumulate in `float` and round once wherever one rank reduces a
/// segment.
pub const KOLO_FLOAT16: kolo_dtype_t = 6;
pub const KOLO_FLOAT32: kolo_dtype_t = 7;
pub const KOLO_FLOAT64: kolo_dtype_t = 8;
/// The upper half of a `float`. Sums accumulate as those of KOLO_FLOAT16.
pub const KOLO_BFLOAT16: kolo_dtype_t = 9;
pub const KOLO_INT16: kolo_dtype_t = 10;
pub const KOLO_UINT16: kolo_dtype_t = 11;
/// A byte that is 0 or 1. Any other byte arrives as 1.
pub const KOLO_BOOL: kolo_dtype_t = 12;
/// Four bits of exponent, three of mantissa, no infinities: PyTorch's float8_e4m3fn, NCCL's
/// ncclFloat8e4m3. Sums accumulate as those of KOLO_FLOAT16. What rounds to more than 448, the
/// largest number, becomes 448.
pub const KOLO_FLOAT8_E4M3: kolo_dtype_t = 13;
/// Five bits of exponent, two of mantissa: PyTorch's float8_e5m2, NCCL's ncclFloat8e5m2. Sums
/// accumulate as those of KOLO_FLOAT16. What rounds to more than 57344, the largest number, is an
/// infinity.
pub const KOLO_FLOAT8_E5M2: kolo_dtype_t = 14;

/// Writes the bytes of an element of a type to `*size`. KOLO_ERR_ARGUMENT if `of` is no type or
/// `size` is NULL; `*size` then stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_dtype_size(of: kolo_dtype_t, size: *mut usize) -> kolo_result_t {
    boundary(|| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        unsafe { place(size, "size")? }.write(dtype(of)?.size());
        Ok(())
    })
}

/// A reduction of the elements of several ranks. The numbers up to 4 are NCCL's.
pub type kolo_redop_t = i32;

/// The sum; integers wrap around. Not for KOLO_BOOL.
pub const KOLO_SUM: kolo_redop_t = 0;
/// The product; integers wrap around. Not for KOLO_BOOL.
pub const KOLO_PROD: kolo_redop_t = 1;
/// The largest; NaN if any is NaN.
pub const KOLO_MAX: kolo_redop_t = 2;
/// The smallest; NaN if any is NaN.
pub const KOLO_MIN: kolo_redop_t = 3;
/// The sum divided by the number of ranks; floating point only.
pub const KOLO_AVG: kolo_redop_t = 4;
/// Bitwise and; integers and KOLO_BOOL only.
pub const KOLO_BAND: kolo_redop_t = 5;
/// Bitwise or; integers and KOLO_BOOL only.
pub const KOLO_BOR: kolo_redop_t = 6;
/// Bitwise exclusive or; integers and KOLO_BOOL only.
pub const KOLO_BXOR: kolo_redop_t = 7;

// The numbers are those of the crate `kolo`.
const _: () = {
    let dtypes = [
        (KOLO_INT8, DType::I8 as u8),
        (KOLO_UINT8, DType::U8 as u8),
        (KOLO_INT32, DType::I32 as u8),
        (KOLO_UINT32, DType::U32 as u8),
        (KOLO_INT64, DType::I64 as u8),
        (KOLO_UINT64, DType::U64 as u8),
        (KOLO_FLOAT16, DType::F16 as u8),
        (KOLO_FLOAT32, DType::F32 as u8),
        (KOLO_FLOAT64, DType::F64 as u8),
        (KOLO_BFLOAT16, DType::BF16 as u8),
        (KOLO_INT16, DType::I16 as u8),
        (KOLO_UINT16, DType::U16 as u8),
        (KOLO_BOOL, DType::Bool as u8),
        (KOLO_FLOAT8_E4M3, DType::F8E4M3 as u8),
        (KOLO_FLOAT8_E5M2, DType::F8E5M2 as u8),
    ];
    let redops = [
        (KOLO_SUM, ReduceOp::Sum as u8),
        (KOLO_PROD, ReduceOp::Product as u8),
        (KOLO_MAX, ReduceOp::Max as u8),
        (KOLO_MIN, ReduceOp::Min as u8),
        (KOLO_AVG, ReduceOp::Average as u8),
        (KOLO_BAND, ReduceOp::BitAnd as u8),
        (KOLO_BOR, ReduceOp::BitOr as u8),
        (KOLO_BXOR, ReduceOp::BitXor as u8),
    ];
    assert!(dtypes.len() == DType::ALL.len() && redops.len() == ReduceOp::ALL.len());
    assert_same(&dtypes);
    assert_same(&redops);
};

/// A CUDA stream (`cudaStream_t` or `CUstream`) for calls with buffers in the memory of a GPU; NULL
/// is the default stream. Such a call is enqueued on the stream and returns at once; the first call
/// of more than 64 KiB on a communicator waits for the other ranks. It reads its buffers after the
/// earlier work of the stream, and later work of the stream finds the result. If it fails, the next
/// call reports the error. A nonblocking call does not make the stream wait for
/// the result; kolo_work_wait_on makes any stream wait. A call on host memory with a stream behaves
/// the same way. With NULL and host memory, a call returns when it is done. The stream must live
/// until the call has returned; in a group, until kolo_group_end has.
///
/// If a CUDA graph captures the stream's work, the call runs with each replay, on all ranks. A call
/// of more than 64 KiB waits for the other ranks at the capture.
pub type kolo_stream_t = *mut c_void;

thread_local! {
    /// The timeout of this thread's calls, if it is not that of their communicators.
    static TIMEOUT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Sets the timeout, in milliseconds, of the operations that this thread calls or starts from now
/// on. It replaces the timeout of their communicators; 0 restores that. Other threads and earlier
/// calls are not affected.
///
/// It applies to collectives, sends and receives: blocking, nonblocking or in a group.
/// kolo_comm_split, kolo_mem_alloc and reducers always use the timeout of their communicator.
/// Connecting and kolo_comm_shrink use `start_timeout_ms`.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_call_timeout(timeout_ms: u64) -> kolo_result_t {
    boundary(|| {
        TIMEOUT.set((timeout_ms > 0).then(|| Duration::from_millis(timeout_ms)));
        Ok(())
    })
}

/// The arguments of one call.
#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    op: Op,
    dtype: kolo_dtype_t,
    redop: Option<kolo_redop_t>,
    /// The root or the peer, and its name in errors.
    root: (i32, &'static str),
    count: usize,
    send: *const c_void,
    recv: *mut c_void,
    /// The counts of all ranks, if the operation has them.
    send_counts: Option<*const usize>,
    recv_counts: Option<*const usize>,
    /// For a receive from any rank: where to write that rank.
    source: Option<*mut i32>,
    tag: u32,
}

impl Arguments {
    pub(crate) fn of(op: Op, dtype: kolo_dtype_t) -> Arguments {
        let (send, recv) = (std::ptr::null(), std::ptr::null_mut());
        Arguments {
            op,
            dtype,
            redop: None,
            root: (0, "root"),
            count: 0,
            send,
            recv,
            send_counts: None,
            recv_counts: None,
            source: None,
            tag: 0,
        }
    }

    pub(crate) fn buffers(self, send: *const c_void, recv: *mut c_void, count: usize) -> Arguments {
        Arguments { send, recv, count, ..self }
    }

    pub(crate) fn send_counts(self, send_counts: *const usize) -> Arguments {
        Arguments { send_counts: Some(send_counts), ..self }
    }

    pub(crate) fn recv_counts(self, recv_counts: *const usize) -> Arguments {
        Arguments { recv_counts: Some(recv_counts), ..self }
    }

    pub(crate) fn reduced(self, redop: kolo_redop_t) -> Arguments {
        Arguments { redop: Some(redop), ..self }
    }

    pub(crate) fn root(self, root: i32) -> Arguments {
        Arguments { root: (root, "root"), ..self }
    }

    pub(crate) fn peer(self, peer: i32) -> Arguments {
        Arguments { root: (peer, "peer"), ..self }
    }

    pub(crate) fn tag(self, tag: u32) -> Arguments {
        Arguments { tag, ..self }
    }

    /// Receives from any rank, and writes that rank to `source` unless it is null.
    pub(crate) fn any_source(self, source: *mut i32) -> Arguments {
        Arguments { source: Some(source), ..self }
    }

    /// Returns the call that the arguments describe, for the stream.
    ///
    /// # Safety
    ///
    /// As for [`Arguments::complete`].
    pub(crate) unsafe fn describe(&self, comm: &Communicator, stream: kolo_stream_t) -> Result<RawCall, Fault> {
        let mut call = self.call()?;
        // SAFETY: passed on.
        unsafe { self.complete(&mut call, comm, stream)? };
        Ok(call)
    }

    /// The operation on its elements: what [`Arguments::complete`] begins with.
    #[inline(always)]
    pub(crate) fn call(&self) -> Result<RawCall, Fault> {
        Ok(RawCall::new(self.op, dtype(self.dtype)?))
    }

    /// Sets all else of a call, for the stream.
    ///
    /// # Safety
    ///
    /// Counts that are not null are valid for one entry for each rank. The stream is null or lives,
    /// also until what is prepared from the call has been run or started.
    // In place and inlined: small operations would notice a copy of the call.
    #[inline(always)]
    pub(crate) unsafe fn complete(&self, call: &mut RawCall, comm: &Communicator, stream: kolo_stream_t) -> Result<(), Fault> {
        call.buffers(self.send.cast(), self.recv.cast(), self.count).root(rank(self.root.0, self.root.1)?).tag(self.tag);
        // SAFETY: passed on.
        unsafe { call.stream(stream) };
        if let Some(number) = self.redop {
            call.reduce(redop(number)?);
        }
        if let Some(counts) = self.send_counts {
            // SAFETY: passed on.
            call.send_counts(unsafe { slice_of(counts, comm.world_size(), "send_counts")? });
        }
        if let Some(counts) = self.recv_counts {
            // SAFETY: passed on.
            call.recv_counts(unsafe { slice_of(counts, comm.world_size(), "recv_counts")? });
        }
        if let Some(source) = self.source {
            if !source.is_null() {
                pointer(source, "source")?;
            }
            call.any_source(source);
        }
        if let Some(timeout) = TIMEOUT.get() {
            call.timeout(timeout);
        }
        Ok(())
    }
}

pub(crate) fn dtype(number: kolo_dtype_t) -> Result<DType, Fault> {
    let known = u8::try_from(number).ok().and_then(DType::from_number);
    known.ok_or_else(|| Fault::value("dtype", number, "it must be one of KOLO_INT8 to KOLO_FLOAT8_E5M2, 0 to 14"))
}

fn redop(number: kolo_redop_t) -> Result<ReduceOp, Fault> {
    let known = u8::try_from(number).ok().and_then(ReduceOp::from_number);
    known.ok_or_else(|| Fault::value("op", number, "it must be one of KOLO_SUM to KOLO_BXOR, 0 to 7"))
}

/// Converts a rank, which may still be too large.
pub(crate) fn rank(number: i32, what: &'static str) -> Result<Rank, Fault> {
    usize::try_from(number).map_err(|_| Fault::value(what, number, "ranks are numbered from 0"))
}
