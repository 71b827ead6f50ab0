//! Tests that need a GPU: `cargo test --features cuda --lib -- on_a_gpu`. Without a GPU they are
//! not run; with `KOLO_TEST_GPU=1` they fail instead. `scripts/gpu-check.sh` also runs them under
//! compute-sanitizer.

use std::time::Duration;

use half::{bf16, f16};

use crate::float8::{f8e4m3, f8e5m2};

use super::super::device::{Event, MOST_PARTS, Memory, MovesAt, Pinned, Stream};
use super::*;
use crate::cuda::barrier::{DeviceBarrier, FLAGS_BYTES, Missing};
use crate::cuda::direct::one_shot;
use crate::cuda::moves::{KernelTask, Moves};
use crate::cuda::shared::shared;
use crate::reduce::{Kernel, scale_to, scales};
use crate::sys::wait_until;
use crate::types::mix;

/// How long a test waits for a stream: far longer than its work takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the first GPU.
fn gpu() -> Option<Arc<dyn Device>> {
    let why = match NVIDIA.as_ref() {
        None => "there is no CUDA driver".to_owned(),
        Some(nvidia) => match nvidia.device(0) {
            Ok(gpu) => return Some(gpu),
            Err(error) => error.to_string(),
        },
    };
    assert!(std::env::var_os("KOLO_TEST_GPU").is_none(), "{why}, although KOLO_TEST_GPU is set");
    std::io::Write::write_all(&mut std::io::stderr(), format!("NOT RUN: a test on a GPU: {why}\n").as_bytes()).unwrap();
    None
}

fn until(is_so: impl Fn() -> bool) {
    wait_until("the stream does not complete its work", is_so);
}

fn until_done(event: &Event) {
    until(|| event.is_done().unwrap());
}

fn mark(gpu: &Arc<dyn Device>, stream: &Stream) -> Event {
    let event = Event::new(gpu).unwrap();
    event.record(stream.id).unwrap();
    event
}

fn put(gpu: &Arc<dyn Device>, stream: &Stream, bytes: &[u8], to: Address) {
    // SAFETY: the caller's memory has room for the bytes, which stay until they have been copied.
    unsafe { gpu.copy_in(stream.id, bytes.as_ptr(), to, bytes.len()).unwrap() };
    until_done(&mark(gpu, stream));
}

fn get(gpu: &Arc<dyn Device>, stream: &Stream, from: Address, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the caller's memory has `len` bytes, and the vector stays until they have been
    // copied.
    unsafe { gpu.copy_out(stream.id, from, bytes.as_mut_ptr(), len).unwrap() };
    until_done(&mark(gpu, stream));
    bytes
}

/// Returns numbers of which no reduction makes a NaN, because the payload of a NaN differs between
/// processors.
fn elements(dtype: DType, count: usize, seed: u64) -> Vec<u8> {
    let of = |i| {
        let word = mix(seed, i) >> 8;
        let number = f64::from(word as i8) / 16.0;
        match dtype {
            DType::Bool => word & 1,
            DType::F16 => f16::from_f64(number).to_bits().into(),
            DType::BF16 => bf16::from_f64(number).to_bits().into(),
            DType::F8E4M3 => f8e4m3::from_f64(number).to_bits().into(),
            DType::F8E5M2 => f8e5m2::from_f64(number).to_bits().into(),
            DType::F32 => (number as f32).to_bits().into(),
            DType::F64 => number.to_bits(),
            _ => word,
        }
    };
    (0..count as u64).flat_map(|i| of(i).to_le_bytes()[..dtype.size()].to_vec()).collect()
}

/// Returns the bytes in memory that is aligned for every element type.
fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0)));
    bytes.chunks(8).map(word).collect()
}

/// The content of memory before a test.
const UNTOUCHED: u8 = 0xa5;

/// Compares one reduction on the GPU with the host. Each part begins `offset` elements after a
/// line, the last one `shift` elements later.
fn reduces_as_the_host(
    gpu: &Arc<dyn Device>,
    (dtype, redop): (DType, ReduceOp),
    (parts, targets, count): (usize, usize, usize),
    (offset, shift): (usize, usize),
) {
    let (stream, size) = (Stream::new(gpu).unwrap(), dtype.size());
    let len = count * size;
    let place = |part: usize| (offset + if part + 1 == parts { shift } else { 0 }) * size;
    // The bytes after the end must not change.
    let room = |part: usize| place(part) + len + 64;
    let inputs: Vec<Vec<u8>> = (0..parts).map(|part| elements(dtype, count, mix(parts as u64, part as u64))).collect();
    let aligned: Vec<Vec<u64>> = inputs.iter().map(|input| words(input)).collect();
    let pointers: Vec<*const u8> = aligned.iter().map(|words| words.as_ptr().cast()).collect();
    let mut expected = words(&vec![0; len]);
    // SAFETY: all have `count` elements, and the target overlaps no part.
    unsafe { Kernel::new(dtype, redop).unwrap().fold(&pointers, expected.as_mut_ptr().cast(), count, Some(parts)) };
    let expected: Vec<u8> = expected.iter().flat_map(|word| word.to_le_bytes()).take(len).collect();

    let memories: Vec<Memory> = (0..parts.max(targets)).map(|part| Memory::new(gpu, room(part)).unwrap()).collect();
    for (part, memory) in memories.iter().enumerate() {
        let mut content = vec![UNTOUCHED; room(part)];
        if let Some(input) = inputs.get(part) {
            content[place(part)..][..len].copy_from_slice(input);
        }
        put(gpu, &stream, &content, memory.address);
    }
    let addresses: Vec<Address> = memories.iter().enumerate().map(|(part, memory)| memory.address + place(part) as u64).collect();
    let (sources, targets) = (&addresses[..parts], &addresses[..targets]);
    let reduction = Reduction { dtype, redop, sources, targets, count, divisor: parts };
    // SAFETY: all are within their memory, which stays allocated until it is read below.
    unsafe { gpu.reduce(stream.id, &reduction).unwrap() };
    let what = format!("{redop} of {parts} x {count} {dtype} into {}, at {offset} and {shift}", targets.len());
    for (part, memory) in memories.iter().enumerate() {
        let got = get(gpu, &stream, memory.address, room(part));
        let (before, rest) = got.split_at(place(part));
        let (got, after) = rest.split_at(len);
        assert!(before.iter().chain(after).all(|&byte| byte == UNTOUCHED), "{what}: beside part {part}");
        let right = if part < targets.len() { &expected } else { &inputs[part] };
        assert!(got == right, "{what}: part {part}");
    }
}

fn every_reduction() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = DType::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&redop| (dtype, redop)));
    all.filter(|&(dtype, redop)| redop.applies_to(dtype))
}

#[test]
fn reductions_have_the_bits_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for what in every_reduction() {
        let lanes = 16 / what.0.size();
        for (parts, targets) in [(1, 2), (2, 1), (3, 3)] {
            for (count, place) in [(1, (0, 0)), (5 * lanes + 3, (1, 0)), (5 * lanes + 3, (0, 1)), (70_001, (lanes - 1, 0))] {
                reduces_as_the_host(&gpu, what, (parts, targets, count), place);
            }
        }
    }
    reduces_as_the_host(&gpu, (DType::BF16, ReduceOp::Sum), (MOST_PARTS, MOST_PARTS, 1 << 20), (0, 0));
    reduces_as_the_host(&gpu, (DType::F32, ReduceOp::Average), (2, 2, (8 << 20) + 1), (0, 0));
}

#[test]
fn scalings_have_the_bits_of_the_host() {
    let Some(gpu) = gpu() else { return };
    let stream = Stream::new(&gpu).unwrap();
    let all = DType::ALL.iter().flat_map(|&from| DType::ALL.iter().map(move |&to| (from, to)));
    for (from, to) in all.filter(|&(from, to)| scales(from, to)) {
        // On lines, and one beside a line.
        for (count, place) in [(1, 0), (1000, 0), (70_001, 0), (70_001, 1)] {
            let content = elements(from, count, 9);
            let mut expected = words(&vec![0; count * to.size()]);
            let source = words(&content);
            // SAFETY: both have `count` elements.
            unsafe { scale_to((from, to), source.as_ptr().cast(), expected.as_mut_ptr().cast(), count, 1.0 / 3.0) };
            let expected: Vec<u8> = expected.iter().flat_map(|word| word.to_le_bytes()).take(count * to.size()).collect();
            let (source, target) = (Memory::new(&gpu, content.len()).unwrap(), Memory::new(&gpu, expected.len() + 8).unwrap());
            put(&gpu, &stream, &content, source.address);
            let at = target.address + (place * to.size()) as Address;
            let scaling = Scaling { dtypes: (from, to), source: source.address, target: at, count, factor: 1.0 / 3.0 };
            // SAFETY: both have `count` elements, and stay allocated until they are read below.
            unsafe { gpu.scale(stream.id, &scaling).unwrap() };
            assert!(get(&gpu, &stream, at, expected.len()) == expected, "{count} {from} to {to}, {place} beside a line");
        }
    }
}

#[test]
fn memory_is_found_and_copied() {
    let Some(gpu) = gpu() else { return };
    let (stream, len) = (Stream::new(&gpu).unwrap(), (1 << 20) + 3);
    let [one, other] = [0, 1].map(|_| Memory::new(&gpu, len).unwrap());
    let driver = driver().unwrap();
    let found = driver.locate(std::ptr::without_provenance(one.address as usize + len - 1)).unwrap();
    assert_eq!(found.expect("the address is in device memory").id(), gpu.id());
    let on_host = [1u8; 10];
    assert!(driver.locate(on_host.as_ptr()).unwrap().is_none());
    assert_eq!(driver.device_of(stream.id).unwrap().id(), gpu.id());
    let extent = gpu.extent(one.address + 5).unwrap();
    assert!(extent.base <= one.address && extent.base + extent.size >= one.address + len as u64);
    assert_ne!(extent.id, gpu.extent(other.address).unwrap().id);

    let content = elements(DType::U8, len, 7);
    put(&gpu, &stream, &content, one.address);
    // SAFETY: both have `len` bytes, and stay allocated until they have been copied.
    unsafe { gpu.copy(stream.id, one.address, other.address, len).unwrap() };
    assert!(get(&gpu, &stream, other.address, len) == content);
    // SAFETY: the memory has `len` bytes.
    unsafe { gpu.zero(stream.id, other.address, len).unwrap() };
    assert!(get(&gpu, &stream, other.address, len).iter().all(|&byte| byte == 0));
}

/// Memory for other processes, opened by this one: an owner may free it first.
#[test]
fn memory_for_peers_outlives_its_owner() {
    let Some(gpu) = gpu() else { return };
    let (stream, len) = (Stream::new(&gpu).unwrap(), (3 << 20) + 5);
    let memory = Memory::for_peers(&gpu, len).unwrap();
    let extent = gpu.extent(memory.address + len as u64 - 1).unwrap();
    assert!(extent.base == memory.address && extent.size >= len as u64);
    let handle = gpu.export(&extent).unwrap();
    let Handle::File { .. } = handle else { panic!("the GPU has no memory that is opened by a file") };
    let content = elements(DType::U8, len, 9);
    put(&gpu, &stream, &content, memory.address);
    let opened = [0; 2].map(|_| gpu.import(&handle).unwrap());
    drop(memory);
    gpu.held().until_released();
    assert!(gpu.import(&handle).is_err(), "the memory is no longer exported");
    for address in opened {
        assert!(get(&gpu, &stream, address, len) == content);
        // SAFETY: the stream is done with it.
        unsafe { gpu.close(address) };
    }
    let again = Memory::for_peers(&gpu, len).unwrap();
    assert_ne!(gpu.extent(again.address).unwrap().id, extent.id);
}

#[test]
fn pinned_memory_is_copied() {
    let Some(gpu) = gpu() else { return };
    let (stream, len) = (Stream::new(&gpu).unwrap(), 4 << 20);
    let mut host = elements(DType::U8, len, 3);
    let before = host.clone();
    let memory = Memory::new(&gpu, len).unwrap();
    let at = host.as_mut_ptr();
    // SAFETY: the vector outlives `pinned`.
    let pinned = unsafe { Pinned::new(&gpu, at, len).unwrap() };
    // SAFETY: both have `len` bytes, and nothing accesses the vector until the copies are done.
    unsafe {
        gpu.copy_in(stream.id, at, memory.address, len).unwrap();
        gpu.copy_out(stream.id, memory.address, at, len).unwrap();
    }
    until_done(&mark(&gpu, &stream));
    drop(pinned);
    assert!(host == before);
}

#[test]
fn a_stream_and_the_host_wait_for_each_other() {
    let Some(gpu) = gpu() else { return };
    assert!(gpu.has_words().unwrap(), "streams of this GPU can wait for words");
    // What earlier tests and rounds have dropped is not destroyed meanwhile.
    let _enqueueing = gpu.held().enqueueing();
    for is_released in [false, true] {
        let (stream, other) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
        // Made now: later it would wait for the stream that is held back.
        let event = Event::new(&gpu).unwrap();
        let words = shared(&*gpu).words.take(&gpu, 2).unwrap();
        for round in 0..2 {
            words.enqueue_arrived(&*gpu, stream.id, round).unwrap();
            words.enqueue_until_go(&*gpu, stream.id, round).unwrap();
            words.enqueue_done(&*gpu, stream.id, round).unwrap();
            words.enqueue_until_end(&*gpu, stream.id, round).unwrap();
        }
        words.enqueue_left(&*gpu, stream.id).unwrap();
        until(|| words.has_arrived(0));
        // Other streams continue.
        event.record(other.id).unwrap();
        until_done(&event);
        assert!(!words.is_done(0));
        if is_released {
            words.release();
        } else {
            for round in 0..2 {
                until(|| words.has_arrived(round));
                assert!(!words.is_done(round));
                words.go(round);
                until(|| words.is_done(round));
                assert!(!words.has_left());
                words.end(round);
            }
        }
        until(|| words.has_left());
        shared(&*gpu).words.give_back(words);
    }
}

/// Case 1 of the tests on a fake device: memory is freed while a stream is held back.
#[test]
fn memory_is_freed_while_a_stream_is_held_back() {
    let Some(gpu) = gpu() else { return };
    let stream = Stream::new(&gpu).unwrap();
    let _enqueueing = gpu.held().enqueueing();
    let words = shared(&*gpu).words.take(&gpu, 1).unwrap();
    let address = gpu.allocate(1 << 20).unwrap();
    words.enqueue_arrived(&*gpu, stream.id, 0).unwrap();
    words.enqueue_until_end(&*gpu, stream.id, 0).unwrap();
    words.enqueue_left(&*gpu, stream.id).unwrap();
    until(|| words.has_arrived(0));
    std::thread::scope(|scope| {
        // SAFETY: nothing uses it.
        scope.spawn(|| unsafe { gpu.free(address) });
        std::thread::sleep(Duration::from_millis(50));
        words.end(0);
        until(|| words.has_left());
    });
    shared(&*gpu).words.give_back(words);
}

/// A kernel that was launched before does what the host tells it afterwards.
#[test]
fn moves_are_told_after_the_launch() {
    let Some(gpu) = gpu() else { return };
    let (stream, count) = (Stream::new(&gpu).unwrap(), 100_003);
    gpu.prepare(DType::F32, Some(ReduceOp::Sum)).unwrap();
    let content = elements(DType::F32, count, 5);
    let memories = [0, 1, 2].map(|_| Memory::new(&gpu, 4 * count).unwrap());
    memories.iter().for_each(|memory| put(&gpu, &stream, &content, memory.address));
    let list = shared(&*gpu).pinned.take(&gpu, Moves::bytes(2)).unwrap();
    let copy = Memory::new(&gpu, Moves::bytes(2)).unwrap();
    let _enqueueing = gpu.held().enqueueing();
    let words = shared(&*gpu).words.take(&gpu, 1).unwrap();
    words.enqueue_until_go(&*gpu, stream.id, 0).unwrap();
    let moves = MovesAt { on_device: copy.address, on_host: list.address() };
    // SAFETY: the list and its copy stay until the stream has left.
    unsafe { gpu.run_moves(stream.id, (DType::F32, ReduceOp::Sum), moves, 4 * count as u64, false).unwrap() };
    words.enqueue_left(&*gpu, stream.id).unwrap();
    let [one, other, sum] = memories.each_ref().map(|memory| memory.address);
    let half = count / 2;
    let from = |address: Address| address + 4 * half as u64;
    let moves = [Move::new(&[one, other], &[sum], half, 1), Move::new(&[from(one), from(other)], &[from(sum)], count - half, 1)];
    // SAFETY: there is room for two, and the kernel waits.
    unsafe { Moves::write(list.at(0), KernelTask::of(moves.to_vec())) };
    words.go(0);
    until(|| words.has_left());
    let doubled = content.chunks(4).map(|bytes| 2.0 * f32::from_le_bytes(bytes.try_into().unwrap()));
    let got = get(&gpu, &stream, sum, 4 * count);
    assert!(got.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).eq(doubled));
    shared(&*gpu).words.give_back(words);
    assert!(shared(&*gpu).pinned.give_back(list).is_none());
}

/// Words are captured in a graph, whose replays and whose end are noticed.
#[test]
fn a_graph_is_replayed() {
    let Some(gpu) = gpu() else { return };
    let stream = Stream::new(&gpu).unwrap();
    let words = shared(&*gpu).words.take(&gpu, 1).unwrap();
    let expect = |result: CUresult| assert_eq!(result, CUresult::CUDA_SUCCESS, "{}", describe(result));
    let (mut context, mut graph, mut replayed) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the calls write to variables of this function. The primary context lives as long as the
    // process.
    unsafe {
        expect(cu::cuDevicePrimaryCtxRetain(&mut context, 0));
        expect(cu::cuCtxSetCurrent(context));
        expect(cu::cuStreamBeginCapture_v2(raw(stream.id), cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
    }
    assert!(gpu.capture(stream.id).unwrap().is_some());
    let is_gone = Arc::new(AtomicBool::new(false));
    gpu.watch_graph(stream.id, is_gone.clone()).unwrap();
    // What a call may do in a capture.
    drop(Event::new(&gpu).unwrap());
    let list = shared(&*gpu).pinned.take(&gpu, 4 << 20).unwrap();
    words.enqueue_rewind(&*gpu, stream.id).unwrap();
    words.enqueue_arrived(&*gpu, stream.id, 0).unwrap();
    words.enqueue_until_go(&*gpu, stream.id, 0).unwrap();
    words.enqueue_done(&*gpu, stream.id, 0).unwrap();
    words.enqueue_until_end(&*gpu, stream.id, 0).unwrap();
    words.enqueue_left(&*gpu, stream.id).unwrap();
    // SAFETY: as above; the graph is destroyed below.
    unsafe {
        expect(cu::cuStreamEndCapture(raw(stream.id), &mut graph));
        expect(cu::cuGraphInstantiateWithFlags(&mut replayed, graph, 0));
    }
    assert_eq!(gpu.capture(stream.id).unwrap(), None);
    for _ in 0..3 {
        assert!(!words.has_arrived(0));
        // SAFETY: the graph is not destroyed before its replay has ended.
        expect(unsafe { cu::cuGraphLaunch(replayed, raw(stream.id)) });
        until(|| words.has_arrived(0));
        assert!(!words.is_done(0));
        words.go(0);
        until(|| words.is_done(0));
        assert!(!words.has_left());
        words.end_replay();
        until(|| words.has_left());
        words.rewind_left();
    }
    assert!(!is_gone.load(Ordering::Acquire));
    // SAFETY: no replay runs.
    unsafe {
        expect(cu::cuGraphExecDestroy(replayed));
        expect(cu::cuGraphDestroy(graph));
    }
    until(|| is_gone.load(Ordering::Acquire));
    shared(&*gpu).words.give_back(words);
    _ = shared(&*gpu).pinned.give_back(list);
}

/// Kernels of two ranks wait for each other, here on one GPU; and one names the rank that does not
/// arrive, or stops when the host cancels the barrier.
#[test]
fn kernels_wait_for_each_other() {
    let Some(gpu) = gpu() else { return };
    let (dtype, redop, count) = (DType::F32, ReduceOp::Sum, 10_007);
    gpu.prepare(dtype, Some(redop)).unwrap();
    // A buffer for each rank, a slot for each, and its flags.
    let memory = |len: usize| [0, 1].map(|_| Memory::new(&gpu, len).unwrap());
    let (buffers, slots, flags) = (memory(4 * count), memory(4 * count), memory(FLAGS_BYTES));
    let addresses = |memories: &[Memory; 2]| memories.each_ref().map(|memory| memory.address);
    let (at, slots, flags) = (addresses(&buffers), addresses(&slots), addresses(&flags));
    let streams = [0, 1].map(|_| Stream::new(&gpu).unwrap());
    let content = [0, 1].map(|rank| elements(dtype, count, 5 + rank));
    let lists = [0, 1].map(|_| shared(&*gpu).pinned.take(&gpu, Moves::bytes(2)).unwrap());
    let copies = memory(Moves::bytes(2));
    let words = [0, 1].map(|_| shared(&*gpu).words.take(&gpu, 1).unwrap());
    for rank in [0, 1] {
        put(&gpu, &streams[rank], &content[rank], at[rank]);
        put(&gpu, &streams[rank], &[0; FLAGS_BYTES], flags[rank]);
    }
    let tell = |number: u32, rank: usize, limit: Duration| {
        let moves = one_shot(rank, &slots, (at[rank], at[rank]), count).to_vec();
        let task = KernelTask { moves, before: 1, barrier: DeviceBarrier::new(number, rank, &flags, limit) };
        // SAFETY: there is room for two moves, and no kernel reads them yet.
        unsafe { Moves::write(lists[rank].at(0), task) };
    };
    let launch = |rank: usize| {
        let (most, moves) = (4 * count as u64, MovesAt { on_device: copies[rank].address, on_host: lists[rank].address() });
        // SAFETY: the memory lives until the streams are done.
        unsafe { gpu.run_moves(streams[rank].id, (dtype, redop), moves, most, true).unwrap() };
        words[rank].enqueue_left(&*gpu, streams[rank].id).unwrap();
    };
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let long = PATIENCE / 2;
    // Events that end wait for all streams, and other calls for them.
    let _hold = gpu.held().hold();
    [0, 1].into_iter().for_each(|rank| tell(0, rank, long));
    launch(1);
    launch(0);
    [0, 1].into_iter().for_each(|rank| until(|| words[rank].has_left()));
    let sums: Vec<f32> = content[0].chunks(4).zip(content[1].chunks(4)).map(|(a, b)| number(a) + number(b)).collect();
    for rank in [0, 1] {
        assert!(get(&gpu, &streams[rank], at[rank], 4 * count).chunks(4).map(number).eq(sums.iter().copied()), "rank {rank}");
        // SAFETY: the list was written.
        assert_eq!(unsafe { Moves::missing(lists[rank].at(0)) }, None);
    }
    // Rank 1 does not arrive. What the host reads of its flags is copied by its stream.
    let (event, mut flag) = (Event::new(&gpu).unwrap(), [0; 4]);
    let mut has_arrived = |value: u32| {
        // SAFETY: both live until the copy is done.
        unsafe { gpu.copy_out(streams[1].id, flags[1], flag.as_mut_ptr(), 4).unwrap() };
        event.record(streams[1].id).unwrap();
        until_done(&event);
        u32::from_le_bytes(flag) == value
    };
    for (is_cancelled, turn) in [(true, 1), (false, 2)] {
        words.iter().for_each(|words| words.rewind_left());
        tell(turn, 0, if is_cancelled { long } else { Duration::from_millis(100) });
        launch(0);
        if is_cancelled {
            wait_until("the kernel does not arrive", || has_arrived(3));
            // SAFETY: it is memory for moves.
            unsafe { Moves::take_back(lists[0].at(0)) };
        }
        until(|| words[0].has_left());
        // SAFETY: the list was written.
        let missing = unsafe { Moves::missing(lists[0].at(0)) };
        assert_eq!(missing, if is_cancelled { None } else { Some(Missing::Late(1)) });
        // What it would have summed stays.
        assert!(get(&gpu, &streams[0], at[0], 4 * count).chunks(4).map(number).eq(sums.iter().copied()));
    }
    words.into_iter().for_each(|words| shared(&*gpu).words.give_back(words));
    lists.into_iter().for_each(|list| assert!(shared(&*gpu).pinned.give_back(list).is_none()));
}
