//! Ranks as threads, on host memory and without a driver.

// A rank is a number of many lists.
#![allow(missing_docs, clippy::needless_range_loop)]

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use common::*;

#[test]
fn ranks_on_threads_reduce_split_and_finalize() {
    on_threads(4, |rank, comm| {
        assert_eq!(sum(comm, rank as i32 + 1), Ok(10));
        let (mut count, mut own) = (0, 0);
        ok(ncclCommCount(comm, &mut count));
        ok(ncclCommUserRank(comm, &mut own));
        assert_eq!((count, own), (4, rank as c_int));
        // Rank 3 is in none; the others are in reverse order.
        let mut part = std::ptr::dangling_mut();
        let color = if rank == 3 { -1 } else { 7 };
        ok(ncclCommSplit(comm, color, -(rank as c_int), &mut part, null()));
        assert_eq!(part.is_null(), rank == 3);
        if rank < 3 {
            ok(ncclCommUserRank(part, &mut own));
            assert_eq!(own as usize, 2 - rank);
            assert_eq!(sum(part, 1), Ok(3));
            ok(ncclCommDestroy(part));
        }
        // A group that fails changes nothing.
        ok(ncclGroupStart());
        ok(ncclCommFinalize(comm));
        assert_eq!(ncclCommSplit(comm, -9, 0, &mut part, null()), INVALID_ARGUMENT);
        assert_eq!(ncclGroupEnd(), INVALID_ARGUMENT);
        ok(ncclCommFinalize(comm));
        assert_eq!(sum(comm, 1), Err(INVALID_USAGE));
        assert_eq!(state(comm), SUCCESS);
        ok(ncclCommDestroy(comm));
        assert_eq!(ncclCommDestroy(comm), INVALID_ARGUMENT);
    });
}

/// All ranks make the two calls in the same order, and threads might not.
#[test]
fn splits_of_one_group_keep_their_order() {
    on_threads(4, |rank, comm| {
        for _ in 0..30 {
            let (mut half, mut whole) = (null_mut(), null_mut());
            ok(ncclGroupStart());
            ok(ncclCommSplit(comm, rank as c_int % 2, 0, &mut half, null()));
            ok(ncclCommSplit(comm, 0, -(rank as c_int), &mut whole, null()));
            ok(ncclGroupEnd());
            assert_eq!((sum(half, 1), sum(whole, 1)), (Ok(2), Ok(4)));
            ok(ncclCommDestroy(half));
            ok(ncclCommDestroy(whole));
        }
        ok(ncclCommDestroy(comm));
    });
}

/// A rank that is in no part of a split ends its part as the others do.
#[test]
fn ending_a_null_communicator_succeeds() {
    ok(ncclGroupStart());
    ok(ncclCommFinalize(null_mut()));
    ok(ncclGroupEnd());
    ok(ncclCommRevoke(null_mut(), 0));
    // NCCL checks the flags of communicators only.
    ok(ncclCommRevoke(null_mut(), 1));
    ok(ncclCommAbort(null_mut()));
    ok(ncclCommDestroy(null_mut()));
}

#[test]
fn averages_of_integers_are_truncated() {
    on_threads(3, |rank, comm| {
        // Minus 8 divided by 3; and a sum that wraps.
        let mut values = [[-1i8, 100], [-3, 100], [-4, 100]][rank];
        let at = values.as_mut_ptr().cast::<c_void>();
        ok(ncclAllReduce(at, at, 2, INT8, AVG, comm, null_mut()));
        assert_eq!(values, [-2, 300i32.wrapping_sub(256) as i8 / 3]);
        ok(ncclCommDestroy(comm));
    });
}

/// One thread has all ranks, as nccl-tests and ncclCommInitAll have it.
#[test]
fn one_thread_has_all_ranks_in_groups() {
    const RANKS: usize = 3;
    for with_id in [false, true] {
        let mut comms = [null_mut(); RANKS];
        if with_id {
            let id = unique_id();
            ok(ncclGroupStart());
            for rank in 0..RANKS {
                ok(ncclCommInitRank(&mut comms[rank], RANKS as c_int, id, rank as c_int));
            }
            ok(ncclGroupEnd());
        } else {
            ok(ncclCommInitAll(comms.as_mut_ptr(), RANKS as c_int, null()));
        }
        let mut values = [1.0f32, 2.0, 3.0].map(|value| vec![value; 100_000]);
        let mut got = [[0i32; RANKS]; RANKS];
        ok(ncclGroupStart());
        ok(ncclGroupStart());
        for rank in 0..RANKS {
            // A rank receives before its collective, which its peers call before they send.
            let own = &raw mut got[rank];
            for peer in 0..RANKS {
                // SAFETY: it is within the array.
                let to = unsafe { own.cast::<i32>().add(peer) };
                ok(ncclRecv(to.cast(), 1, INT32, peer as c_int, comms[rank], null_mut()));
            }
            let at = values[rank].as_mut_ptr().cast::<c_void>();
            ok(ncclAllReduce(at, at, 100_000, FLOAT32, SUM, comms[rank], null_mut()));
        }
        let sent = [20, 21, 22];
        for rank in 0..RANKS {
            for peer in 0..RANKS {
                ok(ncclSend((&raw const sent[rank]).cast(), 1, INT32, peer as c_int, comms[rank], null_mut()));
            }
        }
        ok(ncclGroupEnd());
        assert_eq!(got, [[0; RANKS]; RANKS], "an inner group executes nothing");
        ok(ncclGroupEnd());
        assert_eq!(got, [sent; RANKS]);
        assert!(values.iter().flatten().all(|&value| value == 6.0));
        let mut parts = [null_mut(); RANKS];
        ok(ncclGroupStart());
        for rank in 0..RANKS {
            ok(ncclCommSplit(comms[rank], 0, 0, &mut parts[rank], null()));
        }
        ok(ncclGroupEnd());
        for comm in comms.into_iter().chain(parts) {
            assert_eq!(state(comm), SUCCESS);
            ok(ncclCommDestroy(comm));
        }
    }
}

#[test]
fn nonblocking_communicators_tell_when_they_are_ready() {
    let id = unique_id();
    let config = Config::blocking(0);
    let mut first = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut first, 2, id, 0, &config), IN_PROGRESS);
    assert_eq!(state(first), IN_PROGRESS);
    assert_eq!(sum(first, 1), Err(INVALID_ARGUMENT));
    let mut second = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut second, 2, id, 1, &config), IN_PROGRESS);
    let until_ready = |comm| {
        while state(comm) == IN_PROGRESS {
            std::thread::yield_now()
        }
    };
    for comm in [first, second] {
        until_ready(comm);
        assert_eq!(state(comm), SUCCESS, "{}", last_error(comm));
    }
    // The parts are nonblocking, too, and the whole takes no call until they are made.
    let mut parts = [null_mut(); 2];
    assert_eq!(ncclCommSplit(first, 0, 0, &mut parts[0], null()), IN_PROGRESS);
    assert_eq!(state(first), IN_PROGRESS);
    assert_eq!(ncclCommSplit(second, 0, 0, &mut parts[1], null()), IN_PROGRESS);
    for comm in [first, second, parts[0], parts[1]] {
        until_ready(comm);
        assert_eq!(state(comm), SUCCESS);
    }
    // One that never becomes ready is aborted.
    let mut alone = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut alone, 2, unique_id(), 0, &config), IN_PROGRESS);
    ok(ncclCommAbort(alone));
    for comm in [first, second, parts[0], parts[1]] {
        ok(ncclCommAbort(comm));
        assert_eq!(ncclCommDestroy(comm), INVALID_ARGUMENT);
    }
}

/// The new communicator is as its configuration says: by default blocking.
#[test]
fn a_split_waits_if_its_parent_is_blocking() {
    on_threads(1, |_, comm| {
        let mut part = null_mut();
        ok(ncclCommSplit(comm, 0, 0, &mut part, &Config::blocking(0)));
        assert_eq!(state(part), SUCCESS);
        let mut of_part = null_mut();
        assert_eq!(ncclCommSplit(part, 0, 0, &mut of_part, &Config::blocking(c_int::MIN)), IN_PROGRESS);
        while state(part) == IN_PROGRESS {
            std::thread::yield_now()
        }
        ok(ncclCommFinalize(of_part));
        assert_eq!(ncclCommFinalize(part), IN_PROGRESS);
        for comm in [of_part, part, comm] {
            ok(ncclCommAbort(comm));
        }
    });
}

#[test]
fn a_communicator_shrinks_and_grows() {
    let newcomer = std::sync::Mutex::new(None);
    let ready = std::sync::Barrier::new(3);
    on_threads(3, |rank, comm| {
        let mut smaller = null_mut();
        if rank == 1 {
            // It takes no part.
            ready.wait();
            ok(ncclCommDestroy(comm));
            let id = loop {
                if let Some(id) = *newcomer.lock().unwrap() {
                    break id;
                }
                std::thread::yield_now();
            };
            let mut larger = null_mut();
            ok(ncclCommGrow(null_mut(), 3, &id, 2, &mut larger, null()));
            assert_eq!(sum(larger, 100), Ok(111));
            ok(ncclCommDestroy(larger));
            return;
        }
        ok(ncclCommShrink(comm, &1, 1, &mut smaller, null(), 0));
        let own = rank / 2;
        assert_eq!(sum(smaller, if own == 0 { 1 } else { 10 }), Ok(11));
        ready.wait();
        let mut id = Id([0; 128]);
        // The root is any rank.
        let given = if own == 1 {
            ok(ncclCommGetUniqueId(smaller, &mut id));
            *newcomer.lock().unwrap() = Some(id);
            &raw const id
        } else {
            null()
        };
        let mut larger = null_mut();
        ok(ncclCommGrow(smaller, 3, given, -1, &mut larger, null()));
        assert_eq!(sum(larger, if own == 0 { 1 } else { 10 }), Ok(111));
        for comm in [comm, smaller, larger] {
            ok(ncclCommDestroy(comm));
        }
    });
}

#[test]
fn ranks_that_revoke_shrink_to_those_that_go_on() {
    let revoked = std::sync::Barrier::new(3);
    on_threads(3, |rank, comm| {
        ok(ncclCommRevoke(comm, 0));
        assert_eq!(state(comm), SUCCESS);
        assert_ne!(sum(comm, 1), Ok(3));
        assert_eq!(ncclCommFinalize(comm), INVALID_USAGE);
        revoked.wait();
        if rank > 0 {
            let mut smaller = null_mut();
            ok(ncclCommShrink(comm, &0, 1, &mut smaller, null(), 1));
            assert_eq!(sum(smaller, 1), Ok(2));
            ok(ncclCommDestroy(smaller));
        }
        ok(ncclCommDestroy(comm));
    });
}
