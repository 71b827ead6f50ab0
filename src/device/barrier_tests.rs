//! Kernels of several GPUs that wait for each other.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::driver_tests::{COUNT, Process, Seat, a_moment, on_seats, on_seats_by, seats};
use super::watchdog::Watched;
use crate::Communicator;
use crate::call::Call;
use crate::config::DeviceWaits;
use crate::cuda::barrier::{DeviceBarrier, FLAGS_BYTES};
use crate::cuda::device::{Address, Device};
use crate::cuda::moves::{KernelTask, Moves};
use crate::error::{Cause, Error};
use crate::sys::{every_case, wait_until};
use crate::types::{DType, Op};

/// Elements of a sum that is one-shot, and of one that is not.
const COUNTS: [usize; 2] = [40_000, COUNT];

fn barriers(process: &Process) -> usize {
    process.device.barriers.load(Ordering::SeqCst)
}

/// Waits for the failure of a communicator.
fn failure(process: &Process) -> Error {
    wait_until("the communicator does not fail", || process.comm.exec.failure().is_some());
    process.comm.exec.failure().unwrap().clone()
}

/// Sums until kernels have waited for each other, and returns the memory.
fn warm_up(process: &Process, count: usize) -> Address {
    let memory = process.ones();
    while barriers(process) < 2 {
        process.sum(count, memory, None).unwrap();
        process.device.synchronise(process.stream);
    }
    process.device.synchronise(process.stream);
    process.comm.barrier().unwrap();
    memory
}

/// A stream that does not come: the kernel of the other rank names the rank, and both streams
/// continue.
#[test]
fn a_stream_that_does_not_come_is_named_by_the_kernel() {
    for count in COUNTS {
        let has_failed = AtomicBool::new(false);
        on_seats(seats(2, false), |process| {
            let memory = warm_up(&process, count);
            if process.rank == 0 {
                // By its host's clock, the kernel waits an eighth less than its host.
                let (clock, timeout) = if every_case() { (1, Some(Duration::from_secs(8))) } else { (1000, None) };
                process.device.clock.store(clock, Ordering::SeqCst);
                process.sum(count, memory, timeout).unwrap();
                process.device.synchronise(process.stream);
                let error = failure(&process);
                has_failed.store(true, Ordering::SeqCst);
                assert_eq!(error.culprit(), Some(1), "{error}");
                assert!(matches!(error, Error::Peer { cause: Cause::Silent { .. }, .. }), "{error}");
            } else {
                let held = process.device.hold_back(process.stream);
                process.sum(count, memory, None).unwrap();
                wait_until("no rank fails", || has_failed.load(Ordering::SeqCst));
                drop(held);
                process.device.synchronise(process.stream);
            }
        });
    }
}

/// A kernel waits for a rank that fails: it stops long before its deadline.
#[test]
fn a_failure_ends_the_wait_of_a_kernel() {
    for count in COUNTS {
        on_seats(seats(2, false), |process| {
            let memory = warm_up(&process, count);
            if process.rank == 0 {
                // Its kernel waits for that of rank 1, whose stream does not come.
                process.sum(count, memory, None).unwrap();
                process.device.synchronise(process.stream);
                let error = failure(&process);
                assert!(
                    !matches!(error, Error::Peer { cause: Cause::Silent { .. }, .. }),
                    "the kernel waited to its limit: {error}"
                );
            } else {
                let held = process.device.hold_back(process.stream);
                process.sum(count, memory, None).unwrap();
                process.comm.abort();
                drop(held);
                process.device.synchronise(process.stream);
            }
        });
    }
}

/// A rank that ends while kernels wait: the other streams continue.
#[test]
fn a_rank_ends_while_kernels_wait() {
    for (count, microseconds) in COUNTS.into_iter().flat_map(|count| [0, 50, 200, 1000].map(|time| (count, time))) {
        on_seats(seats(3, false), |process| {
            let memory = warm_up(&process, count);
            if process.rank == 1 {
                // Nothing waits for it: each time, the rank ends at another point.
                std::thread::sleep(Duration::from_micros(microseconds));
                process.comm.abort();
            }
            while process.sum(count, memory, None).is_ok() {}
            process.device.synchronise(process.stream);
            let error = failure(&process);
            assert!(process.rank == 1 || matches!(error.culprit(), None | Some(1)), "{error}");
        });
    }
}

/// Kernels that a device may end do not wait for others, nor those of ranks that are told to wait on the
/// host, nor those of ranks that share a GPU.
#[test]
fn kernels_wait_only_where_they_may() {
    let expect_none = |process: Process| {
        for count in COUNTS {
            let memory = process.ones();
            for _ in 0..4 {
                process.sum(count, memory, None).unwrap();
                process.device.synchronise(process.stream);
            }
            process.comm.barrier().unwrap();
        }
        let stats = process.comm.stats().device;
        assert!(barriers(&process) == 0 && stats.one_shot == 0 && stats.in_place > 0, "{stats:?}");
    };
    let all: Vec<Seat> = seats(2, false);
    all[1].device.limits_kernels.store(true, Ordering::SeqCst);
    on_seats(all, expect_none);
    on_seats_by(Communicator::builder().device_waits(DeviceWaits::Host), seats(2, false), expect_none);
    on_seats(seats(3, true), expect_none);
}

/// Calls on several streams of a rank, with different sizes: no barrier is taken for that of another.
#[test]
fn barriers_of_several_streams() {
    on_seats(seats(3, false), |process| {
        let others: Vec<_> = (0..3).map(|_| process.device.user_stream()).collect();
        let memories: Vec<Address> = others.iter().map(|_| warm_up(&process, COUNT)).collect();
        for round in 0..20 {
            for (i, (&stream, &memory)) in others.iter().zip(&memories).enumerate() {
                let count = COUNTS[(round + i) % 2];
                process.device.write(stream, memory, ((process.rank + round) as f32).to_le_bytes().repeat(count));
                process.sum_on(stream, count, memory, None).unwrap();
            }
            for (i, (&stream, &memory)) in others.iter().zip(&memories).enumerate() {
                let count = COUNTS[(round + i) % 2];
                let got = process.device.read(stream, memory, 4 * count);
                let sum = (3 * round + 3) as f32;
                assert!(got.chunks(4).all(|bytes| bytes == sum.to_le_bytes()), "round {round}, stream {i}");
            }
        }
        process.comm.barrier().unwrap();
        assert!(process.comm.stats().device.one_shot >= 20);
    });
}

/// A rank calls with host memory, and the others with device memory: all are told so.
#[test]
fn host_memory_beside_a_barrier() {
    for count in COUNTS {
        let told = AtomicUsize::new(0);
        on_seats(seats(2, false), |process| {
            let memory = warm_up(&process, count);
            if process.rank == 0 {
                process.sum(count, memory, None).unwrap();
                process.device.synchronise(process.stream);
            } else {
                process.comm.all_reduce(&mut vec![1f32; count], crate::ReduceOp::Sum).unwrap_err();
            }
            // A rank may learn from the other one first.
            let said = failure(&process).to_string();
            let is_why = said.contains("host and device memory");
            assert!(is_why || said.contains("has revoked"), "{said}");
            told.fetch_add(is_why.into(), Ordering::SeqCst);
        });
        assert!(told.into_inner() > 0, "no rank says why");
    }
}

/// A host lets its stream go before its kernel has begun, as the watchdog does: other ranks do not take
/// the kernel for one that has done its part.
#[test]
fn a_kernel_that_moves_nothing_does_not_arrive() {
    // Whether rank 0 learns of the failure in time depends on the threads.
    for count in COUNTS.repeat(6) {
        on_seats(seats(2, false), |process| {
            let memory = warm_up(&process, count);
            process.device.write(process.stream, memory, 1f32.to_le_bytes().repeat(count));
            let held = (process.rank == 1).then(|| process.device.hold_back(process.stream));
            let call = process.start(count, memory);
            if process.rank == 1 {
                process.comm.exec.state.devices.release();
                drop(held);
            }
            let outcome = call.and_then(|work| Ok(work.wait()?));
            process.device.synchronise(process.stream);
            assert!(process.rank == 1 || outcome.is_err(), "rank 0 has succeeded with what rank 1 did not send");
        });
    }
}

/// A call waits in steps: its stream arrives late, and then that of another rank. Each is in time, so the
/// watchdog does not let the stream go.
#[test]
fn the_watchdog_knows_that_a_stream_has_arrived() {
    // Twice this is more than the timeout and what the watchdog adds.
    const LATE: Duration = Duration::from_secs(40);
    let has_arrived = AtomicBool::new(false);
    on_seats(seats(2, false), |process| {
        let memory = warm_up(&process, COUNT);
        let held = process.device.hold_back(process.stream);
        process.sum(COUNT, memory, None).unwrap();
        if process.rank == 0 {
            let step = |earlier: Duration| Watched::backdate(&process.comm.exec.state, earlier);
            // Until the host does nothing but wait for its stream: no step has begun for a while.
            let mut aged = None;
            wait_until("the host does not wait for its stream", || {
                let is_same = aged.is_some() && step(Duration::ZERO) == aged;
                if !is_same {
                    aged = step(LATE);
                    a_moment();
                }
                is_same
            });
            drop(held);
            wait_until("no step begins", || step(Duration::ZERO) > aged);
            step(LATE);
            has_arrived.store(true, Ordering::SeqCst);
        } else {
            wait_until("the other rank does not arrive", || has_arrived.load(Ordering::SeqCst));
            drop(held);
        }
        process.device.synchronise(process.stream);
        process.comm.barrier().unwrap();
    });
}

/// A kernel has arrived at its end, as its rank's flag says. Its limit passes there, because a peer still
/// moves: the rank fails, and its stream goes on. The peer does not succeed with what comes into the
/// buffer then.
#[test]
fn a_peer_does_not_succeed_with_what_came_after_a_deadline() {
    // The root's limit passes while the other rank moves.
    let (large, first, rounds) = if every_case() { (24 << 20, 4, 6) } else { (8 << 20, 2, 4) };
    for i in 0..rounds {
        let ready = Barrier::new(2);
        on_seats(seats(2, false), |process| {
            let memory = process.device.allocate(4 * large).unwrap();
            let broadcast = |timeout: Option<Duration>| {
                let call = process.call_on(process.stream, Op::Broadcast, DType::F32, large, memory);
                // SAFETY: the memory is never freed.
                unsafe { process.comm.exec.start_checked(Call { timeout, ..call }) }
            };
            while barriers(&process) < 2 {
                broadcast(None).unwrap().wait().unwrap();
            }
            process.comm.barrier().unwrap();
            let value = if process.rank == 0 { 1f32 } else { 0.0 };
            process.device.write(process.stream, memory, value.to_le_bytes().repeat(large));
            process.device.synchronise(process.stream);
            ready.wait();
            if process.rank == 0 {
                // The root has nothing to move.
                let outcome = broadcast(Some(Duration::from_millis(first + i)));
                process.device.write(process.stream, memory + 4 * large as u64 - 4096, vec![7; 4096]);
                process.device.synchronise(process.stream);
                _ = outcome.map(|work| work.wait());
            } else if broadcast(None).and_then(|work| Ok(work.wait()?)).is_ok() {
                let got = process.device.read(process.stream, memory, 4 * large);
                assert_eq!(got[4 * large - 4..], 1f32.to_le_bytes(), "success with what came later");
            }
            process.device.synchronise(process.stream);
        });
    }
}

/// The host takes a task back before its kernel begins: the kernel does not arrive, whatever task the
/// memory has.
#[test]
fn a_task_that_was_taken_back_has_no_barrier() {
    let mut flags = vec![0u64; 2 * FLAGS_BYTES / 8];
    let address = flags.as_mut_ptr().expose_provenance() as Address;
    let mut memory = vec![0u64; 1024];
    let at = memory.as_mut_ptr().cast::<u8>();
    let barrier = DeviceBarrier::new(0, 0, &[address, address], Duration::from_millis(20));
    // SAFETY: there is room for it, and nothing else uses it.
    unsafe {
        Moves::write(at, KernelTask { moves: Vec::new(), before: 0, barrier });
        Moves::take_back(at);
        let (_, barrier, _) = Moves::read(at);
        let began = Instant::now();
        let arrived = barrier.wait(&|| began.elapsed(), false, |address| std::ptr::with_exposed_provenance_mut(address as usize));
        assert!(!arrived && flags.iter().all(|&flag| flag == 0), "it says that it has arrived: {:?}", &flags[..2]);
    }
}
