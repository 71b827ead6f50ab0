//! The asynchronous collectives: each returns at once, with a handle on the operation that it started.

use std::ffi::c_void;

use super::arguments::{Arguments, KOLO_UINT8, kolo_dtype_t, kolo_redop_t, kolo_stream_t};
use super::communicator::{kolo_comm_t, on};
use super::fault::{Fault, kolo_result_t};
use super::work::{kolo_work_t, register};
use super::{group, place};
use crate::Op;

/// # Safety
///
/// The buffers are valid for the counts that the call says until the operation has ended.
unsafe fn start(comm: kolo_comm_t, stream: kolo_stream_t, work: *mut kolo_work_t, arguments: Arguments) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer.
        let work = unsafe { place(work, "work")? };
        work.write(std::ptr::null_mut());
        group::refuse("an asynchronous call")?;
        // SAFETY: passed on.
        let call = unsafe { arguments.prepare(&this.comm, stream)? };
        let lent = call.lent.clone();
        // SAFETY: passed on.
        let started = unsafe { this.comm.exec.start_prepared(call)? };
        match register(started, comm, lent) {
            Ok(handle) => work.write(handle),
            // Nobody could tell when the buffers are free again, so this has to.
            Err(started) => {
                started.wait().map_err(crate::Error::from)?;
                return Err(Fault::Unsupported { what: "a handle on an operation", why: "there are too many; destroy some" });
            }
        };
        Ok(())
    })
}

/// Starts kolo_all_reduce and returns at once. Operations of one communicator take effect in the order of their calls, blocking
/// or not. The buffers are the operation's until kolo_work_wait or kolo_work_test has said that it has ended: they must stay valid,
/// `recv` must not be touched, and `send` must not be written. `*work` is NULL if this fails; nothing was started then.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_start_barrier(comm: kolo_comm_t, stream: kolo_stream_t, work: *mut kolo_work_t) -> kolo_result_t {
    let arguments = Arguments::of(Op::Barrier, KOLO_UINT8);
    // SAFETY: the caller's buffers.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_send. Sends and receives that were started one after the other go on side by side.
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
    // SAFETY: the caller's buffers.
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
    // SAFETY: the caller's buffers.
    unsafe { start(comm, stream, work, arguments) }
}

/// Starts kolo_recv_any. `*source`, too, is the operation's until it has ended.
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
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).anybody(source);
    // SAFETY: the caller's buffers.
    unsafe { start(comm, stream, work, arguments) }
}
