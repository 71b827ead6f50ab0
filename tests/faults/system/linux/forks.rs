//! Rows 25 and 52: forks.

use std::time::Duration;

use kolo::{Communicator, Error, ReduceOp};

use crate::job::{ASKED, Job, in_time};
use crate::processes::on_every_transport;
use crate::rank::{Calls, Task, collectives, say};
use crate::runner::Outcome::{self, Passed};
use crate::system::now;

pub(crate) fn forked() -> Outcome {
    on_every_transport(|_, more| _ = Job::start("fork", 2, 600_000, more).all_say("done"));
    Passed(String::new())
}

/// A child keeps open everything that its killed parent had open.
pub(crate) fn killed_with_a_child() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("parent", 3, 600_000, more);
        let child: i32 = job.hear(1, "child").parse().unwrap();
        job.all_work();
        let since = now();
        job.kill(1);
        let told = job.all_name(&[0, 2], 1, &["Died"], since);
        // SAFETY: the child lives until this call, because it only waits for signals.
        unsafe { libc::kill(child, libc::SIGKILL) };
        in_time(&format!("{name}: all ranks know"), told.after, ASKED);
        measured.push(format!("{name}: {:.0?}", told.after));
    });
    Passed(measured.join(", "))
}

/// Rank 1 has a child.
pub(super) fn be_a_parent(comm: &Communicator) -> Task {
    if comm.rank() == 1 {
        leave_a_child();
    }
    collectives(Calls::of(comm), Duration::MAX, usize::MAX)
}

/// Starts a child that keeps open what this process has open, and does nothing.
fn leave_a_child() {
    // SAFETY: the child makes only system calls.
    match unsafe { libc::fork() } {
        // SAFETY: these system calls take only numbers.
        0 => unsafe {
            // It closes its standard streams, so that no test waits for its output.
            (0..3).for_each(|file| _ = libc::close(file));
            libc::alarm(300);
            loop {
                libc::pause();
            }
        },
        child => say(&format!("child {child}")),
    }
}

/// A child that uses the communicator gets an error, and its parent and the peers continue. The
/// child also drops the registered memory, which belongs to its parent.
pub(super) fn fork(comm: &Communicator) -> Task {
    let mut memory = comm.alloc::<u64>(100_000)?;
    memory.fill(1);
    comm.barrier()?;
    let peer = 1 - comm.rank();
    let in_flight = comm.start_recv(vec![0u8], peer)?;
    // SAFETY: the child only makes calls that must fail, and ends without running destructors.
    match unsafe { libc::fork() } {
        0 => {
            let results = [
                comm.barrier(),
                comm.all_reduce(&mut [1u8], ReduceOp::Sum),
                comm.send(&[1u8], peer),
                comm.start_barrier().map(drop).map_err(Error::from),
                comm.split(0, 0).map(drop),
                // Nothing ends it in the child, which may ask for its end again and again.
                if in_flight.is_finished() { in_flight.wait().map(drop).map_err(Error::from) } else { Ok(()) },
            ];
            let refused = comm.start_all_reduce(vec![7u8; 3], ReduceOp::Sum).err().and_then(|failed| failed.into_parts().1);
            let gives_back = refused == Some(vec![7; 3]);
            drop(memory);
            let all_fail = results.iter().all(|result| matches!(result, Err(Error::Forked { .. })));
            // SAFETY: the call ends this process.
            unsafe { libc::_exit(i32::from(!all_fail || !gives_back)) };
        }
        child => {
            let mut status = 0;
            // SAFETY: the pointer is to a valid number.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0, "the calls of the child did not fail, or kept a buffer");
            comm.send(&[7u8], peer)?;
            assert_eq!(in_flight.wait()?, [7]);
            comm.all_reduce(&mut memory, ReduceOp::Sum)?;
            assert!(memory.iter().all(|&sum| sum == comm.world_size() as u64), "the drop in the child has cleared the memory");
        }
    }
    Ok(())
}
