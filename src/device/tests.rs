use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::state::DeviceState;
use crate::Communicator;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Counts, Lengths};
use crate::cuda::device::{Address, Device, Driver, StreamId};
use crate::cuda::fake_device::{FakeDevice, FakeGpu, Machine};
use crate::error::Error;
use crate::sys::every_case;
use crate::trace::DeviceStats;
use crate::types::{DType, Op, Rank, ReduceOp, mix};

/// How device memory gets from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Path {
    /// Where it is: ranks are of one process.
    Same,
    /// Where it is: ranks are of different processes.
    Imported,
    /// The same, for memory that is mapped.
    Mapped,
    /// The same, on two GPUs that reach each other.
    Peers,
    /// The same, with a GPU for each rank: kernels wait for each other.
    Apart,
    /// All-reduces through areas on the device, because buffers are hidden; others through the
    /// host.
    Areas,
    /// Through the host.
    Staged,
}

/// Elements of the buffer, or of one block: a short one, a large one, and one of several segments.
pub(super) fn counts() -> [usize; 3] {
    [3, 40_001, if every_case() { 700_000 } else { 300_000 }]
}

/// The ranks of a test, and the GPU that they share. For the paths between processes each rank is a
/// process of its own.
///
/// In one process, memory is freed when all ranks have ended: to free it waits for the streams of all
/// of them, and one of these may wait for the rank that frees.
pub(super) struct Bed {
    pub(super) world: usize,
    pub(super) devices: Vec<Arc<FakeDevice>>,
    /// Whether other threads of each process call the driver all the time: they free memory, load
    /// kernels, and make and end streams. All calls take a random time.
    pub(super) is_busy: bool,
}

impl Bed {
    pub(super) fn new(path: Path, world: usize) -> Bed {
        let gpu = Arc::<FakeGpu>::default();
        let processes = if matches!(path, Path::Same | Path::Staged) { 1 } else { world };
        let gpus = match path {
            Path::Peers => 2,
            Path::Apart => world,
            _ => 1,
        };
        let id = |process: usize| [1 + (process % gpus) as u8; 16];
        let devices: Vec<_> = (0..processes).map(|process| Arc::new(FakeDevice::on(&gpu, id(process)))).collect();
        for device in &devices {
            device.exports.store(path != Path::Staged, Ordering::SeqCst);
            device.visible.store(gpus, Ordering::SeqCst);
        }
        Bed { world, devices, is_busy: false }
    }

    fn device(&self, rank: Rank) -> &Arc<FakeDevice> {
        &self.devices[rank % self.devices.len()]
    }

    fn sum(&self, of: impl Fn(&FakeDevice) -> usize) -> usize {
        self.devices.iter().map(|device| of(device)).sum()
    }

    fn moves(&self) -> usize {
        self.sum(|device| device.moves.load(Ordering::SeqCst))
    }

    /// Kernels that have waited for those of other ranks.
    fn barriers(&self) -> usize {
        self.sum(|device| device.barriers.load(Ordering::SeqCst))
    }

    /// Whether kernels wait for each other: each rank has a GPU.
    pub(super) fn have_barrier(&self, path: Path) -> bool {
        path == Path::Apart || path == Path::Peers && self.world == 2
    }

    fn imports(&self) -> usize {
        self.sum(FakeDevice::imports)
    }

    pub(super) fn run(&self, body: impl Fn(&Communicator, Rank, &Arc<FakeDevice>, StreamId) + Sync) {
        let builder = Communicator::builder().devices(true).timeout(Duration::from_secs(60));
        let comms = builder.connect_in_process(self.world).unwrap();
        let running = AtomicUsize::new(self.world);
        std::thread::scope(|scope| {
            for device in self.devices.iter().filter(|_| self.is_busy) {
                device.is_slow.store(true, Ordering::SeqCst);
                scope.spawn(|| keep_busy(device, || running.load(Ordering::SeqCst) > 0));
            }
            for (rank, comm) in comms.into_iter().enumerate() {
                let (body, device) = (&body, self.device(rank));
                let machine: Arc<dyn Driver> = Arc::new(Machine(device.clone()));
                let comm = comm.with_driver(machine);
                if self.devices.len() > 1 {
                    DeviceState::of(&comm.exec.state).process.set(rank as u64).unwrap();
                }
                // Before any stream waits: to make one waits for all.
                let stream = device.user_stream();
                let running = &running;
                scope.spawn(move || {
                    let _ended = Ended(running);
                    body(&comm, rank, device, stream);
                });
            }
        });
        self.devices.iter().for_each(|device| device.held().until_released());
    }
}

/// Counts a rank down, also if it panics.
struct Ended<'a>(&'a AtomicUsize);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Calls the driver as other threads of a program do. Most of these calls wait for all streams.
fn keep_busy(device: &FakeDevice, goes_on: impl Fn() -> bool) {
    let kernels = DType::ALL.iter().filter(|dtype| ReduceOp::Product.applies_to(**dtype));
    let mut kernels = kernels.map(|&dtype| (dtype, Some(ReduceOp::Product)));
    while goes_on() {
        let address = device.allocate(1000).unwrap();
        // SAFETY: nothing uses it.
        unsafe { device.free(address) };
        if let Some((dtype, redop)) = kernels.next() {
            device.prepare(dtype, redop).unwrap();
        }
        device.end_stream(device.new_stream().unwrap());
    }
}

/// Elements that repeat: a prime number, so that nothing which is out of place is at its own value.
const PERIOD: usize = 4099;

pub(super) fn bytes(seed: usize, dtype: DType, len: usize) -> Vec<u8> {
    let small = |i: usize| (mix(seed as u64, i as u64) % 17) as f32 - 8.0;
    let period: Vec<u8> = match dtype {
        DType::F32 => (0..PERIOD).flat_map(|i| (small(i) / 3.0).to_le_bytes()).collect(),
        DType::BF16 => (0..PERIOD).flat_map(|i| half::bf16::from_f32(small(i) / 3.0).to_le_bytes()).collect(),
        DType::Bool => (0..PERIOD).map(|i| (mix(seed as u64, i as u64) % 2) as u8).collect(),
        _ => (0..PERIOD * dtype.size()).map(|i| mix(seed as u64, i as u64) as u8).collect(),
    };
    let mut bytes = period.repeat(len.div_ceil(period.len()));
    bytes.truncate(len);
    bytes
}

pub(super) fn raw(op: Op, dtype: DType, count: usize, root: Rank) -> Call {
    let reduces = matches!(op, Op::AllReduce | Op::Reduce | Op::ReduceScatter | Op::ReduceScatterV);
    let redop = if dtype == DType::Bool { ReduceOp::Max } else { ReduceOp::Sum };
    Call { count, root, redop: reduces.then_some(redop), ..Call::raw(op, dtype) }
}

/// The user's view of one rank.
pub(super) struct User<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) device: &'a Arc<FakeDevice>,
    pub(super) stream: StreamId,
    path: Path,
    /// What is freed at the end.
    kept: Mutex<Vec<Address>>,
    /// What later calls use.
    free: Mutex<Vec<Address>>,
    runs: AtomicUsize,
}

/// Bytes of an allocation: enough for all calls of most tests.
fn arena() -> usize {
    if every_case() { 12 << 20 } else { 5 << 20 }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.comm.barrier().ok();
            self.device.synchronise(self.stream);
            // SAFETY: the stream has passed their last use.
            self.kept.lock().drain(..).chain(self.free.lock().drain(..)).for_each(|address| unsafe { self.device.free(address) });
        }
    }
}

impl<'a> User<'a> {
    pub(super) fn new(comm: &'a Communicator, device: &'a Arc<FakeDevice>, stream: StreamId, path: Path) -> User<'a> {
        User { comm, device, stream, path, kept: Mutex::default(), free: Mutex::default(), runs: AtomicUsize::new(0) }
    }

    /// Runs a call on device memory as a program on its stream does, and returns the content of the
    /// receive buffer.
    fn run(&self, raw: &Call, input: &[u8], in_place: Option<usize>) -> Vec<u8> {
        let lengths = self.lengths(raw);
        // Sometimes new memory, and mostly that of earlier calls, which peers have open.
        let is_new = self.runs.fetch_add(1, Ordering::SeqCst).is_multiple_of(8);
        let allocate = |len: usize| {
            let free = if is_new { None } else { self.free.lock().pop() };
            free.filter(|_| len <= arena()).unwrap_or_else(|| {
                let allocate = if self.path == Path::Mapped { FakeDevice::allocate_for_peers } else { FakeDevice::allocate };
                let memory = allocate(self.device, len.max(arena())).unwrap();
                if self.path == Path::Areas {
                    self.device.hide(memory);
                }
                memory
            })
        };
        let (send, recv, used) = match in_place {
            // The single block is a part of the buffer of all blocks.
            Some(offset) => {
                let whole = allocate(lengths[0].max(lengths[1]));
                let [send, recv] =
                    if lengths[0] < lengths[1] { [whole + offset as u64, whole] } else { [whole, whole + offset as u64] };
                (send, recv, vec![whole])
            }
            None => {
                let (send, recv) = (allocate(lengths[0]), allocate(lengths[1]));
                (send, recv, vec![send, recv])
            }
        };
        self.device.write(self.stream, send, input.to_vec());
        let call = self.call(raw, send, recv);
        // SAFETY: the memory is freed below, when the stream has passed the call.
        unsafe { self.comm.exec.submit_checked(&call) }.unwrap_or_else(|error| panic!("{}: {error}", raw.op));
        drop(call);
        let result = self.device.read(self.stream, recv, lengths[1]);
        if matches!(self.path, Path::Same | Path::Staged) {
            self.kept.lock().extend(used);
        } else {
            let mut free = self.free.lock();
            free.extend(used);
            while free.len() > 2 {
                // SAFETY: the stream has reached this point.
                unsafe { self.device.free(free.remove(0)) };
            }
        }
        result
    }

    pub(super) fn lengths(&self, raw: &Call) -> [usize; 2] {
        let call = self.call(raw, 0, 0);
        [call.send.len, call.recv.len]
    }

    pub(super) fn call(&self, raw: &Call, send: Address, recv: Address) -> Call {
        let send = if send == 0 { std::ptr::without_provenance(1 << 41) } else { std::ptr::without_provenance(send as usize) };
        let recv =
            if recv == 0 { std::ptr::without_provenance_mut(1 << 42) } else { std::ptr::without_provenance_mut(recv as usize) };
        let mut call = Call { send: RawSlice::at(send), recv: RawSliceMut::at(recv), ..raw.clone() };
        self.comm.exec.check(&mut call, Lengths::Counted).unwrap();
        let is_dry = send.addr() == 1 << 41;
        if !is_dry {
            self.comm.exec.state.bind(&mut call, self.stream).unwrap();
        }
        call
    }

    /// The same on host memory, by a communicator without devices.
    pub(super) fn expected(&self, plain: &Communicator, raw: &Call, input: &[u8]) -> Vec<u8> {
        let words = |bytes: usize| vec![0u64; bytes / 8 + 1];
        let lengths = self.lengths(raw);
        let (mut send, mut recv) = (words(lengths[0]), words(lengths[1]));
        // SAFETY: there is room for it.
        unsafe { std::ptr::copy_nonoverlapping(input.as_ptr(), send.as_mut_ptr().cast(), input.len()) };
        let (from, to) = (RawSlice::at(send.as_ptr().cast()), RawSliceMut::at(recv.as_mut_ptr().cast()));
        let mut call = Call { send: from, recv: to, ..raw.clone() };
        plain.exec.check(&mut call, Lengths::Counted).unwrap();
        // SAFETY: both are as long as the call says.
        unsafe { plain.exec.submit_checked(&call).unwrap() };
        let mut result = vec![0; lengths[1]];
        // SAFETY: there are as many bytes, and the call has ended.
        unsafe { std::ptr::copy_nonoverlapping(recv.as_ptr().cast(), result.as_mut_ptr(), lengths[1]) };
        result
    }
}

pub(super) const OPS: [Op; 8] =
    [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter];

fn every_collective(path: Path, world: usize, dtype: DType) {
    every_collective_on(&Bed::new(path, world), path, dtype);
}

fn every_collective_on(bed: &Bed, path: Path, dtype: DType) {
    let world = bed.world;
    let plain = Mutex::new(Communicator::in_process(world).unwrap().into_iter().map(Some).collect::<Vec<_>>());
    bed.run(|comm, rank, device, stream| {
        let plain = plain.lock()[rank].take().unwrap();
        let user = User::new(comm, device, stream, path);
        for (i, op) in OPS.into_iter().enumerate() {
            for count in counts() {
                let root = i % world;
                let raw = raw(op, dtype, count, root);
                let lengths = user.lengths(&raw);
                let input = bytes(100 * rank + i, dtype, lengths[0]);
                let expected = user.expected(&plain, &raw, &input);
                let got = user.run(&raw, &input, None);
                assert!(got == expected, "{op} of {count} {dtype} on rank {rank} of {world}, {path:?}");
                // In place as NCCL defines it.
                let offset = if lengths[0] == lengths[1] { 0 } else { rank * count * dtype.size() };
                if lengths.iter().all(|&len| len > 0) {
                    let got = user.run(&raw, &input, Some(offset));
                    assert!(got == expected, "{op} of {count} {dtype} in place on rank {rank} of {world}, {path:?}");
                } else {
                    user.run(&raw, &input, None);
                }
            }
        }
        let counts: Vec<usize> = (0..world).map(|peer| 30_000 + 1000 * peer).collect();
        for op in [Op::AllGatherV, Op::ReduceScatterV, Op::AllToAllV] {
            let (mine, theirs) = (vec![counts[rank]; world], counts.clone());
            let (send_counts, recv_counts) = match op {
                Op::AllGatherV => (None, Some(&counts[..])),
                Op::ReduceScatterV => (Some(&counts[..]), None),
                _ => (Some(&mine[..]), Some(&theirs[..])),
            };
            let [send_counts, recv_counts] = [send_counts, recv_counts].map(|counts| counts.map(Counts::of_raw));
            let raw = Call { send_counts, recv_counts, ..raw(op, dtype, 0, 0) };
            let input = bytes(100 * rank, dtype, user.lengths(&raw)[0]);
            let expected = user.expected(&plain, &raw, &input);
            assert!(user.run(&raw, &input, None) == expected, "{op} on rank {rank} of {world}, {path:?}");
        }
        // Each path was taken, and no other.
        let DeviceStats { whole, staged, in_place, through_areas, one_shot, copied } = comm.stats().device;
        let is_direct = path != Path::Staged;
        let took = [whole, staged, in_place, through_areas, one_shot, copied].map(|operations| operations > 0);
        let may_be_in_place = is_direct && path != Path::Areas;
        // An all-to-all in place passes through areas.
        let expected = [true, !is_direct, may_be_in_place, is_direct, bed.have_barrier(path), false];
        assert_eq!(took, expected, "{path:?}: {:?}", comm.stats());
    });
    let direct = bed.moves();
    assert_eq!(direct > 0, path != Path::Staged, "{direct} moves on the device, {path:?}");
    assert_eq!(bed.imports() > 0, path != Path::Staged && bed.devices.len() > 1);
    assert_eq!(bed.sum(FakeDevice::open), 0, "all that was opened is closed with the communicators");
    // Ranks that share a GPU have one leader.
    let leaders = bed.devices.iter().filter(|device| device.launches.load(Ordering::SeqCst) > 0).count();
    let gpus = match path {
        Path::Staged => 0,
        Path::Peers => 2,
        Path::Apart => world,
        _ => 1,
    };
    assert_eq!(leaders, gpus);
    assert_eq!(bed.barriers() > 0, bed.have_barrier(path));
    assert_eq!(bed.devices[0].gpu_used(), 0, "all memory was freed");
}

#[test]
fn every_collective_where_it_is() {
    for world in [2, 3, 4] {
        every_collective(Path::Same, world, DType::F32);
    }
    every_collective(Path::Same, 2, DType::BF16);
}

#[test]
fn every_collective_between_processes() {
    every_collective(Path::Imported, 2, DType::F32);
    every_collective(Path::Imported, 3, DType::Bool);
    every_collective(Path::Mapped, 3, DType::F32);
}

#[test]
fn every_collective_on_hidden_memory() {
    for world in [2, 3] {
        every_collective(Path::Areas, world, DType::F32);
    }
    every_collective(Path::Areas, 2, DType::BF16);
}

#[test]
fn every_collective_on_two_gpus() {
    every_collective(Path::Peers, 2, DType::F32);
    every_collective(Path::Peers, 4, DType::F32);
}

#[test]
fn every_collective_with_a_gpu_for_each_rank() {
    every_collective(Path::Apart, 2, DType::BF16);
    every_collective(Path::Apart, 3, DType::F32);
    every_collective(Path::Apart, 4, DType::F32);
}

/// No call of another thread that waits for streams keeps an operation from ending.
#[test]
fn every_collective_while_the_driver_is_busy() {
    for path in [Path::Imported, Path::Mapped, Path::Areas, Path::Apart] {
        let bed = Bed { is_busy: true, ..Bed::new(path, 2) };
        every_collective_on(&bed, path, DType::F32);
    }
    // Through the host, because GPUs do not reach each other.
    let bed = Bed { is_busy: true, ..Bed::new(Path::Peers, 2) };
    bed.devices.iter().for_each(|device| device.reaches.store(false, Ordering::SeqCst));
    every_collective_on(&bed, Path::Staged, DType::F32);
}

#[test]
fn every_collective_through_the_host() {
    for world in [2, 3] {
        every_collective(Path::Staged, world, DType::F32);
    }
    every_collective(Path::Staged, 2, DType::I64);
}

/// Ranks with host buffers and ranks with device buffers, in one collective.
#[test]
fn mixed_groups() {
    for path in [Path::Imported, Path::Staged] {
        let bed = Bed::new(path, 3);
        let plain = Mutex::new(Communicator::in_process(3).unwrap().into_iter().map(Some).collect::<Vec<_>>());
        bed.run(|comm, rank, device, stream| {
            let plain = plain.lock()[rank].take().unwrap();
            let user = User::new(comm, device, stream, path);
            for (i, op) in OPS.into_iter().enumerate() {
                for count in counts() {
                    let raw = raw(op, DType::F32, count, i % 3);
                    let input = bytes(100 * rank + i, DType::F32, user.lengths(&raw)[0]);
                    let expected = user.expected(&plain, &raw, &input);
                    let got = if (rank + i) % 3 == 0 { user.expected(comm, &raw, &input) } else { user.run(&raw, &input, None) };
                    assert!(got == expected, "{op} of {count} on rank {rank}, {path:?}");
                }
            }
        });
    }
}

/// Rank 0 sends from its device and receives in host memory.
#[test]
fn one_buffer_on_the_host() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        for count in counts() {
            let raw = raw(Op::AllReduce, DType::U8, count, 0);
            if rank == 1 {
                assert!(user.run(&raw, &vec![1; count], None).iter().all(|&sum| sum == 3));
                continue;
            }
            let (send, mut recv) = (device.allocate(count).unwrap(), vec![0u8; count]);
            device.write(stream, send, vec![2; count]);
            let call = user.call(&raw, send, recv.as_mut_ptr().expose_provenance() as Address);
            // SAFETY: both are used until the stream has passed the call.
            unsafe { comm.exec.submit_checked(&call) }.unwrap();
            device.synchronise(stream);
            assert!(recv.iter().all(|&sum| sum == 3), "{count}");
            user.kept.lock().push(send);
        }
    });
}

/// Buffers of all ranks on the host, on a communicator with devices.
#[test]
fn host_memory_as_before() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, rank, _, _| {
        let mut buffer = vec![rank as f32 + 1.0; 300_000];
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert!(buffer.iter().all(|&sum| sum == 3.0));
        comm.barrier().unwrap();
    });
    assert_eq!(bed.sum(|device| device.copies.load(Ordering::SeqCst)), 0);
}

#[test]
fn without_words_calls_wait() {
    let bed = Bed::new(Path::Imported, 2);
    bed.devices.iter().for_each(|device| device.has_words.store(false, Ordering::SeqCst));
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        for count in counts() {
            let raw = raw(Op::AllReduce, DType::U8, count, 0);
            let got = user.run(&raw, &vec![rank as u8 + 1; count], None);
            assert!(got.iter().all(|&sum| sum == 3), "{count}");
        }
    });
}

#[test]
fn messages() {
    let bed = Bed::new(Path::Imported, 3);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
        for count in counts() {
            let (send, recv) = (device.allocate(count).unwrap(), device.allocate(count).unwrap());
            device.write(user.stream, send, vec![rank as u8; count]);
            let sends = user.call(&raw(Op::Send, DType::U8, count, next), send, 0xdead);
            let receives = user.call(&raw(Op::Recv, DType::U8, count, last), 0xdead, recv);
            // SAFETY: freed when the stream has passed both.
            unsafe { comm.exec.submit_together_checked(vec![sends, receives]).unwrap() };
            assert!(device.read(user.stream, recv, count).iter().all(|&byte| byte == last as u8));
            // SAFETY: as stated above.
            unsafe {
                device.free(send);
                device.free(recv);
            }
        }
    });
}

/// A nonblocking message waits for no other: neither for one that was started before, nor for one from
/// another rank.
#[test]
fn nonblocking_messages_in_any_order() {
    let bed = Bed::new(Path::Imported, 3);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        for count in counts() {
            let memory = [0, 1].map(|_| device.allocate(count).unwrap());
            let out = device.allocate(count).unwrap();
            device.write(user.stream, out, vec![rank as u8; count]);
            let start = |op: Op, peer: Rank, memory: Address| {
                let call = user.call(&raw(op, DType::U8, count, peer), memory, memory);
                // SAFETY: freed below, when the messages have ended.
                unsafe { comm.exec.start_checked(call).unwrap() }
            };
            // All receive before they send.
            let works = [start(Op::Recv, (rank + 2) % 3, memory[0]), start(Op::Send, (rank + 1) % 3, out)];
            works.into_iter().for_each(|work| work.wait().unwrap());
            // Rank 1 sends only when rank 0 has received what rank 2 sends.
            match rank {
                0 => {
                    let [first, second] = [1, 2].map(|peer| start(Op::Recv, peer, memory[peer - 1]));
                    second.wait().unwrap();
                    start(Op::Send, 1, out).wait().unwrap();
                    first.wait().unwrap();
                }
                1 => {
                    start(Op::Recv, 0, memory[0]).wait().unwrap();
                    start(Op::Send, 0, out).wait().unwrap();
                }
                _ => start(Op::Send, 0, out).wait().unwrap(),
            }
            let from = [[1, 2], [0, 2], [1, 2]][rank];
            let received = if rank == 0 { 2 } else { 1 };
            for (peer, memory) in from.into_iter().zip(memory).take(received) {
                let content = device.read(user.stream, memory, count);
                assert!(content.iter().all(|&byte| byte == peer as u8), "{count}: rank {rank} from {peer}");
            }
            // SAFETY: all messages have ended.
            memory.into_iter().chain([out]).for_each(|address| unsafe { device.free(address) });
        }
    });
}

/// Memory that is freed, and other memory at the same address.
#[test]
fn what_was_freed_is_opened_anew() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        for round in 0..10 {
            let count = 50_000;
            let raw = raw(Op::AllReduce, DType::F32, count, 0);
            let input: Vec<u8> = (0..count).flat_map(|_| ((rank + round) as f32).to_le_bytes()).collect();
            let sum = (2 * round + 1) as f32;
            assert!(user.run(&raw, &input, None).chunks(4).all(|value| value == sum.to_le_bytes()), "round {round}");
        }
    });
    // Memory that stays is opened once, by the leader: the area and one buffer of the other rank.
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, _, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        let memory = device.allocate(400_000).unwrap();
        for _ in 0..10 {
            let call = user.call(&raw(Op::AllReduce, DType::F32, 100_000, 0), memory, memory);
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.submit_checked(&call).unwrap() };
        }
        device.synchronise(user.stream);
        comm.barrier().unwrap();
        for _ in 0..3 {
            let call = user.call(&raw(Op::AllReduce, DType::F32, 100_000, 0), memory, memory);
            // SAFETY: as above.
            unsafe { comm.exec.submit_checked(&call).unwrap() };
            device.synchronise(user.stream);
        }
    });
    assert_eq!(bed.imports(), 2);
}

/// Devices report that they reach each other, and what one of them writes to the other is lost: no
/// rank uses the direct path.
#[test]
fn peer_access_that_loses_writes() {
    for loser in [0, 1] {
        let bed = Bed::new(Path::Peers, 2);
        bed.devices[loser].lose_writes_to_peers();
        bed.run(|comm, rank, device, stream| {
            let user = User::new(comm, device, stream, Path::Staged);
            for _ in 0..5 {
                let raw = raw(Op::AllReduce, DType::F32, 50_000, 0);
                let input = (rank as f32 + 1.0).to_le_bytes().repeat(50_000);
                assert!(user.run(&raw, &input, None).chunks(4).all(|sum| sum == 3f32.to_le_bytes()));
            }
            // The calls have ended on the host, too.
            comm.barrier().unwrap();
            let DeviceStats { staged, in_place, through_areas, .. } = comm.stats().device;
            assert_eq!([staged, in_place, through_areas], [5, 0, 0]);
        });
        assert!(bed.imports() > 0, "the areas could be opened");
        assert_eq!(bed.moves(), 0);
        assert_eq!(bed.sum(FakeDevice::open), 0);
    }
}

/// With any failure of a device at any time all ranks fail, none hangs, and streams continue.
#[test]
fn failures_of_the_device() {
    for path in [Path::Imported, Path::Areas, Path::Staged, Path::Apart] {
        for op in [Op::AllReduce, Op::AllToAll, Op::Broadcast] {
            for count in counts() {
                // The calls of an operation, and those of the next one.
                for after in if op == Op::AllReduce { 0..12 } else { 2..4 } {
                    let bed = Bed::new(path, 2);
                    bed.devices[0].fails_after.store(after, Ordering::SeqCst);
                    let failures = std::sync::atomic::AtomicUsize::new(0);
                    let avoided = std::sync::atomic::AtomicBool::new(false);
                    bed.run(|comm, _, device, stream| {
                        let user = User::new(comm, device, stream, path);
                        let raw = raw(op, DType::F32, count, 0);
                        let lengths = user.lengths(&raw);
                        let (send, recv) = (device.allocate(lengths[0] + 1).unwrap(), device.allocate(lengths[1]).unwrap());
                        if path == Path::Areas {
                            [send, recv].into_iter().for_each(|address| device.hide(address));
                        }
                        let mut outcome = Ok(());
                        for _ in 0..4 {
                            if outcome.is_err() {
                                break;
                            }
                            let call = user.call(&raw, send, recv);
                            // SAFETY: the memory is never freed.
                            outcome = outcome.and(unsafe { comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?)));
                        }
                        // The root of short broadcasts may have sent them all before it learns of a failure.
                        let outcome = outcome.and_then(|()| comm.barrier());
                        // A rank that cannot verify that it reaches its peers has them pass all through the host.
                        if comm.stats().device.staged > 0 && path != Path::Staged {
                            avoided.store(true, Ordering::SeqCst);
                        }
                        if let Err(error) = outcome {
                            failures.fetch_add(1, Ordering::SeqCst);
                            let is_told = matches!(error, Error::Device { .. } | Error::Peer { .. } | Error::Revoked { .. });
                            assert!(is_told, "{error}");
                        }
                        // It would wait forever if the gate stayed closed.
                        device.synchronise(user.stream);
                    });
                    let expected = if avoided.into_inner() { 0 } else { 2 };
                    assert_eq!(failures.into_inner(), expected, "{path:?} {op} {count} {after}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let bed = Bed::new(Path::Imported, 3);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        if rank == 1 {
            return;
        }
        let memory = device.allocate(400_000).unwrap();
        let call = user.call(&raw(Op::AllReduce, DType::F32, 100_000, 0), memory, memory);
        // SAFETY: the memory is never freed.
        let error = unsafe { comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?)).unwrap_err();
        assert_eq!(error.culprit(), Some(1), "{error}");
        device.synchronise(user.stream);
    });
}

#[test]
fn calls_that_do_not_match() {
    for (count, other) in [(40_000, 50_000), (40_000, 3)] {
        let bed = Bed::new(Path::Imported, 2);
        bed.run(|comm, rank, device, stream| {
            let user = User::new(comm, device, stream, Path::Imported);
            let memory = device.allocate(400_000).unwrap();
            let call = user.call(&raw(Op::AllReduce, DType::F32, if rank == 0 { count } else { other }, 0), memory, memory);
            // SAFETY: the memory is never freed.
            let error = unsafe { comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?)).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        });
        assert_eq!(bed.moves(), 0, "nothing was written");
    }
}

/// A call whose stream never reaches it fails at its deadline, or when it is aborted.
#[test]
fn streams_that_do_not_come() {
    for aborts in [false, true] {
        let both = std::sync::Barrier::new(2);
        let bed = Bed::new(Path::Imported, 2);
        bed.run(|comm, _, device, stream| {
            let user = User::new(comm, device, stream, Path::Imported);
            let memory = device.allocate(400_000).unwrap();
            // The first call makes kolo's stream, for which the driver may wait for all streams.
            let call = user.call(&raw(Op::AllReduce, DType::F32, 100_000, 0), memory, memory);
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.start_checked(call) }.unwrap().wait().unwrap();
            both.wait();
            let closed = device.hold_back(user.stream);
            let timeout = (!aborts).then(|| Duration::from_millis(200));
            let call = user.call(&Call { timeout, ..raw(Op::AllReduce, DType::F32, 100_000, 0) }, memory, memory);
            // SAFETY: the memory is never freed.
            let work = unsafe { comm.exec.start_checked(call) };
            if aborts {
                comm.abort();
            }
            // The other rank may have ended the communicator before the call.
            let error = work.and_then(|work| Ok(work.wait()?)).unwrap_err();
            assert!(!error.leaves_communicator_usable(), "{error}");
            drop(closed);
            device.synchronise(user.stream);
        });
    }
}

/// The earlier work of a stream may wait for an earlier message.
#[test]
fn messages_in_a_row() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, rank, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        for round in 0..3u8 {
            let count = 1 << 20;
            let buffers = [0, 1].map(|_| device.allocate(count).unwrap());
            for (i, memory) in buffers.into_iter().enumerate() {
                let (send, recv) = if rank == 0 { (memory, 0xdead) } else { (0xdead, memory) };
                if rank == 0 {
                    device.write(user.stream, memory, vec![2 * round + i as u8; count]);
                }
                let op = if rank == 0 { Op::Send } else { Op::Recv };
                let call = user.call(&raw(op, DType::U8, count, 1 - rank), send, recv);
                // SAFETY: the memory is never freed.
                unsafe { comm.exec.submit_checked(&call).unwrap() };
            }
            for (i, memory) in buffers.into_iter().enumerate() {
                assert!(device.read(user.stream, memory, count).iter().all(|&byte| byte == 2 * round + i as u8));
            }
        }
        assert!(comm.exec.failure().is_none());
    });
}

/// A call that returns at once cannot report its failure; a later call does.
#[test]
fn a_later_call_says_so() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, _, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        let memory = device.allocate(400_000).unwrap();
        let go = || {
            let call = user.call(&raw(Op::AllReduce, DType::F32, 100_000, 0), memory, memory);
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.submit_checked(&call) }
        };
        go().unwrap();
        device.synchronise(user.stream);
        comm.barrier().unwrap();
        device.fails_after.store(0, Ordering::SeqCst);
        let outcomes: Vec<_> = (0..3)
            .map(|_| {
                let outcome = go();
                device.synchronise(user.stream);
                outcome
            })
            .collect();
        assert!(matches!(outcomes[2], Err(Error::Revoked { .. })), "{outcomes:?}");
    });
}

/// Dropping the communicator does not abort a call that has returned to its caller.
#[test]
fn dropping_waits_for_what_was_given_to_streams() {
    let device = Arc::new(FakeDevice::new());
    device.exports.store(false, Ordering::SeqCst);
    let comms = Communicator::builder().devices(true).connect_in_process(2).unwrap();
    std::thread::scope(|scope| {
        for comm in comms {
            let device = &device;
            let machine: Arc<dyn Driver> = Arc::new(Machine(device.clone()));
            let comm = comm.with_driver(machine);
            scope.spawn(move || {
                let stream = device.user_stream();
                let count = 2_000_000;
                let memory = device.allocate(count * 4).unwrap();
                for _ in 0..2 {
                    device.write(stream, memory, 1f32.to_le_bytes().repeat(count));
                    let user = User::new(&comm, device, stream, Path::Staged);
                    let call = user.call(&raw(Op::AllReduce, DType::F32, count, 0), memory, memory);
                    // SAFETY: the memory is never freed.
                    unsafe { comm.exec.submit_checked(&call).unwrap() };
                }
                drop(comm);
                let got = device.read(stream, memory, count * 4);
                assert!(got.chunks(4).all(|value| value == 2f32.to_le_bytes()));
            });
        }
    });
}

/// Areas stay open while much other memory is opened and closed.
#[test]
fn areas_after_many_allocations() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, _, device, stream| {
        let user = User::new(comm, device, stream, Path::Imported);
        let go = |memory: Address| {
            let call = user.call(&raw(Op::AllReduce, DType::F32, 20_000, 0), memory, memory);
            // SAFETY: the memory is never freed.
            unsafe { comm.exec.start_checked(call) }.and_then(|work| Ok(work.wait()?)).unwrap();
        };
        let hidden = device.allocate(80_000).unwrap();
        device.hide(hidden);
        go(hidden);
        for _ in 0..530 {
            go(device.allocate(80_000).unwrap());
        }
        go(hidden);
    });
}

/// Kernels copy short calls where each rank has a GPU, and copy engines where ranks share one. A rank
/// that sees one GPU of several learns in the first large call whether it shares it.
#[test]
fn who_copies_short_calls() {
    for (path, visible, by_kernel) in
        [(Path::Imported, 1, [false; 2]), (Path::Apart, 2, [true; 2]), (Path::Apart, 1, [false, true])]
    {
        let bed = Bed::new(path, 2);
        bed.devices.iter().for_each(|device| device.visible.store(visible, Ordering::SeqCst));
        bed.run(|comm, _, device, stream| {
            let user = User::new(comm, device, stream, path);
            let counted = || [&device.reductions, &device.copies].map(|count| count.load(Ordering::SeqCst));
            for (is_kernel, before) in by_kernel.into_iter().zip(["a large call", "the end"]) {
                let [kernels, copies] = counted();
                let got = user.run(&raw(Op::AllReduce, DType::U8, 3, 0), &[1; 3], None);
                assert_eq!(got, [2; 3]);
                let [kernels, copies] = [counted()[0] - kernels, counted()[1] - copies];
                let expected = if is_kernel { [2, 0] } else { [0, 2] };
                assert_eq!([kernels, copies], expected, "{path:?} with {visible} visible, before {before}");
                user.run(&raw(Op::AllReduce, DType::U8, 100_000, 0), &vec![1; 100_000], None);
            }
        });
    }
}

/// If one device has no kernels, all ranks go through the host.
#[test]
fn without_kernels() {
    let devices = [Arc::new(FakeDevice::new()), Arc::new(FakeDevice::new())];
    devices[1].has_kernels.store(false, Ordering::SeqCst);
    let comms = Communicator::builder().devices(true).connect_in_process(2).unwrap();
    std::thread::scope(|scope| {
        for (comm, device) in comms.into_iter().zip(&devices) {
            let machine: Arc<dyn Driver> = Arc::new(Machine(device.clone()));
            let comm = comm.with_driver(machine);
            scope.spawn(move || {
                let user = User::new(&comm, device, device.user_stream(), Path::Imported);
                for count in counts() {
                    let got = user.run(&raw(Op::AllReduce, DType::U8, count, 0), &vec![1; count], None);
                    assert!(got.iter().all(|&sum| sum == 2), "{count}");
                }
            });
        }
    });
    assert!(devices.iter().all(|device| device.moves.load(Ordering::SeqCst) == 0));
}

#[test]
fn mismatches_show_what_was_called() {
    let bed = Bed::new(Path::Imported, 2);
    bed.run(|comm, rank, _, _| {
        let mut buffer = vec![1f32; if rank == 0 { 40_000 } else { 3 }];
        let error = comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("f32 x 40000") && error.contains("f32 x 3 "), "{error}");
    });
}
