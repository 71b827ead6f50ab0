use std::sync::atomic::Ordering;
use std::time::Duration;

use super::*;
use crate::cuda::device::Driver;
use crate::cuda::fake_device::{FakeDevice, Machine};
use crate::ddp::{
    Average, Bucket, BufferSync, Compress, Hook, Parameter, PowerSgd, Reducer, ReducerBuilder, TensorMut, Uneven, Unused,
};
use crate::error::{Error, ReducerError};
use crate::types::mix;

fn on_ranks<R: Send>(device: &Arc<FakeDevice>, world: usize, body: impl Fn(&Communicator, StreamId) -> R + Sync) -> Vec<R> {
    let comms = Communicator::builder().devices(true).timeout(Duration::from_secs(60)).connect_in_process(world).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let machine: Arc<dyn Driver> = Arc::new(Machine(device.clone()));
                let (comm, body, stream) = (comm.with_driver(machine), &body, device.user_stream());
                scope.spawn(move || body(&comm, stream))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Small whole numbers, whose sums and averages over 2 or 4 ranks are exact in all types.
fn elements(dtype: DType, count: usize, seed: u64) -> Vec<u8> {
    let small = |i: usize| (mix(seed, i as u64) % 17) as f32 - 8.0;
    let bytes = |i: usize| match dtype {
        DType::F32 => small(i).to_le_bytes().to_vec(),
        DType::F64 => f64::from(small(i)).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(small(i)).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(small(i)).to_le_bytes().to_vec(),
        DType::Bool => vec![u8::from(small(i) > 0.0)],
        _ => mix(seed, i as u64).to_le_bytes()[..dtype.size()].to_vec(),
    };
    (0..count).flat_map(bytes).collect()
}

/// Numbers of which a product is rounded.
fn reals(dtype: DType, count: usize, seed: u64) -> Vec<u8> {
    let real = |i: usize| f64::from(mix(seed, i as u64) as i32) / 3e8;
    let bytes = |i: usize| match dtype {
        DType::F32 => (real(i) as f32).to_le_bytes().to_vec(),
        DType::F64 => real(i).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(real(i)).to_le_bytes().to_vec(),
        _ => half::bf16::from_f64(real(i)).to_le_bytes().to_vec(),
    };
    (0..count).flat_map(bytes).collect()
}

fn number(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().unwrap())
}

/// A reducer, and what a training program knows of it.
struct Model<'a> {
    device: &'a Arc<FakeDevice>,
    stream: StreamId,
    reducer: Reducer,
    /// Gradients that the stream may still read.
    taken: Vec<Address>,
}

impl<'a> Model<'a> {
    fn new(device: &'a Arc<FakeDevice>, stream: StreamId, builder: ReducerBuilder, comm: &Communicator) -> Model<'a> {
        Model { device, stream, reducer: builder.on_device(0, stream).build(comm).unwrap(), taken: Vec::new() }
    }

    /// Device memory that the stream fills.
    fn filled(&mut self, content: &[u8]) -> Address {
        let at = self.device.allocate(content.len().max(1)).unwrap();
        self.device.write(self.stream, at, content.to_vec());
        self.taken.push(at);
        at
    }

    fn put(&mut self, index: usize, content: &[u8], in_place: bool) -> Result<()> {
        let Parameter { dtype, on_device, .. } = self.reducer.parameters()[index];
        if !on_device {
            return crate::ddp::with_float!(dtype, T => {
                let mut values = vec![T::default(); content.len() / size_of::<T>()];
                // SAFETY: as many bytes, and every pattern is a value.
                unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), values.as_mut_ptr().cast(), content.len()) };
                self.reducer.put(index, &values)
            });
        }
        if in_place {
            let at = self.reducer.address(index).unwrap().addr() as Address;
            self.device.write(self.stream, at, content.to_vec());
            return self.reducer.mark(index, true);
        }
        let at = self.filled(content);
        // SAFETY: it is freed when the stream has passed its last use.
        unsafe { self.reducer.put_on_device(index, at) }
    }

    fn gradient(&self, index: usize) -> Vec<u8> {
        let described = &self.reducer.parameters()[index];
        let (at, len) = (self.reducer.address(index).unwrap(), described.count() * described.dtype.size());
        match described.on_device {
            true => self.device.read(self.stream, at.addr() as Address, len),
            // SAFETY: between steps nothing writes it.
            false => unsafe { std::slice::from_raw_parts(at, len) }.to_vec(),
        }
    }
}

impl Drop for Model<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.device.synchronise(self.stream);
            // SAFETY: the stream has passed all work that used them.
            self.taken.drain(..).for_each(|at| unsafe { self.device.free(at) });
        }
    }
}

/// What a training run does, drawn at random: with parameters on a device, and with the same in
/// host memory.
struct Drawn {
    seed: u64,
    world: usize,
    parameters: Vec<Parameter>,
}

impl Drawn {
    fn new(seed: u64) -> Drawn {
        let draw = |what: u64, below: u64| mix(mix(seed, 77), what) % below;
        let dtypes = [DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
        let parameter = |i: u64| {
            // Some long enough to be reduced where they are.
            let count = [0, 7, 300, 20_000][draw(100 + i, 4) as usize] + draw(200 + i, 9) as usize;
            let parameter = Parameter::new(format!("p{i}"), [count], dtypes[draw(300 + i, 5) as usize]);
            if i == 0 || draw(400 + i, 3) > 0 { parameter.on_device() } else { parameter }
        };
        Drawn { seed, world: [1, 2, 4][draw(1, 3) as usize], parameters: (0..1 + draw(2, 7)).map(parameter).collect() }
    }

    fn builder(&self, on_device: bool) -> ReducerBuilder {
        let place = |parameter: &Parameter| Parameter { on_device: parameter.on_device && on_device, ..parameter.clone() };
        let builder = Reducer::builder().parameters(self.parameters.iter().map(place)).unused(Unused::Find);
        builder.bucket_bytes(40_000).first_bucket_bytes(1000)
    }

    /// The gradients after every step that is reduced.
    fn train(&self, model: &mut Model<'_>, rank: Rank) -> Vec<Vec<u8>> {
        let mut seen = Vec::new();
        for step in 0..4u64 {
            let micro_steps = mix(self.seed, 900 + step) % 3;
            for micro in 0..=micro_steps {
                model.reducer.start(micro == micro_steps).unwrap();
                let own = mix(mix(self.seed, rank as u64), 10 * step + micro);
                let mut order: Vec<usize> = (0..self.parameters.len()).collect();
                order.sort_by_key(|&index| mix(own, index as u64));
                for index in order {
                    let Parameter { dtype, .. } = self.parameters[index];
                    let content = elements(dtype, self.parameters[index].count(), mix(own, 50 + index as u64));
                    match mix(own, 100 + index as u64) % 8 {
                        0 => model.reducer.mark(index, false).unwrap(),
                        1 => {}
                        // Nothing is added to what is written in place.
                        draw => model.put(index, &content, draw == 2 && !model.reducer.accumulates()).unwrap(),
                    }
                }
                model.reducer.finish().unwrap();
            }
            seen.extend((0..self.parameters.len()).map(|index| model.gradient(index)));
            seen.push((0..self.parameters.len()).map(|index| u8::from(model.reducer.is_used(index))).collect());
        }
        seen
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn what_is_on_a_device_is_averaged_as_what_is_not() {
    let device = Arc::new(FakeDevice::new());
    for seed in 0..24 {
        let drawn = Drawn::new(seed);
        device.exports.store(seed % 3 != 0, Ordering::SeqCst);
        device.has_words.store(seed % 2 == 0, Ordering::SeqCst);
        on_ranks(&device, drawn.world, |comm, stream| {
            let [expected, got] = [false, true].map(|on_device| {
                let mut model = Model::new(&device, stream, drawn.builder(on_device), comm);
                drawn.train(&mut model, comm.rank())
            });
            for (place, (expected, got)) in expected.iter().zip(&got).enumerate() {
                assert!(expected == got, "seed {seed}, rank {}, {place}", comm.rank());
            }
        });
    }
}

/// Doubles what it finds, on the host.
struct Doubled;

impl Hook for Doubled {
    fn name(&self) -> String {
        "doubled".to_owned()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        assert!(bucket.is_on_device());
        bucket.elements::<f32>()?.iter_mut().for_each(|x| *x *= 2.0);
        bucket.average(comm)
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn hooks_find_gradients_of_a_device_on_the_host() {
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 2, |comm, stream| {
        let train = |on_device: bool, builder: ReducerBuilder| {
            let parameters = [300, 5000, 40].map(|count| Parameter::new("p", [count], DType::F32));
            let place = |parameter: Parameter| if on_device { parameter.on_device() } else { parameter };
            let builder = builder.parameters(parameters.map(place)).first_bucket_bytes(1000).bucket_bytes(1000);
            let mut model = Model::new(&device, stream, builder, comm);
            for step in 0..3 {
                model.reducer.start(true).unwrap();
                for (index, count) in [300, 5000, 40].into_iter().enumerate() {
                    let content = elements(DType::F32, count, mix(step, (10 * comm.rank() + index) as u64));
                    model.put(index, &content, false).unwrap();
                }
                model.reducer.finish().unwrap();
            }
            (0..3).map(|index| model.gradient(index)).collect::<Vec<_>>()
        };
        let plain = train(false, Reducer::builder());
        assert_eq!(train(true, Reducer::builder().hook(Average)), plain);
        for hook in [Compress::f16, Compress::bf16] {
            assert_eq!(train(true, Reducer::builder().hook(hook())), train(false, Reducer::builder().hook(hook())));
        }
        let power = || Reducer::builder().hook(PowerSgd::new(2));
        assert_eq!(train(true, power()), train(false, power()));
        let doubled = train(true, Reducer::builder().hook(Doubled));
        for (twice, once) in doubled.iter().zip(&plain) {
            assert!(twice.chunks(4).zip(once.chunks(4)).all(|(twice, once)| number(twice) == 2.0 * number(once)));
        }
    });
}

/// Trains four ranks, of which rank 0 makes one step less than the others, with each type of
/// gradients and buffers. Returns the gradients after each step of this rank, and its buffers after
/// the last step.
fn train_unevenly(
    device: &Arc<FakeDevice>,
    (comm, stream): (&Communicator, StreamId),
    on_device: bool,
    builder: ReducerBuilder,
) -> Vec<Vec<u8>> {
    // Long enough to be reduced where they are, also when they are compressed.
    const COUNT: usize = 40_001;
    let described = [DType::F32, DType::F64, DType::F16, DType::BF16].map(|dtype| {
        let parameter = Parameter::new(dtype.to_string(), [COUNT], dtype);
        if on_device { parameter.on_device() } else { parameter }
    });
    let builder = builder.parameters(described.clone()).buffers(described.clone()).uneven(Uneven::ByRanksWithInput);
    let mut model = Model::new(device, stream, builder.first_bucket_bytes(1).bucket_bytes(1), comm);
    let content = |kind: u64, index: usize| reals(described[index].dtype, COUNT, mix(kind, (10 * comm.rank() + index) as u64));
    let mut seen = Vec::new();
    for step in 0..if comm.rank() == 0 { 1 } else { 2 } {
        model.reducer.start(true).unwrap();
        (0..4).for_each(|index| model.put(index, &content(step, index), false).unwrap());
        model.reducer.finish().unwrap();
        seen.extend((0..4).map(|index| model.gradient(index)));
    }
    if comm.rank() > 0 {
        let mut host: Vec<Vec<u8>> = (0..4).map(|index| content(7, index)).collect();
        let at: Vec<Address> = host.iter().map(|content| model.filled(content)).collect();
        let mut tensors: Vec<TensorMut<'_>> = (0..4)
            .map(|index| {
                let there = std::ptr::without_provenance_mut(at[index] as usize);
                let address = if on_device { there } else { host[index].as_mut_ptr() };
                // SAFETY: both have this many bytes, and nothing else uses them.
                unsafe { TensorMut::at(address, &described[index]) }
            })
            .collect();
        model.reducer.sync_buffers(&mut tensors, BufferSync::Average).unwrap();
        drop(tensors);
        match on_device {
            true => seen.extend(at.iter().zip(&host).map(|(&at, host)| device.read(stream, at, host.len()))),
            false => seen.extend(host),
        }
    }
    while model.reducer.join_step().unwrap() {}
    seen
}

/// Compression, averages of fewer ranks and averages of buffers have the same bits on a device as on
/// the host, and copy nothing to the host.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn kernels_scale_and_convert_as_the_host_does() {
    let hooks: [fn(ReducerBuilder) -> ReducerBuilder; 3] =
        [|builder| builder, |builder| builder.hook(Compress::f16()), |builder| builder.hook(Compress::bf16())];
    for (hook, scalings) in hooks.into_iter().zip([0, 4, 4]) {
        for has_kernels in [true, false] {
            let device = Arc::new(FakeDevice::new());
            device.has_kernels.store(has_kernels, Ordering::SeqCst);
            on_ranks(&device, 4, |comm, stream| {
                let train = |on_device| train_unevenly(&device, (comm, stream), on_device, hook(Reducer::builder()));
                let (on_device, on_host) = (train(true), train(false));
                for (place, (on_device, on_host)) in on_device.iter().zip(&on_host).enumerate() {
                    assert!(on_device == on_host, "kernels {has_kernels}, rank {}, {place}", comm.rank());
                }
            });
            let [copies, done] = [&device.copies, &device.scalings].map(|count| count.load(Ordering::SeqCst));
            if has_kernels {
                // Two of two buckets in each of two steps, one of each bucket in the step of three
                // ranks, and one of each buffer.
                assert_eq!((copies, done), (0, 4 * (2 * scalings + 4 + 4)));
            } else {
                assert!(copies > 0 && done == 0, "{copies} {done}");
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn who_has_no_more_input_gives_zeros_on_its_device() {
    let device = Arc::new(FakeDevice::new());
    for uneven in [Uneven::ByWorldSize, Uneven::ByRanksWithInput] {
        on_ranks(&device, 2, |comm, stream| {
            let parameter = Parameter::new("p", [30_000], DType::F32).on_device();
            let builder = Reducer::builder().parameters([parameter]).uneven(uneven);
            let mut model = Model::new(&device, stream, builder, comm);
            let content = elements(DType::F32, 30_000, 3);
            for step in 0..if comm.rank() == 0 { 3 } else { 1 } {
                model.reducer.start(true).unwrap();
                model.put(0, &content, step == 1).unwrap();
                model.reducer.finish().unwrap();
                let share = if step > 0 && uneven == Uneven::ByWorldSize { 0.5 } else { 1.0 };
                let got = model.gradient(0);
                let is_right = got.chunks(4).zip(content.chunks(4)).all(|(got, one)| number(got) == share * number(one));
                assert!(is_right, "step {step}");
            }
            while model.reducer.join_step().unwrap() {}
        });
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn values_on_a_device_become_equal() {
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 2, |comm, stream| {
        let rank = comm.rank() as u64;
        let described = |on: bool| {
            let list = [(DType::F32, 20_000), (DType::I64, 1), (DType::Bool, 9), (DType::BF16, 100), (DType::F32, 0)];
            let one = |(dtype, count)| Parameter::new("b", [count], dtype);
            list.map(one).map(|one| if on { one.on_device() } else { one })
        };
        let weight = Parameter::new("w", [50_000], DType::F32).on_device();
        let builder = Reducer::builder().parameters([weight.clone()]).buffers(described(true));
        let mut model = Model::new(&device, stream, builder, comm);
        let mut check = |list: &[Parameter],
                         seed: u64,
                         expected: &dyn Fn(&Parameter, usize) -> Vec<u8>,
                         call: &mut dyn FnMut(&mut Reducer, &mut [TensorMut<'_>])| {
            let bytes =
                |one: &Parameter, index: usize, rank: u64| elements(one.dtype, one.count(), mix(seed + rank, index as u64));
            let at: Vec<Address> = list.iter().enumerate().map(|(index, one)| model.filled(&bytes(one, index, rank))).collect();
            let tensor = |(&at, one): (&Address, &Parameter)| {
                // SAFETY: both have this many bytes, and nothing else uses them.
                unsafe { TensorMut::at(std::ptr::without_provenance_mut(at as usize), one) }
            };
            let mut tensors: Vec<TensorMut<'_>> = at.iter().zip(list).map(tensor).collect();
            call(&mut model.reducer, &mut tensors);
            for (index, (&at, one)) in at.iter().zip(list).enumerate() {
                let got = model.device.read(stream, at, one.count() * one.dtype.size());
                assert!(got == expected(one, index), "{one} {index}");
            }
        };
        let of = |seed: u64, rank: u64| {
            move |one: &Parameter, index: usize| elements(one.dtype, one.count(), mix(seed + rank, index as u64))
        };
        check(&[weight], 100, &of(100, 0), &mut |reducer, values| reducer.broadcast_parameters(values).unwrap());
        let buffers = described(true);
        check(&buffers, 200, &of(200, 1), &mut |reducer, values| reducer.sync_buffers(values, BufferSync::Broadcast(1)).unwrap());
        let average = |one: &Parameter, index: usize| {
            let [a, b] = [0, 1].map(|rank| of(300, rank)(one, index));
            match one.dtype {
                DType::F32 => {
                    a.chunks(4).zip(b.chunks(4)).flat_map(|(a, b)| (0.5 * (number(a) + number(b))).to_le_bytes()).collect()
                }
                DType::BF16 => a
                    .chunks(2)
                    .zip(b.chunks(2))
                    .flat_map(|(a, b)| {
                        let number = |bytes: &[u8]| half::bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32();
                        half::bf16::from_f32(0.5 * (number(a) + number(b))).to_le_bytes()
                    })
                    .collect(),
                _ => a,
            }
        };
        check(&buffers, 300, &average, &mut |reducer, values| reducer.sync_buffers(values, BufferSync::Average).unwrap());
    });
}

fn problem<T: std::fmt::Debug>(result: Result<T>) -> ReducerError {
    match result.unwrap_err() {
        Error::Reducer { problem } => *problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn host_memory_and_a_devices_are_told_apart() {
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 1, |comm, stream| {
        let on_device = || Parameter::new("w", [4], DType::F32).on_device();
        match Reducer::builder().parameters([on_device()]).build(comm) {
            Err(Error::Setting { name, .. }) => assert_eq!(name, "w"),
            other => panic!("{other:?}"),
        }
        let parameters = [on_device(), Parameter::new("b", [4], DType::F32)];
        let mut reducer = Reducer::builder().parameters(parameters).on_device(0, stream).build(comm).unwrap();
        let mut values = vec![0.0f32; 4];
        let (mut one, mut other) = (values.clone(), values.clone());
        let mut tensors = [TensorMut::from(&mut one), TensorMut::from(&mut other)];
        let is_place = |problem: ReducerError| matches!(problem, ReducerError::Place { .. });
        assert!(is_place(problem(reducer.broadcast_parameters(&mut tensors))));
        let step = reducer.begin().unwrap();
        assert!(is_place(problem(step.view::<f32>(0).map(drop))));
        assert!(is_place(problem(step.put(0, &values))));
        // SAFETY: nothing is read there.
        unsafe {
            assert!(is_place(problem(step.reducer.put_on_device(1, 64))));
            assert!(is_place(problem(step.reducer.put_on_device(0, values.as_ptr().addr() as Address))));
            let at = device.allocate(16).unwrap();
            device.begin_capture(stream);
            match step.reducer.put_on_device(0, at).unwrap_err() {
                Error::Unsupported { what, .. } => assert!(what.contains("CUDA graph")),
                other => panic!("{other:?}"),
            }
            drop(device.end_capture(stream).unwrap());
        }
        // None of it did any harm.
        step.put(1, &values).unwrap();
        step.unused(0).unwrap();
        step.finish().unwrap();
        assert!(is_place(problem(reducer.gradient::<f32>(0).map(drop))));
        values.copy_from_slice(reducer.gradient(1).unwrap());
    });
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn all_hear_which_rank_has_no_device_and_why() {
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 3, |comm, stream| {
        let builder = Reducer::builder().parameters([Parameter::new("w", [4], DType::F32).on_device()]);
        let error = if comm.rank() == 1 { builder } else { builder.on_device(0, stream) }.build(comm).unwrap_err();
        match error {
            Error::Setting { name, .. } if comm.rank() == 1 => assert_eq!(name, "w"),
            Error::Reducer { problem } if comm.rank() != 1 => match *problem {
                ReducerError::Refused { rank: 1, why } => assert!(why.contains("a device given to"), "{why}"),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
        comm.barrier().unwrap();
    });
}

/// The thread of rank 0 waits for its stream, and not for rank 1, when that gives up.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn who_waits_for_its_stream_hears_of_another_rank() {
    let device = Arc::new(FakeDevice::new());
    let held = Mutex::new(None);
    on_ranks(&device, 2, |comm, stream| {
        let builder = Reducer::builder().parameters([Parameter::new("w", [40_000], DType::F32).on_device()]);
        let mut model = Model::new(&device, stream, builder, comm);
        model.reducer.start(true).unwrap();
        if comm.rank() == 0 {
            *held.lock() = Some(device.hold_back(stream));
            let at = device.allocate(160_000).unwrap();
            // SAFETY: it is not freed.
            unsafe { model.reducer.put_on_device(0, at).unwrap() };
        }
        comm.barrier().unwrap();
        let error = model.reducer.finish().unwrap_err();
        match (comm.rank(), error) {
            (0, Error::Peer { rank: 1, .. }) => {}
            (1, Error::Reducer { .. }) => {}
            (_, other) => panic!("{other:?}"),
        }
        held.lock().take();
    });
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn what_was_added_is_not_added_again() {
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 1, |comm, stream| {
        let builder = || Reducer::builder().parameters([Parameter::new("w", [7], DType::F32).on_device()]);
        // Giving the sum fails, or the mark behind it.
        for may_retry in [true, false] {
            let mut model = Model::new(&device, stream, builder(), comm);
            model.reducer.start(false).unwrap();
            model.put(0, &elements(DType::F32, 7, 1), false).unwrap();
            model.reducer.finish().unwrap();
            model.reducer.start(true).unwrap();
            let at = model.filled(&elements(DType::F32, 7, 2));
            device.fails_after.store(if may_retry { 0 } else { -1 }, Ordering::SeqCst);
            device.marks_fail.store(!may_retry, Ordering::SeqCst);
            // SAFETY: it stays until the model is dropped.
            assert!(matches!(unsafe { model.reducer.put_on_device(0, at) }, Err(Error::Device { .. })));
            device.marks_fail.store(false, Ordering::SeqCst);
            // SAFETY: as above.
            let again = unsafe { model.reducer.put_on_device(0, at) }.and_then(|()| model.reducer.finish());
            assert_eq!(again.is_ok(), may_retry, "{again:?}");
            if may_retry {
                let (one, other) = (elements(DType::F32, 7, 1), elements(DType::F32, 7, 2));
                let sums = one.chunks(4).zip(other.chunks(4)).map(|(one, other)| number(one) + number(other));
                assert!(model.gradient(0).chunks(4).map(number).eq(sums));
            }
        }
    });
}

/// What is waited for on the device is not communication.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn a_step_is_computed_when_the_last_gradient_is_there() {
    const LONG: Duration = Duration::from_millis(100);
    let device = Arc::new(FakeDevice::new());
    on_ranks(&device, 1, |comm, stream| {
        let builder = Reducer::builder().parameters([Parameter::new("w", [7], DType::F32).on_device()]);
        let mut model = Model::new(&device, stream, builder, comm);
        model.reducer.start(true).unwrap();
        let held = device.hold_back(stream);
        model.put(0, &elements(DType::F32, 7, 1), false).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(LONG);
                drop(held);
            });
            model.reducer.finish().unwrap();
        });
        let statistics = model.reducer.statistics();
        assert!(statistics.computed >= LONG && statistics.buckets[0].started >= LONG, "{statistics:?}");
        assert!(statistics.buckets[0].ended >= statistics.buckets[0].started, "{statistics:?}");
    });
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn without_kernels_buckets_pass_through_the_host_and_nothing_is_accumulated() {
    let device = Arc::new(FakeDevice::new());
    device.has_kernels.store(false, Ordering::SeqCst);
    on_ranks(&device, 2, |comm, stream| {
        let builder = Reducer::builder().parameters([Parameter::new("w", [40_000], DType::F32).on_device()]);
        let mut model = Model::new(&device, stream, builder, comm);
        let content = elements(DType::F32, 40_000, 5);
        model.reducer.start(true).unwrap();
        model.put(0, &content, false).unwrap();
        model.reducer.finish().unwrap();
        assert!(model.gradient(0) == content);
    });
    assert_eq!(device.reductions.load(Ordering::SeqCst), 0);
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn a_device_that_fails_ends_the_step_of_all_or_leaves_the_gradient_awaited() {
    let mut ends = [0; 2];
    for after in 0..40 {
        let device = Arc::new(FakeDevice::new());
        let failed = on_ranks(&device, 2, |comm, stream| {
            let parameters = [50_000, 10].map(|count| Parameter::new("w", [count], DType::F32).on_device());
            let builder = Reducer::builder().parameters(parameters).on_device(0, stream);
            let mut reducer = builder.build(comm).unwrap();
            let at = device.allocate(200_000).unwrap();
            comm.barrier().unwrap();
            if comm.rank() == 0 {
                device.fails_after.store(after, Ordering::SeqCst);
            }
            comm.barrier().unwrap();
            let mut step = || -> Result<()> {
                reducer.start(true)?;
                for index in [1, 0] {
                    // SAFETY: it is not freed.
                    if let Err(error) = unsafe { reducer.put_on_device(index, at) } {
                        assert!(matches!(error, Error::Device { .. }), "{error:?}");
                        // SAFETY: as above. It fails once.
                        unsafe { reducer.put_on_device(index, at)? };
                    }
                }
                reducer.finish()
            };
            // A rank that has done its part before the other one fails hears of it in its next call.
            let result = step().and_then(|()| comm.barrier());
            device.synchronise(stream);
            result.map_err(|error| error.to_string())
        });
        // Either it went well on both, or both say something.
        assert_eq!(failed[0].is_err(), failed[1].is_err(), "after {after}: {failed:?}");
        ends[usize::from(failed[0].is_err())] += 1;
    }
    assert!(ends[0] > 0 && ends[1] > 0, "{ends:?}");
}
