//! Data-parallel training with candle: each rank has its own samples, and kolo averages the
//! gradients that candle's backward pass computes.
//!
//! `kolo run -n 2 -- cargo run --manifest-path examples/candle/Cargo.toml [STEPS]`. Rank 0 trains the
//! same network with the samples of all ranks as well, and fails if the results differ.

use std::process::ExitCode;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
use kolo::Communicator;
use kolo::ddp::{Parameter, Reducer, TensorMut};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Samples of each rank.
const SAMPLES: usize = 64;
const INPUTS: usize = 8;
const HIDDEN: usize = 64;
const RATE: f64 = 0.1;
/// The largest relative difference between a loss of all ranks and that of one rank, which adds in
/// another order.
const TOLERANCE: f32 = 1e-3;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let steps =
        std::env::args().nth(1).map_or(Ok(200), |steps| steps.parse().map_err(|_| format!("{steps}: give a number of steps")))?;
    let comm = Communicator::from_env()?;
    let mut network = Network::new()?;

    let parameters = network.parameters.iter().map(|(name, var)| Parameter::new(name, var.dims(), kolo::DType::F32));
    // Buckets of 16 KiB: the small network has several.
    let options = Reducer::builder().parameters(parameters).bucket_bytes(16 << 10).first_bucket_bytes(4 << 10);
    let mut reducer = options.build(&comm)?;
    network.broadcast(&mut reducer)?;
    // Rank 0 trains a copy of the same network with the samples of all ranks.
    let mut alone = if comm.rank() == 0 { Some(network.copy()?) } else { None };

    let (inputs, targets) = samples(comm.rank()..comm.rank() + 1)?;
    let everything = samples(0..comm.world_size())?;
    let mut optimizer = network.optimizer()?;
    let mut optimizer_alone = alone.as_mut().map(Network::optimizer).transpose()?;
    let mut losses = [0.0f32; 2];
    for step in 0..steps {
        let loss = network.loss(&inputs, &targets)?;
        let mut gradients = loss.backward()?;
        average(&mut reducer, &network, &mut gradients)?;
        optimizer.step(&gradients)?;

        let mut now = [loss.to_scalar::<f32>()?];
        comm.all_reduce(&mut now, kolo::ReduceOp::Average)?;
        if let (Some(alone), Some(optimizer)) = (&alone, &mut optimizer_alone) {
            let loss = alone.loss(&everything.0, &everything.1)?;
            optimizer.backward_step(&loss)?;
            let expected = loss.to_scalar::<f32>()?;
            // NaN is not close.
            let is_close = (now[0] - expected).abs() <= TOLERANCE * expected.abs();
            if !is_close {
                return Err(format!("step {step}: the loss of the ranks is {}, that of one rank {expected}", now[0]).into());
            }
        }
        losses[usize::from(step > 0)] = now[0];
    }
    network.expect_equal(&comm)?;
    if comm.rank() == 0 {
        println!(
            "{} ranks, {steps} steps: the loss went from {:.4} to {:.4}, as on one rank; all ranks have the same parameters",
            comm.world_size(),
            losses[0],
            losses[1]
        );
    }
    Ok(())
}

/// Replaces the gradients by their averages over all ranks.
fn average(reducer: &mut Reducer, network: &Network, gradients: &mut GradStore) -> Result<(), Error> {
    let step = reducer.begin()?;
    // The backward pass computes the gradient of the last layer first. As soon as a bucket is full,
    // a thread of the reducer averages it, while the next gradients are copied.
    for (number, (name, var)) in network.parameters.iter().enumerate().rev() {
        let gradient = gradients.get(var).ok_or_else(|| format!("{name} has no gradient"))?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(memory)) = &*storage else { return Err("the gradients are f32 on the CPU".into()) };
        // A gradient may be a transposed view: kolo gathers it into the bucket in one pass.
        step.put_strided(number, &memory[layout.start_offset()..], layout.stride())?;
    }
    step.finish()?;
    for (number, (_, var)) in network.parameters.iter().enumerate() {
        let average = Tensor::from_slice(reducer.gradient::<f32>(number)?, var.dims(), &Device::Cpu)?;
        gradients.insert(var, average);
    }
    Ok(())
}

/// A network with two hidden layers.
struct Network {
    layers: [Linear; 3],
    /// In the same order on all ranks: candle keeps them in a map, whose order differs between
    /// processes.
    parameters: Vec<(String, Var)>,
}

impl Network {
    fn new() -> Result<Network, Error> {
        let map = VarMap::new();
        let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let layers = [
            linear(INPUTS, HIDDEN, builder.pp("layer1"))?,
            linear(HIDDEN, HIDDEN, builder.pp("layer2"))?,
            linear(HIDDEN, 1, builder.pp("layer3"))?,
        ];
        let mut parameters: Vec<_> = match map.data().lock() {
            Ok(map) => map.iter().map(|(name, var)| (name.clone(), var.clone())).collect(),
            Err(_) => return Err("a thread panicked while it held the parameters".into()),
        };
        parameters.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(Network { layers, parameters })
    }

    /// Returns another network with the same values.
    fn copy(&self) -> Result<Network, Error> {
        let copy = Network::new()?;
        for ((_, to), (_, from)) in copy.parameters.iter().zip(&self.parameters) {
            to.set(&from.as_tensor().copy()?)?;
        }
        Ok(copy)
    }

    /// Gives all ranks the parameters of rank 0.
    fn broadcast(&mut self, reducer: &mut Reducer) -> Result<(), Error> {
        let mut values = Vec::new();
        for (_, var) in &self.parameters {
            values.push(var.flatten_all()?.to_vec1::<f32>()?);
        }
        reducer.broadcast_parameters(&mut values.iter_mut().map(TensorMut::from).collect::<Vec<_>>())?;
        for ((_, var), values) in self.parameters.iter().zip(values) {
            var.set(&Tensor::from_vec(values, var.dims(), &Device::Cpu)?)?;
        }
        Ok(())
    }

    fn optimizer(&mut self) -> Result<SGD, Error> {
        Ok(SGD::new(self.parameters.iter().map(|(_, var)| var.clone()).collect(), RATE)?)
    }

    fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor, Error> {
        let [first, second, third] = &self.layers;
        let hidden = second.forward(&first.forward(inputs)?.tanh()?)?.tanh()?;
        Ok(loss::mse(&third.forward(&hidden)?, targets)?)
    }

    /// Fails unless all ranks have the same bits.
    fn expect_equal(&self, comm: &Communicator) -> Result<(), Error> {
        for (name, var) in &self.parameters {
            let bits: Vec<u32> = var.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect();
            let mut of_rank_0 = bits.clone();
            comm.broadcast(&mut of_rank_0, 0)?;
            if bits != of_rank_0 {
                return Err(format!("rank {}: {name} differs from that of rank 0", comm.rank()).into());
            }
        }
        Ok(())
    }
}

/// Returns the samples of these ranks: points, and a smooth function of them.
fn samples(ranks: std::ops::Range<usize>) -> Result<(Tensor, Tensor), Error> {
    let rows = ranks.start * SAMPLES..ranks.end * SAMPLES;
    let count = rows.len();
    let point = |row: usize| (0..INPUTS).map(move |input| ((row * INPUTS + input) as f32 * 0.754_877_7).fract() * 2.0 - 1.0);
    let inputs: Vec<f32> = rows.clone().flat_map(point).collect();
    let targets: Vec<f32> = rows.map(|row| (3.0 * point(row).sum::<f32>()).sin()).collect();
    Ok((Tensor::from_vec(inputs, (count, INPUTS), &Device::Cpu)?, Tensor::from_vec(targets, (count, 1), &Device::Cpu)?))
}
