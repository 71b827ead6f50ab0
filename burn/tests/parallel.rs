//! Ranks as threads of one process.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, Tolerance};
use kolo::ddp::{BufferSync, Compress, Reducer, Uneven, Unused};
use kolo::{Communicator, ReducerError};
use kolo_burn::{DataParallel, Error};

/// Runs a function on each rank and returns the results in order.
fn on_ranks<R: Send>(world_size: usize, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let comms = Communicator::in_process(world_size).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// Returns a tensor that differs between seeds.
fn values<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 101) % 64) as f32 / 32.0 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn floats<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().inner().into_data_as::<f32>().as_slice::<f32>().unwrap().to_vec()
}

fn close(one: &[f32], other: &[f32], tolerance: f32) {
    assert_eq!(one.len(), other.len());
    let largest = one.iter().zip(other).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(largest <= tolerance, "{largest}: {one:?} {other:?}");
}

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    second: Linear,
}

impl Network {
    fn new(seed: usize, device: &Device) -> Network {
        let linear = |inputs, outputs, seed| {
            let mut linear = LinearConfig::new(inputs, outputs).init(device);
            linear.weight = linear.weight.map(|weight| values(weight.dims(), seed, device).require_grad());
            linear.bias = linear.bias.map(|bias| bias.map(|bias| values(bias.dims(), seed, device).require_grad()));
            linear
        };
        Network { first: linear(4, 8, seed), second: linear(8, 2, seed + 1) }
    }

    fn loss(&self, samples: Tensor<2>) -> Tensor<1> {
        self.second.forward(self.first.forward(samples).tanh()).powi_scalar(2).mean()
    }

    fn gradients(&self, samples: Tensor<2>) -> GradientsParams {
        GradientsParams::from_grads(self.loss(samples).backward(), self)
    }

    fn bits(&self) -> Vec<u32> {
        let biases = [&self.first, &self.second].map(|linear| floats(&linear.bias.as_ref().unwrap().val()));
        let weights = [&self.first, &self.second].map(|linear| floats(&linear.weight.val()));
        weights.concat().into_iter().chain(biases.concat()).map(f32::to_bits).collect()
    }
}

#[test]
fn training_is_as_on_one_rank_with_all_samples_and_parameters_are_bit_equal() {
    const STEPS: usize = 20;
    const WORLD: usize = 3;
    let device = device();
    let mut alone = Network::new(0, &device);
    let mut optimizer = AdamConfig::new().init();
    let expected: Vec<f32> = (0..STEPS)
        .map(|_| {
            let samples = Tensor::cat((0..WORLD).map(|rank| values([5, 4], rank, &device)).collect(), 0);
            let loss = alone.loss(samples.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &alone);
            alone = optimizer.step(0.01, alone.clone(), gradients);
            floats(&loss)[0]
        })
        .collect();

    let ranks = on_ranks(WORLD, |comm| {
        // Each rank begins with other parameters.
        let model = Network::new(10 * comm.rank(), &device);
        let options = Reducer::builder().first_bucket_bytes(16).bucket_bytes(64);
        let (mut parallel, mut model) = DataParallel::with(options, &comm, model).unwrap();
        let mut optimizer = AdamConfig::new().init();
        let samples = values([5, 4], comm.rank(), &device);
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let loss = model.loss(samples.clone());
            losses.push(floats(&loss)[0]);
            let gradients = parallel.average(GradientsParams::from_grads(loss.backward(), &model)).unwrap();
            model = optimizer.step(0.01, model, gradients);
        }
        assert!(parallel.reducer().statistics().buckets.len() > 1);
        (losses, model.bits())
    });
    assert!(ranks.iter().all(|rank| rank.1 == ranks[0].1), "parameters differ in some bit");
    let mean = |step: usize| ranks.iter().map(|rank| rank.0[step]).sum::<f32>() / WORLD as f32;
    close(&(0..STEPS).map(mean).collect::<Vec<_>>(), &expected, 1e-4);
    assert!(expected[STEPS - 1] < expected[0]);
    let bits = |bits: &[u32]| bits.iter().copied().map(f32::from_bits).collect::<Vec<_>>();
    close(&bits(&ranks[0].1), &bits(&alone.bits()), 1e-3);
}

#[test]
fn segments_give_the_same_gradients_as_one_backward_pass() {
    let device = device();
    on_ranks(2, |comm| {
        let (mut parallel, model) = DataParallel::new(&comm, Network::new(3, &device)).unwrap();
        let samples = values([5, 4], comm.rank(), &device);
        for _ in 0..3 {
            let whole = parallel.average(model.gradients(samples.clone())).unwrap();

            let hidden = model.first.forward(samples.clone()).tanh();
            let cut = hidden.clone().detach().require_grad();
            let loss = model.second.forward(cut.clone()).powi_scalar(2).mean();
            let parts = parallel
                .step(|step| {
                    let mut gradients = loss.backward();
                    step.put(GradientsParams::from_module(&mut gradients, &model.second))?;
                    let gradient = cut.grad_remove(&mut gradients).unwrap();
                    let rest = (hidden * Tensor::from_inner(gradient)).sum();
                    step.put(GradientsParams::from_grads(rest.backward(), &model.first))
                })
                .unwrap();
            for linear in [&model.first, &model.second] {
                let of = |gradients: &GradientsParams| floats(&gradients.get::<2>(linear.weight.id).unwrap());
                close(&of(&whole), &of(&parts), 1e-6);
            }
        }
    });
}

#[test]
fn a_second_gradient_for_a_parameter_is_refused() {
    let comm = Communicator::in_process(1).unwrap().remove(0);
    let (mut parallel, model) = DataParallel::new(&comm, Network::new(3, &device())).unwrap();
    let gradients = || model.gradients(values([5, 4], 0, &device()));
    let twice = parallel.step(|step| {
        step.put(gradients())?;
        step.put(gradients())
    });
    let Err(Error::Kolo(kolo::Error::Reducer { problem, .. })) = &twice else { panic!("{twice:?}") };
    assert!(matches!(&**problem, ReducerError::Twice { name } if name == "second.bias"), "{problem}");
}

#[derive(Module, Debug)]
struct Mixed {
    single: Param<Tensor<2>>,
    double: Param<Tensor<1>>,
    half: Param<Tensor<3>>,
    brain: Param<Tensor<1>>,
    frozen: Param<Tensor<1>>,
    count: Param<Tensor<1, Int>>,
}

#[test]
fn parameters_of_every_float_type_are_broadcast_and_averaged() {
    fn of<const D: usize>(shape: [usize; D], dtype: DType, seed: usize) -> Param<Tensor<D>> {
        let device = device();
        let tensor = Tensor::from_data(values(shape, seed, &device.clone().inner()).into_data(), (&device, dtype));
        Param::from_tensor(tensor)
    }
    on_ranks(3, |comm| {
        let rank = comm.rank();
        let count = Tensor::<1, Int>::from_data([1 + rank as i64, 7], &device());
        let model = Mixed {
            single: of([2, 3], DType::F32, rank),
            double: of([5], DType::F64, rank),
            half: of([2, 1, 2], DType::F16, rank),
            brain: of([3], DType::BF16, rank),
            frozen: of([4], DType::F32, rank).set_require_grad(false),
            count: Param::initialized(ParamId::new(), count),
        };
        let (mut parallel, model) = DataParallel::new(&comm, model).unwrap();
        let dtypes: Vec<_> = parallel.reducer().parameters().iter().map(|one| one.dtype).collect();
        assert_eq!(dtypes, [kolo::DType::F32, kolo::DType::F64, kolo::DType::F16, kolo::DType::BF16]);
        assert_eq!(parallel.reducer().parameters()[2].name, "half");
        assert_eq!(parallel.reducer().buffers().len(), 2);

        // The values, types and flags of rank 0.
        let expect = values([5], 0, &device().inner()).into_data();
        assert_eq!(model.double.val().dtype(), DType::F64);
        model.double.val().inner().into_data_as::<f32>().assert_approx_eq::<f32>(&expect, Tolerance::default());
        close(&floats(&model.half.val()), &floats(&values([4], 0, &device())), 1e-3);
        close(&floats(&model.frozen.val()), &floats(&values([4], 0, &device())), 0.0);
        assert!(model.single.is_require_grad() && !model.frozen.is_require_grad());
        model.count.val().into_data().assert_eq(&TensorData::from([1i64, 7]), false);

        // Each loss is linear, so that gradients are 1, 2, 3 and 4 times the number of the rank.
        let factor = (rank + 1) as f32;
        let part = |tensor: Tensor<1>, times: f32| tensor.cast(FloatDType::F32).sum() * (times * factor);
        let loss = part(model.single.val().reshape([6]), 1.0)
            + part(model.double.val(), 2.0)
            + part(model.half.val().reshape([4]), 3.0)
            + part(model.brain.val(), 4.0);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let averages = parallel.average(gradients).unwrap();
        assert_eq!(averages.len(), 4);
        let (half, brain) = (averages.get::<3>(model.half.id).unwrap(), averages.get::<1>(model.brain.id).unwrap());
        assert_eq!((half.dtype(), brain.dtype()), (DType::F16, DType::BF16));
        assert_eq!((half.dims(), half.device().is_autodiff()), ([2, 1, 2], false));
        assert_eq!(floats(&averages.get::<2>(model.single.id).unwrap()), [2.0; 6]);
        assert_eq!(floats(&averages.get::<1>(model.double.id).unwrap()), [4.0; 5]);
        assert_eq!(floats(&half), [6.0; 4]);
        assert_eq!(floats(&brain), [8.0; 3]);
    });
}

#[test]
fn a_parameter_without_a_gradient_is_an_error_or_counts_as_zeros() {
    let device = device();
    on_ranks(2, |comm| {
        let (mut parallel, model) = DataParallel::new(&comm, Network::new(0, &device)).unwrap();
        // Rank 1 uses the first layer alone.
        let samples = values([5, 4], 0, &device);
        let loss = match comm.rank() {
            0 => model.loss(samples),
            _ => model.first.forward(samples).sum(),
        };
        let error = parallel.average(GradientsParams::from_grads(loss.backward(), &model)).unwrap_err();
        let text = error.to_string();
        match comm.rank() {
            0 => assert!(text.contains("rank 1"), "{text}"),
            _ => assert!(text.contains("second.weight and 1 more are not ready"), "{text}"),
        }
    });
    on_ranks(2, |comm| {
        let options = Reducer::builder().unused(Unused::Find);
        let (mut parallel, model) = DataParallel::with(options, &comm, Network::new(0, &device)).unwrap();
        let sum = |linear: &Linear, inputs: usize| linear.forward(Tensor::<2>::ones([1, inputs], &device)).sum();
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..2 {
            // In the first step only rank 0 uses the second layer, in the next step no rank does.
            let loss = sum(&model.first, 4);
            let loss = if comm.rank() == 0 { loss + sum(&model.second, 8) } else { loss };
            let averages = parallel.average(GradientsParams::from_grads(loss.backward(), &model)).unwrap();
            assert_eq!(floats(&averages.get::<2>(model.first.weight.id).unwrap()), [1.0; 32]);
            assert_eq!(floats(&averages.get::<2>(model.second.weight.id).unwrap()), [0.5; 16]);

            let loss = sum(&model.first, 4);
            let averages = parallel.average(GradientsParams::from_grads(loss.backward(), &model)).unwrap();
            assert_eq!(averages.len(), 2);
            let next = optimizer.step(1.0, model.clone(), averages);
            assert_eq!(floats(&next.second.weight.val()), floats(&model.second.weight.val()));
        }
    });
}

#[derive(Module, Debug)]
struct Tied {
    encoder: Linear,
    decoder: Linear,
}

#[test]
fn a_shared_parameter_counts_once_with_the_sum_of_its_gradients() {
    let device = device();
    on_ranks(2, |comm| {
        let linear = LinearConfig::new(4, 4).with_bias(false).init(&device);
        // A clone has the same parameter.
        let (mut parallel, model) = DataParallel::new(&comm, Tied { decoder: linear.clone(), encoder: linear }).unwrap();
        assert_eq!(parallel.reducer().parameters().len(), 1);
        assert_eq!(floats(&model.encoder.weight.val()), floats(&model.decoder.weight.val()));
        let loss = |samples: Tensor<2>| {
            // The first layer is used twice.
            model.encoder.forward(model.encoder.forward(samples).tanh()).powi_scalar(2).sum()
        };
        let samples = |rank| values([3, 4], rank, &device);
        let gradients = GradientsParams::from_grads(loss(samples(comm.rank())).backward(), &model);
        let averages = parallel.average(gradients).unwrap();
        let both = GradientsParams::from_grads((loss(samples(0)) + loss(samples(1))).backward(), &model);
        let of = |gradients: &GradientsParams| gradients.get::<2>(model.encoder.weight.id).unwrap();
        close(&floats(&of(&averages)), &floats(&(of(&both) / 2.0)), 1e-5);
    });
}

#[test]
fn buffers_are_averaged_with_the_batches_that_each_rank_has_seen() {
    #[derive(Module, Debug)]
    struct Normalised {
        norm: BatchNorm,
    }
    let device = device();
    on_ranks(2, |comm| {
        let config = BatchNormConfig::new(3).with_momentum(1.0);
        let (mut parallel, model) = DataParallel::new(&comm, Normalised { norm: config.init(&device) }).unwrap();
        assert_eq!(parallel.reducer().buffers().len(), 2);
        // Rank 0 sees the mean 2, rank 1 the mean 4.
        let samples = Tensor::<2>::full([4, 3], (2 * comm.rank() + 2) as f32, &device);
        let loss = model.norm.forward(samples).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        parallel.average(gradients).unwrap();
        let model = parallel.sync_buffers(model, BufferSync::Average).unwrap();
        assert_eq!(floats(&model.norm.running_mean.value()), [3.0; 3]);
        assert_eq!(floats(&model.valid().norm.running_mean.value()), [3.0; 3]);
    });
}

#[test]
fn a_rank_with_another_model_is_named() {
    let device = device();
    let texts = on_ranks(3, |comm| {
        let linear = LinearConfig::new(4, if comm.rank() == 1 { 5 } else { 4 }).init(&device);
        DataParallel::new(&comm, linear).map(|_| ()).unwrap_err().to_string()
    });
    for text in texts {
        assert!(text.contains("rank 1") && text.contains("weight") && text.contains("[4, 5]"), "{text}");
    }
}

#[test]
fn wrong_models_and_gradients_are_refused() {
    let device = device();
    let comm = Communicator::in_process(1).unwrap().remove(0);
    let frozen = Network::new(0, &device).no_grad();
    assert!(matches!(DataParallel::new(&comm, frozen), Err(Error::NoGradients)));

    let (mut parallel, model) = DataParallel::new(&comm, Network::new(0, &device)).unwrap();
    let other = Network::new(0, &device);
    let error = parallel.broadcast(other.clone()).unwrap_err();
    assert!(matches!(error, Error::Model { what: "parameters", expected: 4, given: 0 }), "{error}");
    // It changed nothing.
    let model = parallel.broadcast(model).unwrap();
    let error = parallel.average(other.gradients(values([5, 4], 0, &device))).unwrap_err();
    assert!(matches!(error, Error::Unknown { count: 4 }), "{error}");
    // The step was dropped, which ends the reducer.
    let error = parallel.average(model.gradients(values([5, 4], 0, &device))).unwrap_err();
    assert!(matches!(error, Error::Kolo(_)), "{error}");
}

#[test]
fn a_rank_that_leaves_is_named_and_the_communicator_stays_usable() {
    let device = device();
    on_ranks(3, |comm| {
        let (mut parallel, model) = DataParallel::new(&comm, Network::new(0, &device)).unwrap();
        let gradients = || model.gradients(values([5, 4], 0, &device));
        parallel.average(gradients()).unwrap();
        if comm.rank() == 2 {
            drop(parallel);
        } else {
            let error = (0..2).find_map(|_| parallel.average(gradients()).err()).unwrap();
            assert!(error.to_string().contains("rank 2"), "{error}");
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn ranks_with_fewer_samples_join() {
    let device = device();
    let ranks = on_ranks(2, |comm| {
        let options = Reducer::builder().uneven(Uneven::ByRanksWithInput);
        let (mut parallel, mut model) = DataParallel::with(options, &comm, Network::new(0, &device)).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..2 + comm.rank() {
            let gradients = parallel.average(model.gradients(values([5, 4], comm.rank(), &device))).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        let mut model = Some(model);
        let joined = parallel.join(|gradients| {
            model = model.take().map(|model| optimizer.step(0.1, model, gradients));
            Ok(())
        });
        assert_eq!(joined.unwrap().steps, 1 - comm.rank() as u64);
        model.unwrap().bits()
    });
    assert_eq!(ranks[0], ranks[1]);
}

#[test]
fn compressed_gradients_are_close() {
    let device = device();
    on_ranks(2, |comm| {
        let options = Reducer::builder().hook(Compress::bf16());
        let (mut parallel, model) = DataParallel::with(options, &comm, Network::new(0, &device)).unwrap();
        let samples = values([5, 4], 0, &device);
        let expected = floats(&model.gradients(samples.clone()).get::<2>(model.first.weight.id).unwrap());
        let averages = parallel.average(model.gradients(samples)).unwrap();
        close(&floats(&averages.get::<2>(model.first.weight.id).unwrap()), &expected, 0.01);
    });
}
