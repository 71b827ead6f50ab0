//! Calls that CUDA graphs capture and replay.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::state::DeviceState;
use super::tests::{Bed, OPS, Path, User, bytes, counts, raw};
use crate::Communicator;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Lengths};
use crate::cuda::device::{Address, Device, StreamId};
use crate::cuda::fake_device::{FakeDevice, FakeGraph};
use crate::error::Error;
use crate::sys::wait_until;
use crate::trace::DeviceStats;
use crate::types::{DType, Op, Rank, ReduceOp};

/// A call in a graph, with memory of its own.
struct Captured {
    raw: Call,
    send: Address,
    recv: Address,
    lengths: [usize; 2],
}

impl Captured {
    fn new(user: &User<'_>, device: &FakeDevice, raw: Call, is_hidden: bool) -> Captured {
        let lengths = user.lengths(&raw);
        let allocate = |len: usize| {
            let memory = device.allocate(len.max(1)).unwrap();
            if is_hidden {
                device.hide(memory);
            }
            memory
        };
        Captured { raw, send: allocate(lengths[0]), recv: allocate(lengths[1]), lengths }
    }

    fn call(&self, user: &User<'_>) -> Call {
        user.call(&self.raw, self.send, self.recv)
    }

    fn free(&self, device: &FakeDevice) {
        // SAFETY: the streams have passed the last use.
        unsafe { [self.send, self.recv].into_iter().for_each(|address| device.free(address)) };
    }
}

fn capture(device: &FakeDevice, stream: StreamId, calls: impl FnOnce()) -> Arc<FakeGraph> {
    device.begin_capture(stream);
    calls();
    device.end_capture(stream).unwrap()
}

/// All collectives in one graph, which is replayed with new values.
fn every_collective(path: Path, world: usize) {
    every_collective_on(&Bed::new(path, world), path);
}

fn every_collective_on(bed: &Bed, path: Path) {
    const REPLAYS: usize = 3;
    let world = bed.world;
    let plain = Mutex::new(Communicator::in_process(world).unwrap().into_iter().map(Some).collect::<Vec<_>>());
    bed.run(|comm, rank, device, stream| {
        let plain = plain.lock()[rank].take().unwrap();
        let user = User::new(comm, device, stream, path);
        let dtype = DType::F32;
        let of = |(i, op): (usize, Op)| counts().map(|count| raw(op, dtype, count, i % world));
        let all = OPS.into_iter().enumerate().flat_map(of);
        let all: Vec<_> = all.map(|raw| Captured::new(&user, device, raw, path == Path::Areas)).collect();
        let graph = capture(device, stream, || {
            for captured in &all {
                // SAFETY: the memory is freed below.
                unsafe { comm.exec.submit_checked(&captured.call(&user)) }.unwrap();
            }
        });
        assert_eq!(comm.stats().device, DeviceStats::default(), "nothing runs at the capture");
        for replay in 0..REPLAYS {
            for (i, captured) in all.iter().enumerate() {
                let input = bytes(1000 * replay + 100 * rank + i, dtype, captured.lengths[0]);
                device.write(stream, captured.send, input);
            }
            device.launch(&graph, stream);
            for (i, captured) in all.iter().enumerate() {
                let input = bytes(1000 * replay + 100 * rank + i, dtype, captured.lengths[0]);
                let expected = user.expected(&plain, &captured.raw, &input);
                let got = device.read(stream, captured.recv, captured.lengths[1]);
                assert!(got == expected, "{:?}, rank {rank} of {world}, {path:?}, replay {replay}", captured.raw);
            }
        }
        // The calls have ended on the host, too.
        comm.barrier().unwrap();
        let DeviceStats { whole, staged, in_place, through_areas, one_shot, copied } = comm.stats().device;
        let each = (REPLAYS * OPS.len()) as u64;
        // Of three sizes, the first is short, and in the second an all-reduce is one-shot where kernels
        // wait for each other.
        let shots = if bed.have_barrier(path) { REPLAYS as u64 } else { 0 };
        let large = 2 * each - shots;
        let large = if matches!(path, Path::Areas | Path::Staged) { [large, 0] } else { [0, large] };
        let counted = ([whole, through_areas, one_shot, copied], [staged, in_place]);
        assert_eq!(counted, ([each, 0, shots, 0], large), "{path:?}");
        drop(graph);
        comm.barrier().unwrap();
        all.iter().for_each(|captured| captured.free(device));
    });
}

#[test]
fn every_collective_in_one_process() {
    [2, 3].into_iter().for_each(|world| every_collective(Path::Same, world));
}

#[test]
fn every_collective_between_processes() {
    [2, 3, 4].into_iter().for_each(|world| every_collective(Path::Imported, world));
}

#[test]
fn every_collective_on_two_gpus() {
    [2, 4].into_iter().for_each(|world| every_collective(Path::Peers, world));
}

#[test]
fn every_collective_with_a_gpu_for_each_rank() {
    [2, 3].into_iter().for_each(|world| every_collective(Path::Apart, world));
}

#[test]
fn every_collective_of_memory_that_cannot_be_opened() {
    [2, 3].into_iter().for_each(|world| every_collective(Path::Areas, world));
}

#[test]
fn every_collective_through_the_host() {
    [2, 3].into_iter().for_each(|world| every_collective(Path::Staged, world));
}

#[test]
fn every_collective_while_the_driver_is_busy() {
    let bed = Bed { is_busy: true, ..Bed::new(Path::Imported, 2) };
    every_collective_on(&bed, Path::Imported);
}

/// Ones in a buffer that all calls of a test use in place.
struct Sums<'a> {
    user: User<'a>,
    memory: Address,
    count: usize,
}

impl<'a> Sums<'a> {
    fn new(comm: &'a Communicator, device: &'a Arc<FakeDevice>, stream: StreamId, count: usize) -> Sums<'a> {
        let memory = device.allocate(8 * count).unwrap();
        Sums { user: User::new(comm, device, stream, Path::Imported), memory, count }
    }

    fn call(&self) -> Call {
        let raw = Call { redop: Some(ReduceOp::Sum), ..raw(Op::AllReduce, DType::U64, self.count, 0) };
        self.user.call(&raw, self.memory, self.memory)
    }

    fn run(&self) -> Result<(), Error> {
        // SAFETY: the memory is never freed.
        unsafe { self.user.comm.exec.submit_checked(&self.call()) }
    }

    fn set(&self, value: u64) {
        self.user.device.write(self.user.stream, self.memory, value.to_le_bytes().repeat(self.count));
    }

    fn expect(&self, value: u64) {
        let got = self.user.device.read(self.user.stream, self.memory, 8 * self.count);
        assert!(got.chunks(8).all(|bytes| bytes == value.to_le_bytes()), "{:?} instead of {value}", &got[..8]);
    }
}

/// Calls before, between and after replays, without a wait of the host: each stream takes them in its
/// order.
#[test]
fn calls_and_replays_take_turns() {
    for count in [10, 100_000] {
        Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
            let sums = Sums::new(comm, device, stream, count);
            let graph = capture(device, stream, || (0..2).for_each(|_| sums.run().unwrap()));
            for _ in 0..5 {
                sums.set(1);
                sums.run().unwrap();
                device.launch(&graph, stream);
                sums.run().unwrap();
                device.launch(&graph, stream);
                device.launch(&graph, stream);
                sums.run().unwrap();
            }
            sums.expect(1 << 9);
            comm.barrier().unwrap();
        });
    }
}

/// Two graphs of one communicator.
#[test]
fn two_graphs() {
    Bed::new(Path::Imported, 3).run(|comm, _, device, stream| {
        let (small, large) = (Sums::new(comm, device, stream, 10), Sums::new(comm, device, stream, 100_000));
        let graphs = [&small, &large].map(|sums| capture(device, stream, || sums.run().unwrap()));
        [&small, &large].into_iter().for_each(|sums| sums.set(1));
        for which in [0, 1, 1, 0, 0] {
            device.launch(&graphs[which], stream);
        }
        small.expect(27);
        large.expect(9);
        comm.barrier().unwrap();
    });
}

/// A nonblocking call works on a stream of kolo's own, which must join the capture again.
#[test]
fn nonblocking_calls() {
    Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
        let (first, second) = (Sums::new(comm, device, stream, 10), Sums::new(comm, device, stream, 100_000));
        let start = |sums: &Sums<'_>| {
            let call = sums.call();
            let bound = call.on_device.clone().unwrap();
            // SAFETY: the memory is never freed.
            let work = unsafe { comm.exec.start_checked(call) }.unwrap();
            (bound, work)
        };
        let graph = capture(device, stream, || {
            let works = [start(&first), start(&second)];
            // Not until both have ended.
            for (bound, work) in works {
                assert!(bound.hold_stream(stream).unwrap());
                drop(work);
            }
            first.run().unwrap();
        });
        for _ in 0..3 {
            [&first, &second].into_iter().for_each(|sums| sums.set(1));
            device.launch(&graph, stream);
            first.expect(4);
            second.expect(2);
        }
        // A stream outside of the capture cannot wait for it.
        device.begin_capture(stream);
        let (bound, _work) = start(&first);
        let other = device.user_stream();
        let refused = bound.hold_stream(other).unwrap_err();
        assert!(refused.leaves_communicator_usable() && refused.to_string().contains("CUDA graph"), "{refused}");
        let unjoined = device.end_capture(stream).err().unwrap();
        assert!(unjoined.to_string().contains("Unjoined"), "{unjoined}");
        drop(bound);
        first.set(1);
        first.run().unwrap();
        first.expect(2);
        comm.barrier().unwrap();
    });
}

/// Messages side by side, in both directions.
#[test]
fn messages() {
    for count in [10, 300_000] {
        Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
            let (send, recv) = (device.allocate(4 * count).unwrap(), device.allocate(4 * count).unwrap());
            let graph = capture(device, stream, || {
                let message = |op, memory: Address| {
                    let buffer = std::ptr::without_provenance_mut(memory as usize);
                    let mut call = Call {
                        root: 1 - rank,
                        send: RawSlice::at(buffer),
                        recv: RawSliceMut::at(buffer),
                        ..raw(op, DType::F32, count, 0)
                    };
                    comm.exec.check(&mut call, Lengths::Counted).unwrap();
                    comm.exec.state.bind(&mut call, stream).unwrap();
                    call
                };
                let calls = vec![message(Op::Send, send), message(Op::Recv, recv)];
                // SAFETY: the memory is never freed.
                unsafe { comm.exec.submit_together_checked(calls) }.unwrap();
            });
            for replay in 0..4 {
                let input = |rank: Rank| bytes(10 * replay + rank, DType::F32, 4 * count);
                device.write(stream, send, input(rank));
                device.launch(&graph, stream);
                // A later write must not reach the message.
                device.write(stream, send, vec![0; 4 * count]);
                assert!(device.read(stream, recv, 4 * count) == input(1 - rank), "replay {replay}");
            }
            comm.barrier().unwrap();
        });
    }
}

/// A barrier has no buffers.
#[test]
fn a_barrier() {
    Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
        let graph = capture(device, stream, || {
            let mut call = Call::raw(Op::Barrier, DType::U8);
            comm.exec.check(&mut call, Lengths::Counted).unwrap();
            comm.exec.state.bind(&mut call, stream).unwrap();
            // SAFETY: it has no buffers.
            unsafe { comm.exec.submit_checked(&call) }.unwrap();
        });
        (0..3).for_each(|_| device.launch(&graph, stream));
        device.synchronise(stream);
    });
}

/// One rank needs no other, and no host.
#[test]
fn a_single_rank() {
    Bed::new(Path::Same, 1).run(|comm, _, device, stream| {
        let sums = Sums::new(comm, device, stream, 100_000);
        let graph = capture(device, stream, || sums.run().unwrap());
        sums.set(3);
        (0..3).for_each(|_| device.launch(&graph, stream));
        sums.expect(3);
    });
}

/// After a failure, and after the communicator, replays do nothing and end.
#[test]
fn replays_end_after_the_communicator() {
    for count in [10, 100_000] {
        for aborts in [false, true] {
            let graphs = Mutex::new(Vec::new());
            let bed = Bed::new(Path::Imported, 2);
            let replay = |device: &Arc<FakeDevice>, graph: &Arc<FakeGraph>, stream: StreamId| {
                (0..3).for_each(|_| device.launch(graph, stream));
                // It would wait for ever if a word was not written.
                device.synchronise(stream);
            };
            std::thread::scope(|scope| {
                // In a thread, because `run` waits until graphs are gone.
                let ran = scope.spawn(|| {
                    bed.run(|comm, rank, device, stream| {
                        let sums = Sums::new(comm, device, stream, count);
                        let graph = capture(device, stream, || (0..2).for_each(|_| sums.run().unwrap()));
                        sums.set(1);
                        device.launch(&graph, stream);
                        sums.expect(4);
                        comm.barrier().unwrap();
                        if aborts && rank == 1 {
                            comm.abort();
                        }
                        if aborts {
                            replay(device, &graph, stream);
                        }
                        graphs.lock().push((device.clone(), graph, stream));
                    });
                });
                while graphs.lock().len() < 2 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                for (device, graph, stream) in graphs.lock().drain(..) {
                    replay(&device, &graph, stream);
                }
                ran.join().unwrap();
            });
        }
    }
}

/// A rank that does not replay: its peer's stream continues at the deadline, and the next call says
/// so.
#[test]
fn a_rank_that_does_not_replay() {
    Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
        let sums = Sums::new(comm, device, stream, 10);
        let graph = capture(device, stream, || {
            let mut call = sums.call();
            call.timeout = Some(Duration::from_millis(300));
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.submit_checked(&call) }.unwrap();
        });
        if rank == 0 {
            device.launch(&graph, stream);
            device.synchronise(stream);
            wait_until("no failure", || comm.exec.failure().is_some());
            assert!(matches!(sums.run(), Err(Error::Revoked { .. })));
        }
    });
}

/// All ranks fail at once, and at least the first to notice it says why.
#[test]
fn a_graph_on_one_rank_alone() {
    let problems = Mutex::new(Vec::new());
    Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
        let sums = Sums::new(comm, device, stream, 100_000);
        sums.set(1);
        sums.run().unwrap();
        sums.expect(2);
        let problem = if rank == 0 {
            device.begin_capture(stream);
            let problem = sums.run();
            _ = device.end_capture(stream);
            problem
        } else {
            sums.run().and_then(|()| {
                device.synchronise(stream);
                sums.run()
            })
        };
        problems.lock().push(problem.unwrap_err().to_string());
    });
    let problems = problems.into_inner();
    assert!(problems.iter().any(|problem| problem.contains("CUDA graph")), "{problems:?}");
}

/// Words and pinned memory of a graph are used again when it is gone.
#[test]
fn graphs_leave_nothing_behind() {
    Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
        let sums = Sums::new(comm, device, stream, 1000);
        let mut pinned = Vec::new();
        for _ in 0..20 {
            let graph = capture(device, stream, || sums.run().unwrap());
            sums.set(1);
            device.launch(&graph, stream);
            sums.expect(2);
            drop(graph);
            // The progress thread notices that the graph is gone.
            wait_until("the graph is there", || !DeviceState::of(&comm.exec.state).graphs.is_any());
            pinned.push(device.pinned());
            comm.barrier().unwrap();
        }
        assert_eq!(pinned.first(), pinned.last(), "{pinned:?}");
    });
}

// ---- Replays beside other work, and after the communicator. ----

/// Whether a test ends in time, and without a panic. If it hangs, its thread is left running.
fn ends_well(limit: Duration, test: impl FnOnce() + Send + 'static) -> bool {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        test();
        _ = done.send(());
    });
    wait.recv_timeout(limit).is_ok()
}

fn a_while(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// The deadline of a message.
const SOON: Duration = Duration::from_secs(30);
/// Longer than a test takes on a busy machine, if nothing waits for ever.
const LIMIT: Duration = Duration::from_secs(150);

/// A message of u64s.
fn message(comm: &Communicator, stream: StreamId, (op, peer): (Op, Rank), at: *mut u8, count: usize) -> Call {
    let mut call = Call {
        root: peer,
        send: RawSlice::at(at),
        recv: RawSliceMut::at(at),
        timeout: Some(SOON),
        ..raw(op, DType::U64, count, 0)
    };
    comm.exec.check(&mut call, Lengths::Counted).unwrap();
    comm.exec.state.bind(&mut call, stream).unwrap();
    call
}

fn pointer(address: Address) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}

/// Runs calls on a stream: now, or captured and replayed once.
fn run_once(device: &FakeDevice, stream: StreamId, is_captured: bool, calls: impl FnOnce()) -> Option<Arc<FakeGraph>> {
    if !is_captured {
        calls();
        return None;
    }
    let graph = capture(device, stream, calls);
    device.launch(&graph, stream);
    Some(graph)
}

/// A driver call of kolo's that waits for all streams, here the unpinning of the communicator's own
/// area, does not keep replays after the communicator from ending.
#[test]
fn freeing_does_not_stop_replays_after_the_communicator() {
    let ended = ends_well(LIMIT, || {
        let kept = Mutex::new(Vec::new());
        let bed = Bed::new(Path::Imported, 2);
        bed.devices.iter().for_each(|device| device.exports.store(false, std::sync::atomic::Ordering::SeqCst));
        std::thread::scope(|scope| {
            let ran = scope.spawn(|| {
                bed.run(|comm, _, device, stream| {
                    let large = Sums::new(comm, device, stream, 100_000);
                    large.run().unwrap();
                    device.synchronise(stream);
                    let sums = Sums::new(comm, device, stream, 10);
                    let graph = capture(device, stream, || (0..2).for_each(|_| sums.run().unwrap()));
                    comm.barrier().unwrap();
                    // A kernel of the user runs before the replay.
                    let held = device.hold_back(stream);
                    device.launch(&graph, stream);
                    kept.lock().push((device.clone(), graph, stream, held));
                    std::mem::forget((large, sums));
                });
            });
            while kept.lock().len() < 2 {
                a_while(1);
            }
            a_while(300);
            let kept = std::mem::take(&mut *kept.lock());
            for (device, graph, stream, held) in kept {
                drop(held);
                device.synchronise(stream);
                drop(graph);
            }
            ran.join().unwrap();
        });
    });
    assert!(ended, "a replay after the communicator never ends");
}

/// The first large call, for which the ranks exchange something before it is enqueued, comes after a
/// replay that was launched before, on all ranks.
#[test]
fn the_first_large_call_after_a_replay() {
    for is_captured in [false, true] {
        let ended = ends_well(LIMIT, move || {
            Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
                // As another communicator of the program has done.
                device.prepare(DType::U64, Some(ReduceOp::Sum)).unwrap();
                let (small, large) = (Sums::new(comm, device, stream, 10), Sums::new(comm, device, stream, 100_000));
                let graph = is_captured.then(|| capture(device, stream, || small.run().unwrap()));
                small.set(1);
                large.set(1);
                device.synchronise(stream);
                comm.barrier().unwrap();
                if rank == 0 {
                    let held = device.hold_back(stream);
                    std::thread::spawn(move || {
                        a_while(600);
                        drop(held);
                    });
                }
                match &graph {
                    Some(graph) => device.launch(graph, stream),
                    None => small.run().unwrap(),
                }
                if rank == 1 {
                    a_while(200);
                }
                large.run().unwrap();
                small.expect(2);
                large.expect(2);
                comm.barrier().unwrap();
            });
        });
        assert!(ended, "captured: {is_captured}");
    }
}

/// A message behind a replay, with one before it.
#[test]
fn messages_before_and_after_a_replay() {
    let ended = ends_well(LIMIT, || {
        Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
            let sums = Sums::new(comm, device, stream, 10);
            let memory = pointer(device.allocate(80).unwrap());
            let graph = capture(device, stream, || sums.run().unwrap());
            sums.set(1);
            device.synchronise(stream);
            comm.barrier().unwrap();
            let pass = || {
                let op = if rank == 0 { Op::Send } else { Op::Recv };
                // SAFETY: the memory is never freed.
                unsafe { comm.exec.submit_checked(&message(comm, stream, (op, 1 - rank), memory, 10)) }.unwrap();
            };
            let held = device.hold_back(stream);
            pass();
            device.launch(&graph, stream);
            pass();
            drop(held);
            device.synchronise(stream);
            assert!(comm.exec.failure().is_none(), "{:?}", comm.exec.failure());
            sums.expect(2);
            comm.barrier().unwrap();
        });
    });
    assert!(ended);
}

/// Messages of host memory in the order of a stream, side by side.
#[test]
fn messages_of_host_memory_side_by_side() {
    for has_device in [false, true] {
        for is_captured in [false, true] {
            let ended = ends_well(LIMIT, move || {
                Bed::new(Path::Imported, 2).run(|comm, rank, device, stream| {
                    let out = if has_device {
                        let memory = device.allocate(80).unwrap();
                        device.write(stream, memory, (rank as u64 + 1).to_le_bytes().repeat(10));
                        pointer(memory)
                    } else {
                        vec![rank as u64 + 1; 10].leak().as_mut_ptr().cast()
                    };
                    let back: *mut u8 = vec![0u64; 10].leak().as_mut_ptr().cast();
                    let _graph = run_once(device, stream, is_captured, || {
                        let calls = [(Op::Send, out), (Op::Recv, back)];
                        let calls = calls.map(|(op, at)| message(comm, stream, (op, 1 - rank), at, 10));
                        // SAFETY: the memory is never freed.
                        unsafe { comm.exec.submit_together_checked(calls.into()) }.unwrap();
                    });
                    let (done, wait) = std::sync::mpsc::channel();
                    let ended = std::thread::scope(|scope| {
                        scope.spawn(move || {
                            device.synchronise(stream);
                            _ = done.send(());
                        });
                        let ended = wait.recv_timeout(2 * SOON).is_ok();
                        if !ended {
                            comm.abort();
                        }
                        ended
                    });
                    assert!(ended, "the stream waited longer than twice the deadline");
                    // SAFETY: it was leaked, and the stream has passed the call.
                    assert_eq!(unsafe { back.cast::<u64>().read() }, 2 - rank as u64);
                });
            });
            assert!(ended, "the sent one on the device: {has_device}, captured: {is_captured}");
        }
    }
}

/// Runs messages of three ranks. Rank 0 has two, side by side; the peer of the first comes late.
fn one_peer_comes_late(first: Op, is_captured: bool) -> bool {
    ends_well(LIMIT, move || {
        Bed::new(Path::Imported, 3).run(|comm, rank, device, stream| {
            const LARGE: usize = 2_000_000;
            let at = [0; 2].map(|_| pointer(device.allocate(8 * LARGE).unwrap()));
            let calls = || match rank {
                0 => vec![message(comm, stream, (first, 1), at[0], LARGE), message(comm, stream, (Op::Recv, 2), at[1], 10)],
                1 => vec![message(comm, stream, (if first == Op::Send { Op::Recv } else { Op::Send }, 0), at[0], LARGE)],
                _ => vec![message(comm, stream, (Op::Send, 0), at[0], 10)],
            };
            // SAFETY: the memory is never freed.
            let run = || unsafe { comm.exec.submit_together_checked(calls()) }.unwrap();
            if rank == 1 {
                a_while(500);
            }
            let _graph = run_once(device, stream, is_captured, run);
            device.synchronise(stream);
            comm.barrier().unwrap();
        });
    })
}

/// A send in a graph holds the stream until its end. A later message may end before.
#[test]
fn a_receive_ends_before_a_send_of_its_group() {
    assert!(one_peer_comes_late(Op::Send, false), "without a graph");
    assert!(one_peer_comes_late(Op::Send, true), "in a graph");
}

/// The same for two receives.
#[test]
fn the_second_receive_of_a_group_ends_first() {
    assert!(one_peer_comes_late(Op::Recv, false), "without a graph");
    assert!(one_peer_comes_late(Op::Recv, true), "in a graph");
}

/// Two captures at once have a stream of kolo's each.
#[test]
fn nonblocking_calls_in_two_captures_at_once() {
    let ended = ends_well(LIMIT, || {
        Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
            let other = device.user_stream();
            let (first, second) = (Sums::new(comm, device, stream, 10), Sums::new(comm, device, other, 10));
            let start = |sums: &Sums<'_>, stream: StreamId| {
                let call = sums.call();
                let bound = call.on_device.clone().unwrap();
                // SAFETY: the memory is never freed.
                unsafe { comm.exec.start_checked(call) }.map(|_work| assert!(bound.hold_stream(stream).unwrap()))
            };
            let graph = capture(device, stream, || {
                start(&first, stream).unwrap();
                device.begin_capture(other);
                start(&second, other).unwrap();
                drop(device.end_capture(other).unwrap());
            });
            first.set(1);
            device.launch(&graph, stream);
            first.expect(2);
            comm.barrier().unwrap();
        });
    });
    assert!(ended);
}

/// A replay after the communicator moves nothing to other ranks. That of a short call copies what an
/// earlier one has left.
#[test]
fn replays_after_the_end_move_nothing_to_others() {
    let mut all = Vec::new();
    for count in [10, 100_000] {
        let kept = Mutex::new(Vec::new());
        let bed = Bed::new(Path::Imported, 2);
        std::thread::scope(|scope| {
            let ran = scope.spawn(|| {
                bed.run(|comm, rank, device, stream| {
                    let sums = Sums::new(comm, device, stream, count);
                    let graph = capture(device, stream, || sums.run().unwrap());
                    sums.set(1);
                    device.launch(&graph, stream);
                    sums.expect(2);
                    comm.barrier().unwrap();
                    kept.lock().push((rank, device.clone(), graph, stream, sums.memory));
                    std::mem::forget(sums);
                });
            });
            while kept.lock().len() < 2 {
                a_while(1);
            }
            a_while(300);
            let mut kept = std::mem::take(&mut *kept.lock());
            kept.sort_by_key(|(rank, ..)| *rank);
            for (_, device, _, stream, memory) in &kept {
                device.write(*stream, *memory, 7u64.to_le_bytes().repeat(count));
                device.synchronise(*stream);
            }
            // Rank 0 alone.
            let (_, device, graph, stream, _) = &kept[0];
            device.launch(graph, *stream);
            device.synchronise(*stream);
            all.push((
                count,
                kept.iter().map(|(_, device, _, stream, memory)| device.read(*stream, *memory, 8)[0]).collect::<Vec<_>>(),
            ));
            drop(kept);
            ran.join().unwrap();
        });
    }
    // Of the short call and the large one: the content of both ranks.
    assert!(all[0].1[1] == 7 && all[1].1 == [7, 7], "{all:?}");
}

/// What graphs have used does not count among the allocations that stay open.
#[test]
fn memory_of_graphs_that_are_gone_does_not_keep_others_out() {
    let ended = ends_well(3 * LIMIT, || {
        Bed::new(Path::Imported, 2).run(|comm, _, device, stream| {
            const COUNT: usize = 9000;
            let all: Vec<_> = (0..257).map(|_| Sums::new(comm, device, stream, COUNT)).collect();
            drop(capture(device, stream, || all.iter().for_each(|sums| sums.run().unwrap())));
            while DeviceState::of(&comm.exec.state).graphs.is_any() {
                a_while(1);
            }
            comm.barrier().unwrap();
            let others = [0; 2].map(|_| Sums::new(comm, device, stream, COUNT));
            for _ in 0..10 {
                for sums in &others {
                    sums.run().unwrap();
                    device.synchronise(stream);
                }
            }
            comm.barrier().unwrap();
            let stats = comm.stats().device;
            std::mem::forget(all);
            assert!(stats.in_place > 0, "{stats:?}");
        });
    });
    assert!(ended);
}
