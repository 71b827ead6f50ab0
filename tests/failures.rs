//! What ranks report of a failure: soon, and all the same.

mod common;

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use common::{on_every_transport, run};
use kolo::{Cause, Error, Op, ReduceOp, Transport, Waited};

/// Far less than the deadline of an operation, far more than anything here takes.
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
                // It waits for a rank that does not come.
                let blocked = scope.spawn(|| soon(|| comm.recv(&mut [0u8; 4], 0)));
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

/// No link was ever opened between the two, and no other rank tells.
#[test]
fn who_aborts_or_leaves_before_there_is_a_link_is_missed_soon() {
    for aborts in [true, false] {
        let all_are_there = Barrier::new(3);
        on_every_transport(3, |comm| match (all_are_there.wait(), comm.rank()).1 {
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
            // Stays, and says nothing.
            _ => match soon(|| comm.recv(&mut [0u8; 4], 1)) {
                Err(Error::Peer { rank: 1, .. }) => {}
                other => panic!("{other:?}"),
            },
        });
    }
}

/// Rank 0 waits for two messages of the same kind at the same time. No link was opened to the rank that leaves.
#[test]
fn a_rank_that_leaves_is_missed_soon_by_one_of_several_receives() {
    let all_are_there = Barrier::new(3);
    let is_over = Barrier::new(2);
    on_every_transport(3, |comm| {
        all_are_there.wait();
        match comm.rank() {
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
            _ => _ = is_over.wait(),
        }
    });
}

/// Ranks 0 and 3 wait for rank 1 before they wait for rank 2, and rank 1 receives from any rank.
#[test]
fn who_has_left_is_named_by_those_who_wait_for_another() {
    let all_are_there = Barrier::new(4);
    on_every_transport(4, |comm| {
        all_are_there.wait();
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

/// Rank 3 receives from any rank, of which rank 2 has left; the others wait for rank 3 elsewhere.
#[test]
fn who_has_left_is_named_by_those_who_wait_for_a_receive_from_any_rank() {
    let all_are_there = Barrier::new(4);
    for first in [0, 3] {
        // Whose deadline passes first.
        let timeout = |rank| Duration::from_millis(if rank == first { 3000 } else { 6000 });
        let options = |rank: usize, builder: kolo::Builder| builder.transport(Transport::Tcp).timeout(timeout(rank));
        run(4, options, |comm| {
            // All have links.
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
    }
}

/// A receive from any rank reaches its deadline. Of the ranks that might send, one has left and another is busy elsewhere.
#[test]
fn whoever_receives_from_anybody_names_who_has_left() {
    let (all_are_there, has_failed) = (Barrier::new(3), Barrier::new(2));
    let options = |_: usize, builder: kolo::Builder| builder.transport(Transport::Tcp).timeout(Duration::from_millis(600));
    run(3, options, |comm| {
        all_are_there.wait();
        match comm.rank() {
            1 => match comm.recv_any(&mut [0u8; 4]) {
                Err(Error::Peer { rank: 2, cause: Cause::Left { .. } | Cause::Gone, .. }) => {}
                other => panic!("{other:?}"),
            },
            2 => return,
            _ => {}
        }
        has_failed.wait();
    });
}

/// A rank sends and leaves. Another rank sends later than the health thread reports ranks that are gone.
#[test]
fn a_rank_that_has_left_does_not_end_a_receive_from_any_other() {
    let has_left = Barrier::new(3);
    for (left, sends) in [(1, true), (2, true), (1, false), (2, false)] {
        on_every_transport(3, |comm| {
            let (mut word, sender) = ([0u8; 1], 3 - left);
            let rank = comm.rank();
            if !sends {
                // Not while a link to it is being opened.
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
    }
}

/// Rank 0 waits for any rank, so it has opened links to the others. Rank 1, which sends nothing, leaves the communicator; or it
/// leaves a part of it and stays in the whole.
#[test]
fn a_rank_that_leaves_says_so_to_ranks_that_have_just_connected() {
    for leaves_part in [false, true] {
        let has_left = Barrier::new(2);
        on_every_transport(3, |comm| {
            let rank = comm.rank();
            let part = leaves_part.then(|| comm.split(0, rank).unwrap());
            // What is left of rank 1 ends when all is over.
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
    }
}

/// Rank 0 leaves when what it has sent fills the memory of the link.
#[test]
fn a_rank_whose_messages_fill_the_link_says_that_it_leaves() {
    // The rings of links on the heap and between processes, but for the header of the message.
    for len in [128 << 10, 256 << 10].map(|ring: usize| ring - 48) {
        // All of it, and all but what a link keeps for the last message.
        for len in [len, len - 64] {
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
        }
    }
}

/// Rank 2 sends and leaves; rank 1 sends nothing, and stays.
#[test]
fn a_rank_that_sent_before_it_left_is_not_the_one_that_a_receive_misses() {
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
fn who_is_idle_hears_of_an_abort_too() {
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

/// Whether a rank hears of an abort before it calls, or only then.
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
        // Most have heard of it by then.
        std::thread::sleep(Duration::from_millis(300));
        let (result, number) = match comm.rank() {
            0 => (comm.recv(&mut [0u8; 4], 1), 1),
            1 => (comm.recv(&mut [0u8; 4], 0), 2),
            _ => return,
        };
        match result {
            Err(Error::Peer { rank: 2, op: Op::Send, seq, cause: Cause::Aborted, .. }) if seq == number => {}
            other => panic!("message {number}: {other:?}"),
        }
    });
}

/// Rank 1 keeps rank 2 waiting, rank 2 keeps rank 3, and so on: not the one for which each waits is to blame.
#[test]
fn at_the_deadline_all_name_the_one_who_keeps_everybody_waiting() {
    for algorithm in [kolo::Algorithm::Ring, kolo::Algorithm::RecursiveDoubling, kolo::Algorithm::Binomial] {
        let all_have_failed = Barrier::new(6);
        let options = |rank: usize, builder: kolo::Builder| {
            // The ranks' deadlines pass in another order than they wait for each other.
            let timeout = Duration::from_millis([900, 900, 700, 500, 1100, 600][rank]);
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
    }
}

/// Rank 2 comes to no call of all, since it waits for another rank in a communicator of some.
#[test]
fn who_waits_in_another_communicator_is_named_with_whom_it_waits_for() {
    let (has_failed, is_over) = (Barrier::new(3), Barrier::new(4));
    // Rank 3 is not of the communicator in which rank 0 waits.
    for (awaited, transport) in [(1, Transport::Tcp), (3, Transport::Auto)] {
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
            // Only now, so that nobody waits for a rank that panics.
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
    }
}

/// Rank 2 waits among some for rank 1, which waits among all for rank 3: that one keeps them all waiting.
#[test]
fn the_way_to_the_culprit_leads_through_other_communicators() {
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
        // Only now, so that nobody waits for a rank that panics.
        match (comm.rank(), result) {
            (0 | 1, Err(Error::Peer { rank: 3, cause: Cause::Absent { elsewhere: None, .. }, .. })) => {}
            (2, Err(_)) | (3, Ok(())) => {}
            other => panic!("{other:?}"),
        }
    });
}

/// Two ranks fail at the same time, and different ranks notice one or the other first.
#[test]
fn of_two_failures_all_name_the_same() {
    for round in 0..10 {
        let (named, all_are_there) = (Mutex::new(Vec::new()), Barrier::new(6));
        let options =
            |_: usize, builder: kolo::Builder| builder.transport(if round % 2 == 0 { Transport::Tcp } else { Transport::Auto });
        run(6, options, |comm| {
            let me = comm.rank();
            comm.barrier().unwrap();
            // Who has come through may abort what others are about to come through.
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
fn a_communicator_that_is_made_tells_all_when_a_rank_does_not_come() {
    run(
        3,
        |_, builder| builder.timeout(Duration::from_millis(500)),
        |comm| {
            // Rank 2 does not take part in making the second one.
            let second = if comm.rank() == 2 { Err(comm.recv(&mut [0u8], 0).unwrap_err()) } else { comm.split(0, 0).map(drop) };
            let error = soon(|| second.unwrap_err());
            assert!(error.culprit().is_some(), "{error}");
        },
    );
}
