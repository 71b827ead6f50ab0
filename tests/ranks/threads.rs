//! Several threads of a rank call one communicator.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{begin, on_every_transport, random};
use kolo::{Cause, Communicator, Error, ReduceOp};

/// How long the other rank is late, so that calls of this one wait for it.
const A_MOMENT: Duration = Duration::from_millis(20);

/// Runs two calls at once; the second begins when the first waits or has ended.
fn one_after_the_other<A: Send, B>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| {
        let first = begin(scope, first);
        let second = second();
        (first.join().unwrap(), second)
    })
}

#[test]
fn collectives_take_turns() {
    on_every_transport(2, |comm| {
        // All calls are the same, so the order of the threads does not matter.
        let total = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for i in 0..50 {
                        let mut word = [1u64];
                        if i % 5 == 0 {
                            word[0] = comm.start_all_reduce(word, ReduceOp::Sum).unwrap().wait().unwrap()[0];
                        } else {
                            comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
                        }
                        total.fetch_add(word[0], Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 400);
    });
}

/// Both ranks receive in one thread, and only then send in another.
#[test]
fn a_receive_that_waits_does_not_delay_a_send() {
    on_every_transport(2, |comm| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        for len in [0, 1, 5, 1_000_003] {
            let mut received = vec![0u8; len];
            let sent = vec![me as u8 + 1; len];
            let results = one_after_the_other(|| comm.recv(&mut received, other), || comm.send(&sent, other));
            assert!(matches!(results, (Ok(()), Ok(()))), "{results:?}");
            assert_eq!(received, vec![other as u8 + 1; len]);
        }
        let (mut any, mut bools) = ([0u64], [false; 3]);
        let results = one_after_the_other(|| comm.recv_any(&mut any), || comm.send(&[me as u64 + 7], other));
        assert!(matches!(results, (Ok(source), Ok(())) if source == other), "{results:?}");
        assert_eq!(any, [other as u64 + 7]);
        let results = one_after_the_other(|| comm.recv(&mut bools, other), || comm.send(&[true, false, true], other));
        assert!(matches!(results, (Ok(()), Ok(()))), "{results:?}");
        assert_eq!(bools, [true, false, true]);
    });
}

/// Messages that no link can hold: each send waits for the receive of the peer's other thread.
#[test]
fn a_send_that_waits_does_not_delay_a_receive() {
    on_every_transport(2, |comm| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        let sent = vec![me as u32; 8 << 20];
        let mut received = vec![9u32; 8 << 20];
        let results = one_after_the_other(|| comm.send(&sent, other), || comm.recv(&mut received, other));
        assert!(matches!(results, (Ok(()), Ok(()))), "{results:?}");
        assert!(received.iter().all(|&word| word as usize == other));
    });
}

/// A receive and a send that are one call wait for another thread's call.
#[test]
fn send_recv_that_waits_does_not_delay_a_send() {
    on_every_transport(2, |comm| {
        let mut received = [0u32; 1000];
        if comm.rank() == 0 {
            let sent = vec![1u32; 1 << 20];
            let results = one_after_the_other(|| comm.send_recv(&sent, 1, &mut received, 1), || comm.send(&[2u8], 1));
            assert!(matches!(results, (Ok(()), Ok(()))), "{results:?}");
        } else {
            let (mut large, mut small) = (vec![0u32; 1 << 20], [0u8]);
            comm.recv(&mut large, 0).unwrap();
            comm.recv(&mut small, 0).unwrap();
            assert!(large.iter().all(|&word| word == 1) && small == [2]);
            comm.send(&[3u32; 1000], 0).unwrap();
        }
        assert_eq!(received, [if comm.rank() == 0 { 3 } else { 0 }; 1000]);
    });
}

#[test]
fn a_collective_waits_for_a_message_of_another_thread() {
    on_every_transport(2, |comm| {
        let mut word = [1u64];
        if comm.rank() == 0 {
            let mut received = [0u8; 100_000];
            let results = one_after_the_other(
                || comm.recv(&mut received, 1),
                || {
                    // Both come after the message, side by side with it and after it.
                    let work = comm.start_send([5u8], 1)?;
                    comm.all_reduce(&mut word, ReduceOp::Sum)?;
                    work.wait().map_err(Error::from)
                },
            );
            assert!(matches!(results, (Ok(()), Ok([5]))), "{results:?}");
            assert_eq!(received, [4; 100_000]);
        } else {
            std::thread::sleep(2 * A_MOMENT);
            comm.send(&[4u8; 100_000], 0).unwrap();
            comm.recv(&mut [0u8], 0).unwrap();
            comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
        }
        assert_eq!(word, [2]);
    });
}

/// Calls of several operations: no message of another thread comes between these.
#[test]
fn an_allocation_and_a_split_are_one_call() {
    type Call = fn(&Communicator) -> kolo::Result<()>;
    let calls: [Call; 2] = [|comm| comm.alloc::<u8>(1 << 20).map(drop), |comm| comm.split(0, 0).map(drop)];
    on_every_transport(2, |comm| {
        for call in calls {
            let receive = || {
                let mut received = [0u8];
                comm.recv(&mut received, 1).map(|()| received[0])
            };
            if comm.rank() == 0 {
                // A message comes after the call; then one comes before it, and one after it.
                let results = one_after_the_other(|| call(&comm), receive);
                assert!(matches!(results, (Ok(()), Ok(1))), "{results:?}");
                let results = one_after_the_other(receive, || one_after_the_other(|| call(&comm), receive));
                assert!(matches!(results, (Ok(2), (Ok(()), Ok(3)))), "{results:?}");
            } else {
                std::thread::sleep(2 * A_MOMENT);
                call(&comm).unwrap();
                comm.send(&[1u8], 0).unwrap();
                std::thread::sleep(3 * A_MOMENT);
                comm.send(&[2u8], 0).unwrap();
                call(&comm).unwrap();
                comm.send(&[3u8], 0).unwrap();
            }
        }
    });
}

/// Each rank has two threads for each peer: one sends, and one receives. Other calls of the rank
/// begin and end meanwhile.
#[test]
fn every_peer_has_its_threads() {
    let lengths = |from: usize, to: usize| {
        (0..60).map(move |i| {
            let at_random = random((from * 7 + to) as u64, i);
            // Most messages are small, some are larger than a link.
            (at_random >> 8) as usize % (2 << (at_random % 18))
        })
    };
    on_every_transport(3, |comm| {
        let (me, comm) = (comm.rank(), &comm);
        std::thread::scope(|scope| {
            for peer in (0..comm.world_size()).filter(|&peer| peer != me) {
                scope.spawn(move || {
                    for (i, len) in lengths(me, peer).enumerate() {
                        comm.send(&vec![(me * 100 + i) as u64; len], peer).unwrap();
                    }
                });
                scope.spawn(move || {
                    for (i, len) in lengths(peer, me).enumerate() {
                        let mut received = vec![0u64; len];
                        if i % 4 == 3 {
                            received = comm.start_recv(received, peer).unwrap().wait().unwrap();
                        } else {
                            comm.recv(&mut received, peer).unwrap();
                        }
                        assert_eq!(received, vec![(peer * 100 + i) as u64; len]);
                    }
                });
            }
        });
        comm.barrier().unwrap();
    });
}

/// What a thread's call that another thread continues returns when the communicator ends.
fn ends(end: impl Fn(Communicator) + Sync, is_expected: impl Fn(&Error) -> bool + Sync) {
    let both = Barrier::new(2);
    on_every_transport(2, |comm| {
        if comm.rank() == 1 {
            comm.send(&[1u8; 3], 0).unwrap();
            both.wait();
            end(comm);
            both.wait();
            return;
        }
        // So that the links are there.
        comm.recv(&mut [0u8; 3], 1).unwrap();
        let (mut first, mut second) = ([0u8; 10], [0u8; 10]);
        let results = one_after_the_other(
            || comm.recv(&mut first, 1),
            || {
                std::thread::scope(|scope| {
                    let third = begin(scope, || comm.recv(&mut second, 1));
                    both.wait();
                    third.join().unwrap()
                })
            },
        );
        for error in [results.0.unwrap_err(), results.1.unwrap_err()] {
            let first = if let Error::Revoked { first } = &error { first } else { &error };
            assert!(is_expected(first), "{error}");
        }
        both.wait();
    });
}

#[test]
fn all_threads_are_told_that_a_peer_has_left() {
    ends(drop, |error| matches!(error, Error::Peer { rank: 1, cause: Cause::Left { .. }, .. }));
}

#[test]
fn all_threads_are_told_that_a_peer_has_aborted() {
    ends(
        |comm| {
            comm.abort();
            drop(comm);
        },
        |error| matches!(error, Error::Peer { rank: 1, .. }),
    );
}

#[test]
fn an_abort_ends_the_calls_of_all_threads() {
    on_every_transport(2, |comm| {
        let (mut first, mut second) = ([0u8; 10], vec![0u8; 8 << 20]);
        let other = 1 - comm.rank();
        let results = one_after_the_other(
            || comm.recv(&mut first, other),
            || {
                std::thread::scope(|scope| {
                    let third = begin(scope, || comm.send(&second, other));
                    comm.abort();
                    third.join().unwrap()
                })
            },
        );
        second.fill(1);
        assert!(results.0.is_err() && results.1.is_err(), "{results:?}");
    });
}
