//! What ranks report about a failure: soon, and the same on all of them.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::common::{Barrier, at_once, begin, on_every_transport, run};
use kolo::{Cause, Error, Op, ReduceOp, Transport, Waited};

/// Far less than the deadline of an operation, far more than a report takes.
const SOON: Duration = Duration::from_secs(20);

fn soon<T>(what: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = what();
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    result
}

#[test]
fn an_abort_ends_the_waits_of_all() {
    on_every_transport(4, |comm| {
        let me = comm.rank();
        if me == 2 {
            std::thread::scope(|scope| {
                // This call waits for a rank that does not send.
                let blocked = begin(scope, || soon(|| comm.recv(&mut [0u8; 4], 0)));
                let receive = comm.start_recv(vec![0u8; 4], 1).unwrap();
                assert!(matches!(receive.wait_timeout(Duration::from_millis(20)), Ok(Waited::Pending(_))));
                soon(|| comm.abort());
                assert!(matches!(blocked.join().unwrap(), Err(Error::Aborted { .. })));
            });
            return;
        }
        match soon(|| comm.recv(&mut [0u8; 4], 2)) {
            Err(Error::Peer { rank: 2, cause: Cause::Aborted, .. }) => {}
            other => panic!("{other:?}"),
        }
        assert!(matches!(comm.barrier(), Err(Error::Revoked { .. })));
    });
}

/// The two ranks never had a link, and no other rank reports the failure.
#[test]
fn a_rank_that_aborts_or_leaves_before_it_has_a_link_is_noticed_soon() {
    for aborts in [true, false] {
        on_every_transport(3, |comm| match comm.rank() {
            0 => {
                let error = soon(|| comm.recv(&mut [0u8; 4], 1)).unwrap_err();
                match error {
                    Error::Peer { rank: 1, cause: Cause::Aborted, .. } if aborts => {}
                    Error::Peer { rank: 1, cause: Cause::Left { .. } | Cause::Gone, .. } if !aborts => {}
                    other => panic!("{other:?}"),
                }
            }
            1 if aborts => comm.abort(),
            1 => drop(comm),
            // Rank 2 stays and sends nothing.
            _ => match soon(|| comm.recv(&mut [0u8; 4], 1)) {
                Err(Error::Peer { rank: 1, .. }) => {}
                other => panic!("{other:?}"),
            },
        });
    }
}

/// Rank 0 waits for two messages at the same time. It has no link to the rank that leaves.
#[test]
fn a_rank_that_leaves_is_noticed_soon_by_one_of_several_receives() {
    let is_over = Barrier::new(2);
    on_every_transport(3, |comm| match comm.rank() {
        0 => {
            let [left, _silent] = [1, 2].map(|from| comm.start_recv(vec![0u8; 4], from).unwrap());
            let _any = comm.start_recv_any(vec![0u8; 4]).unwrap();
            match soon(|| left.wait().map_err(Error::from)).unwrap_err() {
                Error::Peer { rank: 1, cause: Cause::Left { .. } | Cause::Gone, .. } => {}
                other => panic!("{other:?}"),
            }
            is_over.wait();
        }
        1 => drop(comm),
        _ => is_over.wait(),
    });
}

/// Ranks 0 and 3 wait for rank 1 before they wait for rank 2, and rank 1 receives from any rank.
#[test]
fn a_rank_that_left_is_named_by_ranks_that_wait_for_another() {
    on_every_transport(4, |comm| {
        let result = match comm.rank() {
            2 => return,
            1 => soon(|| comm.recv_any(&mut [0u8; 4])).map(drop),
            _ => soon(|| comm.barrier()),
        };
        match result {
            Err(Error::Peer { rank: 2, cause: Cause::Left { .. } | Cause::Gone, .. }) => {}
            other => panic!("rank {}: {other:?}", comm.rank()),
        }
    });
}

/// Rank 3 receives from any rank after rank 2 has left. The other ranks wait for rank 3 in another
/// call.
#[test]
fn a_rank_that_left_is_named_by_ranks_that_wait_for_a_receive_from_any_rank() {
    at_once([0, 3], |first| {
        let all_are_there = Barrier::new(4);
        // The deadline of rank `first` passes first.
        let timeout = |rank| Duration::from_millis(if rank == first { 2000 } else { 4000 });
        let options = |rank: usize, builder: kolo::Builder| builder.transport(Transport::Tcp).timeout(timeout(rank));
        run(4, options, |comm| {
            // All ranks have links.
            comm.all_to_all(&[0u8; 4], &mut [0u8; 4]).unwrap();
            all_are_there.wait();
            let result = match comm.rank() {
                2 => return,
                3 => comm.recv_any(&mut [0u8; 4]).map(drop),
                _ => comm.recv(&mut [0u8; 4], 3),
            };
            match result {
                Err(Error::Peer { rank: 2, cause: Cause::Left { .. } | Cause::Gone, .. }) => {}
                other => panic!("rank {}: {other:?}", comm.rank()),
            }
        });
    });
}

/// A receive from any rank reaches its deadline. Of the ranks that might send, one has left and one
/// makes no call.
#[test]
fn a_receive_from_any_rank_names_the_rank_that_left() {
    let (has_left, has_failed) = (Barrier::new(2), Barrier::new(2));
    let options = |_: usize, builder: kolo::Builder| builder.transport(Transport::Tcp).timeout(Duration::from_millis(600));
    run(3, options, |comm| {
        match comm.rank() {
            1 => {
                has_left.wait();
                match comm.recv_any(&mut [0u8; 4]) {
                    Err(Error::Peer { rank: 2, cause: Cause::Left { .. } | Cause::Gone, .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            2 => {
                drop(comm);
                has_left.wait();
                return;
            }
            _ => {}
        }
        has_failed.wait();
    });
}

/// A rank leaves, after it has sent or without sending. Another rank sends after the failure
/// detector has reported the first one as gone.
#[test]
fn a_rank_that_has_left_does_not_end_a_receive_from_any_other() {
    at_once([(1, true), (2, true), (1, false), (2, false)], |(left, sends)| {
        let has_left = Barrier::new(3);
        on_every_transport(3, |comm| {
            let (mut word, sender) = ([0u8; 1], 3 - left);
            let rank = comm.rank();
            if !sends {
                // The rank leaves before another rank opens a link to it.
                let stays = (rank != left).then_some(comm);
                has_left.wait();
                match stays {
                    Some(comm) if rank == sender => {
                        std::thread::sleep(Duration::from_secs(1));
                        comm.send(&[7u8], 0).unwrap();
                    }
                    Some(comm) => assert_eq!(comm.recv_any(&mut word).unwrap(), sender),
                    None => {}
                }
                return;
            }
            match rank {
                0 => {
                    assert_eq!(comm.recv_any(&mut word).unwrap(), left);
                    assert_eq!(comm.recv_any(&mut word).unwrap(), sender);
                }
                rank => {
                    if rank == sender {
                        std::thread::sleep(Duration::from_secs(1));
                    }
                    comm.send(&[7u8], 0).unwrap();
                }
            }
        });
    });
}

/// Rank 0 receives from any rank, so it has opened links to the others. Rank 1 sends nothing and
/// leaves the communicator, or it leaves a part of it and stays in the whole.
#[test]
fn a_rank_that_leaves_says_so_to_ranks_that_have_just_connected() {
    at_once([false, true], |leaves_part| {
        let has_left = Barrier::new(2);
        on_every_transport(3, |comm| {
            let rank = comm.rank();
            let part = leaves_part.then(|| comm.split(0, rank).unwrap());
            // The whole communicator lives until the end of the test.
            let (comm, _whole) = match part {
                Some(part) => (part, Some(comm)),
                None => (comm, None),
            };
            match rank {
                0 => assert_eq!(soon(|| comm.recv_any(&mut [0u8; 1])).unwrap(), 2),
                1 => {
                    std::thread::sleep(Duration::from_millis(300));
                    drop(comm);
                    has_left.wait();
                }
                _ => {
                    has_left.wait();
                    std::thread::sleep(Duration::from_secs(1));
                    comm.send(&[7u8], 0).unwrap();
                }
            }
        });
    });
}

/// Rank 0 leaves when its messages fill the memory of the link.
#[test]
fn a_rank_whose_messages_fill_the_link_says_that_it_leaves() {
    // The sizes of rings as they are made and as they grow, less the header of the message.
    let rings = [128 << 10, 2 << 20].map(|ring: usize| ring - 48);
    // The whole ring, and the ring without the space that a link reserves for its last message.
    at_once(rings.into_iter().flat_map(|ring| [ring, ring - 64]), |len| {
        let has_left = Barrier::new(2);
        on_every_transport(3, |comm| match comm.rank() {
            0 => {
                comm.send(&vec![1u8; len], 2).unwrap();
                drop(comm);
                has_left.wait();
            }
            1 => {
                has_left.wait();
                std::thread::sleep(Duration::from_millis(300));
                comm.send(&vec![2u8; len], 2).unwrap();
            }
            _ => {
                let mut message = vec![0u8; len];
                assert_eq!(soon(|| comm.recv_any(&mut message)).unwrap(), 0);
                assert_eq!(soon(|| comm.recv_any(&mut message)).unwrap(), 1);
                assert!(message.iter().all(|&byte| byte == 2));
            }
        });
    });
}

/// Rank 2 sends and leaves. Rank 1 sends nothing and stays.
#[test]
fn a_receive_does_not_name_a_rank_that_sent_before_it_left() {
    let (has_left, has_failed) = (Barrier::new(3), Barrier::new(2));
    let options = |_: usize, builder: kolo::Builder| builder.timeout(Duration::from_secs(2));
    run(3, options, |comm| match comm.rank() {
        0 => {
            assert_eq!(comm.recv_any(&mut [0u8; 1]).unwrap(), 2);
            has_left.wait();
            match comm.recv_any(&mut [0u8; 1]) {
                Err(Error::Peer { rank: 1, .. }) => {}
                other => panic!("{other:?}"),
            }
            has_failed.wait();
        }
        1 => {
            has_left.wait();
            has_failed.wait();
        }
        _ => {
            comm.send(&[7u8], 0).unwrap();
            drop(comm);
            has_left.wait();
        }
    });
}

#[test]
fn an_idle_rank_learns_of_an_abort() {
    let (all_are_there, aborted) = (Barrier::new(3), Barrier::new(3));
    on_every_transport(3, |comm| {
        all_are_there.wait();
        if comm.rank() == 0 {
            comm.abort();
        }
        aborted.wait();
        match (comm.rank(), comm.barrier()) {
            (0, Err(Error::Revoked { .. })) => {}
            (_, Err(Error::Peer { rank: 0, cause: Cause::Aborted, .. })) => {}
            other => panic!("{other:?}"),
        }
    });
}

/// A rank may learn of an abort before its call or during it.
#[test]
fn an_error_of_a_message_has_the_number_of_the_message() {
    let (all_are_there, aborted) = (Barrier::new(3), Barrier::new(3));
    on_every_transport(3, |comm| {
        match comm.rank() {
            0 => comm.send(&[1u8; 4], 1).unwrap(),
            1 => comm.recv(&mut [0u8; 4], 0).unwrap(),
            _ => {}
        }
        all_are_there.wait();
        if comm.rank() == 2 {
            comm.abort();
        }
        aborted.wait();
        // By then most ranks have learnt of the abort.
        std::thread::sleep(Duration::from_millis(300));
        let (result, number) = match comm.rank() {
            0 => (comm.recv(&mut [0u8; 4], 1), 1),
            1 => (comm.recv(&mut [0u8; 4], 0), 2),
            _ => return,
        };
        match result {
            Err(Error::Peer { rank: 2, op: Op::Recv, seq, cause: Cause::Aborted, .. }) if seq == number => {}
            other => panic!("message {number}: {other:?}"),
        }
    });
}

/// Errors name the operation that was called, also where a receive meets another call than its send.
#[test]
fn a_receive_that_fails_is_told_as_a_receive() {
    let options = |_: usize, builder: kolo::Builder| builder.transport(Transport::Tcp);
    run(2, options, |comm| {
        let result = if comm.rank() == 0 { comm.recv(&mut [0u8; 4], 1) } else { comm.barrier() };
        let told = result.unwrap_err().to_string();
        assert!(told.contains("recv seq=1") && told.contains("barrier seq=1") && !told.contains("send"), "{told}");
    });
}

/// Rank 2 waits for rank 1, rank 3 for rank 2, and so on. All ranks must name rank 1, and not the
/// rank for which they wait.
#[test]
fn at_the_deadline_all_name_the_rank_for_which_all_wait() {
    at_once([kolo::Algorithm::Ring, kolo::Algorithm::RecursiveDoubling, kolo::Algorithm::Binomial], |algorithm| {
        let all_have_failed = Barrier::new(6);
        let options = |rank: usize, builder: kolo::Builder| {
            // The deadlines pass in another order than the one in which the ranks wait for each
            // other.
            let timeout = Duration::from_millis([4500, 4500, 3500, 2500, 5500, 3000][rank]);
            builder.algorithm(algorithm).transport(Transport::Tcp).timeout(timeout)
        };
        run(6, options, |comm| {
            if comm.rank() != 1 {
                match soon(|| comm.all_reduce(&mut [1u64; 3000], ReduceOp::Sum)) {
                    Err(Error::Peer { rank: 1, cause: Cause::Absent { last_seq: 0, .. }, .. }) => {}
                    other => panic!("{algorithm:?}, rank {}: {other:?}", comm.rank()),
                }
            }
            all_have_failed.wait();
        });
    });
}

/// Rank 2 does not make the call, because it waits for another rank in another communicator.
#[test]
fn a_rank_that_waits_in_another_communicator_is_named_with_the_awaited_rank() {
    // Rank 3 is not a member of the communicator in which rank 0 waits.
    at_once([(1, Transport::Tcp), (3, Transport::Auto)], |(awaited, transport)| {
        let (has_failed, is_over) = (Barrier::new(3), Barrier::new(4));
        let options = |rank: usize, builder: kolo::Builder| {
            builder.transport(transport).timeout(Duration::from_secs(if rank == 0 { 3 } else { 600 }))
        };
        run(4, options, |comm| {
            let me = comm.rank();
            let part = comm.split(usize::from(me == 2 || me == awaited), 0).unwrap();
            let three = comm.split_or_leave((me < 3).then_some(0), 0).unwrap();
            let Some(three) = three else {
                is_over.wait();
                return;
            };
            three.barrier().unwrap();
            let error = match me {
                0 => soon(|| three.broadcast(&mut [0u8; 8], 2)).err(),
                2 => std::thread::scope(|scope| {
                    let waits = scope.spawn(|| part.barrier());
                    has_failed.wait();
                    part.abort();
                    waits.join().unwrap().err()
                }),
                _ => None,
            };
            if me != 2 {
                has_failed.wait();
            }
            is_over.wait();
            // The checks come last, so that no rank waits for one that panics.
            if me == 0 {
                let error = error.unwrap();
                let text = error.to_string();
                match error {
                    Error::Peer { rank: 2, cause: Cause::Absent { elsewhere: Some(elsewhere), .. }, .. } => {
                        assert_eq!((elsewhere.job_rank, elsewhere.rank), (awaited, (awaited < 3).then_some(awaited)));
                        assert_eq!(elsewhere.call.unwrap().op(), kolo::Op::Barrier);
                        assert!(text.contains("; it waits for rank ") && text.contains("(barrier seq=1)"), "{text}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    });
}

/// Rank 2 waits for rank 1 in a part of the ranks, and rank 1 waits for rank 3 in the whole. So all
/// ranks wait for rank 3.
#[test]
fn the_culprit_is_found_through_other_communicators() {
    let (is_waiting, has_failed) = (Barrier::new(2), Barrier::new(3));
    let options = |rank: usize, builder: kolo::Builder| builder.timeout(Duration::from_secs(if rank == 0 { 3 } else { 600 }));
    run(4, options, |comm| {
        let part = comm.split(usize::from(matches!(comm.rank(), 1 | 2)), 0).unwrap();
        let result = match comm.rank() {
            0 => {
                is_waiting.wait();
                soon(|| comm.broadcast(&mut [0u8; 8], 2))
            }
            1 => std::thread::scope(|scope| {
                let waits = scope.spawn(|| comm.recv(&mut [0u8; 8], 3));
                has_failed.wait();
                part.abort();
                waits.join().unwrap()
            }),
            2 => {
                is_waiting.wait();
                part.barrier()
            }
            _ => Ok(()),
        };
        if matches!(comm.rank(), 0 | 3) {
            has_failed.wait();
        }
        // The checks come last, so that no rank waits for one that panics.
        match (comm.rank(), result) {
            (0 | 1, Err(Error::Peer { rank: 3, cause: Cause::Absent { elsewhere: None, .. }, .. })) => {}
            (2, Err(_)) | (3, Ok(())) => {}
            other => panic!("{other:?}"),
        }
    });
}

/// Two ranks fail at the same time, and each survivor notices one or the other first.
#[test]
fn if_two_ranks_fail_all_name_the_same_one() {
    for round in 0..10 {
        let (named, all_are_there) = (Mutex::new(Vec::new()), Barrier::new(6));
        let options =
            |_: usize, builder: kolo::Builder| builder.transport(if round % 2 == 0 { Transport::Tcp } else { Transport::Auto });
        run(6, options, |comm| {
            let me = comm.rank();
            comm.barrier().unwrap();
            // Without this barrier, a rank that has completed the collective may abort it on ranks
            // that have not.
            all_are_there.wait();
            if me == 1 || me == 4 {
                comm.abort();
                return;
            }
            let error = soon(|| comm.all_reduce(&mut [1u64; 100], ReduceOp::Sum)).unwrap_err();
            named.lock().unwrap().push(error.culprit().unwrap());
        });
        let named = named.into_inner().unwrap();
        assert!(named.len() == 4 && named.iter().all(|rank| *rank == named[0]), "{named:?}");
    }
}

#[test]
fn a_split_fails_on_all_ranks_if_one_takes_no_part() {
    run(
        3,
        |_, builder| builder.timeout(Duration::from_millis(500)),
        |comm| {
            // Rank 2 does not take part in the split.
            let second = if comm.rank() == 2 { Err(comm.recv(&mut [0u8], 0).unwrap_err()) } else { comm.split(0, 0).map(drop) };
            let error = soon(|| second.unwrap_err());
            assert!(error.culprit().is_some(), "{error}");
        },
    );
}

/// The root of a broadcast or scatter waits for no peer. It leaves while its peers are in the next call, or
/// in another one at its place.
#[test]
fn a_root_that_leaves_is_noticed_soon_by_a_call_of_messages() {
    at_once((0..12).map(|case| (case % 3, case / 3 % 2 == 0, case / 6 == 0)), |(root, scatters, differs)| {
        let (received, is_over) = (Barrier::new(2), Barrier::new(3));
        on_every_transport(3, |comm| {
            let part = comm.split(0, comm.rank()).unwrap();
            let me = part.rank();
            let (all, mut mine) = ([7u8; 3], [0u8; 1]);
            if me == root || !differs {
                match scatters {
                    true => part.scatter((me == root).then_some(&all[..]), &mut mine, root).unwrap(),
                    false => part.broadcast(&mut mine, root).unwrap(),
                }
            }
            if me == root {
                drop(part);
            } else {
                // A failure on one rank ends the calls of the other, so neither is still in the first.
                received.wait();
                let counts = [1, 1, 1];
                let error = soon(|| part.all_to_all_v(&all, &counts, &mut [0u8; 3], &counts)).unwrap_err();
                assert_eq!(error.culprit(), Some(root), "rank {me}: {error}");
            }
            is_over.wait();
        });
    });
}
