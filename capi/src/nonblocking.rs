//! The nonblocking collectives: each returns at once, with a handle on the operation in flight.

use std::ffi::c_void;

use kolo::Op;

use crate::arguments::{Arguments, KOLO_UINT8, kolo_dtype_t, kolo_redop_t, kolo_stream_t};
use crate::codes::kolo_result_t;
use crate::communicator::{kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;
use crate::pointers::place;
use crate::work::{kolo_work_t, register};

/// # Safety
///
/// The buffers are valid for the counts of the call until the operation has ended.
unsafe fn start(comm: kolo_comm_t, stream: kolo_stream_t, work: *mut kolo_work_t, arguments: Arguments) -> kolo_result_t {
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

/// Starts kolo_all_reduce and returns at once. Operations of one communicator take effect in the
/// order of their calls, blocking or not. The buffers belong to the operation until kolo_work_wait
/// or kolo_work_test has reported its end. Until then they must stay valid, `recv` must not be read
/// or written, and `send` must not be written. If this fails, `*work` is NULL and no operation was
/// started.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_all_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllReduce, dtype).buffers(send, recv, count).reduced(op);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Reduce, dtype).buffers(send, recv, count).reduced(op).root(root);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_broadcast.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_broadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Broadcast, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_all_gather.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_all_gather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllGather, dtype).buffers(send, recv, count);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_all_gather_v.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_all_gather_v(
    send: *const c_void,
    recv: *mut c_void,
    counts: *const usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllGatherV, dtype).buffers(send, recv, 0).recv_counts(counts);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_reduce_scatter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_reduce_scatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::ReduceScatter, dtype).buffers(send, recv, count).reduced(op);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_reduce_scatter_v.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_reduce_scatter_v(
    send: *const c_void,
    recv: *mut c_void,
    counts: *const usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::ReduceScatterV, dtype).buffers(send, recv, 0).send_counts(counts).reduced(op);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_all_to_all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_all_to_all(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllToAll, dtype).buffers(send, recv, count);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_all_to_all_v.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_all_to_all_v(
    send: *const c_void,
    send_counts: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllToAllV, dtype).buffers(send, recv, 0).send_counts(send_counts).recv_counts(recv_counts);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_gather.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_gather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Gather, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_scatter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_scatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Scatter, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_barrier(comm: kolo_comm_t, stream: kolo_stream_t, work: *mut kolo_work_t) -> kolo_result_t {
    let arguments = Arguments::of(Op::Barrier, KOLO_UINT8);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_send. Sends and receives in flight progress side by side.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_send(
    send: *const c_void,
    count: usize,
    dtype: kolo_dtype_t,
    peer: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Send, dtype).buffers(send, std::ptr::null_mut(), count).peer(peer);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_recv.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_recv(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    peer: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
    work: *mut kolo_work_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).peer(peer);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
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
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).any_source(source);
    // SAFETY: the caller's buffers are valid, as the header says.
    unsafe { start(comm, stream, work, arguments) }
}
