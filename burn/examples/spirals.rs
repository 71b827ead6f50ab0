//! Trains a classifier of points on three spirals, data parallel.
//!
//! `cargo build --release --example spirals`, then `kolo run -n 4 -- target/release/examples/spirals
//! [STEPS]`. Rank 0 also trains the same network alone, with the samples of all ranks, and fails if a
//! loss differs. In the end all ranks have the same bits.

use std::process::ExitCode;

use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::relu};
use kolo::{Communicator, ReduceOp};
use kolo_burn::DataParallel;

type Error = Box<dyn std::error::Error + Send + Sync>;

const CLASSES: usize = 3;
/// Samples of all ranks in a step.
const BATCH: usize = 240;
/// The largest relative difference between a loss of all ranks and that of one rank, which adds in
/// another order.
const TOLERANCE: f32 = 1e-3;

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Network {
    fn new(device: &Device) -> Network {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Network { first: linear(2, 64), second: linear(64, 64), third: linear(64, CLASSES) }
    }

    fn loss(&self, (points, classes): (Tensor<2>, Tensor<1, Int>)) -> Tensor<1> {
        let hidden = relu(self.second.forward(relu(self.first.forward(points))));
        CrossEntropyLossConfig::new().init(&hidden.device()).forward(self.third.forward(hidden), classes)
    }

    /// Returns the parameters.
    fn values(&self) -> Result<Vec<f32>, Error> {
        let mut values = Vec::new();
        for linear in [&self.first, &self.second, &self.third] {
            values.extend_from_slice(linear.weight.val().try_into_data()?.as_slice::<f32>()?);
            if let Some(bias) = linear.bias.as_ref().map(Param::val) {
                values.extend_from_slice(bias.try_into_data()?.as_slice::<f32>()?);
            }
        }
        Ok(values)
    }
}

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
    let steps = std::env::args()
        .nth(1)
        .map_or(Ok(100), |steps| steps.parse::<usize>().map_err(|_| format!("{steps}: give a number of steps")))?;
    let comm = Communicator::from_env()?;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let device = Device::flex().autodiff();

    let (mut parallel, mut network) = DataParallel::new(&comm, Network::new(&device))?;
    let mut optimizer = AdamConfig::new().init();
    let mut alone = (rank == 0).then(|| (network.clone(), AdamConfig::new().init()));
    // The average of the ranks' mean losses is the loss of all samples only if each rank has equally
    // many.
    let each = BATCH / world_size;
    let mut losses = Vec::new();
    for step in 0..steps {
        let begin = step * each * world_size;
        let loss = network.loss(samples(begin + rank * each, each, &device));
        let mut mean = [scalar(&loss)?];
        let gradients = GradientsParams::from_grads(loss.backward(), &network);
        let gradients = parallel.average(gradients)?;
        network = optimizer.step(0.01, network, gradients);

        comm.all_reduce(&mut mean, ReduceOp::Average)?;
        losses.push(mean[0]);
        if let Some((network, optimizer)) = &mut alone {
            let loss = network.loss(samples(begin, each * world_size, &device));
            let expected = scalar(&loss)?;
            // NaN is not close.
            let is_close = (mean[0] - expected).abs() <= TOLERANCE * expected.max(0.1);
            if !is_close {
                return Err(format!("step {step}: the loss of the ranks is {}, that of one rank {expected}", mean[0]).into());
            }
            let gradients = GradientsParams::from_grads(loss.backward(), network);
            *network = optimizer.step(0.01, network.clone(), gradients);
        }
    }

    let bits: Vec<u32> = network.values()?.into_iter().map(f32::to_bits).collect();
    let mut of_rank_0 = bits.clone();
    comm.broadcast(&mut of_rank_0, 0)?;
    if bits != of_rank_0 {
        return Err(format!("rank {rank}: the parameters differ from those of rank 0").into());
    }
    comm.barrier()?;
    if let (0, Some(first), Some(last)) = (rank, losses.first(), losses.last()) {
        println!("{world_size} ranks, {steps} steps: the loss went from {first:.3} to {last:.3}, as on one rank");
        println!("all ranks have the same {} parameters", bits.len());
    }
    Ok(())
}

fn scalar(loss: &Tensor<1>) -> Result<f32, Error> {
    let data = loss.clone().inner().try_into_data()?;
    Ok(*data.as_slice::<f32>()?.first().ok_or("a loss is a number")?)
}

/// Returns points on the spirals and the number of the spiral of each.
fn samples(first: usize, count: usize, device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let class = |number: usize| number % CLASSES;
    let point = |number: usize| {
        // The golden ratio spreads the points evenly (Weyl 1916).
        let radius = (number as f32 * 0.618_034).fract();
        let angle = 4.0 * radius + class(number) as f32 * std::f32::consts::TAU / CLASSES as f32;
        [radius * angle.cos(), radius * angle.sin()]
    };
    let numbers = first..first + count;
    let points: Vec<f32> = numbers.clone().flat_map(point).collect();
    let classes: Vec<i64> = numbers.map(|number| class(number) as i64).collect();
    let points = Tensor::from_data(TensorData::new(points, [count, 2]), device);
    (points, Tensor::from_data(TensorData::new(classes, [count]), device))
}
