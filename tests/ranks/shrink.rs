//! How the survivors of a failure continue.

use std::sync::Mutex;

use crate::common::{Barrier, DEADLINE, on_every_transport, run};
use kolo::{Cause, Communicator, Error, ReduceOp};

/// Returns the members of this communicator, in order, as ranks of the first one.
fn first_ranks(comm: &Communicator, me: usize) -> Vec<u64> {
    let mut ranks = vec![0; comm.world_size()];
    comm.all_gather(&[me as u64], &mut ranks).unwrap();
    ranks
}

#[test]
fn survivors_continue_in_their_order() {
    for gone in [0, 2, 4] {
        let all_have_called = Barrier::new(5);
        on_every_transport(5, |comm| {
            let me = comm.rank();
            comm.barrier().unwrap();
            // A failure ends the call of a rank that is late.
            all_have_called.wait();
            if me == gone {
                return;
            }
            comm.barrier().unwrap_err();
            let fewer = comm.shrink().unwrap();
            let left: Vec<u64> = (0..5).filter(|&rank| rank != gone as u64).collect();
            assert_eq!(first_ranks(&fewer, me), left);
            assert_eq!(fewer.rank() as u64, left.iter().position(|&rank| rank == me as u64).unwrap() as u64);
            // The new communicator has all features.
            let mut word = [1u8; 100_000];
            fewer.all_reduce(&mut word, ReduceOp::Sum).unwrap();
            assert_eq!(word, [4; 100_000]);
            assert_eq!(first_ranks(&fewer.split(0, me).unwrap(), me), left);
            let buf = fewer.start_all_reduce(vec![1u32; 9], ReduceOp::Sum).unwrap().wait().unwrap();
            assert_eq!(buf, [4; 9]);
            // The old communicator has ended.
            assert!(matches!(comm.barrier(), Err(Error::Revoked { .. })));
        });
    }
}

#[test]
fn survivors_of_survivors_continue_down_to_one() {
    on_every_transport(4, |comm| {
        let me = comm.rank();
        let mut comm = comm;
        for gone in [1, 3, 0] {
            if me == gone {
                return;
            }
            comm.barrier().unwrap_err();
            comm = comm.shrink().unwrap();
        }
        assert_eq!((me, comm.world_size()), (2, 1));
        comm.barrier().unwrap();
    });
}

#[test]
fn without_a_failure_all_ranks_continue() {
    on_every_transport(3, |comm| {
        let all = comm.shrink().unwrap();
        assert_eq!(first_ranks(&all, comm.rank()), [0, 1, 2]);
        let all = all.shrink().unwrap();
        assert_eq!(first_ranks(&all, comm.rank()), [0, 1, 2]);
    });
}

/// No rank is at fault. A rank that waits learns which one shrinks, and what to do.
#[test]
fn a_shrink_without_a_failure_blames_no_rank() {
    on_every_transport(3, |comm| {
        if comm.rank() != 1 {
            match comm.recv(&mut [0u8; 4], 1) {
                Err(Error::Peer { rank: 1, cause: Cause::Shrinks, .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        let all = comm.shrink().unwrap();
        assert_eq!(first_ranks(&all, comm.rank()), [0, 1, 2]);
    });
}

#[test]
fn a_rank_that_comes_too_late_learns_that_it_was_excluded() {
    let left = Mutex::new(0);
    let went_on = Barrier::new(3);
    let asked = Barrier::new(3);
    // The deadline also holds for what the survivors do afterwards.
    let options = |_, builder: kolo::Builder| builder.timeout(DEADLINE * 3 / 2);
    run(3, options, |comm| {
        if comm.rank() != 1 {
            // Rank 1 is alive, but does not make this call.
            comm.barrier().unwrap_err();
        }
        if comm.rank() == 1 {
            went_on.wait();
            match comm.shrink() {
                Err(Error::Excluded { survivors }) => assert_eq!(survivors, [0, 2]),
                other => panic!("{other:?}"),
            }
            asked.wait();
            return;
        }
        let fewer = comm.shrink().unwrap();
        // As in a program, which drops the failed communicator.
        drop(comm);
        *left.lock().unwrap() += fewer.world_size();
        fewer.barrier().unwrap();
        went_on.wait();
        asked.wait();
    });
    assert_eq!(left.into_inner().unwrap(), 4);
}
