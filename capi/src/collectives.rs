//! The blocking collectives: each returns when this rank's part is done. Inside a host they run on the calling thread.
//!
//! In a group they are held back; see [`crate::held`].

use std::ffi::c_void;

use kolo::Op;
use kolo::raw::run_together;

use crate::arguments::{Arguments, KOLO_UINT8, kolo_dtype_t, kolo_redop_t, kolo_stream_t};
use crate::codes::kolo_result_t;
use crate::communicator::{Comm, kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;

/// # Safety
///
/// The buffers are valid for the counts that the call says, until it returns, or until the group ends that is open.
#[inline]
unsafe fn run(comm: kolo_comm_t, stream: kolo_stream_t, arguments: Arguments) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: passed on.
        let call = unsafe { arguments.prepare(&this.comm, stream)? };
        if held::is_open() {
            return held::hold(comm.addr(), [call]);
        }
        // SAFETY: passed on.
        unsafe { call.run(&this.comm) }.map_err(Fault::from)
    })
}

/// Reduces all ranks' `send`, element by element, into everybody's `recv`, of `count` elements each. Every rank gets the same bits.
/// In place if `send == recv`. Inside a host, memory of kolo_mem_alloc is read and written where it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_all_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllReduce, dtype).buffers(send, recv, count).reduced(op);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// As kolo_all_reduce, for the root alone: `recv` of the other ranks is not touched and may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Reduce, dtype).buffers(send, recv, count).reduced(op).root(root);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Copies the root's `send` to everybody's `recv`, of `count` elements each. `send` of the other ranks is not read and may be NULL.
/// In place if `send == recv`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_broadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Broadcast, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Puts all ranks' `send`, of `count` elements each, one after the other in the order of ranks, into everybody's `recv`.
/// In place if `send` is this rank's block of `recv`: `recv + rank * count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_all_gather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllGather, dtype).buffers(send, recv, count);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// As kolo_all_gather, where rank i gives `counts[i]` elements. `counts` has an entry for each rank, the same on all ranks; it is
/// read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_all_gather_v(
    send: *const c_void,
    recv: *mut c_void,
    counts: *const usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllGatherV, dtype).buffers(send, recv, 0).recv_counts(counts);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Reduces all ranks' `send`, of one block of `count` elements for each rank, element by element, and gives rank i block i of
/// the result as its `recv`. In place if `recv` is this rank's block of `send`: `send + rank * count` elements; the other blocks
/// may hold anything afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reduce_scatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::ReduceScatter, dtype).buffers(send, recv, count).reduced(op);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// As kolo_reduce_scatter, where block i has `counts[i]` elements. `counts` has an entry for each rank, the same on all ranks; it
/// is read before this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reduce_scatter_v(
    send: *const c_void,
    recv: *mut c_void,
    counts: *const usize,
    dtype: kolo_dtype_t,
    op: kolo_redop_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::ReduceScatterV, dtype).buffers(send, recv, 0).send_counts(counts).reduced(op);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Gives block j of rank i's `send` to rank j, as block i of its `recv`. Blocks have `count` elements, and there is one for each
/// rank. In place if `send == recv`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_all_to_all(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllToAll, dtype).buffers(send, recv, count);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// As kolo_all_to_all, where block j of `send` has `send_counts[j]` elements, and block j of `recv` has `recv_counts[j]`. What one
/// rank sends to another must be what the other expects. Both have an entry for each rank, and are read before this returns.
/// Not in place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_all_to_all_v(
    send: *const c_void,
    send_counts: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::AllToAllV, dtype).buffers(send, recv, 0).send_counts(send_counts).recv_counts(recv_counts);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// As kolo_all_gather, for the root alone: `recv` of the other ranks is not touched and may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_gather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Gather, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Gives rank i block i of the root's `send`, of `count` elements for each rank, as its `recv`. `send` of the other ranks is not
/// read and may be NULL. In place if `recv` is this rank's block of `send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_scatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    root: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Scatter, dtype).buffers(send, recv, count).root(root);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Returns when all ranks have called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_barrier(comm: kolo_comm_t, stream: kolo_stream_t) -> kolo_result_t {
    let arguments = Arguments::of(Op::Barrier, KOLO_UINT8);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Sends `count` elements to a rank, which calls kolo_recv with as many of the same type. May return before that rank has called
/// it, or not: two ranks that both send first may wait for each other until the deadline. Use a group, kolo_send_recv or
/// kolo_start_send for that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_send(
    send: *const c_void,
    count: usize,
    dtype: kolo_dtype_t,
    peer: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Send, dtype).buffers(send, std::ptr::null_mut(), count).peer(peer);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Receives `count` elements from a rank. Messages of one rank come in the order in which it sent them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_recv(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    peer: i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).peer(peer);
    // SAFETY: the caller's buffers.
    unsafe { run(comm, stream, arguments) }
}

/// Receives `count` elements from whichever rank's message comes first, of those that no earlier receive waits for, and puts that
/// rank into `*source` unless it is NULL. Not for groups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_recv_any(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    source: *mut i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).any_source(source);
    on(comm, |this: &Comm| {
        held::refuse("kolo_recv_any")?;
        // SAFETY: no counts are read; the caller's buffers.
        unsafe { arguments.prepare(&this.comm, stream)?.run(&this.comm) }.map_err(Fault::from)
    })
}

/// Sends to one rank and receives from another (or the same) at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_send_recv(
    send: *const c_void,
    send_count: usize,
    to: i32,
    recv: *mut c_void,
    recv_count: usize,
    from: i32,
    dtype: kolo_dtype_t,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let sends = Arguments::of(Op::Send, dtype).buffers(send, std::ptr::null_mut(), send_count).peer(to);
    let receives = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, recv_count).peer(from);
    on(comm, |this: &Comm| {
        // SAFETY: no counts are read.
        let calls = unsafe { [sends.prepare(&this.comm, stream)?, receives.prepare(&this.comm, stream)?] };
        if held::is_open() {
            return held::hold(comm.addr(), calls);
        }
        // SAFETY: the caller's buffers.
        unsafe { run_together(&this.comm, calls.into()) }.map_err(Fault::from)
    })
}
