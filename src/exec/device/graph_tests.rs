//! Calls that CUDA graphs capture and replay.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::tests::{Bed, OPS, Path, User, bytes, raw};
use crate::Communicator;
use crate::cuda::device::{Address, Device, StreamId};
use crate::cuda::fake_device::{FakeDevice, FakeGraph};
use crate::error::Error;
use crate::exec::{Call, Raw};
use crate::trace::DeviceStats;
use crate::types::{DType, Op, Rank, ReduceOp};

/// A short operation, and a large one of several segments.
const COUNTS: [usize; 2] = [3, 700_000];

/// A call in a graph, with memory of its own.
struct Captured {
    raw: Raw<'static>,
    send: Address,
    recv: Address,
    lengths: [usize; 2],
}

impl Captured {
    fn new(user: &User<'_>, device: &FakeDevice, raw: Raw<'static>, is_hidden: bool) -> Captured {
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
        let of = |(i, op): (usize, Op)| COUNTS.map(|count| raw(op, dtype, count, i % world));
        let all = OPS.into_iter().enumerate().flat_map(of);
        let all: Vec<_> = all.map(|raw| Captured::new(&user, device, raw, path == Path::Areas)).collect();
        let graph = capture(device, stream, || {
            for captured in &all {
                // SAFETY: the memory is freed below.
                unsafe { comm.exec.run_prepared(&captured.call(&user)) }.unwrap();
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
        let DeviceStats { whole, staged, in_place, through_areas, copied } = comm.stats().device;
        let each = (REPLAYS * OPS.len()) as u64;
        let large = if matches!(path, Path::Areas | Path::Staged) { [each, 0] } else { [0, each] };
        assert_eq!(([whole, through_areas, copied], [staged, in_place]), ([each, 0, 0], large), "{path:?}");
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
        let raw = Raw { redop: Some(ReduceOp::Sum), ..raw(Op::AllReduce, DType::U64, self.count, 0) };
        self.user.call(&raw, self.memory, self.memory)
    }

    fn run(&self) -> Result<(), Error> {
        // SAFETY: the memory is never freed.
        unsafe { self.user.comm.exec.run_prepared(&self.call()) }
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
            let lent = call.lent.clone().unwrap();
            // SAFETY: the memory is never freed.
            let work = unsafe { comm.exec.start_prepared(call) }.unwrap();
            (lent, work)
        };
        let graph = capture(device, stream, || {
            let works = [start(&first), start(&second)];
            // Not until both have ended.
            for (lent, work) in works {
                assert!(lent.hold_stream(stream).unwrap());
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
        let (lent, _work) = start(&first);
        let other = device.user_stream();
        let refused = lent.hold_stream(other).unwrap_err();
        assert!(refused.leaves_communicator_usable() && refused.to_string().contains("CUDA graph"), "{refused}");
        let unjoined = device.end_capture(stream).err().unwrap();
        assert!(unjoined.to_string().contains("not joined"), "{unjoined}");
        drop(lent);
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
                    let raw = Raw { root: 1 - rank, send: buffer, recv: buffer, ..raw(op, DType::F32, count, 0) };
                    let mut call = comm.exec.prepare(&raw).unwrap();
                    comm.exec.lend(&mut call, stream).unwrap();
                    call
                };
                let calls = vec![message(Op::Send, send), message(Op::Recv, recv)];
                // SAFETY: the memory is never freed.
                unsafe { comm.exec.run_prepared_together(calls) }.unwrap();
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
            let mut call = comm.exec.prepare(&Raw::new(Op::Barrier, DType::U8)).unwrap();
            comm.exec.lend(&mut call, stream).unwrap();
            // SAFETY: it has no buffers.
            unsafe { comm.exec.run_prepared(&call) }.unwrap();
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
            unsafe { comm.exec.run_prepared(&call) }.unwrap();
        });
        if rank == 0 {
            device.launch(&graph, stream);
            device.synchronise(stream);
            while comm.exec.failure().is_none() {
                std::thread::yield_now();
            }
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
            while comm.exec.state.graphs.is_any() {
                std::thread::yield_now();
            }
            pinned.push(device.pinned());
            comm.barrier().unwrap();
        }
        assert_eq!(pinned.first(), pinned.last(), "{pinned:?}");
    });
}
