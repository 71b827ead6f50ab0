//! What a communicator promises beyond results: order, ownership, errors and its end.

use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Barrier, DEADLINE, PATIENCE, at_once, on_every_transport, run};
use kolo::raw::{RawCall, run_together};
use kolo::{ArgumentError, Cause, Communicator, DType, Error, Op, ReduceOp, Transport, Waited, Work, WorkError};

fn argument(result: kolo::Result<()>) -> ArgumentError {
    match result {
        Err(Error::Argument { problem, .. }) => problem,
        other => panic!("{other:?}"),
    }
}

/// An executor of one task.
fn block_on<F: Future>(task: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut task = pin!(task);
    loop {
        match task.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            // As executors may: without a wake-up.
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    }
}

/// A message is exchanged in place, however large; buffers that overlap otherwise are refused, which
/// loses nothing.
#[test]
fn messages_are_exchanged_in_place_or_not_at_all_in_one_buffer() {
    on_every_transport(3, |comm| {
        let comm = &comm;
        let (rank, world) = (comm.rank(), comm.world_size());
        let (next, last) = ((rank + 1) % world, (rank + world - 1) % world);
        for count in [1, 1000, 100_000, 2_000_000] {
            let mut words = vec![rank as u32; count];
            comm.send_recv_in_place(&mut words, next, last).unwrap();
            assert!(words.iter().all(|&word| word == last as u32), "{count}");

            let mut words = vec![rank as u32; count + 1];
            let start = words.as_mut_ptr();
            // SAFETY: `words` is borrowed until the call has ended.
            let result = unsafe {
                let (mut sends, mut receives) = (RawCall::new(Op::Send, DType::U32), RawCall::new(Op::Recv, DType::U32));
                sends.peer(next).buffers(start.cast(), std::ptr::null_mut(), count);
                receives.peer(last).buffers(std::ptr::null(), start.add(1).cast(), count);
                run_together(comm, vec![sends.prepare(comm).unwrap(), receives.prepare(comm).unwrap()])
            };
            // Buffers of one element lie side by side.
            if count > 1 {
                assert_eq!(argument(result), ArgumentError::Overlap);
                assert!(words.iter().all(|&word| word == rank as u32), "{count}");
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn work_is_a_future() {
    on_every_transport(2, |comm| {
        let me = comm.rank() as u64;
        let sum = block_on(async {
            let buf = comm.start_all_reduce(vec![me; 1000], ReduceOp::Sum)?.await?;
            // The other rank starts later, so this one is polled before it is ready.
            if me == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            let first = comm.start_all_reduce(buf, ReduceOp::Sum)?;
            let second = comm.start_barrier()?;
            second.await?;
            assert!(first.is_finished(), "operations end in the order of calls");
            Ok::<_, Error>(first.await?)
        });
        assert_eq!(sum.unwrap(), [2; 1000]);
    });
}

/// A waker that runs code of the test.
struct Code(Box<dyn Fn() + Send + Sync>);

impl Wake for Code {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn waker(code: impl Fn() + Send + Sync + 'static) -> Waker {
    Arc::new(Code(Box::new(code))).into()
}

/// An executor may poll a task where it is woken, and the task may make blocking calls. It may also
/// panic.
#[test]
fn a_waker_may_call_the_communicator_and_panic() {
    on_every_transport(2, |comm| {
        let comm = Arc::new(comm);
        let mut work = pin!(comm.start_all_reduce(vec![1u32; 4], ReduceOp::Sum).unwrap());
        let (tell, told) = mpsc::channel();
        let tell = Mutex::new(tell);
        let waker = waker({
            let comm = comm.clone();
            move || {
                tell.lock().unwrap().send(comm.barrier()).unwrap();
                panic!("a defect of the executor");
            }
        });
        if work.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            told.recv_timeout(PATIENCE).unwrap().unwrap();
            assert_eq!(block_on(work).unwrap(), [2; 4]);
        } else {
            comm.barrier().unwrap();
        }
        comm.barrier().unwrap();
    });
}

/// A task may own the communicator: the waker that another replaces, and the one of a work that is
/// dropped, may be its last owner.
#[test]
fn a_waker_may_own_the_communicator() {
    for drops_work in [false, true] {
        on_every_transport(2, move |comm| {
            if comm.rank() == 1 {
                // The operation of rank 0 stays in flight until rank 0 leaves.
                _ = comm.recv(&mut [0u8], 0);
                return;
            }
            let mut work = Box::pin(comm.start_recv(vec![0u8; 4], 1).unwrap());
            let owner = waker(move || _ = comm.rank());
            assert!(work.as_mut().poll(&mut Context::from_waker(&owner)).is_pending());
            drop(owner);
            if drops_work {
                drop(work);
            } else {
                _ = work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(block_on(work).is_err());
            }
        });
    }
}

#[test]
fn an_operation_that_fails_wakes_its_future_and_gives_its_buffers_back() {
    on_every_transport(2, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            return comm.abort();
        }
        let work = comm.start_all_gather([7u64; 3], vec![9u64; 6]).unwrap();
        let (error, buffers) = block_on(work).unwrap_err().into_parts();
        assert!(matches!(error, Error::Peer { rank: 1, cause: Cause::Aborted, .. }), "{error}");
        let (send, recv) = buffers.unwrap();
        assert_eq!((send, recv.len()), ([7; 3], 6));
        let refused = comm.start_all_reduce(recv, ReduceOp::Sum).unwrap().wait().unwrap_err();
        assert!(matches!(refused.error(), Error::Revoked { .. }), "{refused}");
        assert_eq!(refused.into_parts().1.unwrap().len(), 6);
    });
}

#[test]
fn a_call_that_is_refused_gives_its_buffers_back() {
    let both = Barrier::new(2);
    on_every_transport(2, |comm| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        let values = || vec![1u32, 2, 3];
        let one = |started: Result<Work<Vec<u32>>, WorkError<Vec<u32>>>| {
            let (error, buffer) = started.unwrap_err().into_parts();
            assert!(matches!(error, Error::Argument { .. }), "{error}");
            assert_eq!(buffer.unwrap(), [1, 2, 3]);
        };
        one(comm.start_reduce(values(), ReduceOp::Sum, 2));
        one(comm.start_all_reduce(values(), ReduceOp::Average));
        one(comm.start_all_gather_in_place(values()));
        one(comm.start_send(values(), 3));
        one(comm.start_recv(values(), 2));
        let (error, buffers) = comm.start_all_gather(values(), [9u32; 5]).unwrap_err().into_parts();
        assert!(matches!(error, Error::Argument { problem: ArgumentError::Length { .. }, .. }), "{error}");
        assert_eq!(buffers.unwrap(), (values(), [9; 5]));
        let (_, buffers) = comm.start_gather(values(), None::<Vec<u32>>, me).unwrap_err().into_parts();
        assert_eq!(buffers.unwrap(), (values(), None));
        // `?` makes it an error of the library.
        let as_error = || -> kolo::Result<()> { Ok(comm.start_barrier()?.wait()?) };
        as_error().unwrap();
        // The communicator is as usable as before, until it has failed.
        assert_eq!(comm.start_broadcast(values(), 0).and_then(Work::wait).unwrap(), values());
        both.wait();
        comm.abort();
        let (error, buffer) = comm.start_all_reduce(values(), ReduceOp::Sum).and_then(Work::wait).unwrap_err().into_parts();
        assert!(!error.leaves_communicator_usable(), "{error}");
        assert_eq!(buffer.unwrap(), values());
        let (error, buffer) = comm.start_recv(values(), other).and_then(Work::wait).unwrap_err().into_parts();
        assert!(matches!(error, Error::Revoked { .. }), "{error}");
        assert_eq!(buffer.unwrap(), values());
        let (_, buffer) = comm.start_recv_any(values()).and_then(Work::wait).unwrap_err().into_parts();
        assert_eq!(buffer.unwrap().0, values());
    });
}

#[test]
fn work_gives_buffers_back_in_the_order_of_calls() {
    on_every_transport(3, |comm| {
        let me = comm.rank() as u64;
        let works: Vec<_> =
            (0..20u64).map(|i| comm.start_all_reduce(vec![me + i; 1 + 3000 * i as usize], ReduceOp::Sum).unwrap()).collect();
        // A blocking call runs after all earlier nonblocking ones.
        let mut word = [me];
        comm.all_reduce(&mut word, ReduceOp::Max).unwrap();
        assert_eq!(word, [2]);
        assert!(works.iter().all(kolo::Work::is_finished));
        for (i, work) in works.into_iter().enumerate() {
            let buf = work.wait().unwrap();
            assert_eq!(buf, vec![3 + 3 * i as u64; 1 + 3000 * i]);
        }
        let (sent, got) = comm.start_all_gather([me; 2], vec![9u64; 6]).unwrap().wait().unwrap();
        assert_eq!((sent, got), ([me; 2], vec![0, 0, 1, 1, 2, 2]));
        comm.start_barrier().unwrap().wait().unwrap();
    });
}

#[test]
fn all_nonblocking_forms() {
    on_every_transport(2, |comm| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        let is_root = me == 1;
        let mine = vec![me as i32 + 1; 4];
        let sum = vec![3; 4];
        assert_eq!(comm.start_all_reduce_into(mine.clone(), vec![0; 4], ReduceOp::Sum).unwrap().wait().unwrap().1, sum);
        assert_eq!(comm.start_broadcast(mine.clone(), 1).unwrap().wait().unwrap(), [2; 4]);
        let reduced = comm.start_reduce(mine.clone(), ReduceOp::Sum, 1).unwrap().wait().unwrap();
        assert_eq!(reduced, if is_root { sum.clone() } else { mine.clone() });
        assert_eq!(comm.start_reduce_scatter(mine.clone(), [0; 2], ReduceOp::Sum).unwrap().wait().unwrap().1, [3; 2]);
        let mut part = vec![0; 1 + 2 * me];
        part = comm.start_reduce_scatter_v(mine.clone(), part, &[1, 3], ReduceOp::Sum).unwrap().wait().unwrap().1;
        assert_eq!(part, vec![3; 1 + 2 * me]);
        let block = vec![me as i32; 1 + me];
        assert_eq!(comm.start_all_gather_v(block, vec![9; 3], &[1, 2]).unwrap().wait().unwrap().1, [0, 1, 1]);
        assert_eq!(comm.start_all_to_all(mine.clone(), vec![0; 4]).unwrap().wait().unwrap().1, [1, 1, 2, 2]);
        let counts = [1, 3];
        let received = [counts[me]; 2];
        let got = comm.start_all_to_all_v(mine.clone(), &counts, vec![0; 2 * counts[me]], &received).unwrap();
        assert_eq!(got.wait().unwrap().1.iter().sum::<i32>(), 3 * counts[me] as i32);
        let all = comm.start_gather([me as u8], is_root.then(|| vec![9u8; 2]), 1).unwrap().wait().unwrap().1;
        assert_eq!(all, is_root.then(|| vec![0, 1]));
        let block = comm.start_scatter(is_root.then(|| vec![5u8, 6]), [0u8], 1).unwrap().wait().unwrap().1;
        assert_eq!(block, [5 + me as u8]);
        let send = comm.start_send(vec![me as u64; 100_000], other).unwrap();
        let recv = comm.start_recv(vec![9u64; 100_000], other).unwrap();
        assert_eq!(recv.wait().unwrap(), vec![other as u64; 100_000]);
        send.wait().unwrap();

        let spread = comm.start_broadcast_into(is_root.then(|| mine.clone()), vec![0; 4], 1).unwrap().wait().unwrap().1;
        assert_eq!(spread, [2; 4]);
        let reduced = comm.start_reduce_into(mine, is_root.then(|| vec![0; 4]), ReduceOp::Sum, 1).unwrap().wait().unwrap().1;
        assert_eq!(reduced, is_root.then_some(sum));
    });
}

/// Each in-place form with a buffer of which this rank has filled its block, or all blocks.
#[test]
fn all_nonblocking_forms_in_place() {
    on_every_transport(2, |comm| {
        let me = comm.rank();
        let is_root = me == 1;
        // Blocks of 1 and 3 elements, or of 2 and 2.
        let counts = [1, 3];
        let filled = |range: std::ops::Range<usize>| {
            let mut buf = [9u8; 4];
            buf[range].fill(me as u8);
            buf
        };
        let (even, uneven) = ([0..2, 2..4][me].clone(), [0..1, 1..4][me].clone());
        let ones = || vec![me as u8 + 1; 4];

        let gathered = comm.start_all_gather_in_place(filled(even.clone())).unwrap().wait().unwrap();
        assert_eq!(gathered, [0, 0, 1, 1]);
        let gathered = comm.start_all_gather_v_in_place(filled(uneven.clone()), &counts).unwrap().wait().unwrap();
        assert_eq!(gathered, [0, 1, 1, 1]);
        let reduced = comm.start_reduce_scatter_in_place(ones(), ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(reduced[even.clone()], [3; 2]);
        let reduced = comm.start_reduce_scatter_v_in_place(ones(), &counts, ReduceOp::Sum).unwrap().wait().unwrap();
        assert!(reduced[uneven.clone()].iter().all(|&sum| sum == 3));
        assert_eq!(comm.start_all_to_all_in_place(ones()).unwrap().wait().unwrap(), [1, 1, 2, 2]);
        let gathered = comm.start_gather_in_place(filled(even.clone()), 1).unwrap().wait().unwrap();
        assert!(!is_root || gathered == [0, 0, 1, 1]);
        let scattered = comm.start_scatter_in_place(ones(), 1).unwrap().wait().unwrap();
        assert_eq!(scattered[even.clone()], [2; 2]);

        // The same with borrowed buffers.
        let (mut gather, mut gather_v, mut scatter) = (filled(even.clone()), filled(uneven.clone()), ones());
        let (mut reduce_v, mut to_root) = (ones(), filled(even.clone()));
        let (mut all_gather, mut reduce, mut exchange) = (filled(even.clone()), ones(), ones());
        comm.scope(|s| {
            s.all_gather_in_place(&mut all_gather)?;
            s.all_gather_v_in_place(&mut gather_v, &counts)?;
            s.reduce_scatter_in_place(&mut reduce, ReduceOp::Sum)?;
            s.reduce_scatter_v_in_place(&mut reduce_v, &counts, ReduceOp::Sum)?;
            s.all_to_all_in_place(&mut exchange)?;
            s.gather_in_place(&mut gather, 0)?;
            s.gather_in_place(&mut to_root, 1)?;
            s.scatter_in_place(&mut scatter, 1)
        })
        .unwrap();
        assert_eq!((all_gather, gather_v), ([0, 0, 1, 1], [0, 1, 1, 1]));
        assert_eq!((&reduce[even.clone()], exchange), (&[3; 2][..], vec![1, 1, 2, 2]));
        assert!(reduce_v[uneven].iter().all(|&sum| sum == 3));
        assert_eq!(if is_root { to_root } else { gather }, [0, 0, 1, 1]);
        assert_eq!(scatter[even], [2; 2]);
    });
}

#[test]
fn sends_and_receives_that_follow_each_other_do_not_wait_for_each_other() {
    let both = Barrier::new(2);
    on_every_transport(2, |comm| {
        let other = 1 - comm.rank();
        let size = 3_000_000;
        // Both ranks send before they receive, and send far more than any buffer holds.
        let sends: Vec<_> = (0..3u64).map(|i| comm.start_send(vec![i; size], other).unwrap()).collect();
        let receives: Vec<_> = (0..3).map(|_| comm.start_recv(vec![9u64; size], other).unwrap()).collect();
        for (i, work) in receives.into_iter().enumerate() {
            assert!(work.wait().unwrap().iter().all(|&word| word == i as u64), "messages of one peer arrive in order");
        }
        sends.into_iter().for_each(|work| drop(work.wait().unwrap()));
        // A receive that waits does not delay a later send.
        let receive = comm.start_recv(vec![0u8; 1], other).unwrap();
        let receive = receive.wait_timeout(Duration::from_millis(20)).unwrap();
        let Waited::Pending(receive) = receive else { panic!("nothing was sent yet") };
        both.wait();
        comm.start_send([7u8], other).unwrap().wait().unwrap();
        assert_eq!(receive.wait().unwrap(), [7]);
    });
}

#[test]
fn a_receive_from_any_rank_takes_the_first_message() {
    let (world, rounds) = (4, 20u64);
    let both = Barrier::new(world);
    on_every_transport(world, |comm| {
        let me = comm.rank();
        // The other ranks send numbered messages to rank 0, which receives all of them, those of
        // each sender in order.
        for size in [1usize, 100_000] {
            if me > 0 {
                (0..rounds).for_each(|i| comm.send(&vec![me as u64 * 1000 + i; size], 0).unwrap());
            } else {
                let mut next = vec![0u64; world];
                for i in 0..rounds * (world as u64 - 1) {
                    let mut buf = vec![0u64; size];
                    let source = if i % 2 == 0 {
                        comm.recv_any(&mut buf).unwrap()
                    } else {
                        let (back, source) = comm.start_recv_any(buf).unwrap().wait().unwrap();
                        buf = back;
                        source
                    };
                    assert!(buf.iter().all(|&word| word == source as u64 * 1000 + next[source]), "{source}");
                    next[source] += 1;
                }
                assert_eq!(next[1..], [rounds; 3]);
            }
            // A collective that peers have begun is not received as a message.
            let mut sum = [me as u64];
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [6]);
        }
        // Receives match in the order in which they were started, and neither delays a send.
        if me == 0 {
            let any = comm.start_recv_any([0u8]).unwrap();
            let from_1 = comm.start_recv([0u8], 1).unwrap();
            comm.start_send([9u8], 1).unwrap().wait().unwrap();
            assert_eq!(any.wait().unwrap(), ([1], 1));
            assert_eq!(from_1.wait().unwrap(), [2]);
        } else if me == 1 {
            let mut go = [0u8];
            comm.recv(&mut go, 0).unwrap();
            comm.send(&[1u8], 0).unwrap();
            comm.send(&[2u8], 0).unwrap();
        }
        both.wait();
        // A received message is checked as in any other receive.
        if me == 2 {
            comm.send(&[1.0f32; 3], 0).unwrap();
        } else if me == 0 {
            let error = comm.recv_any(&mut [0.0f64; 3]).unwrap_err();
            assert!(matches!(error, Error::Mismatch { peer: 2, .. }), "{error}");
        }
        both.wait();
    });
}

#[test]
fn a_receive_from_any_rank_fails_if_no_rank_sends() {
    let done = Barrier::new(3);
    run(
        3,
        |_, builder| builder.timeout(Duration::from_millis(300)),
        |comm| {
            if comm.rank() == 1 {
                let error = comm.recv_any(&mut [0u8; 4]).unwrap_err();
                done.wait();
                assert!(matches!(error, Error::Peer { cause: Cause::Silent { .. } | Cause::Absent { .. }, .. }), "{error}");
            } else {
                done.wait();
            }
        },
    );
    run(
        3,
        |_, builder| builder.timeout(PATIENCE),
        |comm| {
            // The other ranks leave.
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                done.wait();
                let error = comm.recv_any(&mut [0u8; 4]).unwrap_err();
                assert!(matches!(error, Error::Peer { .. }), "{error}");
            } else {
                drop(comm);
                done.wait();
            }
        },
    );
    // One rank has left before it had a link to the receiver, and another one sends. (The start
    // opens links to ranks at distances of powers of two.)
    let (left, done) = (Barrier::new(8), Barrier::new(8));
    run(
        8,
        |_, builder| builder.transport(kolo::Transport::Tcp),
        |comm| match comm.rank() {
            1 => {
                let mut got = [0u8; 4];
                left.wait();
                let source = comm.recv_any(&mut got);
                done.wait();
                assert_eq!((source.unwrap(), got), (0, [5; 4]));
            }
            0 => {
                left.wait();
                comm.send(&[5u8; 4], 1).unwrap();
                done.wait();
            }
            rank => {
                let stays = (rank != 4).then_some(comm);
                left.wait();
                done.wait();
                drop(stays);
            }
        },
    );
}

/// Sends more messages than any link holds at once, so that headers lie at the end of its buffers
/// and cross it.
#[test]
fn messages_are_received_past_the_end_of_every_buffer() {
    const MESSAGES: u64 = 14_000;
    on_every_transport(2, |comm| {
        for number in 0..MESSAGES {
            if comm.rank() == 0 {
                comm.send(&[number as f32; 8], 1).unwrap();
                continue;
            }
            let mut got = [0.0f32; 8];
            match number % 3 {
                0 => comm.recv(&mut got, 0).unwrap(),
                _ => assert_eq!(comm.recv_any(&mut got).unwrap(), 0),
            }
            assert_eq!(got, [number as f32; 8]);
        }
        for number in 0..1000 {
            let bytes = vec![number as u8; 1 + number * 37 % 900];
            if comm.rank() == 0 {
                comm.send(&bytes, 1).unwrap();
            } else {
                let mut got = vec![0; bytes.len()];
                assert_eq!(comm.recv_any(&mut got).unwrap(), 0);
                assert_eq!(got, bytes);
            }
        }
        if comm.rank() == 1 {
            let error = comm.recv_any(&mut [0u8; 4]).unwrap_err();
            assert!(matches!(error, Error::Peer { rank: 0, cause: Cause::Left { .. }, .. }), "{error}");
        }
    });
}

#[test]
fn scopes_lend_buffers_and_wait() {
    on_every_transport(3, |comm| {
        let me = comm.rank() as u32;
        let (mut a, mut b, c) = (vec![me; 1000], [me; 3], vec![me; 2]);
        let mut d = vec![0u32; 6];
        let answer = comm
            .scope(|s| {
                s.all_reduce(&mut a, ReduceOp::Sum)?;
                s.broadcast(&mut b, 2)?;
                s.all_gather(&c, &mut d)?;
                Ok(42)
            })
            .unwrap();
        assert_eq!((answer, a[999], b, d), (42, 3, [2; 3], vec![0, 0, 1, 1, 2, 2]));
        // The scope returns the error of its body, after its operations have ended.
        let result = comm.scope(|s| {
            s.all_reduce(&mut a, ReduceOp::Max)?;
            s.send::<u32>(&c, 99)
        });
        assert_eq!(argument(result), ArgumentError::Peer { peer: 99, world_size: 3 });
        assert_eq!(a[0], 3);
    });
}

#[test]
fn splits_are_independent_groups_in_the_order_of_keys() {
    on_every_transport(6, |comm| {
        let me = comm.rank();
        let part = comm.split(me % 2, 10 - me).unwrap();
        assert_eq!((part.world_size(), part.rank()), (3, 2 - me / 2));
        let mut ranks = [0u64; 3];
        part.all_gather(&[me as u64], &mut ranks).unwrap();
        assert_eq!(ranks, [4, 2, 0].map(|rank| rank + me as u64 % 2));
        // Both groups and the whole communicator work at the same time.
        let work = part.start_all_reduce(vec![1u32; 50_000], ReduceOp::Sum).unwrap();
        let mut all = [1u8];
        comm.all_reduce(&mut all, ReduceOp::Sum).unwrap();
        assert_eq!((all, work.wait().unwrap()[0]), ([6], 3));
        // Groups of groups, groups of one, and ranks without a group.
        let pair = part.split(part.rank() / 2, 0).unwrap();
        assert_eq!(pair.world_size(), if part.rank() < 2 { 2 } else { 1 });
        pair.barrier().unwrap();
        let some = comm.split_or_leave((me > 3).then_some(7), 0).unwrap();
        assert_eq!(some.map(|some| some.world_size()), (me > 3).then_some(2));
        comm.barrier().unwrap();
    });
}

#[test]
fn registered_buffers_are_slices_and_work_everywhere() {
    on_every_transport(4, |comm| {
        let me = comm.rank();
        for round in 0..4 {
            let mut a = comm.alloc::<f32>(100_003).unwrap();
            let mut b = comm.alloc::<f32>(100_003).unwrap();
            assert!(a.iter().all(|&x| x == 0.0), "registered memory starts as zeros");
            a.fill(me as f32);
            comm.all_reduce(&mut a, ReduceOp::Sum).unwrap();
            assert!(a.iter().all(|&x| x == 6.0));
            comm.all_reduce_into(&a, &mut b, ReduceOp::Average).unwrap();
            assert!(b.iter().all(|&x| x == 6.0));
            // A part of a registered buffer, at different offsets on the ranks. Then only some
            // ranks have registered buffers.
            b[me..me + 70_000].fill(1.0);
            comm.all_reduce(&mut b[me..me + 70_000], ReduceOp::Sum).unwrap();
            assert_eq!((b[me], b[me + 69_999], b[me + 70_000]), (4.0, 4.0, 6.0));
            let mut private = vec![1.0f32; 100_003];
            let mixed = if (me + round) % 2 == 0 { &mut a[..] } else { &mut private[..] };
            mixed.fill(1.0);
            comm.all_reduce(mixed, ReduceOp::Sum).unwrap();
            assert!(mixed.iter().all(|&x| x == 4.0));
            // Ranks drop the buffers in different orders.
            if me % 2 == 0 {
                drop(a);
            }
            let a = comm.start_all_reduce(b, ReduceOp::Max).unwrap().wait().unwrap();
            assert_eq!(a[0], 6.0);
        }
        let error = comm.alloc::<u64>(usize::MAX / 16).unwrap_err();
        assert!(matches!(error, Error::Argument { op: Op::Alloc, problem: ArgumentError::TooMany { .. } }), "{error}");
    });
}

#[test]
fn wrong_arguments_are_refused_and_leave_the_communicator_usable() {
    on_every_transport(2, |comm| {
        let me = comm.rank();
        let mut three = [1f32; 3];
        assert_eq!(argument(comm.broadcast(&mut three, 2)), ArgumentError::Root { root: 2, world_size: 2 });
        assert_eq!(
            argument(comm.reduce(&mut three, ReduceOp::Sum, usize::MAX)),
            ArgumentError::Root { root: usize::MAX, world_size: 2 }
        );
        assert_eq!(argument(comm.send(&three, 7)), ArgumentError::Peer { peer: 7, world_size: 2 });
        let average = argument(comm.all_reduce(&mut [1i32], ReduceOp::Average));
        assert!(matches!(average, ArgumentError::ReduceOp { redop: ReduceOp::Average, .. }));
        assert!(matches!(argument(comm.all_reduce(&mut three, ReduceOp::BitAnd)), ArgumentError::ReduceOp { .. }));
        let length = ArgumentError::Length { buffer: "receive", expected: 6, given: 5 };
        assert_eq!(argument(comm.all_gather(&three, &mut [0f32; 5])), length);
        assert!(matches!(argument(comm.all_to_all_in_place(&mut three)), ArgumentError::Blocks { given: 3, .. }));
        assert!(matches!(
            argument(comm.all_gather_v(&three, &mut [0f32; 3], &[3])),
            ArgumentError::Counts { given: 1, world_size: 2 }
        ));
        let counts = [usize::MAX, 2];
        assert!(matches!(argument(comm.all_gather_v(&three, &mut [0f32; 3], &counts)), ArgumentError::TooMany { .. }));
        if me == 1 {
            assert_eq!(argument(comm.gather(&three, None, 1)), ArgumentError::RootBuffer { buffer: "receive" });
        }
        three = [2.0; 3];
        comm.all_reduce(&mut three, ReduceOp::Product).unwrap();
        assert_eq!(three, [4.0; 3]);
    });
}

#[test]
fn a_call_mismatch_shows_both_sides() {
    for call in 0..5 {
        on_every_transport(2, |comm| {
            let me = comm.rank();
            let odd = me == 1;
            let mut buf = vec![1i32; 1000];
            let result = match call {
                0 if odd => comm.broadcast(&mut buf, 0),
                0 => comm.all_reduce(&mut buf, ReduceOp::Sum),
                1 => comm.all_reduce(&mut buf[..if odd { 999 } else { 1000 }], ReduceOp::Sum),
                2 => comm.all_reduce(&mut buf, if odd { ReduceOp::Max } else { ReduceOp::Sum }),
                3 if odd => comm.all_reduce(&mut vec![1u32; 1000], ReduceOp::Sum),
                3 => comm.all_reduce(&mut buf, ReduceOp::Sum),
                _ => comm.all_gather_v(
                    &buf[..500],
                    &mut vec![0i32; if odd { 900 } else { 1000 }],
                    &[if odd { 400 } else { 500 }, 500],
                ),
            };
            // The rank that compares first sees both calls, and tells the other one.
            match result {
                Err(Error::Mismatch { rank, peer, mine, theirs, .. }) => {
                    assert_eq!((rank, peer), (me, 1 - me));
                    assert_ne!(mine, theirs);
                }
                other => panic!("call {call}: {other:?}"),
            }
            assert!(buf.iter().all(|&x| x == 1), "a call mismatch has written memory");
            match comm.barrier() {
                Err(Error::Revoked { first }) => assert!(!matches!(*first, Error::Revoked { .. })),
                other => panic!("{other:?}"),
            }
        });
    }
}

/// A mismatch among three ranks, in calls in which some pairs of ranks do not communicate.
#[test]
fn every_call_mismatch_is_noticed() {
    const CALLS: usize = 7;
    for call in 0..CALLS {
        let outcomes = Mutex::new(Vec::new());
        let body = |comm: Communicator| {
            let me = comm.rank();
            let odd = me == 2;
            let (mut buf, mut blocks) = (vec![1i32; 300], vec![0i32; 900]);
            let first = match call {
                0 => comm.broadcast(&mut buf, if odd { 2 } else { 0 }),
                1 => comm.reduce(&mut buf, ReduceOp::Sum, if odd { 1 } else { 0 }),
                2 if odd => comm.reduce(&mut buf, ReduceOp::Sum, 0),
                2 => comm.broadcast(&mut buf, 0),
                3 => comm.gather(&buf, Some(&mut blocks), if odd { 1 } else { 0 }),
                4 => comm.scatter(Some(&blocks), &mut buf, if odd { 1 } else { 0 }),
                // The calls are the same, but in another order.
                5 if odd => comm.barrier().and_then(|()| comm.all_reduce(&mut buf, ReduceOp::Sum)),
                5 => comm.all_reduce(&mut buf, ReduceOp::Sum).and_then(|()| comm.barrier()),
                6 if odd => comm.split(0, 0).map(drop),
                _ => comm.all_gather(&[0u64; 4], &mut [0u64; 12]),
            };
            // A rank that only sends may learn of the mismatch one call later.
            let result = first.and_then(|()| comm.barrier());
            outcomes.lock().unwrap().push((me, result.err().map(|error| (error.to_string(), error))));
        };
        run(3, |_, builder| builder, body);
        run(3, |_, builder| builder.transport(Transport::Tcp), body);
        // Here some ranks wait for flags and others for messages.
        run(3, |rank, builder| builder.host(["a", "b", "a"][rank]), body);
        let outcomes = outcomes.into_inner().unwrap();
        for (transport, outcomes) in outcomes.chunks(3).enumerate() {
            let text = || outcomes.iter().map(|(rank, error)| format!("{rank}: {error:?}\n")).collect::<String>();
            assert!(outcomes.iter().all(|(_, error)| error.is_some()), "call {call}: a rank noticed nothing\n{}", text());
            let shows_both = |error: &Error| match error {
                Error::Mismatch { mine, theirs, .. } => mine != theirs,
                Error::Peer { cause: Cause::Mismatch(differs), .. } => differs.mine != differs.theirs,
                _ => false,
            };
            let shown = outcomes.iter().flat_map(|(_, error)| error).filter(|(_, error)| shows_both(error)).count();
            assert_eq!(shown, 3, "call {call} on transport {transport}: a rank does not show both sides\n{}", text());
        }
    }
}

/// Only one of eight ranks makes another call. All ranks name that rank, and show both calls.
#[test]
fn all_ranks_name_the_one_that_differs() {
    for (odd, call) in [(0, 0), (5, 0), (5, 1), (7, 2)] {
        let body = |comm: Communicator| {
            let is_odd = comm.rank() == odd;
            let mut buf = vec![1i32; 1000];
            let result = match call {
                0 => comm.all_reduce(&mut buf[..if is_odd { 1 } else { 2 }], ReduceOp::Sum),
                1 => comm.all_reduce(&mut buf[..if is_odd { 999 } else { 1000 }], ReduceOp::Sum),
                _ if is_odd => comm.barrier(),
                _ => comm.all_reduce(&mut buf, ReduceOp::Sum),
            };
            let error = result.expect_err("the calls differ");
            assert_eq!(error.culprit(), Some(odd), "call {call}, rank {}: {error}", comm.rank());
            match &error {
                Error::Mismatch { rank, mine, theirs, .. } => {
                    assert_eq!(*rank, comm.rank());
                    assert_ne!(mine, theirs);
                }
                // This rank learnt of the failure before it made the call.
                Error::Peer { cause: Cause::Mismatch(differs), .. } => assert_ne!(differs.mine, differs.theirs),
                _ => panic!("call {call}, rank {}: {error}", comm.rank()),
            }
        };
        run(8, |_, builder| builder, body);
        run(8, |_, builder| builder.transport(Transport::Tcp), body);
        run(8, |rank, builder| builder.host(["a", "b"][rank % 2]), body);
    }
}

/// In shared memory, the next call shows that ranks made different calls of no elements.
#[test]
fn a_call_of_no_elements_that_differs_is_noticed() {
    let all_have_called = Barrier::new(4);
    run(
        4,
        |_, builder| builder,
        |comm| {
            if comm.transport_name() != "shm" {
                return println!("NOT RUN: the ranks share no memory");
            }
            match comm.rank() {
                1 => comm.broadcast::<f32>(&mut [], 0).unwrap(),
                _ => comm.all_reduce::<f32>(&mut [], ReduceOp::Sum).unwrap(),
            }
            // The failure ends the call of a rank that is late.
            all_have_called.wait();
            let error = comm.all_reduce(&mut [1u64], ReduceOp::Sum).expect_err("the calls differ");
            assert_eq!(error.culprit(), Some(1), "rank {}: {error}", comm.rank());
            let text = error.to_string();
            assert!(text.contains("[broadcast seq=1") && text.contains("[all_reduce seq=1"), "{text}");
        },
    );
}

#[test]
fn counts_of_a_pair_that_differ_are_an_error() {
    // The count that rank 0 sends to rank 1 and the count that rank 1 expects. One of them may be
    // zero.
    for (sent, expected) in [(1usize, 3usize), (2, 0), (0, 2)] {
        let shown = Mutex::new(0);
        let runs = Mutex::new(0);
        on_every_transport(2, |comm| {
            let (send_counts, recv_counts) = if comm.rank() == 0 { ([1, sent], [1, 1]) } else { ([1, 1], [expected, 1]) };
            let mut recv = vec![0u8; recv_counts.iter().sum()];
            let send = vec![1u8; send_counts.iter().sum()];
            let result = comm.all_to_all_v(&send, &send_counts, &mut recv, &recv_counts);
            let what = (sent as u64, expected as u64);
            // Rank 0 may complete the operation, and learn of the mismatch at its next call.
            match result.and_then(|()| comm.barrier()) {
                Err(Error::Counts { peer: 0, sent, expected, .. }) if (sent, expected) == what => *shown.lock().unwrap() += 1,
                Err(Error::Peer { rank: 0, cause: Cause::Counts { to: 1, sent, expected }, .. }) if (sent, expected) == what => {}
                other => panic!("{sent} instead of {expected}: {other:?}"),
            }
            *runs.lock().unwrap() += 1;
        });
        assert_eq!(2 * *shown.lock().unwrap(), *runs.lock().unwrap(), "rank 1 must always report the mismatch");
    }
}

#[test]
fn a_rank_that_makes_no_call_is_named_at_the_deadline() {
    let options = |transport: Option<Transport>| {
        move |_: usize, builder: kolo::Builder| {
            let builder = builder.timeout(DEADLINE);
            if let Some(transport) = transport { builder.transport(transport) } else { builder }
        }
    };
    at_once([None, Some(Transport::Tcp)], |transport| {
        let all_have_failed = Barrier::new(3);
        run(3, options(transport), |comm| {
            if comm.rank() == 1 {
                all_have_failed.wait();
                return;
            }
            let began = Instant::now();
            let error = comm.all_reduce(&mut [1u64; 10], ReduceOp::Sum).unwrap_err();
            match error {
                Error::Peer { rank: 1, cause: Cause::Absent { last_seq: 0, .. }, seq: 1, op: Op::AllReduce, .. } => {}
                other => panic!("{other}"),
            }
            assert!(began.elapsed() < PATIENCE);
            all_have_failed.wait();
        });
    });
}

#[test]
fn a_rank_that_leaves_is_named_with_its_last_operation() {
    on_every_transport(2, |comm| {
        comm.barrier().unwrap();
        comm.all_reduce(&mut [1u64; 4], ReduceOp::Sum).unwrap();
        if comm.rank() == 1 {
            return;
        }
        match comm.barrier() {
            Err(Error::Peer { rank: 1, cause: Cause::Left { last_seq: 2 }, seq: 3, .. }) => {}
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_communicator_with_work_outstanding_can_be_dropped() {
    let have_looked = Barrier::new(3);
    for receives in [true, false] {
        on_every_transport(3, |comm| {
            let began = Instant::now();
            // Rank 2 makes no call, and no rank sends what another receives, so no operation can end.
            let work = match comm.rank() {
                2 => None,
                rank if receives => Some(comm.start_recv(vec![0u8; 4], 1 - rank).unwrap()),
                _ => Some(comm.start_all_reduce(vec![0u8; 4], ReduceOp::Sum).unwrap()),
            };
            assert!(work.as_ref().is_none_or(|work| !work.is_finished()));
            // The work of a rank fails when it or another one drops its communicator.
            have_looked.wait();
            drop(comm);
            let Some(work) = work else { return };
            let error = work.wait().unwrap_err();
            assert!(matches!(error.error(), Error::Aborted { .. } | Error::Peer { .. }), "{error}");
            assert!(began.elapsed() < PATIENCE);
        });
    }
}

#[test]
fn work_that_is_dropped_goes_on() {
    on_every_transport(2, |comm| {
        for _ in 0..10 {
            drop(comm.start_all_reduce(vec![1u32; 100_000], ReduceOp::Sum).unwrap());
        }
        let mut word = [1u8];
        comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
        assert_eq!(word, [2]);
    });
}

#[test]
fn alone_everything_works_without_a_store() {
    let comm = Communicator::builder().rank(0).world_size(1).connect().unwrap();
    assert_eq!((comm.rank(), comm.world_size(), comm.host_count(), comm.transport_name()), (0, 1, 1, "none"));
    for op in common::ops() {
        for in_place in [false, true] {
            let case =
                common::Case { op, dtype: kolo::DType::F32, redop: ReduceOp::Average, count: 5, root: 0, in_place, seed: 1 };
            common::check(&comm, case).unwrap();
        }
    }
    assert_eq!(comm.alloc::<bool>(3).unwrap()[..], [false; 3]);
    assert_eq!(comm.split(0, 0).unwrap().world_size(), 1);
    assert_eq!(comm.start_all_reduce([2.0f64], ReduceOp::Sum).unwrap().wait().unwrap(), [2.0]);
}

/// A buffer that keeps its communicator alive.
struct Keeper {
    words: Vec<u64>,
    _comm: Arc<Communicator>,
}

impl AsMut<[u64]> for Keeper {
    fn as_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }
}

/// Dropping a communicator waits for its progress thread. So that thread must not be the one that
/// drops the last reference.
#[test]
fn an_abandoned_operation_may_hold_the_last_reference_to_its_communicator() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        on_every_transport(2, |comm| {
            let comm = Arc::new(comm);
            let keeper = Keeper { words: vec![1; 100_000], _comm: comm.clone() };
            let work = comm.start_all_reduce(keeper, ReduceOp::Sum).unwrap();
            if comm.rank() == 0 {
                // The operation is queued and has not ended: the calls have not been compared with
                // rank 1 yet.
                drop(work);
                drop(comm);
            } else {
                assert_eq!(work.wait().unwrap().words, vec![2; 100_000]);
                // Rank 0 has dropped its communicator without an error.
                match comm.barrier().unwrap_err() {
                    Error::Peer { rank: 0, cause: Cause::Left { .. }, .. } => {}
                    other => panic!("{other}"),
                }
            }
        });
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENCE).expect("the communicator of an abandoned operation does not end");
}
