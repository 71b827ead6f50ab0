//! What must not hang although the driver makes calls wait for each other and for streams. Each rank
//! is a process of its own on one GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::host_area::SEGMENT;
use super::state::DeviceState;
use super::watchdog::Watched;
use crate::Work;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Lengths};
use crate::communicator::{Builder, Communicator};
use crate::cuda::device::{Address, Device, DeviceId, Driver, StreamId};
use crate::cuda::fake_device::{FakeDevice, FakeGpu, Machine};
use crate::cuda::shared::shared;
use crate::error::Result;
use crate::raw::RawCall;
use crate::sys::{every_case, wait_until};
use crate::types::{DType, Op, Rank, ReduceOp};

/// A rank.
pub(super) struct Process {
    pub(super) comm: Communicator,
    pub(super) device: Arc<FakeDevice>,
    pub(super) stream: StreamId,
    pub(super) rank: Rank,
}

/// What the process of a rank sees of the machine.
pub(super) struct Seat {
    /// The number of the process.
    pub(super) process: u64,
    pub(super) machine: Arc<dyn Driver>,
    /// The device that the rank uses.
    pub(super) device: Arc<FakeDevice>,
}

pub(super) fn on_seats(seats: Vec<Seat>, body: impl Fn(Process) + Sync) {
    on_seats_by(Communicator::builder(), seats, body);
}

pub(super) fn on_seats_by(builder: Builder, seats: Vec<Seat>, body: impl Fn(Process) + Sync) {
    let builder = builder.devices(true).timeout(Duration::from_secs(60));
    let comms = builder.connect_in_process(seats.len()).unwrap();
    let process = |(rank, (comm, seat)): (Rank, (Communicator, Seat))| {
        let comm = comm.with_driver(seat.machine);
        DeviceState::of(&comm.exec.state).process.set(seat.process).unwrap();
        Process { comm, stream: seat.device.user_stream(), device: seat.device, rank }
    };
    let processes: Vec<_> = comms.into_iter().zip(seats).enumerate().map(process).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = processes.into_iter().map(|process| scope.spawn(|| body(process))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Each rank is a process. All share a GPU, and then each has a GPU, so that kernels wait for each other.
pub(super) fn on_each(world: usize, body: impl Fn(Process) + Sync) {
    for is_shared in [true, false] {
        on_seats(seats(world, is_shared), &body);
    }
}

/// The GPU that ranks share. It is also that of rank 0, if each has one.
const SHARED: DeviceId = [7; 16];

/// Processes that share a GPU, or have a GPU each.
pub(super) fn seats(world: usize, is_shared: bool) -> Vec<Seat> {
    let gpu = Arc::<FakeGpu>::default();
    let seat = |rank: Rank| {
        let device = Arc::new(FakeDevice::on(&gpu, if is_shared { SHARED } else { SHARED.map(|byte| byte + rank as u8) }));
        Seat { process: rank as u64, machine: Arc::new(Machine(device.clone())), device }
    };
    (0..world).map(seat).collect()
}

pub(super) const COUNT: usize = 100_000;

impl Process {
    fn call(&self, op: Op, dtype: DType, count: usize, memory: Address) -> Call {
        self.call_on(self.stream, op, dtype, count, memory)
    }

    pub(super) fn call_on(&self, stream: StreamId, op: Op, dtype: DType, count: usize, memory: Address) -> Call {
        let buffer: *mut u8 = std::ptr::without_provenance_mut(memory as usize);
        let mut call = Call {
            count,
            redop: Some(ReduceOp::Sum),
            send: RawSlice::at(buffer),
            recv: RawSliceMut::at(buffer),
            ..Call::raw(op, dtype)
        };
        self.comm.exec.check(&mut call, Lengths::Counted).unwrap();
        self.comm.exec.state.bind(&mut call, stream).unwrap();
        call
    }

    /// Enqueues an all-reduce of ones in place.
    pub(super) fn all_reduce(&self, dtype: DType, memory: Address) -> Result<()> {
        // SAFETY: the memory is freed when the stream has passed the call.
        unsafe { self.comm.exec.submit_checked(&self.call(Op::AllReduce, dtype, COUNT, memory)) }
    }

    /// Enqueues a sum of f32 in place.
    pub(super) fn sum(&self, count: usize, memory: Address, timeout: Option<Duration>) -> Result<()> {
        self.sum_on(self.stream, count, memory, timeout)
    }

    pub(super) fn sum_on(&self, stream: StreamId, count: usize, memory: Address, timeout: Option<Duration>) -> Result<()> {
        let call = Call { timeout, ..self.call_on(stream, Op::AllReduce, DType::F32, count, memory) };
        // SAFETY: the memory is freed when the stream has passed the call.
        unsafe { self.comm.exec.submit_checked(&call) }
    }

    /// Starts a sum of f32 in place.
    pub(super) fn start(&self, count: usize, memory: Address) -> Result<Work<()>> {
        // SAFETY: the memory is freed when the stream has passed the call.
        unsafe { self.comm.exec.start_checked(self.call(Op::AllReduce, DType::F32, count, memory)) }
    }

    /// Whether it launches kernels: the first one of those that share a GPU.
    pub(super) fn is_leader(&self) -> bool {
        self.rank == 0 || self.device.id() != SHARED
    }

    pub(super) fn ones(&self) -> Address {
        let memory = self.device.allocate(4 * COUNT).unwrap();
        self.device.write(self.stream, memory, 1f32.to_le_bytes().repeat(COUNT));
        memory
    }

    pub(super) fn expect(&self, memory: Address, value: f32) {
        let got = self.device.read(self.stream, memory, 4 * COUNT);
        assert!(got.chunks(4).all(|bytes| bytes == value.to_le_bytes()), "{:?}", &got[..16]);
    }
}

/// Each rank starts to receive from all others before it sends: no stream is made while receives hold
/// some, and no send is behind a receive.
#[test]
fn receives_from_many_ranks_before_the_sends() {
    const WORLD: usize = 10;
    on_seats(seats(WORLD, true), |process| {
        let Process { comm, device, stream, rank } = &process;
        let (rank, count) = (*rank, 100_000);
        let others = || (0..WORLD).filter(|&peer| peer != rank);
        let start = |op: Op, peer: Rank, memory: Address| {
            let buffer: *mut u8 = std::ptr::without_provenance_mut(memory as usize);
            let mut call =
                Call { count, root: peer, send: RawSlice::at(buffer), recv: RawSliceMut::at(buffer), ..Call::raw(op, DType::U8) };
            comm.exec.check(&mut call, Lengths::Counted).unwrap();
            comm.exec.state.bind(&mut call, *stream).unwrap();
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.start_checked(call).unwrap() }
        };
        let out = device.allocate(count).unwrap();
        device.write(*stream, out, vec![rank as u8; count]);
        let received: Vec<(Rank, Address)> = others().map(|peer| (peer, device.allocate(count).unwrap())).collect();
        for _ in 0..2 {
            let receives: Vec<_> = received.iter().map(|&(peer, memory)| start(Op::Recv, peer, memory)).collect();
            let sends: Vec<_> = others().map(|peer| start(Op::Send, peer, out)).collect();
            receives.into_iter().chain(sends).for_each(|work| work.wait().unwrap());
        }
        for &(peer, memory) in &received {
            assert!(device.read(*stream, memory, count).iter().all(|&byte| byte == peer as u8), "{rank} from {peer}");
        }
    });
}

/// A rank ends at any point of its peer's operation: the peer's stream continues.
#[test]
fn a_rank_ends_at_any_point() {
    for microseconds in [0, 50, 200, 1000, 3000] {
        on_each(2, |process| {
            let memory = process.ones();
            process.all_reduce(DType::F32, memory).unwrap();
            process.device.synchronise(process.stream);
            process.comm.barrier().unwrap();
            if process.rank == 1 {
                std::thread::sleep(Duration::from_micros(microseconds));
                process.comm.abort();
            }
            while process.all_reduce(DType::F32, memory).is_ok() {}
            // It would wait for ever if a word was not written.
            process.device.synchronise(process.stream);
        });
    }
}

/// A rank that does not call lets its peers' streams continue at the deadline.
#[test]
fn a_stream_continues_at_the_deadline() {
    on_each(2, |process| {
        let memory = process.ones();
        process.all_reduce(DType::F32, memory).unwrap();
        process.device.synchronise(process.stream);
        process.comm.barrier().unwrap();
        if process.rank == 0 {
            for count in [100, COUNT] {
                let mut call = process.call(Op::AllReduce, DType::F32, count, memory);
                call.timeout = Some(Duration::from_millis(300));
                // SAFETY: the memory is freed when the stream has passed the call.
                let outcome = unsafe { process.comm.exec.submit_checked(&call) };
                assert_eq!(outcome.is_ok(), count == 100, "{outcome:?}");
                process.device.synchronise(process.stream);
                // The stream continues before the failure is recorded, which fails the next call.
                wait_until("the operation does not fail", || process.comm.exec.failure().is_some());
            }
        }
    });
}

/// The device does not come to verify that it reaches its peers: the call fails at its deadline.
#[test]
fn a_verification_that_does_not_end() {
    let both = std::sync::Barrier::new(2);
    on_each(2, |process| {
        let memory = process.ones();
        process.device.synchronise(process.stream);
        let held = (process.rank == 0).then(|| process.device.hold_back_kernels());
        both.wait();
        let mut call = process.call(Op::AllReduce, DType::F32, COUNT, memory);
        call.timeout = Some(Duration::from_millis(400));
        // SAFETY: the memory is never freed.
        let outcome = unsafe { process.comm.exec.submit_checked(&call) };
        assert!(outcome.is_err() && process.comm.exec.failure().is_some(), "{outcome:?}");
        both.wait();
        drop(held);
        process.device.synchronise(process.stream);
    });
}

/// The watchdog lets the streams of a communicator continue, whatever its other threads do.
#[test]
fn a_stream_continues_without_the_progress_thread() {
    on_each(2, |process| {
        let memory = process.ones();
        process.all_reduce(DType::F32, memory).unwrap();
        process.device.synchronise(process.stream);
        process.comm.barrier().unwrap();
        if process.rank == 0 {
            let shared = process.comm.exec.state.clone();
            let watched = Watched::new(&shared, Duration::from_millis(100));
            let core = shared.core.lock();
            process.all_reduce(DType::F32, memory).unwrap();
            process.device.synchronise(process.stream);
            drop(core);
            drop(watched);
        }
    });
}

/// Case 7: a fork does not part the words of the host from those of the device.
#[test]
#[cfg(all(unix, not(miri)))]
fn a_fork_shares_the_words() {
    let device: Arc<dyn Device> = Arc::new(FakeDevice::new());
    let words = shared(&*device).words.take(&device, 1).unwrap();
    // SAFETY: the child only reads memory, and ends without running anything of its parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let began = Instant::now();
        while !words.is_ended(0) && began.elapsed() < Duration::from_secs(60) {}
        // SAFETY: it does not return.
        unsafe { libc::_exit(i32::from(!words.is_ended(0))) };
    }
    words.end(0);
    let mut status = 0;
    // SAFETY: it waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child does not see what its parent writes");
}

/// Waits until a thread of the test has come where it waits.
pub(super) fn a_moment() {
    std::thread::sleep(Duration::from_millis(50));
}

/// Has another thread of rank 0 call the driver while an all-reduce holds back its stream. Rank 1
/// makes its call afterwards.
fn while_a_stream_is_held_back(driver_call: impl Fn(&FakeDevice) + Sync) {
    let is_held = AtomicBool::new(false);
    on_each(2, |process| {
        let memory = process.ones();
        process.all_reduce(DType::F32, memory).unwrap();
        process.expect(memory, 2.0);
        is_held.store(false, Ordering::SeqCst);
        process.comm.barrier().unwrap();
        if process.rank == 0 {
            process.all_reduce(DType::F32, memory).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| driver_call(&process.device));
                a_moment();
                is_held.store(true, Ordering::SeqCst);
                // This thread's own calls queue behind the other one's.
                process.expect(memory, 4.0);
            });
        } else {
            wait_until("the other rank goes on", || is_held.load(Ordering::SeqCst));
            process.all_reduce(DType::F32, memory).unwrap();
            process.expect(memory, 4.0);
        }
    });
}

/// Case 1: memory is freed.
#[test]
fn memory_is_freed_while_a_stream_is_held_back() {
    while_a_stream_is_held_back(|device| {
        let other = device.allocate(100).unwrap();
        // SAFETY: nothing uses it.
        unsafe { device.free(other) };
    });
}

/// Case 5: the first kernel of a new kind is loaded.
#[test]
fn a_kernel_is_loaded_while_a_sum_is_held_back() {
    while_a_stream_is_held_back(|device| device.prepare(DType::F64, Some(ReduceOp::Max)).unwrap());
}

/// Case 2: the first calls are nonblocking, and the stream waits for each at once.
#[test]
fn the_first_calls_are_nonblocking() {
    on_each(2, |process| {
        let memory = process.ones();
        for count in [100, COUNT] {
            let call = process.call(Op::AllReduce, DType::F32, count, memory);
            let bound = call.on_device.clone().unwrap();
            // SAFETY: the memory is never freed.
            let work = unsafe { process.comm.exec.start_checked(call).unwrap() };
            assert!(bound.hold_stream(process.stream).unwrap());
            work.wait().unwrap();
        }
        process.device.synchronise(process.stream);
    });
}

/// Cases 3 and 4: messages, and memory that peers have replaced, while another call is held back.
#[test]
fn buffers_and_messages_come_and_go() {
    on_each(2, |process| {
        for _ in 0..20 {
            let memory = process.ones();
            process.all_reduce(DType::F32, memory).unwrap();
            let buffer: *mut u8 = std::ptr::without_provenance_mut(memory as usize);
            let op = if process.rank == 0 { Op::Send } else { Op::Recv };
            let mut call = Call {
                count: COUNT,
                root: 1 - process.rank,
                send: RawSlice::at(buffer),
                recv: RawSliceMut::at(buffer),
                ..Call::raw(op, DType::F32)
            };
            process.comm.exec.check(&mut call, Lengths::Counted).unwrap();
            process.comm.exec.state.bind(&mut call, process.stream).unwrap();
            // SAFETY: the memory is freed when the stream has passed the call.
            unsafe { process.comm.exec.submit_checked(&call).unwrap() };
            process.expect(memory, 2.0);
            // SAFETY: the stream has passed its last use.
            unsafe { process.device.free(memory) };
        }
    });
}

/// Case 6: what a peer frees does not stay open.
#[test]
fn nothing_freed_stays_open() {
    let gpu_used = |process: &Process| process.device.gpu_used();
    on_each(2, |process| {
        let memory = process.ones();
        for _ in 0..5 {
            process.all_reduce(DType::F32, memory).unwrap();
        }
        process.device.synchronise(process.stream);
        process.comm.barrier().unwrap();
        let before = gpu_used(&process);
        for _ in 0..10 {
            let memory = process.ones();
            for _ in 0..5 {
                process.all_reduce(DType::F32, memory).unwrap();
            }
            process.device.synchronise(process.stream);
            process.comm.barrier().unwrap();
            // SAFETY: the stream has passed its last use.
            unsafe { process.device.free(memory) };
        }
        // From time to time a rank looks what is no more.
        for _ in 0..70 {
            process.all_reduce(DType::F32, memory).unwrap();
            process.device.synchronise(process.stream);
        }
        wait_until("memory stays open", || process.device.open() <= 2 && gpu_used(&process) <= before);
        process.comm.barrier().unwrap();
    });
}

/// Whether something ends in time. It goes on on a thread of its own if it does not.
fn ends_within(limit: Duration, what: impl FnOnce() + Send + 'static) -> bool {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        what();
        _ = done.send(());
    });
    wait.recv_timeout(limit).is_ok()
}

fn pointer(address: Address) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}

/// A communicator of one rank on a device.
fn alone(device: &Arc<FakeDevice>) -> Communicator {
    let comm = Communicator::builder().devices(true).timeout(Duration::from_secs(60)).connect_in_process(1).unwrap().remove(0);
    let machine: Arc<dyn Driver> = Arc::new(Machine(device.clone()));
    comm.with_driver(machine)
}

impl Process {
    pub(super) fn bound(&self, raw: &Call, stream: StreamId) -> Call {
        let mut call = raw.clone();
        self.comm.exec.check(&mut call, Lengths::Counted).unwrap();
        self.comm.exec.state.bind(&mut call, stream).unwrap();
        call
    }

    pub(super) fn in_place(&self, count: usize, memory: Address, timeout: Option<Duration>) -> Call {
        let (send, recv) = (RawSlice::at(pointer(memory)), RawSliceMut::at(pointer(memory)));
        Call { count, redop: Some(ReduceOp::Sum), send, recv, timeout, ..Call::raw(Op::AllReduce, DType::F32) }
    }

    /// So that all later calls are as those of a program that has run for a while.
    fn warm_up(&self) -> Address {
        let memory = self.ones();
        for _ in 0..4 {
            self.all_reduce(DType::F32, memory).unwrap();
            self.device.synchronise(self.stream);
        }
        self.comm.barrier().unwrap();
        memory
    }
}

/// The second of two messages is refused, because there is no pinned memory for it: the first was
/// never enqueued, and must not hold back what waits for streams.
#[test]
fn a_refused_pair_holds_nothing_back() {
    on_each(2, |process| {
        let memory = process.warm_up();
        if process.rank == 0 {
            let message = |op: Op, count: usize| {
                let raw = Call {
                    count,
                    root: 1,
                    send: RawSlice::at(pointer(memory)),
                    recv: RawSliceMut::at(pointer(memory)),
                    ..Call::raw(op, DType::F32)
                };
                process.bound(&raw, process.stream)
            };
            let both = vec![message(Op::Send, 100), message(Op::Recv, 1 << 50)];
            // SAFETY: it is refused.
            let refused = unsafe { process.comm.exec.submit_together_checked(both) };
            assert!(refused.is_err() && process.comm.exec.failure().is_none(), "{refused:?}");
            let (done, wait) = std::sync::mpsc::channel();
            process.device.held().later(move || _ = done.send(()));
            let is_free = wait.recv_timeout(Duration::from_secs(60)).is_ok();
            assert!(is_free, "nothing on this device is ever freed or closed again");
        }
        process.comm.barrier().unwrap();
    });
}

/// Another communicator wants an allocation while the thread is closing it.
#[test]
fn what_is_being_closed_is_not_handed_out() {
    let gpu = Arc::<FakeGpu>::default();
    let owner = FakeDevice::on(&gpu, [7; 16]);
    let address = owner.allocate(100).unwrap();
    let handle = owner.export(&owner.extent(address).unwrap()).unwrap();
    let fake = Arc::new(FakeDevice::on(&gpu, [7; 16]));
    let device: Arc<dyn Device> = fake.clone();
    let stream = fake.user_stream();
    let import = shared(&*device).imports.open(&device, &handle).unwrap().unwrap();
    // The user's stream works for a while. kolo does not hold it back.
    let busy = fake.hold_back(stream);
    drop(import);
    a_moment();
    a_moment();
    let again = shared(&*device).imports.open(&device, &handle).unwrap();
    drop(busy);
    a_moment();
    a_moment();
    assert!(again.is_none() || fake.open() == 1, "it was handed out, and is closed now");
}

/// Memory that lives for one operation only.
#[test]
fn memory_of_one_operation_does_not_end_the_direct_path() {
    on_each(2, |process| {
        let memory = process.warm_up();
        process.all_reduce(DType::F32, memory).unwrap();
        process.device.synchronise(process.stream);
        // The calls have ended on the host, too.
        process.comm.barrier().unwrap();
        assert!(process.comm.stats().device.in_place > 0);
        let short = process.ones();
        process.all_reduce(DType::F32, short).unwrap();
        process.device.synchronise(process.stream);
        process.comm.barrier().unwrap();
        // SAFETY: the stream has passed its last use.
        unsafe { process.device.free(short) };
        process.comm.barrier().unwrap();
        for _ in 0..3 {
            process.all_reduce(DType::F32, memory).unwrap();
            process.device.synchronise(process.stream);
        }
        let before = process.comm.stats().device;
        for _ in 0..200 {
            process.all_reduce(DType::F32, memory).unwrap();
            process.device.synchronise(process.stream);
        }
        process.comm.barrier().unwrap();
        let after = process.comm.stats().device;
        assert!(after.in_place > before.in_place, "{before:?}, {after:?}");
    });
}

/// Words that short calls have used for hours, whose `done` no stream has written.
#[test]
fn a_word_that_was_not_written_for_long_is_not_reached() {
    let fake = Arc::new(FakeDevice::new());
    let device: Arc<dyn Device> = fake.clone();
    let stream = fake.user_stream();
    let pool = &shared(&*device).words;
    // As many as 2^31 short calls.
    for _ in 0..2 {
        let words = pool.take(&device, 1 << 30).unwrap();
        words.enqueue_left(&*device, stream).unwrap();
        fake.synchronise(stream);
        assert!(words.has_left());
        pool.give_back(words);
    }
    let words = pool.take(&device, 1).unwrap();
    assert!(!words.is_done(0), "the kernel has not run");
}

/// A communicator's stream still waits for a stream of the user when the communicator ends.
#[test]
fn another_communicator_gets_an_idle_stream() {
    let device = Arc::new(FakeDevice::new());
    let [slow, quick] = [device.user_stream(), device.user_stream()];
    let [from, to] = [0; 2].map(|_| device.allocate(400).unwrap());
    let start = |comm: &Communicator, stream: StreamId, timeout: Duration| {
        let timeout = Some(timeout);
        let mut call = Call {
            count: 100,
            send: RawSlice::at(pointer(from)),
            recv: RawSliceMut::at(pointer(to)),
            timeout,
            ..Call::raw(Op::Broadcast, DType::F32)
        };
        comm.exec.check(&mut call, Lengths::Counted).unwrap();
        comm.exec.state.bind(&mut call, stream).unwrap();
        // SAFETY: the memory is never freed.
        unsafe { comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?))
    };
    let first = alone(&device);
    start(&first, quick, Duration::from_secs(60)).unwrap();
    let held = device.hold_back(slow);
    start(&first, slow, Duration::from_millis(200)).unwrap_err();
    let state = Arc::downgrade(&first.exec.state);
    drop(first);
    wait_until("the communicator is there", || state.strong_count() == 0);
    let second = alone(&device);
    let outcome = start(&second, quick, Duration::from_secs(60));
    drop(held);
    assert!(outcome.is_ok(), "{outcome:?}");
}

/// Without words: nonblocking calls in a row.
#[test]
fn without_words_a_call_has_ended_when_its_copy_has() {
    const LONG: usize = 1 << 20;
    let device = Arc::new(FakeDevice::new());
    device.has_words.store(false, Ordering::SeqCst);
    let comm = alone(&device);
    let stream = device.user_stream();
    let buffers: Vec<[Address; 2]> = (0..6).map(|_| [0; 2].map(|_| device.allocate(4 * LONG).unwrap())).collect();
    let mut wrong = 0;
    for round in 1..30 {
        for [from, _] in &buffers {
            device.write(stream, *from, (round as f32).to_le_bytes().repeat(LONG));
        }
        device.synchronise(stream);
        let start = |&[from, to]: &[Address; 2]| {
            let mut call = Call {
                count: LONG,
                send: RawSlice::at(pointer(from)),
                recv: RawSliceMut::at(pointer(to)),
                ..Call::raw(Op::Broadcast, DType::F32)
            };
            comm.exec.check(&mut call, Lengths::Counted).unwrap();
            comm.exec.state.bind(&mut call, stream).unwrap();
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.start_checked(call) }.unwrap()
        };
        let wrong = &mut wrong;
        std::thread::scope(|scope| {
            for buffer in &buffers {
                let work = start(buffer);
                let to = buffer[1];
                let device = &device;
                let checked = scope.spawn(move || {
                    work.wait().unwrap();
                    device.read(stream, to + 4 * (LONG as u64 - 1), 4) != (round as f32).to_le_bytes()
                });
                if buffer == &buffers[5] {
                    *wrong += usize::from(checked.join().unwrap());
                } else {
                    scope.spawn(move || {
                        assert!(!checked.join().unwrap(), "the operation has succeeded, and its copy is not there")
                    });
                }
            }
        });
    }
    assert_eq!(wrong, 0, "operations had succeeded and were not copied");
}

/// Without words: a call fails at its deadline, and the stream comes later. It copies to memory
/// that was freed.
#[test]
fn without_words_nothing_is_copied_to_freed_memory() {
    let device = Arc::new(FakeDevice::new());
    device.has_words.store(false, Ordering::SeqCst);
    let comm = alone(&device);
    let stream = device.user_stream();
    const LARGE: usize = 16 << 20;
    let [from, to] = [0; 2].map(|_| device.allocate(4 * LARGE).unwrap());
    let call = |count: usize, timeout: u64| {
        let timeout = Some(Duration::from_millis(timeout));
        let mut call = Call {
            count,
            send: RawSlice::at(pointer(from)),
            recv: RawSliceMut::at(pointer(to)),
            timeout,
            ..Call::raw(Op::Broadcast, DType::F32)
        };
        comm.exec.check(&mut call, Lengths::Counted).unwrap();
        comm.exec.state.bind(&mut call, stream).unwrap();
        // SAFETY: the memory is never freed.
        unsafe { comm.exec.submit_checked(&call) }
    };
    call(LARGE, 60_000).unwrap();
    let held = device.hold_back(stream);
    call(LARGE, 200).unwrap_err();
    drop(held);
    a_moment();
    device.synchronise(stream);
    std::thread::sleep(Duration::from_millis(500));
}

/// A rank sends from its device and receives in host memory: the call must not return, and its
/// stream must not go on, before the result is there.
#[test]
fn a_result_in_host_memory_is_there() {
    on_each(2, |process| {
        let memory = process.warm_up();
        process.device.write(process.stream, memory, 1f32.to_le_bytes().repeat(COUNT));
        let host: &'static mut [f32] = vec![0f32; 100].leak();
        let recv = if process.rank == 0 { host.as_mut_ptr().cast::<u8>() } else { pointer(memory) };
        if process.rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let raw = Call { recv: RawSliceMut::at(recv), ..process.in_place(100, memory, None) };
        // SAFETY: the memory is never freed.
        unsafe { process.comm.exec.submit_checked(&process.bound(&raw, process.stream)) }.unwrap();
        process.device.synchronise(process.stream);
        // SAFETY: the call has succeeded, and the stream has passed it.
        let got = unsafe { std::ptr::read_volatile(host.as_ptr()) };
        process.comm.barrier().unwrap();
        assert!(process.rank == 1 || got == 2.0, "{got}");
    });
}

/// The same for a large operation: it must not break the context.
#[test]
fn a_large_result_in_host_memory() {
    for is_direct in [true, false] {
        on_each(2, |process| {
            process.device.exports.store(is_direct, Ordering::SeqCst);
            let memory = process.warm_up();
            let host: &'static mut [f32] = vec![0f32; COUNT].leak();
            let recv = if process.rank == 0 { host.as_mut_ptr().cast::<u8>() } else { pointer(memory) };
            let raw = Call { recv: RawSliceMut::at(recv), ..process.in_place(COUNT, memory, Some(Duration::from_secs(60))) };
            // SAFETY: the memory is never freed.
            let outcome = unsafe { process.comm.exec.submit_checked(&process.bound(&raw, process.stream)) };
            // It says if the context is broken.
            process.device.synchronise(process.stream);
            drop(outcome);
        });
    }
}

/// A stream is let go while its operation has not ended on the host, as by the watchdog, or
/// when the driver refuses a later part of the call: no peer succeeds with what the stream has written
/// since.
#[test]
fn a_peer_does_not_succeed_with_what_a_stream_wrote_that_was_let_go() {
    const ROUND: usize = SEGMENT / 4;
    const LARGE: usize = 6 * ROUND;
    // Whether the peer learns of the failure in time depends on the threads.
    for _ in 0..if every_case() { 12 } else { 3 } {
        let is_let_go = AtomicBool::new(false);
        on_each(2, |process| {
            process.device.exports.store(false, Ordering::SeqCst);
            is_let_go.store(false, Ordering::SeqCst);
            process.warm_up();
            let of_round = |round: usize| if process.rank == 0 { (1 + round) as f32 } else { 0.0 }.to_le_bytes();
            let memory = process.device.allocate(4 * LARGE).unwrap();
            process.device.write(process.stream, memory, (0..6).flat_map(|round| of_round(round).repeat(ROUND)).collect());
            if process.rank == 0 {
                // SAFETY: the memory is never freed.
                unsafe {
                    process.comm.exec.submit_checked(&process.bound(&process.in_place(LARGE, memory, None), process.stream))
                }
                .unwrap();
                a_moment();
                process.comm.exec.state.devices.release();
                process.device.synchronise(process.stream);
                is_let_go.store(true, Ordering::SeqCst);
                wait_until("the operation does not fail", || process.comm.exec.failure().is_some());
            } else {
                wait_until("the other rank goes on", || is_let_go.load(Ordering::SeqCst));
                let call = process.bound(&process.in_place(LARGE, memory, None), process.stream);
                // SAFETY: the memory is never freed.
                let outcome = unsafe { process.comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?));
                if outcome.is_ok() {
                    let got = process.device.read(process.stream, memory, 4 * LARGE);
                    let firsts: Vec<f32> =
                        (0..6).map(|round| f32::from_le_bytes(got[4 * ROUND * round..][..4].try_into().unwrap())).collect();
                    assert_eq!(firsts, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "success with wrong data");
                }
            }
        });
    }
}

/// The same bits as for host memory: bools are 0 or 1 afterwards, also in place.
#[test]
fn bools_in_place() {
    on_each(2, |process| {
        let memory = process.device.allocate(COUNT).unwrap();
        for _ in 0..5 {
            process.device.write(process.stream, memory, vec![7; COUNT]);
            let (send, recv) = (RawSlice::at(pointer(memory)), RawSliceMut::at(pointer(memory)));
            let raw = Call { count: COUNT, send, recv, ..Call::raw(Op::Broadcast, DType::Bool) };
            // SAFETY: the memory is never freed.
            unsafe { process.comm.exec.submit_checked(&process.bound(&raw, process.stream)) }.unwrap();
            let got = process.device.read(process.stream, memory, COUNT);
            assert!(got.iter().all(|&byte| byte == 1), "rank {}: {:?}", process.rank, &got[..4]);
        }
    });
}

/// The communicator fails: the streams of the calls that are queued continue, also while a thread
/// has the core, as `shrink` has it while it agrees with other ranks.
#[test]
fn a_failure_lets_the_streams_of_queued_calls_go() {
    on_each(2, |process| {
        let memory = process.warm_up();
        if process.rank == 0 {
            let shared = process.comm.exec.state.clone();
            let mut core = shared.core.lock();
            process.all_reduce(DType::F32, memory).unwrap();
            shared.fail(&mut core, crate::Error::Aborted { op: Op::Connect, seq: 0 });
            let (device, stream) = (process.device.clone(), process.stream);
            let continues = ends_within(Duration::from_secs(60), move || device.synchronise(stream));
            drop(core);
            assert!(continues, "the stream waits although the communicator has failed");
        }
    });
}

/// A stream waits for the end of an operation whose own stream does not come.
#[test]
fn a_stream_that_waits_for_a_failed_operation_goes_on() {
    on_each(2, |process| {
        let memory = process.warm_up();
        let [other, third] = [0; 2].map(|_| process.device.user_stream());
        // The first makes kolo's stream.
        let call = process.bound(&process.in_place(COUNT, memory, None), process.stream);
        // SAFETY: the memory is never freed.
        unsafe { process.comm.exec.start_checked(call) }.unwrap().wait().unwrap();
        process.comm.barrier().unwrap();
        if process.rank == 0 {
            let held = process.device.hold_back(other);
            let call = process.bound(&process.in_place(COUNT, memory, Some(Duration::from_millis(300))), other);
            let bound = call.on_device.clone().unwrap();
            // SAFETY: the memory is never freed.
            let work = unsafe { process.comm.exec.start_checked(call) }.unwrap();
            assert!(bound.hold_stream(third).unwrap());
            work.wait().unwrap_err();
            let device = process.device.clone();
            let continues = ends_within(Duration::from_secs(60), move || device.synchronise(third));
            drop(held);
            assert!(continues, "the operation has failed, and the stream waits");
        }
    });
}

/// The same for a later call on another stream.
#[test]
fn a_later_call_on_another_stream_goes_on() {
    on_each(2, |process| {
        process.device.exports.store(false, Ordering::SeqCst);
        let memory = process.warm_up();
        let other = process.device.user_stream();
        process.comm.barrier().unwrap();
        if process.rank == 0 {
            let held = process.device.hold_back(other);
            for stream in [other, process.stream] {
                let call = process.bound(&process.in_place(COUNT, memory, Some(Duration::from_secs(3))), stream);
                // SAFETY: the memory is never freed.
                unsafe { process.comm.exec.submit_checked(&call) }.unwrap();
            }
            wait_until("the operation does not fail", || process.comm.exec.failure().is_some());
            let (device, stream) = (process.device.clone(), process.stream);
            let continues = ends_within(Duration::from_secs(60), move || device.synchronise(stream));
            drop(held);
            assert!(continues, "the communicator has failed, and the stream waits for the other stream");
        }
    });
}

/// A rank that does not call is named.
#[test]
fn a_rank_that_does_not_call_is_named() {
    let is_over = AtomicBool::new(false);
    on_each(2, |process| {
        is_over.store(false, Ordering::SeqCst);
        let memory = process.warm_up();
        if process.rank == 0 {
            let call = process.bound(&process.in_place(COUNT, memory, Some(Duration::from_millis(300))), process.stream);
            // SAFETY: the memory is never freed.
            let error = unsafe { process.comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?)).unwrap_err();
            is_over.store(true, Ordering::SeqCst);
            assert_eq!(error.culprit(), Some(1), "{error}");
        } else {
            wait_until("the other rank goes on", || is_over.load(Ordering::SeqCst));
        }
    });
}

/// Two communicators of a process open the same allocation at the same time.
#[test]
fn two_communicators_open_an_allocation_at_once() {
    let gpu = Arc::<FakeGpu>::default();
    let owner = FakeDevice::on(&gpu, [7; 16]);
    let address = owner.allocate(100).unwrap();
    let handle = owner.export(&owner.extent(address).unwrap()).unwrap();
    let fake = Arc::new(FakeDevice::on(&gpu, [7; 16]));
    let device: Arc<dyn Device> = fake.clone();
    let stream = fake.user_stream();
    let other = fake.allocate(100).unwrap();
    let busy = fake.hold_back(stream);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        // A thread of the user frees memory, so that driver calls take a while.
        // SAFETY: nothing uses it.
        scope.spawn(|| unsafe { fake.free(other) });
        a_moment();
        let open = || shared(&*device).imports.open(&device, &handle).map(|import| import.is_some());
        let threads = [scope.spawn(open), scope.spawn(open)];
        a_moment();
        drop(busy);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(outcomes.iter().all(Result::is_ok), "one of them passes all data through areas from now on: {outcomes:?}");
}

/// Messages side by side may end in any order, and the stream takes them in the order of the calls.
#[test]
fn messages_end_in_another_order_than_they_were_called() {
    on_each(3, |process| {
        let memory = process.ones();
        let half = memory + 2 * COUNT as Address;
        let message = |op: Op, peer: Rank, memory: Address| {
            let buffer: *mut u8 = std::ptr::without_provenance_mut(memory as usize);
            let mut call = Call {
                count: COUNT / 2,
                root: peer,
                send: RawSlice::at(buffer),
                recv: RawSliceMut::at(buffer),
                ..Call::raw(op, DType::F32)
            };
            process.comm.exec.check(&mut call, Lengths::Counted).unwrap();
            process.comm.exec.state.bind(&mut call, process.stream).unwrap();
            call
        };
        // SAFETY: the memory is never freed.
        unsafe {
            match process.rank {
                0 => {
                    let both = vec![message(Op::Recv, 1, memory), message(Op::Recv, 2, half)];
                    process.comm.exec.submit_together_checked(both).unwrap();
                }
                1 => {
                    // Probably after the other message: without that the test proves less, and does not fail.
                    std::thread::sleep(Duration::from_millis(300));
                    process.comm.exec.submit_checked(&message(Op::Send, 0, memory)).unwrap();
                }
                _ => process.comm.exec.submit_checked(&message(Op::Send, 0, memory)).unwrap(),
            }
        }
        process.expect(memory, 1.0);
        process.comm.barrier().unwrap();
    });
}

/// A call that ran on a device runs on another communicator, which has none, with other buffers.
#[test]
fn a_call_on_pointers_moves_to_a_communicator_without_devices() {
    let plain = Communicator::builder().devices(false).connect_in_process(2).unwrap();
    let plain: parking_lot::Mutex<Vec<_>> = parking_lot::Mutex::new(plain.into_iter().map(Some).collect());
    on_seats(seats(2, true), |process| {
        let Process { comm, device, stream, rank } = process;
        let plain = plain.lock()[rank].take().unwrap();
        let mut call = RawCall::new(Op::AllReduce, DType::F32);
        call.reduce(ReduceOp::Sum);
        let on_host = |call: &mut RawCall| {
            let mut host = [1f32; 8];
            call.buffers(host.as_ptr().cast(), host.as_mut_ptr().cast(), 8);
            // SAFETY: the buffer has room for the elements, and nothing else uses it.
            unsafe { call.run(&plain).unwrap() };
            assert_eq!(host, [2.0; 8]);
        };
        // It learns that it has no devices.
        on_host(&mut call);
        let memory = device.allocate(32).unwrap();
        device.write(stream, memory, [1f32; 8].map(f32::to_ne_bytes).concat());
        let buffer: *mut u8 = std::ptr::without_provenance_mut(memory as usize);
        call.buffers(buffer, buffer, 8);
        // SAFETY: the memory has room for the elements, and nothing else uses it until it has been read.
        unsafe { call.run(&comm).unwrap() };
        device.read(stream, memory, 32);
        on_host(&mut call);
    });
}
