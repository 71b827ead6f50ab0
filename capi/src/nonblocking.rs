//! Starting operations: each call returns at once, with a handle on the operation in flight. The
//! functions of collectives are in [`crate::collectives`].

use std::ffi::c_void;

use kolo::Op;

use crate::arguments::{Arguments, kolo_dtype_t, kolo_stream_t};
use crate::codes::kolo_result_t;
use crate::communicator::{kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;
use crate::pointers::place;
use crate::work::{kolo_work_t, register};

/// # Safety
///
/// The buffers are valid for the counts of the call until the operation has ended.
pub(crate) unsafe fn start(
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
    arguments: Arguments,
) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let work = unsafe { place(work, "work")? };
        work.write(std::ptr::null_mut());
        held::refuse("a nonblocking call")?;
        // SAFETY: passed on.
        let call = unsafe { arguments.describe(&this.comm, stream)? }.prepare(&this.comm)?;
        // SAFETY: passed on.
        let started = unsafe { call.start(&this.comm)? };
        match register(started, comm) {
            Ok(handle) => work.write(handle),
            // Without a handle no call could tell when the buffers are free again, so this one
            // waits.
            Err(started) => {
                started.outcome(None).transpose()?;
                return Err(Fault::Unsupported { what: "a handle on an operation", why: "there are too many; destroy some" });
            }
        };
        Ok(())
    })
}

/// Starts kolo_recv_any. `*source` belongs to the operation, too, until it has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_recv_any(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    source: *mut i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    // SAFETY: passed on.
    unsafe { kolo_start_recv_any_tagged(recv, count, dtype, source, 0, comm, stream, work) }
}

/// Starts kolo_recv_any_tagged, as kolo_start_recv_any does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_recv_any_tagged(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    source: *mut i32,
    tag: u32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).any_source(source).tag(tag);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}
