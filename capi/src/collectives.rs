//! The collectives, one row each: a blocking function, which returns when this rank's part is done and
//! inside a host runs on the caller's thread, and a nonblocking one.
//!
//! In a group the calls are held back; see [`crate::held`].

use std::ffi::c_void;

use kolo::Op;
use kolo::raw::run_together;

use crate::arguments::{Arguments, KOLO_UINT8, kolo_dtype_t, kolo_redop_t, kolo_stream_t};
use crate::codes::kolo_result_t;
use crate::communicator::{Comm, kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;
use crate::nonblocking::start;
use crate::work::kolo_work_t;

/// # Safety
///
/// The buffers are valid for the counts of the call until it returns; if a group is open, until
/// that ends.
// The path of a call is inlined into this function. All collectives share this one copy of it.
#[inline(never)]
unsafe fn run(comm: kolo_comm_t, stream: kolo_stream_t, arguments: Arguments) -> kolo_result_t {
    on(comm, |this| {
        let mut call = arguments.call()?;
        // SAFETY: passed on.
        unsafe { arguments.complete(&mut call, &this.comm, stream)? };
        if held::is_open() {
            return held::hold(comm.addr(), [call.prepare(&this.comm)?]);
        }
        // SAFETY: passed on.
        match unsafe { call.run(&this.comm) } {
            // `map_err` would move the result, which has room for an error.
            Ok(()) => Ok(()),
            Err(error) => Err(Fault::from(error)),
        }
    })
}

/// Defines two functions for each operation: one that runs it, and one that starts it. Both have the
/// arguments of the row, then `comm` and `stream`; the latter also has `work`.
///
/// cbindgen expands no macros: the test of the header writes these functions for it.
macro_rules! operations {
    ($(
        $(#[$doc:meta])*
        $run:ident($($argument:ident: $type:ty),*) => $arguments:expr;
        $(#[$start_doc:meta])*
        $start:ident;
    )*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $run($($argument: $type,)* comm: kolo_comm_t, stream: kolo_stream_t) -> kolo_result_t {
            // SAFETY: the caller's buffers are valid, as the header says.
            unsafe { run(comm, stream, $arguments) }
        }

        $(#[$start_doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $start(
            $($argument: $type,)*
            comm: kolo_comm_t,
            stream: kolo_stream_t,
            work: *mut kolo_work_t,
        ) -> kolo_result_t {
            // SAFETY: the caller's buffers are valid, as the header says.
            unsafe { start(comm, stream, work, $arguments) }
        }
    )*};
}

operations! {
    /// Reduces the `send` buffers of all ranks element by element, and writes the result to `recv` on
    /// all ranks. Each buffer has `count` elements. All ranks get the same bits. In place if `send ==
    /// recv`. Inside a host, peers read and write registered buffers in place: see kolo_mem_alloc.
    kolo_all_reduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, op: kolo_redop_t)
        => Arguments::of(Op::AllReduce, dtype).buffers(send, recv, count).reduced(op);
    /// Starts kolo_all_reduce and returns at once. Operations of one communicator take effect in the
    /// order of their calls, blocking or not. The buffers belong to the operation until kolo_work_wait
    /// or kolo_work_test has reported its end. Until then they must stay valid, `recv` must not be read
    /// or written, and `send` must not be written. If this fails, `*work` is NULL and no operation was
    /// started.
    kolo_start_all_reduce;

    /// As kolo_all_reduce, but only the root gets the result. `recv` of other ranks is not used and may
    /// be NULL.
    kolo_reduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, op: kolo_redop_t, root: i32)
        => Arguments::of(Op::Reduce, dtype).buffers(send, recv, count).reduced(op).root(root);
    /// Starts kolo_reduce.
    kolo_start_reduce;

    /// Copies `send` of the root to `recv` on all ranks. Each buffer has `count` elements. `send` of
    /// other ranks is not used and may be NULL. In place if `send == recv`.
    kolo_broadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, root: i32)
        => Arguments::of(Op::Broadcast, dtype).buffers(send, recv, count).root(root);
    /// Starts kolo_broadcast.
    kolo_start_broadcast;

    /// Concatenates the `send` buffers of all ranks, of `count` elements each, in rank order, and
    /// writes the result to `recv` on all ranks. In place if `send` is this rank's block of `recv`:
    /// `recv + rank * count` elements.
    kolo_all_gather(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t)
        => Arguments::of(Op::AllGather, dtype).buffers(send, recv, count);
    /// Starts kolo_all_gather.
    kolo_start_all_gather;

    /// As kolo_all_gather, but rank i sends `counts[i]` elements. `counts` has an entry for each rank
    /// and is the same on all ranks. It is read before this returns.
    kolo_all_gather_v(send: *const c_void, recv: *mut c_void, counts: *const usize, dtype: kolo_dtype_t)
        => Arguments::of(Op::AllGatherV, dtype).buffers(send, recv, 0).recv_counts(counts);
    /// Starts kolo_all_gather_v.
    kolo_start_all_gather_v;

    /// Reduces the `send` buffers of all ranks element by element, and writes block i of the result to
    /// `recv` of rank i. `send` has a block of `count` elements for each rank. In place if `recv` is
    /// this rank's block of `send`: `send + rank * count` elements. The content of the other blocks is
    /// then undefined.
    kolo_reduce_scatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, op: kolo_redop_t)
        => Arguments::of(Op::ReduceScatter, dtype).buffers(send, recv, count).reduced(op);
    /// Starts kolo_reduce_scatter.
    kolo_start_reduce_scatter;

    /// As kolo_reduce_scatter, but block i has `counts[i]` elements. `counts` has an entry for each
    /// rank and is the same on all ranks. It is read before this returns.
    kolo_reduce_scatter_v(send: *const c_void, recv: *mut c_void, counts: *const usize, dtype: kolo_dtype_t, op: kolo_redop_t)
        => Arguments::of(Op::ReduceScatterV, dtype).buffers(send, recv, 0).send_counts(counts).reduced(op);
    /// Starts kolo_reduce_scatter_v.
    kolo_start_reduce_scatter_v;

    /// Copies block j of `send` of rank i to block i of `recv` of rank j. Both buffers have a block of
    /// `count` elements for each rank. In place if `send == recv`.
    kolo_all_to_all(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t)
        => Arguments::of(Op::AllToAll, dtype).buffers(send, recv, count);
    /// Starts kolo_all_to_all.
    kolo_start_all_to_all;

    /// As kolo_all_to_all, but block j of `send` has `send_counts[j]` elements and block j of `recv`
    /// has `recv_counts[j]`. A rank must send another rank as many elements as that rank expects. Both
    /// arrays have an entry for each rank and are read before this returns. Not in place.
    kolo_all_to_all_v(send: *const c_void, send_counts: *const usize, recv: *mut c_void, recv_counts: *const usize, dtype: kolo_dtype_t)
        => Arguments::of(Op::AllToAllV, dtype).buffers(send, recv, 0).send_counts(send_counts).recv_counts(recv_counts);
    /// Starts kolo_all_to_all_v.
    kolo_start_all_to_all_v;

    /// As kolo_all_gather, but only the root gets the result. `recv` of other ranks is not used and may
    /// be NULL.
    kolo_gather(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, root: i32)
        => Arguments::of(Op::Gather, dtype).buffers(send, recv, count).root(root);
    /// Starts kolo_gather.
    kolo_start_gather;

    /// Copies block i of the root's `send` to `recv` of rank i. `send` has a block of `count` elements
    /// for each rank; on other ranks it is not used and may be NULL. In place if `recv` is this rank's
    /// block of `send`.
    kolo_scatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: kolo_dtype_t, root: i32)
        => Arguments::of(Op::Scatter, dtype).buffers(send, recv, count).root(root);
    /// Starts kolo_scatter.
    kolo_start_scatter;

    /// Returns when all ranks have called it.
    kolo_barrier()
        => Arguments::of(Op::Barrier, KOLO_UINT8);
    /// Starts kolo_barrier.
    kolo_start_barrier;

    /// Sends `count` elements to a rank, which receives the same number of the same type with
    /// kolo_recv. It may wait until that rank has called kolo_recv: two ranks that both send first may
    /// wait for each other until the deadline. For such an exchange use a group, kolo_send_recv or
    /// kolo_start_send.
    kolo_send(send: *const c_void, count: usize, dtype: kolo_dtype_t, peer: i32)
        => Arguments::of(Op::Send, dtype).buffers(send, std::ptr::null_mut(), count).peer(peer);
    /// Starts kolo_send. Sends and receives in flight progress side by side.
    kolo_start_send;

    /// Receives `count` elements from a rank. Messages of one rank arrive in the order in which it sent
    /// them. Those with a tag are for kolo_recv_tagged.
    kolo_recv(recv: *mut c_void, count: usize, dtype: kolo_dtype_t, peer: i32)
        => Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).peer(peer);
    /// Starts kolo_recv.
    kolo_start_recv;

    /// As kolo_send, with a tag: the rank receives the message with kolo_recv_tagged and the same tag.
    /// Tag 0 is that of messages without a tag. The rank may be this one. A rank that waits in a
    /// receive keeps the messages that come before its own, up to 64 MiB of each sender; so does a
    /// collective by TCP. Others wait here, so a blocking send may wait for the peer, as kolo_send does.
    kolo_send_tagged(send: *const c_void, count: usize, dtype: kolo_dtype_t, peer: i32, tag: u32)
        => Arguments::of(Op::Send, dtype).buffers(send, std::ptr::null_mut(), count).peer(peer).tag(tag);
    /// Starts kolo_send_tagged.
    kolo_start_send_tagged;

    /// Receives `count` elements that a rank sends with this tag, in any order. Messages of one rank and
    /// one tag arrive in the order in which it sent them. If none with this tag comes before the deadline,
    /// the error names the tags of those that wait.
    kolo_recv_tagged(recv: *mut c_void, count: usize, dtype: kolo_dtype_t, peer: i32, tag: u32)
        => Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).peer(peer).tag(tag);
    /// Starts kolo_recv_tagged.
    kolo_start_recv_tagged;
}

/// Receives `count` elements from any rank: the first message without a tag that arrives and that no earlier
/// receive waits for. Writes its sender to `*source`, unless `source` is NULL. Fails at once if a
/// rank was killed, or ended on this host without kolo_comm_destroy. Not allowed in a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_recv_any(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    source: *mut i32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    // SAFETY: passed on.
    unsafe { kolo_recv_any_tagged(recv, count, dtype, source, 0, comm, stream) }
}

/// As kolo_recv_any, for messages with a tag.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_recv_any_tagged(
    recv: *mut c_void,
    count: usize,
    dtype: kolo_dtype_t,
    source: *mut i32,
    tag: u32,
    comm: kolo_comm_t,
    stream: kolo_stream_t,
) -> kolo_result_t {
    let arguments = Arguments::of(Op::Recv, dtype).buffers(std::ptr::null(), recv, count).any_source(source).tag(tag);
    on(comm, |this: &Comm| {
        held::refuse("a receive from any rank")?;
        // SAFETY: no counts are read; the buffers are valid until this returns, as the header says.
        unsafe { arguments.describe(&this.comm, stream)?.prepare(&this.comm)?.run(&this.comm) }.map_err(Fault::from)
    })
}

/// Sends to one rank and receives from another, or from the same rank, at the same time. In place if
/// `send` and `recv` are the same and so are the counts: kolo then sends a copy. Buffers that overlap
/// otherwise are refused, and so is host memory in place in a stream.
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
        let (sends, receives) = unsafe { (sends.describe(&this.comm, stream)?, receives.describe(&this.comm, stream)?) };
        let calls = [sends.prepare(&this.comm)?, receives.prepare(&this.comm)?];
        if held::is_open() {
            return held::hold(comm.addr(), calls);
        }
        // SAFETY: the caller's buffers are valid, as the header says.
        unsafe { run_together(&this.comm, calls.into()) }.map_err(Fault::from)
    })
}
